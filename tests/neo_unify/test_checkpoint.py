"""Tensors by name, shape and count; loading by role; strict configs; fused LoRAs."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from neo_unify.cases import CONFIG, ROOT, VARIANTS, golden
from underpaint.errors import CheckpointError
from underpaint.models.neo_unify import BOTH_ROLES, Role, inspect, load
from underpaint.models.neo_unify.config import FlowConfig, LanguageConfig, NeoConfig, VisionConfig
from underpaint.models.neo_unify.model import skeleton

UNDERSTAND, GENERATE = frozenset({Role.UNDERSTAND}), frozenset({Role.GENERATE})
MLP_HEAD_WIDTH = 4096
A3B = LanguageConfig(
    model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_key_value_heads=4, intermediate_size=6144,
    rope_theta=1e7, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, gen_num_experts=32,
)  # fmt: skip


def tensors_of(config: NeoConfig, roles: frozenset[Role] = BOTH_ROLES) -> dict[str, Tensor]:
    return skeleton(config, roles).state_dict()


def count(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def copy_of(variant: str, directory: Path) -> Path:
    root = directory / variant
    shutil.copytree(ROOT / variant, root)
    return root


def edit_config(root: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((root / "config.json").read_text())
    edit(config)
    (root / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("head_width", "parameters"), [(None, 17_532_854_464), (MLP_HEAD_WIDTH, 17_552_340_992)])
def test_the_8b_has_the_published_tensors(head_width: int | None, parameters: int) -> None:
    """U1.5 has the convolution head, U1 the two-layer one."""
    tensors = tensors_of(NeoConfig(LanguageConfig(), VisionConfig(), FlowConfig(), head_width))
    assert len(tensors) == 1116
    assert count(tensors) == parameters
    last = "language_model.model.layers.41"
    assert tensors[f"{last}.self_attn.k_proj_mot_gen.weight"].shape == (1024, 4096)
    assert tensors[f"{last}.self_attn.q_norm_hw_mot_gen.weight"].shape == (64,)
    assert tensors["fm_modules.vision_model_mot_gen.embeddings.dense_embedding.weight"].shape == (4096, 1024, 2, 2)


def test_u9_size_by_role() -> None:
    """Each role's tensors are its own: together they are the whole, and they have none in common."""
    config = NeoConfig(LanguageConfig(), VisionConfig(), FlowConfig(), MLP_HEAD_WIDTH)
    whole, understand, generate = (tensors_of(config, roles) for roles in (BOTH_ROLES, UNDERSTAND, GENERATE))
    assert whole.keys() == understand.keys() | generate.keys()
    assert not understand.keys() & generate.keys()
    assert all("mot_gen" in name or name.startswith("fm_modules.") for name in generate)
    assert count(understand) == pytest.approx(8.121e9 + 1.245e9, rel=1e-3)
    assert count(generate) == pytest.approx(8.186e9, rel=1e-3)


def test_u9_size_of_the_experts() -> None:
    """The A3B, from two of its 48 layers."""
    config = NeoConfig(replace(A3B, num_hidden_layers=2), VisionConfig(llm_hidden_size=2048), FlowConfig(), 2048)
    for roles, published in ((UNDERSTAND, 29.9e9), (GENERATE, 8.16e9)):
        layers = {name: x for name, x in tensors_of(config, roles).items() if ".layers." in name}
        assert count(layers) * 24 == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensor_names_are_the_checkpoints(variant: str) -> None:
    checkpoint = inspect(ROOT / variant)
    assert checkpoint.weights.tensors.keys() == load_file(ROOT / variant / "model.safetensors").keys()


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("variant", VARIANTS)
def test_u17_a_process_for_one_role_loads_its_own_tensors(
    variant: str, role: Role, complete: bool, tmp_path: Path
) -> None:
    """From a complete checkpoint, and from one that has only these."""
    root = copy_of(variant, tmp_path)
    roles = frozenset({role})
    own = inspect(root, roles).weights
    if not complete:
        weights = load_file(root / "model.safetensors")
        save_file({name: weights[name] for name in own.tensors}, root / "model.safetensors")
    model = load(root, CONFIG, roles)
    whole = golden(variant).model.network.state_dict()
    loaded = model.network.state_dict()
    assert 0 < len(loaded) < len(whole)
    assert loaded.keys() == own.tensors.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.items())
    assert own.num_bytes == sum(2 * tensor.numel() for tensor in loaded.values())


