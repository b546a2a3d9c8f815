"""Router of sentence-transformers: queries and documents take a route each.

Of sparse models whose queries need no inference (opensearch-neural-sparse-encoding-doc and others
with `SparseStaticEmbedding`), the documents' route is exported as a model of its own, and the
queries' weights stand beside its graph.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from maskdial.bundle.manifest import TOKENIZER
from maskdial_export.checkpoint.files import check_link
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.sentence import MODULES, SENTENCE_CONFIG
from maskdial_export.errors import ExportError, first_line

_ROUTES, _SETTINGS = ("query", "document"), "router_config.json"
_WRITTEN = (MODULES, SENTENCE_CONFIG, _SETTINGS)
_STATIC = "SparseStaticEmbedding"
_WEIGHTS, _LARGE = "model.safetensors", (".safetensors", ".bin")
_FOLDER = re.compile(r"\w[\w.-]*")  # nothing outside the router's


@dataclass(frozen=True, slots=True)
class Router:
    """The routes of a checkpoint.

    Attributes:
        name: of the checkpoint.
        folder: the router's.
        documents: the modules' folders, and their classes by full names.
        queries: the folder of the queries' weights.
        by_default: the route of texts that are said to be neither.
    """

    name: str
    folder: Path
    documents: tuple[tuple[str, str], ...]
    queries: str
    by_default: str | None

    def restore(self, source: Path, folder: Path) -> Path:
        """Makes a checkpoint of the documents' route alone, by copies of its small files.

        Args:
            source: the whole checkpoint.
            folder: an empty one.

        Raises:
            ExportError: queries have no weights, or are tokenized otherwise than documents, or a
                small file is a link to something outside the checkpoint.
            OSError: a file cannot be read or written.
        """
        stored = self.folder / self.queries / _WEIGHTS
        if not stored.is_file():
            raise ExportError(f"{self.name} has no {stored.relative_to(source)}, of its queries")
        modules = []
        for index, (place, kind) in enumerate(self.documents):
            path = "" if index == 0 else place
            made = folder / path
            made.mkdir(exist_ok=True)
            for file in (self.folder / place).iterdir():
                if not file.is_file() or file.name in _WRITTEN:
                    continue
                if file.suffix in _LARGE:
                    os.symlink(file.resolve(), made / file.name)
                else:
                    check_link(source, file)
                    shutil.copyfile(file, made / file.name)
            modules.append({"idx": index, "name": str(index), "path": path, "type": kind})
        (folder / MODULES).write_text(json.dumps(modules), encoding="utf-8")
        settings = read_json(source / SENTENCE_CONFIG)
        prompts = dict.fromkeys(_ROUTES, "") | (settings.get("prompts") or {})
        default = settings.get("default_prompt_name") or self.by_default
        self._check_prompts(prompts, default)
        told = settings | {"prompts": prompts, "default_prompt_name": default}
        (folder / SENTENCE_CONFIG).write_text(json.dumps(told), encoding="utf-8")
        if _splitting(folder) != _splitting(self.folder / self.queries):
            raise ExportError(
                f"{self.name} splits queries into other tokens than documents, which is not "
                "supported"
            )
        return folder

    def _check_prompts(self, prompts: Mapping[str, str], default: str | None) -> None:
        """Refuses prompts by which a text would take another route than in sentence-transformers:
        there, all but those of the routes take the default one."""
        query, _ = _ROUTES
        takes_query, others = self.by_default == query, prompts.keys() - {*_ROUTES}
        if (default == query) != takes_query or (takes_query and others):
            raise ExportError(
                f"{self.name} takes the route {self.by_default} by default, and has the prompt "
                f"{min(others, default=default)!r}, which does not name that route; this is not "
                "supported"
            )

    def weights(self, vocab_size: int) -> NDArray[np.float32]:
        """The weight of each token of a query, float32 (vocab_size,).

        Raises:
            ExportError: the file is missing or damaged, or has others.
        """
        path = self.folder / self.queries / _WEIGHTS
        try:
            found = load_file(path)["weight"].astype(np.float32)
        except Exception as error:  # the library has no error class of its own
            raise ExportError(f"{path} cannot be read: {first_line(error)}") from error
        if found.ndim != 1 or len(found) > vocab_size or not np.isfinite(found).all():
            raise ExportError(
                f"{path} must have a finite weight for each of {vocab_size:,} tokens at most, and "
                f"has the shape {found.shape}"
            )
        return np.pad(found, (0, vocab_size - len(found)))

    @property
    def files(self) -> tuple[Path, ...]:
        """What it consists of beside the documents' route."""
        return self.folder / _SETTINGS, self.folder / self.queries / _WEIGHTS


def find_router(name: str, path: Path) -> Router | None:
    """The router of a checkpoint; None if it has none.

    Raises:
        ExportError: its routes are none that are known.
    """
    try:
        modules = json.loads((path / MODULES).read_text(encoding="utf-8"))
        kinds = [str(each["type"]).rpartition(".")[2] for each in modules]
        folder = path / str(modules[0]["path"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # what is wrong with it is told where it is read
    if kinds[0] != "Router":
        return None
    settings = read_json(folder / _SETTINGS)
    structure, types = settings.get("structure"), settings.get("types")
    if not isinstance(structure, dict) or not isinstance(types, dict) or len(kinds) > 1:
        raise ExportError(
            f"{name} has a Router with a module behind it, or without {_SETTINGS}, which is not "
            "supported"
        )
    routes = {key: _modules(value, types) for key, value in structure.items()}
    for place, _ in (each for route in routes.values() for each in route):
        if not _FOLDER.fullmatch(place):
            raise ExportError(f"{name} has the module {place!r} in {_SETTINGS}, which is no folder")
    queries, documents = (routes.get(each) for each in _ROUTES)
    parameters = settings.get("parameters") or {}
    classes = [kind.rpartition(".")[2] for _, kind in queries or ()]
    if set(routes) != {*_ROUTES} or classes != [_STATIC] or parameters.get("route_mappings"):
        said = ", ".join(
            f"{key}: {' and '.join(kind.rpartition('.')[2] for _, kind in each)}"
            for key, each in routes.items()
        )
        raise ExportError(
            f"{name} has a Router with the routes {said}; supported are a query of one "
            f"{_STATIC} and a document"
        )
    assert queries is not None, "both are there"
    assert documents is not None, "both are there"
    default = parameters.get("default_route")
    if default is None and parameters.get("allow_empty_key", True):
        default = next(iter(routes))
    return Router(name, folder, documents, queries[0][0], default)


def _modules(names: Any, types: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    listed = names if isinstance(names, list) else []
    return tuple((str(each), str(types.get(each))) for each in listed)


def _splitting(folder: Path) -> dict[str, Any]:
    """What a tokenizer makes of a text, but for what it puts around it."""
    try:
        found = json.loads(Tokenizer.from_file(str(folder / TOKENIZER)).to_str())
    except Exception as error:  # the library has no error class of its own
        raise ExportError(f"{folder / TOKENIZER} cannot be read: {first_line(error)}") from error
    return {key: found[key] for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
