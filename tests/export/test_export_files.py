"""The files and the manifest of a bundle."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.template import read_chat_template
from maskdial_export.export import export
from tests.traces import Traces

Bundle = Callable[[str], Path]


def test_tokenizer_neither_pads_nor_truncates(bundle: Bundle) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle("bert") / "tokenizer.json"))
    assert tokenizer.encode("a").ids == [2, 5, 3]
    assert len(tokenizer.encode("b " * 40).ids) == 42


def test_special_tokens(bundle: Bundle) -> None:
    masked = load_bundle("bert", bundle("bert")).manifest.special_tokens
    causal = load_bundle("llama", bundle("llama")).manifest.special_tokens
    assert (masked.pad, masked.mask) == (0, 4)
    assert (causal.bos, causal.eos, causal.mask) == (2, (3, 5), None)


def test_chat_template_and_generation_defaults(bundle: Bundle) -> None:
    folder = bundle("llama")
    manifest = load_bundle("llama", folder).manifest
    files = manifest.files
    assert manifest.response_template is not None
    assert manifest.response_template["fields"] == {"thinking": {"open": "<t>"}}
    assert {"chat_template.jinja", "generation_config.json"} < set(files)
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.7


DEFAULT = "{{ pad_token }}|{{ unk_token }}|{{ eos_token }}|{{ messages[0].content }}"
TOOL_USE = "{{ tools | tojson }}|" + DEFAULT
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "see", "parameters": {}}}]


def write_templates(folder: Path, form: str, add_json: Callable[..., None]) -> None:
    """A checkpoint's templates, in one of the forms that transformers reads."""
    named = [("default", DEFAULT), ("tool_use", TOOL_USE), ("rag", "{{ nothing.of.that }}")]
    listed = [{"name": name, "template": template} for name, template in named]
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    add_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **tokens)
    if form == "list":
        add_json(folder / "tokenizer_config.json", chat_template=listed)
        return
    (folder / "chat_template.jinja").write_text(DEFAULT)
    if form == "only the default":  # a file wins over the list
        add_json(folder / "tokenizer_config.json", chat_template=listed)
        return
    (folder / "additional_chat_templates").mkdir()
    for name, template in named[1:]:
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template)


@pytest.mark.parametrize("form", ["list", "folder", "only the default"])
def test_named_chat_templates_are_those_of_transformers(
    form: str, new_checkpoint: Bundle, add_json: Callable[..., None], tmp_path: Path
) -> None:
    source = new_checkpoint("llama")
    write_templates(source, form, add_json)
    folder = tmp_path / "bundle"
    export(str(source), folder)
    bundle = load_bundle("mine", folder)
    tokenizer = Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens)
    ours = read_chat_template(bundle, tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    messages = [{"role": "user", "content": "Look."}]
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert ours.render(messages, tools=tools, add_generation_prompt=False) == expected
    ours.close()


def test_manifest_lists_every_other_file(bundle: Bundle) -> None:
    folder = bundle("bert")
    files = load_bundle("bert", folder).manifest.files
    assert set(files) == {file.name for file in folder.iterdir()} - {"maskdial.json"}


def test_labels_in_order(bundle: Bundle) -> None:
    manifest = load_bundle("bert", bundle("bert-classify")).manifest
    assert manifest.task == "classify"
    assert manifest.labels == ("negative", "neutral", "positive")


@pytest.mark.parametrize(("name", "length"), [("bert", 128), ("roberta", 126), ("opt", 128)])
def test_longest_text(name: str, length: int, bundle: Bundle) -> None:
    assert load_bundle(name, bundle(name)).manifest.max_length == length


def test_longest_text_of_a_length_dependent_rotary_embedding(bundle: Bundle) -> None:
    assert load_bundle("phi3", bundle("phi3")).manifest.max_length == 128


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama", "gemma2"])
def test_tied_embedding_is_stored_once(name: str, bundle: Bundle, checkpoint: Bundle) -> None:
    """An output layer of its own would add at least vocab_size * hidden_size * 4 bytes."""
    graph = onnx.load(bundle(name) / "model.onnx").graph
    shapes = [tuple(tensor.dims) for tensor in graph.initializer]
    assert shapes.count((101, 32)) + shapes.count((32, 101)) == 1


def test_golden_check_has_the_logits_of_torch(
    bundle: Bundle, checkpoint: Bundle, load_reference: Callable[[Path], Any]
) -> None:
    for name in ("bert", "bert-classify", "llama"):
        golden = load_bundle(name, bundle(name)).manifest.golden
        with torch.no_grad():
            logits = load_reference(checkpoint(name))(torch.tensor([golden.input_ids])).logits[0]
        row = logits if name == "bert-classify" else logits[golden.row]
        np.testing.assert_allclose(golden.logits, row[list(golden.columns)], atol=1e-5)
        assert len(golden.input_ids) > 5
        assert (golden.input_ids[golden.row] == 4) == (name == "bert")


@pytest.fixture
def old_checkpoint(new_checkpoint: Bundle, add_json: Callable[..., None]) -> Path:
    """A checkpoint with half-precision weights, and a vocabulary instead of tokenizer.json."""
    source = new_checkpoint("distilbert")
    path = source / "model.safetensors"
    halves = {name: weight.half() for name, weight in load_file(path).items()}
    save_file(halves, path, metadata={"format": "pt"})
    add_json(source / "config.json", dtype="float16")
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)) + "\n")
    add_json(source / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    return source


def test_old_checkpoint(old_checkpoint: Path, tmp_path: Path) -> None:
    manifest = export(str(old_checkpoint), tmp_path / "bundle")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "bundle" / "tokenizer.json"))
    assert tokenizer.encode("abc").tokens == ["[CLS]", "a", "##b", "##c", "[SEP]"]
    assert manifest.special_tokens.mask == 4
    graph = onnx.load(tmp_path / "bundle" / "model.onnx").graph
    assert onnx.TensorProto.FLOAT16 not in {tensor.data_type for tensor in graph.initializer}


def test_export_into_an_empty_folder(
    bundle: Bundle,
    checkpoint: Bundle,
    traces: Traces,
    tmp_path: Path,
) -> None:
    """The same checkpoint gives the same bundle, and an empty folder may wait for it."""
    expected = load_bundle("bert", bundle("bert")).manifest
    with traces.anew():
        manifest = export(str(checkpoint("bert")), tmp_path)
    assert manifest == expected
    assert load_bundle("bert", tmp_path).manifest == manifest