def test_u15_the_head_is_known_by_its_tensors(tmp_path: Path) -> None:
    """Repacked checkpoints do not always say in their config which head they have."""
    root = copy_of("pixelhead", tmp_path)
    edit_config(root, lambda config: config.pop("use_pixel_head"))
    assert inspect(root).config.head_width is None
    assert inspect(ROOT / "dense").config.head_width == 256


def test_u16_shards_are_found_by_their_index(tmp_path: Path) -> None:
    """Whatever the shards are called and however many of their numbers are missing."""
    root = copy_of("dense", tmp_path)
    weights = load_file(root / "model.safetensors")
    (root / "model.safetensors").unlink()
    shards = {f"model-0000{number}-of-00009.safetensors": sorted(weights)[number % 3 :: 3] for number in (1, 5, 9)}
    for file, names in shards.items():
        save_file({name: weights[name] for name in names}, root / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load(root, CONFIG).network.state_dict()
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in weights.items())


def test_u15_a_lost_lm_head_or_head_is_named(tmp_path: Path) -> None:
    root = copy_of("dense", tmp_path)
    weights = load_file(root / "model.safetensors")
    for lost in ("language_model.lm_head.weight", "fm_modules.fm_head.0.weight"):
        save_file({name: x for name, x in weights.items() if name != lost}, root / "model.safetensors")
        with pytest.raises(CheckpointError, match=lost):
            inspect(root)


def test_surplus_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    root = copy_of("dense", tmp_path)
    weights = load_file(root / "model.safetensors")
    save_file({**weights, "fm_modules.extra": torch.zeros(1)}, root / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unknown tensors: fm_modules\.extra"):
        inspect(root, UNDERSTAND)
    name = "language_model.model.norm.weight"
    save_file({**weights, name: torch.ones(7)}, root / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \(7,\)"):
        inspect(root)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: c.update(nois_scale=2.0), "unknown keys: nois_scale"),
        (lambda c: c["llm_config"].update(qk_norm=True), "llm_config: unknown keys: qk_norm"),
        (lambda c: c.update(noise_scale_mode="none"), "noise_scale_mode must be 'resolution'"),
        (lambda c: c.update(concat_time_token_num=1), "concat_time_token_num must be 0"),
        (lambda c: c["llm_config"].update(rope_scaling={"type": "yarn"}), "rope_scaling must be None"),
        (lambda c: c["llm_config"].update(pure_llm=True), "llm_config: pure_llm must be False"),
        (lambda c: c["llm_config"].update(num_hidden_layers="3"), "num_hidden_layers must be of type int"),
        (lambda c: c["llm_config"].update(hidden_size=True), "hidden_size must be of type int"),
        (lambda c: c.update(noise_scale="big"), "noise_scale must be of type float"),
        (lambda c: c["llm_config"].update(model_type="qwen3_moe"), "num_experts is missing"),
        (lambda c: c["vision_config"].update(llm_hidden_size=64), "disagree about the width"),
        (lambda c: c.pop("vision_config"), "vision_config is missing"),
    ],
)
def test_configs_are_strict(edit: Callable[[dict[str, Any]], None], sentence: str, tmp_path: Path) -> None:
    root = copy_of("dense", tmp_path)
    edit_config(root, edit)
    with pytest.raises(CheckpointError, match=sentence):
        inspect(root)


