"""What can go wrong between two processes, beside the tree of ``errors.py``."""

import torch

from underpaint.errors import EngineFailure, OutOfMemory, UnderpaintError


class ArenaFull(UnderpaintError):
    """No slab of that size became free in time."""

    code = "arena_full"
    status = 503


class StaleSlab(UnderpaintError):
    """The lease of a slab ended while somebody still meant to use it."""

    code = "stale_slab"
    status = 503


class DamagedSlab(UnderpaintError):
    """The bytes of a slab are not those that were written."""

    code = "damaged_slab"


class PeerGone(UnderpaintError):
    """The process at the other end has ended, or closed the channel."""

    code = "peer_gone"
    status = 503


class PeerStalled(UnderpaintError):
    """The process at the other end lives and does not do its part in time."""

    code = "peer_stalled"
    status = 503


class GarbledFrame(UnderpaintError):
    """What arrived is not a message of this channel; the channel cannot be used any more."""

    code = "garbled_frame"


class BadHandover(UnderpaintError):
    """What was handed over contradicts itself, or does not fit the receiver."""

    code = "bad_handover"


def as_ours(error: BaseException, doing: str) -> UnderpaintError:
    """What broke while ``doing`` something for an order, as what the order is told: it fails alone."""
    if isinstance(error, UnderpaintError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemory(f"the device ran out of memory while {doing}: ask for fewer or smaller pictures")
    failure = EngineFailure(f"{doing} broke: {error}")
    failure.__cause__ = error
    return failure
