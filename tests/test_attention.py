"""The backends against each other and against the rule in words; memory that stays linear in the sequence."""

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from underpaint.attention import BACKENDS, RowGroup, choice, fa3, piecewise, reference, settle
from underpaint.config import EngineConfig
from underpaint.errors import BadConfig
from underpaint.kernels.tiles import Extent, StoredKV
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import CacheShape, PagePool, View
from underpaint.layout import Grid, Layout

HEADS, HEAD_DIM = 4, 16
SHAPES: dict[str, list[int | Grid]] = {
    "image then text": [(3, 5), 9],
    "images touching": [4, (4, 4), (2, 9), 7],
    "text only": [300],
    "edit": [8, (6, 6), 7, (4, 9), 150, (8, 8)],
}


@dataclass(eq=False)
class Tensors:
    """A prefix held as plain tensors, (rows, heads, head_dim) each."""

    k: Tensor
    v: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.k)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    @property
    def extents(self) -> tuple[Extent, ...]:
        return ((0, len(self.k)),) if len(self.k) else ()

    def stored(self, layer: int) -> StoredKV:
        return StoredKV(self.k, self.v)


def draw(num_rows: int, heads: int, seed: int) -> Tensor:
    """Loud: scores spread over several units, so that a wrongly visible key shows."""
    return torch.randn(num_rows, heads, HEAD_DIM, generator=torch.Generator().manual_seed(seed)) * 2


