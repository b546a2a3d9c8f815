"""Every head of the masked family compared with torch, without the exporter's own checks.

Fill-mask models are in test_export_architectures.py, encoder-decoder models in
test_encoder_decoder.py. Of the other pairs of architecture and head
the zoo has a covering set: every head that differs from architecture to architecture
(classification) once for each way in which it is written, and the heads that are one layer over the
tokens for the bodies that differ.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import Manifest
from tests.export.zoo import ZOO, marked

TOLERANCE = 1e-4
ELSEWHERE = ("generate", "generate, the text part", "generate, with an encoder", "fill-mask")
TASKS = {name: task for task, zoo in ZOO.items() if task not in ELSEWHERE for name in zoo}
NAMES = [each for task in dict.fromkeys(TASKS.values()) for each in marked(ZOO[task])]
LENGTHS = (23, 1, 31, 8)
SEPARATOR = 3

Bundle = Callable[[str], Path]


class Graph:
    """A bundle's graph, fed as by the server."""

    def __init__(self, folder: Path) -> None:
        self.manifest: Manifest = load_bundle("head", folder).manifest
        self.session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        self.inputs = {value.name for value in self.session.get_inputs()}

    def run(self, texts: Sequence[np.ndarray], rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Each text's output in one padded batch: (num_rows, columns) or (columns,)."""
        width = max(map(len, texts))
        pad = self.manifest.special_tokens.pad or 0
        feeds = {
            "input_ids": padded(texts, width, pad),
            "lengths": np.array([len(text) for text in texts], np.int32),
            "token_type_ids": padded([types_of(text) for text in texts], width, 0),
            "rows": np.array([i * width + row for i, of in enumerate(rows) for row in of]),
        }
        (output,) = self.session.run(None, {name: feeds[name] for name in self.inputs})
        if "rows" not in self.inputs:
            return list(output)
        return np.split(output, np.cumsum([len(of) for of in rows])[:-1])


def padded(rows: Sequence[np.ndarray], width: int, value: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, width - len(row)), constant_values=value) for row in rows])


def types_of(text: np.ndarray) -> np.ndarray:
    """Token types of a pair whose second text begins in the middle."""
    return (np.arange(len(text)) >= len(text) // 2).astype(np.int64)


def texts_and_rows(*, ends: bool = False) -> tuple[list[np.ndarray], list[list[int]]]:
    """Random texts with a separator; ``ends``: also the one of a single token."""
    generator = np.random.default_rng(29)
    texts = [generator.integers(4, 101, length) for length in LENGTHS]
    for text in texts:
        if len(text) > 1 or ends:
            text[len(text) // 2] = SEPARATOR
    # Question answering asks for every token, the others for some
    return texts, [list(range(len(texts[0]))), [0], [30, 2], [7]]


def torch_output(model: Any, text: np.ndarray, graph: Graph) -> Any:
    """torch's output for one text."""
    inputs = {"input_ids": torch.tensor(text[None])}
    if "token_type_ids" in graph.inputs:
        inputs["token_type_ids"] = torch.tensor(types_of(text)[None])
    global_tokens = global_tokens_of(model, graph.manifest.task, text)
    if global_tokens is not None:
        inputs["global_attention_mask"] = torch.tensor(global_tokens[None].astype(np.int64))
    if graph.manifest.task == "multiple-choice":  # (questions, choices, length)
        inputs = {name: each[None] for name, each in inputs.items()}
    with torch.no_grad():
        return model(**inputs)


def global_tokens_of(model: Any, task: str, text: np.ndarray) -> np.ndarray | None:
    """The question, or what follows it and two separators, for Longformer.

    It finds them by itself in texts with three separators, and refuses others.
    """
    if model.config.model_type != "longformer" or task not in (
        "question-answering",
        "multiple-choice",
    ):
        return None
    end = int(np.argmax(text == SEPARATOR))
    place = np.arange(len(text))
    return np.asarray(place < end if task == "question-answering" else place > end + 1)


def expected_logits(task: str, output: Any, rows: Sequence[int]) -> np.ndarray:
    if task == "question-answering":
        logits = torch.stack([output.start_logits[0], output.end_logits[0]], -1)[rows]
    else:
        logits = output.logits[0][rows] if task == "token-classify" else output.logits[0]
        if task == "token-classify" and logits.ndim == 1:  # replaced tokens; 0 is for originals
            logits = torch.stack([torch.zeros_like(logits), logits], -1)
    return np.asarray(logits)


def expected_vector(hidden: np.ndarray, pooling: str, normalized: bool) -> np.ndarray:
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return np.asarray(vector / np.linalg.norm(vector) if normalized else vector)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_torch_and_are_batch_invariant(
    name: str, bundle: Bundle, checkpoint: Bundle, load_reference: Callable[[Path], Any]
) -> None:
    graph = Graph(bundle(name))
    model = load_reference(checkpoint(name))
    texts, rows = texts_and_rows(ends=model.config.is_encoder_decoder)
    together = graph.run(texts, rows)
    embedding = graph.manifest.embedding
    for text, of, output in zip(texts, rows, together, strict=True):
        reference = torch_output(model, text, graph)
        if embedding is None:
            expected = expected_logits(TASKS[name], reference, of)
        else:
            hidden = reference.last_hidden_state[0].numpy()
            expected = expected_vector(hidden, embedding.pooling, embedding.normalized)
        assert output.shape == expected.shape
        np.testing.assert_allclose(output, expected, atol=TOLERANCE, rtol=0)
        (alone,) = graph.run([text], [of])
        np.testing.assert_array_equal(alone, output)
    assert graph.manifest.batch_invariant
    assert graph.manifest.parity.ragged_batch <= graph.manifest.parity.tolerance == TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        "longformer-question-answering",
        pytest.param("longformer-multiple-choice", marks=pytest.mark.zoo),
    ],
)
def test_longformer_sees_the_same_tokens_everywhere_as_transformers(
    name: str, bundle: Bundle, checkpoint: Bundle, load_reference: Callable[[Path], Any]
) -> None:
    """A pair as RoBERTa's tokenizer joins it, in which transformers itself finds the tokens."""
    graph = Graph(bundle(name))
    generator = np.random.default_rng(5)
    first, second = (generator.integers(4, 101, length) for length in (9, 21))
    separator = [SEPARATOR]
    text = np.concatenate([[2], first, separator, separator, second, separator])
    inputs = torch.tensor(text[None])
    with torch.no_grad():
        if graph.manifest.task == "multiple-choice":
            output = load_reference(checkpoint(name))(inputs[None])
        else:
            output = load_reference(checkpoint(name))(inputs)
    rows = list(range(len(text)))
    (logits,) = graph.run([text], [rows])
    expected = expected_logits(TASKS[name], output, rows)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_config_json_settles_the_task(name: str, bundle: Bundle) -> None:
    """`bundle` exports without naming a task."""
    manifest = load_bundle(name, bundle(name)).manifest
    assert manifest.family == "masked"
    assert manifest.task == TASKS[name]


