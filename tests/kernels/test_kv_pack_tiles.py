"""Queries and keys that become e4m3 where they are finished: the kernel under Triton's interpreter, and attention of
products in e4m3 under ``gluon_emulator``. The interpreter multiplies no bf16, so products are finished in fp16 here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_cases import MANY, PATH, faulty_module, load, of
from interpreter import interpreted  # noqa: F401 - a fixture for all
from torch import Tensor

from underpaint.attention import RowGroup
from underpaint.attention.batch import ProductAttend
from underpaint.attention.fp8 import TilingPass, prepare
from underpaint.kernels import check_on_gpu
from underpaint.kernels import kv_pack_tiles as module
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.hybrid_attention_problems import Part, make_problem
from underpaint.kernels.kv_pack import kv_pack, kv_pack_reference
from underpaint.kernels.pack_e4m3 import pack_launch, tiles_of
from underpaint.kernels.packed_tiles import PackedTiles
from underpaint.kernels.tiles import Launch, Room, RowShape
from underpaint.kv.codec import CODECS
from underpaint.kv.keeping import KeepingAttention
from underpaint.kv.pool import CacheShape, PagePool, View
from underpaint.kv.tile_codec import FP8_TILES
from underpaint.layout import Layout

EPS = 1e-6
NAN = 0x7F
UNLIKE = torch.tensor([[2.0], [0.5]])
"""Queries are louder than keys, so that their powers of two differ."""
SPARE_ROWS = 3
"""Of a room, that are nobody's."""
SOME: list[Part] = [(Layout.of([12]), 0), (Layout.of([40, (10, 13)]), 40)]
"""Their own rows are a tile in part, and one and a part."""


@pytest.fixture
def kernel(seed: int) -> Any:
    """The module, whose launches are emulated."""
    return load(PATH, seed)


