"""Makes a bundle of a graph that another exporter wrote, where the weights are in no other file.

The graph is taken as it is, in its own precision: nothing says what its numbers were rounded from,
so nothing is rounded again.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pydantic
from rich.console import Console

from maskdial.bundle.bundle import hash_files
from maskdial.bundle.manifest import GRAPH, KERNEL_CHECK, Embedding, Manifest, TaskName
from maskdial_export.checkpoint.config import check_config
from maskdial_export.checkpoint.files import read_files, special_tokens, write_files
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.module_settings import check_modules
from maskdial_export.checkpoint.onnx_files import choose_graph
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checkpoint.sentence import (
    kept_entries,
    longest_text,
    lower_case,
    module_folders,
    pooling_modes,
    read_prompts,
)
from maskdial_export.checks.kernels import exact_here, kernel_check
from maskdial_export.choices import LONGEST
from maskdial_export.destination import new_folder
from maskdial_export.direct.checkpoint import DirectCheckpoint, GraphsOnlyError
from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.encoder import Head, Leading
from maskdial_export.direct.encoder_head import check_no_modules, read_head
from maskdial_export.direct.encoders import family_of, knows, read_labels
from maskdial_export.direct.export import write_described
from maskdial_export.direct.tokenizer import load_tokenizer, sends_types
from maskdial_export.direct.weights import JoinedWeights, SafetensorsWeights, Weights
from maskdial_export.errors import ExportError, first_line, io_reason, onnxruntime_errors
from maskdial_export.phase import phase
from maskdial_export.quantize.gate import Gate
from maskdial_export.session import Floats, Ids
from maskdial_export.stock.check import StockCheck
from maskdial_export.stock.graph import write_stock_graph
from maskdial_export.stock.model import TYPES, StockGraph, StockModel, read_graph
from maskdial_export.stock.reference import PlainGraph, StockReference

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_UNIT = 1e-4
_PROBED = 2048  # tokens: attention to more takes gigabytes


def export_stock(
    found: GraphsOnlyError,
    dest: Path,
    *,
    task: str,
    precision: str | None,
    gate: Gate,
    max_length: int | None,
    tolerance: float,
    console: Console,
) -> Manifest:
    """Exports a graph to the new or empty folder ``dest``; other arguments as of `export_direct`.

    Raises:
        ExportError: the graph, or what stands beside it, is not known.
    """
    name = found.checkpoint.name
    try:
        with new_folder(dest) as folder:
            described, checkpoint = _write(
                found, folder, task, precision, gate, max_length, tolerance, console
            )
            return write_described(described, checkpoint, folder)
    except NotDirectError as error:
        raise ExportError(
            f"{error.message}, and {name} has a graph alone, so that it cannot be traced"
        ) from error
    except pydantic.ValidationError as error:
        raise ExportError(f"{name} cannot be described: {first_line(error)}") from error
    except OSError as error:
        raise ExportError(f"cannot export {name} to {dest}: {io_reason(error)}") from error


def _write(
    found: GraphsOnlyError,
    folder: Path,
    asked: str,
    precision: str | None,
    gate: Gate,
    limit: int | None,
    tolerance: float,
    console: Console,
) -> tuple[dict[str, Any], DirectCheckpoint]:
    """Writes everything but the manifest; returns what that says of it."""
    graph, checkpoint, outputs, is_pooled = _read(found, asked, precision, console)
    task, config = checkpoint.task, checkpoint.config
    family = family_of(config) if knows(config) else None
    ids = SimpleNamespace(**{**({} if family is None else family.ids), **config})
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ExportError(f"vocab_size in config.json of {checkpoint.name} is {vocab_size!r}")
    sample = read_sample(gate.text)
    special = () if family is None else family.special
    tokenizer, tokenization = load_tokenizer(checkpoint, vocab_size, sample, special)
    lower_case(checkpoint, tokenizer)
    tokens = special_tokens(checkpoint, ids, tokenizer)
    texts = read_files(checkpoint, tokenizer)
    pad = tokens.pad or 0
    with onnxruntime_errors():
        plain = PlainGraph(graph, pad)
        output = plain.run([np.array([pad])], None, outputs)[0]
    columns = _columns(graph.path.name, task, outputs[0], output, vocab_size, is_pooled=is_pooled)
    head, weights = _head(checkpoint, columns, output[0] if is_pooled else None)
    model = StockModel(
        architecture=_class(config) or "an ONNX graph",
        base="",
        words="",
        vocab_size=vocab_size,
        hidden_size=columns,
        max_length=_max_length(checkpoint, plain, outputs, pad, limit),
        pad=pad,
        head=head,
        num_types=_num_types(checkpoint),
        reads_types=TYPES in graph.inputs and sends_types(checkpoint) is not False,
        inputs=graph.inputs,
        outputs=outputs,
        is_pooled=is_pooled,
    )
    reference = StockReference(checkpoint, weights, plain, model)
    check = StockCheck(model, reference, tokenizer, tokens, sample, gate.limit, rounds=graph.rounds)
    written, names = folder / GRAPH, [GRAPH, f"{GRAPH}.data"]
    with phase(console, "Writing"):
        num_numbers = write_stock_graph(graph, model, weights, written)
    with phase(console, "Checking"), onnxruntime_errors():
        checked = _checked(check, graph, written, tolerance)
    if graph.rounds and exact_here():
        onnx.save(kernel_check(), folder / KERNEL_CHECK)
        names.append(KERNEL_CHECK)
    names += write_files(texts, folder)
    described = {
        "family": "masked",
        "task": task,
        "architecture": model.architecture,
        "precision": _precision(graph),
        "vocab_size": vocab_size,
        "num_parameters": num_numbers,
        "max_length": model.max_length,
        "special_tokens": tokens,
        "tokenization": tokenization,
        "labels": head.labels,
        "problem_type": head.problem_type,
        "embedding": head.embedding,
        "files": hash_files(folder, names),
        **checked,
    }
    return described, checkpoint


def _read(
    found: GraphsOnlyError, asked: str, precision: str | None, console: Console
) -> tuple[StockGraph, DirectCheckpoint, tuple[str, ...], bool]:
    """The graph that is meant, its checkpoint with its task, its outputs, and whether those are
    pooled.

    Raises:
        ExportError: it is of another precision or task than was asked for.
    """
    name, config = found.checkpoint.name, found.checkpoint.config
    path = choose_graph(name, found.graphs, precision)
    with phase(console, "Reading"):
        graph = read_graph(path)
    if precision not in (None, _precision(graph)):
        raise ExportError(
            f"{path.name} of {name} is {_precision(graph)}, and is taken as it is; "
            "leave out --precision"
        )
    check_config(name, config)
    pools = _pools_here(found.checkpoint)
    task, outputs, is_pooled = graph.task(_class(config), prefers_tokens=pools)
    if asked not in ("auto", task):
        raise ExportError(f"{path.name} of {name} is for {task}, and --task asks for {asked}")
    return graph, found.checkpoint.of_graph(graph.files(), task), outputs, is_pooled


def _precision(graph: StockGraph) -> str:
    return "int8" if graph.rounds else "fp32"


def _checked(
    check: StockCheck, graph: StockGraph, written: Path, tolerance: float
) -> dict[str, Any]:
    """What the comparisons of a written graph say, by the manifest's names."""
    parity = check.parity(written, tolerance)
    return {
        "parity": parity,
        "golden": check.golden(parity.tolerance, written if graph.rounds else None),
        "batch_invariant": not graph.rounds
        and all(check.is_invariant(written, quantized=each) for each in (True, False)),
    }


