"""A user's mistake is one clear sentence, of the right kind, before any work; the tree of errors is as documented."""

import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from underpaint import Pipeline, errors
from underpaint.errors import (
    BadConfig,
    BadImage,
    BadParameter,
    BadRequest,
    BadSize,
    BudgetTooSmall,
    CheckpointError,
    UnderpaintError,
)
from underpaint.images import read_image


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to damage."""
    root = tmp_path / "copy"
    shutil.copytree(checkpoint, root)
    return root


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_shard(root: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the tensors of the first shard of the transformer."""
    file = min((root / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"^    ([|` ]*)(?:-- )?(\w+)  ", errors.__doc__ or "", re.MULTILINE)
    named = {name for _, name in drawn} | {"UnderpaintError", "PromptTooLong"}
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, UnderpaintError)
    }
    assert named == defined
    codes = [vars(errors)[name].code for name in defined]
    assert len(set(codes)) == len(codes)


class TestCheckpoint:
    def test_missing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="neither a checkpoint directory nor a Hugging Face id"):
            Pipeline.from_pretrained(tmp_path / "nothing" / "here")

    def test_hub_id_that_cannot_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(*_: Any, **__: Any) -> str:
            raise OSError("no network")

        monkeypatch.setattr("underpaint.models.loading.snapshot_download", offline)
        with pytest.raises(CheckpointError, match="could not be downloaded: no network"):
            Pipeline.from_pretrained("Qwen/Qwen-Image-2.1")

    def test_hub_id_is_downloaded(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def download(name: str, **_: Any) -> str:
            asked.append(name)
            return str(checkpoint)

        monkeypatch.setattr("underpaint.models.loading.snapshot_download", download)
        Pipeline.from_pretrained("Qwen/Qwen-Image-2.1")
        assert asked == ["Qwen/Qwen-Image-2.1"]

    @pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "processor", "scheduler"])
    def test_missing_part(self, broken: Path, part: str) -> None:
        shutil.rmtree(broken / part)
        with pytest.raises(CheckpointError, match=f"the part {part} is missing"):
            Pipeline.from_pretrained(broken)

    def test_missing_index(self, broken: Path) -> None:
        (broken / "model_index.json").unlink()
        with pytest.raises(CheckpointError, match=r"model_index\.json is missing"):
            Pipeline.from_pretrained(broken)

    def test_broken_json(self, broken: Path) -> None:
        (broken / "transformer" / "config.json").write_text("{")
        with pytest.raises(CheckpointError, match="not readable JSON"):
            Pipeline.from_pretrained(broken)

    def test_other_family(self, broken: Path) -> None:
        edit_json(broken / "model_index.json", lambda v: v.update(_class_name="FluxPipeline"))
        with pytest.raises(CheckpointError, match="holds a 'FluxPipeline'"):
            Pipeline.from_pretrained(broken)

    @pytest.mark.parametrize(
        ("file", "change", "sentence"),
        [
            ("model_index.json", {"refiner": ["a", "b"]}, "unknown keys: refiner"),
            ("transformer/config.json", {"num_layer": 3}, "unknown keys: num_layer"),
            ("transformer/config.json", {"causal_condition": False}, "causal_condition must be True"),
            ("transformer/config.json", {"patch_size": 2}, "patch_size must be 1"),
            ("transformer/config.json", {"num_layers": "3"}, "num_layers must be of type int"),
            ("transformer/config.json", {"axes_dims_rope": [4, 6, 8]}, "must add up to attention_head_dim"),
            ("vae/config.json", {"zdim": 3}, "unknown keys: zdim"),
            ("vae/config.json", {"_class_name": "AutoencoderKL"}, "not an AutoencoderKLQwenImage21"),
            ("scheduler/scheduler_config.json", {"shfit": 3}, "unknown keys in scheduler_config.json: shfit"),
            ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "only FlowMatchEuler"),
        ],
    )
    def test_config_that_cannot_be_honoured(
        self, broken: Path, file: str, change: dict[str, Any], sentence: str
    ) -> None:
        edit_json(broken / file, lambda v: v.update(change))
        with pytest.raises(CheckpointError, match=sentence):
            Pipeline.from_pretrained(broken)

    def test_unknown_default(self, broken: Path) -> None:
        (broken / "underpaint.json").write_text('{"resolution": 128}')
        with pytest.raises(CheckpointError, match="unknown keys: resolution"):
            Pipeline.from_pretrained(broken)

    def test_the_extra_key_of_the_released_config_is_known(self, broken: Path) -> None:
        edit_json(broken / "transformer" / "config.json", lambda v: v.update(causal_block=True))
        Pipeline.from_pretrained(broken)

    def test_missing_tensor(self, broken: Path) -> None:
        edit_shard(broken, lambda t: t.__delitem__(min(t)))
        with pytest.raises(CheckpointError, match="disagree about"):
            Pipeline.from_pretrained(broken)

    def test_missing_and_unknown_tensor_without_index(self, broken: Path) -> None:
        file = broken / "vae" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(file)
        extra = {**tensors, "decoder.extra.weight": torch.zeros(1)}
        save_file(extra, file)
        with pytest.raises(CheckpointError, match=r"unknown tensors: decoder\.extra\.weight"):
            Pipeline.from_pretrained(broken)
        save_file({k: v for k, v in tensors.items() if k != "quant_conv.weight"}, file)
        with pytest.raises(CheckpointError, match=r"missing tensors: quant_conv\.weight"):
            Pipeline.from_pretrained(broken)

    def test_wrong_shape(self, broken: Path) -> None:
        edit_json(broken / "transformer" / "config.json", lambda v: v.update(mlp_ratio=4))
        with pytest.raises(CheckpointError, match=r"has shape \(.*\), the config asks for \(.*\)"):
            Pipeline.from_pretrained(broken)

    def test_wrong_dtype(self, broken: Path) -> None:
        edit_shard(broken, lambda t: t.update({name: x.to(torch.int8) for name, x in t.items()}))
        with pytest.raises(CheckpointError, match="is I8; only F32, F16 and BF16"):
            Pipeline.from_pretrained(broken)

    def test_missing_and_truncated_shard(self, broken: Path) -> None:
        file = min((broken / "transformer").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(CheckpointError, match="is damaged or not a safetensors file"):
            Pipeline.from_pretrained(broken)
        file.unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            Pipeline.from_pretrained(broken)

    def test_missing_encoder_tensor(self, broken: Path) -> None:
        file = broken / "text_encoder" / "model.safetensors"
        tensors = load_file(file)
        tensors.pop("model.language_model.layers.0.mlp.up_proj.weight")
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"missing tensors: model\.language_model\.layers\.0\.mlp\.up_proj"):
            Pipeline.from_pretrained(broken)

    def test_parts_that_do_not_go_together(self, broken: Path) -> None:
        config = broken / "transformer" / "config.json"
        model = tiny.make_transformer()
        wide = type(model)(**{**dict(model.config), "context_in_dim": 32})
        shutil.rmtree(broken / "transformer")
        wide.save_pretrained(config.parent)
        with pytest.raises(CheckpointError, match="disagree about the width of the text"):
            Pipeline.from_pretrained(broken)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"dtpye": "float32"}, "unknown options: dtpye"),
            ({"dtype": "int8"}, "dtype is 'int8'"),
            ({"device": "tpu"}, "'tpu'"),
            ({"device": "mps"}, "is not supported"),
            ({"device": "cpu:0"}, "is not supported"),
            ({"device": "cuda:63"}, "is not on this machine"),
            ({"kv_codec": "int4"}, "kv_codec is 'int4'"),
            ({"attention_backend": "flash"}, "attention_backend is 'flash'"),
            ({"kv_cache_bytes": -1}, "cannot be negative"),
            ({"kv_cache_bytes": 2**60}, "bytes of memory"),
            ({"max_batch_rows": 0}, "at least 1"),
        ],
    )
    def test_refused(self, checkpoint: Path, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(BadConfig, match=sentence):
            Pipeline.from_pretrained(checkpoint, **options)

    def test_torch_dtype_is_taken(self, checkpoint: Path) -> None:
        ours = Pipeline.from_pretrained(checkpoint, dtype=torch.bfloat16)
        assert ours.service.qwen.transformer.proj_out.weight.dtype == torch.bfloat16
        assert ours.service.config.kv_codec == "bf16"
        latents = ours("a", seed=1, num_inference_steps=2, width=64, height=64, output_type="latent").images[0]
        assert latents.dtype == torch.bfloat16
        assert bool(latents.isfinite().all())


class TestRequest:
    @pytest.mark.parametrize(
        ("options", "kind", "sentence"),
        [
            ({"width": 100}, BadSize, "width is 100; it must be a multiple of 32 up to 4096, the nearest is 96 or 128"),
            ({"height": 5}, BadSize, "the nearest is 32"),
            ({"height": 0}, BadSize, "the nearest is 32"),
            ({"width": 5000}, BadSize, "the nearest is 4096"),
            ({"width": 64.0}, BadSize, "whole number of pixels"),
            ({"reference_resolution": 100}, BadSize, "the nearest is 96 or 128"),
            ({"true_cfg_scale": math.nan, "negative_prompt": ""}, BadParameter, "number from 0 up, not nan"),
            ({"true_cfg_scale": math.inf, "negative_prompt": ""}, BadParameter, "number from 0 up, not inf"),
            ({"true_cfg_scale": -1.0}, BadParameter, "number from 0 up"),
            ({"true_cfg_scale": "4"}, BadParameter, "number from 0 up"),
            ({"true_cfg_scale": 4.0}, BadParameter, "needs a negative_prompt"),
            ({"negative_prompt": "blurred"}, BadParameter, "has no effect without true_cfg_scale"),
            ({"negative_prompt": 3}, BadParameter, "negative_prompt must be text"),
            ({"num_inference_steps": 0}, BadParameter, "num_inference_steps must be at least 1"),
            ({"num_inference_steps": 2.5}, BadParameter, "whole number"),
            ({"num_images": 0}, BadParameter, "num_images must be at least 1"),
            ({"seed": -1}, BadParameter, "seed must be from 0"),
            ({"seed": 2**63}, BadParameter, "seed must be from 0"),
            ({"seed": 1.5}, BadParameter, "seed must be a whole number"),
            ({"sigmas": []}, BadParameter, "strictly falling"),
            ({"sigmas": [0.5, 0.7]}, BadParameter, "strictly falling"),
            ({"sigmas": [1.0, math.nan]}, BadParameter, "strictly falling"),
            ({"sigmas": 0.5}, BadParameter, "strictly falling"),
            ({"sigmas": "1"}, BadParameter, "strictly falling"),
            ({"sigmas": [None]}, BadParameter, "strictly falling"),
            ({"sigmas": [10**400]}, BadParameter, "strictly falling"),
            ({"sigmas": [1.0, 0.9999999999]}, BadParameter, "strictly falling"),
            ({"sigmas": [1.0, 1e-300]}, BadParameter, "strictly falling"),
            ({"sigmas": [1.5, 0.7]}, BadParameter, "at most 1"),
            ({"sigmas": [1.0, 0.0]}, BadParameter, "above 0"),
            ({"sigmas": [1.0], "num_inference_steps": 1}, BadParameter, "not both"),
            ({"output_type": "np"}, BadParameter, "output_type must be one of pil, pt, latent"),
            ({"latents": torch.zeros(5, 8)}, BadParameter, r"latents has shape \(5, 8\)"),
            ({"prompt": []}, BadParameter, "empty list"),
            ({"prompt": [1]}, BadParameter, "prompt must be text"),
            ({"prompt": 5}, BadParameter, "prompt must be text"),
            ({"prompt": None}, BadParameter, "prompt must be text"),
            ({"prompt": "half \ud83d a pair"}, BadParameter, "no Unicode"),
            ({"negative_prompt": "\ud83d"}, BadParameter, "no Unicode"),
            ({"images": None}, BadParameter, "images must be a list"),
            ({"latents": [1, 2]}, BadParameter, "latents must be a tensor"),
            ({"images": [Image.new("RGB", (32, 32))] * 11}, BadParameter, "the limit is 10"),
            ({"images": Image.new("RGB", (32, 32))}, BadParameter, "must be a list"),
            ({"images": "a.png"}, BadParameter, "must be a list"),
        ],
    )
    def test_refused(self, ours: Pipeline, options: dict[str, Any], kind: type[BadRequest], sentence: str) -> None:
        call = {"prompt": "a", "width": 64, "height": 64, **options}
        with pytest.raises(kind, match=sentence) as caught:
            ours(**call)
        assert caught.value.status == 400
        assert "\n" not in str(caught.value)
        assert ours.service.pool.used_bytes == 0

    def test_unknown_parameter(self, ours: Pipeline) -> None:
        with pytest.raises(TypeError, match="guidance"):
            ours("a", guidance=4.0)  # type: ignore[call-arg]

    def test_budget_too_small_says_how_many_bytes(self, checkpoint: Path, seed: int) -> None:
        page = Pipeline.from_pretrained(checkpoint).service.pool.page_bytes
        ours = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=2 * page)
        images: Any = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
        call: dict[str, Any] = {"reference_resolution": 64, "seed": seed, "num_inference_steps": 1}
        with pytest.raises(BudgetTooSmall, match=f"needs {3 * page} bytes") as caught:
            ours("a", images, **call)
        assert caught.value.needed_bytes == 3 * page
        assert ours.service.pool.used_bytes == 0
        enough = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=caught.value.needed_bytes)
        enough("a", images, **call)
        with pytest.raises(BudgetTooSmall):
            Pipeline.from_pretrained(checkpoint, kv_cache_bytes=1)("a", width=64, height=64)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


