"""Weights on the host: the same pictures, little on the device; a host that is too small is refused with numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from neo_unify.cases import ROOT
from PIL import Image
from torch import Tensor, nn

from underpaint import Pipeline
from underpaint.config import EngineConfig
from underpaint.errors import BadConfig
from underpaint.models import offload
from underpaint.models.offload import KEPT_FREE, Packed, Streamed, Visiting, check_host, stream
from underpaint.models.qwen_image21 import inspect, load
from underpaint.models.qwen_image21.model import part_bytes
from underpaint.models.roles import Role


class Layer(nn.Module):
    """Of a width of its own, so that layers differ in size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


@pytest.mark.parametrize("widths", [[16], [16, 32], [16, 8, 64, 24, 8], [8] * 6])
def test_streamed_layers_compute_the_same(widths: list[int], seed: int) -> None:
    """Pass after pass; between passes nothing but the host's weights is in the network, whatever is in the places."""
    torch.manual_seed(seed)
    layers = nn.ModuleList(Layer(width) for width in widths)
    network, x = nn.Sequential(nn.Linear(8, 8), *layers), torch.randn(3, 8)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with torch.inference_mode():
        want = network(x)
        streamed = stream(network, layers, "cpu")
        for _ in range(3):
            assert torch.equal(network(x), want)
            assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
            for place in streamed._places:
                place.fill_(255)
            streamed._brought = None
    assert streamed.device_bytes == 2 * max(packed.num_bytes for packed in streamed._packed)


def test_a_layer_is_copied_while_the_one_before_it_works(seed: int) -> None:
    """Each once a pass, one ahead, and never into the place that is read."""
    torch.manual_seed(seed)
    layers = [Layer(8) for _ in range(5)]
    streamed = Streamed(layers, "cpu")
    events: list[str] = []
    bring = streamed._bring

    def watch(number: int) -> None:
        bring(number)
        events.append(f"bring {number}")

    streamed._bring = watch  # type: ignore[method-assign]
    for number, layer in enumerate(layers):
        layer.up.register_forward_hook(lambda *_, number=number: events.append(f"work {number}"))
    with torch.inference_mode():
        for _ in range(2):
            x = torch.randn(2, 8)
            for layer in layers:
                x = layer(x)
    first = ["bring 0", *[event for i in range(5) for event in (f"bring {(i + 1) % 5}", f"work {i}")]]
    assert events == first + first[1:]


def test_a_pass_that_breaks_off_leaves_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    layers = nn.ModuleList(Layer(16) for _ in range(4))
    x = torch.randn(2, 8)
    with torch.inference_mode():
        want = layers[3](layers[2](layers[1](layers[0](x))))
        streamed = Streamed(list(layers), "cpu")
        layers[0](x)
        with pytest.raises(RuntimeError):
            layers[1](torch.randn(2, 9))
        home = zip(layers[1].parameters(), streamed._packed[1]._home, strict=True)
        assert all(parameter.data_ptr() == view.data_ptr() for parameter, view in home)
        assert torch.equal(layers[3](layers[2](layers[1](layers[0](x)))), want)


def test_a_visiting_part_goes_home(seed: int) -> None:
    """Channels-last weights stay so; after an error too the weights are those on the host."""
    torch.manual_seed(seed)
    network = nn.Conv2d(4, 6, 3)
    network.weight.data = network.weight.data.contiguous(memory_format=torch.channels_last)
    before, x = network.weight.clone(), torch.randn(1, 4, 5, 5)
    with torch.inference_mode():
        want = network(x)
        visiting = Visiting(network, "cpu")
        with visiting.there():
            assert network.weight.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(network(x), want)
        with pytest.raises(RuntimeError), visiting.there():
            network(torch.randn(1, 3, 5, 5))
    assert torch.equal(network.weight, before)
    assert network.weight.data_ptr() == visiting._packed.host.data_ptr()


