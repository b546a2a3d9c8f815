"""Which models there are, as Ollama's clients ask: `/api/tags`, `/api/ps`, `/api/show` and
`/api/version`.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from fastapi import Request, Response
from pydantic import Field, model_validator

from maskdial.bundle.bundle import num_bytes
from maskdial.bundle.manifest import MANIFEST, Manifest
from maskdial.causal.model import CausalModel
from maskdial.config import Config
from maskdial.dialects.body import FieldError, example
from maskdial.dialects.call import Call
from maskdial.dialects.ollama.answer import timestamp
from maskdial.dialects.ollama.body import OllamaBody
from maskdial.dialects.ollama.replies import Details
from maskdial.engine.model import max_length
from maskdial.errors import ValidationError
from maskdial.http.context import server_context
from maskdial.http.replies import json_reply
from maskdial.registry.choice import LATEST
from maskdial.registry.entry import Entry

VERSION = "0.13.0"
"""Of Ollama: some clients ask for one that is new enough."""

_NEVER = datetime(2318, 1, 1, tzinfo=UTC)  # as Ollama has it, about


class NameBody(OllamaBody):
    """A model by its name."""

    model_config = example({"model": "hybrid"})

    name: str | None = Field(None, description="The older name of model.")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if not (self.model or self.name):
            raise FieldError("model", "this field is required")
        return self

    def entry(self, call: Call[Any]) -> Entry:
        """The entry of the model.

        Raises:
            NotFoundError: there is none.
        """
        name = self.choice(self.model or self.name).name
        assert name is not None, "the body has one"
        return call.server.models.entry(name)


class ShowBody(NameBody):
    """A model to describe."""

    habits = frozenset({"options", "system", "template", "verbose"})


@dataclass(frozen=True, slots=True)
class Files:
    """A bundle's files: their size in bytes, a digest of them, and when they were written."""

    size: int
    digest: str
    modified_at: str

    @classmethod
    def of(cls, folder: Path, manifests: Iterable[Manifest]) -> "Files":
        """Reads the folder's entries; call it in a thread. Files that are gone have no size."""
        hashes = {name: digest for each in manifests for name, digest in each.files.items()}
        size = sum(num_bytes(folder, each) for each in manifests)
        lines = "".join(f"{digest} {name}\n" for name, digest in sorted(hashes.items()))
        written = _modified(folder / MANIFEST)
        return cls(size, hashlib.sha256(lines.encode()).hexdigest(), timestamp(written))


def _modified(path: Path) -> datetime:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:
        return datetime.fromtimestamp(0, UTC)


async def _files(entries: Sequence[Entry]) -> list[Files]:
    folders = [(entry.folder, entry.manifests) for entry in entries]
    return await asyncio.to_thread(lambda: [Files.of(*each) for each in folders])


async def version() -> Response:
    """The version of Ollama whose API this is."""
    return json_reply({"version": VERSION})


async def tags(request: Request) -> Response:
    """The models that requests may ask for, loaded or not."""
    models = server_context(request).models
    await models.refresh()
    entries = [
        entry for entry in models.entries if entry.manifests and (entry.models or models.autoloads)
    ]
    found = zip(entries, await _files(entries), strict=True)
    return json_reply(
        {"models": [_listed(*each) | {"modified_at": each[1].modified_at} for each in found]}
    )


async def running(request: Request) -> Response:
    """The loaded models, and when they are unloaded unless they are used."""
    server = server_context(request)
    entries = [entry for entry in server.models.entries if entry.models]
    found = zip(entries, await _files(entries), strict=True)
    return json_reply(
        {
            "models": [
                _listed(entry, files)
                | {
                    "expires_at": timestamp(_expiry(entry)),
                    "size_vram": 0,
                    "context_length": _context(entry, server.config),
                }
                for entry, files in found
                if entry.manifests
            ]
        }
    )