def borders(layout: Layout) -> list[int]:
    inside = {row for image in layout.images for row in range(image.start + 1, image.stop)}
    return [row for row in range(layout.num_rows) if row not in inside]


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_backends_agree(shape: str, kv_heads: int, seed: int) -> None:
    layout = Layout.of(SHAPES[shape])
    n = layout.num_rows
    q, k, v = draw(n, HEADS, seed), draw(n, kv_heads, seed + 1), draw(n, kv_heads, seed + 2)
    for start in borders(layout)[:: max(1, n // 12)]:
        group = RowGroup.of(layout, n, 0, Tensors(k[:start], v[:start]), "cpu")
        outputs = [backend(q[start:], k[start:], v[start:], (group,), 0) for backend in BACKENDS.values()]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_oracle_is_the_rule_in_words(seed: int) -> None:
    """A scalar loop: softmax over exactly the keys that the rule lets a row see."""
    layout = Layout.of([2, (2, 2), (1, 2), 3])
    n = layout.num_rows
    q, k, v = (draw(n, 1, seed + i) for i in range(3))
    group = RowGroup.of(layout, n, 0, Tensors(k[:0], v[:0]), "cpu")
    got = reference(q, k, v, (group,), 0)
    for row in range(n):
        keys = [
            key
            for key in range(n)
            if key <= row or any(i.start <= row < i.stop and i.start <= key < i.stop for i in layout.images)
        ]
        scores = torch.stack([(q[row, 0] * k[key, 0]).sum() / HEAD_DIM**0.5 for key in keys])
        want = (scores.softmax(0)[:, None] * v[keys, 0]).sum(0)
        torch.testing.assert_close(got[row, 0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_groups_equal_each_alone(backend: str, seed: int) -> None:
    """Unlike sequences in one pass, two of them behind the same prefix."""
    attend = BACKENDS[backend]
    edit = Layout.of([5, (3, 3), 6, (4, 4)])
    prefix = Tensors(draw(14, HEADS, seed), draw(14, HEADS, seed + 1))
    plan = [(edit, prefix), (Layout.of([(2, 7)]), Tensors(*[draw(0, HEADS, 0)] * 2)), (edit, prefix)]
    groups, first = [], 0
    for layout, before in plan:
        groups.append(RowGroup.of(layout, layout.num_rows, first, before, "cpu"))
        first += groups[-1].num_rows
    q, k, v = (draw(first, HEADS, seed + 2 + i) for i in range(3))
    together = attend(q, k, v, tuple(groups), 0)
    for (layout, before), group in zip(plan, groups, strict=True):
        alone = RowGroup.of(layout, layout.num_rows, 0, before, "cpu")
        want = attend(q[group.rows], k[group.rows], v[group.rows], (alone,), 0)
        torch.testing.assert_close(together[group.rows], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("page_rows", [16, 128])
def test_keys_come_from_pages_and_from_the_rows(page_rows: int, seed: int) -> None:
    """Scattered pages, the last of each run partly filled, in every layer: as if all keys lay in one tensor."""
    layout = Layout.of([9, (11, 13), 20, (8, 8)])
    shape = CacheShape(num_layers=2, num_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    pool = PagePool(shape, CODECS["fp32"], 64 * 128 * shape.row_bytes(CODECS["fp32"]), "cpu", page_rows)
    holes = [pool.allocate(page_rows) for _ in range(9)]
    for hole in holes[::2]:
        pool.release(hole)
    runs = tuple(pool.allocate(rows) for rows in (152, 20))
    q, k, v = (draw(layout.num_rows, HEADS, seed + i) for i in range(3))
    for layer in range(2):
        pool.write(layer, pool.slots(runs), k[:172] + layer, v[:172] - layer)
    group = RowGroup.of(layout, layout.num_rows, 0, View(pool, runs), "cpu")
    for layer in range(2):
        whole = RowGroup.of(layout, layout.num_rows, 0, Tensors(k[:172] + layer, v[:172] - layer), "cpu")
        want = reference(q[172:], k[172:], v[172:], (whole,), layer)
        got = piecewise(q[172:], k[172:], v[172:], (group,), layer)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def fa3_emulated(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, row_starts: Tensor, key_starts: Tensor, num_rows: Tensor,
    num_keys: Tensor, most_rows: int, most_keys: int, causal: bool,
) -> Tensor:  # fmt: skip
    """What the wheel's forward does: segments by starts and lengths, a causal mask aligned to the end of the keys."""
    assert (int(num_rows.max()), int(num_keys.max())) == (most_rows, most_keys)
    for i, (rows, keys) in enumerate(zip(num_rows.tolist(), num_keys.tolist(), strict=True)):
        row, key = int(row_starts[i]), int(key_starts[i])
        mine, theirs = slice(row, row + rows), slice(key, key + keys)
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows) if causal else None
        shared = q.shape[1] // k.shape[1]
        a, b, c = (x.transpose(0, 1) for x in (q[mine], *(x[theirs].repeat_interleave(shared, 1) for x in (k, v))))
        out[mine] = torch.nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=mask).transpose(0, 1)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_fa3_takes_a_pass_in_two_calls(shape: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its segments, with the wheel's forward emulated: the wheel itself runs on Hopper only."""
    kinds: list[bool] = []

    def forward(*args: Any, causal: bool) -> Tensor:
        kinds.append(causal)
        q, k, v, out, row_starts, key_starts, num_rows, num_keys, most_rows, most_keys = args
        return fa3_emulated(
            q, k, v, out, row_starts, key_starts, num_rows, num_keys, most_rows, most_keys, causal=causal
        )

    monkeypatch.setattr(fa3, "fa3_forward", forward)
    layout = Layout.of(SHAPES[shape])
    n, starts = layout.num_rows, borders(layout)
    groups, first = [], 0
    for start in (starts[len(starts) // 2], 0):
        prefix = Tensors(draw(start, 2, seed), draw(start, 2, seed + 1))
        groups.append(RowGroup.of(layout, n, first, prefix, "cpu"))
        first += groups[-1].num_rows
    q, k, v = draw(first, HEADS, seed + 2), draw(first, 2, seed + 3), draw(first, 2, seed + 4)
    attend = fa3.prepare(tuple(groups))
    for _ in range(2):
        got = attend(q, k, v, 0)
        torch.testing.assert_close(got, reference(q, k, v, tuple(groups), 0), rtol=1e-5, atol=1e-5)
    assert sorted(kinds[: len(kinds) // 2]) == sorted({call.causal for group in groups for call in group.calls})


ON_CPU = EngineConfig(device="cpu", dtype="float32")
H200, A100, T4 = (9, 0), (8, 0), (7, 5)


def on_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packages: set[str], dtype: str = "bfloat16"
) -> EngineConfig:
    """A config for a GPU that is not here, with these packages installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choice, "_installed", lambda package: package.split(".")[0] in packages)
    return EngineConfig(device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "head_dim", "shared", "name"),
    [
        (H200, {"triton", "fa3_fwd"}, "bfloat16", 128, 4, "gluon"),
        (H200, {"triton"}, "float16", 128, 4, "triton"),
        (H200, {"triton"}, "bfloat16", 32, 4, "triton"),
        (H200, {"triton"}, "bfloat16", 128, 6, "triton"),
        (H200, set(), "bfloat16", 128, 4, "piecewise"),
        (A100, {"triton"}, "bfloat16", 64, 4, "triton"),
        (A100, {"triton"}, "bfloat16", 256, 4, "piecewise"),
        (T4, {"triton"}, "float16", 64, 4, "piecewise"),
    ],
)
def test_auto_takes_the_best_that_can_run(
    capability: tuple[int, int],
    packages: set[str],
    dtype: str,
    head_dim: int,
    shared: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = on_gpu(monkeypatch, capability, packages, dtype)
    assert settle(config, head_dim, shared, 128).attention_backend == name
    assert settle(replace(config, attention_backend=name), head_dim, shared, 128).attention_backend == name


def test_auto_on_a_cpu() -> None:
    assert settle(ON_CPU, 128, 1, 128).attention_backend == "piecewise"


@pytest.mark.parametrize(
    ("name", "capability", "packages", "dtype", "head_dim", "shared", "sentence"),
    [
        ("gluon", A100, {"triton"}, "bfloat16", 128, 1, "gluon needs compute capability 9.0, and cuda has 8.0"),
        ("triton", T4, {"triton"}, "float16", 128, 1, "triton needs compute capability 8.0 or more, and cuda has 7.5"),
        (
            "fa3",
            H200,
            {"triton"},
            "bfloat16",
            128,
            1,
            r"fa3 needs a package that is not installed: .*underpaint\[fa3\]",
        ),
        ("gluon", H200, {"triton"}, "float16", 128, 1, "gluon needs dtype bfloat16, not float16"),
        ("fp8", A100, {"triton"}, "bfloat16", 128, 1, "fp8 needs compute capability 9.0, and cuda has 8.0"),
        ("fp8", H200, {"triton"}, "bfloat16", 96, 1, "fp8 has no head_dim 96"),
        ("gluon", H200, {"triton"}, "bfloat16", 96, 1, "gluon has no head_dim 96"),
        ("gluon", H200, {"triton"}, "bfloat16", 128, 6, "gluon needs a power of two of query heads .* up to 64, not 6"),
    ],
)
def test_a_named_backend_that_cannot_run_is_refused(
    name: str, capability: tuple[int, int], packages: set[str], dtype: str, head_dim: int, shared: int, sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = replace(on_gpu(monkeypatch, capability, packages, dtype), attention_backend=name)
    with pytest.raises(BadConfig, match=f"attention_backend {sentence}"):
        settle(config, head_dim, shared, 128)


@pytest.mark.parametrize("name", ["triton", "gluon", "fp8", "fa3"])
def test_no_kernel_of_ours_on_a_cpu(name: str) -> None:
    with pytest.raises(BadConfig, match=f"attention_backend {name} needs a CUDA device, not cpu"):
        settle(replace(ON_CPU, attention_backend=name), 128, 1, 128)


@pytest.mark.parametrize(
    ("name", "page_rows", "sentence"),
    [
        ("auto", 128, "gluon does not read pages in kv_codec fp8_tiles; name one of fp8, fa3, piecewise, reference"),
        ("triton", 128, "triton does not read pages in kv_codec fp8_tiles"),
        ("fp8", 16, "fp8 reads kv_codec fp8_tiles in pages of 128 rows, and this checkpoint has pages of 16"),
    ],
)
def test_pages_of_tiles_are_refused_where_nobody_reads_them(
    name: str, page_rows: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(on_gpu(monkeypatch, H200, {"triton"}), attention_backend=name, kv_codec="fp8_tiles")
    with pytest.raises(BadConfig, match=f"attention_backend {sentence}"):
        settle(config, 128, 1, page_rows)


@pytest.mark.parametrize("name", ["fp8", "piecewise", "reference"])
def test_pages_of_tiles_are_for_who_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(on_gpu(monkeypatch, H200, {"triton"}), attention_backend=name, kv_codec="fp8_tiles")
    assert settle(config, 128, 1, 128) == config
    assert settle(replace(ON_CPU, kv_codec="fp8_tiles"), 128, 1, 16).attention_backend == "piecewise"


MEASURE = """
import re, torch
from underpaint.attention import BACKENDS, RowGroup
from underpaint.layout import Layout

class Nothing:
    num_rows = 0
    def read(self, layer):
        return torch.empty(0, 2, 16), torch.empty(0, 2, 16)

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

torch.set_num_threads(1)
layout = Layout.of({parts})
q, k, v = (torch.randn(layout.num_rows, 2, 16) for _ in range(3))
group = RowGroup.of(layout, layout.num_rows, 0, Nothing(), "cpu")
warm = Layout.of([8, (4, 4)])
warm_group = RowGroup.of(warm, warm.num_rows, 0, Nothing(), "cpu")
BACKENDS["{backend}"](q[:24], k[:24], v[:24], (warm_group,), 0)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again at what is resident now
before = status("VmRSS")
BACKENDS["{backend}"](q, k, v, (group,), 0)
print(layout.num_rows, status("VmHWM") - before)
"""


def peak_growth(backend: str, parts: list[int | Grid]) -> tuple[int, int]:
    """Rows of the sequence, and bytes by which a fresh process grew while it attended."""
    script = MEASURE.format(parts=parts, backend=backend)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200)
    rows, growth = done.stdout.split()
    return int(rows), int(growth)


@pytest.mark.parametrize("parts", [[100, (64, 64), 5, (64, 64), 5, (62, 64)], [12300]], ids=["edit", "text"])
def test_q7_q15_u5_u36_no_mask_of_rows_by_keys(parts: list[int | Grid]) -> None:
    """12,300 rows: a bool mask would be 151 MB, fp32 scores of one head 605 MB. Far less is allocated."""
    rows, growth = peak_growth("piecewise", parts)
    assert rows >= 12262
    assert growth < rows * rows / 4, f"{growth} bytes for {rows} rows"


def test_the_measurement_notices_a_mask() -> None:
    """The oracle does build the mask; the same measurement must see it (on fewer rows: it is slow)."""
    rows, growth = peak_growth("reference", [100, (48, 48)])
    assert growth > rows * rows
