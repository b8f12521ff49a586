"""The training pass equals transformers' encoder and diffusers' transformer, and a training state can be resumed."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pocket.build import LATENT_CHANNELS, TRANSFORMER_CONFIG, VISION_PATCH, build_encoder, build_transformer
from pocket.encoder import EncoderBatch, patchify
from pocket.paint_model import TARGET_ROWS, VISION_MERGE, PaintModel, TaskBatch, task_geometry
from pocket.pool import TOKENS, on_white, tokenize
from pocket.scenes import CANVAS, render, scene_row
from pocket.tasks import Example, draw_example
from pocket.tokenizer import IMAGE_TOKEN, SYSTEM_TURN, build_tokenizer
from pocket.training import Trainer, cosine_rate
from pocket.vae_stage import to_model
from underpaint.models.qwen_image21.transformer import QwenImage21Transformer

COUNT, COPIES = 2, 2


def draw_loud(module: nn.Module, seed: int) -> None:
    """Weights large enough for text, references and positions all to matter in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            scale = 0.1 if p.ndim == 1 else 1.2 / p.flatten(1).shape[1] ** 0.5
            p.copy_(torch.randn(p.shape, generator=generator) * scale)
            if p.ndim == 1 and "norm" in name and "text_norm" not in name and name.endswith("weight"):
                p.add_(1.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    model = build_encoder(tokenizer, seed=0).eval()
    draw_loud(model, 1)
    return model


@pytest.fixture(scope="module")
def transformer() -> QwenImage21Transformer:
    model = build_transformer(seed=0)
    draw_loud(model, 2)
    return model


def make_batch(tokenizer: PreTrainedTokenizerFast, num_references: int) -> TaskBatch:
    rng = random.Random(num_references)
    torch.manual_seed(num_references)
    examples: list[Example] = [draw_example(rng, "train", num_references) for _ in range(COUNT)]
    ids, lengths = tokenize(tokenizer, [e.prompt for e in examples], num_references, TOKENS[num_references])
    rows = [scene_row(scene) for example in examples for scene in example.references]
    references = torch.empty(0, 3, CANVAS, CANVAS, dtype=torch.uint8)
    if rows:
        references = on_white((render(torch.tensor(rows)) * 255).round().to(torch.uint8))
    return TaskBatch(
        token_ids=ids.long(),
        lengths=lengths.long(),
        references=to_model(references).reshape(COUNT, num_references, 3, CANVAS, CANVAS),
        reference_latents=torch.randn(COUNT, num_references, TARGET_ROWS, LATENT_CHANNELS),
        noisy=torch.randn(COUNT, COPIES, TARGET_ROWS, LATENT_CHANNELS),
        timesteps=torch.rand(COUNT, COPIES),
    )


def reference_hidden(
    encoder: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, batch: TaskBatch, index: int
) -> Tensor:
    """(real tokens, width) from transformers' own forward pass, before the final norm."""
    ids = batch.token_ids[index, : batch.lengths[index]]
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    inputs = {"input_ids": ids[None], "mm_token_type_ids": (ids == image_token).int()[None]}
    if len(batch.references[index]):
        processor = Qwen2VLImageProcessorPil(
            patch_size=16,
            merge_size=2,
            temporal_patch_size=2,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            size={"shortest_edge": 1024, "longest_edge": 1 << 24},
        )
        arrays = ((batch.references[index] + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        inputs |= processor(images=[Image.fromarray(array) for array in arrays], return_tensors="pt")
    kept: list[Tensor] = []
    hook = encoder.model.language_model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    encoder(**inputs)
    hook.remove()
    return kept[0][0]


@torch.no_grad()
def test_training_pass_equals_the_public_classes(
    encoder: Qwen3VLForConditionalGeneration, transformer: QwenImage21Transformer, tokenizer: PreTrainedTokenizerFast
) -> None:
    axes = TRANSFORMER_CONFIG.axes_dims_rope
    geometries = [task_geometry(tokenizer, encoder, axes, n, TOKENS[n]) for n in range(3)]
    batches = [make_batch(tokenizer, n) for n in range(3)]
    model = PaintModel(encoder, transformer, geometries)
    velocities = model(batches)
    config = vars(TRANSFORMER_CONFIG)
    reference = QwenImage21Transformer2DModel(**config).eval()
    reference.load_state_dict(transformer.state_dict())
    system = len(tokenizer(SYSTEM_TURN).input_ids)
    for geometry, batch, velocity in zip(geometries, batches, velocities, strict=True):
        patches = patchify(batch.references.flatten(0, 1), VISION_PATCH, VISION_MERGE)
        inputs = EncoderBatch(batch.token_ids, patches, geometry.slots, geometry.cos, geometry.sin)
        hidden = model.encoder([inputs])[0]
        for index in range(COUNT):
            expected = reference_hidden(encoder, tokenizer, batch, index)
            torch.testing.assert_close(hidden[index, : len(expected)], expected, rtol=1e-4, atol=1e-4)
            slots = torch.isin(torch.arange(system, len(expected)), geometry.slots)
            target_slots = torch.ones(TARGET_ROWS // 4, dtype=torch.bool)
            for copy in range(COPIES):
                latents = torch.cat([batch.reference_latents[index].flatten(0, 1), batch.noisy[index, copy]])
                out = reference(
                    hidden_states=latents[None],
                    encoder_hidden_states=expected[None, system:],
                    timestep=batch.timesteps[index, copy : copy + 1],
                    img_shapes=[[(1, 8, 8)] * (geometry.num_references + 1)],
                    img_mask=torch.cat([slots, target_slots])[None],
                    return_dict=False,
                )[0][0, -TARGET_ROWS:]
                error = (velocity[index, copy] - out).norm() / out.norm()
                assert error < 1e-4, (geometry.num_references, index, copy, float(error))


def test_padding_is_not_seen(
    encoder: Qwen3VLForConditionalGeneration, transformer: QwenImage21Transformer, tokenizer: PreTrainedTokenizerFast
) -> None:
    geometry = task_geometry(tokenizer, encoder, TRANSFORMER_CONFIG.axes_dims_rope, 0, TOKENS[0])
    model = PaintModel(encoder, transformer, [geometry])
    batch = make_batch(tokenizer, 0)
    with torch.no_grad():
        before = model([batch])[0]
        padding = torch.arange(TOKENS[0]) >= batch.lengths[:, None]
        batch.token_ids[padding] = 17
        torch.testing.assert_close(model([batch])[0], before)


def test_trainer_resumes_where_it_stopped(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Trainer]:
        torch.manual_seed(0)
        module = nn.Linear(3, 2).bfloat16().float()
        return module, Trainer(module, decay=0.9, betas=(0.9, 0.99), weight_decay=0.1)

    def advance(module: nn.Module, trainer: Trainer, steps: int) -> None:
        for _ in range(steps):
            trainer.set_rate(0.1)
            trainer.optimizer.zero_grad()
            trainer.update(module(torch.ones(1, 3)).square().sum())
            trainer.step += 1

    module, trainer = make()
    advance(module, trainer, 5)
    trainer.save(tmp_path)
    other, resumed = make()
    resumed.load(tmp_path)
    assert resumed.step == 5
    advance(module, trainer, 5)
    advance(other, resumed, 5)
    # The state is kept in bfloat16: 8 bits of mantissa.
    for name, average in trainer.average.items():
        torch.testing.assert_close(resumed.average[name], average, rtol=0.02, atol=0.02)


def test_rate_warms_up_and_falls() -> None:
    rates = [cosine_rate(step, 1000, 1e-3, 100) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-5)
    assert max(rates) == pytest.approx(1e-3)
    assert rates[99] == pytest.approx(1e-3)
    assert all(a > b for a, b in itertools.pairwise(rates[100:]))
    assert rates[-1] < 3e-5
