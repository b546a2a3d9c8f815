"""Graphs that other exporters wrote: served as they are, equal to the model that they are of."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from onnxruntime.quantization import QuantType, quantize_dynamic
from rich.console import Console
from sentence_transformers import SentenceTransformer

from maskdial import cli
from maskdial.bundle.bundle import read_manifests
from maskdial.bundle.manifest import Manifest
from maskdial.config import Config
from maskdial.local.model import Model
from maskdial.model_cache import source_bundle
from maskdial.registry.catalog import find_bundles
from maskdial_export.errors import ExportError
from maskdial_export.route import export_any_way
from maskdial_export.session import MaskedSession
from tests.export.conftest import write_modules
from tests.export.stock_graphs import without_weights, write_graph
from tests.export.test_direct_encoders import make
from tests.hub import running_hub

QUIET = Console(quiet=True)
TEXTS = ("abc d", "the cat sat on a mat and the dog", "x")
UNTYPED = ("input_ids", "attention_mask")


def exported(source: Path, dest: Path, **options: Any) -> Manifest:
    return export_any_way(str(source), dest, console=QUIET, **options)


def refused(source: Path, dest: Path, **options: Any) -> str:
    """The sentence that an export is refused with; it leaves nothing."""
    with pytest.raises(ExportError) as caught:
        exported(source, dest, **options)
    assert not dest.exists()
    assert "\n" not in caught.value.message
    return caught.value.message


def tokens() -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    generator = np.random.default_rng(3)
    return [generator.integers(4, 30, length) for length in (9, 1, 14)]


# name of `make` -> its graph, whether it tells token types, the task
CASES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "bert-classify": ({}, True, "classify"),
    "bert": ({"opset": 11}, True, "fill-mask"),
    "bert-embed": ({"opset": 17}, True, "embed"),
    "bert-tag": (
        {"inputs": (*UNTYPED, "token_type_ids", "position_ids")},
        True,
        "token-classify",
    ),
    "bert-answer": ({}, True, "question-answering"),
    "bert-rank": ({}, True, "classify"),
    "roberta-classify": ({"inputs": UNTYPED}, False, "classify"),
    "distilbert-tag": ({"inputs": UNTYPED}, False, "token-classify"),
    "mpnet-embed": ({"inputs": UNTYPED}, False, "embed"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_gives_what_its_model_does(tmp_path: Path, name: str) -> None:
    """Alone and in a ragged batch, of every head; with token types where it reads them."""
    graph, typed, task = CASES[name]
    folder = make(name, tmp_path / "source")
    write_graph(folder, folder / "onnx" / "model.onnx", **graph)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    manifest = exported(without_weights(folder), tmp_path / "bundle")
    assert (manifest.task, manifest.precision) == (task, "fp32")
    assert manifest.parity.reference == "onnxruntime"
    session = MaskedSession(tmp_path / "bundle" / "model.onnx")
    assert ("token_type_ids" in session.inputs) == typed
    assert len(session.run([np.full(manifest.max_length, 5)])) == 1, "as long as it says"
    texts = tokens()
    types = [np.arange(len(text)) % 2 if typed else np.zeros_like(text) for text in texts]
    together = session.run(texts, types)
    for text, kinds, found in zip(texts, types, together, strict=True):
        given = {"input_ids": torch.tensor(text[None])}
        given |= {"token_type_ids": torch.tensor(kinds[None])} if typed else {}
        with torch.no_grad():
            output = model(**given)
        if task == "embed":
            expected = output.last_hidden_state[0].mean(0)
        elif task == "question-answering":
            expected = torch.stack([output.start_logits[0], output.end_logits[0]], dim=1)
        else:
            expected = output.logits[0]
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)
    with Model(tmp_path / "bundle"):  # checks that it gives what it gave here
        pass
    if manifest.batch_invariant:
        alone = [session.run([text], [each])[0] for text, each in zip(texts, types, strict=True)]
        assert all(map(np.array_equal, together, alone))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of sentence-transformers, whose graph is beside its weights."""
    folder = make("bert-embed", tmp_path_factory.mktemp("stock") / "embedder")
    write_modules(folder, "mean_tokens", normalizes=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        **{f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")},
        model_max_length=32,
    )
    tokenizer.save_pretrained(folder)
    write_graph(folder, folder / "onnx" / "model.onnx")
    return folder


@pytest.fixture
def graphs(embedder: Path, tmp_path: Path) -> Path:
    """The same without weights."""
    folder = tmp_path / "source"
    shutil.copytree(embedder, folder)
    return without_weights(folder)


def test_vectors_are_those_of_sentence_transformers(
    embedder: Path, graphs: Path, tmp_path: Path
) -> None:
    """Whose weights are read where they are at hand; and a text's bits are its own."""
    expected = SentenceTransformer(str(embedder), device="cpu").encode(list(TEXTS))
    for source, name in ((embedder, "weights"), (graphs, "graph")):
        manifest = exported(source, tmp_path / name, precision="fp32")
        assert (manifest.parity.reference == "onnxruntime") == (source == graphs)
        assert manifest.embedding is not None
        assert manifest.embedding.normalized
        with Model(tmp_path / name) as model:
            found = np.array(model.embed(list(TEXTS)))
            alone = [np.array(model.embed([text]))[0] for text in TEXTS]
        np.testing.assert_allclose(found, expected, atol=1e-6)
        if manifest.batch_invariant:
            assert all(map(np.array_equal, found, alone))


def test_a_graph_that_pools_by_itself(embedder: Path, graphs: Path, tmp_path: Path) -> None:
    """As optimum writes it of sentence-transformers, without the modules' files."""
    expected = SentenceTransformer(str(embedder), device="cpu").encode(list(TEXTS))
    write_graph(embedder, graphs / "onnx" / "model.onnx", outputs=("sentence_embedding",))
    (graphs / "modules.json").unlink()
    manifest = exported(graphs, tmp_path / "bundle")
    assert manifest.embedding is not None
    assert (manifest.embedding.dimension, manifest.embedding.normalized) == (32, True)
    with Model(tmp_path / "bundle") as model:
        np.testing.assert_allclose(model.embed(list(TEXTS)), expected, atol=1e-6)


def test_a_graph_of_integers_stays_as_it_is(graphs: Path, tmp_path: Path) -> None:
    """To the last bit that ONNX Runtime gives without its optimizations; no batch is like another,
    as the scale of activations is that of the whole batch.
    """
    plain, rounded = (graphs / "onnx" / f"{name}.onnx" for name in ("model", "model_quantized"))
    quantize_dynamic(str(plain), str(rounded), weight_type=QuantType.QInt8)
    assert exported(graphs, tmp_path / "floats").precision == "fp32"
    manifest = exported(graphs, tmp_path / "integers", precision="int8")
    assert (manifest.precision, manifest.batch_invariant) == ("int8", False)
    assert manifest.quality is None, "nobody knows what was lost"
    assert manifest.parity.ragged_batch < 1e-6
    (text, *_) = tokens()
    found = MaskedSession(tmp_path / "integers" / "model.onnx").run([text])[0]
    feeds = {"input_ids": text[None], "attention_mask": np.ones((1, len(text)), np.int64)}
    feeds["token_type_ids"] = np.zeros_like(text[None])
    states = onnxruntime.InferenceSession(str(rounded)).run(None, feeds)[0][0]
    expected = states.mean(0) / np.linalg.norm(states.mean(0))
    assert float(found @ expected) > 0.999
    plain.unlink()
    assert exported(graphs, tmp_path / "alone").precision == "int8", "the only graph"
    assert "is int8, and is taken as it is" in refused(graphs, tmp_path / "no", precision="fp32")


def with_data_file(folder: Path, name: str) -> None:
    """Moves the weights of a folder's graph into a file of their own."""
    file = folder / "onnx" / "model.onnx"
    options = {"save_as_external_data": True, "location": name, "size_threshold": 100}
    onnx.save(onnx.load(str(file)), str(file), **options)


def test_weights_beside_a_graph_are_large_files(graphs: Path, tmp_path: Path) -> None:
    """As of graphs beyond two gigabytes; the bundle has its own file."""
    with_data_file(graphs, "weights.bin")
    first = exported(graphs, tmp_path / "first")
    (graphs / "onnx" / "weights.bin").write_bytes(
        (graphs / "onnx" / "weights.bin").read_bytes()[:-4] + bytes(4)
    )
    assert exported(graphs, tmp_path / "second").source_sha256 != first.source_sha256
    with Model(tmp_path / "first") as model:
        assert len(model.embed(["abc"])[0]) == 32


def test_bytes_that_are_many_tensors_are_written_once(graphs: Path, tmp_path: Path) -> None:
    """As tied weights are; also of a graph that would fill the disk."""
    with_data_file(graphs, "weights.bin")
    file = graphs / "onnx" / "model.onnx"
    exported(graphs, tmp_path / "plain")
    graph = onnx.load(str(file), load_external_data=False)
    large = max(graph.graph.initializer, key=lambda each: each.dims[:1])
    for number in range(50):
        graph.graph.initializer.append(large)
        graph.graph.initializer[-1].name = f"copy{number}"
    file.write_bytes(graph.SerializeToString())
    exported(graphs, tmp_path / "bundle")
    sizes = [(tmp_path / name / "model.onnx.data").stat().st_size for name in ("plain", "bundle")]
    assert sizes[0] == sizes[1] > 0


FORMS: dict[str, tuple[str, str]] = {
    "genai_config.json": ("{}", "a model of onnxruntime-genai"),
    "openvino/openvino_model.xml": ("<net/>", "in OpenVINO's form"),
    "model.engine": ("", "an engine of TensorRT"),
    "decoder_model_merged.onnx": ("", "optimum's graph of a model that writes"),
    "onnx/decoder_with_past_model.onnx": ("", "optimum's graph of a model that writes"),
    "onnx/model.onnx": ("no graph", "is no graph of ONNX"),
    "onnx/one.onnx": ("", "several graphs: one.onnx, two.onnx; leave one"),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_are_refused_by_name(graphs: Path, tmp_path: Path, name: str) -> None:
    content, told = FORMS[name]
    shutil.rmtree(graphs / "onnx")
    for each in (name, name.replace("one", "two")):
        (graphs / each).parent.mkdir(exist_ok=True)
        (graphs / each).write_text(content)
    assert told in refused(graphs, tmp_path / "bundle")


def test_graphs_that_cannot_be_served_are_refused(
    embedder: Path, graphs: Path, tmp_path: Path
) -> None:
    file, dest = graphs / "onnx" / "model.onnx", tmp_path / "bundle"
    assert "has no graph in int8" in refused(graphs, dest, precision="int8")
    assert "is for embed, and --task asks for classify" in refused(graphs, dest, task="classify")
    assert "is exported as it is" in refused(graphs, dest, trace=True)
    assert "reads at most 32 tokens" in refused(graphs, dest, max_length=40)
    good = onnx.load(str(file))

    def told(change: Callable[[onnx.ModelProto], object]) -> str:
        model = onnx.ModelProto()
        model.CopyFrom(good)
        change(model)
        onnx.save(model, str(file))
        return refused(graphs, dest)

    def renamed(old: str, new: str) -> Callable[[onnx.ModelProto], object]:
        def change(model: onnx.ModelProto) -> None:
            for value in (*model.graph.input, *model.graph.output):
                value.name = value.name.replace(old, new)
            for node in model.graph.node:
                for names in (node.input, node.output):
                    names[:] = [new if each == old else each for each in names]

        return change

    assert "past_key_values.0.key" in told(renamed("token_type_ids", "past_key_values.0.key"))
    assert "has an input pixels" in told(renamed("token_type_ids", "pixels"))
    assert "gives strange; it must give" in told(renamed("last_hidden_state", "strange"))
    assert "does not say of what" in told(renamed("last_hidden_state", "logits"))
    half = onnx.TensorProto.FLOAT16
    extra = onnx.helper.make_tensor("half", half, [1], [1.0])
    assert "are float16" in told(lambda model: model.graph.initializer.append(extra))
    write_graph(embedder, file, inputs=("input_ids",))
    assert "has no input attention_mask" in refused(graphs, dest)
    write_graph(embedder, file, is_dynamic=False)
    assert "with both sizes dynamic" in refused(graphs, dest)
    onnx.save(_blind(good), str(file))
    assert "does not mask padding" in refused(graphs, dest)
    (graphs / "onnx" / "model.onnx").unlink()
    (graphs / "config.json").write_text(
        json.dumps(json.loads((graphs / "config.json").read_text()) | {"vocab_size": None})
    )
    onnx.save(good, str(file))
    assert "vocab_size in config.json" in refused(graphs, dest)


def test_tensors_that_are_not_what_they_say_are_refused(graphs: Path, tmp_path: Path) -> None:
    """Those that no node reads, too, which ONNX Runtime leaves out before it looks at them."""
    file = graphs / "onnx" / "model.onnx"
    (tmp_path / "secret").write_bytes(bytes(1200))
    (graphs / "onnx" / "link").symlink_to(tmp_path / "secret")
    good = file.read_bytes()
    for place in ("/dev/zero", "../../secret", "link", "nothing", "no\0thing", ".", ""):
        tensor = onnx.TensorProto(name="far", data_type=onnx.TensorProto.FLOAT, dims=(300,))
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=place)
        graph = onnx.load_model_from_string(good)
        graph.graph.initializer.append(tensor)
        file.write_bytes(graph.SerializeToString())
        told = f"the tensor 'far' of model.onnx is in {place!r}, which is no file in the graph's"
        assert told in refused(graphs, tmp_path / "bundle")
    graph = onnx.load_model_from_string(good)
    graph.graph.initializer.add(name="few", data_type=onnx.TensorProto.FLOAT, dims=(10**12,))
    file.write_bytes(graph.SerializeToString())
    assert "model.onnx is damaged: tensor 'few'" in refused(graphs, tmp_path / "bundle")


def test_a_configuration_of_another_model_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a sentence, and ONNX Runtime says nothing of its own."""
    folders = {name: make(name, tmp_path / name) for name in ("bert", "bert-classify", "bert-tag")}
    for folder in folders.values():
        write_graph(folder, folder / "onnx" / "model.onnx")
        without_weights(folder)
    capfd.readouterr()

    def told(name: str, **changes: Any) -> str:
        file = folders[name] / "config.json"
        config = file.read_text()
        file.write_text(json.dumps(json.loads(config) | changes))
        message = refused(folders[name], tmp_path / "bundle")
        file.write_text(config)
        return message

    tags, masks = ["BertForTokenClassification"], ["BertForMaskedLM"]
    of_token = "the output logits of the graph model.onnx has the shape (1, 3) for a text of one"
    assert of_token in told("bert-classify", architectures=tags)
    assert of_token in told("bert-classify", architectures=masks)
    whole = ["BertForSequenceClassification"]
    assert "(1, 1, 3) for a text of one token, which classify" in told(
        "bert-tag", architectures=whole
    )
    assert "gives 3 logits for each token, and vocab_size" in told("bert-tag", architectures=masks)
    assert "gives 101 logits for each token, and vocab_size" in told("bert", vocab_size=70)
    for number in (300, 4096, 10**12, None):
        assert "tokens, which its files allow; say how many it takes with --max-length" in told(
            "bert-classify", max_position_embeddings=number
        )
    for kind in ("two", -1, [2], True):
        assert "type_vocab_size in config.json" in told("bert-classify", type_vocab_size=kind)
    assert capfd.readouterr().err == ""


def _blind(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph that reads its mask, and sees everything all the same."""
    blind = onnx.ModelProto()
    blind.CopyFrom(model)
    for node in blind.graph.node:
        node.input[:] = ["all" if name == "attention_mask" else name for name in node.input]
    one = onnx.helper.make_tensor("one", onnx.TensorProto.INT64, [], [1])
    blind.graph.initializer.append(one)
    all_ = onnx.helper.make_node("Max", ["attention_mask", "one"], ["all"])
    blind.graph.node.insert(0, all_)
    return blind


def test_a_repository_of_the_hub_that_has_a_graph_alone(
    graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graphs are downloaded, and no others' of one that has weights.

    In the cache, they and what is beside them are links to files of other names.
    """
    with_data_file(graphs, "model.onnx_data")
    files = [path for path in graphs.rglob("*") if path.is_file()]
    with running_hub() as hub:
        hub.files = {path.relative_to(graphs).as_posix(): path.read_bytes() for path in files}
        hub.files["onnx/model_O4.onnx"] = b"of a GPU"
        for name, value in (("HF_ENDPOINT", hub.url), ("HF_HUB_DISABLE_XET", "1")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("MASKDIAL_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert cli.main(["pull", "acme/model"]) == 0
    (manifest,) = read_manifests("model", tmp_path / "cache" / "acme" / "model")
    assert manifest.parity.reference == "onnxruntime"
    assert not [*(tmp_path / "hub").rglob("model_O4.onnx")]


def test_a_folder_is_served_by_its_name(graphs: Path, tmp_path: Path) -> None:
    """Until its graph changes: then it is another model."""
    place = source_bundle(graphs)
    found = find_bundles(Config(model_dir=graphs.parent)).scan()
    assert found["source"] == graphs
    (graphs / "onnx" / "model.onnx").write_bytes(b"another")
    assert source_bundle(graphs) != place
