"""The checkpoints that the direct path reads: a GGUF file, or a folder with safetensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maskdial.bundle.manifest import DECISION_TEMPLATE, Family, TaskName
from maskdial_export.checkpoint.files import files_sha256
from maskdial_export.checkpoint.gguf.contents import gguf_files, read_contents, write_settings
from maskdial_export.checkpoint.gguf.restored import write_pooling
from maskdial_export.checkpoint.hub import HYBRID_HEADS, download
from maskdial_export.checkpoint.hub import provenance as provenance_of
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.onnx_files import find_graphs
from maskdial_export.checkpoint.own_code import own_code
from maskdial_export.checkpoint.reranking import is_reranker
from maskdial_export.checkpoint.sentence import MODULES
from maskdial_export.direct.backbones import one_pass_task, ranks
from maskdial_export.direct.decoder import Decoder, NotDirectError
from maskdial_export.direct.encoder_head import pools
from maskdial_export.direct.fp8 import read_fp8
from maskdial_export.direct.makers import without_code
from maskdial_export.direct.text_parts import TextPart, text_part, text_weights
from maskdial_export.direct.views import find_views
from maskdial_export.direct.weights import GGUFWeights, SafetensorsWeights, Weights
from maskdial_export.errors import ExportError

_CONFIG = "config.json"
_WRITERS = ("ForCausalLM", "LMHeadModel")
# What a model that writes may bring beside its weights, and only the tracer exports
_BESIDE = (DECISION_TEMPLATE, "decision.json", "gliner_config.json", *HYBRID_HEADS)


@dataclass(frozen=True, slots=True)
class DirectCheckpoint:
    """A model's files and weights.

    Attributes:
        name: what it was asked for by.
        path: the folder of its small files; of a GGUF file, those that it was restored to.
        config: config.json.
        weights: by transformers' names.
        sources: the files that it consists of.
        provenance: for the manifest.
        bits: how many the integers of its matrices have, each at most.
        part: what of it is exported, if it also reads images.
        is_in_fp8: whether its matrices are floats of 8 bits.
        traceable: whether the tracer takes it, too: it brings no code that only this path replaces.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    weights: Weights
    sources: tuple[Path, ...]
    provenance: str
    bits: frozenset[int] = frozenset()
    part: TextPart | None = None
    family: Family = "causal"
    task: TaskName = "generate"
    is_in_fp8: bool = False
    traceable: bool = True

    def read_json(self, file_name: str) -> dict[str, Any]:
        """A JSON object next to the weights; empty if the file is missing."""
        return read_json(self.path / file_name)

    def arranged(self, decoder: Decoder) -> "DirectCheckpoint":
        """The same with each of the decoder's weights by its own name, where files hold several."""
        if not isinstance(self.weights, SafetensorsWeights):
            return self
        weights, table = self.weights, f"{decoder.names.table}.weight"
        base, _, rest = table.partition(".")
        if decoder.stored_base is not None:
            stored = f"{decoder.stored_base}."
            weights = weights.renamed(
                lambda name: (
                    f"{base}.{name.removeprefix(stored)}" if name.startswith(stored) else name
                )
            )
        if rest in weights.shapes():  # of a class without the output layer
            weights = weights.renamed(lambda name: f"{base}.{name}")
        views = find_views(decoder, weights.shapes())
        weights = weights.with_views(views)
        found = {weights.bits(name) for name in views} - {None}
        return replace(self, weights=weights, bits=frozenset(each for each in found if each))

    def of_graph(self, files: tuple[Path, ...], task: TaskName) -> "DirectCheckpoint":
        """The same of graph files alone, for a task that is read in one pass."""
        return replace(self, sources=(*self.sources, *files), family="masked", task=task)

    def sha256(self) -> str:
        """One SHA-256 over the names and contents of what it consists of."""
        return files_sha256(self.sources)


class GraphsOnlyError(NotDirectError):
    """A checkpoint has graphs of ONNX, and its weights in no other form.

    Attributes:
        checkpoint: its small files.
        graphs: those of which one may be taken.
    """

    def __init__(self, checkpoint: DirectCheckpoint, graphs: list[Path]) -> None:
        super().__init__(
            f"{checkpoint.name} has no weights in safetensors, but {graphs[0].name}, a graph"
        )
        self.checkpoint = checkpoint
        self.graphs = graphs


