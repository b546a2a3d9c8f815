"""The starter models' tokenizers, trained on the same texts as the models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
MASK = "[MASK]"
ALPHABET_SIZE = 200


def train_wordpiece(
    texts: Sequence[str], vocabulary_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece tokenizer with BERT's template: [CLS] a [SEP] b [SEP]."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", MASK]
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer numbers continuation letters in the random order in which it meets them, and
    # breaks ties by number. As special tokens they get the same numbers every time; the second
    # tokenizer has the same vocabulary without making them special.
    letters = _alphabet(texts, normalizer)
    trainer = WordPieceTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[*special, *letters, *(f"##{letter}" for letter in letters)],
        show_progress=False,
        limit_alphabet=ALPHABET_SIZE,
    )
    learner.train_from_iterator(texts, trainer)
    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return as_masked(tokenizer, max_length)


def as_masked(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer with the names of BERT's special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token=MASK,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _alphabet(texts: Sequence[str], normalizer: normalizers.Normalizer) -> list[str]:
    counts = Counter[str]()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    letters = sorted(
        (letter for letter in counts if not letter.isspace()),
        key=lambda letter: (-counts[letter], letter),
    )
    return letters[:ALPHABET_SIZE]


def train_byte_level_bpe(
    texts: Sequence[str], vocabulary_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, without an unknown token, that starts texts with end-of-text.

    [MASK] absorbs the space before it, as RoBERTa's does: the tokens that it hides begin with one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    mask = AddedToken(MASK, lstrip=True, special=True)
    trainer = BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT, mask],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT}:1 $B:1",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return as_causal(tokenizer, max_length)


def as_causal(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the names of its special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=AddedToken(MASK, lstrip=True, special=True),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
