"""Exports a PEFT adapter to an adapter bundle, which a server applies to its base at run time.

Unlike an export of a model, it runs what the server runs, the kernels: there is no other graph that
takes adapters.
"""

import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from peft.utils.other import get_pattern_key
from rich.console import Console
from transformers import PreTrainedModel

import maskdial
from maskdial.bundle.adapter import (
    ADAPTER_HEAD,
    ADAPTER_MANIFEST,
    ADAPTER_WEIGHTS,
    AdapterHead,
    AdapterManifest,
    AdapterParity,
    LowRank,
    Projection,
)
from maskdial.bundle.bundle import Bundle, hash_files, load_bundle, write_manifest
from maskdial.bundle.manifest import TASK_ADAPTERS, Manifest
from maskdial.errors import BundleError, ConfigError
from maskdial.kernels.adapters import PackedAdapter
from maskdial.kernels.installed import Kernels, find_kernels
from maskdial.runtime.head import Head
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from maskdial_export.checkpoint.adapter import check_adapter
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checkpoint.source import Source, find
from maskdial_export.checkpoint.task_adapters import TaskAdapters
from maskdial_export.checks.parity import expected_output
from maskdial_export.destination import new_folder
from maskdial_export.errors import ExportError
from maskdial_export.model import Checkpoint, load_checkpoint
from maskdial_export.phase import finding, phase
from maskdial_export.tracing import adapter_head

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_OF_TABLES = {".lora_embedding_A": _A, ".lora_embedding_B": _B}
_WORDS, _TYPES_OF_TOKENS = "word_embeddings", "token_type_embeddings"
_ALPHA = 8  # PEFT's default
_NUM_TEXTS, _LONGEST = 6, 96
TOLERANCE = 1e-4
"""Of float32, where logits are at most 10; beyond, it scales with them."""
_MORE, _LEAST = 2.0, 0.1
"""The base of integers with the adapter may be this many times as far from PEFT as it is from torch
without, or this many standard deviations of the logits, which the golden check allows as well."""
_TOOLS = ("peft", "torch", "transformers")
_PRECISIONS = ("fp32", "int8", "int4")
# Settings under which the result is more than the base's and a low-rank product's.
_REFUSED = {
    "use_dora": "DoRA also scales each column by the length of the changed weights",
    "alora_invocation_tokens": "activated LoRA changes some tokens of a text only",
    "trainable_token_indices": "it changes rows of the embedding table",
    "target_parameters": "it changes parameters that are no layers",
    "lora_bias": "it has biases",
}


def export_adapter(
    adapter: Path,
    dest: Path,
    base: Path,
    *,
    checkpoint: str | None = None,
    console: Console | None = None,
) -> AdapterManifest:
    """Exports an adapter to the new or empty folder ``dest`` and returns its manifest.

    Args:
        adapter: a folder as PEFT saves it, of LoRA or rsLoRA.
        dest: the adapter bundle's folder.
        base: the bundle of the model that it was trained on.
        checkpoint: what that bundle was exported from, to compare with PEFT. Default: what the
            adapter names.
        console: where to show progress; None for nowhere.

    Raises:
        ExportError: the adapter cannot be exported, or the base computes something else with it
            than PEFT does.
    """
    console = console or Console(quiet=True)
    try:
        bundle = load_bundle(base.name, base)
        kernels = find_kernels("on")
    except (BundleError, ConfigError) as error:
        raise ExportError(error.message) from error
    assert kernels is not None, "the setting is on"
    if bundle.manifest.text_to_text is not None:
        raise ExportError(
            f"{base} is an encoder-decoder model, which takes no adapters; merge the adapter with "
            "maskdial export --adapter"
        )
    settings = _read_settings(adapter)
    name = checkpoint or settings.get("base_model_name_or_path")
    if not name:
        raise ExportError("the adapter names no base; give its checkpoint by --checkpoint")
    with new_folder(dest) as folder:
        with phase(console, "Opening the base"):
            opened = _Base.open(bundle, kernels, _find(str(name), bundle))
        return _write_adapter(adapter, settings, folder, opened, console)


