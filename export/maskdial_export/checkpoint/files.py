"""A bundle's small files: tokenizer, chat template, generation defaults; and special tokens."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import huggingface_hub
from tokenizers import Tokenizer

from maskdial.bundle.bundle import file_sha256
from maskdial.bundle.manifest import (
    ADDITIONAL_TEMPLATES,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER,
    Family,
    SpecialTokens,
    TaskName,
)
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.errors import ExportError

_PROCESSOR_TEMPLATE = "chat_template.json"  # of older versions of transformers
_MASK_TOKENS = ("[MASK]", "<mask>")
# Files whose text goes into the bundle unchecked
_COPIED = (CHAT_TEMPLATE, _PROCESSOR_TEMPLATE, GENERATION_CONFIG, "vocab.txt")
_DEFAULT = "default"
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")  # of a template, which becomes a file's


class Files(Protocol):
    """A checkpoint, as far as its small files are concerned: `Source` is one."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def family(self) -> Family: ...
    @property
    def task(self) -> TaskName: ...
    def read_json(self, file_name: str) -> dict[str, Any]: ...


def files_sha256(files: Iterable[Path]) -> str:
    """One SHA-256 over the names and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def special_tokens(source: Files, config: Any, tokenizer: Tokenizer) -> SpecialTokens:
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


def _named_token(source: Files, role: str, tokenizer: Tokenizer) -> int | None:
    for file_name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = source.read_json(file_name).get(role)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return tokenizer.token_to_id(token)
    return None


def _mask_token(source: Files, tokenizer: Tokenizer) -> int | None:
    named = _named_token(source, "mask_token", tokenizer)
    usual = [tokenizer.token_to_id(token) for token in _MASK_TOKENS]
    mask = next((token for token in (named, *usual) if token is not None), None)
    if mask is None and source.task == "fill-mask":
        raise ExportError(f"the tokenizer of {source.name} has no mask token")
    return mask


def read_files(source: Files, tokenizer: Tokenizer) -> dict[str, str]:
    """The contents of the bundle's small files, by name.

    Raises:
        ExportError: a file cannot be read, or is a link to something outside the checkpoint.
    """
    for name in _COPIED:
        check_link(source.path, source.path / name)
    check_link(source.path, source.path / ADDITIONAL_TEMPLATES)
    texts = {TOKENIZER: tokenizer.to_str(pretty=False)}
    if source.task != "rerank":
        for name, template in chat_templates(source).items():
            other = f"{ADDITIONAL_TEMPLATES}/{name}.jinja"
            texts[CHAT_TEMPLATE if name == _DEFAULT else other] = template
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


def check_link(folder: Path, path: Path) -> None:
    """Refuses a link by which a checkpoint would bring a file of this machine into the bundle.

    In the Hub's cache every file is a link, from ``models--X/snapshots/COMMIT`` to
    ``models--X/blobs``, and a blob may be a link to one that several repositories share.
    """
    if not path.is_symlink():
        return
    folder = folder.resolve()
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE).resolve()
    repository = folder.parents[1] if folder.parent.name == "snapshots" else folder
    target = path.resolve()
    if not (folder.is_relative_to(cache) or target.is_relative_to(repository)):
        raise ExportError(
            f"{path} is a link to {target}, outside the checkpoint, and would be copied into the "
            "bundle; replace it with a copy if it belongs there"
        )


def chat_template(source: Files) -> str | None:
    """The one that is used where no other is named; None if there is none."""
    return chat_templates(source).get(_DEFAULT)


def chat_templates(source: Files) -> dict[str, str]:
    """All of them by name, from where transformers finds them: files first, then settings.

    Raises:
        ExportError: a file is not UTF-8 or a link out of the checkpoint, or a name is none of a
            file.
    """
    found = _template_files(source)
    if not found:
        settings = source.read_json("tokenizer_config.json").get("chat_template")
        given = settings or source.read_json(_PROCESSOR_TEMPLATE).get("chat_template")
        if isinstance(given, list):
            given = {
                each.get("name"): each.get("template") for each in given if isinstance(each, dict)
            }
        named = given if isinstance(given, dict) else {_DEFAULT: given}
        found = {str(name): each for name, each in named.items() if isinstance(each, str)}
    for name in found:
        if not _NAME.fullmatch(name):
            raise ExportError(
                f"a chat template of {source.name} has the name {name!r}; it may consist of "
                "letters, digits, dots, - and _"
            )
    return found


def _template_files(source: Files) -> dict[str, str]:
    paths = {
        path.stem: path for path in sorted(source.path.glob(f"{ADDITIONAL_TEMPLATES}/*.jinja"))
    }
    if (source.path / CHAT_TEMPLATE).is_file():
        paths[_DEFAULT] = source.path / CHAT_TEMPLATE
    texts = {}
    for name, path in paths.items():
        check_link(source.path, path)
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ExportError(f"{path} is not UTF-8 (byte {error.start}); convert it") from error
    return texts


def response_template(source: Files) -> dict[str, Any] | None:
    """How transformers parses the replies of a model that chats, where the checkpoint says so."""
    spec = source.read_json("tokenizer_config.json").get("response_template")
    return spec if isinstance(spec, dict) and source.family == "causal" else None
