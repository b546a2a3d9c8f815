"""What an engine of a test has reported to Prometheus so far, and what it takes passes to cost."""

from maskdial.causal.drafts.policy import PassCosts, StepCosts
from maskdial.metrics import Metrics


class EngineMetrics:
    """The numbers of one engine, read from its metrics."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._registry = metrics.registry
        self._model = model

    @property
    def num_running(self) -> int:
        return self.value("requests_running")

    @property
    def num_waiting(self) -> int:
        return self.value("queue_size")

    @property
    def cancelled(self) -> dict[str, int]:
        """How many sequences were dropped unfinished, by reason."""
        reasons = ("disconnect", "timeout", "shutdown")
        counts = {reason: self.value("cancelled_total", reason=reason) for reason in reasons}
        return {reason: count for reason, count in counts.items() if count}

    def value(self, name: str, **labels: str) -> int:
        return int(self.ratio(name, **labels))

    def ratio(self, name: str, **labels: str) -> float:
        labels["model"] = self._model
        value = self._registry.get_sample_value(f"maskdial_{name}", labels)
        assert value is not None, name
        return value


class SteadyCosts(PassCosts):
    """Costs that no clock changes, so that the same drafts are verified each time."""

    def __init__(self) -> None:
        super().__init__()
        super().observe(1, 0, 1.0)

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        assert num_rows > 0
        assert num_drafts >= 0
        assert seconds >= 0


class SteadySteps(StepCosts):
    """A draft model's steps, each of which takes a twentieth of a pass of `SteadyCosts`."""

    def __init__(self) -> None:
        super().__init__()
        super().observe(1, 0.05)

    def observe(self, num_tokens: int, seconds: float) -> None:
        assert num_tokens > 0
        assert seconds >= 0