@pytest.mark.parametrize("options", [{}, {"quantize": "fp8"}], ids=str)
def test_the_same_pictures(
    checkpoint: Path, draw_image: Callable[..., Image.Image], options: dict[str, Any], seed: int
) -> None:
    """With all parts on the host, and each alone."""
    image = draw_image(96, 64)
    call: dict[str, Any] = {"seed": seed, "num_inference_steps": 2, "reference_resolution": 64, "output_type": "pt"}
    painted = []
    for parts in ("", "encoder", "vae", "dit", "dit, vae,encoder"):
        pipeline = Pipeline.from_pretrained(checkpoint, offload=parts, kv_cache_bytes=16 << 20, **options)
        painted.append(pipeline("the cat", [image], **call).images[0])
    assert all(torch.equal(picture, painted[0]) for picture in painted)


def test_s49_u6_a_host_that_is_too_small(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, with numbers."""
    monkeypatch.setattr(offload, "available_bytes", lambda: KEPT_FREE + 10240)
    check_host({"vae": 10240})
    with pytest.raises(BadConfig, match=f"dit 6000, vae 5000 bytes.*{KEPT_FREE + 11000} are.*{KEPT_FREE + 10240} are"):
        check_host({"dit": 6000, "vae": 5000})
    monkeypatch.setattr(offload, "available_bytes", lambda: KEPT_FREE)
    check_host({})
    loads: list[str] = []
    monkeypatch.setattr(Packed, "__init__", lambda *_: loads.append("packed"))
    with pytest.raises(BadConfig, match="encoder"):
        Pipeline.from_pretrained(checkpoint, offload="encoder,dit")
    assert loads == []


def test_a_process_needs_room_for_its_own_parts_only(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Understanding's weights are the other process's: where one has loaded, there is no room for them once more."""
    config = EngineConfig(device="cpu", dtype="float32", kv_codec="fp32", offload="encoder,vae,dit")
    of_part = part_bytes(inspect(checkpoint), config)
    for role, parts in ((Role.UNDERSTAND, ("encoder", "vae")), (Role.GENERATE, ("dit",))):
        needed = sum(of_part[part] for part in parts)
        monkeypatch.setattr(offload, "available_bytes", lambda: KEPT_FREE + needed)  # noqa: B023 - called here
        load(checkpoint, config, frozenset({role}))
        monkeypatch.setattr(offload, "available_bytes", lambda: KEPT_FREE + needed - 1)  # noqa: B023
        with pytest.raises(BadConfig, match=f"{parts[0]} {of_part[parts[0]]}"):
            load(checkpoint, config, frozenset({role}))


def test_bytes_of_parts_are_those_loaded(checkpoint: Path) -> None:
    for quantize in ("none", "fp8"):
        config = EngineConfig(device="cpu", dtype="float32", quantize=quantize, kv_cache_bytes=1 << 20)
        counted = part_bytes(inspect(checkpoint), config)
        qwen = Pipeline.from_pretrained(checkpoint, quantize=quantize, kv_cache_bytes=1 << 20).service.qwen
        assert counted["dit"] == sum(p.nbytes for p in qwen.transformer.parameters())
        assert counted["vae"] == sum(p.nbytes for p in qwen.image_codec.vae.parameters())
        in_encoder = sum(p.nbytes for p in qwen.encoder.model.parameters())
        assert in_encoder <= counted["encoder"], "the head that predicts words and the last norm are stored too"


def test_what_does_not_go_together_is_refused(checkpoint: Path) -> None:
    with pytest.raises(BadConfig, match="encoder, vae, dit"):
        EngineConfig(offload="encoder,lora")
    with pytest.raises(BadConfig, match="do not go together"):
        EngineConfig(offload="dit", step_graphs="on")
    with pytest.raises(BadConfig, match=r"Qwen-Image 2\.1"):
        Pipeline.from_pretrained(ROOT / "dense", offload="dit")