class TestImages:
    @pytest.mark.parametrize(
        ("source", "sentence"),
        [
            (b"", "not an image file"),
            (b"hello, this is text", "not an image file"),
            (encoded(Image.new("RGB", (300, 300), "red"), "JPEG")[:-128], "truncated or damaged"),
            (encoded(Image.effect_noise((300, 300), 50))[:-400], "truncated or damaged"),
            ("no/such/file.png", "there is no file"),
            (Image.new("RGB", (2010, 10)), "may differ by a factor of 200 at most"),
            (np.zeros((4, 4), dtype=np.float32), "uint8 array, it is float32"),
            (np.zeros((4, 4, 7), dtype=np.uint8), "is no picture"),
            (np.zeros((0, 4, 3), dtype=np.uint8), "non-empty"),
            (3, "must be a PIL image"),
        ],
    )
    def test_refused(self, ours: Pipeline, source: Any, sentence: str) -> None:
        with pytest.raises(BadImage, match=sentence) as caught:
            ours("a", [Image.new("RGB", (32, 32)), source])
        assert caught.value.param == "images"
        assert str(caught.value).startswith("image 2")

    def test_directory(self, tmp_path: Path) -> None:
        with pytest.raises(BadImage, match="cannot be read"):
            read_image(tmp_path, "image 1")

    def test_too_many_pixels(self) -> None:
        with pytest.raises(BadImage, match="the limit is"):
            read_image(Image.new("1", (1 << 14, 1 << 14)), "image 1")
        with pytest.raises(BadImage, match="too many pixels"):
            read_image(encoded(Image.new("1", (20_000, 20_000))), "image 1")

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
    def test_every_mode_works(self, ours: Pipeline, mode: str, seed: int) -> None:
        image = Image.new(mode, (40, 30))
        got = read_image(image, "image 1")
        assert (got.mode, got.size) == ("RGBA", (40, 30))
        ours("a", [image], reference_resolution=64, num_inference_steps=1, seed=seed)

    def test_16_bit_is_scaled_not_clipped(self) -> None:
        values = np.array([[0, 32768, 65535]], dtype=np.uint16)
        got = read_image(encoded(Image.fromarray(values)), "image 1")
        assert [got.getpixel((x, 0))[0] for x in range(3)] == [0, 128, 255]  # type: ignore[index]

    def test_a_single_pixel_works(self, ours: Pipeline, seed: int) -> None:
        ours("a", [Image.new("L", (1, 1))], reference_resolution=64, num_inference_steps=1, seed=seed)

    def test_the_longest_picture_works(self, ours: Pipeline, seed: int) -> None:
        picture = ours("a", [Image.new("L", (200, 1))], reference_resolution=64, num_inference_steps=1, seed=seed)
        assert picture.images[0].size == (896, 32)

    def test_one_that_rounding_makes_too_long(self, ours: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        """165 to 1 is 13152 x 64 at 1024, which the encoder's processor does not take: so nothing is encoded."""
        monkeypatch.setattr(ours.service.qwen.image_codec, "encode", lambda _: pytest.fail("was encoded"))
        images = [Image.new("L", (32, 32)), Image.new("L", (1650, 10))]
        with pytest.raises(BadImage, match=r"image 2 is 1650x10, .* at 13152x64; .* factor of 200") as caught:
            ours("a", images, width=64, height=64, reference_resolution=1024, num_inference_steps=1)
        assert caught.value.param == "images"

    def test_exif_orientation_is_applied(self) -> None:
        image = Image.new("RGB", (20, 10))
        exif = image.getexif()
        exif[0x0112] = 6
        assert read_image(encoded(image, "JPEG", exif=exif), "image 1").size == (10, 20)

    def test_a_path_and_its_bytes_and_its_picture_are_one_reference(
        self, ours: Pipeline, tmp_path: Path, draw_image: Callable[..., Image.Image], seed: int
    ) -> None:
        image = draw_image(64, 64)
        path = tmp_path / "a.png"
        path.write_bytes(encoded(image))
        sources: list[Any] = [image, path, str(path), path.read_bytes(), np.asarray(image)]
        for source in sources:
            ours("a", [source], reference_resolution=64, num_inference_steps=1, seed=seed)
        assert (ours.service.tree.hits, ours.service.tree.misses) == (4, 1)
        assert (ours.service.qwen.latents.hits, ours.service.qwen.latents.misses) == (4, 1)
