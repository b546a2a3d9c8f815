"""GLiNER2.5 checkpoints (gliner2's architecture `boundary`) over HTTP against gliner2's results."""

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from maskdial.masked.tasks.boundary_scores import disjoint
from maskdial_export.checkpoint.boundary_head import BoundaryHead, BoundarySettings
from maskdial_export.checkpoint.gliner2 import load_extractor
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checkpoint.source import GLINER2, Source, find
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.model import load_checkpoint
from maskdial_export.session import Loaded
from tests.export.test_gliner import SHAPE, ask, make_tokenizer, refusal
from tests.export.test_gliner2 import SCHEMAS, TEXTS, TOLERANCE, check, expect

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from gliner2.configuration import BoundaryHeadSettings, ExtractorConfig
    from gliner2.inference.overlap import resolve_overlaps
    from gliner2.models.boundary.engine import BoundaryExtractor
    from gliner2.models.boundary.model import BoundaryHead as Reference

SMALL = {"boundary_dim": 8, "pair_dim": 8, "content_dim": 4}
# By name, what differs from gliner2's defaults
KINDS: dict[str, dict[str, Any]] = {
    "per_query": {"pair_temperature": 2.0, "classification_temperature": 0.5},
    "shared": {"candidate_pool": "shared", "abstention_threshold": 0.6},
}


# Those that change what the head computes
HEADS: list[dict[str, Any]] = [
    {},
    {
        "enable_rotary_endpoints": True,
        "endpoint_difference_features": True,
        "query_conditioned_inside_weight": True,
        "boundary_attention_layers": 2,
        "boundary_attention_window": 2,
    },
    {
        "boundary_top_k_alpha": 0.3,
        "boundary_top_k_max": 24,
        "boundary_attention_layers": 1,
        "start_top_k": 4,
        "end_top_k": 4,
        "reranker_endpoint_compat": False,
    },
    {
        "enable_span_content": True,
        "bidirectional_proposals": False,
        "use_inside_evidence": False,
        "candidate_budget": 20,
    },
    {"candidate_pool": "shared"},
    {
        "candidate_pool": "shared",
        "enable_span_content": True,
        "pool_boundary_top_k": 6,
        "pool_size": 20,
        "min_pool_per_query": 3,
        "use_inside_evidence": False,
    },
]
ASKED = {name: SCHEMAS[name] for name in ("entities", "described", "structures", "labels")}
ASKED["all"] = ASKED["entities"] | ASKED["structures"] | ASKED["labels"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gliner25")


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Any]:
    """gliner2's models; their checkpoints are in ``folder``."""
    size = make_tokenizer(folder / "tokenizer")
    shape = SHAPE | {"vocab_size": size, "max_position_embeddings": 512}
    models = {}
    for name, settings in KINDS.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
        config = ExtractorConfig(
            model_name=str(folder / "tokenizer"),
            architecture="boundary",
            boundary_head=SMALL | settings,
        )
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = BoundaryExtractor(
                config, encoder_config=CONFIG_MAPPING["bert"](**shape), tokenizer=tokenizer
            ).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
            model.save_pretrained(folder / name)
        models[name] = model
    return models


@pytest.fixture(scope="module")
def url(
    references: dict[str, Any], folder: Path, start_server: Callable[..., Any]
) -> Iterator[str]:
    bundles = {name: folder / f"{name}-bundle" for name in KINDS}
    for name, bundle in bundles.items():
        export(str(folder / name), bundle)
    running = start_server(models=bundles, max_batch_inputs=64)
    yield running.url
    running.stop()


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["entities", "described", "structures", "labels", "all"])
def test_what_is_found_is_what_gliner2_finds(
    url: str, references: dict[str, Any], kind: str, name: str
) -> None:
    number = 0
    for threshold in (0.0, 0.3, 0.5, 0.9):
        settings = {"include_confidence": True, "include_spans": True, "threshold": threshold}
        answers = ask(url, "/extract", TEXTS, schema=ASKED[name], model=kind, **settings)
        for text, answer in zip(TEXTS, answers, strict=True):
            check(expect(references[kind], text, ASKED[name], **settings), answer)
            number += json.dumps(answer).count("confidence")
    assert number > 15


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
def test_entities_of_one_label(url: str, references: dict[str, Any], kind: str) -> None:
    settings = {"threshold": 0.01, "model": kind, "candidate_labels": ["person"]}
    answers = ask(url, "/token-classify", TEXTS, **settings)
    for text, answer in zip(TEXTS, answers, strict=True):
        found = references[kind].extract_entities(
            text, ["person"], include_confidence=True, include_spans=True, threshold=0.01
        )
        expected = sorted(found["entities"]["person"], key=lambda each: each["start"])
        assert [(each["start"], each["end"], each["word"]) for each in answer] == [
            (each["start"], each["end"], each["text"]) for each in expected
        ]
        scores = [each["confidence"] for each in expected]
        assert [each["score"] for each in answer] == pytest.approx(scores, abs=TOLERANCE)
    assert sum(map(len, answers)) > 3


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
def test_what_entities_are_found_is_redacted(url: str, kind: str) -> None:
    settings = {"threshold": 0.01, "model": kind}
    found = ask(url, "/token-classify", TEXTS, candidate_labels=["person"], **settings)
    redacted = ask(url, "/redact", TEXTS, labels=["person"], **settings)
    places = [[(each["start"], each["end"]) for each in text] for text in found]
    replaced = [
        [(each["start"], each["end"]) for each in text["replacements"]] for text in redacted
    ]
    assert replaced == places
    assert any(places)


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_scored_as_by_gliner2(url: str, references: dict[str, Any], kind: str) -> None:
    labels = ["calm", "angry", "sad"]
    task = {"classification": {"labels": labels, "multi_label": True, "cls_threshold": 0.0}}
    answers = ask(
        url, "/zero-shot-classify", TEXTS, candidate_labels=labels, multi_label=True, model=kind
    )
    for text, answer in zip(TEXTS, answers, strict=True):
        found = references[kind].classify_text(text, task, include_confidence=True)
        expected = {each["label"]: each["confidence"] for each in found["classification"]}
        scores = {each["label"]: each["score"] for each in answer}
        assert scores == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.zoo
