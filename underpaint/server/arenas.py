"""The arenas of two workers: each writes its own, reads the other's, and has both pinned where there is a card."""

from underpaint.handover.arena import Arena, ArenaReader
from underpaint.handover.memory import Memory

NO_DEADLINE_SECONDS = 3600.0
"""How long what is handed over stays readable for an order without a deadline."""


def make_arena(num_bytes: int, device: str) -> Arena:
    """Raises BadConfig for more than the machine has left."""
    arena = Arena(num_bytes)
    if device.startswith("cuda"):
        arena.memory.register()
    return arena


def open_arena(fd: int, device: str) -> ArenaReader:
    """The arena of the other process. Takes over ``fd``. Raises BadHandover."""
    memory = Memory(fd)
    if device.startswith("cuda"):
        memory.register()
    return ArenaReader(memory)