def _pools_here(checkpoint: DirectCheckpoint) -> bool:
    """Whether modules say how tokens are pooled, and need no weights for it: that is done as for
    other bundles then, in which company changes no bit.
    """
    kinds = {kind for kind, _ in module_folders(checkpoint)}
    return "Pooling" in kinds and kinds <= {"Transformer", "Pooling", "Normalize", "Dropout"}


def _class(config: Any) -> str:
    given = config.get("architectures")
    return str(given[0]) if isinstance(given, list) and len(given) == 1 else ""


def _columns(
    graph: str, task: TaskName, name: str, output: Floats, vocab_size: int, *, is_pooled: bool
) -> int:
    """How many numbers the graph gives of each text or token; ``output`` is that of one token.

    Raises:
        ExportError: it is not what the task has.
    """
    answers = task == "question-answering"
    sizes = (1,) if is_pooled else (1, 1)
    if output.shape[: len(sizes)] != sizes or output.ndim != len(sizes) + (not answers):
        raise ExportError(
            f"the output {name} of the graph {graph} has the shape {output.shape} for a text of "
            f"one token, which {task} does not have; architectures in config.json may be another "
            "model's"
        )
    if task == "fill-mask" and output.shape[-1] != vocab_size:
        raise ExportError(
            f"the graph {graph} gives {output.shape[-1]} logits for each token, and vocab_size in "
            f"config.json is {vocab_size}"
        )
    return 2 if answers else output.shape[-1]


