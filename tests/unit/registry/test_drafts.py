"""A causal model is loaded with what it speculates with."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from maskdial.bundle.bundle import load_bundle
from maskdial.causal.drafts import model as draft_model
from maskdial.causal.drafts import speculation
from maskdial.causal.model import CausalModel
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.config import Config
from maskdial.errors import ConfigError
from maskdial.kernels.installed import find_kernels
from maskdial.metrics import DraftKind, Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.drafts import _has_same_tokens, drafted_token_bytes
from maskdial.registry.loading import load_model
from tests.engine_metrics import EngineMetrics, SteadyCosts, SteadySteps

HYBRID, SENTIMENT = STARTER_FOLDER / "hybrid", STARTER_FOLDER / "sentiment"
needs_kernels = pytest.mark.skipif(find_kernels("auto") is None, reason="no kernels are built")


@pytest.fixture(autouse=True)
def steady_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of a busy machine, drafts may cost more than they save, and there are none."""
    monkeypatch.setattr(speculation, "PassCosts", SteadyCosts)
    monkeypatch.setattr(draft_model, "StepCosts", SteadySteps)


def config_of(**settings: Any) -> Config:
    models = {"large": HYBRID, "small": HYBRID, "masked": SENTIMENT}
    return Config(models=models, slots=2, threads=1, **settings)


def write(
    config: Config, prompt: str = "Once upon a time", folder: Path = HYBRID, num_tokens: int = 40
) -> tuple[Any, Any]:
    """A text, and the numbers of the engine that wrote it."""
    metrics = Metrics()
    model = load_model("large", folder, config, metrics)
    assert isinstance(model, CausalModel)

    async def main() -> list[Any]:
        given = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        sequence = Sequence(model.tokenizer.encode(prompt).ids, given, seed=3)
        return [(event.token_id, event.logprob) async for event in model.engine.stream(sequence)]

    try:
        return asyncio.run(main()), EngineMetrics(metrics, "large")
    finally:
        model.stop()


@pytest.fixture(scope="module")
def plain() -> Any:
    text, numbers = write(config_of(speculative_tokens=0))
    assert num_drafts(numbers) == {}
    return text


def num_drafts(numbers: EngineMetrics) -> dict[str, int]:
    kinds = get_args(DraftKind)
    counts = {k: numbers.value("speculative_draft_tokens_total", kind=k) for k in kinds}
    return {kind: count for kind, count in counts.items() if count}


def test_what_drafts_has_a_cache_of_its_own() -> None:
    bundle = load_bundle("large", HYBRID)
    assert bundle.manifest.kv is not None
    session: Any = SimpleNamespace(is_exact=True, kv_cache=None)
    token = bundle.manifest.kv.bytes_per_token
    assert drafted_token_bytes(bundle, session, config_of(draft="small")) == token
    assert drafted_token_bytes(bundle, session, config_of(draft="nowhere")) == 0
    assert drafted_token_bytes(bundle, session, config_of()) == 0
    session.is_exact = False
    assert drafted_token_bytes(bundle, session, config_of(draft="small")) == 0


@needs_kernels
def test_a_served_model_drafts_for_another(plain: Any) -> None:
    """Here the same one, so that all its drafts are right."""
    text, numbers = write(config_of(draft="small"))
    assert text == plain
    assert num_drafts(numbers)["model"] > 0
    accepted = numbers.value("speculative_accepted_tokens_total", kind="model")
    assert accepted == num_drafts(numbers)["model"]


@needs_kernels
def test_without_a_setting_what_repeats_itself_is_drafted() -> None:
    text, numbers = write(config_of(), num_tokens=240)  # goes round in circles
    assert text == write(config_of(speculative_tokens=0), num_tokens=240)[0]
    assert "model" not in num_drafts(numbers)
    assert num_drafts(numbers)["prompt"] > 0


def test_without_the_kernels_nothing_is_drafted_unless_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, numbers = write(config_of(kernels="off"), num_tokens=240)
    assert num_drafts(numbers) == {}
    asked = config_of(kernels="off", speculative_tokens=8, draft="small")
    with caplog.at_level(logging.WARNING, "maskdial.models"):
        _, numbers = write(asked, num_tokens=240)
    assert num_drafts(numbers).keys() == {"prompt"}
    assert "runs without the draft model small" in caplog.text


@needs_kernels
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nobody",
            "--draft nobody: there is no such model; serve it as well (--model nobody=PATH)",
        ),
        ("masked", "--draft masked: it is no causal model, so it cannot draft"),
    ],
)
def test_a_model_that_cannot_draft_ends_the_load(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write(config_of(draft=name))
    assert words in caught.value.message


@needs_kernels
@pytest.mark.parametrize(("checkpoint", "kind"), [("circling", "mtp"), ("circling_eagle", "eagle")])
def test_a_model_drafts_by_what_its_bundle_has(
    checkpoint: str, kind: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(checkpoint) / "bundle"
    # Random weights: the cache's int16 moves some activations to other int8 numbers
    settings: dict[str, Any] = {"golden_check": "warn"}
    plain, _ = write(config_of(**settings, speculative_tokens=0), folder=folder)
    text, numbers = write(config_of(**settings), folder=folder)
    assert text == plain
    assert num_drafts(numbers)[kind] > 0
    # One of another vocabulary takes its place.
    _, numbers = write(config_of(**settings, draft="small"), folder=folder)
    assert kind not in num_drafts(numbers)


def test_vocabularies_are_compared_token_by_token(hybrid_copy: Path) -> None:
    hybrid, sentiment = load_bundle("a", HYBRID), load_bundle("b", SENTIMENT)
    assert _has_same_tokens(hybrid, hybrid)
    assert not _has_same_tokens(hybrid, sentiment)
    assert not _has_same_tokens(hybrid, load_bundle("c", hybrid_copy))


@pytest.fixture
def hybrid_copy(tmp_path: Path) -> Path:
    """The starter model with two tokens that have changed places."""
    import json
    import shutil

    from maskdial.bundle.bundle import hash_files, write_manifest

    bundle = load_bundle("hybrid", HYBRID)
    for name in bundle.manifest.files:
        shutil.copyfile(HYBRID / name, tmp_path / name)
    file = tmp_path / bundle.tokenizer.name
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    one, other = list(vocab)[500:502]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(content), encoding="utf-8")
    files = hash_files(tmp_path, list(bundle.manifest.files))
    write_manifest(tmp_path, bundle.manifest.model_copy(update={"files": files}))
    return tmp_path
