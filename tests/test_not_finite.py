"""Pictures of damaged weights: no NaN is painted black and handed out as a picture."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from neo_unify.cases import ROOT
from torch import Tensor

from underpaint import Chat, Pipeline
from underpaint.chat import PaintingOptions
from underpaint.errors import BadParameter, EngineFailure
from underpaint.request import OutputType

PAINTING: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2, "seed": 1}
OUTPUTS: tuple[OutputType, ...] = ("pil", "pt", "latent")
DAMAGES = (torch.nan, torch.inf)


@contextmanager
def damaged(weight: Tensor, damage: float) -> Iterator[None]:
    sound = weight.view(-1)[0].clone()
    with torch.inference_mode():
        weight.view(-1)[0] = damage
        try:
            yield
        finally:
            weight.view(-1)[0] = sound


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("output_type", OUTPUTS)
def test_qwen_image(ours: Pipeline, output_type: OutputType, damage: float) -> None:
    sound = ours("a", **PAINTING, output_type="latent").images[0]
    with (
        damaged(ours.service.qwen.transformer.proj_out.weight, damage),
        pytest.raises(EngineFailure, match="the picture's values are not finite"),
    ):
        ours("a", **PAINTING, output_type=output_type)
    assert torch.equal(ours("a", **PAINTING, output_type="latent").images[0], sound)


def test_of_the_vae_alone(ours: Pipeline) -> None:
    vae = ours.service.qwen.image_codec.vae
    with damaged(vae.decoder.conv_out.bias, torch.nan):
        ours("a", **PAINTING, output_type="latent")
        for output_type in OUTPUTS[:2]:
            with pytest.raises(EngineFailure, match="the picture's values are not finite"):
                ours("a", **PAINTING, output_type=output_type)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("output_type", OUTPUTS)
def test_sensenova_u1(output_type: OutputType, damage: float) -> None:
    ours = Pipeline.from_pretrained(ROOT / "dense", kv_cache_bytes=64 << 20)
    sound = ours("a", **PAINTING, output_type="latent").images[0]
    head = ours.service.neo.network.get_parameter("fm_modules.fm_head.0.weight")
    with damaged(head, damage), pytest.raises(EngineFailure, match="the picture's values are not finite"):
        ours("a", **PAINTING, output_type=output_type)
    assert torch.equal(ours("a", **PAINTING, output_type="latent").images[0], sound)


def test_within_a_dialogue() -> None:
    """The answer ends there: its picture is not read back, and the dialogue is as before."""
    chat = Chat.from_pretrained(ROOT / "dense", kv_cache_bytes=64 << 20)
    before = chat._dialogue
    neo = chat.service.neo
    script = [neo.tokenizer.image_start, *neo.tokenizer.tokenize("hello")[:1]]
    painting = PaintingOptions(num_inference_steps=2, sizes=((64, 32),))
    with (
        damaged(neo.network.get_parameter("fm_modules.fm_head.0.weight"), torch.nan),
        pytest.raises(EngineFailure, match="the picture's values are not finite"),
    ):
        list(chat.send("draw", painting=painting, seed=1, forced_ids=script))
    assert chat._dialogue is before
    assert chat.service.tree.promised_pages == 0
    assert not any(node.users for node in chat.service.tree)


@pytest.mark.parametrize("damage", DAMAGES)
def test_latents_that_are_given(ours: Pipeline, damage: float) -> None:
    latents = ours("a", **PAINTING, output_type="latent").images[0].clone()
    latents[0, 0] = damage
    with pytest.raises(BadParameter, match="latents holds NaN or infinity") as caught:
        ours("a", **PAINTING | {"seed": None}, latents=latents)
    assert caught.value.param == "latents"
