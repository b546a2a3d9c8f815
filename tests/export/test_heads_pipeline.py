"""Heads of less common kinds over HTTP, against torch on the same weights."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer

from maskdial_export.export import export
from tests.export.zoo import LABELS

TOLERANCE = 1e-6  # random weights give choices that are almost equally likely
# name of the model -> checkpoint of the zoo
MODELS = {
    "choice": "bert-multiple-choice",
    "choice-roberta": "roberta-multiple-choice",
    "detector": "electra-detect",
    "pretrained": "bert-pretraining",
    "reward": "llama-reward",
    "judge": "llama-classify",
}
TEXTS = ["the old king.", "a", "she said so, and so did he, time and again."]
CHOICES = ["went home", "x", "was king of all the land, and of the sea"]


class Served:
    """The bundles behind a server, and the checkpoints in torch."""

    def __init__(self, url: str, bundles: dict[str, Path], models: dict[str, Any]) -> None:
        self.url = url
        self.models = models
        self._bundles = bundles

    def post(self, route: str, status: int = 200, **body: object) -> Any:
        reply = httpx.post(f"{self.url}{route}", json=body, timeout=60)
        assert reply.status_code == status, reply.text
        return reply.json()

    def batch(self, name: str, texts: Sequence[str | tuple[str, str]]) -> dict[str, torch.Tensor]:
        """torch's inputs for texts or pairs of very different lengths, padded together."""
        tokenizer = Tokenizer.from_file(str(self._bundles[name] / "tokenizer.json"))
        config = self.models[name].config
        tokenizer.enable_padding(pad_id=config.pad_token_id)
        encodings = tokenizer.encode_batch(texts)
        batch = {
            "input_ids": torch.tensor([each.ids for each in encodings]),
            "attention_mask": torch.tensor([each.attention_mask for each in encodings]),
        }
        # RoBERTa's tokenizer does not tell the model the parts of a pair.
        if getattr(config, "type_vocab_size", 1) > 1 and config.model_type != "roberta":
            batch["token_type_ids"] = torch.tensor([each.type_ids for each in encodings])
        return batch

    def torch(self, name: str, texts: Sequence[str | tuple[str, str]]) -> Any:
        """torch's output for the texts."""
        with torch.no_grad():
            return self.models[name](**self.batch(name, texts))


@pytest.fixture(scope="module")
def served(
    bundle: Callable[[str], Path],
    checkpoint: Callable[[str], Path],
    load_reference: Callable[[Path], Any],
    made_once: Callable[..., Path],
    serve: Callable[..., str],
) -> Served:
    bundles = {name: bundle(of) for name, of in MODELS.items()}
    models = {name: load_reference(checkpoint(of)) for name, of in MODELS.items()}
    source = str(checkpoint("bert-pretraining"))
    bundles["next"] = made_once(
        "bundles/bert-pretraining-next", lambda folder: export(source, folder, task="classify")
    )
    return Served(serve(**bundles), bundles, models)


def error(reply: dict[str, Any]) -> str:
    return str(reply["error"])


@pytest.mark.parametrize("name", ["choice", "choice-roberta"])
@pytest.mark.parametrize("template", [None, "so he {}, he said"])
def test_choices_have_the_probabilities_of_torch(
    served: Served, name: str, template: str | None
) -> None:
    parameters: dict[str, Any] = {"candidate_labels": CHOICES}
    parameters |= {} if template is None else {"hypothesis_template": template}
    body: dict[str, Any] = {"inputs": TEXTS, "parameters": parameters}
    answers = served.post("/zero-shot-classify", model=name, **body)
    for text, answer in zip(TEXTS, answers, strict=True):
        pairs = [(text, (template or "{}").replace("{}", choice)) for choice in CHOICES]
        batch = served.batch(name, pairs)
        with torch.no_grad():  # (questions, choices, length)
            output = served.models[name](**{key: each[None] for key, each in batch.items()})
        expected = dict(zip(CHOICES, output.logits[0].softmax(-1).tolist(), strict=True))
        assert [each["label"] for each in answer] == sorted(
            CHOICES, key=lambda choice: -expected[choice]
        )
        for each in answer:
            assert each["score"] == pytest.approx(expected[each["label"]], abs=TOLERANCE)
        assert answer[0]["score"] > answer[-1]["score"] + 100 * TOLERANCE
    assert served.post(f"/models/{name}", **body) == answers


def test_inference_client_chooses(served: Served) -> None:
    client = InferenceClient(model=f"{served.url}/models/choice")
    chosen = client.zero_shot_classification(TEXTS[0], CHOICES)
    parameters = {"candidate_labels": CHOICES}
    body: dict[str, Any] = {"model": "choice", "inputs": TEXTS[0], "parameters": parameters}
    assert [(each.label, each.score) for each in chosen] == [
        (each["label"], each["score"]) for each in served.post("/zero-shot-classify", **body)
    ]


