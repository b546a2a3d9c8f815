"""Metrics: every series exists at zero from the start, with labels from closed sets."""

from maskdial import errors
from maskdial.metrics import OUTCOMES, Metrics


def test_every_error_has_an_outcome() -> None:
    classes = errors.MaskdialError.__subclasses__()
    assert {each.error_type for each in classes} <= set(OUTCOMES)


def test_every_series_of_a_model_is_declared_at_zero() -> None:
    metrics = Metrics(("/generate",))
    metrics.declare("hybrid", "hybrid:full")
    for outcome in OUTCOMES:
        labels = {"route": "/generate", "model": "hybrid", "outcome": outcome}
        assert metrics.registry.get_sample_value("maskdial_requests_total", labels) == 0
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    values = {s.name: s.value for s in samples if s.labels.get("model") == "hybrid:full"}
    created = {name: value for name, value in values.items() if not name.endswith("_created")}
    assert len(created) > 20
    assert set(created.values()) == {0}


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
