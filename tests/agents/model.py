"""A tiny Qwen3 with random weights, its template with tools and thinking, and a long context."""

from pathlib import Path

import tokenizers
import torch
import transformers

from maskdial_export.export import export

_ROOT = Path(__file__).parents[2]
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_TAGS, "<think>", "</think>")
CONTEXT = 65_536
_REFUSES = (
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}"
)
"""As templates of Qwen3.5 do."""


def make_model(folder: Path, *, refuses_later_system: bool = False) -> Path:
    """The bundle, in a new folder."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted((_ROOT / "docs").glob("*.md"))], trainer)
    tokenizer.add_special_tokens(list(_SPECIAL))
    template = Path(__file__).with_name("template.jinja").read_text(encoding="utf-8")
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    own.chat_template = _REFUSES + template if refuses_later_system else template
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(own),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
    )
    checkpoint = folder / "checkpoint"
    transformers.Qwen3ForCausalLM(config).save_pretrained(checkpoint)
    own.save_pretrained(checkpoint)
    export(str(checkpoint), folder / "bundle")
    return folder / "bundle"
