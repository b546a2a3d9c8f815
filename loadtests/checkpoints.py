"""Checkpoints of real shapes with random weights, on which work takes as long as on trained ones.

They need no download and no corpus. Their tokenizers know every letter and many made-up words, so
that any text can be encoded, and a text of a given number of tokens can be written.
"""

import itertools
import os
import random
import shutil
import string
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CAUSAL_WORDS = 49_152
MASKED_WORDS = 30_522
MASK = "[MASK]"

_END = "<|endoftext|>"
_MASKED_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", MASK)
_LETTERS = string.ascii_lowercase
_TRIPLES = tuple("".join(triple) for triple in itertools.product(_LETTERS, repeat=3))
_FIRST_PLAIN_ID = 257
"""The causal tokenizer's ids below are its special token and single bytes."""


def causal_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A Llama of 135M parameters, 30 layers and a context of 4,096; built if it is not there."""
    return _once(folder, lambda path: _build_causal(path, seed))


def masked_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A BERT-base with its fill-mask head; built if it is not there."""
    return _once(folder, lambda path: _build_masked(path, seed))


def causal_words() -> list[str]:
    """Words that are one token each, with the space before them."""
    # Merges join from the lowest letters up: in order, "abc" is never read as a + bc.
    return [f" {word}" for word in _TRIPLES if word[0] < word[1]]


def masked_words() -> list[str]:
    """Words that are one token each."""
    return list(_TRIPLES)


def causal_ids(rng: random.Random, num_tokens: int) -> list[int]:
    """Tokens drawn evenly from those of whole words and parts of words."""
    return [rng.randrange(_FIRST_PLAIN_ID, CAUSAL_WORDS) for _ in range(num_tokens)]


def masked_ids(rng: random.Random, num_tokens: int) -> list[int]:
    """Tokens drawn evenly from all but the special ones."""
    return [rng.randrange(len(_MASKED_SPECIAL), MASKED_WORDS) for _ in range(num_tokens)]


def causal_tokenizer() -> Tokenizer:
    """Byte-level BPE of 49,152 words: bytes, and two to four made-up letters."""
    pairs = [(a, b) for a, b in itertools.product(_LETTERS, repeat=2)]
    merges = [*pairs, *((word[:2], word[2]) for word in _TRIPLES)]
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    merges += [(space, word) for word in _TRIPLES]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_left = CAUSAL_WORDS - 1 - len(alphabet) - len(merges)
    longer = ((word, letter) for word in _TRIPLES for letter in _LETTERS)
    merges += itertools.islice(longer, num_left)
    words = [_END, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return tokenizer


def masked_tokenizer() -> Tokenizer:
    """WordPiece of 30,522 words: characters, and three to four made-up letters."""
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


def _build_causal(folder: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=CAUSAL_WORDS,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=causal_tokenizer(), bos_token=_END, eos_token=_END, model_max_length=4096
    ).save_pretrained(folder)


def _build_masked(folder: Path, seed: int) -> None:
    import torch
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    BertForMaskedLM(BertConfig(vocab_size=MASKED_WORDS)).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=masked_tokenizer(),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token=MASK,
        model_max_length=512,
    ).save_pretrained(folder)


def _once(folder: Path, build: Callable[[Path], None]) -> Path:
    if not folder.exists():
        with new_folder(folder) as path:
            build(path)
    return folder


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that takes the name ``path`` when all went well, and else is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield folder
        os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
