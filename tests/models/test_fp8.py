"""Blocks in e4m3: products, what is quantised and what is not, loading, and checkpoints that are stored so."""

import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from disk import full_disk
from neo_unify.cases import CONFIG, ROOT
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from underpaint import Pipeline
from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadConfig, BadParameter, CheckpointError
from underpaint.kv.codec import E4M3, quantise
from underpaint.models import fp8, neo_unify, qwen_image21
from underpaint.models.quantised import write_quantised

FP8 = replace(CONFIG, quantize="fp8")
SMALL: dict[str, Any] = {"width": 96, "height": 64, "reference_resolution": 64, "output_type": "latent"}


def linear_of(weight: Tensor) -> fp8.Fp8Linear:
    linear = fp8.Fp8Linear(weight.shape[1], weight.shape[0])
    linear.load_state_dict(fp8.settle("weight", weight, linear.weight, weight.dtype))
    return linear


def test_a_product_is_that_of_the_rounded_factors(seed: int) -> None:
    """In fp64 from the values that e4m3 holds; and each of these is within 1/16 of what it stands for, or within the
    smallest step of its row."""
    torch.manual_seed(seed)
    x = torch.randn(7, 48) * torch.logspace(-2, 2, 7)[:, None]
    weight = torch.randn(32, 48) * torch.logspace(-3, 1, 32)[:, None]
    linear = linear_of(weight)
    factors = []
    for exact in (x, weight):
        rounded, scale = quantise(exact)
        value = rounded.double() * scale[:, None].double()
        step = scale[:, None] * 2**-10
        assert ((value - exact).abs() <= (exact.abs() / 16 * (1 + 1e-5)).maximum(step)).all()
        factors.append(value)
    want = factors[0] @ factors[1].T
    with torch.inference_mode():
        torch.testing.assert_close(linear(x).double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
        assert linear(x.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(linear(x), linear.multiply(*quantise(x), x.dtype))


@pytest.mark.parametrize("quantised", [True, False])
def test_joined_linears_keep_their_weights(quantised: bool, seed: int) -> None:
    torch.manual_seed(seed)
    weights = [torch.randn(width, 32) for width in (48, 16, 16)]
    parts: list[fp8.Linear] = [linear_of(weight) for weight in weights]
    if not quantised:
        parts = [nn.Linear(32, len(weight), bias=False) for weight in weights]
    joined = fp8.join(parts)
    x = torch.randn(5, 32)
    with torch.inference_mode():
        want = torch.cat([part(x) for part in parts], dim=-1)
        torch.testing.assert_close(joined(x), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(joined.weight.float(), torch.cat([part.weight.float() for part in parts]))
    assert isinstance(joined, fp8.Fp8Linear) == quantised


def test_block_linears_are_quantised_and_nothing_else(checkpoint: Path) -> None:
    plain = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=1 << 20).service.qwen.transformer.state_dict()
    loaded = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=1 << 20, quantize="fp8").service.qwen.transformer
    linears = {name for name, module in loaded.named_modules() if isinstance(module, fp8.Fp8Linear)}
    assert len(linears) == 3 * 7
    assert all(name.startswith("transformer_blocks.") for name in linears)
    assert not [n for n, m in loaded.transformer_blocks.named_modules() if isinstance(m, nn.Linear)]
    for name, tensor in loaded.state_dict().items():
        if name.removesuffix(".weight") in linears:
            want, scale = quantise(plain[name])
            assert torch.equal(tensor.float(), want.float())
            assert torch.equal(loaded.state_dict()[name + "_scale"], scale)
        elif not name.endswith("_scale"):
            assert torch.equal(tensor, plain[name])


@pytest.mark.parametrize("variant", ["dense", "moe", "pixelhead"])
def test_both_roles_of_neo_unify_but_no_router(variant: str) -> None:
    network = neo_unify.load(ROOT / variant, FP8).network
    blocks = dict(network.language_model.model["layers"].named_modules())
    left = {name.rpartition(".")[2] for name, module in blocks.items() if isinstance(module, nn.Linear)}
    assert left == ({"gate"} if variant == "moe" else set())
    quantised = [name for name, module in network.named_modules() if isinstance(module, fp8.Fp8Linear)]
    assert {"_mot_gen" in name for name in quantised} == {True, False}
    assert all(name.startswith("language_model.model.layers.") for name in quantised)


def test_never_two_copies_of_the_weights(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is settled, the one before it is gone, but for those that stay as they are."""
    before: list[tuple[str, weakref.ref[Tensor]]] = []
    settle = fp8.settle

    def watch(name: str, tensor: Tensor, wanted: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        assert not [name for name, tensor in before if tensor() is not None]
        if wanted.dtype == E4M3:
            before.append((name, weakref.ref(tensor)))
        return settle(name, tensor, wanted, dtype)

    monkeypatch.setattr(fp8, "settle", watch)
    Pipeline.from_pretrained(checkpoint, kv_cache_bytes=1 << 20, quantize="fp8")
    assert len(before) == 3 * 7


def states_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].float(), b[name].float()) for name in a)


def test_a_stored_checkpoint_is_the_one_quantised_at_load(
    checkpoint: Path, tmp_path: Path, draw_image: Callable[..., Image.Image]
) -> None:
    """Sharded. The same weights, so the same picture; fewer bytes; and no option is needed."""
    write_quantised(checkpoint, tmp_path / "stored")
    at_load = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=16 << 20, quantize="fp8")
    stored = Pipeline.from_pretrained(tmp_path / "stored", kv_cache_bytes=16 << 20)
    assert states_equal(at_load.service.qwen.transformer.state_dict(), stored.service.qwen.transformer.state_dict())
    reference = draw_image(64, 64)
    pictures = [
        pipeline("the cat", [reference], seed=3, num_inference_steps=2, **SMALL).images[0]
        for pipeline in (at_load, stored)
    ]
    assert torch.equal(*pictures)
    sizes = [qwen_image21.inspect(root).weights["transformer"].num_bytes for root in (checkpoint, tmp_path / "stored")]
    assert sizes[1] < 0.6 * sizes[0]
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_a_stored_neo_unify(variant: str, tmp_path: Path) -> None:
    write_quantised(ROOT / variant, tmp_path / "stored")
    for roles in (neo_unify.BOTH_ROLES, frozenset({neo_unify.Role.GENERATE})):
        at_load = neo_unify.load(ROOT / variant, FP8, roles).network
        stored = neo_unify.load(tmp_path / "stored", CONFIG, roles).network
        assert states_equal(at_load.state_dict(), stored.state_dict())


def test_a_lora_is_fused_before_quantising(tmp_path: Path) -> None:
    target = "language_model.model.layers.1.self_attn.q_proj_mot_gen"
    plain = neo_unify.load(ROOT / "dense", CONFIG).network.state_dict()[f"{target}.weight"]
    up, down = torch.randn(len(plain), 2), torch.randn(2, plain.shape[1])
    save_file({f"{target}.lora_up.weight": up, f"{target}.lora_down.weight": down}, tmp_path / "lora.safetensors")
    lora = (str(tmp_path / "lora.safetensors"),)
    loaded = neo_unify.load(ROOT / "dense", replace(FP8, lora=lora)).network.state_dict()
    assert torch.equal(loaded[f"{target}.weight"].float(), quantise(plain + up @ down)[0].float())
    write_quantised(ROOT / "dense", tmp_path / "stored", lora)
    assert states_equal(neo_unify.load(tmp_path / "stored", CONFIG).network.state_dict(), loaded)
    with pytest.raises(CheckpointError, match="fuse first"):
        neo_unify.load(tmp_path / "stored", replace(CONFIG, lora=lora))


def test_what_cannot_be_written_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    write_quantised(checkpoint, tmp_path / "stored")
    with pytest.raises(BadParameter, match="exists"):
        write_quantised(checkpoint, tmp_path / "stored")
    with pytest.raises(BadParameter, match="already"):
        write_quantised(tmp_path / "stored", tmp_path / "twice")
    with pytest.raises(CheckpointError, match="lora is missing"):
        write_quantised(checkpoint, tmp_path / "other", (str(tmp_path / "lora"),))
    assert [path.name for path in tmp_path.iterdir()] == ["stored"]


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    shutil.copytree(ROOT / "dense", root, ignore=shutil.ignore_patterns("golden*"))
    with full_disk(1 << 18), pytest.raises(BadParameter, match="cannot be written"):
        write_quantised(root, tmp_path / "stored")
    assert list(tmp_path.iterdir()) == [root]


def test_a_stored_checkpoint_is_read_strictly(tmp_path: Path) -> None:
    """A scale is missing, or has the wrong shape, or a tensor that must not be quantised is."""
    write_quantised(ROOT / "dense", tmp_path / "stored")
    state = load_file(tmp_path / "stored" / "model.safetensors")
    scale = next(name for name in state if name.endswith("_scale"))
    norm = "language_model.model.norm.weight"
    for name, damaged in ((scale, None), (scale, state[scale][:-1]), (norm, state[norm].to(E4M3))):
        root = tmp_path / "damaged"
        shutil.copytree(tmp_path / "stored", root)
        changed = {**state, name: damaged} if damaged is not None else {n: x for n, x in state.items() if n != name}
        save_file({n: x.clone() for n, x in changed.items()}, root / "model.safetensors")
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            neo_unify.inspect(root)
        shutil.rmtree(root)


def test_a_linear_that_does_not_fit_is_refused() -> None:
    for network in (nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(24, 16, bias=False)])}),
                    nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(16, 16)])})):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"blocks\.0"):
            fp8.prepare(network, "blocks")


@pytest.mark.parametrize(
    ("capability", "dtype", "problem"),
    [((8, 6), "auto", "compute capability 8.9"), ((9, 0), "float16", "bfloat16"), ((9, 0), "auto", None),
     ((8, 9), "auto", None)],
)  # fmt: skip
def test_refused_where_the_card_cannot(
    capability: tuple[int, int], dtype: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = EngineConfig(device="cuda", dtype=dtype, quantize="fp8")
    if problem is None:
        assert resolve(config).quantize == "fp8"
        return
    with pytest.raises(BadConfig, match=problem):
        fp8.wanted(resolve(config), stored=False)
    with pytest.raises(BadConfig, match=problem):
        fp8.wanted(resolve(replace(config, quantize="none")), stored=True)


def test_the_emulation_says_so(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    Pipeline.from_pretrained(checkpoint, kv_cache_bytes=1 << 20)
    assert "emulated" not in caplog.text
    Pipeline.from_pretrained(checkpoint, kv_cache_bytes=1 << 20, quantize="fp8")
    assert "emulated on the CPU" in caplog.text
    with pytest.raises(BadConfig, match="none, fp8"):
        EngineConfig(quantize="fp4")


def test_the_picture_moves_a_little(checkpoint: Path, draw_image: Callable[..., Image.Image], seed: int) -> None:
    """On loud weights: fp8 changes the picture, by a fraction of what another seed does."""
    references = [draw_image(64, 64), draw_image(96, 64)]
    latents = []
    for quantize, drawn in (("none", seed), ("none", seed + 1), ("fp8", seed)):
        pipeline = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=32 << 20, quantize=quantize)
        painting = pipeline("the cat", references, seed=drawn, num_inference_steps=4, **SMALL)
        latents += painting.images
    plain, other, quantised = latents
    assert 0 < (quantised - plain).norm() < 0.3 * (other - plain).norm()
