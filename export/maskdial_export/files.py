"""A bundle's small files: tokenizer, chat template, generation defaults; and special tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from maskdial.models.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, SpecialTokens
from maskdial_export.errors import ExportError
from maskdial_export.source import Source, read_json

_MASK_TOKENS = ("[MASK]", "<mask>")


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