def add_tasks(
    folder: Path, manifest: Manifest, found: TaskAdapters, source: Source, console: Console
) -> Manifest:
    """Adds the adapters that a checkpoint brings for its tasks to the bundle that it became.

    Returns:
        The manifest of the bundle, which is written again.

    Raises:
        ExportError: an adapter cannot be exported, or computes something else than with PEFT.
    """
    assert manifest.embedding is not None, "tasks are those of embeddings"
    if manifest.precision not in _PRECISIONS:
        finding(console, f"without tasks: no adapter is applied in {manifest.precision}")
        return manifest
    try:
        kernels = find_kernels("on")
    except ConfigError as error:
        raise ExportError(f"the adapters of {source.name} need them: {error.message}") from error
    assert kernels is not None, "the setting is on"
    base = _Base.open(Bundle(source.name, folder, manifest), kernels, source)
    files = dict(manifest.files)
    for name, adapter in found.folders.items():
        finding(console, f"the adapter {name}:")
        inside = folder / TASK_ADAPTERS / name
        inside.mkdir(parents=True)
        _write_adapter(adapter, _read_settings(adapter), inside, base, console)
        hashes = hash_files(inside, (ADAPTER_MANIFEST, ADAPTER_WEIGHTS))
        files |= {f"{TASK_ADAPTERS}/{name}/{each}": sha256 for each, sha256 in hashes.items()}
    embedding = manifest.embedding.model_copy(update={"tasks": found.tasks})
    whole = manifest.model_copy(update={"embedding": embedding, "files": files})
    write_manifest(folder, whole)
    return whole


@dataclass(frozen=True)
class _Base:
    """A bundle as the server runs it with adapters, and what it was exported from."""

    bundle: Bundle
    kernels: Kernels
    session: Session
    source: Source

    @classmethod
    def open(cls, bundle: Bundle, kernels: Kernels, source: Source) -> "_Base":
        """Raises: ExportError: its graph takes no adapters."""
        options = SessionOptions(kernels=kernels, intra_op_threads=None, adapters=True)
        session = Session(bundle.graph, options)
        if not session.projections:
            raise ExportError(f"{bundle.path} does not name its layers; export it again")
        return cls(bundle, kernels, session, source)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model without an adapter."""
        return load_checkpoint(self.source)

    @property
    def pools(self) -> bool:
        """Whether the graph makes its output of hidden states, not of the pooler of the model."""
        return self.bundle.manifest.embedding is not None


def _read_settings(adapter: Path) -> dict[str, Any]:
    """Raises: ExportError: it is no adapter, or of a kind that is not applied at run time."""
    check_adapter(adapter, allow_pickle=False)
    settings = read_json(adapter / _CONFIG)
    _check_kind(adapter, settings)
    return settings


def _write_adapter(
    adapter: Path, settings: Mapping[str, Any], folder: Path, base: _Base, console: Console
) -> AdapterManifest:
    """Makes an adapter bundle of a folder of PEFT's, and returns its manifest."""
    manifest = base.bundle.manifest
    with phase(console, "Reading the adapter"):
        half = manifest.precision != "fp32"
        head_task = _head_task(base.bundle, settings)
        modules = _Modules.of(adapter, base, has_head=head_task is not None)
        matrices = modules.low_rank(adapter, settings, base.session.projections, half)
    with phase(console, "Comparing with PEFT"):
        packed = PackedAdapter(base.kernels.path)
        for layer, each in matrices.items():
            packed.add(each, base.session.projections[layer])
        made = _Made(adapter, base, packed.address if matrices else 0)
        head, parity = made.compare(head_task, modules.others)
    finding(console, f"logits differ by {parity.difference:.2g} (at most {parity.tolerance:.2g})")
    tensors = {}
    for layer, (a, b) in matrices.items():
        tensors[f"{layer}.a"], tensors[f"{layer}.b"] = np.asarray(a), np.asarray(b)
    content = safetensors.numpy.save(tensors)
    written = AdapterManifest(
        source=adapter.resolve().name,
        base=manifest.source,
        base_sha256=manifest.source_sha256,
        dtype="float16" if half else "float32",
        rank=max((len(each.a) for each in matrices.values()), default=0),
        num_layers=len(matrices),
        head=None if head is None else head.settings,
        tool_versions={
            "maskdial": maskdial.__version__,
            **{tool: importlib.metadata.version(tool) for tool in _TOOLS},
        },
        parity=parity,
        weights_sha256=hashlib.sha256(content).hexdigest(),
    )
    _write(folder / ADAPTER_WEIGHTS, content)
    if head is not None:
        _write(folder / ADAPTER_HEAD, head.content)
    _write(folder / ADAPTER_MANIFEST, (written.model_dump_json(indent=2) + "\n").encode())
    return written


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _check_kind(adapter: Path, settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type")
    remedy = "merge it with maskdial export --adapter"
    if kind != "LORA":
        raise ExportError(f"{adapter} is a {kind} adapter, and only LoRA is applied at run time")
    for setting, why in _REFUSED.items():
        if settings.get(setting):
            raise ExportError(f"{adapter} has {setting}: {why}, so {remedy}")
    if settings.get("bias", "none") != "none":
        raise ExportError(f"{adapter} changes biases, so {remedy}")
    for setting, kind_of, is_so in _TYPES:
        if setting in settings and not is_so(settings[setting]):
            raise ExportError(f"{setting} in {adapter / _CONFIG} is not {kind_of}")


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) <= sys.float_info.max  # also compares integers of any size