def test_published_keys_that_do_not_matter_are_accepted(tmp_path: Path) -> None:
    root = copy_of("dense", tmp_path)

    def edit(config: dict[str, Any]) -> None:
        config.update(t_eps=0.05, timestep_shift=1.0, P_mean=-0.8, P_std=0.8, use_adaLN=False, patch_size=16)
        config.update(auto_map={"AutoConfig": "configuration.NEOChatConfig"}, torch_dtype="bfloat16", noise_scale=1)
        config["llm_config"].update(layer_types=["full_attention"] * 3, sliding_window=None, max_window_layers=3)
        config["llm_config"].update(_name_or_path=None, use_deepep=False, pure_llm=False)  # as in U1.5-8B-MoT-Preview

    edit_config(root, edit)
    assert load(root, CONFIG).config == golden("dense").model.config


def test_what_saving_by_the_published_classes_adds_is_accepted(tmp_path: Path) -> None:
    """Every part with all defaults of transformers 4, two numbers of vision_config in lists, features that are off."""
    root = copy_of("dense", tmp_path)
    defaults = {
        "chunk_size_feed_forward": 0, "is_decoder": False, "cross_attention_hidden_size": None, "pruned_heads": {},
        "bad_words_ids": None, "torchscript": False, "max_length": 20, "num_beams": 1, "num_beam_groups": 1,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0, "min_length": 0,
        "length_penalty": 1.0, "num_return_sequences": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
        "prefix": None, "problem_type": None, "return_dict": True, "a_feature_that_is_off": False,
    }  # fmt: skip

    def edit(config: dict[str, Any]) -> None:
        vision = config["vision_config"]
        vision |= {"llm_hidden_size": [vision["llm_hidden_size"]], "downsample_ratio": [0.5]}
        for part in (config, config["llm_config"], vision):
            part |= defaults
        vision["tie_word_embeddings"] = True

    edit_config(root, edit)
    assert load(root, CONFIG).config == golden("dense").model.config


