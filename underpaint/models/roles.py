"""What a process does with a model; one may do both."""

from enum import Enum


class Role(Enum):
    """Which weights a row goes through: those that read, or those that paint. The value ends the names of NEO-Unify's
    modules for it."""

    UNDERSTAND = ""
    GENERATE = "_mot_gen"


BOTH_ROLES = frozenset(Role)
