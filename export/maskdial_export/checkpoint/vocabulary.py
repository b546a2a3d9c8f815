"""Whether a tokenizer is the model's own, as far as its vocabulary tells."""

from tokenizers import Tokenizer

from maskdial.bundle.manifest import TOKENIZER
from maskdial_export.checkpoint.files import Files
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.errors import ExportError, first_line

VOCABULARY_FILES = (
    *("vocab.txt", "vocab.json", "merges.txt", "bpe.codes"),
    *("*.model", "*.tiktoken"),
)
"""Patterns of the files that older checkpoints have in place of tokenizer.json."""

OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
    "clean_text": "clean_text",
}
LANGUAGES = ("src_lang", "legacy_behaviour")
SETTINGS = frozenset(
    {*OF_BERT, *LANGUAGES, "keep_accents", "split_by_punct", "add_prefix_space", "trim_offsets"}
)
"""Every setting of transformers' classes that changes how a text is split.

Llama's ``legacy`` is none: it chose how a sentencepiece model becomes a tokenizer.json.
"""

_MIN_FILLED = 0.5  # part of the embedding's rows that have a token; a few may pad the table
_MIN_KNOWN = 0.1  # part of the text's words
_MAX_WORDS = 500
_UNKNOWN = "\U00010380\U00010381"  # Ugaritic
_WORD_MARKS = "▁Ġ#"


def check_size(source: Files, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer of another model.

    Raises:
        ExportError: it gives ids that the model has no rows for, or has tokens for few of the rows.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    largest = max([*ids, *tokenizer.encode("").ids], default=-1)
    if largest >= vocab_size:
        raise ExportError(
            f"the tokenizer of {source.name} produces ids up to {largest}, but the model has only "
            f"{vocab_size}; they do not belong together"
        )
    if len(ids) < _MIN_FILLED * vocab_size:
        raise ExportError(
            f"the tokenizer of {source.name} has {len(ids)} tokens, but the model's embedding has "
            f"{vocab_size} rows; {_file(source)} is incomplete or another model's"
        )


def unknown_ids(tokenizer: Tokenizer) -> set[int]:
    """The tokens of what a tokenizer does not know: one, or those of single bytes."""
    return set(tokenizer.encode(_UNKNOWN, add_special_tokens=False).ids)


def check_words(source: Files, tokenizer: Tokenizer, sample: Sample) -> None:
    """Refuses a tokenizer that knows next to none of the sample's words.

    Raises:
        ExportError: it does, or it reads no text.
    """
    try:
        unknown = unknown_ids(tokenizer)
    except Exception as error:  # the library has no error class of its own
        raise ExportError(
            f"the tokenizer that transformers makes of {source.name} reads no text "
            f"({first_line(error)}); name its class in tokenizer_config.json (tokenizer_class)"
        ) from error
    words = list(dict.fromkeys(sample.text.split()))[:_MAX_WORDS]
    known = 0
    for encoding in tokenizer.encode_batch(words, add_special_tokens=False):
        pairs = zip(encoding.ids, encoding.tokens, strict=True)
        known += any(each not in unknown and token.strip(_WORD_MARKS) for each, token in pairs)
    if known < _MIN_KNOWN * len(words):
        raise ExportError(
            f"the tokenizer of {source.name} knows {known} of {len(words)} words of {sample.name}; "
            f"{_file(source)} is damaged or another model's, unless the model reads texts of "
            "another kind: then pass one with --quality-text"
        )


def _file(source: Files) -> str:
    """The file that the tokenizer comes from."""
    names = (path.name for name in VOCABULARY_FILES for path in source.path.glob(name))
    return TOKENIZER if (source.path / TOKENIZER).is_file() else " or ".join(names)
