"""LoRA files of each tool on Qwen-Image; those of SenseNova-U1 are in ``neo_unify/test_checkpoint.py``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from underpaint import Pipeline
from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadConfig, CheckpointError
from underpaint.models import qwen_image21
from underpaint.models.lora import LoraSpec

RANK, ALPHA = 2, 3.0
TARGETS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_out.0", "img_in")
CONFIG = resolve(EngineConfig(device="cpu", kv_cache_bytes=16 << 20))
PARTS = {
    "kohya": ("lora_down", "lora_up"),
    "peft": ("lora_A", "lora_B"),
    "peft with a name": ("lora_A.default", "lora_B.default"),
}


def weights(checkpoint: Path, *lora: str) -> dict[str, Tensor]:
    transformer = qwen_image21.load(checkpoint, replace(CONFIG, lora=lora)).transformer
    return {name: tensor.clone() for name, tensor in transformer.state_dict().items()}


def draw(before: dict[str, Tensor], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each target module: down, up."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {module: before[f"{module}.weight"].shape for module in TARGETS}
    return {
        module: (
            torch.randn(RANK, columns, generator=generator) / columns**0.5,
            torch.randn(rows, RANK, generator=generator),
        )
        for module, (rows, columns) in shapes.items()
    }


def write(path: Path, updates: dict[str, tuple[Tensor, Tensor]], parts: str = "kohya", prefix: str = "") -> str:
    rename = (lambda module: module.replace(".", "_")) if prefix == "lora_unet_" else str
    names = PARTS[parts]
    tensors = {
        f"{prefix}{rename(module)}.{name}.weight": tensor
        for module, both in updates.items()
        for name, tensor in zip(names, both, strict=True)
    }
    save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("prefix", ["", "transformer.", "diffusion_model.", "lora_unet_"])
def test_each_way_of_naming(parts: str, prefix: str, checkpoint: Path, tmp_path: Path, seed: int) -> None:
    before = weights(checkpoint)
    updates = draw(before, seed)
    lora = write(tmp_path / "lora.safetensors", updates, parts, prefix)
    after = weights(checkpoint, f"{lora}=-0.5")
    for name, weight in after.items():
        module, want = name.removesuffix(".weight"), before[name]
        if module in updates:
            down, up = updates[module]
            want = want - 0.5 * up @ down
        torch.testing.assert_close(weight, want, rtol=1e-5, atol=1e-6)


def test_alpha_in_the_file_and_in_what_diffusers_writes_beside_it(checkpoint: Path, tmp_path: Path, seed: int) -> None:
    before = weights(checkpoint)
    module, (down, up) = next(iter(draw(before, seed).items()))
    pair = {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    save_file({**pair, f"{module}.alpha": torch.tensor(ALPHA)}, tmp_path / "in.safetensors")
    facts = {"transformer.r": RANK, "transformer.lora_alpha": ALPHA, "transformer.use_dora": False}
    save_file(pair, tmp_path / "beside.safetensors", {"lora_adapter_metadata": json.dumps(facts)})
    save_file(pair, tmp_path / "zero.safetensors", {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 0})})
    for name, alpha in (("in", ALPHA), ("beside", ALPHA), ("zero", 0.0)):
        after = weights(checkpoint, str(tmp_path / f"{name}.safetensors"))
        want = before[f"{module}.weight"] + alpha / RANK * up @ down
        torch.testing.assert_close(after[f"{module}.weight"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ({"transformer.use_rslora": True}, "use_rslora of PEFT is not supported"),
        ({"transformer.alpha_pattern": {"to_q": 4}}, "alpha_pattern of PEFT is not supported"),
        ({"transformer.lora_alpha": "much"}, "lora_adapter_metadata cannot be read"),
        ([1], "lora_adapter_metadata cannot be read"),
    ],
)
def test_what_would_change_the_formula_is_refused(
    written: object, sentence: str, checkpoint: Path, tmp_path: Path, seed: int
) -> None:
    module, (down, up) = next(iter(draw(weights(checkpoint), seed).items()))
    pair = {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    save_file(pair, tmp_path / "lora.safetensors", {"lora_adapter_metadata": json.dumps(written)})
    with pytest.raises(CheckpointError, match=sentence):
        weights(checkpoint, str(tmp_path / "lora.safetensors"))


def test_a_lora_with_dora_is_refused(checkpoint: Path, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "lora.safetensors"
    (down, up), name = draw(weights(checkpoint), seed)["img_in"], "img_in"
    tensors = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    save_file({**tensors, f"{name}.lora_magnitude_vector": torch.ones(len(up))}, path)
    with pytest.raises(CheckpointError, match="lora_magnitude_vector belongs to no weight"):
        weights(checkpoint, str(path))


def test_a_file_that_is_not_there_is_told_before_anything_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("underpaint.models.qwen_image21.model.load_encoder", lambda *_: pytest.fail("was loaded"))
    with pytest.raises(CheckpointError, match="no_such_file is missing"):
        weights(checkpoint, "no_such_file")


def test_what_it_paints(checkpoint: Path, tmp_path: Path, seed: int) -> None:
    """Another picture and, where two files are fused, that of both; streamed from the host and quantised as well."""
    before = weights(checkpoint)
    first, second = (write(tmp_path / f"{i}.safetensors", draw(before, seed + i)) for i in (1, 2))

    def paint(*lora: str, **options: str) -> Tensor:
        pipeline = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=16 << 20, lora=lora, **options)
        reference = Image.new("RGB", (64, 64), "red")
        call: dict[str, Any] = {
            "width": 64,
            "height": 64,
            "num_inference_steps": 2,
            "reference_resolution": 64,
            "seed": seed,
        }
        return pipeline("Put the cat", [reference], output_type="latent", **call).images[0]

    plain, one, both = paint(), paint(first), paint(first, second)
    assert not torch.equal(one, plain)
    assert not torch.equal(both, one)
    assert torch.equal(paint(first, f"{second}=0"), one)
    assert torch.equal(paint(first, offload="dit"), one)
    assert (paint(first, quantize="fp8") - one).abs().max() < (one - plain).abs().max()


def test_the_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    assert LoraSpec.parse("~/a.safetensors=2") == LoraSpec(Path("/home/one/a.safetensors"), 2.0)
    assert LoraSpec.parse("a.safetensors") == LoraSpec(Path("a.safetensors"), 1.0)
    assert LoraSpec.parse("a=b.safetensors=0.75") == LoraSpec(Path("a=b.safetensors"), 0.75)
    assert LoraSpec.parse("a=b.safetensors") == LoraSpec(Path("a=b.safetensors"), 1.0)
    for text in ("nan", "inf", "-inf"):
        with pytest.raises(BadConfig, match="finite"):
            LoraSpec.parse(f"a.safetensors={text}")


def test_one_file_may_stand_alone(checkpoint: Path, tmp_path: Path, seed: int) -> None:
    path = Path(write(tmp_path / "lora.safetensors", draw(weights(checkpoint), seed)))
    for given in (path, str(path), [path]):
        assert Pipeline.from_pretrained(checkpoint, lora=given, kv_cache_bytes=1 << 20).service.config.lora == (
            str(path),
        )
    assert Pipeline.from_pretrained(checkpoint, lora=None, kv_cache_bytes=1 << 20).service.config.lora == ()