@pytest.fixture
def attending(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend with that module, and with products finished in fp16 though they are bf16."""
    monkeypatch.setattr("underpaint.attention.fp8.hybrid_attention_fp8", kernel)
    monkeypatch.setattr("underpaint.attention.fp8.kv_pack_tiles", in_fp16(module.kv_pack_tiles))
    for place in ("attention.fp8", "kernels.kv_pack"):
        monkeypatch.setattr(f"underpaint.{place}.kv_pack", in_fp16(kv_pack))


def in_fp16(finish: Callable[..., Any]) -> Callable[..., Any]:
    def run(qkv: Tensor, kv_heads: int, form: HeadForm, *about: Any) -> Any:
        product = qkv.half()
        result = finish(product, kv_heads, form, *about)
        qkv.copy_(product)
        return result

    return run


class Product:
    """A product of q, k and v with rows apart, as loud as linear layers make it, and a norm whose weights differ, by
    up to ``most``: the louder, the fewer keys a row attends to."""

    def __init__(
        self, num_rows: int, heads: int, kv_heads: int, head_dim: int, adjacent: bool, most: float = 3.0
    ) -> None:
        self.kv_heads = kv_heads
        # Of what bf16 has too.
        self.qkv = (3 * torch.randn(num_rows, heads + 2 * kv_heads + 1, head_dim)).bfloat16().half()[:, :-1]
        self.form = HeadForm.of(((0.2 + most * torch.rand(2, head_dim)) * UNLIKE).half(), EPS, adjacent)
        self.rotary = torch.polar(torch.ones(num_rows, head_dim // 2), 7 * torch.rand(num_rows, head_dim // 2))

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """By ``kv_pack``; the product stays."""
        qkv = self.qkv.clone()
        kv_pack(qkv, self.kv_heads, self.form, self.rotary, None)
        q, k, v = qkv.split([qkv.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v


def keys_of(tiles: PackedTiles, launch: Launch, power: float) -> tuple[Tensor, Tensor]:
    """Finished keys (rows, heads, head_dim) in the order of the own tiles, and codes behind their last keys."""
    codes = tiles.k.view(torch.uint8).view(-1, tiles.kv_heads, tiles.keys, tiles.head_dim).transpose(1, 2)
    counts = launch.own_tiles[:, 1].tolist()
    used = torch.cat([codes[i, : max(count, 0)] for i, count in enumerate(counts)])
    rest = torch.cat([codes[i, max(count, 0) :] for i, count in enumerate(counts)])
    return used.contiguous().view(torch.float8_e4m3fn).float() * power, rest


def check_kernel(
    kernel_module: Any,
    attention: Any,
    parts: list[Part],
    heads: tuple[int, int, int],
    adjacent: bool,
    roomy: bool = False,
) -> None:
    problem = of(parts, *heads)
    row_shape = RowShape.of(problem.q, problem.k)
    num_rows = len(problem.q) + SPARE_ROWS * roomy
    room = Room(num_rows, len(parts) + 1, 16) if roomy else None
    (launch,) = attention.plan_pass(problem.groups, problem.row_stop, row_shape, room=room, apart=False).launches
    product = Product(num_rows, *heads, adjacent)
    q, k, _ = product.finished()
    tiles = tiles_of(k, None, launch)
    tiles.k.view(torch.uint8).fill_(NAN)
    before = product.qkv.clone()
    about = (product.qkv, product.kv_heads, product.form, product.rotary, launch, tiles)
    queries, q_power, k_power = kernel_module.kv_pack_tiles(*about)
    rows = torch.cat([torch.arange(row, row + count) for row, count in launch.own_tiles.tolist() if count > 0])
    assert sorted(rows.tolist()) == list(range(num_rows)), "also those that are nobody's"
    assert torch.equal(product.qkv, before)
    assert check_on_gpu.excess(queries.float() * q_power, q, q_power) <= 0
    ours, rest = keys_of(tiles, launch, k_power)
    assert check_on_gpu.excess(ours, k[rows], k_power) <= 0
    assert (rest == NAN).all(), "what follows the last key is left alone"


@pytest.mark.parametrize(("heads", "adjacent"), [((2, 2, 64), True), ((8, 2, 64), False), ((1, 1, 128), True)])
def test_keys_are_finished_in_tiles(kernel: Any, heads: tuple[int, int, int], adjacent: bool) -> None:
    """Queries, and keys in tiles, are what ``kv_pack`` makes and a rounding; no other byte is written."""
    check_kernel(module, kernel, SOME, heads, adjacent, roomy=heads[2] == 128)


@pytest.mark.parametrize("adjacent", [True, False])
def test_none_is_beyond_its_bound(adjacent: bool, seed: int) -> None:
    """Not even one whose values are all in one channel pair, where the weights are largest."""
    torch.manual_seed(seed)
    for head_dim in (16, 64, 128):
        product = Product(200, 1, 1, head_dim, adjacent)
        for which, most in enumerate(product.form.weight.abs().argmax(dim=1)):
            product.qkv[::2, which] = 0
            product.qkv[::2, which, most] = 100
        q, k, _ = kv_pack_reference(product.qkv, 1, product.form, product.rotary)
        for x, exponent in ((q, product.form.query_exponent), (k, product.form.key_exponent)):
            largest = x.float().abs().max().item() / 2.0**exponent
            assert 448 / 8 < largest <= 448, "beyond the bound, or a bound that says nothing"


def test_weights_that_are_not_finite() -> None:
    """Nothing is bounded then; loading and finishing go on, and what is not finite is told of where pictures leave."""
    for broken in (torch.inf, torch.nan):
        weight = torch.ones(2, 16)
        weight[:, 3] = broken
        form = HeadForm.of(weight, EPS, True)
        assert {form.query_exponent, form.key_exponent} <= set(range(-40, 121))


def test_values_of_a_launch_whose_keys_are_there(kernel: Any) -> None:
    """Packing leaves own keys alone, notes their power of two, and packs everything else as before."""
    problem = of(MANY, 2, 2, codec="fp8")
    launch = kernel.plan_pass(problem.groups, problem.row_stop, RowShape.of(problem.q, problem.k)).launches[-1]
    whole = pack_launch(problem.k, problem.v, problem.stored, launch)
    tiles = tiles_of(problem.k, problem.stored, launch)
    num_own = len(launch.own_tiles) * tiles.kv_heads
    tiles.k.view(torch.uint8).fill_(NAN)
    pack_launch(torch.full_like(problem.k, torch.nan), problem.v, problem.stored, launch, tiles, 0.375)
    keys = tiles.k.view(torch.uint8).view(-1, tiles.keys, tiles.head_dim)
    assert (keys[:num_own] == NAN).all()
    assert torch.equal(keys[num_own:], whole.k.view(torch.uint8).view_as(keys)[num_own:])
    assert torch.equal(tiles.v.view(torch.uint8), whole.v.view(torch.uint8))
    assert (tiles.facts[:num_own, 0] == 0.375).all()
    assert torch.equal(tiles.facts[num_own:, 0], whole.facts[num_own:, 0])
    assert torch.equal(tiles.facts[:, 1:3], whole.facts[:, 1:3])


GRID = (6, 7)
QUIET = 0.4
"""Rows attend to many keys then, and errors of two ways differ by 0.7 % from draw to draw. Of loud ones by 6 %."""


class Painted:
    """A pass over a pool: targets behind prefixes, nothing kept, and the product of a layer."""

    def __init__(self, codec: str, sizes: list[int], adjacent: bool = True, most: float = 3.0) -> None:
        shape = CacheShape(2, 2, 64, torch.bfloat16)
        stored_as = FP8_TILES if codec == "fp8_tiles" else CODECS[codec]
        self.pool = PagePool(shape, stored_as, 8 * shape.page_bytes(stored_as, 128), "cpu")
        groups, first = [], 0
        for size in sizes:
            run = self.pool.allocate(size) if size else None
            if run:
                for layer in range(2):
                    self.pool.write(layer, self.pool.slots([run]), *torch.randn(2, size, 2, 64).bfloat16())
            layout = Layout.of([size, GRID] if size else [GRID])
            groups.append(RowGroup.of(layout, layout.num_rows, first, View(self.pool, (run,) if run else ()), "cpu"))
            first += GRID[0] * GRID[1]
        self.groups = tuple(groups)
        self.num_rows = first
        self.product = Product(first + SPARE_ROWS, 2, 2, 64, adjacent, most)

    def finished(self) -> list[Tensor]:
        """q, k and v in bf16, with rows that are nobody's."""
        return [x.bfloat16() for x in self.product.finished()]

    def exact(self, layer: int) -> Tensor:
        q, k, v = (x[: self.num_rows].float() for x in self.product.finished())
        out = []
        for group in self.groups:
            before = [x.float() for x in group.prefix.read(layer)]
            keys, values = (torch.cat([x, y[group.rows]]) for x, y in zip(before, (k, v), strict=True))
            scores = torch.einsum("qhd,khd->hqk", q[group.rows], keys) * 64**-0.5
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values))
        return torch.cat(out)

    def finish(self, attend: Any, layer: int, spare: int = 0) -> Tensor:
        """Of the rows, and ``spare`` more."""
        rows = slice(0, self.num_rows + spare)
        out: Tensor = attend.finish(
            layer, self.product.qkv[rows].bfloat16(), 2, self.product.form, self.product.rotary[rows]
        )
        return out[: self.num_rows]

    def off(self, ours: Tensor, layer: int) -> float:
        exact = self.exact(layer)
        return ((ours.float() - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.usefixtures("attending")
@pytest.mark.parametrize(("codec", "adjacent"), [("fp8", False), ("fp8_tiles", True)])
def test_a_product_is_attended_to(codec: str, adjacent: bool) -> None:
    """With and without room: about what attention of the finished rows is, and as exact."""
    painted = Painted(codec, [150, 0], adjacent, QUIET)
    attend = prepare(painted.groups, Room(painted.num_rows + SPARE_ROWS, 3, 8))
    assert isinstance(attend, ProductAttend)
    ours = painted.finish(attend, 1, SPARE_ROWS)
    q, k, v = painted.finished()
    apart = attend(q, k, v, 1)[: painted.num_rows]
    assert painted.off(ours, 1) < 1.1 * painted.off(apart, 1)
    if codec == "fp8_tiles":
        assert torch.equal(ours, painted.finish(prepare(painted.groups), 1))


@pytest.mark.usefixtures("attending")
def test_loud_keys_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice a wrong power of two, or keys of another row."""
    painted = Painted("bf16", [150])
    at_best = painted.off(painted.finish(prepare(painted.groups), 0), 0)
    right = in_fp16(module.kv_pack_tiles)

    def quiet_q(*arguments: Any) -> Any:
        queries, q_power, k_power = right(*arguments)
        return queries, q_power / 4, k_power

    def twice_k(*arguments: Any) -> Any:
        queries, q_power, k_power = right(*arguments)
        return queries, q_power, 2 * k_power

    def moved(qkv: Tensor, *arguments: Any) -> Any:
        return right(qkv.roll(1, 0), *arguments)

    for wrong in (quiet_q, twice_k, moved):
        monkeypatch.setattr("underpaint.attention.fp8.kv_pack_tiles", wrong)
        assert painted.off(painted.finish(prepare(painted.groups), 0), 0) > 3 * at_best


@pytest.mark.usefixtures("attending")
def test_attention_is_launched_on_the_device_of_its_rows(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is current: launched on another, it would read memory that is none there."""
    devices, there = list[torch.device](), list[list[torch.device]]()

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        devices.append(x.device)
        yield
        devices.pop()

    def compiled(*about: Any) -> Any:
        there.append([*devices])
        return right(*about)

    right = kernel._compiled
    monkeypatch.setattr(kernel, "_compiled", compiled)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    painted = Painted("bf16", [150])
    painted.finish(prepare(painted.groups), 0)
    assert there == [[torch.device("cpu")]]


@pytest.mark.usefixtures("attending")
def test_a_plan_of_several_launches(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of few rows go to another kernel, which reads rows: the product is finished as a whole then."""
    painted = Painted("bf16", [300])
    layout = Layout.of([300, 3])
    few = RowGroup.of(layout, layout.num_rows, painted.num_rows, painted.groups[0].prefix, "cpu")
    painted.num_rows += 3
    seen: list[Any] = []

    def note(*asked: Any) -> Any:
        seen.extend(asked)
        return asked[0]

    monkeypatch.setattr(kernel, "hybrid_attention", note)
    ours = painted.finish(prepare((*painted.groups, few)), 1)
    *rows, stored, plan = seen
    for x, want in zip(rows, painted.finished(), strict=True):
        assert torch.equal(x, want[: painted.num_rows])
    assert len(plan.launches) == 2
    assert stored.k is painted.pool.rows(1).k
    assert ours.shape == rows[0].shape


class Recorded:
    """Attention that notes what it was asked."""

    def __init__(self, attend: TilingPass) -> None:
        self.attend = attend
        self.finished: list[int] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return self.attend(q, k, v, layer)

    def finish(self, layer: int, *product: Any) -> Tensor:
        self.finished.append(layer)
        return self.attend.finish(layer, *product)


@pytest.mark.usefixtures("attending")
@pytest.mark.parametrize("codec", ["fp8", "fp8_tiles"])
def test_rows_that_are_kept_are_finished_as_rows(codec: str) -> None:
    """A pass that keeps rows finishes all of them first; one that keeps none leaves it to attention."""
    painted = Painted(codec, [150], most=QUIET)
    pool, attend = painted.pool, Recorded(prepare(painted.groups))
    run = pool.allocate(painted.num_rows)
    kept = painted.finish(KeepingAttention(pool, pool.slots([run]), attend), 1)
    assert attend.finished == []
    q, k, v = (x[: painted.num_rows] for x in painted.finished())
    other = pool.allocate(painted.num_rows)
    pool.write(1, pool.slots([other]), k, v)
    for ours, want in zip(pool.read(1, pool.slots([run])), pool.read(1, pool.slots([other])), strict=True):
        # Rounded to fp16 and to bf16 in another order, at most to the next of 8 codes in an octave.
        assert ((ours.float() - want.float()).abs() <= want.float().abs() / 7.9 + 1e-2).all()
    ours = painted.finish(KeepingAttention(pool, pool.slots(()), attend), 1)
    assert attend.finished == [1]
    apart = attend(q, k, v, 1)
    assert painted.off(ours, 1) < 1.1 * painted.off(apart, 1)
    assert painted.off(kept, 1) < 1.1 * painted.off(apart, 1)


def test_the_check_of_a_gpu_runs(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes for a CPU; and it says so where queries or keys are finished wrongly."""
    monkeypatch.setattr(check_on_gpu, "hybrid_attention_fp8", kernel)
    monkeypatch.setattr(check_on_gpu, "make_problem", lambda parts, *heads: make_problem(parts, 2, 2, 64, device="cpu"))
    monkeypatch.setattr(check_on_gpu, "kv_pack", in_fp16(kv_pack))
    right = in_fp16(module.kv_pack_tiles)
    monkeypatch.setattr(check_on_gpu, "kv_pack_tiles", right)
    parts: list[Part] = [(Layout.of([140, (8, 8), 3]), 140)]
    assert check_on_gpu.check_finishing(parts, 2, 2).startswith("ok")

    def moved(qkv: Tensor, *about: Any) -> Any:
        return (right(qkv, *about)[0].view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn), *right(qkv, *about)[1:])

    def one_more(*about: Any) -> Any:
        queries, *powers = right(*about)
        queries.view(torch.uint8)[3, 1, 5] += 1
        return queries, *powers

    def louder(*about: Any) -> Any:
        queries, q_power, k_power = right(*about)
        return queries, q_power, 2 * k_power

    for wrong in (moved, one_more, louder):
        monkeypatch.setattr(check_on_gpu, "kv_pack_tiles", wrong)
        assert check_on_gpu.check_finishing(parts, 2, 2).startswith("WRONG")


MUTANTS = {
    "the last row is forgotten": ("key < tl.load", "key + 1 < tl.load"),
    "heads side by side, as in rows": ("KEYS * HEAD_DIM, ADJACENT", "HEAD_DIM, ADJACENT"),
    "tiles of one head": ("(KV_HEADS * KEYS) + key", "KEYS + key"),
    "queries' weights for keys": ("weight_ptr + HEAD_DIM, True", "weight_ptr, True"),
    "keys that turn the other way": ("k_weight, cos, sin", "k_weight, cos, -sin"),
    "queries over keys' bound": ("cos, sin, eps, q_power", "cos, sin, eps, k_power"),
    "no power of two": ("cos * power, sin * power", "cos * power, sin"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_tests_notice(mutant: tuple[str, str], kernel: Any, tmp_path: Path) -> None:
    faulty = faulty_module(module, mutant, tmp_path)
    with pytest.raises((AssertionError, IndexError)):
        check_kernel(faulty, kernel, SOME[1:], (3, 3, 64), True)