def test_an_answer_is_the_same_in_company(url: str) -> None:
    settings = {"threshold": 0.0, "include_confidence": True, "include_spans": True}
    requests = [
        (kind, text, schema) for kind in KINDS for text in TEXTS for schema in ASKED.values()
    ]

    def one(request: tuple[str, str, Any]) -> Any:
        kind, text, schema = request
        return ask(url, "/extract", text, schema=schema, model=kind, **settings)

    alone = [one(request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(one, requests)) == alone


@pytest.mark.zoo
def test_long_texts_are_read_in_windows(url: str) -> None:
    text = " ".join(["alice", "paris", "sang", "in", "Rome,", "x"] * 120)
    settings = {"candidate_labels": ["person", "city"], "threshold": 0.01, "model": "per_query"}
    answer = ask(url, "/token-classify", text, **settings)
    assert answer[-1]["end"] > len(text) // 2
    nested = ask(url, "/token-classify", text, flat_ner=False, **settings)
    assert len(nested) > len(answer)


@pytest.mark.zoo
def test_relations_are_refused(url: str) -> None:
    schema = SCHEMAS["relations"]
    sentence = refusal(url, "/extract", "Alice sang.", schema=schema, model="shared")
    assert "model 'shared' finds no relations; leave them out" in sentence


@pytest.mark.zoo
def test_the_evaluation_of_a_precision_compares_boundaries(url: str, folder: Path) -> None:
    source = find(str(folder / "shared"), "auto", revision=None, allow_pickle=False)
    evaluation = load_checkpoint(source).evaluation(read_sample(None))
    best = evaluation.answers(Loaded(folder / "shared-bundle" / "model.onnx"))[:, 0].tolist()
    assert set(best) <= set(range(8))
    assert len(set(best)) > 2
    assert len(best) > 300


@pytest.mark.parametrize("settings", HEADS)
def test_the_head_is_gliner2s(settings: dict[str, Any]) -> None:
    """Of each setting that changes it, for texts shorter and longer than what is chosen."""
    torch.manual_seed(0)
    reference = Reference(16, BoundaryHeadSettings(**SMALL | settings)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    stored = {f"boundary_head.{name}": each for name, each in reference.state_dict().items()}
    head = BoundaryHead(stored, BoundarySettings.read(SMALL | settings)).eval()
    for num_words, num_fields in ((1, 1), (2, 3), (40, 4)):
        words, fields = torch.randn(num_words, 16), torch.randn(num_fields, 16)
        masks = (torch.ones(1, each, dtype=torch.bool) for each in (num_words, num_fields))
        with torch.no_grad():
            expected = reference(words[None], next(masks), fields[None], next(masks)).candidates
            found = head(words, fields, torch.zeros(0, 2, dtype=torch.int64))
        spans, logits = expected.indices[0], expected.pair_logits[0]
        for field in range(num_fields):
            kept = expected.valid_mask[0, field]
            theirs = dict(
                zip(_pairs(spans[field, kept]), logits[field, kept].tolist(), strict=True)
            )
            own = found[field, found[field, :, 1] > 0]
            ours = dict(zip(_pairs(own[:, :2]), own[:, 2].tolist(), strict=True))
            assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-5)


def test_spans_that_overlap_are_resolved_as_in_gliner2() -> None:
    """Scores of few values, so that many totals are equal."""
    generator = random.Random(0)
    for _ in range(300):
        spans = list({(start, start + generator.randint(1, 4)) for start in range(8)})
        spans += [(start, start + 5) for start in generator.sample(range(8), 3)]
        scores = [generator.choice([0.25, 0.5, 1.0]) for _ in spans]
        found = [(score, *span) for score, span in zip(scores, spans, strict=True)]
        score, start, end = map(itemgetter, range(3))
        expected = resolve_overlaps(found, "flat", score=score, start=start, end=end)
        starts, ends = np.array(spans).T
        kept = disjoint(starts, ends, np.array(scores))
        assert sorted(found[at] for at in kept) == sorted(expected)


def _pairs(spans: torch.Tensor) -> list[tuple[int, int]]:
    return [(int(start), int(end)) for start, end in spans.tolist()]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"candidate_pool": "both"}, "has candidate_pool 'both' in config.json"),
        ({"overlap_policy": "nested"}, "has overlap_policy 'nested'"),
        ({"adaptive_threshold": True}, "has adaptive_threshold True"),
        ({"content_soft_max_pool": True}, "has content_soft_max_pool True"),
        ({"boundary_dim": 16}, "do not fit its config.json"),
        ({"enable_span_content": True}, "lacks the weight boundary_head.pair_scorer.content"),
    ],
)
def test_checkpoints_that_are_not_supported(
    references: dict[str, Any], folder: Path, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(folder / "per_query", copy)
    config = json.loads((copy / "config.json").read_text())
    config["boundary_head"] |= change
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=sentence):
        load_extractor(Source("it", copy, GLINER2, "extract"))