async def show(call: Call[ShowBody]) -> Response:
    """A model in detail. What its chat template can do is known once it is loaded."""
    await call.server.models.refresh()
    entry = call.body.entry(call)
    if not entry.manifests:
        raise ValidationError(f"model {entry.name!r} cannot be read: {entry.reason}", field="model")
    (files,) = await _files([entry])
    details = _details(entry)
    info: dict[str, str | int] = {
        "general.architecture": details["family"],
        "general.basename": entry.name,
        f"{details['family']}.context_length": _context(entry, call.server.config),
    }
    for manifest in entry.manifests:
        info[f"{details['family']}.vocab_size"] = manifest.vocab_size
        if manifest.embedding is not None:
            info[f"{details['family']}.embedding_length"] = manifest.embedding.dimension
    causal = _causal(entry)
    template = None if causal is None else causal.chat_template.source
    return json_reply(
        {
            "modelfile": f"# Served by maskdial\nFROM {entry.name}\n",
            "parameters": "" if causal is None else _parameters(causal),
            "template": _with_suffix(template or "{{ .Prompt }}", entry),
            "details": details,
            "model_info": info,
            "capabilities": _capabilities(entry),
            "modified_at": files.modified_at,
        }
    )


def _listed(entry: Entry, files: Files) -> dict[str, Any]:
    name = entry.name + LATEST
    return {
        "name": name,
        "model": name,
        "size": files.size,
        "digest": files.digest,
        "details": _details(entry),
    }


def _details(entry: Entry) -> Details:
    manifest = entry.manifests[0]
    return {
        "parent_model": "",
        "format": "onnx",
        "family": manifest.architecture,
        "families": list(dict.fromkeys(each.architecture for each in entry.manifests)),
        "parameter_size": "",
        "quantization_level": manifest.precision,
    }


def _causal(entry: Entry) -> CausalModel | None:
    return next((each for each in entry.models if isinstance(each, CausalModel)), None)


def _context(entry: Entry, config: Config) -> int:
    """The context in tokens: that of the causal graph, if there is one."""
    causal = _causal(entry)
    if causal is not None:
        return causal.max_length
    return max(max_length(each, config) for each in entry.manifests)


def _parameters(model: CausalModel) -> str:
    """The model's defaults, as lines of a Modelfile."""
    defaults = model.defaults
    values = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
        "num_ctx": model.max_length,
    }
    return "\n".join(f"{name:<30} {value:g}" for name, value in values.items())


def _with_suffix(template: str, entry: Entry) -> str:
    """A template that also says, in Ollama's language, how a prompt with a suffix is written: that
    is where its clients look for ``.Suffix``.
    """
    tokens = next((each.infill for each in entry.manifests if each.infill is not None), None)
    if tokens is None:
        return template
    parts = [tokens.prefix + "{{ .Prompt }}", tokens.suffix + "{{ .Suffix }}"]
    if tokens.suffix_first:
        parts.reverse()
    infilled = "".join(parts) + (tokens.middle or "")
    return f"{{{{ if .Suffix }}}}{infilled}{{{{ else }}}}{template}{{{{ end }}}}"


def _capabilities(entry: Entry) -> list[str]:
    tasks = {manifest.task for manifest in entry.manifests}
    found = [name for task, name in _CAPABILITIES if task in tasks]
    found += ["insert"] * any(manifest.infill is not None for manifest in entry.manifests)
    causal = _causal(entry)
    if causal is not None:
        found += ["tools"] * (causal.reply_format.calls is not None)
        found += ["thinking"] * (causal.reply_format.thinking is not None)
    return found


_CAPABILITIES = (("generate", "completion"), ("embed", "embedding"))


def _expiry(entry: Entry) -> datetime:
    """When a model that nobody uses from now on is unloaded."""
    version = entry.current
    if version is None or entry.keep_alive is None or entry.keep_alive > 1e9:
        return _NEVER
    used_at = time.monotonic() if version.num_leases else version.used_at
    left = used_at + entry.keep_alive - time.monotonic()
    return datetime.now(UTC) + timedelta(seconds=max(left, 0.0))