def open_checkpoint(
    source: str, revision: str | None, restored: Path, task: str = "auto"
) -> DirectCheckpoint:
    """Finds a checkpoint, and downloads it if ``source`` is a Hub id.

    Args:
        source: a GGUF file, a checkpoint folder, or a Hub id.
        revision: of the Hub id.
        restored: an empty folder for the small files of a GGUF file.
        task: what it is to do; auto for what it says.

    Raises:
        NotDirectError: it is of a kind that is not known.
        ExportError: there is no such checkpoint, or it is damaged.
        OSError: a file cannot be read or written.
    """
    path = Path(source)
    parts = gguf_files(path)
    if (parts or path.is_dir()) and revision is not None:
        kind = "file" if parts else "folder"
        raise ExportError(f"--revision applies to Hub ids, and the source is a local {kind}")
    if parts:
        return _with_task(_open_gguf(source, parts, restored), task)
    folder = path if path.is_dir() else download(source, revision, allow_pickle=False)
    return _with_task(_open_folder(source, folder), task)


def _with_task(found: DirectCheckpoint, asked: str) -> DirectCheckpoint:
    """The checkpoint with its task.

    Raises:
        NotDirectError: it is not known, or not the one that is asked for.
    """
    config, pooled = found.config, pools(found)
    says = asked == "rerank" or (asked == "auto" and is_reranker(found.path, config))
    if says and not pooled and ranks(config):
        return replace(found, family="masked", task="rerank")
    own = one_pass_task(config, pools=pooled)
    if (found.path / MODULES).exists() and (own is None or found.part is not None):
        raise NotDirectError(f"{MODULES} of {found.name} is not known to the direct path")
    if asked not in ("auto", own or "generate"):
        raise NotDirectError(
            f"the direct path exports it for {own or 'generate'}, and --task asks for {asked}"
        )
    return found if own is None else replace(found, family="masked", task=own)


def _open_gguf(source: str, parts: list[Path], restored: Path) -> DirectCheckpoint:
    contents = read_contents(parts)
    write_settings(contents, restored)
    write_pooling(contents, restored)
    bits = {each.bits for each in contents.weights if each.bits is not None}
    found = DirectCheckpoint(
        source,
        restored,
        read_json(restored / _CONFIG),
        # Matrices are (outputs, inputs) here, also where transformers' class has them otherwise
        GGUFWeights(parts[0].name, [replace(each, transposed=False) for each in contents.weights]),
        tuple(parts),
        provenance_of(parts[0]),
        frozenset(bits),
    )
    architecture = contents.model.architecture
    writes = architecture.endswith(_WRITERS)
    if not writes and one_pass_task(found.config, pools=pools(found)) is None:
        raise NotDirectError(f"{architecture} is not known to the direct path")
    return found


def _open_folder(source: str, folder: Path) -> DirectCheckpoint:
    config = read_json(folder / _CONFIG)
    if not config:
        raise NotDirectError(f"{source} has no {_CONFIG}")
    traceable = own_code(source, folder, config) is None
    if own_code(source, folder, config, direct=True) is None:
        config = without_code(config)
    beside = [name for name in _BESIDE if (folder / name).exists()]
    if beside:
        raise NotDirectError(f"{beside[0]} of {source} is not known to the direct path")
    files = sorted(folder.glob("*.safetensors"))
    name = folder.resolve().name
    provenance = name if Path(source).is_dir() else f"{source}@{name}"
    if not files:
        pickles = sorted(folder.glob("pytorch_model*.bin"))
        if not pickles and (graphs := find_graphs(source, folder)):
            none = SafetensorsWeights(source, [])
            small = (folder / _CONFIG,)
            raise GraphsOnlyError(
                DirectCheckpoint(source, folder, config, none, small, provenance), graphs
            )
        others = f", but {pickles[0].name}, a pickle" if pickles else ""
        raise NotDirectError(f"{source} has no weights in safetensors{others}")
    weights, stored = SafetensorsWeights(source, files), read_fp8(config)
    if stored is not None:
        weights = weights.in_fp8(stored)
        config = {key: each for key, each in config.items() if key != "quantization_config"}
    part = text_part(config)
    if part is not None:
        weights, config = text_weights(weights, part), dict(part.config)
    return DirectCheckpoint(
        source,
        folder,
        config,
        weights,
        (folder / _CONFIG, *files),
        provenance,
        part=part,
        is_in_fp8=stored is not None,
        traceable=traceable,
    )
