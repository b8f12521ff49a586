"""Whether passes of a kind are captured, and with what."""

from dataclasses import dataclass
from typing import Any

from underpaint.capture.attention import GraphAttention, Planned, Replanned
from underpaint.capture.recorder import CudaRecorder, Recorder, run_again
from underpaint.config import EngineConfig
from underpaint.errors import BadConfig

PLANNED_BACKENDS = ("triton", "gluon", "fp8")


@dataclass(frozen=True, eq=False)
class Means:
    """What captures."""

    attention: GraphAttention
    record: Recorder


def choose_means(option: str, value: str, capturable: bool, prepare: Any, config: EngineConfig) -> Means | None:
    """``option``: the name of the field of ``config`` whose ``value`` asks: ``off``, ``auto`` (where they can be
    captured on a GPU) or ``on``. ``capturable``: whether the network lets itself be captured. None: passes run as they
    are. Raises BadConfig where ``on`` asks for what cannot be."""
    if value == "off" or "dit" in config.offloaded:
        return None
    if not config.device.startswith("cuda"):
        return None if value == "auto" else Means(Replanned(prepare), run_again)
    if config.attention_backend in PLANNED_BACKENDS and capturable:
        return Means(Planned(prepare), CudaRecorder(config.device))
    if value == "on":
        raise BadConfig(
            f"{option} is on, and this model cannot be captured with attention_backend {config.attention_backend}; use "
            f"one of {', '.join(PLANNED_BACKENDS)}, or {option} auto"
        )
    return None
