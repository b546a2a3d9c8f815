"""Recorder: keeps what the engine reports of its steps."""

from dataclasses import dataclass

from maskdial.metrics import NullMetrics


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


class Recorder(NullMetrics):
    """Remembers steps, guesses and uses of the prefix cache. The engine's thread writes to it.

    A step is recorded just after its tokens were published, so the last one of a text may come in
    after the text's reader has it all.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._passes: list[Pass] = []
        self._batch = (0, 0)
        self.num_drafts = 0
        self.num_accepted = 0
        self.num_queried = 0
        """Tokens of prompts that were looked up in the prefix cache."""
        self.num_hit = 0
        """Tokens of them that were found."""
        self.peak_kv_bytes = 0
        """Most bytes of keys and values in use after a step."""

    def batch(self, size: int, tokens: int, padded_tokens: int) -> None:
        self._batch = (size, tokens)

    def inference(self, seconds: float) -> None:
        self._passes.append(Pass(seconds, *self._batch))

    def step(self, schedule: float, run: float, sample: float, publish: float) -> None:
        passes, self._passes = tuple(self._passes), []
        self._steps.append(Step(schedule, run, sample, publish, passes))

    def prefix_cache(self, num_queried: int, num_hit: int) -> None:
        self.num_queried += num_queried
        self.num_hit += num_hit

    def speculation(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def kv_cache(self, used_bytes: int, ratio: float) -> None:
        self.peak_kv_bytes = max(self.peak_kv_bytes, used_bytes)

    def take_steps(self) -> list[Step]:
        """The steps since the last call."""
        steps, self._steps = self._steps, []
        return steps