def test_the_published_files(tmp_path: Path) -> None:
    """U1.5 as it is released: painting in fp32 and understanding in bf16, no tokenizer.json, gaps between shards."""
    root = copy_of("dense", tmp_path)
    tensors = load_file(root / "model.safetensors")
    (root / "model.safetensors").unlink()
    understanding: dict[str, Tensor] = {}
    painting: dict[str, Tensor] = {}
    parts = {"model-00001-of-00003.safetensors": understanding, "model-00003-of-00003.safetensors": painting}
    for name, tensor in tensors.items():
        if "mot_gen" in name or name.startswith("fm_modules"):
            painting[name] = tensor
        else:
            understanding[name] = tensor.bfloat16()
    for file, part in parts.items():
        save_file(part, root / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tokenizer = json.loads((root / "tokenizer.json").read_text())
    (root / "tokenizer.json").unlink()
    (root / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    merges = ("".join(m) if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"])
    (root / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    (root / "added_tokens.json").write_text(json.dumps(added))
    settings = json.loads((root / "tokenizer_config.json").read_text())
    (root / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "Qwen2Tokenizer"}))

    model, want = load(root, CONFIG), golden("dense").model
    for name, weight in model.network.state_dict().items():
        assert torch.equal(weight, (painting | understanding)[name].float()), name
    text = "<|im_start|>user\n<image> 画一个圆 circle's<|im_end|>\n<think>\n\n</think>\n\n<img>"
    assert model.tokenizer.tokenize(text) == want.tokenizer.tokenize(text)


def test_experts_are_found_in_the_config() -> None:
    language = golden("moe").model.config.language
    understand, generate = (language.feed_forward(role) for role in Role)
    assert (understand.num_experts, understand.num_chosen, understand.width) == (8, 2, 64)
    assert (generate.num_experts, generate.num_chosen, generate.width) == (4, 2, 96)
    fallback = A3B.feed_forward(Role.GENERATE)
    assert (fallback.num_experts, fallback.num_chosen, fallback.width) == (32, 8, 768)
    assert LanguageConfig().feed_forward(Role.GENERATE).num_experts == 0


RANK, ALPHA = 4, 8.0
LORA_TARGETS = {
    "dense": ("language_model.model.layers.1.self_attn.q_proj_mot_gen", "fm_modules.fm_head.2"),
    "pixelhead": ("language_model.model.layers.0.mlp_mot_gen.down_proj", "fm_modules.fm_head.conv2"),
}


def make_lora(variant: str, path: Path, rename: Callable[[str], str], alpha: bool = True) -> dict[str, Tensor]:
    """Write a LoRA for ``LORA_TARGETS``; the fp32 update of every weight, by its name."""
    draw = torch.Generator().manual_seed(0)
    weights = golden(variant).model.network.state_dict()
    tensors: dict[str, Tensor] = {}
    updates: dict[str, Tensor] = {}
    for module in LORA_TARGETS[variant]:
        out, *inner = weights[f"{module}.weight"].shape
        up = torch.randn((out, RANK, *[1] * (len(inner) - 1)), generator=draw)
        down = torch.randn((RANK, *inner), generator=draw)
        tensors |= {f"{rename(module)}.lora_up.weight": up, f"{rename(module)}.lora_down.weight": down}
        if alpha:
            tensors[f"{rename(module)}.alpha"] = torch.tensor(ALPHA)
        product = torch.einsum("or,ri->oi", up.flatten(1), down.flatten(1)).reshape(out, *inner)
        updates[f"{module}.weight"] = product * (ALPHA / RANK if alpha else 1.0)
    save_file(tensors, path)
    return updates


@pytest.mark.parametrize("variant", LORA_TARGETS)
@pytest.mark.parametrize(
    ("rename", "alpha"),
    [
        (lambda module: module, True),
        (lambda module: f"diffusion_model.{module}", False),
        (lambda module: "lora_unet_" + module.replace(".", "_"), True),
    ],
)
def test_u8_lora_is_fused(variant: str, rename: Callable[[str], str], alpha: bool, tmp_path: Path) -> None:
    """Linear layers and convolutions, in each way of naming; all other weights stay as they are."""
    path = tmp_path / "lora.safetensors"
    updates = make_lora(variant, path, rename, alpha)
    before = golden(variant).model.network.state_dict()
    after = load(ROOT / variant, replace(CONFIG, lora=(f"{path}=0.5",))).network.state_dict()
    for name, weight in after.items():
        want = before[name] + 0.5 * updates[name] if name in updates else before[name]
        torch.testing.assert_close(weight, want, rtol=1e-6, atol=1e-6)
    assert updates


def test_u8_a_lora_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    config = replace(CONFIG, lora=(str(path),))
    make_lora("dense", path, lambda module: module)
    tensors = load_file(path)
    target = LORA_TARGETS["dense"][0]
    save_file({**tensors, "text_encoder.lora_up.weight": torch.ones(2, 2)}, path)
    with pytest.raises(CheckpointError, match="belongs to no weight"):
        load(ROOT / "dense", config)
    save_file({name: x for name, x in tensors.items() if name != f"{target}.lora_down.weight"}, path)
    with pytest.raises(CheckpointError, match=r"has no lora_down\.weight"):
        load(ROOT / "dense", config)
    save_file({**tensors, f"{target}.lora_up.weight": torch.ones(3, RANK)}, path)
    with pytest.raises(CheckpointError, match="does not fit"):
        load(ROOT / "dense", config)


def test_a_lora_changes_the_keys_of_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    make_lora("dense", path, lambda module: module)
    plain = golden("dense").model
    picture = plain.question_picture(golden("dense").image("ref_b.png"))
    passage = plain.tokenizer.passage("<image>", [picture])
    fused = load(ROOT / "dense", replace(CONFIG, lora=(str(path),)))
    assert fused.condition(passage).units != plain.condition(passage).units
