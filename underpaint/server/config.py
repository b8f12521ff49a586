"""What a server promises and what it refuses: frozen, checked once."""

import re
from dataclasses import dataclass, field
from typing import Literal

from underpaint.errors import BadConfig

Priority = Literal["low", "normal", "high"]
Kind = Literal["text", "painting"]
"""Of a request: an answer in words alone, or anything that may come to be painted."""
LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
DOMAIN = re.compile(rf"(\*\.)?({LABEL}\.)+(?!\d+$|0x){LABEL}", re.IGNORECASE)
"""A name of two labels or more, the last not a number: what ends in a number is an address."""


@dataclass(frozen=True)
class ServerConfig:
    """Limits of a server. Bytes, seconds and pixels as the names say.

    ``model_id`` is the name that clients use. ``max_running`` paintings and ``max_talking`` answers in text are worked
    at once, ``max_waiting`` more of each may wait, and all of them together hold at most ``max_held_bytes`` of uploaded
    pictures, and of bodies that are not complete; who comes then is told to come again. ``timeout_seconds`` is the
    whole time of a request, waiting included; at its end the work is cancelled. A body may take as long to come.
    Pictures are fetched by URL from ``allowed_media_domains`` only: names such as ``example.com``, or
    ``*.example.com`` for every name below it; ``fetch_seconds`` is how long all those of a request may take.
    ``round_sizes`` paints the next smaller legal size instead of refusing one. A job that is not detached is cancelled
    when nobody asked for it for ``job_idle_seconds``; ended jobs are kept for ``kept_job_seconds``, the newest of them
    up to ``kept_job_bytes``.
    """

    model_id: str
    api_key: str | None = field(default=None, repr=False)
    max_running: int = 8
    max_talking: int = 32
    max_waiting: int = 64
    max_held_bytes: int = 1 << 30
    timeout_seconds: float = 600.0
    warmup_seconds: float = 300.0
    drain_seconds: float = 30.0
    max_body_bytes: int = 256 << 20
    max_image_bytes: int = 50 << 20
    allowed_media_domains: tuple[str, ...] = ()
    fetch_seconds: float = 10.0
    max_image_pixels: int = 64 << 20
    max_output_pixels: int = 4096 * 4096
    max_steps: int = 1000
    round_sizes: bool = False
    job_idle_seconds: float = 15.0
    kept_job_seconds: float = 600.0
    kept_job_bytes: int = 256 << 20

    @property
    def num_hands(self) -> int:
        """How many requests of all kinds are worked at once: each by a thread."""
        return self.max_running + self.max_talking

    def __post_init__(self) -> None:
        if not self.model_id:
            raise BadConfig("model_id must not be empty")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise BadConfig("api_key must be a non-empty ASCII text")
        for domain in self.allowed_media_domains:
            if not DOMAIN.fullmatch(domain):
                raise BadConfig(f"allowed_media_domains: {domain!r} is not a name such as example.com or *.example.com")
        if self.max_waiting < 0:
            raise BadConfig("max_waiting cannot be negative")
        for name, value in vars(self).items():
            if not isinstance(value, bool) and isinstance(value, int | float) and name != "max_waiting" and value <= 0:
                raise BadConfig(f"{name} must be above 0, not {value}")
