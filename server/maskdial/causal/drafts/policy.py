"""Whether draft tokens pay: what a pass costs, how often drafts were right, what to verify."""

import heapq
import sys
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from maskdial.causal.drafts.sources import Reader
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind

_DECAY, _STEP_DECAY = 0.98, 0.9
_MOST_WEIGHT = 30.0  # passes
_PRIOR_SHARE = 0.04
_PRIOR_WEIGHT = 4.0
_OUTLIER = 2.0
_MARGIN, _MARGIN_OF_MODEL = 1.05, 1.15
_SHORTEST = 1e-9  # seconds

# The CPU time of the engine's thread, since what interrupts a pass says nothing of its rows.
# Windows counts it in steps of 16 ms.
pass_clock = time.perf_counter if sys.platform == "win32" else time.thread_time


@dataclass(slots=True)
class _Mean:
    """The latest passes of one number of rows: their draft tokens and their times."""

    weight: float = 0.0
    drafts: float = 0.0
    seconds: float = 0.0

    def add(self, num_drafts: int, seconds: float) -> tuple[float, float, float]:
        """Takes in a pass; its share of the means, and how it differs from the old ones."""
        self.weight = min(self.weight + 1.0, _MOST_WEIGHT)
        share = 1.0 / self.weight
        drafts, late = num_drafts - self.drafts, seconds - self.seconds
        self.drafts += share * drafts
        self.seconds += share * late
        return share, drafts, late


class PassCosts:
    """The time of a pass without draft tokens, what the first one adds to it, and each one.

    A text's row costs more than a draft token, as it brings a cache of its own. So passes are
    compared with those that have as many rows beside the drafts: for each number of rows the mean
    time of passes without drafts is kept, and the mean time and number of draft tokens of those
    with some, and one slope for all of these (least squares within groups). Older passes count less
    and less, so it follows the load and the lengths of the texts. Until passes with different
    numbers of draft tokens have been seen, one is taken to cost 4% of a pass with one row.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _Mean] = {}
        self._drafted: dict[int, _Mean] = {}
        self._variance = self._covariance = 0.0
        self._prior = 0.0

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Takes in a pass of so many rows, and draft tokens beside them, and its time."""
        group = self._drafted if num_drafts else self._plain
        mean = group.setdefault(num_rows, _Mean())
        if mean.weight:
            # A pass that was interrupted says nothing of its rows.
            expected = mean.seconds + self.seconds_per_draft * (num_drafts - mean.drafts)
            seconds = min(seconds, _OUTLIER * max(expected, self.seconds_per_draft * num_drafts))
        share, drafts, late = mean.add(num_drafts, seconds)
        if num_drafts:
            self._variance = _DECAY * self._variance + (1 - share) * drafts * drafts
            self._covariance = _DECAY * self._covariance + (1 - share) * drafts * late
        rows = num_rows - 1 + mean.drafts
        self._prior = _PRIOR_SHARE * mean.seconds / (1 + _PRIOR_SHARE * rows)

    @property
    def seconds_per_draft(self) -> float:
        """What one more draft token takes."""
        slope = self._covariance + _PRIOR_WEIGHT * self._prior
        return max(slope / (self._variance + _PRIOR_WEIGHT), 0.1 * self._prior)

    def seconds(self, num_rows: int) -> float:
        """The expected time of a pass without draft tokens; 0 before the first pass."""
        per_row = self.seconds_per_draft
        for group in (self._plain, self._drafted):
            if group:
                nearest = min(group, key=lambda each: abs(each - num_rows))
                mean = group[nearest]
                expected = mean.seconds + per_row * (num_rows - nearest - mean.drafts)
                return max(expected, per_row * num_rows)
        return 0.0

    def seconds_to_begin(self, num_rows: int) -> float:
        """What a pass takes for having any draft tokens, beside what each of them takes."""
        if not self._drafted:
            return 0.0
        nearest = min(self._drafted, key=lambda each: abs(each - num_rows))
        mean = self._drafted[nearest]
        more = mean.seconds - self.seconds_per_draft * mean.drafts - self.seconds(nearest)
        return max(more, 0.0) * mean.weight / (mean.weight + _PRIOR_WEIGHT)


