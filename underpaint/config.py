"""Engine options: frozen, and resolved once at start by pure functions."""

import os
from dataclasses import dataclass, replace

import torch

from underpaint.errors import BadConfig

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_CODECS = ("fp32", "fp16", "bf16", "fp8_v", "fp8")
ATTENTION_BACKENDS = ("reference", "piecewise", "triton")
# The share of free memory given to pages when no byte budget is named: on a CPU the pages are committed only when
# written; on a GPU the rest is for the activations of a pass and the VAE.
AUTO_CACHE_SHARE = {"cpu": 0.25, "cuda": 0.5}


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model. ``auto`` values are settled by ``resolve``.

    ``device``: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``dtype``: ``auto`` (bfloat16 on a GPU, float32 on a CPU) or
    a key of ``DTYPES``. ``kv_codec``: how the prefix is stored, ``auto`` is the dtype itself. ``kv_cache_bytes``: byte
    budget of the page pool, 0 for a share of free memory. ``latent_cache_bytes``: budget for VAE latents of
    references. ``max_prompt_tokens``: longest prompt in text tokens, the template included. ``max_batch_rows``: rows
    of one denoising pass; a request with more runs in several passes a step.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "piecewise"
    kv_codec: str = "auto"
    kv_cache_bytes: int = 0
    latent_cache_bytes: int = 256 << 20
    max_prompt_tokens: int = 8192
    max_batch_rows: int = 16384

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("kv_codec", self.kv_codec, ("auto", *KV_CODECS))
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        for name in ("kv_cache_bytes", "latent_cache_bytes"):
            if getattr(self, name) < 0:
                raise BadConfig(f"{name} is a number of bytes and cannot be negative")
        for name in ("max_prompt_tokens", "max_batch_rows"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadConfig(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def resolve(config: EngineConfig) -> EngineConfig:
    """Settle ``device``, ``dtype`` and ``kv_codec``. Raises BadConfig for a device that this machine lacks.

    ``kv_cache_bytes`` stays 0 until the weights are loaded, see ``cache_bytes``.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise BadConfig(f"device {device!r} is not a device; use cpu, cuda or cuda:N") from error
    if kind not in AUTO_CACHE_SHARE:
        raise BadConfig(f"device {device!r} is not supported; use cpu, cuda or cuda:N")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise BadConfig(f"device {device!r} is not on this machine, which has {torch.cuda.device_count()} CUDA devices")
    dtype = config.dtype if config.dtype != "auto" else ("float32" if kind == "cpu" else "bfloat16")
    codec = config.kv_codec
    if codec == "auto":
        codec = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]
    return replace(config, device=device, dtype=dtype, kv_codec=codec)


def cache_bytes(config: EngineConfig) -> int:
    """Bytes for the page pool, the weights being loaded: as configured, or a share of the memory that is free.

    Raises BadConfig for a budget beyond that memory (on a CPU: beyond the machine's).
    """
    kind = torch.device(config.device).type
    if kind == "cuda":
        free = limit = torch.cuda.mem_get_info(config.device)[0]
    else:
        free, limit = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    if config.kv_cache_bytes > limit:
        raise BadConfig(f"kv_cache_bytes is {config.kv_cache_bytes} and {config.device} has {limit} bytes of memory")
    return config.kv_cache_bytes or int(free * AUTO_CACHE_SHARE[kind])
