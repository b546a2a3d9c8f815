"""A checkpoint's tokenizer: read or converted, and checked against the model and a plain text.

transformers makes a tokenizer of the files that it finds, and one with nothing but special tokens
if it finds none. What it converts is compared with the vocabulary files.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from tokenizers import Tokenizer

from maskdial.models.bundle import TOKENIZER
from maskdial_export.errors import ExportError, first_line
from maskdial_export.pieces import read_pieces
from maskdial_export.sample import Sample
from maskdial_export.source import Source

_VOCABULARY = "vocab.txt"  # WordPiece: a token per line
_VOCABULARY_FILES = (_VOCABULARY, "vocab.json", "merges.txt", "bpe.codes", "*.model", "*.tiktoken")
# Others split texts in a way of their own before, such as BertJapaneseTokenizer
_WORDPIECE = frozenset({"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"})
_LEAST_FILLED = 0.5  # part of the embedding's rows that have a token; a few may pad the table
_LEAST_KNOWN = 0.1  # part of the text's words
_MOST_WORDS = 500
_LEAST_ALIKE = 0.9  # part of the lines or sentences; a few may be treated in a special way
_UNKNOWN = "\U00010380\U00010381"  # Ugaritic
_WORD_MARKS = "▁Ġ#"


def load_tokenizer(source: Source, vocab_size: int, sample: Sample) -> Tokenizer:
    """The checkpoint's tokenizer, with padding and truncation turned off.

    Raises:
        ExportError: there is none, it does not fit the model's vocabulary, or it knows next to none
            of the sample's words.
    """
    path = source.path / TOKENIZER
    tokenizer = _read(path) if path.is_file() else _convert(source, sample)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _check_size(source, tokenizer, vocab_size)
    _check_words(source, tokenizer, sample)
    return tokenizer


def _read(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no error class of its own
        raise ExportError(f"cannot read {path}: {first_line(error)}") from error


def _convert(source: Source, sample: Sample) -> Tokenizer:
    """Builds the tokenizer from the vocabulary files of an older checkpoint."""
    pieces = read_pieces(source, sample)
    if pieces is not None:
        return pieces
    made = list(_conversions(source))
    files = sorted({path.name for name in _VOCABULARY_FILES for path in source.path.glob(name)})
    if not files:
        expected = [name for each in made[:1] for name in each.vocab_files_names.values()]
        others = " and ".join(name for name in expected if name != TOKENIZER)
        missing = f"{TOKENIZER} is missing" + (f", and so is {others}" if others else "")
        raise ExportError(f"{source.name} has no tokenizer: {missing}")
    for each in made:
        tokenizer: Tokenizer | None = getattr(each, "backend_tokenizer", None)
        if tokenizer is not None and _is_whole(source, tokenizer, sample):
            return tokenizer
    raise ExportError(
        f"{source.name} has no {TOKENIZER}, and transformers {transformers.__version__} cannot "
        f"convert {' and '.join(files)} exactly; write {TOKENIZER} with save_pretrained() of the "
        "tokenizer that the model was trained with"
    )


def _conversions(source: Source) -> Iterator[Any]:
    """The tokenizers that transformers makes: by the model's type, then by the files alone."""
    settings = {"trust_remote_code": False, "local_files_only": True}
    makers = [(transformers.AutoTokenizer, settings)]
    named = source.read_json("tokenizer_config.json").get("tokenizer_class") or source.read_json(
        "config.json"
    ).get("tokenizer_class")
    plain = named is None or str(named).removesuffix("Fast") in _WORDPIECE
    if (source.path / _VOCABULARY).is_file() and plain and source.family == "masked":
        makers.append((transformers.BertTokenizer, settings))
    if (source.path / "tokenizer.model").is_file():
        begins = source.read_json("tokenizer_config.json").get("add_bos_token", True)
        makers.append((transformers.LlamaTokenizer, settings | {"add_bos_token": begins}))
    for maker, options in makers:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = maker.from_pretrained(source.path, **options)
        except Exception:  # transformers raises many types for missing files
            continue
        yield made


def _is_whole(source: Source, tokenizer: Tokenizer, sample: Sample) -> bool:
    """Whether a converted tokenizer has the vocabulary of the files, and splits texts alike."""
    path = source.path / _VOCABULARY
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        found = sum(vocabulary.get(line) == index for index, line in enumerate(lines))
        if found < _LEAST_ALIKE * len(lines):
            return False
    for path in source.path.glob("*.model"):
        try:
            original = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError):  # another format of the same name
            continue
        # Some tokenizers lower-case and strip accents before
        texts = [text for line in sample.sentences() if (text := line.lower()).isascii()]
        alike = [
            original.encode(text, out_type=str)
            == tokenizer.encode(text, add_special_tokens=False).tokens
            for text in texts
        ]
        if texts and sum(alike) < _LEAST_ALIKE * len(texts):
            return False
    return tokenizer.get_vocab_size(with_added_tokens=False) > 0


def _check_size(source: Source, tokenizer: Tokenizer, vocab_size: int) -> None:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    largest = max(ids, default=-1)
    if largest >= vocab_size:
        raise ExportError(
            f"the tokenizer of {source.name} produces ids up to {largest}, but the model has only "
            f"{vocab_size}; they do not belong together"
        )
    if len(ids) < _LEAST_FILLED * vocab_size:
        raise ExportError(
            f"the tokenizer of {source.name} has {len(ids)} tokens, but the model's embedding has "
            f"{vocab_size} rows; {_file(source)} is incomplete or another model's"
        )


def _check_words(source: Source, tokenizer: Tokenizer, sample: Sample) -> None:
    unknown = set(tokenizer.encode(_UNKNOWN, add_special_tokens=False).ids)
    words = list(dict.fromkeys(sample.text.split()))[:_MOST_WORDS]
    known = 0
    for encoding in tokenizer.encode_batch(words, add_special_tokens=False):
        pairs = zip(encoding.ids, encoding.tokens, strict=True)
        known += any(each not in unknown and token.strip(_WORD_MARKS) for each, token in pairs)
    if known < _LEAST_KNOWN * len(words):
        raise ExportError(
            f"the tokenizer of {source.name} knows {known} of {len(words)} words of {sample.name}; "
            f"{_file(source)} is damaged or another model's, unless the model reads texts of "
            "another kind: then pass one with --quality-text"
        )


def _file(source: Source) -> str:
    """The file that the tokenizer comes from."""
    names = (path.name for name in _VOCABULARY_FILES for path in source.path.glob(name))
    return TOKENIZER if (source.path / TOKENIZER).is_file() else " or ".join(names)
