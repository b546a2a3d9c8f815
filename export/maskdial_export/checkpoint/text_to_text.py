"""How an encoder-decoder checkpoint writes its texts: what the server has to know of its files."""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedModel

from maskdial.bundle.manifest import Decoding, TextToText
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError

# How the tokens of languages are spelled: mBART's en_XX, NLLB's eng_Latn, M2M-100's __en__
_LANGUAGE = re.compile(r"[a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}|__([a-z]{2,3})__")
# Of transformers.GenerationConfig, what would change the text and is not supported
_UNSUPPORTED = ("encoder_repetition_penalty", "num_beam_groups")
_LONGEST_TOKENIZED = 10**6  # tokenizers without a limit name a larger one


def read_text_to_text(
    source: Source, model: PreTrainedModel, tokenizer: Tokenizer, positions: int
) -> TextToText:
    """What config.json, generation_config.json and the tokenizer say of a model's texts.

    ``positions`` is how many tokens the encoder can read.

    Raises:
        ExportError: the decoder's first token is not given, or a setting is not supported.
    """
    config: Any = model.config
    other = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    if other != config.vocab_size or not getattr(config, "share_encoder_decoder_embeddings", True):
        raise ExportError(
            f"{source.name} writes with another vocabulary than it reads, which is not supported"
        )
    given = model.generation_config
    assert given is not None, "models that generate have one"
    _check_supported(source, given)
    start = _first(given.decoder_start_token_id)
    if start is None:
        start = _first(getattr(config, "decoder_start_token_id", None))
    if start is None:
        start = _first(given.bos_token_id)
    if start is None:
        raise ExportError(
            f"{source.name} does not say from which token its decoder starts; add "
            "decoder_start_token_id to config.json"
        )
    params = getattr(config, "task_specific_params", None) or {}
    return TextToText(
        max_source_length=_longest_source(source, positions),
        start_token_id=start,
        forced_bos_token_id=_first(given.forced_bos_token_id),
        forced_eos_token_ids=_ids(given.forced_eos_token_id),
        banned=_banned(given, config.vocab_size),
        defaults=_decoding(given.to_dict() | {"prefix": getattr(config, "prefix", None)}),
        tasks={
            name: _decoding(each)
            for name, each in params.items()
            if isinstance(each, dict) and re.match(r"summarization|translation", name)
        },
        languages=_languages(config, tokenizer),
    )


def _check_supported(source: Source, given: GenerationConfig) -> None:
    for name in _UNSUPPORTED:
        value = getattr(given, name, None)
        if value not in (None, 0, 1, 1.0):
            raise ExportError(
                f"{name} in generation_config.json of {source.name} is {value!r}, which is not "
                "supported; remove it to export the model without it"
            )


def _ids(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (int(given),)


def _first(given: Any) -> int | None:
    return next(iter(_ids(given)), None)


def _banned(given: GenerationConfig, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Sequences of tokens that are never written; the end of a text cannot be one of them."""
    ends = [[each] for each in _ids(given.eos_token_id)]
    words = [list(word) for word in given.bad_words_ids or [] if list(word) not in ends]
    words += [[token] for token in given.suppress_tokens or []]
    known = (word for word in words if word and all(0 <= token < vocab_size for token in word))
    return tuple(dict.fromkeys(map(tuple, known)))


def _decoding(given: Mapping[str, Any]) -> Decoding:
    """Settings by transformers' names. Its lengths count the token that the decoder starts from."""
    max_new, min_new = given.get("max_new_tokens"), given.get("min_new_tokens")
    if max_new is None and given.get("max_length"):
        max_new = given["max_length"] - 1
    if min_new is None and given.get("min_length"):
        min_new = given["min_length"] - 1
    lengths = {"max_new_tokens": max_new, "min_new_tokens": min_new}
    others = Decoding.model_fields.keys() - lengths
    return Decoding(**lengths, **{name: given.get(name) for name in others})


def _languages(config: Any, tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the languages' tokens, by the codes that requests use."""
    if config.model_type not in ("mbart", "m2m_100"):
        return {}
    found: dict[str, int] = {}
    for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        match = _LANGUAGE.fullmatch(token.content)
        if match is not None:
            found[match[1] or match[0]] = token_id
    return found


def _longest_source(source: Source, positions: int) -> int:
    limit = source.read_json("tokenizer_config.json").get("model_max_length")
    if isinstance(limit, int | float) and 1 <= limit < _LONGEST_TOKENIZED:
        return int(min(limit, positions))
    return positions