def test_a_choice_model_does_nothing_else(served: Served) -> None:
    parameters = {"candidate_labels": CHOICES, "multi_label": True}
    body: dict[str, Any] = {"model": "choice", "inputs": "a"}
    refusal = error(served.post("/zero-shot-classify", 422, **body, parameters=parameters))
    assert refusal.startswith("parameters.multi_label: model 'choice' chooses one of the labels")
    refusal = error(served.post("/classify", 422, **body))
    assert "cannot do classify; it does zero-shot-classify" in refusal
    refusal = error(served.post("/rerank", 422, model="choice", query="a", texts=["b"]))
    assert "cannot do rerank" in refusal
    (listed,) = (
        each
        for each in httpx.get(f"{served.url}/models", timeout=60).json()
        if each["name"] == "choice"
    )
    assert listed["tasks"] == ["zero-shot-classify", "tokenize"]


def test_replaced_tokens_have_the_probabilities_of_torch(served: Served) -> None:
    parameters = {"aggregation_strategy": "none"}
    body: dict[str, Any] = {"model": "detector", "parameters": parameters}
    answers = served.post("/token-classify", inputs=TEXTS, **body)
    probabilities = served.torch("detector", TEXTS).logits.sigmoid()
    for answer, of in zip(answers, probabilities.tolist(), strict=True):
        for tag in answer:
            replaced = of[tag["index"]]
            expected = "REPLACED" if replaced > 0.5 else "ORIGINAL"
            assert tag["entity"] == expected
            assert tag["score"] == pytest.approx(max(replaced, 1 - replaced), abs=TOLERANCE)
    tags = [tag for answer in answers for tag in answer]
    assert len(tags) == sum(len(re.sub(r"\s", "", text)) for text in TEXTS)  # tokens are letters
    assert {tag["entity"] for tag in tags} == {"ORIGINAL", "REPLACED"}

    body["parameters"] = {"ignore_labels": ["ORIGINAL"]}
    spans = served.post("/token-classify", inputs=TEXTS[2], **body)
    assert {each["entity_group"] for each in spans} == {"REPLACED"}
    within = {place for each in spans for place in range(each["start"], each["end"])}
    for tag in answers[2]:
        assert (tag["entity"] == "REPLACED") == (tag["start"] in within)


def test_the_next_sentence_head_of_pretraining_classifies_pairs(served: Served) -> None:
    pairs = [(text, choice) for text in TEXTS for choice in CHOICES]
    items = [{"text": text, "text_pair": choice} for text, choice in pairs]
    answers = served.post("/classify", model="next", inputs=items)
    logits = served.torch("pretrained", pairs).seq_relationship_logits
    for answer, expected in zip(answers, logits.softmax(-1).tolist(), strict=True):
        scores = {each["label"]: each["score"] for each in answer}
        named = dict(zip(("isNext", "notNext"), expected, strict=True))
        assert scores == pytest.approx(named, abs=TOLERANCE)


def test_the_other_head_of_pretraining_fills_masks(served: Served) -> None:
    texts = ["the old k[MASK]ng.", "[MASK]"]
    answers = served.post("/fill-mask", inputs=texts, parameters={"top_k": 3})
    batch = served.batch("pretrained", texts)
    logits = served.torch("pretrained", texts).prediction_logits[batch["input_ids"] == 4]
    for answer, expected in zip(answers, logits.softmax(-1), strict=True):
        best = expected.topk(3)
        assert [each["token"] for each in answer] == best.indices.tolist()
        scores = [each["score"] for each in answer]
        assert scores == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def test_a_causal_backbone_classifies(served: Served) -> None:
    """`LlamaForSequenceClassification` reads the last token of each text, whatever its batch."""
    answers = served.post("/classify", model="judge", inputs=TEXTS)
    probabilities = served.torch("judge", TEXTS).logits.softmax(-1)
    for text, answer, of in zip(TEXTS, answers, probabilities.tolist(), strict=True):
        scores = {each["label"]: each["score"] for each in answer}
        named = dict(zip(LABELS.values(), of, strict=True))
        assert scores == pytest.approx(named, abs=TOLERANCE)
        assert served.post("/classify", model="judge", inputs=text) == [answer]


def test_a_reward_model_ranks(served: Served) -> None:
    pairs = [(TEXTS[0], choice) for choice in CHOICES]
    logits = served.torch("reward", pairs).logits[:, 0]
    body: dict[str, Any] = {"query": TEXTS[0], "texts": CHOICES}
    ranks = served.post("/rerank", model="reward", raw_scores=True, **body)
    order = logits.argsort(descending=True).tolist()
    assert [each["index"] for each in ranks] == order
    assert [each["score"] for each in ranks] == pytest.approx(logits[order].tolist(), abs=TOLERANCE)
    items = [{"text": text, "text_pair": choice} for text, choice in pairs]
    rewards = served.post("/classify", model="reward", inputs=items)
    assert [[each["score"]] for (each,) in rewards] == pytest.approx(
        logits.sigmoid()[:, None].numpy(), abs=TOLERANCE
    )
