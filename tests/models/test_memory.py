"""What a pass takes, measured, against what admission counts; and budgets that do not fit, refused with numbers."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from neo_unify.cases import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from underpaint import Pipeline
from underpaint.config import KNOWN_CACHE_SHARE, EngineConfig, cache_bytes
from underpaint.errors import BadConfig
from underpaint.models.painter import rows_bytes
from underpaint.models.qwen_image21 import skeleton
from underpaint.models.qwen_image21.transformer import TransformerConfig
from underpaint.models.random import randomise


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were made within and still live; ``peak`` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._known:
                storage = x.untyped_storage()
                self._known.add(storage.data_ptr())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        return out

    def _gone(self, pointer: int, num_bytes: int) -> None:
        self._known.discard(pointer)
        self.live -= num_bytes


def test_a_pass_takes_what_is_counted(seed: int) -> None:
    """The plain transformer in bf16, with attention that takes nothing beside its result: no more than is counted, and
    no less than half. What does not grow with the rows is taken out."""
    sizes = TransformerConfig(
        in_channels=8, out_channels=8, num_layers=2, attention_head_dim=32, num_attention_heads=8, context_in_dim=64,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    transformer = skeleton(sizes).to_empty(device="cpu").to(torch.bfloat16)
    randomise(transformer, seed, 2)
    peaks = []
    for num_rows in (512, 1024):
        rows = torch.randn(num_rows, sizes.hidden_size, dtype=torch.bfloat16)
        rotary = torch.ones(num_rows, 16, dtype=torch.complex64)
        with torch.inference_mode(), LiveBytes() as live:
            transformer(rows, rotary, torch.tensor([0.5]), None, lambda layer, q, k, v: q.clone())
        peaks.append(live.peak)
    measured = peaks[1] - peaks[0]
    config = EngineConfig(device="cpu", dtype="bfloat16")
    counted = rows_bytes(512, sizes.hidden_size, sizes.hidden_size * sizes.mlp_ratio, config)
    assert counted / 2 < measured <= counted


def test_graphs_have_as_much_for_themselves() -> None:
    on_gpu = EngineConfig(device="cuda", dtype="bfloat16")
    plain = rows_bytes(16384, 4096, 12288, replace(on_gpu, step_graphs="off"))
    assert plain == 16384 * 2 * (4 * 4096 + 4 * 12288)
    assert rows_bytes(16384, 4096, 12288, on_gpu) == 2 * plain
    assert rows_bytes(16384, 4096, 12288, replace(on_gpu, offload="dit")) == plain


def test_models_count_their_passes_and_their_vae(ours: Pipeline) -> None:
    config = replace(ours.service.config, max_batch_rows=100)
    sizes, codec = ours.service.qwen.checkpoint.transformer, ours.service.qwen.image_codec
    of_rows = rows_bytes(100, sizes.hidden_size, 3 * sizes.hidden_size, config)
    assert ours.service.qwen.pass_bytes(config) == of_rows + codec.peak_bytes
    assert codec.peak_bytes == 1536**2 * 2 * 12 * (4 + 4 + 4 + 4)
    for variant in ("dense", "moe"):
        model = Pipeline.from_pretrained(ROOT / variant, kv_cache_bytes=16 << 20).service.neo
        assert model.pass_bytes(config) > rows_bytes(100, model.config.language.hidden_size, 1, config)


@pytest.mark.parametrize(("wanted", "given"), [(0, int(6000 * KNOWN_CACHE_SHARE)), (5000, 5000)])
def test_pages_leave_room_for_passes(wanted: int, given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 20_000))
    config = EngineConfig(device="cuda", kv_cache_bytes=wanted)
    assert cache_bytes(config, pass_bytes=4000) == given
    with pytest.raises(BadConfig, match=r"10000 bytes free .* 16384 rows .* need 11000, and kv_cache_bytes is"):
        cache_bytes(config, pass_bytes=11_000)
    with pytest.raises(BadConfig, match="need 4000, and kv_cache_bytes is 6000"):
        cache_bytes(replace(config, kv_cache_bytes=6000), pass_bytes=4000)
