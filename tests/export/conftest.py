"""Tiny checkpoints of every architecture with random weights, and their bundles.

Tracing takes most of an export's time, so a run traces each checkpoint once (`tests.traces`) and
exports each bundle once, in whichever of its processes asks first (`made_once`).
"""

import argparse
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

from maskdial_export import cli
from maskdial_export.checkpoint.text_part import towers_left_out
from maskdial_export.checks.kernels import exact_here
from maskdial_export.export import export
from tests.conftest import MakeOnce
from tests.export.zoo import REFUSED, SHAPE, ZOO, Settings

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = [
    *SPECIAL,
    *"abcdefghijklmnopqrstuvwxyz.,",
    *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
]
# checkpoint name -> (class, configuration)
CHECKPOINTS: dict[str, tuple[str, Settings]] = {
    name: (specimen.architecture, specimen.settings)
    for zoo in (*ZOO.values(), {name: each for name, (each, _) in REFUSED.items()})
    for name, specimen in zoo.items()
}

# checkpoint name -> how sentence-transformers pools for it, and whether it normalizes then
POOLING = {
    "bert-embed": ("mean_tokens", True),
    "xlm-roberta-embed": ("cls_token", True),
    "modernbert-embed": ("lasttoken", False),
    "qwen3-embed": ("lasttoken", True),
}


@pytest.fixture(scope="session")
def exact_products() -> None:
    """Skips what needs ONNX Runtime's products of 8 bits to be exact."""
    if not exact_here():
        pytest.skip("products of 8 bits saturate on this processor (no VNNI)")


@pytest.fixture(scope="session", autouse=True)
def quick_torch(torch: ModuleType) -> None:
    """Makes traces quick for all tests of this folder; tests elsewhere ask for ``torch``."""


def make_tokenizer() -> tokenizers.Tokenizer:
    """A WordPiece tokenizer of single letters; it pads and truncates, as saved ones may."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(16)
    return tokenizer


def make_checkpoint(name: str, folder: Path) -> Path:
    """Saves a checkpoint with random weights, including biases and norms."""
    architecture, settings = CHECKPOINTS[name]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    config = model_class.config_class(**settings)
    with without_towers(config):
        model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    if name in POOLING:
        write_modules(folder, *POOLING[name])
    return folder


def without_towers(config: Any) -> contextlib.AbstractContextManager[None]:
    """Builds no tower of Gemma 3n, which would need packages that text does not."""
    is_gemma3n = config.model_type == "gemma3n"
    return towers_left_out(config) if is_gemma3n else contextlib.nullcontext()


def write_modules(folder: Path, pooling: str, normalizes: bool) -> None:
    """Writes sentence-transformers' files for a model."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if normalizes else []
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": index, "name": str(index), "path": path}
                | {"type": f"sentence_transformers.models.{module}"}
                for index, (path, module) in enumerate(modules)
            ]
        )
    )
    ways = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(
            {"word_embedding_dimension": SHAPE["hidden_size"]}
            | {f"pooling_mode_{way}": way == pooling for way in ways}
        )
    )


def make_settled(name: str, folder: Path) -> None:
    """A checkpoint with the settings of its tokenizer and of its texts."""
    make_checkpoint(name, folder)
    add_json(
        folder / "tokenizer_config.json",
        chat_template="{{ messages }}",
        response_template={"start_anchor": "<a>", "fields": {"thinking": {"open": "<t>"}}},
    )
    if name == "llama":
        add_json(folder / "generation_config.json", eos_token_id=[3, 5], temperature=0.7)


def exported_once(name: str, made_once: MakeOnce) -> Path:
    """The folder of a checkpoint's bundle, exported once a run."""
    source = made_once(f"checkpoints/{name}", lambda folder: make_settled(name, folder))
    return made_once(f"bundles/{name}", lambda folder: export(str(source), folder))


@pytest.fixture(scope="session")
def checkpoint(made_once: MakeOnce) -> Callable[[str], Path]:
    """The folder of a checkpoint, made once a run; tests that change one make their own."""
    return lambda name: made_once(f"checkpoints/{name}", lambda folder: make_settled(name, folder))


@pytest.fixture(scope="session")
def bundle(made_once: MakeOnce) -> Callable[[str], Path]:
    return lambda name: exported_once(name, made_once)


def add_json(path: Path, **entries: Any) -> None:
    """Adds entries to a JSON object in a file, which need not exist yet."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | entries))


@pytest.fixture(scope="session", name="add_json")
def add_json_fixture() -> Callable[..., None]:
    return add_json


@pytest.fixture
def new_checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that the test may change."""
    return lambda name: make_checkpoint(name, tmp_path / "checkpoint")


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def export_by_command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``maskdial export``; returns its exit code and the last line that it wrote."""

    def run(*arguments: str) -> tuple[int, str]:
        code, lines = run_export(capsys, *arguments)
        return code, lines[-1]

    return run


def run_export(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    code = cli.run(parser.parse_args(["--trace", *arguments]))
    return code, capsys.readouterr().err.strip().splitlines()


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """An empty folder for bundles."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    return folder


@pytest.fixture
def assert_refused(capsys: pytest.CaptureFixture[str], bundles: Path) -> Callable[..., None]:
    """Checks for exit code 1, one sentence that contains ``why``, and no trace of a bundle.

    Unless ``late`` it comes before the model is traced.
    """

    def check(source: Path | str, why: str, *options: str, late: bool = False) -> None:
        code, lines = run_export(capsys, str(source), str(bundles / "bundle"), *options)
        assert code == 1
        assert lines[-1].startswith("maskdial export: ")
        assert why in lines[-1]
        assert late == any(line.startswith("Tracing") for line in lines)
        assert list(bundles.iterdir()) == []

    return check


@pytest.fixture(scope="session")
def serve(start_server: Callable[..., Any]) -> Iterator[Callable[..., str]]:
    """Serves bundles by name and returns the URL."""
    running: list[Any] = []

    def start(**models: Path) -> str:
        running.append(start_server(models=models))
        return str(running[-1].url)

    yield start
    for server in running:
        server.stop()


def load_reference(folder: Path) -> transformers.PreTrainedModel:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, architecture)
    with without_towers(model_class.config_class.from_pretrained(folder)):
        return model_class.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="session", name="load_reference")
def load_reference_fixture() -> Callable[[Path], transformers.PreTrainedModel]:
    return load_reference


@pytest.fixture(scope="module")
def backbone(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT without a chat template, by which sentence-transformers would write the texts."""
    folder = tmp_path_factory.mktemp("backbone") / "bert"
    shutil.copytree(checkpoint("bert"), folder)
    names = ("pad", "unk", "cls", "sep", "mask")
    tokens = {f"{name}_token": f"[{name.upper()}]" for name in names}
    tokens["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder
