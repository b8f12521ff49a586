"""The text encoder of Qwen-Image 2.1: transformers' Qwen3-VL, read once per prompt.

The transformer paints from the encoder's hidden states before its final norm, without the system turn. Hidden states
of image tokens are dropped; what stays of an image is its place in the text, where its VAE latents go. So the number
of tokens the encoder spends on an image (its processor may shrink it) is independent of the number of latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from underpaint.errors import BadParameter, CheckpointError, PromptTooLong
from underpaint.images import on_white
from underpaint.models.loading import Weights
from underpaint.models.offload import stream

SYSTEM_TURN = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
USER_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
IMAGE_TAG = "<image{}><|vision_start|><|image_pad|><|vision_end|>"
IMAGE_PAD = "<|image_pad|>"


def prompt_text(prompt: str, num_references: int) -> str:
    """The text that the encoder reads after the system turn.

    References come before the prompt, a space between each two and none after the last; ``<imageN>`` is plain text.
    Without a prompt there is one space, for the model has no begin token and must read something.
    """
    tags = " ".join(IMAGE_TAG.format(i + 1) for i in range(num_references))
    return USER_TURN.format(tags + (prompt or " "))


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """``texts``: the token ids of each run of text, one more run than there are references, in order.
    ``states``: (text tokens, context_dim), their hidden states."""

    texts: tuple[tuple[int, ...], ...]
    states: Tensor


class PromptTokenizer:
    """Text and reference sizes -> token ids. Cheap, and refuses a long prompt before anything is encoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_text_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_text_tokens = max_text_tokens
        self._pad_id = tokenizer.convert_tokens_to_ids(IMAGE_PAD)
        if self._pad_id is None or self._tokenize(IMAGE_PAD) != [self._pad_id]:
            raise CheckpointError(f"the tokenizer does not know the token {IMAGE_PAD}")
        self.num_system_tokens = len(self._tokenize(SYSTEM_TURN))

    def _tokenize(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def texts(self, prompt: str, num_references: int) -> tuple[tuple[int, ...], ...]:
        """Token ids of the runs of text around the references, the system turn left out.

        Raises PromptTooLong, or BadParameter for a prompt that contains the image token itself.
        """
        if IMAGE_PAD in prompt:
            raise BadParameter(f"the prompt must not contain {IMAGE_PAD}; pass pictures as images", param="prompt")
        ids = self._tokenize(SYSTEM_TURN + prompt_text(prompt, num_references))[self.num_system_tokens :]
        if len(ids) - num_references > self._max_text_tokens:
            raise PromptTooLong(len(ids) - num_references, self._max_text_tokens)
        runs: list[tuple[int, ...]] = []
        start = 0
        for place in [i for i, token in enumerate(ids) if token == self._pad_id]:
            runs.append(tuple(ids[start:place]))
            start = place + 1
        return (*runs, tuple(ids[start:]))

    def input_ids(self, texts: Sequence[Sequence[int]], image_tokens: Sequence[int]) -> list[int]:
        """The encoder's input: the system turn, then texts and images in turn, each image as so many image tokens."""
        ids = self._tokenize(SYSTEM_TURN)
        for text, num_tokens in zip(texts, [*image_tokens, 0], strict=True):
            ids += [*text, *[self._pad_id] * num_tokens]
        return ids

    def is_image(self, ids: Tensor) -> Tensor:
        return ids == self._pad_id


class Body(Qwen3VLModel):
    """Qwen3-VL without the head that predicts words: the checkpoint carries it, painting does not use it."""

    _keys_to_ignore_on_load_unexpected = (r"lm_head\.weight",)


class TextEncoder:
    """Prompts and references -> hidden states. One prompt at a time: nothing is padded, so a prompt is encoded the
    same in any company."""

    def __init__(
        self, model: Qwen3VLModel, tokenizer: PromptTokenizer, image_processor: Qwen2VLImageProcessorPil
    ) -> None:
        # The norm is replaced, not its output picked by index: releases of transformers differ in whether the last
        # hidden state they report is normalised.
        model.language_model.norm = nn.Identity()
        self.model = model
        self.tokenizer = tokenizer
        self._image_processor = image_processor
        self._merge = model.config.vision_config.spatial_merge_size**2

    @torch.inference_mode()
    def encode(self, texts: tuple[tuple[int, ...], ...], references: Sequence[Image.Image]) -> EncodedPrompt:
        """``texts`` from the tokenizer, ``references`` as resized RGBA pictures (the encoder sees them on white)."""
        device = self.model.device
        vision: dict[str, Tensor] = {}
        image_tokens: list[int] = []
        if references:
            inputs = self._image_processor(images=[on_white(image) for image in references], return_tensors="pt")
            grids = inputs["image_grid_thw"]
            image_tokens = (grids.prod(dim=-1) // self._merge).tolist()
            vision = {
                "pixel_values": inputs["pixel_values"].to(device, self.model.dtype),
                "image_grid_thw": grids.to(device),
            }
        ids = torch.tensor([self.tokenizer.input_ids(texts, image_tokens)], device=device)
        limit = self.model.config.text_config.max_position_embeddings
        if ids.shape[1] > limit:
            raise PromptTooLong(ids.shape[1], limit)
        is_image = self.tokenizer.is_image(ids)
        output = self.model(input_ids=ids, mm_token_type_ids=is_image.int(), use_cache=False, **vision)
        kept = ~is_image[0]
        kept[: self.tokenizer.num_system_tokens] = False
        return EncodedPrompt(texts, output.last_hidden_state[0, kept])


def load_tokenizer(directory: Path, max_text_tokens: int) -> PromptTokenizer:
    """The tokenizer in a checkpoint's ``processor/``. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is missing")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    return PromptTokenizer(tokenizer, max_text_tokens)


def scan_encoder(directory: Path) -> Weights:
    """Read the headers of ``text_encoder/`` and check every tensor against its config. Raises CheckpointError."""
    weights = Weights.scan(directory, "model")
    with torch.device("meta"):
        model = Qwen3VLModel(_encoder_config(directory))
    expected = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    # The head that predicts words is not used for painting.
    weights.check(expected, unused=frozenset({"lm_head.weight"}))
    return weights


def load_encoder(
    root: Path, device: str, dtype: torch.dtype, tokenizer: PromptTokenizer, offloaded: bool = False
) -> TextEncoder:
    """The encoder of a checkpoint; ``offloaded``: its layers are streamed from the host. Raises CheckpointError."""
    directory = root / "text_encoder"
    scan_encoder(directory)
    model = Body.from_pretrained(directory, dtype=dtype, local_files_only=True).eval().requires_grad_(False)
    if offloaded:
        stream(model, model.language_model.layers, device)
    else:
        model.to(device)
    try:
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(root / "processor", local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{root / 'processor'}: the image processor cannot be loaded: {error}") from error
    return TextEncoder(model, tokenizer, image_processor)


def _encoder_config(directory: Path) -> Qwen3VLConfig:
    try:
        return Qwen3VLConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}: config.json cannot be read: {error}") from error
