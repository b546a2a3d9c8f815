"""A bundle's small files: tokenizer, chat template, generation defaults; and special tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from tokenizers import Tokenizer

from maskdial.models.bundle import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER,
    TOOL_TEMPLATE,
    SpecialTokens,
)
from maskdial_export.errors import ExportError
from maskdial_export.source import Source, read_json

_MASK_TOKENS = ("[MASK]", "<mask>")
# Files whose text goes into the bundle, whatever it is
_COPIED = (CHAT_TEMPLATE, TOOL_TEMPLATE, GENERATION_CONFIG, "vocab.txt")


def special_tokens(source: Source, config: Any, tokenizer: Tokenizer) -> SpecialTokens:
    """The ids of special tokens, by role, from the checkpoint's files.

    Raises:
        ExportError: an id is none of the model's, or a fill-mask model has no mask token.
    """
    generation = source.read_json(GENERATION_CONFIG)

    def find(role: str) -> tuple[int, ...]:
        """Token ids; the order of precedence is that of generate()."""
        key = f"{role}_token_id"
        places = (
            (GENERATION_CONFIG, generation.get(key)),
            ("config.json", getattr(config, key, None)),
        )
        for place, given in places:
            if given is not None:
                return _checked_ids(f"{key} in {place} of {source.name}", given, config.vocab_size)
        named = _named_token(source, f"{role}_token", tokenizer)
        return () if named is None else (named,)

    return SpecialTokens(
        pad=next(iter(find("pad")), None),
        mask=_mask_token(source, tokenizer) if source.family == "masked" else None,
        bos=next(iter(find("bos")), None),
        eos=find("eos"),
    )


def _checked_ids(where: str, given: Any, vocab_size: int) -> tuple[int, ...]:
    """One id or a list of them, all of the vocabulary; -1 stands for none."""
    ids = given if isinstance(given, list) else [given]
    for each in ids:
        if type(each) is not int:
            raise ExportError(f"{where} is {each!r}, which is no token id; it must be a number")
        if not -1 <= each < vocab_size:
            raise ExportError(
                f"{where} is {each}, but the model has only the tokens 0 to {vocab_size - 1}"
            )
    return tuple(each for each in ids if each != -1)


def _named_token(source: Source, role: str, tokenizer: Tokenizer) -> int | None:
    for file_name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = source.read_json(file_name).get(role)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return tokenizer.token_to_id(token)
    return None


def _mask_token(source: Source, tokenizer: Tokenizer) -> int | None:
    named = _named_token(source, "mask_token", tokenizer)
    usual = [tokenizer.token_to_id(token) for token in _MASK_TOKENS]
    mask = next((token for token in (named, *usual) if token is not None), None)
    if mask is None and source.task == "fill-mask":
        raise ExportError(f"the tokenizer of {source.name} has no mask token")
    return mask


def read_files(source: Source, tokenizer: Tokenizer) -> dict[str, str]:
    """The contents of the bundle's small files, by name.

    Raises:
        ExportError: a file cannot be read, or is a link to something outside the checkpoint.
    """
    for name in _COPIED:
        _check_link(source, source.path / name)
    _check_link(source, (source.path / TOOL_TEMPLATE).parent)
    texts = {TOKENIZER: tokenizer.to_str(pretty=False)}
    template = chat_template(source)
    if template is not None and source.task != "rerank":
        texts[CHAT_TEMPLATE] = template
        if (tool_template := _tool_template(source)) is not None:
            texts[TOOL_TEMPLATE] = tool_template
    generation = read_json(source.path / GENERATION_CONFIG)
    if generation and source.task == "generate":
        texts[GENERATION_CONFIG] = json.dumps(generation, indent=2) + "\n"
    return texts


def write_files(texts: Mapping[str, str], folder: Path) -> list[str]:
    """Writes the small files into the bundle's folder and returns their names.

    Raises:
        OSError: a file cannot be written.
    """
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return list(texts)


def _check_link(source: Source, path: Path) -> None:
    """Refuses a link by which a checkpoint would bring a file of this machine into the bundle.

    In the Hub's cache every file is a link, from ``models--X/snapshots/COMMIT`` to
    ``models--X/blobs``, and a blob may be a link to one that several repositories share.
    """
    if not path.is_symlink():
        return
    folder = source.path.resolve()
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE).resolve()
    repository = folder.parents[1] if folder.parent.name == "snapshots" else folder
    target = path.resolve()
    if not (folder.is_relative_to(cache) or target.is_relative_to(repository)):
        raise ExportError(
            f"{path} is a link to {target}, outside the checkpoint, and would be copied into the "
            "bundle; replace it with a copy if it belongs there"
        )


def chat_template(source: Source) -> str | None:
    """The default one, from its own file, or from tokenizer_config.json."""
    template = _read_template(source, CHAT_TEMPLATE)
    return _configured_templates(source).get("default") if template is None else template


def _tool_template(source: Source) -> str | None:
    """The one that transformers takes for conversations with tools, if it is another."""
    template = _read_template(source, TOOL_TEMPLATE)
    if template is None and not (source.path / CHAT_TEMPLATE).is_file():
        template = _configured_templates(source).get("tool_use")
    return template


def _read_template(source: Source, name: str) -> str | None:
    path = source.path / name
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 (byte {error.start}); convert it") from error


def _configured_templates(source: Source) -> dict[str, str]:
    """Those in tokenizer_config.json: one text, or several by name."""
    template = source.read_json("tokenizer_config.json").get("chat_template")
    if not isinstance(template, list):
        return {"default": template} if isinstance(template, str) else {}
    named = [
        (each.get("name"), each.get("template")) for each in template if isinstance(each, dict)
    ]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def response_template(source: Source) -> dict[str, Any] | None:
    """How transformers parses the replies of a model that chats, where the checkpoint says so."""
    spec = source.read_json("tokenizer_config.json").get("response_template")
    return spec if isinstance(spec, dict) and source.family == "causal" else None
