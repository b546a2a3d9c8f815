"""Rerankers that are causal language models, against sentence-transformers and torch.

Those that are written directly have the bits of a trace.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import onnx
import pytest
import tokenizers
import torch
import transformers
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore

from maskdial.bundle.manifest import GRAPH
from maskdial_export.checkpoint.reranking import QWEN, read_template
from maskdial_export.checkpoint.source import find
from maskdial_export.errors import ExportError, QualityError
from maskdial_export.export import export
from maskdial_export.model import load_checkpoint
from maskdial_export.quantize.gate import Gate
from maskdial_export.route import export_any_way
from tests.export.gguf_files import byte_level, make_model, write_gguf
from tests.export.test_direct import run_blocked
from tests.export.test_direct_encoders import ANY_LOSS, assert_alike, direct, traced
from tests.export.test_gguf_models import MODELS

TOLERANCE = 1e-5
LONGEST = 512
YES, NO = 50, 60  # letters of the byte-level vocabulary
TEMPLATE = (
    "<eos>{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('find it') }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "\n<Document>: "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<eos>\nAnswer: "
)
QUERY = "where is the  ship?"
DOCUMENTS = ["the ship left at dawn.", "x", " \n  spaces \n", "she baked bread, é 😀 " * 9]
# As Qwen's model card has it
CARD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)


@pytest.fixture(scope="module")
def language_model(
    byte_tokenizer: Callable[..., tokenizers.Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny Qwen3 that writes; its output layer is the embedding table, as in Qwen's own."""
    folder = tmp_path_factory.mktemp("language-model") / "qwen3"
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer(begins=False)
    tokenizer.add_tokens([tokenizers.AddedToken(word, single_word=True) for word in ("yes", "no")])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<bos>",
        model_max_length=LONGEST,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cross_encoder(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As sentence-transformers saves a reranker, with an instruction."""
    root = tmp_path_factory.mktemp("cross-encoder")
    base = shutil.copytree(language_model, root / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    modules: list[Any] = [
        Transformer(str(base), transformer_task="text-generation"),
        LogitScore(YES, NO),
    ]
    prompts = {"web": "answer the question"}
    model = CrossEncoder(modules=modules, device="cpu", prompts=prompts, default_prompt_name="web")
    model.save(str(root / "saved"))
    return root / "saved"


@pytest.fixture(scope="module")
def url(
    language_model: Path,
    cross_encoder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    serve: Callable[..., str],
) -> str:
    root = tmp_path_factory.mktemp("rerankers")
    export(str(cross_encoder), root / "modules")
    export(str(language_model), root / "card", task="rerank")
    return serve(modules=root / "modules", card=root / "card")


def rerank(url: str, status: int = 200, **body: object) -> Any:
    reply = httpx.post(f"{url}/rerank", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def scores(ranks: Sequence[dict[str, Any]]) -> list[float]:
    """In the order of the documents."""
    assert [each["score"] for each in ranks] == sorted((e["score"] for e in ranks), reverse=True)
    return [each["score"] for each in sorted(ranks, key=lambda each: each["index"])]


def test_scores_are_those_of_sentence_transformers(cross_encoder: Path, url: str) -> None:
    reference = CrossEncoder(str(cross_encoder), device="cpu")
    expected = reference.predict([(QUERY, document) for document in DOCUMENTS])
    body: dict[str, Any] = {"model": "modules", "query": QUERY}
    ranks = rerank(url, **body, texts=DOCUMENTS)
    np.testing.assert_allclose(scores(ranks), expected, atol=TOLERANCE)
    assert np.ptp(expected) > 1000 * TOLERANCE
    for document, score in zip(DOCUMENTS, scores(ranks), strict=True):
        assert scores(rerank(url, **body, texts=[document])) == [score]
    named = httpx.post(
        f"{url}/models/modules", json={"query": QUERY, "texts": DOCUMENTS}, timeout=60
    )
    assert named.json() == ranks
    reply = httpx.post(f"{url}/v1/rerank", json=body | {"documents": DOCUMENTS}, timeout=60)
    assert [each["relevance_score"] for each in reply.json()["results"]] == [
        each["score"] for each in ranks
    ]


def test_long_documents_are_cut_before_the_end_of_the_prompt(cross_encoder: Path, url: str) -> None:
    documents = ["a" * 1000, "the ship left, and so did we; " * 40, "short"]
    body: dict[str, Any] = {"model": "modules", "query": QUERY, "texts": documents}
    error = str(rerank(url, 422, **body)["error"])
    assert error.startswith("texts[0]: the query and the text take ")
    assert f"takes at most {LONGEST}" in error
    expected = CrossEncoder(str(cross_encoder), device="cpu").predict(
        [(QUERY, document) for document in documents]
    )
    ranks = rerank(url, **body, truncate=True)
    np.testing.assert_allclose(scores(ranks), expected, atol=TOLERANCE)
    left = rerank(url, **body, truncate=True, truncation_direction="left")
    assert scores(left)[2] == scores(ranks)[2]
    assert scores(left)[1] != scores(ranks)[1]
    for length in (LONGEST, 10**6):
        error = str(rerank(url, 422, **(body | {"query": "q" * length}), truncate=True)["error"])
        assert error.startswith("texts[0]: the query and the text ")


def test_qwens_own_checkpoints_are_read_as_their_card_says(language_model: Path, url: str) -> None:
    model = transformers.Qwen3ForCausalLM.from_pretrained(language_model).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(language_model)
    expected = []
    answers = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    for document in DOCUMENTS[:3]:
        text = CARD.replace("{query}", QUERY).replace("{document}", document)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, -1, answers]
        expected.append(float(logits.softmax(-1)[1]))
    ranks = rerank(url, model="card", query=QUERY, texts=DOCUMENTS[:3])
    np.testing.assert_allclose(scores(ranks), expected, atol=TOLERANCE)


def test_an_instruction_takes_the_place_of_the_templates_own(
    cross_encoder: Path, language_model: Path, url: str
) -> None:
    reference = CrossEncoder(str(cross_encoder), device="cpu")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    own = reference.predict(pairs, prompt="answer the question")
    expected = reference.predict(pairs, prompt="find recipes")
    body: dict[str, Any] = {"model": "modules", "query": QUERY, "instruction": "find recipes"}
    ranks = rerank(url, **body, texts=DOCUMENTS)
    np.testing.assert_allclose(scores(ranks), expected, atol=TOLERANCE)
    assert np.abs(own - expected).max() > 100 * TOLERANCE
    reply = httpx.post(f"{url}/v1/rerank", json=body | {"documents": DOCUMENTS}, timeout=60)
    assert [each["relevance_score"] for each in reply.json()["results"]] == [
        each["score"] for each in ranks
    ]
    same = rerank(url, **body | {"instruction": "answer the question"}, texts=DOCUMENTS)
    assert same == rerank(url, model="modules", query=QUERY, texts=DOCUMENTS)
    card: dict[str, Any] = {"model": "card", "query": QUERY, "texts": DOCUMENTS[:3]}
    assert rerank(url, **card, instruction=QWEN.instruction) == rerank(url, **card)
    assert scores(rerank(url, **card, instruction="x")) != scores(rerank(url, **card))
    assert "instruction" in str(rerank(url, 422, **card, instruction=" "))


def test_a_template_without_a_place_for_it_takes_no_instruction(
    language_model: Path, tmp_path: Path
) -> None:
    fixed = "<eos>find it\n<Query>" + TEMPLATE.partition("\n<Query>")[2]
    for folder, template, instruction in (("own", TEMPLATE, "find it"), ("fixed", fixed, None)):
        tokens = {"classifier_from_token": ["no", "yes"]}
        source = changed(language_model, tmp_path / folder, template, **tokens)
        found = find(str(source), "auto", revision=None, allow_pickle=False)
        parts = read_template(found)
        assert parts.before == "<eos>find it\n<Query>: "
        assert parts.instruction == instruction


def test_a_reranker_does_nothing_else(url: str) -> None:
    body = {"model": "card", "inputs": "the ship"}
    reply = httpx.post(f"{url}/classify", json=body, timeout=60)
    assert reply.status_code == 422
    assert "cannot do classify; it does rerank" in reply.json()["error"]
    models = {each["name"]: each for each in httpx.get(f"{url}/models", timeout=60).json()}
    assert models["modules"]["tasks"] == ["rerank", "tokenize"]
    assert not models["modules"]["chat"]


def changed(source: Path, folder: Path, template: str | None, **config: object) -> Path:
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_tokens_as_vllm_names_them(language_model: Path, tmp_path: Path) -> None:
    structured = TEMPLATE.replace("| first }}", "| first | map(attribute='text') | first }}")
    source = changed(
        language_model, tmp_path / "source", structured, classifier_from_token=["no", "yes"]
    )
    found = find(str(source), "auto", revision=None, allow_pickle=False)
    assert found.task == "rerank"
    checkpoint = load_checkpoint(found)
    assert checkpoint.pair_template is not None
    assert checkpoint.pair_template.before == "<eos>find it\n<Query>: "
    assert checkpoint.pair_template.after == "<eos>\nAnswer: "
    rows = transformers.Qwen3ForCausalLM.from_pretrained(language_model).lm_head.weight
    no, yes = (checkpoint.tokenizer.token_to_id(word) for word in ("no", "yes"))
    model: Any = checkpoint.model
    torch.testing.assert_close(model.score.weight, (rows[yes] - rows[no])[None])


@pytest.mark.parametrize(
    ("template", "config", "why"),
    [
        (
            "{{ messages[0].content | trim }}: {{ messages[1].content }}",
            {"classifier_from_token": ["no", "yes"], "model_type": "llama"},
            "has no chat template that writes messages of the roles query and document",
        ),
        (
            TEMPLATE,
            {"classifier_from_token": ["no", "maybe"]},
            "has no two tokens 'no' and 'maybe'",
        ),
        (TEMPLATE, {"classifier_from_token": ["no", "no"]}, "has no two tokens 'no' and 'no'"),
        (TEMPLATE, {"classifier_from_token": ["no"]}, "does not say which tokens"),
        (
            TEMPLATE.removesuffix("\nAnswer: ").replace("<eos>", "<bos>"),
            {"classifier_from_token": ["no", "yes"]},
            "ends with the padding token",
        ),
    ],
)
def test_checkpoints_that_are_refused(
    language_model: Path,
    tmp_path: Path,
    template: str,
    config: dict[str, Any],
    why: str,
    assert_refused: Callable[..., None],
) -> None:
    source = changed(language_model, tmp_path / "source", template, **config)
    assert_refused(source, why, "--no-strict")


def test_capped_logits_make_no_classifier(
    new_checkpoint: Callable[[str], Path],
    add_json: Callable[..., None],
    assert_refused: Callable[..., None],
) -> None:
    source = new_checkpoint("gemma2")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    add_json(source / "config.json", classifier_from_token=["n", "y"], final_logit_softcapping=0.01)
    assert_refused(source, "the logits of Gemma2ForCausalLM are not the product of hidden states")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_written_directly_they_have_the_bits_of_a_trace(
    precision: str, cross_encoder: Path, language_model: Path, tmp_path: Path
) -> None:
    gate = Gate() if precision == "fp32" else ANY_LOSS
    vllm = {"classifier_from_token": ["no", "yes"], "tie_word_embeddings": False}
    named = changed(language_model, tmp_path / "source", TEMPLATE, **vllm)
    weights = load_file(named / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": table.flip(0)}, named / "model.safetensors")
    cases = {"saved": (cross_encoder, "auto"), "card": (language_model, "rerank")}
    for name, (source, task) in (cases | {"named": (named, "auto")}).items():
        written = direct(source, tmp_path / name, precision, gate=gate, task=task)
        assert (written.task, written.parity.reference) == ("rerank", "numpy")
        traced(source, tmp_path / f"{name}-traced", precision, task=task)
        assert_alike(tmp_path / name, tmp_path / f"{name}-traced")


@pytest.mark.parametrize("kind", ["gemma", "llama", "qwen2"])
def test_other_families(
    kind: str,
    new_checkpoint: Callable[[str], Path],
    add_json: Callable[..., None],
    tmp_path: Path,
) -> None:
    """bge-reranker-v2-gemma answers with a single token, and mxbai-rerank-v2 is a Qwen 2."""
    source = new_checkpoint(kind)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    add_json(source / "config.json", classifier_from_token=["a", "b"])
    written = direct(source, tmp_path / "direct")
    assert written.pair_template is not None
    traced(source, tmp_path / "traced", "fp32")
    assert_alike(tmp_path / "direct", tmp_path / "traced")


def test_heads_of_classifiers_rank(language_model: Path, tmp_path: Path) -> None:
    """A head of one row is the score; of two, the labels have to say which is that of a match."""
    folders = {}
    for count in (1, 2):
        folder = folders[count] = shutil.copytree(language_model, tmp_path / str(count))
        config = transformers.Qwen3Config.from_pretrained(folder, num_labels=count, pad_token_id=0)
        torch.manual_seed(count)
        transformers.Qwen3ForSequenceClassification(config).save_pretrained(folder)
    direct(folders[1], tmp_path / "one", task="rerank")
    weight = load_file(folders[1] / "model.safetensors")["score.weight"]
    written = onnx.load(tmp_path / "one" / GRAPH)
    scores = [numpy_helper.to_array(each) for each in written.graph.initializer]
    assert any(np.array_equal(each.squeeze(), weight[0]) for each in scores)
    with pytest.raises(ExportError, match=r"do not say which row of score\.weight stands"):
        direct(folders[2], tmp_path / "two", task="rerank")
    labels = {"id2label": {"0": "yes", "1": "no"}, "classifier_from_token": ["no", "yes"]}
    named = changed(folders[2], tmp_path / "named", None, **labels)
    assert direct(named, tmp_path / "two").task == "rerank"


@pytest.mark.parametrize("settings", [{"true_token_id": True}, {"false_token_id": "no"}])
def test_answers_that_are_no_tokens_are_refused(
    settings: dict[str, Any], cross_encoder: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(cross_encoder, tmp_path / "source")
    (path,) = source.glob("*LogitScore/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ExportError, match="has no true_token_id, or no other false_token_id"):
        direct(source, tmp_path / "bundle")


def test_no_torch_is_needed(cross_encoder: Path, tmp_path: Path) -> None:
    done = run_blocked("export", cross_encoder, tmp_path / "bundle", "--precision", "fp32")
    assert done.returncode == 0, done.stderr
    assert "written directly from the file, without torch" in done.stderr


def write_ranker(path: Path, model: Any, labels: Sequence[str], template: str) -> Path:
    """As llama.cpp's converter writes Qwen3-Reranker: two rows of its output layer, yes first."""
    _, _, _, fill, _ = MODELS["qwen3"]
    rows = model.lm_head.weight.detach().numpy()[[YES, NO]]

    def metadata(writer: Any) -> None:
        byte_level(writer)
        fill(writer, model.config)
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(labels)
        writer.add_tensor("cls.output.weight", rows)
        writer.add_chat_template([{"name": "rerank", "template": template}])

    def without_head(name: str, values: Any, _config: Any) -> Iterator[tuple[str, Any]]:
        if name != "lm_head.weight":
            yield name, values

    return write_gguf(path, "qwen3", model, metadata, without_head)


@pytest.mark.parametrize("template", [CARD, "q: {query} d: {document}<|end|>"])
def test_gguf_files_rank(template: str, tmp_path: Path, serve: Callable[..., str]) -> None:
    settings = MODELS["qwen3"][2] | {"max_position_embeddings": LONGEST}
    model = make_model("Qwen3ForCausalLM", **settings)
    path = write_ranker(tmp_path / "ranker.gguf", model, ["yes", "no"], template)
    written = direct(path, tmp_path / "bundle")
    assert (written.task, written.labels) == ("rerank", ())
    assert written.pair_template is not None
    assert (written.pair_template == QWEN) == (template == CARD)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "bundle" / "tokenizer.json"))
    expected = []
    for document in DOCUMENTS[:3]:
        text = template.replace("{query}", QUERY).replace("{document}", document)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
        with torch.no_grad():
            expected.append(float(model(ids).logits[0, -1, [YES, NO]].softmax(-1)[0]))
    ranks = rerank(serve(ranker=tmp_path / "bundle"), query=QUERY, texts=DOCUMENTS[:3])
    np.testing.assert_allclose(scores(ranks), expected, atol=TOLERANCE)


