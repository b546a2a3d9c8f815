"""DeBERTa's attention by distance in the kernels, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from numpy.typing import NDArray

from maskdial.kernels.installed import Kernels, find_kernels
from maskdial.kernels.rewrite import rewrite
from maskdial.runtime.session import Session, SessionOptions
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from tests.conftest import MakeOnce
from tests.export.conftest import make_tokenizer
from tests.export.zoo import DEBERTA_V2

# Name -> what differs from `DEBERTA_V2`, which shares projections and has both kinds of scores.
KINDS: dict[str, dict[str, Any]] = {
    "shared": {},
    "own": {"share_att_key": False},
    "c2p": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "p2c": {"pos_att_type": ["p2c"]},
    "far": {"position_buckets": -1},
    "convolution": {"conv_kernel_size": 3},
}
LENGTHS = [5, 1, 150, 64, 33, 2, 16]
"""Also beyond ``max_position_embeddings``, behind which positions are the same."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = find_kernels("auto")
    if found is None:
        pytest.skip("the kernels are not built")
    return found


@pytest.fixture
def checkpoint_of(made_once: MakeOnce) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        return made_once(f"relative/{kind}", lambda folder: save(kind, folder))

    return make


def save(kind: str, folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**DEBERTA_V2 | KINDS[kind])
    model = transformers.DebertaV2ForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))


def feeds_of(texts: list[NDArray[np.int64]]) -> dict[str, Any]:
    """A padded batch; all tokens are masked, so that all have logits."""
    longest = max(map(len, texts))
    rows = [row * longest + i for row, text in enumerate(texts) for i in range(len(text))]
    padded = [np.pad(text, (0, longest - len(text)), constant_values=7) for text in texts]
    lengths = np.array([len(text) for text in texts], np.int32)
    return {"input_ids": np.stack(padded), "lengths": lengths, "rows": np.array(rows)}


def drawn(lengths: list[int] = LENGTHS) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 100, length) for length in lengths]


def attentions(graph: Path) -> tuple[list[onnx.NodeProto], set[str]]:
    """The kernels' attentions of a rewritten graph, and the kinds of all its operators."""
    nodes = onnx.load_from_string(rewrite(graph).model).graph.node
    return [n for n in nodes if n.op_type == "MaskedAttention"], {n.op_type for n in nodes}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_by_distance_is_transformers(
    kind: str, checkpoint_of: Callable[[str], Path], kernels: Kernels, tmp_path: Path
) -> None:
    source = checkpoint_of(kind)
    export(str(source), tmp_path / "bundle")
    graph = tmp_path / "bundle" / "model.onnx"
    found, kinds = attentions(graph)
    assert len(found) == 2
    assert not {"Softmax", "GatherElements", "MultiHeadAttention"} & kinds
    assert ("Pack" in kinds) == (kind != "convolution")  # which reads its neighbors
    session = Session(graph, SessionOptions(intra_op_threads=2, kernels=kernels))
    texts = drawn()
    result = session.run(feeds_of(texts))
    model = transformers.DebertaV2ForMaskedLM.from_pretrained(source).eval()
    parts = np.split(result, np.cumsum(LENGTHS)[:-1])
    for text, part in zip(texts, parts, strict=True):
        with torch.no_grad():
            expected = model(torch.from_numpy(text)[None]).logits[0].numpy()
        np.testing.assert_allclose(part, expected, rtol=1e-4, atol=2e-5)
        if kind != "convolution":
            np.testing.assert_array_equal(session.run(feeds_of([text])), part)


def test_attention_by_distance_of_int8(
    checkpoint_of: Callable[[str], Path], kernels: Kernels, exact_products: None, tmp_path: Path
) -> None:
    gate = Gate(max_loss=float("inf"), keep_worst=0)
    export(str(checkpoint_of("shared")), tmp_path / "bundle", precision="int8", gate=gate)
    graph = tmp_path / "bundle" / "model.onnx"
    assert len(attentions(graph)[0]) == 2
    ours = Session(graph, SessionOptions(intra_op_threads=2, kernels=kernels))
    plain = Session(graph, SessionOptions(intra_op_threads=2))
    texts = drawn()
    result, expected = ours.run(feeds_of(texts)), plain.run(feeds_of(texts))
    # As far apart as inputs that are rounded to another integer make them
    assert np.abs(result - expected).std() < 0.03 * expected.std()
    parts = np.split(result, np.cumsum(LENGTHS)[:-1])
    for text, part in zip(texts, parts, strict=True):
        np.testing.assert_array_equal(ours.run(feeds_of([text])), part)


def change_mask(graph: onnx.GraphProto) -> None:
    """Scores are lowered by so little that tokens beyond the lengths have weight."""
    (name,) = {node.input[1] for node in graph.node if node.op_type == "Where" and is_score(node)}
    (mask,) = (each for each in graph.initializer if each.name == name)
    mask.CopyFrom(onnx.numpy_helper.from_array(np.float32(-2), name))


def is_score(where: onnx.NodeProto) -> bool:
    return bool(where.output[0].startswith("masked_fill"))


def change_index(graph: onnx.GraphProto) -> None:
    """The keys of positions are those of other distances than their queries."""
    clip = next(node for node in graph.node if node.op_type == "Clip")
    (add,) = (node for node in graph.node if node.output[0] == clip.input[0])
    graph.initializer.append(onnx.numpy_helper.from_array(np.int64(5), "other"))
    add.input[1] = "other"


def change_scale(graph: onnx.GraphProto) -> None:
    """Scores of content and of positions are divided by different numbers."""
    gather = next(node for node in graph.node if node.op_type == "GatherElements")
    (divide,) = (n for n in graph.node if n.op_type == "Div" and gather.output[0] in n.input)
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32(5), "other"))
    divide.input[1] = "other"


@pytest.mark.parametrize(
    ("change", "num_left"), [(change_mask, 2), (change_index, 2), (change_scale, 1)]
)
def test_attention_that_computes_something_else_stays(
    change: Callable[[onnx.GraphProto], None],
    num_left: int,
    checkpoint_of: Callable[[str], Path],
    kernels: Kernels,
    tmp_path: Path,
) -> None:
    export(str(checkpoint_of("shared")), tmp_path / "bundle")
    graph = tmp_path / "bundle" / "model.onnx"
    model = onnx.load(graph, load_external_data=False)
    change(model.graph)
    onnx.save(model, graph)
    assert len(attentions(graph)[0]) == 2 - num_left
    ours = Session(graph, SessionOptions(intra_op_threads=2, kernels=kernels))
    plain = Session(graph, SessionOptions(intra_op_threads=2))
    feeds = feeds_of(drawn())
    np.testing.assert_allclose(ours.run(feeds), plain.run(feeds), rtol=1e-4, atol=2e-5)
