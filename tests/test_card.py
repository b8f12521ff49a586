"""``inspect --card``: what a card holds, counted from headers as loading counts it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage21
from neo_unify.cases import ROOT
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLModel

from underpaint.commands import checkpoint as commands
from underpaint.config import EngineConfig
from underpaint.description import on_card
from underpaint.errors import BadParameter
from underpaint.models import neo_unify
from underpaint.models.loading import Defaults, TensorInfo, Weights
from underpaint.models.qwen_image21 import Checkpoint, inspect, skeleton
from underpaint.models.qwen_image21.model import device_bytes, part_bytes
from underpaint.models.qwen_image21.transformer import TransformerConfig
from underpaint.report import Report, parse_bytes

GIB = 1 << 30


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The headers of the released sizes, without files behind them."""
    root = tmp_path_factory.mktemp("released")
    text = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
    with torch.device("meta"):
        encoder = Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision))
        vae = AutoencoderKLQwenImage21()
    (root / "vae").mkdir()
    (root / "vae" / "config.json").write_text(json.dumps(dict(vae.config)))

    def headers(state: dict[str, Tensor], prefix: str = "") -> Weights:
        return Weights({prefix + name: TensorInfo(root, tuple(x.shape), "BF16") for name, x in state.items()}, root)

    sizes = TransformerConfig()
    weights = {
        "transformer": headers(skeleton(sizes).state_dict()),
        "text_encoder": headers(encoder.state_dict(), "model."),
        "vae": headers(vae.state_dict()),
    }
    return Checkpoint(root, sizes, Defaults(), None, weights)


def fits(report: Report) -> dict[str, str]:
    return {str(row[0]): str(row[-1]) for row in report.tables[0].rows}


def test_the_released_sizes_on_cards(released: Checkpoint) -> None:
    """Everything on 80 GiB; on 24 GiB in fp8, with the rest streamed, if passes are a little smaller."""
    assert on_card(released, 80 * GIB, EngineConfig()).notes == ("fits with: as it is",)
    small = on_card(released, 24 * GIB, EngineConfig(max_batch_rows=8192))
    assert small.notes == ("fits with: quantize fp8, offload encoder,vae",)
    assert list(fits(small).values()) == ["no", "no", "no", "yes", "yes"]
    none = on_card(released, 8 * GIB, EngineConfig())
    assert none.notes[0].startswith("nothing of this makes it fit")


def test_what_stays_on_the_device(released: Checkpoint) -> None:
    """7 B parameters in bf16 and fp8; of a streamed stack two layers and what is outside."""
    config = EngineConfig(device="cuda", dtype="bfloat16")
    assert part_bytes(released, config)["dit"] == pytest.approx(13.25 * GIB, rel=0.01)
    fp8 = EngineConfig(device="cuda", dtype="bfloat16", quantize="fp8")
    assert part_bytes(released, fp8)["dit"] == pytest.approx(6.76 * GIB, rel=0.01)
    streamed = EngineConfig(device="cuda", dtype="bfloat16", offload="dit,encoder,vae")
    layer = 2 * (4 * 4096**2 + 3 * 4096 * 12288)
    outside = part_bytes(released, config)["dit"] - 32 * (layer + 4 * 128)
    assert device_bytes(released, streamed)["dit"] == outside + 2 * (layer + 4 * 128)
    assert device_bytes(released, streamed)["vae"] == 0
    assert device_bytes(released, config) == part_bytes(released, config)


def test_counted_as_loaded(checkpoint: Path) -> None:
    """The streamed encoder of a tiny model."""
    config = EngineConfig(device="cpu", dtype="float32", offload="encoder")
    counted, whole = (
        device_bytes(inspect(checkpoint), config)["encoder"],
        part_bytes(inspect(checkpoint), config)["encoder"],
    )
    tensors = inspect(checkpoint).weights["text_encoder"].tensors
    of_layer = sum(4 * info.num_elements for name, info in tensors.items() if ".language_model.layers.0." in name)
    assert whole - counted == 2 * of_layer, "four layers, of which two are there"


def test_neo_unify_has_no_offload() -> None:
    report = on_card(neo_unify.inspect(ROOT / "dense"), GIB, EngineConfig())
    assert list(fits(report)) == ["as it is", "quantize fp8"]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GiB", 24 << 30), ("1.5 gib", 3 << 29), ("24GB", 24 * 10**9), ("512MiB", 512 << 20), ("7", 7)],
)
def test_sizes_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "24XB", "24 G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadParameter, match="24GiB"):
        parse_bytes(text)


def test_the_command(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run: Callable[..., None] = commands.inspect
    run(str(checkpoint), card="8GiB", as_json=True)
    assert json.loads(capsys.readouterr().out)["notes"] == ["fits with: as it is"]
