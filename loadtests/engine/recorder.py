"""Recorder: keeps what the engine reports of its steps."""

from dataclasses import dataclass, fields

from maskdial.metrics import Metrics, ModelMetrics

_MODEL = "measured"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the model: its time in seconds, its rows and their tokens without padding."""

    seconds: float
    num_rows: int
    num_tokens: int

    @property
    def reads_prompt(self) -> bool:
        """Whether it reads prompts of more than one token each; else it is a decode step."""
        return self.num_tokens > self.num_rows


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the engine; times in seconds."""

    schedule: float
    run: float
    sample: float
    publish: float
    passes: tuple[Pass, ...]

    @property
    def total(self) -> float:
        return self.schedule + self.run + self.sample + self.publish

    @property
    def own(self) -> float:
        """The engine's own time: everything but `run`."""
        return self.schedule + self.sample + self.publish

    @property
    def around_passes(self) -> float:
        """What `run` took beside the model's passes: copies, and work on grammars begun."""
        return self.run - sum(each.seconds for each in self.passes)

    @property
    def num_decoded(self) -> int:
        """The rows of the decode step, if nothing else ran; else 0."""
        if len(self.passes) != 1 or self.passes[0].reads_prompt:
            return 0
        return self.passes[0].num_rows


class Recorder:
    """Keeps the engine's steps, and reads its other metrics. The engine's thread writes to it.

    A step is recorded just after its tokens were published, so the last step of a text may be
    recorded after the text's reader has it all.
    """

    def __init__(self) -> None:
        registry = Metrics()
        bound = registry.declare(_MODEL)
        values = {each.name: getattr(bound, each.name) for each in fields(bound)}
        self.metrics = RecordedMetrics(**values, recorder=self)
        """What an engine reports to."""
        self.peak_kv_bytes = 0
        """Most bytes of keys and values in use after a step."""
        self._registry = registry.registry
        self._steps: list[Step] = []
        self._passes: list[Pass] = []

    @property
    def num_open(self) -> int:
        """Sequences that wait or run."""
        return self._value("queue_size") + self._value("requests_running")

    @property
    def num_drafts(self) -> int:
        """Draft tokens so far."""
        return self._value("speculative_draft_tokens_total")

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted so far."""
        return self._value("speculative_accepted_tokens_total")

    @property
    def num_hit(self) -> int:
        """Prompt tokens that the prefix cache had so far."""
        return self._value("prefix_cache_hits_total")

    def take_steps(self) -> list[Step]:
        """The steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def record_pass(self, each: Pass) -> None:
        """Keeps a pass of the step under way."""
        self._passes.append(each)

    def record_step(self, schedule: float, run: float, sample: float, publish: float) -> None:
        """Ends the step under way."""
        passes, self._passes = tuple(self._passes), []
        self._steps.append(Step(schedule, run, sample, publish, passes))
        self.peak_kv_bytes = max(self.peak_kv_bytes, self._value("kv_cache_bytes"))

    def _value(self, name: str) -> int:
        value = self._registry.get_sample_value(f"maskdial_{name}", {"model": _MODEL})
        assert value is not None, name
        return int(value)


@dataclass(frozen=True, slots=True)
class RecordedMetrics(ModelMetrics):
    """A model's metrics, whose passes and steps are kept one by one."""

    recorder: Recorder

    def observe_pass(
        self, seconds: float, num_rows: int, num_tokens: int, padded_tokens: int
    ) -> None:
        self.recorder.record_pass(Pass(seconds, num_rows, num_tokens))

    def observe_step(self, schedule: float, run: float, sample: float, publish: float) -> None:
        self.recorder.record_step(schedule, run, sample, publish)
