"""Engine options: frozen, and resolved once at start by pure functions."""

from dataclasses import dataclass, replace

import torch

from underpaint.errors import BadConfig
from underpaint.host_memory import available_bytes, total_bytes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_CODECS = ("fp32", "fp16", "bf16", "fp8_v", "fp8", "fp8_tiles")
QUANTIZE = ("none", "fp8")
GRAPHS = ("auto", "on", "off")
OFFLOAD = ("encoder", "vae", "dit")
FP8_CAPABILITY = (8, 9)
"""The first compute capability whose tensor cores multiply e4m3."""
ATTENTION_BACKENDS = ("reference", "piecewise", "triton", "gluon", "fp8", "fa3")
AUTO_CACHE_SHARE = {"cpu": 0.25, "cuda": 0.5}
"""The share of free memory given to pages when no byte budget is named: on a CPU pages are committed only when written,
and the machine does other things; on a GPU the rest is for passes and the VAE, where nobody says what these need."""
KNOWN_CACHE_SHARE = 0.9
"""The same on a GPU, of what they leave, where somebody does."""


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model. ``auto`` values are settled by ``resolve``.

    ``device``: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``dtype``: ``auto`` (bfloat16 on a GPU, float32 on a CPU) or
    a key of ``DTYPES``. ``attention_backend``: ``auto``, which ``attention.choice`` settles, or one of
    ``ATTENTION_BACKENDS``. ``kv_codec``: how the prefix is stored, ``auto`` is the dtype itself; ``fp8_tiles`` is for
    attention_backend fp8. ``kv_cache_bytes``: byte budget of the page pool, 0 for a share of free memory.
    ``latent_cache_bytes``: budget for VAE latents of references. ``max_prompt_tokens``: longest prompt in text tokens,
    the template included. ``max_batch_rows``: rows of one denoising pass; a request with more runs in several passes a
    step. ``quantize``: ``fp8`` keeps the linears of the blocks in e4m3, see ``models.fp8``; a checkpoint that is stored
    so needs no option. ``step_graphs``: whether denoising steps are captured and replayed, see ``generation.graphs``;
    ``auto`` is wherever a GPU can. ``read_graphs``: the same of short reads of prefixes, see ``capture.reads``.
    ``offload``: parts of ``OFFLOAD``, with commas between, whose weights are in host memory, see ``models.offload``.
    ``lora``: files to fuse into the weights of the network at load, ``FILE`` or ``FILE=STRENGTH``, see ``models.lora``.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    kv_codec: str = "auto"
    kv_cache_bytes: int = 0
    latent_cache_bytes: int = 256 << 20
    max_prompt_tokens: int = 8192
    max_batch_rows: int = 16384
    quantize: str = "none"
    step_graphs: str = "auto"
    read_graphs: str = "auto"
    offload: str = ""
    lora: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("kv_codec", self.kv_codec, ("auto", *KV_CODECS))
        _one_of("quantize", self.quantize, QUANTIZE)
        for part in self.offloaded:
            _one_of("offload", part, OFFLOAD)
        for name in ("step_graphs", "read_graphs"):
            _one_of(name, getattr(self, name), GRAPHS)
            if "dit" in self.offloaded and getattr(self, name) == "on":
                raise BadConfig(f"{name} on and offload dit do not go together: a graph would hold a layer's old place")
        _one_of("attention_backend", self.attention_backend, ("auto", *ATTENTION_BACKENDS))
        for name in ("kv_cache_bytes", "latent_cache_bytes"):
            if getattr(self, name) < 0:
                raise BadConfig(f"{name} is a number of bytes and cannot be negative")
        for name in ("max_prompt_tokens", "max_batch_rows"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1")

    @property
    def offloaded(self) -> frozenset[str]:
        """The parts that ``offload`` names."""
        return frozenset(part.strip() for part in self.offload.split(",") if part.strip())

    @property
    def compiles(self) -> bool:
        """Whether the first pass of a size is slower than the next: kernels are compiled for it, graphs captured."""
        return self.device != "cpu" or self.step_graphs == "on"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadConfig(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def resolve(config: EngineConfig) -> EngineConfig:
    """Settle ``device``, ``dtype`` and ``kv_codec``. Raises BadConfig for a device that this machine lacks.

    ``kv_cache_bytes`` stays 0 until the weights are loaded, see ``cache_bytes``. No device is touched: a process that
    only plans for others has no CUDA context afterwards.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise BadConfig(f"device {device!r} is not a device; use cpu, cuda or cuda:N") from error
    if kind not in AUTO_CACHE_SHARE or device.startswith("cpu:"):
        raise BadConfig(f"device {device!r} is not supported; use cpu, cuda or cuda:N")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise BadConfig(f"device {device!r} is not on this machine, which has {torch.cuda.device_count()} CUDA devices")
    dtype = config.dtype if config.dtype != "auto" else ("float32" if kind == "cpu" else "bfloat16")
    codec = config.kv_codec
    if codec == "auto":
        codec = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]
    config = replace(config, device=device, dtype=dtype, kv_codec=codec)
    if config.quantize == "fp8":
        _check_fp8_dtype(config)
    return config


def _check_fp8_dtype(config: EngineConfig) -> None:
    if torch.device(config.device).type == "cuda" and config.dtype != "bfloat16":
        raise BadConfig(f"fp8 on a GPU needs dtype bfloat16, not {config.dtype}")


def check_fp8(config: EngineConfig) -> None:
    """Raises BadConfig where products in e4m3 cannot run; a CPU emulates them. ``config`` is resolved. Asks the device:
    for the process that will use it."""
    _check_fp8_dtype(config)
    if torch.device(config.device).type == "cpu":
        return
    capability = torch.cuda.get_device_capability(config.device)
    if capability < FP8_CAPABILITY:
        needed, found = (f"{major}.{minor}" for major, minor in (FP8_CAPABILITY, capability))
        raise BadConfig(f"fp8 needs a GPU of compute capability {needed}, and {config.device} has {found}")


def cache_bytes(config: EngineConfig, pass_bytes: int | None = None) -> int:
    """Bytes for the page pool, the weights being loaded: as configured, or a share of the memory that is free.

    ``pass_bytes``: what the largest pass and the VAE take on a GPU, which stays free; None if that is not known.
    Raises BadConfig, with numbers, if both do not fit (on a CPU: if the budget is beyond the machine's memory).
    """
    kind = torch.device(config.device).type
    if kind == "cpu":
        free, limit = available_bytes(), total_bytes()
    else:
        free = limit = torch.cuda.mem_get_info(config.device)[0]
    wanted = config.kv_cache_bytes
    if kind == "cpu" or pass_bytes is None:
        if wanted > limit:
            raise BadConfig(f"kv_cache_bytes is {wanted} and {config.device} has {limit} bytes of memory")
        return wanted or int(free * AUTO_CACHE_SHARE[kind])
    if free <= pass_bytes + wanted:
        raise BadConfig(
            f"{config.device} has {free} bytes free beside the weights; passes of up to {config.max_batch_rows} rows "
            f"(max_batch_rows) and the VAE need {pass_bytes}, and kv_cache_bytes is {wanted}"
        )
    return wanted or int((free - pass_bytes) * KNOWN_CACHE_SHARE)
