"""Bundles for the panels that the starters do not fill: their graphs, with other heads.

They are made in moments and without torch. Their answers are well-formed and mean nothing.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from maskdial.bundle.bundle import hash_files, load_bundles, write_manifest
from maskdial.bundle.manifest import (
    COUNT_GRAPH,
    GRAPH,
    Embedding,
    Entities,
    Extraction,
    GoldenCheck,
    Manifest,
)
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.golden import masked_logits
from maskdial.runtime.session import Session, SessionOptions


def make_tagger(folder: Path) -> Path:
    """Tags from the logits of the hybrid's first words."""
    changes = {"task": "token-classify", "labels": ("O", "B-PER", "I-PER", "B-LOC")}
    return _make(folder, "hybrid", changes, columns=(300, 304))


def make_finder(folder: Path) -> Path:
    """Entities of any labels, from the logits of four words for each word and label."""
    entities = Entities(
        scores="span",
        max_words=64,
        max_width=4,
        label_token=5,
        separator=(6,),
        markers=("<<ENT>>", "<<SEP>>"),
        num_columns=4,
    )
    return _make(folder, "hybrid", {"task": "entities", "entities": entities}, columns=(300, 304))


def make_extractor(folder: Path) -> Path:
    """What a schema names, from the logits of some words; a record occurs up to three times."""
    extraction = Extraction(hidden_size=4, max_width=4, max_count=4)
    folder.mkdir(parents=True)
    _save_counts(folder / COUNT_GRAPH, extraction.hidden_size)
    columns = (2300, 2300 + extraction.num_columns)
    changes = {"task": "extract", "extraction": extraction}
    return _make(folder, "hybrid", changes, columns, others=(COUNT_GRAPH,))


def _save_counts(path: Path, hidden_size: int) -> None:
    """A graph whose queries are a product of the fields' states plus the step."""
    width = 4 * hidden_size + 1
    weight = np.random.default_rng(0).normal(0, 0.3, (hidden_size, width)).astype(np.float32)
    kind = onnx.TensorProto
    nodes = [
        helper.make_node("MatMul", ["fields", "weight"], ["products"]),
        helper.make_node("Cast", ["steps"], ["floats"], to=kind.FLOAT),
        helper.make_node("Reshape", ["floats", "shape"], ["column"]),
        helper.make_node("Add", ["products", "column"], ["queries"]),
    ]
    graph = helper.make_graph(
        nodes,
        "counts",
        [
            helper.make_tensor_value_info("fields", kind.FLOAT, ["fields", hidden_size]),
            helper.make_tensor_value_info("steps", kind.INT64, ["steps"]),
        ],
        [helper.make_tensor_value_info("queries", kind.FLOAT, ["steps", "fields", width])],
        [
            numpy_helper.from_array(weight, "weight"),
            numpy_helper.from_array(np.array([-1, 1, 1], np.int64), "shape"),
        ],
    )
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


def make_reader(folder: Path) -> Path:
    """Starts and ends of answers from the logits of two words."""
    return _make(folder, "hybrid", {"task": "question-answering"}, columns=(300, 302))


def make_ranker(folder: Path) -> Path:
    """Relevance from the logit of one sentiment."""
    return _make(folder, "sentiment", {"labels": ("LABEL_0",)}, columns=(1, 2))


def make_nli(folder: Path) -> Path:
    """Entailment from sentiments."""
    return _make(folder, "sentiment", {"labels": ("CONTRADICTION", "ENTAILMENT")}, columns=(0, 2))


def make_embedder(folder: Path) -> Path:
    """Embeddings from what the sentiment's head reads."""
    embedding = Embedding(dimension=192, pooling="mean", normalized=False)
    return _make(folder, "sentiment", {"task": "embed", "labels": (), "embedding": embedding})


def _make(
    folder: Path,
    starter: str,
    changes: Mapping[str, Any],
    columns: tuple[int, int] | None = None,
    others: tuple[str, ...] = (),
) -> Path:
    """A bundle of a starter's masked graph with only these ``columns`` of its logits; None: with
    the input of its last operator instead. ``others`` are files that the folder has already.
    """
    bundle = load_bundles(starter, STARTER_FOLDER / starter)[-1]
    ignored = shutil.ignore_patterns("*.json", GRAPH)
    shutil.copytree(bundle.path, folder, ignore=ignored, dirs_exist_ok=True)
    shutil.copyfile(bundle.tokenizer, folder / bundle.tokenizer.name)
    model = onnx.load(bundle.graph, load_external_data=False)
    if columns is None:
        _end_before_the_head(model.graph)
    else:
        _keep(model.graph, columns)
    onnx.save(model, folder / GRAPH)
    names = [GRAPH, f"{GRAPH}.data", bundle.tokenizer.name, *others]
    update = {"graph": GRAPH, "files": hash_files(folder, names), **changes}
    manifest = bundle.manifest.model_copy(update=update)
    golden = _golden(folder, manifest)
    write_manifest(folder, manifest.model_copy(update={"golden": golden}))
    return folder


def _keep(graph: onnx.GraphProto, columns: tuple[int, int]) -> None:
    (output,) = graph.output
    whole = f"{output.name}.whole"
    for node in graph.node:
        node.output[:] = [whole if name == output.name else name for name in node.output]
    bounds = {"first": columns[0], "end": columns[1], "axis": 1}
    graph.initializer.extend(
        numpy_helper.from_array(np.array([value], np.int64), name) for name, value in bounds.items()
    )
    graph.node.append(helper.make_node("Slice", [whole, *bounds], [output.name]))
    output.type.tensor_type.ClearField("shape")


def _end_before_the_head(graph: onnx.GraphProto) -> None:
    (output,) = graph.output
    head = next(node for node in graph.node if output.name in node.output)
    read = head.input[0]
    graph.node.remove(head)
    graph.node.append(helper.make_node("Identity", [read], ["embeddings"]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("embeddings", onnx.TensorProto.FLOAT, None))


def _golden(folder: Path, manifest: Manifest) -> GoldenCheck:
    """The golden check of the changed graph."""
    before = manifest.golden
    session = Session(folder / GRAPH, SessionOptions(intra_op_threads=1))
    of_entities = manifest.entities is not None
    logits = masked_logits(session, before, of_entities=of_entities).reshape(-1)
    return before.model_copy(update={"columns": (0,), "logits": (float(logits[0]),)})
