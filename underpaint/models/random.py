"""Full-size models without a checkpoint: random weights, for measurements and for tests of kernels. They can be written
as a checkpoint too, for what only has a directory, such as a server.

Weights are loud: every linear keeps the size of what goes through it, so a wrong kernel shows, and the residual stream
stays finite over any number of layers.
"""

import json
import secrets
import tempfile
from pathlib import Path

import torch
from huggingface_hub import save_torch_model
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from underpaint.errors import BadParameter
from underpaint.models.fusing import can_fuse
from underpaint.models.loading import Weights
from underpaint.models.neo_unify.config import NeoConfig, config_values
from underpaint.models.neo_unify.model import DEFAULTS, Checkpoint, NeoUnify, skeleton
from underpaint.models.neo_unify.network import NeoUnifyNetwork
from underpaint.models.neo_unify.prompt import SPECIAL_TOKENS, TURN_STOP, PromptTokenizer
from underpaint.models.qwen_image21.transformer import QwenImage21Transformer, TransformerConfig
from underpaint.models.roles import BOTH_ROLES, Role

MAX_PROMPT_TOKENS = 1 << 18
SHARD_BYTES = 5 << 30
NORM_SPREAD = 0.1
SPACE = "\u0120"
"""How a byte-level vocabulary writes one."""
BRANCH_ENDS = ("o_proj", "down_proj", "to_out", "img_mlp.out")
"""Linears whose output is added to the residual stream; the depth divides them."""


@torch.no_grad()
def randomise(network: nn.Module, seed: int, num_layers: int = 1) -> None:
    """Fill the parameters of a network, on its device, from ``seed``."""
    generator: torch.Generator | None = None
    for name, parameter in network.named_parameters():
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(seed)
        if parameter.dim() == 1:
            centre = 0.0 if name.endswith("bias") or "text_norm" in name else 1.0
            parameter.normal_(centre, NORM_SPREAD, generator=generator)
            continue
        fan_in = parameter[0].numel()
        std = 1.0 if "embed_tokens" in name else fan_in**-0.5
        if any(end in name for end in BRANCH_ENDS):
            std *= (2 * num_layers) ** -0.5
        parameter.normal_(0.0, std, generator=generator)


def random_neo(
    config: NeoConfig, device: str, dtype: torch.dtype, seed: int = 0, roles: frozenset[Role] = BOTH_ROLES
) -> NeoUnify:
    """A SenseNova-U1 of this size, fused where that is possible. Its tokenizer reads bytes and the special tokens, and
    can say every token, see ``byte_tokenizer``."""
    network = random_neo_network(config, device, dtype, seed, roles)
    if can_fuse(device, config.language.head_dim):
        network.fuse()
    return wrap_neo(network, device, roles)


def random_neo_network(
    config: NeoConfig, device: str, dtype: torch.dtype, seed: int = 0, roles: frozenset[Role] = BOTH_ROLES
) -> NeoUnifyNetwork:
    """Its network, not fused."""
    network = skeleton(config, roles).to(dtype).to_empty(device=device)
    randomise(network, seed, config.language.num_hidden_layers)
    return network.requires_grad_(False).eval()


def write_random_neo(config: NeoConfig, out: Path, device: str, seed: int = 0) -> None:
    """A checkpoint in the released layout, in bfloat16, with the tokenizer of ``random_neo``; made on ``device``, which
    must hold it. ``out`` appears whole or not at all. Raises BadParameter if it exists or cannot be written."""
    if out.exists():
        raise BadParameter(f"{out} exists; name a directory that does not", param="out")
    network = random_neo_network(config, device, torch.bfloat16, seed)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            written = Path(scratch) / "checkpoint"
            written.mkdir()
            (written / "config.json").write_text(json.dumps(config_values(config), indent=2), encoding="utf-8")
            byte_tokenizer(config.language.vocab_size).save_pretrained(written)
            save_torch_model(network, written, max_shard_size=SHARD_BYTES)
            written.rename(out)
    except (OSError, SafetensorError) as error:  # a full disk is the latter
        raise BadParameter(f"{out} cannot be written: {error}", param="out") from error


def wrap_neo(network: NeoUnifyNetwork, device: str, roles: frozenset[Role]) -> NeoUnify:
    """A model around a network that comes from no checkpoint. Its prefixes are nobody else's."""
    root = Path("random weights")
    checkpoint = Checkpoint(root, network.config, DEFAULTS, roles, Weights({}, root))
    tokenizer = PromptTokenizer(byte_tokenizer(network.config.language.vocab_size), MAX_PROMPT_TOKENS)
    return NeoUnify(checkpoint, network, tokenizer, device, secrets.token_bytes(32))


def random_qwen_transformer(
    config: TransformerConfig, device: str, dtype: torch.dtype, seed: int = 0
) -> QwenImage21Transformer:
    """The transformer of a Qwen-Image 2.1 of this size."""
    with torch.device("meta"):
        transformer = QwenImage21Transformer(config)
    transformer = transformer.to(dtype).to_empty(device=device)
    randomise(transformer, seed, config.num_layers)
    transformer.requires_grad_(False).eval()
    if can_fuse(device, config.attention_head_dim):
        transformer.fuse()
    return transformer


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A token for each byte, words that no text is read as, and the special tokens: ``vocab_size`` together.

    A model with random weights says any of them. If most were nothing, or half of a character, an answer would come in
    a few pieces, and say nothing of the time between tokens.
    """
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"{SPACE}{i}" for i in range(len(tokens), vocab_size - len(SPECIAL_TOKENS))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_STOP, model_max_length=MAX_PROMPT_TOKENS
    )
    wrapped.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    return wrapped