@pytest.mark.parametrize(
    ("name", "labels", "problem_type"),
    [
        ("deberta-v2-classify", ("LABEL_0", "LABEL_1"), "multi_label_classification"),
        ("bert-next-sentence", ("isNext", "notNext"), None),
        ("bert-token-classify", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"), None),
        ("electra-detect", ("ORIGINAL", "REPLACED"), None),
        ("bert-multiple-choice", (), None),
        ("roberta-question-answering", (), None),
        ("bert-embed", (), None),
    ],
)
def test_the_manifest_has_the_labels(
    name: str, labels: tuple[str, ...], problem_type: str | None, bundle: Bundle
) -> None:
    manifest = load_bundle(name, bundle(name)).manifest
    assert manifest.labels == labels
    assert manifest.problem_type == problem_type


@pytest.mark.parametrize(
    ("name", "pooling", "normalized"),
    [
        ("bert-embed", "mean", True),
        ("xlm-roberta-embed", "cls", True),
        ("modernbert-embed", "last", False),
    ],
)
def test_pooling_is_read_from_the_modules(
    name: str, pooling: str, normalized: bool, bundle: Bundle
) -> None:
    embedding = load_bundle(name, bundle(name)).manifest.embedding
    assert embedding is not None
    assert embedding.dimension == 32
    assert (embedding.pooling, embedding.normalized) == (pooling, normalized)


@pytest.mark.parametrize(
    ("name", "max_length"),
    [
        ("bert-embed", 128),
        ("roberta-question-answering", 126),
        ("xlm-roberta-token-classify", 126),
        ("modernbert-question-answering", 128),
    ],
)
def test_reserved_positions_shorten_the_longest_text(
    name: str, max_length: int, bundle: Bundle
) -> None:
    """RoBERTa's positions start after the padding token's: 2 of the 128 are unusable."""
    graph = Graph(bundle(name))
    assert graph.manifest.max_length == max_length
    text = np.random.default_rng(3).integers(4, 101, max_length)
    graph.run([text], [[max_length - 1]])
    if max_length < 128:
        with pytest.raises(Exception, match=r"out of (data )?bounds"):
            graph.run([np.append(text, text[:1])], [[0]])
