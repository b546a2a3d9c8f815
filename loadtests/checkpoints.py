"""Checkpoints with random weights in real shapes: they run as long as trained ones take.

They need no download. Their tokenizers know every letter and many made-up words, so any text can be
encoded, and a text of a given number of tokens is easy to write.
"""

import itertools
import math
import os
import random
import shutil
import string
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

CAUSAL_WORDS = 49_152
MASKED_WORDS = 30_522
MASK = "[MASK]"
_END = "<|endoftext|>"
_MASKED_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", MASK)
_LETTERS = string.ascii_lowercase
_TRIPLES = tuple("".join(triple) for triple in itertools.product(_LETTERS, repeat=3))

_FIRST_PLAIN_ID = 257
"""Lower ids of the causal tokenizer are its special token and single bytes."""

_POOL_SIZE = 2**24 + 43
"""Numbers drawn for all weights. Odd, so that no two weights start at the same one."""


def llama_config(**measures: Any) -> "PreTrainedConfig":
    """A Llama configuration; ``vocab_size`` defaults to 49,152."""
    from transformers import LlamaConfig

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return LlamaConfig(**{"vocab_size": CAUSAL_WORDS, **special, **measures})


def bert_config(**measures: Any) -> "PreTrainedConfig":
    """A BERT configuration, defaulting to BERT-base."""
    from transformers import BertConfig

    return BertConfig(vocab_size=MASKED_WORDS, **measures)


def build_checkpoint(
    folder: Path, config: "PreTrainedConfig", seed: int = 0, *, weights: bool = True
) -> Path:
    """Writes a checkpoint folder unless it exists, and returns it.

    ``weights=False`` writes the configuration and the tokenizer only.
    """
    if folder.exists():
        return folder
    import torch

    with new_folder(folder) as path:
        if weights:
            random_model(config, seed, dtype=torch.float32).save_pretrained(path)
        else:
            config.save_pretrained(path)
        _fast_tokenizer(config).save_pretrained(path)
    return folder


def random_model(
    config: "PreTrainedConfig",
    seed: int,
    *,
    dtype: "torch.dtype",
    device: str = "cpu",
    attention: str = "sdpa",
) -> "PreTrainedModel":
    """A LlamaForCausalLM or BertForMaskedLM with random weights, in evaluation mode.

    The weights repeat a pool of a few million normal numbers, each weight starting at another
    offset: drawing billions of numbers takes minutes.
    """
    import torch
    from transformers import BertForMaskedLM, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    model_class = LlamaForCausalLM if config.model_type == "llama" else BertForMaskedLM
    with no_init_weights(), torch.device(device):
        model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    drawn = torch.randn(_POOL_SIZE, generator=torch.Generator().manual_seed(seed))
    _fill(model, (drawn * config.initializer_range).to(device, dtype))
    return model.eval()


def _fill(model: "PreTrainedModel", pool: "torch.Tensor") -> None:
    start = 0
    for name, parameter in model.named_parameters():
        values = parameter.data.view(-1)
        if parameter.dim() == 1:  # norms and biases
            values.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        while len(values):
            some = pool[start : start + len(values)]
            values[: len(some)] = some
            values = values[len(some) :]
            start = (start + len(some)) % len(pool)


def causal_words(num_words: int = CAUSAL_WORDS) -> list[str]:
    """Words that are one token each, with the space before them."""
    joined = {word for _, word in _causal_merges(num_words)}
    # Merges with lower letters come first: with a < b, the word "abc" is never split into a + bc.
    return [f" {word}" for word in _TRIPLES if word[0] < word[1] and word in joined]


def masked_words() -> list[str]:
    """Words that are one token each."""
    return list(_TRIPLES)


def causal_ids(rng: random.Random, num_tokens: int, num_words: int = CAUSAL_WORDS) -> list[int]:
    """Draws token ids uniformly from words and parts of words."""
    return [rng.randrange(_FIRST_PLAIN_ID, num_words) for _ in range(num_tokens)]


def masked_ids(rng: random.Random, num_tokens: int) -> list[int]:
    """Draws token ids uniformly from all but the special ones."""
    return [rng.randrange(len(_MASKED_SPECIAL), MASKED_WORDS) for _ in range(num_tokens)]


def causal_tokenizer(num_words: int = CAUSAL_WORDS) -> Tokenizer:
    """Byte-level BPE with a vocabulary of bytes and of two to four made-up letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _causal_merges(num_words)
    words = [_END, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return tokenizer


def _causal_merges(num_words: int) -> list[tuple[str, str]]:
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    merges = itertools.chain(
        ((first, second) for first in _LETTERS for second in _LETTERS),
        ((word[:2], word[2]) for word in _TRIPLES),
        ((space, word) for word in _TRIPLES),
        ((word, letter) for word in _TRIPLES for letter in _LETTERS),
    )
    return list(itertools.islice(merges, num_words - _FIRST_PLAIN_ID))


def masked_tokenizer() -> Tokenizer:
    """WordPiece with a vocabulary of characters and of three to four made-up letters."""
    characters = _LETTERS + string.digits + string.punctuation
    words = [*_MASKED_SPECIAL, *characters, *(f"##{each}" for each in characters), *_TRIPLES]
    longer = (word + letter for word in _TRIPLES for letter in _LETTERS)
    words += itertools.islice(longer, MASKED_WORDS - len(words))
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(_MASKED_SPECIAL))
    return tokenizer


def _fast_tokenizer(config: "PreTrainedConfig") -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    names: Mapping[str, str] = {"bos_token": _END, "eos_token": _END}
    if config.model_type == "llama":
        tokenizer = causal_tokenizer(config.vocab_size)
    else:
        tokenizer = masked_tokenizer()
        names = {
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": MASK,
        }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=config.max_position_embeddings, **names
    )


def export_random(folder: Path, bundle: Path, precision: str, task: str = "auto") -> None:
    """Exports a checkpoint. Random weights have no quality to lose, so the gate lets all pass."""
    from maskdial_export.export import export
    from maskdial_export.quantize.gate import Gate

    gate = None if precision == "fp32" else Gate(max_loss=math.inf, keep_worst=0)
    export(str(folder), bundle, task=task, precision=precision, gate=gate)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder, renamed to ``path`` if the block succeeds and removed if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield folder
        os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