class StepCosts:
    """The time of a draft model's step, by the tokens that it reads.

    Each token after the first one is taken to cost 4% of a step with one.
    """

    def __init__(self) -> None:
        self._mean = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes in a step that has read so many tokens, at least one, and its time."""
        seconds /= 1 + _PRIOR_SHARE * (num_tokens - 1)
        mean = self._mean or seconds
        self._mean = _STEP_DECAY * mean + (1 - _STEP_DECAY) * min(seconds, _OUTLIER * mean)

    @property
    def per_token(self) -> float:
        """What a token adds to a step, in seconds."""
        return _PRIOR_SHARE * self._mean

    @property
    def per_step(self) -> float:
        """What a step takes beside that; 0 before the first one."""
        return self._mean - self.per_token


@dataclass(frozen=True, slots=True)
class Option:
    """Draft tokens that a sequence may have.

    Attributes:
        first: how probable it is that the first one is right.
        rate: that each later one is right if those before it are.
        limit: how many there are.
        unread: of a draft model, the tokens of the text to read for the first one.
    """

    first: float
    rate: float
    limit: int
    unread: float = 0.0


class Budget:
    """What a pass is expected to give and to take, as draft tokens are added to it.

    They are added as long as what is added is a larger share of the pass's tokens than of its time.

    Args:
        costs: of the model's passes.
        num_sequences: that get a token from the pass.
        reads: whether the pass reads prompts as well. That takes its time with draft tokens or
            without, so these have to pay in a pass that reads none.
        most: draft tokens of the pass.
    """

    def __init__(self, costs: PassCosts, num_sequences: int, *, reads: bool, most: int) -> None:
        self._tokens, self._seconds = float(num_sequences), costs.seconds(num_sequences)
        self._per_draft = max(costs.seconds_per_draft, _SHORTEST)
        self._to_begin = 0.0 if reads else costs.seconds_to_begin(num_sequences)
        self._room = most

    def spend(self, options: SequenceOf[Option | None]) -> list[int]:
        """How many draft tokens that are there already each sequence has verified.

        Those that are likeliest right go first.

        Args:
            options: of each sequence; None if it has no draft tokens.
        """
        sizes = [0] * len(options)
        nexts = [(-each.first, i) for i, each in enumerate(options) if each is not None]
        heapq.heapify(nexts)
        tokens, seconds, room = self._tokens, self._seconds + self._to_begin, self._room
        while nexts and room:
            gain, i = nexts[0]
            option = options[i]
            if option is None or -gain * seconds <= _MARGIN * tokens * self._per_draft:
                break
            tokens -= gain
            seconds += self._per_draft
            room -= 1
            sizes[i] += 1
            if sizes[i] < option.limit:
                heapq.heapreplace(nexts, (gain * option.rate, i))
            else:
                heapq.heappop(nexts)
        return sizes if self._take(tokens, seconds, room, _MARGIN) else [0] * len(options)

    def write(self, options: SequenceOf[Option | None], model: StepCosts) -> list[int]:
        """How many draft tokens a draft model writes for each sequence.

        It writes one for each of some sequences in each of its steps, which take a time of their
        own and some for each token. So a step is taken if all that it gives pays for it.

        Args:
            options: of each sequence; None if it does not write for it.
            model: of the draft model's steps.
        """
        sizes = [0] * len(options)
        nexts = [(each.first, each.unread, i) for i, each in enumerate(options) if each is not None]
        while nexts and self._room:
            tokens, seconds = self._tokens, self._seconds + self._to_begin + model.per_step
            added = []
            priced = [
                (self._per_draft + model.per_token * size, gain, i) for gain, size, i in nexts
            ]
            for price, gain, i in sorted(priced, key=lambda each: -each[1] / each[0])[: self._room]:
                if gain * seconds <= tokens * price:
                    break
                tokens += gain
                seconds += price
                added.append((gain, i))
            if not self._take(tokens, seconds, self._room - len(added), _MARGIN_OF_MODEL):
                break
            nexts = []
            for gain, i in added:
                sizes[i] += 1
                option = options[i]
                if option is not None and sizes[i] < option.limit:
                    nexts.append((gain * option.rate, 1.0, i))
        return sizes

    def _take(self, tokens: float, seconds: float, room: int, margin: float) -> bool:
        """Adds draft tokens to the pass, if what they add pays; False if it does not."""
        gain, price = tokens - self._tokens, seconds - self._seconds
        if gain * self._seconds <= margin * self._tokens * price:
            return False
        self._tokens, self._seconds, self._room = tokens, seconds, room
        self._to_begin = 0.0
        return True


_RECORD_DECAY, _OVERALL_DECAY = 0.95, 0.98  # for each draft token
_FIRST_RATE = 0.5
_OVERALL_PRIOR_TESTS = 2.0
_MOST_AT_FIRST, _PRIOR_TESTS = 0.5, 2.0  # of what a text repeats, which others do not tell
_MODEL_PRIOR_TESTS = 8.0


class Rates:
    """How probable it is that a draft token is right: after one that was, and after another.

    Later draft tokens count more than earlier ones.

    Args:
        prior: what to take for these two at first.
        weight: how many draft tokens that counts for.
        decay: by which each one counts less after another.
    """

    __slots__ = ("_decay", "_right", "_tests")

    def __init__(self, prior: tuple[float, float], weight: float, decay: float) -> None:
        self._right = [weight * each for each in prior]
        self._tests = [weight, weight]
        self._decay = decay

    @classmethod
    def overall(cls) -> "Rates":
        """Those of all sequences."""
        return cls((_FIRST_RATE, _FIRST_RATE), _OVERALL_PRIOR_TESTS, _OVERALL_DECAY)

    def after(self, *, right: bool) -> float:
        """Of a draft token that follows one that was right, or another."""
        return self._right[right] / self._tests[right]

    def note(self, num_right: int, num_wrong: int, *, after_right: bool) -> None:
        """Takes in draft tokens, of which so many were right, and perhaps a wrong one; not none."""
        first = num_right > 0
        self._add(after_right, first, 1)
        self._add(True, num_right - first, num_right - first + (num_wrong if first else 0))

    def _add(self, level: bool, num_right: int, num_tests: int) -> None:
        if num_tests:
            kept = self._decay**num_tests
            self._right[level] = kept * self._right[level] + num_right
            self._tests[level] = kept * self._tests[level] + num_tests


class Record:
    """What became of a sequence's draft tokens of one kind.

    Args:
        overall: of all sequences' draft tokens of this kind, for a start.
        by_model: whether a model writes them, which is about as often right in one text as in
            another. What others repeat tells little of a text.
    """

    __slots__ = ("_after_right", "_overall", "_rates")

    def __init__(self, overall: Rates, *, by_model: bool = False) -> None:
        first, later = overall.after(right=False), overall.after(right=True)
        if by_model:
            self._rates = Rates((first, later), _MODEL_PRIOR_TESTS, _RECORD_DECAY)
        else:
            prior = min(first, _MOST_AT_FIRST), min(later, _MOST_AT_FIRST)
            self._rates = Rates(prior, _PRIOR_TESTS, _RECORD_DECAY)
        self._overall = overall
        self._after_right = False

    @property
    def first_rate(self) -> float:
        """How probable it is that the next draft token is right."""
        return self._rates.after(right=self._after_right)

    @property
    def rate(self) -> float:
        """How probable it is that one after right ones is right."""
        return self._rates.after(right=True)

    def note(self, num_right: int, num_wrong: int) -> None:
        """Takes in a draft of which so many tokens were right, and perhaps a wrong one."""
        if not (num_right or num_wrong):
            return
        for rates in (self._rates, self._overall):
            rates.note(num_right, num_wrong, after_right=self._after_right)
        self._after_right = not num_wrong

    def interrupt(self) -> None:
        """Takes in that there were no draft tokens: the next one follows none that was right."""
        self._after_right = False


class Guess:
    """The tokens that are expected to follow, from pass to pass.

    Whether a pass verifies them or not, they are compared with what comes.

    Args:
        kind: of the draft tokens.
        reader: who proposes them; None if a draft model writes them.
        record: how often they were right in this text.
    """

    __slots__ = ("_position", "_reader", "kind", "record", "token_ids")

    def __init__(self, kind: DraftKind, reader: Reader | None, record: Record) -> None:
        self.kind = kind
        self._reader = reader
        self.record = record
        self.token_ids: tuple[int, ...] = ()
        """The tokens that it expects."""
        self._position = 0

    @property
    def first_rate(self) -> float:
        """How probable it is that the first of its tokens is right."""
        return self.record.first_rate

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `Reader`."""
        return () if self._reader is None else self._reader.propose(sequence, max_tokens)

    def expect(self, position: int, token_ids: tuple[int, ...]) -> None:
        """Takes the tokens that are expected from a position of the text on."""
        self.token_ids, self._position = token_ids, position

    def check(self, sequence: Sequence) -> None:
        """Compares what was expected with the tokens that have come."""
        come = sequence.token_ids[self._position :].tolist()
        num_right = count_right(come, self.token_ids)
        self.record.note(num_right, int(num_right < min(len(come), len(self.token_ids))))
        self.token_ids = ()