def _is_pattern(value: Any) -> bool:
    """Whether names of layers, which are regular expressions, have numbers."""
    if value is None:
        return True
    if not isinstance(value, dict) or not all(map(_is_number, value.values())):
        return False
    try:
        return all(map(re.compile, value))
    except (re.error, OverflowError, RecursionError):
        return False


_TYPES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("lora_alpha", "a number", _is_number),
    ("alpha_pattern", "an object of numbers by layers", _is_pattern),
    ("use_rslora", "true or false", lambda value: isinstance(value, bool)),
    ("base_model_name_or_path", "a name", lambda value: isinstance(value, str | None)),
)


def _head_task(bundle: Bundle, settings: Mapping[str, Any]) -> adapter_head.HeadTask | None:
    """The task of the head that an adapter brings for hidden states; None if it brings none."""
    kind = settings.get("task_type")
    if bundle.manifest.task != "embed-all" or not isinstance(kind, str):
        return None
    return adapter_head.TASKS.get(kind)


def _read(adapter: Path) -> dict[str, NDArray[np.float32]]:
    """The adapter's weights by their names, without what PEFT puts before each."""
    stored = {}
    with safetensors.safe_open(adapter / _WEIGHTS, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            name = key.removeprefix(_PREFIX)
            for suffix, usual in _OF_TABLES.items():
                name = name.removesuffix(suffix) + usual if name.endswith(suffix) else name
            stored[name] = file.get_tensor(key).float().numpy()
    return stored


@dataclass(frozen=True, slots=True)
class _Modules:
    """What an adapter changes.

    Attributes:
        stored: its weights, by name.
        layers: the modules that have low-rank matrices, by the base's layers.
        types: by the layer that looks up words, the table of token types, if it has one row: that
            is added to every word.
        others: what belongs to a head: other modules and weights.
    """

    stored: Mapping[str, NDArray[np.float32]]
    layers: Mapping[str, str]
    types: Mapping[str, str]
    others: set[str]

    @classmethod
    def of(cls, adapter: Path, base: _Base, *, has_head: bool) -> "_Modules":
        """Raises: ExportError: it changes something that is no layer of the base."""
        stored, projections = _read(adapter), base.session.projections
        modules = sorted({key.removesuffix(_A) for key in stored if key.endswith(_A)})
        others = stored.keys() - {f"{each}{part}" for each in modules for part in (_A, _B)}
        if others and not has_head:
            raise ExportError(
                f"{adapter} has weights that are no low-rank matrices, such as "
                f"{_PREFIX + min(others)!r}, so merge it with maskdial export --adapter; the head "
                "of a classifier is applied at run time to a base that was exported with --task "
                "embed-all"
            )
        if not modules and not others:
            raise ExportError(f"{adapter / _WEIGHTS} has no low-rank matrices")
        layers, types = {}, {}
        for module in modules:
            if f"{module}{_B}" not in stored:
                raise ExportError(f"{adapter} lacks {_PREFIX}{module}{_B}")
            layer = _layer(module, projections)
            words = _layer(module.replace(_TYPES_OF_TOKENS, _WORDS), projections)
            if layer is not None:
                layers[layer] = module
            elif has_head:
                others.add(module)
            elif words is not None and stored[f"{module}{_A}"].shape[1:] == (1,):
                types[words] = module
            elif not (base.pools and "pooler" in module.split(".")):
                raise ExportError(_no_layer(adapter, module))
        return cls(stored, layers, types, set(others))

    def low_rank(
        self,
        adapter: Path,
        settings: Mapping[str, Any],
        projections: Mapping[str, Projection],
        half: bool,
    ) -> dict[str, LowRank]:
        """The matrices of each layer, scaled."""
        found = {
            layer: _low_rank(adapter, settings, self.stored, module, projections[layer], half)
            for layer, module in self.layers.items()
        }
        for words, module in self.types.items():
            size = projections[words]
            row = Projection(1, size.num_outputs, size.product, size.first, size.width)
            a, b = _low_rank(adapter, settings, self.stored, module, row, half=False)
            ones = np.ones((1, size.num_inputs), np.float32)
            every = np.asarray(a, np.float32).T @ np.asarray(b, np.float32)
            added, own = LowRank(ones, every), found.get(words)
            if own is not None:
                added = LowRank(np.vstack((own.a, added.a)), np.vstack((own.b, added.b)))
            found[words] = LowRank(added.a.astype(_dtype(half)), added.b.astype(_dtype(half)))
        return found


def _no_layer(adapter: Path, name: str) -> str:
    return (
        f"{adapter} changes {name}, which is none of the base's layers that an adapter can change "
        "at run time; merge it with maskdial export --adapter"
    )


def _low_rank(
    adapter: Path,
    settings: Mapping[str, Any],
    stored: Mapping[str, NDArray[np.float32]],
    module: str,
    size: Projection,
    half: bool,
) -> LowRank:
    """A module's matrices, scaled."""
    a, b = stored[f"{module}{_A}"], stored[f"{module}{_B}"]
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not len(a):
        raise ExportError(f"the matrices of {module} in {adapter} do not fit together")
    if (size.num_inputs, size.num_outputs) != (a.shape[1], len(b)):
        raise ExportError(
            f"{adapter} was trained on another base: layer {module} has {size.num_inputs} inputs "
            f"and {size.num_outputs} outputs, and its matrices fit {a.shape[1]} and {len(b)}"
        )
    b = (_scale(settings, module, len(a)) * b).T
    with np.errstate(over="ignore"):
        low_rank = LowRank(a.astype(_dtype(half)), np.ascontiguousarray(b, _dtype(half)))
    if not all(np.isfinite(each).all() for each in low_rank):
        raise ExportError(
            f"the matrices of {module} in {adapter} have numbers that are not finite"
            + (", or too large for float16" if half else "")
        )
    return low_rank


def _dtype(half: bool) -> type[np.float16 | np.float32]:
    return np.float16 if half else np.float32


def _layer(module: str, projections: Mapping[str, Projection]) -> str | None:
    """The base's layer of a module. Models with heads have a prefix that those without lack."""
    if module in projections:
        return module
    found = [
        layer
        for layer in projections
        if layer.endswith(f".{module}") or module.endswith(f".{layer}")
    ]
    return found[0] if len(found) == 1 else None


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """As PEFT has it (``LoraLayer.update_layer``)."""
    patterns = settings.get("alpha_pattern") or {}
    pattern = get_pattern_key(patterns.keys(), module)
    alpha = float(patterns.get(pattern, settings.get("lora_alpha", _ALPHA)))
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def _find(name: str, bundle: Bundle) -> Source:
    """The checkpoint of the base.

    Raises:
        ExportError: it cannot be found, or the base was exported from another one.
    """
    manifest = bundle.manifest
    try:
        source = find(name, manifest.task, revision=None, allow_pickle=False)
    except ExportError as error:
        raise ExportError(
            f"the checkpoint of the base cannot be read; name it with --checkpoint: {error.message}"
        ) from error
    if source.sha256() != manifest.source_sha256:
        raise ExportError(
            f"{bundle.path} was exported from {manifest.source}, whose files differ from those of "
            f"{name}"
        )
    return (
        source if manifest.mask == "causal" or source.family != "causal" else source.under("full")
    )


@dataclass(frozen=True, slots=True)
class _OwnHead:
    """A head that an adapter brings: what the manifest says of it, and its graph."""

    settings: AdapterHead
    content: bytes

    @classmethod
    def of(
        cls, model: PreTrainedModel, task: adapter_head.HeadTask, labels: adapter_head.Labels
    ) -> tuple["_OwnHead", adapter_head.AdapterHead]:
        """That of a model, which loses its body."""
        module = adapter_head.AdapterHead(model)
        rows = module.read_rows(task)
        content = ir.to_proto(module.trace(rows)).SerializeToString()
        settings = AdapterHead(
            task=task,
            labels=labels.names,
            problem_type=labels.problem_type,
            rows=rows,
            sha256=hashlib.sha256(content).hexdigest(),
        )
        return cls(settings, content), module


@dataclass(frozen=True, slots=True)
class _Made:
    """An adapter's matrices on the base, as the server runs it."""

    adapter: Path
    base: _Base
    address: int

    def compare(
        self, task: adapter_head.HeadTask | None, others: Collection[str]
    ) -> tuple[_OwnHead | None, AdapterParity]:
        """Compares it with PEFT, with the head that it brings.

        Args:
            task: that of the head; None for no head.
            others: modules and weights of the adapter that have to be the head's.

        Raises:
            ExportError: they differ by more than the tolerance, or ``others`` has more.
        """
        before, source = self.base.checkpoint, self.base.source
        passages = read_sample(None).passages()[:_NUM_TEXTS]
        longest = min(before.max_length, _LONGEST)
        texts = [np.array(before.tokenizer.encode(text).ids[:longest]) for text in passages]
        computed = self._computed(texts, self.address)
        if task is None:
            adapted = _torch(load_checkpoint(replace(source, adapter=self.adapter)), texts)
            return None, self._parity(texts, adapted, computed)
        labels = adapter_head.read_labels(self.adapter, source.path)
        own = source.with_head(self.adapter, task, len(labels.names))
        checkpoint = load_checkpoint(own)
        adapted = _torch(checkpoint, texts)
        head, module = _OwnHead.of(checkpoint.model, task, labels)
        for name in sorted(others):
            if not module.covers(name):
                raise ExportError(_no_layer(self.adapter, name))
        columns = computed[0].shape[1]
        loaded = Head(self.adapter.name, head.settings, head.content, columns)
        logits = [loaded(hidden[list(loaded.rows(len(hidden)))]) for hidden in computed]
        return head, self._parity(texts, adapted, logits)

    def _parity(
        self,
        texts: Sequence[Ids],
        expected: Sequence[Floats],
        found: Sequence[Floats],
    ) -> AdapterParity:
        """Raises: ExportError: what is found differs from PEFT by more than the tolerance."""
        if self.base.bundle.manifest.precision == "fp32":
            peak = max(float(np.abs(each).max()) for each in expected)
            tolerance = TOLERANCE * max(1.0, peak / 10)
            pairs = zip(expected, found, strict=True)
            difference = max(float(np.abs(left - right).max()) for left, right in pairs)
            parity = AdapterParity(tolerance=tolerance, difference=difference)
        else:
            plain = _torch(self.base.checkpoint, texts)
            own = _spread(plain, self._computed(texts, 0))
            difference = _spread(expected, found)
            tolerance = max(_MORE * own, _LEAST)
            parity = AdapterParity(tolerance=tolerance, difference=difference, base=own)
        if not parity.difference <= parity.tolerance:  # also if it is NaN
            raise ExportError(
                f"the base with {self.adapter} differs from PEFT by {difference:.2g}, more than "
                f"the tolerance of {parity.tolerance:.2g}; merge it with maskdial export --adapter"
            )
        return parity

    def _computed(self, texts: Sequence[Ids], address: int) -> list[Floats]:
        return _computed(self.base.session, self.base.bundle, texts, address)


def _spread(expected: Sequence[Floats], actual: Sequence[Floats]) -> float:
    """The root mean square of the differences, by the standard deviation of what is expected."""
    left = np.concatenate([each.ravel() for each in expected]).astype(np.float64)
    right = np.concatenate([each.ravel() for each in actual])
    return float(np.sqrt(np.mean((left - right) ** 2)) / left.std())


def _torch(checkpoint: Checkpoint, texts: Sequence[Ids]) -> list[Floats]:
    return [
        expected_output(
            checkpoint.model, checkpoint.pooler, {"input_ids": torch.tensor(text)[None]}
        )
        for text in texts
    ]


def _computed(session: Session, bundle: Bundle, texts: Sequence[Ids], address: int) -> list[Floats]:
    """What the server computes for each text alone."""
    manifest = bundle.manifest
    if manifest.kv is None:
        return [_computed_masked(session, text, address) for text in texts]
    longest = max(map(len, texts))
    assert manifest.num_outputs is not None, "the graph's output is logits"
    runner = Runner(
        session, manifest.kv, slots=1, max_length=longest + 1, vocab_size=manifest.num_outputs
    )
    assert runner.adapters is not None, "the graph takes adapters"
    runner.adapters[0] = address
    return [np.array(runner.prefill(0, text, 0, len(text)), np.float32) for text in texts]


def _computed_masked(session: Session, text: Ids, address: int) -> Floats:
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": text[None],
        "lengths": np.array([len(text)], np.int32),
        "token_type_ids": np.zeros((1, len(text)), np.int64),
        "rows": np.arange(len(text)),
        "adapters": np.array([address], np.int64),
    }
    output = session.run(feeds)
    return output if "rows" in session.input_names else output[0]
