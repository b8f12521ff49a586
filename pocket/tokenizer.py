"""A small byte-level BPE in Qwen's format, its processor, and the prompt template of Qwen-Image 2.1."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pocket.captions import lexicon

# In the order of Qwen3-VL's vocabulary.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IMAGE_TOKEN = "<|image_pad|>"
# How Qwen divides text before it merges bytes.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCABULARY = 1024  # an upper limit; the lexicon's words need fewer
SYSTEM_PROMPT = "Comprehend and analyze the provided prompt."
SYSTEM_TURN = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}"
    "{%- if c.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif c.type == 'text' -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def full_prompt(prompt: str, num_references: int, slots: int = 1) -> str:
    """The text that the encoder reads, as diffusers 0.42.1 builds it; an image has `slots` image tokens."""
    image = f"<|vision_start|>{IMAGE_TOKEN * slots}<|vision_end|>"
    references = " ".join(f"<image{index + 1}>{image}" for index in range(num_references))
    # Qwen has no first token, so an empty prompt would leave the encoder nothing to read.
    return f"{SYSTEM_TURN}<|im_start|>user\n{references}{prompt or ' '}<|im_end|>\n<|im_start|>assistant\n"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the merges on the words of the prompts and of the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    words = [*lexicon(), "system", "user", "assistant", "image", *SYSTEM_PROMPT.split()]
    words += [f" {word}" for word in SYSTEM_PROMPT.split()]
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=32768,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
