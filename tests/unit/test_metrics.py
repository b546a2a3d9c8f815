"""Metrics: labels from closed sets, a model's series at zero from the start, and small pages."""

from typing import get_args

from prometheus_client import generate_latest

from maskdial import errors
from maskdial.metrics import OUTCOMES, LoadOutcome, Metrics, ModelState, UnloadReason

ROUTES = tuple(f"/route-{number}" for number in range(35))


def names(metrics: Metrics, **labels: str) -> set[str]:
    """Of all series with these labels."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {sample.name for sample in samples if labels.items() <= sample.labels.items()}


def test_every_error_has_an_outcome() -> None:
    classes = errors.MaskdialError.__subclasses__()
    assert {each.error_type for each in classes} <= set(OUTCOMES)


def test_every_series_of_a_model_is_declared_at_zero() -> None:
    metrics = Metrics()
    metrics.declare("hybrid")
    metrics.declare_masked("hybrid:full")
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    for model, least in (("hybrid", 30), ("hybrid:full", 15)):
        values = {s.name: s.value for s in samples if s.labels.get("model") == model}
        assert len(values) > least
        assert set(values.values()) == {0}


def test_a_masked_model_has_no_series_of_generation() -> None:
    metrics = Metrics()
    metrics.declare("causal")
    metrics.declare_masked("masked")
    causal, masked = names(metrics, model="causal"), names(metrics, model="masked")
    assert {name for name in masked - causal if "answer_cache" not in name} == set()
    only = causal - masked
    assert {name for name in only if "kv_cache" in name or "draft" in name or "first" in name}
    assert not {name for name in only if "batch" in name or "queue" in name or "running" in name}


def test_no_series_say_when_others_were_created() -> None:
    metrics = Metrics()
    metrics.declare("m")
    metrics.count_request("/generate", "m", "ok", 1.0)
    assert b"_created" not in metrics.render()


def test_a_routes_series_begin_with_its_first_request() -> None:
    metrics = Metrics()
    metrics.declare("m")
    assert "maskdial_requests_total" not in names(metrics)
    metrics.count_request("/generate", "m", "ok", 0.5)

    def value(outcome: str) -> float | None:
        labels = {"route": "/generate", "model": "m", "outcome": outcome}
        return metrics.registry.get_sample_value("maskdial_requests_total", labels)

    assert value("ok") == 1
    # Those that rules look for are there before the first of them: it would not be in the rate.
    for outcome in ("internal", "inference", "generation", "overloaded", "unavailable", "timeout"):
        assert value(outcome) == 0
    assert value("validation") is None
    metrics.count_request("/generate", "m", "validation", 0.5)
    assert value("validation") == 1
    assert value("ok") == 1


def test_a_keys_series_begin_with_its_first_request_and_end_with_it() -> None:
    metrics = Metrics()
    metrics.count_key("alice", "ok")
    metrics.count_key("alice", "unauthorized")
    metrics.count_key("bob", "ok")
    metrics.forget_other_keys(["bob", "carol"])
    assert not names(metrics, key="alice")
    assert names(metrics, key="bob")
    assert not names(metrics, key="carol")
    metrics.count_key("alice", "ok")
    labels = {"key": "alice", "outcome": "ok"}
    assert metrics.registry.get_sample_value("maskdial_key_requests_total", labels) == 1


def test_a_bundle_that_was_never_loaded_has_a_state_only() -> None:
    metrics = Metrics()
    metrics.declare_name("m")
    assert names(metrics, model="m") == {"maskdial_model_state"}
    metrics.count_load("m", "ok")
    for outcome in get_args(LoadOutcome):
        assert names(metrics, model="m", outcome=outcome) == {"maskdial_model_loads_total"}
    for reason in get_args(UnloadReason):
        assert names(metrics, model="m", reason=reason) == {"maskdial_model_unloads_total"}
    metrics.forget_name("m")
    assert not names(metrics, model="m")
    metrics.declare_name("m")
    assert len({s for s in get_args(ModelState) if names(metrics, model="m", state=s)}) == 5
    metrics.count_load("m", "failed")
    assert names(metrics, model="m", outcome="ok")


def test_names_that_come_and_go_leave_nothing() -> None:
    """Adapters are loaded under any names, and requests end after their adapter is gone."""
    metrics = Metrics()
    metrics.declare_name("base")
    metrics.declare("base")
    metrics.declare("base:full")
    metrics.count_request("/generate", "base", "ok", 0.5)
    metrics.count_request("/generate", "", "validation", 0.5)
    before = metrics.render().count(b"\n")
    for number in range(50):
        name = f"base{number}"
        metrics.declare_name(name)
        metrics.declare(name)
        metrics.declare_masked(f"{name}:full")
        metrics.count_load(name, "ok")
        metrics.count_request("/generate", name, "ok", 0.5)
        metrics.count_request("/fill-mask", f"{name}:full", "ok", 0.5)
        metrics.count_batch_request(name, "ok")
        metrics.count_unload(name, "request")
        metrics.forget_name(name)
        assert not names(metrics, model=name)
        metrics.count_request("/generate", name, "validation", 0.5)
        metrics.count_batch_request(name, "validation")
        metrics.count_load(name, "failed")
        metrics.count_unload(name, "room")
        assert not names(metrics, model=name)
        assert not names(metrics, model=f"{name}:full")
    # One of batches, of the empty model
    assert metrics.render().count(b"\n") <= before + 3
    labels = {"route": "/generate", "model": "", "outcome": "validation"}
    assert metrics.registry.get_sample_value("maskdial_requests_total", labels) == 51
    assert names(metrics, model="base:full")


def test_a_page_of_many_models_and_keys_is_small() -> None:
    """16 models had 2.9 MB, whoever asked for them, and 10,000 keys 22 MB."""
    metrics = Metrics()
    for number in range(16):
        metrics.declare_name(f"model-{number}")
        metrics.declare(f"model-{number}")
        metrics.count_load(f"model-{number}", "ok")
        for route in ROUTES[:3]:
            metrics.count_request(route, f"model-{number}", "ok", 0.1)
    page = metrics.render()
    assert len(page) < 400_000
    for number in range(1000):
        metrics.declare_name(f"unloaded-{number}")
        metrics.forget_name(f"unloaded-{number}")
    assert metrics.render().count(b"\n") == page.count(b"\n")


def test_the_page_is_what_the_registry_has() -> None:
    metrics = Metrics()
    metrics.declare("m")
    metrics.count_request("/generate", "m", "ok", 0.5)
    page, whole = metrics.render(), generate_latest(metrics.registry)
    lines = [[line for line in each.splitlines() if b"maskdial" in line] for each in (page, whole)]
    assert lines[0] == lines[1]
    assert len(lines[0]) > 200


def test_a_pass_and_a_step() -> None:
    metrics = Metrics()
    model = metrics.declare("m")
    model.observe_pass(0.5, num_rows=2, num_tokens=8, padded_tokens=10)
    model.observe_step(schedule=1, run=2, sample=3, publish=4)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"maskdial_{name}", {"model": "m", **labels})

    assert value("inference_duration_seconds_sum") == 0.5
    assert value("batch_size_sum") == 2
    assert value("batch_tokens_sum") == 8
    assert value("padding_ratio_sum") == 1.25
    phases = ("schedule", "run", "sample", "publish")
    assert [value("engine_seconds_total", phase=phase) for phase in phases] == [1, 2, 3, 4]
