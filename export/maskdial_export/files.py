"""A bundle's small files: tokenizer, chat template, generation defaults; and special tokens."""

import json
import warnings
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from maskdial.models.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, SpecialTokens
from maskdial_export.errors import ExportError
from maskdial_export.source import Source, read_json

_MASK_TOKENS = ("[MASK]", "<mask>")


def load_tokenizer(source: Source, vocab_size: int) -> Tokenizer:
    """The checkpoint's tokenizer, with padding and truncation turned off.

    Raises:
        ExportError: there is none, or it produces ids outside the model's vocabulary.
    """
    path = source.path / TOKENIZER
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no error class of its own
            raise ExportError(f"cannot read {path}: {error}") from error
    else:
        tokenizer = _convert(source)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise ExportError(
            f"the tokenizer of {source.name} produces ids up to {largest}, but the model has only "
            f"{vocab_size}; they do not belong together"
        )
    return tokenizer


def _convert(source: Source) -> Tokenizer:
    """Builds the tokenizer from the vocabulary files of an older checkpoint."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            slow = AutoTokenizer.from_pretrained(
                source.path, trust_remote_code=False, local_files_only=True
            )
        tokenizer: Tokenizer = slow.backend_tokenizer
    except Exception as error:  # transformers raises many types for missing files
        raise ExportError(
            f"{source.name} has no tokenizer.json, and its other files do not give a tokenizer"
        ) from error
    if tokenizer.get_vocab_size(with_added_tokens=False) == 0:
        raise ExportError(f"{source.name} has neither tokenizer.json nor another vocabulary file")
    return tokenizer


def special_tokens(source: Source, config: Any, tokenizer: Tokenizer) -> SpecialTokens:
    """The ids of special tokens, by role, from the checkpoint's files."""
    generation = source.read_json(GENERATION_CONFIG)

    def find(role: str) -> Any:
        """A token id, or for eos a list; the order of precedence is that of generate()."""
        for ids in (generation.get(f"{role}_token_id"), getattr(config, f"{role}_token_id", None)):
            if ids is not None:
                return ids
        return _named_token(source, f"{role}_token", tokenizer)

    eos = find("eos")
    return SpecialTokens(
        pad=find("pad"),
        mask=_mask_token(source, tokenizer) if source.family == "masked" else None,
        bos=find("bos"),
        eos=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


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


def write_files(source: Source, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Writes the small files into the bundle's folder and returns their names.

    Raises:
        OSError: a file cannot be written.
    """
    texts = {TOKENIZER: tokenizer.to_str(pretty=False)}
    template = _chat_template(source)
    if template is not None:
        texts[CHAT_TEMPLATE] = template
    generation = read_json(source.path / GENERATION_CONFIG)
    if generation and source.family == "causal":
        texts[GENERATION_CONFIG] = json.dumps(generation, indent=2) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(texts)


def _chat_template(source: Source) -> str | None:
    """From its own file, or from tokenizer_config.json: one text, or several by name."""
    path = source.path / CHAT_TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = source.read_json("tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def response_template(source: Source) -> dict[str, Any] | None:
    """How transformers parses the replies of a model that chats, where the checkpoint says so."""
    spec = source.read_json("tokenizer_config.json").get("response_template")
    return spec if isinstance(spec, dict) and source.family == "causal" else None
