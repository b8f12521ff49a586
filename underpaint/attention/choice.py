"""Which backend attends: settled once at start, from the card, the dtype and head_dim, and never changed silently."""

import logging
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

import torch

from underpaint.attention.batch import Prepare, each_layer
from underpaint.attention.piecewise import piecewise
from underpaint.attention.reference import reference
from underpaint.config import EngineConfig
from underpaint.errors import BadConfig

log = logging.getLogger(__name__)

PREFERRED = ("gluon", "triton", "piecewise")
"""What ``auto`` takes the first of that can run. Not ``fp8``, which is less exact: it must be named."""
HOPPER = (9, 0)
POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64)
TILES = "fp8_tiles"
"""The codec whose pages are tiles, see ``kv.tile_codec``: read in place by one kernel, and as copies of their rows by
backends that plan nothing of their own."""
TILE_READERS = ("fp8", "fa3", "piecewise", "reference")
TILE_KEYS = 128
"""Rows of the pages that are read in place."""


@dataclass(frozen=True)
class Needs:
    """What a backend cannot run without. ``capability``: the first, or with ``exactly`` the only compute capability.
    ``package``: what to import, and ``install`` what to install for it. ``shared_heads``: how many query heads may
    share a K/V head, None: any number."""

    capability: tuple[int, int]
    exactly: bool
    package: str
    install: str
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...] | range
    shared_heads: tuple[int, ...] | None = None


NEEDS = {
    "triton": Needs((8, 0), False, "triton", "triton", ("bfloat16", "float16", "float32"), range(1, 129)),
    "gluon": Needs(HOPPER, True, "triton.experimental.gluon", "triton>=3.6", ("bfloat16",), (64, 128), POWERS_OF_TWO),
    "fp8": Needs(HOPPER, True, "triton.experimental.gluon", "triton>=3.6", ("bfloat16",), (64, 128), POWERS_OF_TWO),
    "fa3": Needs(HOPPER, True, "fa3_fwd", "underpaint[fa3]", ("bfloat16", "float16"), range(8, 257, 8)),
}
"""Backends that do not run everywhere."""


def why_not(
    name: str, device: str, dtype: str, head_dim: int | None = None, shared_heads: int | None = None
) -> str | None:
    """Why a backend cannot run, as the end of a sentence that begins with its name, or None if it can. Without a
    ``head_dim`` or ``shared_heads``, see ``settle``, whether it can for some."""
    if name not in NEEDS:
        return None
    needs = NEEDS[name]
    if not device.startswith("cuda"):
        return f"needs a CUDA device, not {device}"
    found = torch.cuda.get_device_capability(device)
    if found != needs.capability if needs.exactly else found < needs.capability:
        wanted, have = (f"{major}.{minor}" for major, minor in (needs.capability, found))
        return f"needs compute capability {wanted}{'' if needs.exactly else ' or more'}, and {device} has {have}"
    if not _installed(needs.package):
        return f"needs a package that is not installed: pip install '{needs.install}'"
    if dtype not in needs.dtypes:
        return f"needs dtype {' or '.join(needs.dtypes)}, not {dtype}"
    if head_dim is not None and head_dim not in needs.head_dims:
        return f"has no head_dim {head_dim}"
    if needs.shared_heads is not None and shared_heads is not None and shared_heads not in needs.shared_heads:
        return f"needs a power of two of query heads a K/V head, up to {max(needs.shared_heads)}, not {shared_heads}"
    return None


def _installed(package: str) -> bool:
    """Also for a package in a package, whose absence ``find_spec`` raises."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def settle(config: EngineConfig, head_dim: int, shared_heads: int, page_rows: int) -> EngineConfig:
    """Settle ``attention_backend`` for a model of which ``shared_heads`` query heads share a K/V head, and for pages of
    ``page_rows``; the rest of ``config`` is resolved. Raises BadConfig for one that cannot run."""
    where = (config.device, config.dtype, head_dim, shared_heads)
    if config.attention_backend == "auto":
        name = next(name for name in PREFERRED if why_not(name, *where) is None)
        _check_pages(name, config.kv_codec, page_rows)
        log.info("attention_backend %s, for %s, %s, head_dim %d and %d query heads a K/V head", name, *where)
        return replace(config, attention_backend=name)
    reason = why_not(config.attention_backend, *where)
    if reason is not None:
        raise BadConfig(f"attention_backend {config.attention_backend} {reason}")
    _check_pages(config.attention_backend, config.kv_codec, page_rows)
    return config


def _check_pages(name: str, codec: str, page_rows: int) -> None:
    if codec != TILES:
        return
    if name not in TILE_READERS:
        raise BadConfig(
            f"attention_backend {name} does not read pages in kv_codec {TILES}; name one of {', '.join(TILE_READERS)}"
        )
    if name == "fp8" and page_rows != TILE_KEYS:
        raise BadConfig(
            f"attention_backend fp8 reads kv_codec {TILES} in pages of {TILE_KEYS} rows, and this checkpoint has pages "
            f"of {page_rows}"
        )


def choose(config: EngineConfig) -> Prepare:
    """The backend that a settled ``config`` names. Kernels are imported only here: not everybody has Triton."""
    name = config.attention_backend
    if name in ("reference", "piecewise"):
        return each_layer(reference if name == "reference" else piecewise)
    assert name in NEEDS, f"attention_backend {name} is not settled"
    prepare: Prepare = import_module(f"underpaint.attention.{name}").prepare
    return prepare