@pytest.mark.parametrize("labels", [["yes"], ["yes", "yes"], ["yes", "no", "perhaps"]])
def test_gguf_files_that_do_not_say_what_a_match_is(labels: list[str], tmp_path: Path) -> None:
    model = make_model("Qwen3ForCausalLM", **MODELS["qwen3"][2])
    path, listed = write_ranker(tmp_path / "ranker.gguf", model, labels, CARD), ", ".join(labels)
    with pytest.raises(ExportError, match=f"ranks by 2 rows and the labels {listed};"):
        direct(path, tmp_path / "bundle")
    path = write_ranker(tmp_path / "ranker.gguf", model, ["yes", "no"], CARD)
    with pytest.raises(ExportError, match="cannot be traced"):
        export(str(path), tmp_path / "bundle")


def test_a_gguf_file_whose_int8_loses_too_much_becomes_fp32(tmp_path: Path) -> None:
    """The tracer, which could leave layers as they are, does not know such files."""
    model = make_model("Qwen3ForCausalLM", **MODELS["qwen3"][2])
    path = write_ranker(tmp_path / "ranker.gguf", model, ["yes", "no"], CARD)
    nothing = Gate(max_loss=0.0)
    with pytest.raises(QualityError, match="the maximum is"):
        export_any_way(str(path), tmp_path / "bundle", precision="int8", gate=nothing)
    assert export_any_way(str(path), tmp_path / "bundle", gate=nothing).precision == "fp32"