def _num_types(checkpoint: DirectCheckpoint) -> int:
    given = checkpoint.config.get("type_vocab_size") or 1
    if type(given) is not int or given < 1:
        raise ExportError(f"type_vocab_size in config.json of {checkpoint.name} is {given!r}")
    return given


def _head(
    checkpoint: DirectCheckpoint, columns: int, vector: Floats | None
) -> tuple[Head, Weights]:
    """What stands behind the graph, and its weights; ``vector`` is one that it has pooled."""
    task, config = checkpoint.task, checkpoint.config
    weights = SafetensorsWeights(checkpoint.name, [])
    if task == "embed" and vector is None:
        head, parts = read_head(checkpoint, columns)
        return head, JoinedWeights(checkpoint.name, parts)
    check_modules(checkpoint)
    if task == "embed" and vector is not None:
        return _pooled_head(checkpoint, columns, vector), weights
    check_no_modules(checkpoint)
    labels: tuple[str, ...] = ()
    if task in ("classify", "token-classify"):
        labels = read_labels(Config(config), config)
        if len(labels) != columns:
            raise ExportError(
                f"the graph of {checkpoint.name} gives {columns} logits, and config.json names "
                f"{len(labels)} labels (id2label)"
            )
    if task == "classify":
        return Head(task, ("cls",), (), labels, config.get("problem_type")), weights
    return Head(task, (), (), labels), weights


def _pooled_head(checkpoint: DirectCheckpoint, columns: int, vector: Floats) -> Head:
    """That of vectors which the graph has pooled. Whether it scales them to length 1, files may not
    say; ``vector`` does.
    """
    pooling = ["mean"]
    for kind, folder in module_folders(checkpoint):
        if kind == "Pooling":
            pooling = pooling_modes(checkpoint, read_json(folder / "config.json"))
    normalized = bool(np.isclose(np.linalg.norm(vector), 1, atol=_UNIT))
    kept = kept_entries(checkpoint, "truncate_dim")
    steps = (Leading(kept),) if kept is not None and kept < columns else ()
    prompts, default = read_prompts(checkpoint)
    embedding = Embedding(
        dimension=kept if steps and kept else columns,
        pooling="+".join(pooling),
        normalized=normalized and not steps,
        prompts=prompts,
        default_prompt=default,
    )
    return Head("embed", ("cls",), steps, embedding=embedding)


def _max_length(
    checkpoint: DirectCheckpoint,
    plain: PlainGraph,
    outputs: tuple[str, ...],
    pad: int,
    limit: int | None,
) -> int:
    """Tokens of a text: as many as the files say, if the graph runs with them, or with `_PROBED`.

    Raises:
        ExportError: it does not, or --max-length asks for more.
    """
    config = checkpoint.config
    given = next((config[name] for name in _POSITIONS if config.get(name)), None)
    positions = min(given, LONGEST) if type(given) is int and given > 0 else LONGEST
    longest = longest_text(checkpoint, positions)
    if limit is not None and limit > longest:
        raise ExportError(
            f"{checkpoint.name} reads at most {longest} tokens, fewer than --max-length {limit}"
        )
    longest = limit or longest
    word = np.array([0 if pad else 1])
    # In RoBERTa and its kin, positions begin behind that of padding
    for length in (longest, min(longest, positions - pad - 1)):
        if length < 1 or _runs(plain, np.repeat(word, min(length, _PROBED)), outputs):
            return max(length, 1)
    raise ExportError(
        f"the graph of {checkpoint.name} does not run with {longest} tokens, which its files "
        "allow; say how many it takes with --max-length"
    )


def _runs(plain: PlainGraph, text: Ids, outputs: tuple[str, ...]) -> bool:
    try:
        plain.run([text], None, outputs)
    except Exception:  # ONNX Runtime's exceptions share no other base
        return False
    return True
