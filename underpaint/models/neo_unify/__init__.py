"""SenseNova-U1 and U1.5 (NEO-Unify): one model that understands, talks, paints and edits.

``load`` gives a ``NeoUnify``: tokenizer, network, and the way from passages to rows. ``guidance`` says which branches a
picture needs, ``prompt`` what they read, ``flow`` how noise becomes a picture; ``driver`` puts them together.
"""

from underpaint.models.neo_unify.config import CELL, MAX_SIDE
from underpaint.models.neo_unify.flow import FlowSampler
from underpaint.models.neo_unify.guidance import EditGuidance, PaintGuidance
from underpaint.models.neo_unify.model import Checkpoint, Condition, NeoUnify, inspect, load, skeleton
from underpaint.models.neo_unify.prompt import Passage
from underpaint.models.neo_unify.vision import Picture
from underpaint.models.roles import BOTH_ROLES, Role

__all__ = [
    "BOTH_ROLES",
    "CELL",
    "MAX_SIDE",
    "Checkpoint",
    "Condition",
    "EditGuidance",
    "FlowSampler",
    "NeoUnify",
    "PaintGuidance",
    "Passage",
    "Picture",
    "Role",
    "inspect",
    "load",
    "skeleton",
]
