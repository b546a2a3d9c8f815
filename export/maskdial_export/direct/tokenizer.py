"""The tokenizer of a checkpoint, where tokenizer.json says all of it."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from maskdial.bundle.manifest import TOKENIZER, Tokenization
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checkpoint.vocabulary import OF_BERT, SETTINGS, check_size, check_words
from maskdial_export.direct.checkpoint import DirectCheckpoint
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.errors import ExportError, first_line

_CONFIG = "tokenizer_config.json"
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# transformers' classes that tell the parts of a text pair, and those that do not
_TYPED = frozenset({"BertTokenizer", "DebertaV2Tokenizer", "ElectraTokenizer"})
_UNTYPED = frozenset(
    {
        *("RobertaTokenizer", "XLMRobertaTokenizer", "DistilBertTokenizer", "AlbertTokenizer"),
        *("CamembertTokenizer", "MPNetTokenizer", "PreTrainedTokenizer", "TokenizersBackend"),
    }
)
# What DeBERTa's class does if it is told so, and what does it in tokenizer.json
_OF_DEBERTA = {"do_lower_case": '"Lowercase"', "split_by_punct": '"Punctuation"'}
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def load_tokenizer(
    checkpoint: DirectCheckpoint, vocab_size: int, sample: Sample, special: Sequence[str] = ()
) -> tuple[Tokenizer, Tokenization]:
    """The tokenizer, and what its file does not say.

    ``special`` are the special tokens that the tokenizer's class has by default: they are found in
    texts wherever the vocabulary has them.

    Raises:
        NotDirectError: other files say more than tokenizer.json.
        ExportError: it is damaged, or of another model.
    """
    path = checkpoint.path / TOKENIZER
    if not path.is_file():
        raise NotDirectError(f"{checkpoint.name} has no {TOKENIZER}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no error class of its own
        raise ExportError(f"cannot read {path}: {first_line(error)}") from error
    settings = checkpoint.read_json(_CONFIG)
    _check_settings(checkpoint, tokenizer, settings)
    _add_special_tokens(checkpoint, tokenizer, settings)
    _mark(tokenizer, special)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    check_size(checkpoint, tokenizer, vocab_size)
    check_words(checkpoint, tokenizer, sample)
    side = settings.get("truncation_side", "right")
    return tokenizer, Tokenization(truncation_side="left" if side == "left" else "right")


def _check_settings(
    checkpoint: DirectCheckpoint, tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    """Refuses settings by which transformers' classes change what tokenizer.json says."""
    content = json.loads(tokenizer.to_str())
    for key in sorted(SETTINGS & settings.keys()):
        plain = key == "add_prefix_space" and not _prefixes(tokenizer)
        if settings[key] is None and key != "strip_accents":
            continue
        if (plain and settings[key] is False) or _says_so(content, key, settings[key]):
            continue
        raise NotDirectError(
            f"{key} {settings[key]!r} in {_CONFIG} is not known to the direct path"
        )
    if settings.get("auto_map"):
        raise NotDirectError(f"auto_map in {_CONFIG} is not known to the direct path")
    known = tokenizer.get_added_tokens_decoder()
    for index, described in (settings.get("added_tokens_decoder") or {}).items():
        token = known.get(int(index))
        same = token is not None and token.content == described.get("content")
        flags = {flag: getattr(token, flag) for flag in _FLAGS if flag in described}
        if not same or any(described[flag] != value for flag, value in flags.items()):
            raise NotDirectError(
                f"{_CONFIG} and {TOKENIZER} of {checkpoint.name} differ in {described}"
            )


def _says_so(content: dict[str, Any], key: str, value: Any) -> bool:
    """Whether tokenizer.json has what a setting of BERT's, RoBERTa's or DeBERTa's class would put
    there."""
    stage = content.get("normalizer") or {}
    if key in OF_BERT and stage.get("type") == "BertNormalizer":
        return bool(stage.get(OF_BERT[key]) == value)
    if key == "strip_accents":
        return value is None
    if value is False and key in _OF_DEBERTA:
        parts = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
        return _OF_DEBERTA[key] not in parts
    stages = [content.get("pre_tokenizer") or {}, content.get("post_processor") or {}]
    kinds = [stage.get("type") for stage in stages]
    if kinds != ["ByteLevel", "RobertaProcessing"] or key not in (
        "add_prefix_space",
        "trim_offsets",
    ):
        return False
    told = stages if key == "add_prefix_space" else stages[1:]
    return all(stage.get(key) == value for stage in told)


def sends_types(checkpoint: DirectCheckpoint) -> bool | None:
    """Whether the tokenizer tells the parts of a text pair; None if nothing says so.

    Raises:
        NotDirectError: it is of a class that is not known.
    """
    settings = checkpoint.read_json(_CONFIG)
    given = settings.get("model_input_names")
    if isinstance(given, list):
        return "token_type_ids" in given
    name = settings.get("tokenizer_class")
    short = str(name).removesuffix("Fast")
    if name is None:
        return None
    if short in _TYPED | _UNTYPED:
        return short in _TYPED
    raise NotDirectError(f"tokenizer_class {name!r} in {_CONFIG} is not known to the direct path")


def _mark(tokenizer: Tokenizer, special: Sequence[str]) -> None:
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    listed = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for content in special:
        if content in vocabulary and content not in listed:
            tokenizer.add_special_tokens([AddedToken(content, normalized=False, special=True)])


def _prefixes(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer may put a space before texts."""
    content = json.loads(tokenizer.to_str())
    parts = json.dumps([content["normalizer"], content["pre_tokenizer"]])
    return any(each in parts for each in ('"add_prefix_space": true', "Metaspace", "Prepend"))


def _add_special_tokens(
    checkpoint: DirectCheckpoint, tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    """Finds special tokens in texts that only other files name; transformers does."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    listed = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for content in _named(settings):
        if content in vocabulary and content not in listed:
            tokenizer.add_special_tokens([AddedToken(content, normalized=False, special=True)])
        elif content not in vocabulary and content not in listed:
            raise NotDirectError(
                f"{_CONFIG} of {checkpoint.name} names {content!r}, which {TOKENIZER} lacks"
            )


def _named(settings: dict[str, Any]) -> Iterator[str]:
    tokens = [settings.get(f"{role}_token") for role in _ROLES]
    tokens += settings.get("additional_special_tokens") or []
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            yield content