def count_right(token_ids: list[int], expected: tuple[int, ...]) -> int:
    """How many tokens are the expected ones, up to the first that is not."""
    for index, (one, other) in enumerate(zip(token_ids, expected, strict=False)):
        if one != other:
            return index
    return min(len(token_ids), len(expected))


_PROBE_SHARE = 0.005  # of the time of passes
_MOST_STEPS = 100.0  # steps of the draft model


class Credit:
    """Seconds that may be spent on draft tokens which probably do not pay.

    Nothing else tells whether they have come to. Where they did not, the draft model sleeps until
    there is enough, or until fewer sequences run, as a pass of fewer has more to spare.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._needed = 0.0
        self._num_sequences = 0

    def earn(self, seconds: float, seconds_per_step: float) -> None:
        """Takes in the time of passes, and that of a step of the draft model."""
        self._seconds = min(self._seconds + _PROBE_SHARE * seconds, _MOST_STEPS * seconds_per_step)

    def wakes(self, num_sequences: int) -> bool:
        """Whether the draft model is to be considered beside so many sequences."""
        return self._seconds >= self._needed or num_sequences < self._num_sequences

    def stay_awake(self) -> None:
        """Takes in that it paid, or that there was nothing to ask it."""
        self._needed = 0.0

    def sleep(self, num_sequences: int, cost: float) -> bool:
        """Takes in that it did not pay for any of so many sequences.

        Returns:
            Whether it is asked all the same, which takes ``cost`` seconds.
        """
        self._num_sequences, self._needed = num_sequences, cost
        if cost > self._seconds:
            return False
        self._seconds -= cost
        return True
