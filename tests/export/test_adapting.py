"""Adapter bundles against PEFT's own output, and what is refused."""

import argparse
import json
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import safetensors.torch
import tokenizers
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from maskdial.bundle.adapter import read_adapter
from maskdial.bundle.bundle import load_bundle
from maskdial.kernels.installed import find_kernels
from maskdial_export import cli
from maskdial_export.export import export
from tests.export.conftest import add_json, make_checkpoint
from tests.export.test_export_adapter import IDS, train

New = Callable[[str], Path]
Load = Callable[[Path], Any]
pytestmark = [
    # Of peft 0.21 with transformers 5.23
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.skipif(find_kernels("auto") is None, reason="the kernels are not built"),
]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def export_adapter(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs ``maskdial export-adapter``; returns its exit code and the last line that it wrote."""

    def run(*arguments: object) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        cli.add_adapter_arguments(parser)
        code = cli.run_adapter(parser.parse_args(list(map(str, arguments))))
        return code, capsys.readouterr().err.strip().splitlines()[-1]

    return run


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "adapter.json").read_text())
    return content


def test_served_adapters_equal_peft(
    checkpoint: New,
    bundle: New,
    load_reference: Load,
    tmp_path: Path,
    export_adapter: Any,
    start_server: Callable[..., Any],
) -> None:
    """LoRA with ranks and scales of their own, and rsLoRA: query, key and value are one product."""
    source = checkpoint("llama")
    settings: dict[str, dict[str, Any]] = {
        "plain": {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
        "stable": {"use_rslora": True},
    }
    expected = {}
    for name, each in settings.items():
        adapted = train(load_reference(source), tmp_path / name, task_type="CAUSAL_LM", **each)
        with torch.no_grad():
            logprobs = adapted(IDS).logits[0].log_softmax(-1)
        expected[name] = [float(logprobs[i, token]) for i, token in enumerate(IDS[0, 1:])]
        code, line = export_adapter(
            tmp_path / name, tmp_path / f"{name}.bundle", "--base", bundle("llama")
        )
        assert code == 0, line
        assert "in 14 layers of llama, float32" in line
        manifest = read(tmp_path / f"{name}.bundle")
        assert manifest["parity"]["difference"] < 1e-4
        assert manifest["rank"] == (6 if name == "plain" else 4)
    adapters = {name: (tmp_path / f"{name}.bundle", "base") for name in settings}
    server = start_server(models={"base": bundle("llama")}, adapters=adapters, slots=2)
    for name, logprobs in expected.items():
        body = {"model": name, "prompt": IDS[0].tolist(), "max_tokens": 1, "echo": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=body | {"logprobs": 1}).json()
        found = reply["choices"][0]["logprobs"]["token_logprobs"][1 : len(logprobs) + 1]
        np.testing.assert_allclose(found, logprobs, rtol=0, atol=1e-4)
    server.stop()


def test_other_layers_and_precisions(
    checkpoint: New, bundle: New, load_reference: Load, tmp_path: Path, export_adapter: Any
) -> None:
    """GPT-2's one product for query, key and value; a masked model; a base of int8."""
    source = load_reference(checkpoint("gpt2"))
    train(source, tmp_path / "gpt2", task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = AutoModelForMaskedLM.from_pretrained(checkpoint("bert"), attn_implementation="eager")
    config = peft.LoraConfig(r=4, target_modules=["query", "value"])
    masked = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in masked.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    masked.save_pretrained(tmp_path / "bert")
    for name in ("gpt2", "bert"):
        dest = tmp_path / f"{name}.bundle"
        code, line = export_adapter(tmp_path / name, dest, "--base", bundle(name))
        assert code == 0, line
        assert read(dest)["parity"]["difference"] < 1e-4
    export(str(checkpoint("gpt2")), tmp_path / "int8", precision="int8")
    dest = tmp_path / "int8.bundle"
    code, line = export_adapter(tmp_path / "gpt2", dest, "--base", tmp_path / "int8")
    assert code == 0, line
    assert "float16" in line
    parity = read(dest)["parity"]
    assert parity["difference"] < parity["tolerance"] < 0.2


def settings_of(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights_of(folder: Path, **changes: Any) -> None:
    """Replaces tensors; None removes one."""
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path) | changes
    kept = {name: each for name, each in tensors.items() if each is not None}
    safetensors.torch.save_file(kept, path)


def dora(folder: Path) -> None:
    settings_of(folder, use_dora=True)


def biased(folder: Path) -> None:
    settings_of(folder, bias="all")


def prompts(folder: Path) -> None:
    settings_of(folder, peft_type="PROMPT_TUNING")


def nameless(folder: Path) -> None:
    settings_of(folder, base_model_name_or_path=None)


def elsewhere(folder: Path) -> None:
    settings_of(folder, base_model_name_or_path=str(folder / "nowhere"))


def no_number(folder: Path) -> None:
    weights_of(folder, **{f"{LAYER}.lora_A.weight": torch.full((4, 32), torch.nan)})


def half_gone(folder: Path) -> None:
    weights_of(folder, **{f"{LAYER}.lora_B.weight": None})


def narrower(folder: Path) -> None:
    weights_of(folder, **{f"{LAYER}.lora_A.weight": torch.zeros(4, 31)})


def embedded(folder: Path) -> None:
    weights_of(folder, **{"base_model.model.model.embed_tokens.weight": torch.zeros(2, 2)})


def unknown(folder: Path) -> None:
    name = "base_model.model.model.layers.9.self_attn.q_proj"
    matrices = {"A": torch.zeros(4, 32), "B": torch.zeros(32, 4)}
    weights_of(folder, **{f"{name}.lora_{part}.weight": each for part, each in matrices.items()})


def no_rank(folder: Path) -> None:
    nothing = {"A": torch.zeros(0, 32), "B": torch.zeros(32, 0)}
    weights_of(folder, **{f"{LAYER}.lora_{part}.weight": each for part, each in nothing.items()})


def text_for_alpha(folder: Path) -> None:
    settings_of(folder, lora_alpha="16")


def no_alpha(folder: Path) -> None:
    settings_of(folder, lora_alpha=None)


def huge_alpha(folder: Path) -> None:
    settings_of(folder, lora_alpha=10**400)


def listed_alphas(folder: Path) -> None:
    settings_of(folder, alpha_pattern=["q_proj"])


def no_expression(folder: Path) -> None:
    settings_of(folder, alpha_pattern={"(": 2})


def numbered(folder: Path) -> None:
    settings_of(folder, base_model_name_or_path=7)


def no_targets(folder: Path) -> None:
    settings_of(folder, target_modules=7)


def nested(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[" * 10**5)


def header_of(folder: Path, size: int, text: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", size) + text)


def no_header(folder: Path) -> None:
    header_of(folder, 8, b"no json!")


def bomb(folder: Path) -> None:
    header_of(folder, 2**60, b"{}")


def large_header(folder: Path) -> None:
    """Of 100 MB, which a file without blocks has."""
    header_of(folder, 10**8, b"{}")
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(10**8 + 8)


def short(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"abc")


FAULTS: dict[Callable[[Path], None], str] = {
    dora: "use_dora: DoRA also scales each column",
    biased: "changes biases",
    prompts: "is a PROMPT_TUNING adapter, and only LoRA",
    nameless: "names no base; give its checkpoint by --checkpoint",
    elsewhere: "name it with --checkpoint",
    no_number: "numbers that are not finite",
    half_gone: f"lacks {LAYER}.lora_B.weight",
    narrower: "was trained on another base: layer model.layers.0.self_attn.q_proj has 32 inputs",
    embedded: "weights that are no low-rank matrices, such as 'base_model.model.model.embed_tokens",
    no_rank: "the matrices of model.layers.0.self_attn.q_proj",
    text_for_alpha: "adapter_config.json is not a number",
    no_alpha: "adapter_config.json is not a number",
    huge_alpha: "adapter_config.json is not a number",
    listed_alphas: "adapter_config.json is not an object of numbers by layers",
    no_expression: "adapter_config.json is not an object of numbers by layers",
    numbered: "adapter_config.json is not a name",
    no_targets: "does not fit the model",
    nested: "adapter_config.json is not valid JSON",
    no_header: "is damaged or incomplete",
    bomb: "is damaged: its header would have more than 8 MiB",
    large_header: "is damaged: its header would have more than 8 MiB",
    short: "is damaged or incomplete",
    unknown: "changes model.layers.9.self_attn.q_proj, which is none of the base's layers",
}


def test_adapters_that_are_refused(
    checkpoint: New, bundle: New, load_reference: Load, tmp_path: Path, export_adapter: Any
) -> None:
    good = tmp_path / "lora"
    train(load_reference(checkpoint("llama")), good, task_type="CAUSAL_LM")
    for number, (spoil, why) in enumerate(FAULTS.items()):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        spoil(folder)
        code, line = export_adapter(folder, tmp_path / "dest", "--base", bundle("llama"))
        assert (code, why in line) == (1, True), (spoil.__name__, line)
        assert not (tmp_path / "dest").exists()


def test_another_checkpoint_or_base_is_refused(
    checkpoint: New,
    bundle: New,
    load_reference: Load,
    new_checkpoint: New,
    tmp_path: Path,
    export_adapter: Any,
) -> None:
    train(load_reference(checkpoint("llama")), tmp_path / "lora", task_type="CAUSAL_LM")
    arguments = (tmp_path / "lora", tmp_path / "dest", "--base")
    code, line = export_adapter(*arguments, bundle("gpt2"))
    assert (code, "whose files differ from those of" in line) == (1, True), line
    other = new_checkpoint("llama")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    code, line = export_adapter(*arguments, bundle("llama"), "--checkpoint", other)
    assert (code, "whose files differ from those of" in line) == (1, True), line
    code, line = export_adapter(*arguments, tmp_path)
    assert (code, "has no maskdial.json" in line) == (1, True), line


def add_task(source: Path, name: str, *targets: str, **settings: Any) -> Any:
    """Adds an adapter to a checkpoint of Jina's; returns the adapted model."""
    torch.manual_seed(len(name))
    config = peft.LoraConfig(r=4, lora_alpha=3, target_modules=list(targets), **settings)
    adapted: Any = peft.get_peft_model(AutoModel.from_pretrained(source), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    adapted.save_pretrained(source / name)
    return adapted.eval()


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
TABLES = ("word_embeddings", "token_type_embeddings")
TEXTS = ["a house by the sea", "the king", "a ship and a house and a king by the sea"]


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint as Jina's v3, and what PEFT computes for its tasks and for none."""
    source = make_checkpoint("jina-v3-embed", tmp_path_factory.mktemp("jina") / "v3")
    instruction = "the small "
    add_json(source / "config.json", task_instructions={"retrieval.query": instruction})
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    models = {
        None: AutoModel.from_pretrained(source).eval(),
        "retrieval.query": add_task(
            source, "retrieval_query", *LINEAR, *TABLES, "dense", use_rslora=True
        ),
        "text-matching": add_task(source, "text_matching", "fc1", "token_type_embeddings"),
    }
    expected = {}
    for task, model in models.items():
        prompt = instruction if task == "retrieval.query" else ""
        with torch.no_grad():
            read = [tokenizer.encode(prompt + text).ids for text in TEXTS]
            pooled = [model(torch.tensor([ids]))[0].mean(1) for ids in read]
        expected[task] = torch.nn.functional.normalize(torch.cat(pooled)).numpy()
    return source, expected


def test_tasks_by_request(jina: Any, tmp_path: Path, start_server: Callable[..., Any]) -> None:
    """One bundle, whose adapters also change the tables of words and of token types."""
    source, expected = jina
    manifest = export(str(source), tmp_path / "bundle", task="embed")
    assert manifest.embedding is not None
    assert manifest.embedding.tasks.keys() == expected.keys() - {None}
    server = start_server(models={"jina": tmp_path / "bundle"})

    def post(route: str, **body: Any) -> Any:
        return httpx.post(f"{server.url}{route}", json={"model": "jina"} | body)

    def embed(task: str | None, inputs: list[str] = TEXTS) -> Any:
        reply = post("/v1/embeddings", input=inputs, task=task).raise_for_status().json()
        return np.array([each["embedding"] for each in reply["data"]])

    alone = {task: np.concatenate([embed(task, [each]) for each in TEXTS]) for task in expected}
    for task, vectors in expected.items():
        lengths = np.linalg.norm(alone[task], axis=1, keepdims=True)
        np.testing.assert_allclose(alone[task] / lengths, vectors, rtol=0, atol=1e-4)
        for other in expected.keys() - {task}:
            assert np.abs(vectors - expected[other]).max() > 0.1
    with ThreadPoolExecutor(4) as pool:  # tasks share passes
        for task, together in zip([*expected] * 8, pool.map(embed, [*expected] * 8), strict=True):
            np.testing.assert_array_equal(together, alone[task])
    task = "retrieval.query"
    native = post("/embed", inputs=TEXTS, parameters={"task": task}).json()
    np.testing.assert_array_equal(native, alone[task])
    cohere = post("/v2/embed", texts=TEXTS, input_type="search_query").json()
    np.testing.assert_array_equal(cohere["embeddings"]["float"], alone[task])
    pair = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    similar = post("/similarity", inputs=pair, parameters={"task": task}).json()
    np.testing.assert_allclose(similar, expected[task][1:] @ expected[task][0], atol=1e-4)
    reply = post("/embed", inputs="a", task="matching")
    assert reply.status_code == 422
    assert reply.json()["error"].startswith("task: must be one of 'retrieval.query', 'text-")
    server.stop()
    server = start_server(models={"jina": tmp_path / "bundle"}, kernels="off")
    assert post("/embed", inputs=TEXTS).status_code == 200
    reply = post("/embed", inputs=TEXTS, task=task)
    assert reply.status_code == 422
    assert "runs without the kernels, which compute adapters" in reply.json()["error"]
    server.stop()


@pytest.mark.zoo
def test_tasks_in_integers(jina: Any, tmp_path: Path, export_by_command: Any) -> None:
    source, _ = jina
    code, line = export_by_command(
        str(source), str(tmp_path / "int8"), "--task", "embed", "--precision", "int8",
        "--max-loss", "1",
    )  # fmt: skip
    assert code == 0, line
    bundle = load_bundle("jina", tmp_path / "int8")
    for name in bundle.manifest.task_adapters:
        parity = read_adapter(name, bundle.task_adapter(name)).manifest.parity
        assert parity.difference < parity.tolerance < 0.3
