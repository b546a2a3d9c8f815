"""tokenizer.json rules; settings that stand beside it change it as transformers' class means them.

transformers 5 takes the vocabulary of tokenizer.json and builds the rest anew by the class that it
finds for the checkpoint: normalizer, splitting, decoder, special tokens around a text. What no
setting states is then the default of that class (BertTokenizer lower-cases, Qwen2Tokenizer splits
off each digit), whatever the file says. The tokenizers library reads the file as it is.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from maskdial.bundle.manifest import TOKENIZER
from maskdial_export.checkpoint.vocabulary import LANGUAGES, OF_BERT, SETTINGS

_Stage = dict[str, Any]

# A part of tokenizer.json -> the name under which a Sequence of that part holds its stages
_PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_PREPEND: _Stage = {"type": "Prepend", "prepend": "▁"}
_PUNCTUATION: _Stage = {"type": "Punctuation", "behavior": "Isolated"}
_FIRST_SPACE: _Stage = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def let_file_rule(tokenizer: Any, place: Path | str, **settings: Any) -> Tokenizer | None:
    """Gives transformers' tokenizer of a class what tokenizer.json says, in place of its own.

    Args:
        tokenizer: the tokenizer, which is changed.
        place: the folder or the Hub id that it is of.
        settings: what it was loaded with.

    Returns:
        What it had before; None if that is the file's, or there is no file.
    """
    by_class: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    here = {"local_files_only": settings.get("local_files_only", False)}
    file = cached_file(place, TOKENIZER, _raise_exceptions_for_missing_entries=False, **here)
    if by_class is None or file is None or type(tokenizer) is PreTrainedTokenizerFast:
        return None
    plain = PreTrainedTokenizerFast.from_pretrained(place, **settings).backend_tokenizer
    given = get_tokenizer_config(place, **here) | settings
    tokenizer._tokenizer = under_settings(plain, tokenizer, given)
    return by_class


def under_settings(file: Tokenizer, of_class: Any, given: Mapping[str, Any]) -> Tokenizer:
    """tokenizer.json under those of the given settings that a class of transformers has.

    Args:
        file: the file, with the tokens that other files add.
        of_class: transformers' tokenizer of that class. Its special tokens are tokens of a text
            where the vocabulary has them.
        given: the settings of tokenizer_config.json. null is none; of ``strip_accents`` it is a
            value: accents go if texts are lower-cased.
    """
    stated = {
        name: given[name]
        for name in SETTINGS & _parameters(type(of_class)) & given.keys()
        if given[name] is not None or name == "strip_accents"
    }
    made = _changed(file, of_class.backend_tokenizer, stated) if stated else file
    known = made.get_vocab(with_added_tokens=False)
    listed = {token.content for token in made.get_added_tokens_decoder().values()}
    missing = (set(of_class.all_special_tokens) & known.keys()) - listed
    tokens = of_class.added_tokens_decoder.values()
    made.add_special_tokens([token for token in tokens if token.content in missing])
    return made


def _parameters(kind: type) -> set[str]:
    """The settings of a class; it may hand some to the one that it is derived from.

    One that only inherits has none: transformers reads the file as it is, and heeds no setting.
    """
    if "__init__" not in vars(kind):
        return set()
    makers = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


def _changed(file: Tokenizer, by_class: Tokenizer, stated: Mapping[str, Any]) -> Tokenizer:
    content = json.loads(file.to_str())
    parts = {part: _stages(content[part], key) for part, key in _PARTS.items()}
    _normalize(parts["normalizer"], stated)
    if "split_by_punct" in stated:
        _switch(parts["pre_tokenizer"], [_PUNCTUATION], stated["split_by_punct"])
    if "add_prefix_space" in stated:
        _prefix(parts, _of_class(by_class, "pre_tokenizer"), bool(stated["add_prefix_space"]))
    for stage in parts["post_processor"]:
        if stage["type"] == "RobertaProcessing":
            names = ("add_prefix_space", "trim_offsets")
            stage |= {name: stated[name] for name in names if name in stated}
    if any(name in stated for name in LANGUAGES):
        parts["post_processor"] = _of_class(by_class, "post_processor")
        for stage in parts["post_processor"]:
            for token in stage["special_tokens"].values():
                token["ids"] = [file.token_to_id(name) for name in token["tokens"]]
    for part, stages in parts.items():
        content[part] = stages[0] if len(stages) == 1 else None
        if len(stages) > 1:
            content[part] = {"type": "Sequence", _PARTS[part]: stages}
    return Tokenizer.from_str(json.dumps(content))


def _stages(part: _Stage | None, key: str) -> list[_Stage]:
    """The stages of a part in order, also those of Sequences within a Sequence."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [stage for each in part[key] for stage in _stages(each, key)]


def _of_class(tokenizer: Tokenizer, part: str) -> list[_Stage]:
    given = getattr(tokenizer, part)
    return [] if given is None else _stages(json.loads(given.__getstate__()), _PARTS[part])


def _normalize(stages: list[_Stage], stated: Mapping[str, Any]) -> None:
    """Lets a normalizer lower-case and strip accents, or not."""
    of_bert = [stage for stage in stages if stage["type"] == "BertNormalizer"]
    for stage in of_bert:
        stage |= {field: stated[name] for name, field in OF_BERT.items() if name in stated}
    # Classes without a BertNormalizer decompose and strip, then lower-case, then map characters
    strips = stated.get("strip_accents")
    if "keep_accents" in stated:
        keeps, form = stated["keep_accents"], "NFKD"
        _switch(stages, [{"type": form}, {"type": "StripAccents"}], not keeps, "Lowercase")
    elif strips is not None and not of_bert:
        _switch(stages, [{"type": "NFD"}, {"type": "StripAccents"}], strips, "Lowercase")
    if "do_lower_case" in stated and not of_bert:
        _switch(stages, [{"type": "Lowercase"}], stated["do_lower_case"])


def _switch(stages: list[_Stage], wanted: list[_Stage], on: bool, *before: str) -> None:
    """Adds or removes stages, of which the last one tells whether they are there.

    They go before a map of characters or a stage of a kind, or else to the end of a normalizer.
    """
    kinds = [stage["type"] for stage in stages]
    present = wanted[-1]["type"] in kinds
    if present and not on:
        removed = {stage["type"] for stage in wanted}
        stages[:] = [stage for stage in stages if stage["type"] not in removed]
    elif on and not present:
        later = ("Precompiled", "NFC", "Metaspace", *before)
        place = next((i for i, kind in enumerate(kinds) if kind in later), len(stages))
        stages[place:place] = wanted


def _prefix(parts: dict[str, list[_Stage]], by_class: list[_Stage], on: bool) -> None:
    """Lets texts begin with a space or not, in each form in which a file may say so."""
    splits = parts["pre_tokenizer"]
    leads = bool(by_class) and by_class[0]["type"] == "ByteLevel"
    for index, stage in enumerate(splits):
        # Behind a stage of the file's own, it would put a space before each of that one's pieces
        if stage["type"] == "ByteLevel" and (index == 0 or not leads):
            stage["add_prefix_space"] = on
    schemes = [stage["prepend_scheme"] for stage in by_class if stage["type"] == "Metaspace"]
    spaced = [stage for stage in splits if stage["type"] == "Metaspace"]
    prepends = _PREPEND in parts["normalizer"]
    has = prepends or any(stage["prepend_scheme"] != "never" for stage in spaced)
    if not schemes or has == on:
        return
    for stage in [*spaced, *parts["decoder"]]:
        if stage["type"] == "Metaspace":
            stage["prepend_scheme"] = schemes[0]
    if prepends:
        parts["normalizer"].remove(_PREPEND)
    elif not spaced:
        parts["normalizer"].insert(0, _PREPEND)
    if any(stage["type"] == "Fuse" for stage in parts["decoder"]):
        _switch(parts["decoder"], [_FIRST_SPACE], on)
