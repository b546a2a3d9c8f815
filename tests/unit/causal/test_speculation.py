"""How many draft tokens are verified: what they cost, what they gain, and what became of them."""

from dataclasses import replace

import pytest

from maskdial.causal.drafts.policy import (
    Budget,
    Credit,
    Option,
    PassCosts,
    Rates,
    Record,
    StepCosts,
)
from maskdial.causal.drafts.sources import Answers, Prediction, PredictionFollower
from maskdial.causal.drafts.speculation import Speculation
from maskdial.causal.plan import Plan, Prefill
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.engine.fairness import ClientUsage
from maskdial.metrics import DraftKind, Metrics
from tests.engine_metrics import EngineMetrics, SteadyCosts
from tests.unit.scripted_model import LetterDetokenizer, make_sequence

NAME = "fake"


def costs_of(seconds: dict[tuple[int, int], float], times: int = 100) -> PassCosts:
    """After passes of these numbers of rows and of draft tokens."""
    costs = PassCosts()
    for index in range(times):
        for size, each in seconds.items():
            costs.observe(*size, each * (1.05 if index % 2 else 0.95))
    return costs


def test_costs_are_those_of_the_passes() -> None:
    costs = costs_of({(1, 0): 1.0, (1, 3): 1.3, (1, 7): 1.7})
    assert costs.seconds_per_draft == pytest.approx(0.1, rel=0.1)
    assert costs.seconds(1) == pytest.approx(1.0, rel=0.1)
    assert costs.seconds_to_begin(1) == pytest.approx(0.0, abs=0.05)
    for _ in range(300):
        costs.observe(1, 0, 3.0)
        costs.observe(1, 3, 9.0)
        costs.observe(1, 5, 12.0)
    assert costs.seconds_per_draft == pytest.approx(1.5, rel=0.1)
    assert costs.seconds_to_begin(1) == pytest.approx(1.5, rel=0.3)


def test_a_text_more_says_nothing_of_draft_tokens() -> None:
    """It costs eight times as much here, and the drafts of either number of texts as much."""
    sizes = {(1, 0): 1.0, (1, 2): 1.2, (1, 4): 1.4, (8, 0): 6.6, (8, 8): 7.4, (8, 16): 8.2}
    costs = costs_of(sizes)
    assert costs.seconds_per_draft == pytest.approx(0.1, rel=0.2)
    assert costs.seconds(8) == pytest.approx(6.6, rel=0.1)
    unseen = costs.seconds(7)
    assert 6.0 < unseen < 6.6


def test_a_pass_that_was_interrupted_changes_little() -> None:
    costs = costs_of({(1, 0): 1.0, (1, 3): 1.3, (1, 5): 1.5})
    costs.observe(1, 3, 100.0)
    costs.observe(1, 0, 100.0)
    assert costs.seconds(1) < 1.05
    assert costs.seconds_per_draft < 0.13
    assert costs.seconds_to_begin(1) < 0.2


@pytest.mark.parametrize("num_rows", [1, 8])
def test_without_drafts_a_draft_token_costs_a_guess(num_rows: int) -> None:
    """The same, however many rows share the pass, as long as rows cost as much."""
    costs = costs_of({(num_rows, 0): 1.0 + 0.04 * (num_rows - 1)})
    assert costs.seconds_per_draft == pytest.approx(0.04, rel=0.1)


def spent(
    rates: list[float],
    limits: list[int],
    per_draft: float,
    *,
    to_begin: float = 0.0,
    most: int = 64,
) -> list[int]:
    """What each sequence has of a pass that takes a second without draft tokens."""
    rows = len(rates)
    costs = costs_of({(rows, 0): 1.0} | draft_passes(rows, per_draft, to_begin))
    budget = Budget(costs, rows, reads=False, most=most)
    pairs = zip(rates, limits, strict=True)
    return budget.spend([Option(r, r, limit) if limit else None for r, limit in pairs])


def draft_passes(rows: int, per_draft: float, to_begin: float) -> dict[tuple[int, int], float]:
    return {(rows, n): 1.0 + to_begin + n * per_draft for n in (4, 16)}


@pytest.mark.parametrize(
    ("rates", "limits", "per_draft", "wanted"),
    [
        ([0.0], [8], 0.1, [0]),
        ([1.0], [8], 0.1, [8]),
        ([0.5], [8], 0.1, [2]),  # 0.25 of a token for less than a tenth of the time of 1.75
        ([0.5], [8], 0.9, [0]),
        ([1.0], [8], 1.0, [0]),
        ([0.9, 0.0, 0.5], [3, 3, 3], 0.1, [3, 0, 1]),
        ([0.9, 0.9], [0, 2], 0.1, [0, 2]),
    ],
)
def test_drafts_are_verified_as_far_as_they_pay(
    rates: list[float], limits: list[int], per_draft: float, wanted: list[int]
) -> None:
    assert spent(rates, limits, per_draft) == wanted


def test_the_first_one_and_the_later_ones_are_right_at_different_rates() -> None:
    costs = costs_of({(1, 0): 1.0} | draft_passes(1, 0.1, 0.0))
    assert Budget(costs, 1, reads=False, most=64).spend([Option(0.9, 0.1, 8)]) == [1]
    assert Budget(costs, 1, reads=False, most=64).spend([Option(0.05, 0.99, 8)]) == [0]


def test_draft_tokens_pay_for_what_it_takes_to_begin_as_well() -> None:
    assert spent([0.4], [1], 0.05) == [1]
    assert spent([0.4], [1], 0.05, to_begin=0.4) == [0]
    assert spent([0.9], [8], 0.05, to_begin=0.4) == [8]


def test_a_pass_has_no_more_than_its_most_drafts() -> None:
    assert sum(spent([0.99, 0.98], [16, 16], 0.01, most=20)) == 20


def test_more_rows_leave_less_to_gain() -> None:
    """The tokens of the others are lost meanwhile."""
    assert spent([0.6], [8], 0.1)[0] > 0
    assert spent([0.6] * 32, [8] * 32, 0.05) == [0] * 32


def written(
    firsts: list[float],
    *,
    step: float,
    unread: float = 1.0,
    per_draft: float = 0.05,
) -> list[int]:
    """What a draft model writes beside a pass of a second."""
    rows = len(firsts)
    costs = costs_of({(rows, 0): 1.0} | draft_passes(rows, per_draft, 0.0))
    model = StepCosts()
    for num_tokens in (1, 5, 20):
        model.observe(num_tokens, step * (0.96 + 0.04 * num_tokens))
    return Budget(costs, rows, reads=False, most=64).write(
        [Option(p, p, 16, unread) for p in firsts], model
    )


def test_a_draft_model_writes_as_far_as_it_pays() -> None:
    # What one of a tenth writes at 70%: 2.5 tokens in 1.45 of the time.
    assert written([0.7], step=0.1) == [3]
    assert written([0.1], step=0.1) == [0]
    # Its step costs as much for one text of 16 as for all.
    few, many = [0.9] + [0.1] * 15, [0.9] * 16
    assert written(few, step=0.1, per_draft=0.02) == [0] * 16
    assert written(many, step=0.1, per_draft=0.02)[0] > 0
    # What it has to read first counts as well.
    assert written([0.5], step=0.1)[0] > 0
    assert written([0.5], step=0.1, unread=80) == [0]


def test_a_draft_model_that_does_not_pay_sleeps_until_it_can_be_asked() -> None:
    credit = Credit()
    assert credit.wakes(4)
    assert not credit.sleep(4, 1.0)
    steps = 0
    while not credit.wakes(4):
        assert credit.wakes(3)  # fewer texts leave more to gain
        credit.earn(10.0, 1.0)
        steps += 1
    assert steps == 20
    assert credit.sleep(4, 1.0)
    assert not credit.wakes(4)
    credit.stay_awake()
    assert credit.wakes(4)


def test_a_record_follows_what_was_right() -> None:
    record = Record(Rates.overall())
    assert record.rate == record.first_rate == 0.5
    for _ in range(10):
        record.note(4, 0)
    assert record.rate > 0.9
    for _ in range(60):
        record.note(1, 1)
    assert record.rate < 0.1
    assert record.first_rate > 0.9
    for _ in range(60):
        record.interrupt()
        record.note(0, 1)
    assert record.first_rate < 0.1


def test_other_texts_tell_what_to_expect() -> None:
    """But not that it is surely right."""
    often, seldom = Rates.overall(), Rates.overall()
    for _ in range(100):
        Record(often).note(3, 0)
        Record(seldom).note(0, 1)
    assert Record(often).first_rate == Record(often).rate == 0.5
    assert Record(seldom).first_rate < 0.1


class Oracle:
    """Proposes what it is told to."""

    kind: DraftKind = "prompt"

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids
        self.num_asked = 0

    def reader(self, sequence: Sequence) -> "Oracle":
        return self

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        self.num_asked += 1
        return self.token_ids[:max_tokens]


def running(max_new_tokens: int = 20, prompt: int = 3) -> Sequence:
    sequence = make_sequence(range(prompt), max_new_tokens)
    sequence.start(0, 0)
    write(sequence, 1)
    return sequence


def write(sequence: Sequence, *token_ids: int) -> None:
    for token_id in token_ids:
        sequence.accept(
            token_id,
            0.0,
            detokenizer=LetterDetokenizer(),
            eos_token_ids=frozenset(),
            max_length=100,
        )
    sequence.proceed()


def plan_of(*sequences: Sequence) -> Plan:
    return Plan(rows=sequences, decoding_rows=tuple(range(len(sequences))))


def speculation_of(
    oracle: Oracle, metrics: Metrics, *, together: bool = True, max_length: int = 100
) -> Speculation:
    return Speculation(
        (oracle,),
        max_drafts=8,
        max_length=max_length,
        together=together,
        metrics=metrics.declare(NAME),
        costs=SteadyCosts(),
    )


def record_of(speculation: Speculation, sequence: Sequence) -> Record:
    speculation._look(sequence)
    (guess,) = speculation._guesses[sequence].proposed
    return guess.record


@pytest.mark.parametrize(
    ("max_new_tokens", "max_length", "most"), [(20, 100, 8), (5, 100, 3), (2, 100, 0), (20, 7, 2)]
)
def test_drafts_are_no_more_than_are_wanted(
    max_new_tokens: int, max_length: int, most: int
) -> None:
    """The last token comes from the pass that verifies the others."""
    speculation = speculation_of(Oracle(*range(20)), Metrics(), max_length=max_length)
    sequence = running(max_new_tokens)
    for _ in range(9):  # until it is sure
        drafts = speculation.draft(plan_of(sequence))
        if not drafts:
            break
        record_of(speculation, sequence).note(8, 0)
    assert sum(map(len, drafts)) == most


def test_what_became_of_drafts_is_counted() -> None:
    metrics = Metrics()
    oracle = Oracle(4, 5, 6, 7)
    speculation = speculation_of(oracle, metrics)
    first, second = running(), running()
    plan = plan_of(first, second)
    drafts = speculation.draft(plan)
    assert drafts == ((4, 5), (4, 5)) or len(drafts[0]) == len(drafts[1]) > 1
    write(first, *drafts[0], 9)
    write(second, 4, 9)
    speculation.note(replace(plan, drafts=drafts), 1.0)
    counted = EngineMetrics(metrics, NAME)
    size = len(drafts[0])
    assert counted.value("speculative_draft_tokens_total", kind="prompt") == 2 * size
    assert counted.value("speculative_accepted_tokens_total", kind="prompt") == size + 1
    assert record_of(speculation, first).rate > record_of(speculation, second).rate


def test_drafts_that_do_not_pay_are_watched_without_a_pass() -> None:
    """So that they are tried again when the text begins to follow them."""
    oracle = Oracle(4)
    speculation = speculation_of(oracle, Metrics())
    sequence = running(90, 3)
    record = record_of(speculation, sequence)
    for _ in range(100):
        record.note(0, 1)
    assert speculation.draft(plan_of(sequence)) == ()
    for _ in range(3):
        write(sequence, 4)
        drafts = speculation.draft(plan_of(sequence))
    assert drafts == ((4,),)


@pytest.mark.parametrize(
    ("seconds", "looks", "last_looks"),
    [
        (1e-4, range(60), range(40, 60)),  # in passes of a second: in each step
        (0.022, [0, 1, 3, 6, 10, 15, 20, 25, 30, 35], range(40, 60)),
        (5.0, [0, 1, 3, 6, 10, 15, 21, 28, 36], range(45, 60)),
    ],
)
def test_looking_takes_a_small_share_of_the_passes(
    seconds: float, looks: list[int], last_looks: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing is found; from the 40th step on, something is."""
    now = 0.0

    class SlowOracle(Oracle):
        def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
            nonlocal now
            now += seconds
            return super().propose(sequence, max_tokens)

    monkeypatch.setattr("maskdial.causal.drafts.speculation.time.perf_counter", lambda: now)
    oracle = SlowOracle()
    speculation = speculation_of(oracle, Metrics())
    sequence, asked = running(90), []
    for step in range(60):
        oracle.token_ids = (5,) * (step >= 40)
        before = oracle.num_asked
        plan = plan_of(sequence)
        speculation.draft(plan)
        asked += [step] * (oracle.num_asked - before)
        write(sequence, 5)
        speculation.note(plan, 1.0)
    assert [step for step in asked if step < 40] == [step for step in looks if step < 40]
    assert [step for step in asked if step >= 40] == [*last_looks]


def test_a_text_that_begins_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle()
    speculation = speculation_of(oracle, Metrics())
    monkeypatch.setattr("maskdial.causal.drafts.speculation._LOOK_SHARE", 1e-9)
    one, other = running(90), running(90)
    asked = []
    for step in range(20):
        before = oracle.num_asked
        prefills = (Prefill(other, 1, 0, 3),) if step == 12 else ()
        speculation.draft(replace(plan_of(one), prefills=prefills))
        asked += [step] * (oracle.num_asked - before)
    assert asked == [0, 1, 3, 6, 10, 12, 13, 15, 18]


def test_without_the_shared_pass_a_sequence_has_drafts_only_while_it_is_alone() -> None:
    speculation = speculation_of(Oracle(4), Metrics(), together=False)
    one, other = running(), running()
    assert speculation.draft(plan_of(one, other)) == ()
    assert speculation.draft(Plan(rows=(one,), decoding_rows=(0,), awaiting_mask=(other,))) == ()
    assert speculation.draft(plan_of(one)) == ((4,),)


def test_a_prediction_is_followed_and_found_again() -> None:
    prediction = [*range(10, 30)]
    sequence = Sequence([1, 2], SamplingParams(max_new_tokens=50), prediction=prediction)
    reader, follower = Prediction().reader(sequence), PredictionFollower(sequence.prediction)
    assert reader is not None
    sequence.start(0, 0)
    proposed = []
    text = [10, 11, 12, 50, 51, 52, 53, 21, 22, 23, 24]
    for token_id in text:
        write(sequence, token_id)
        follower.push(token_id)
        proposed.append(reader.propose(sequence, 2))
    assert proposed == [
        *[(11, 12), (12, 13), (13, 14), (), (), (), (), (), (), (24, 25), (25, 26)],
    ]
    assert (follower.num_right, follower.num_wrong) == (4, 16)


def test_a_sequence_without_a_prediction_has_none() -> None:
    assert Prediction().reader(running()) is None


def answered(*token_ids: int, salt: str = "", key: str = "") -> Sequence:
    sequence = Sequence([1, 2], SamplingParams(max_new_tokens=50), cache_salt=salt)
    sequence.usage = ClientUsage(key=key)
    sequence.start(0, 0)
    write(sequence, *token_ids)
    return sequence


def proposed(answers: Answers, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
    return answers.reader(sequence).propose(sequence, max_tokens)


def test_answers_help_those_of_the_same_salt_and_key() -> None:
    text = (10, 11, 12, 13, 14, 15, 16, 17, 18)
    answers, shared = Answers(), Answers(shared=True)
    for each in (answers, shared):
        each.learn(answered(*text, salt="a", key="k"))
    begun = text[:5]
    assert proposed(answers, answered(*begun, salt="a", key="k"), 3) == text[5:8]
    assert proposed(answers, answered(*begun, salt="b", key="k"), 3) == ()
    assert proposed(answers, answered(*begun, salt="a", key="l"), 3) == ()
    assert proposed(shared, answered(*begun, salt="b", key="k"), 3) == ()
    assert proposed(shared, answered(*begun, salt="a", key="l"), 3) == text[5:8]
    # The prompt's end and the first tokens are enough.
    assert proposed(answers, answered(10, 11, salt="a", key="k"), 1) == (12,)


def test_an_answer_is_followed_from_token_to_token() -> None:
    answers = Answers()
    answers.learn(answered(*range(10, 40)))
    sequence = answered(10, 11)
    reader = answers.reader(sequence)
    assert reader.propose(sequence, 2) == (12, 13)
    write(sequence, 12, 13, 14)
    assert reader.propose(sequence, 2) == (15, 16)
    write(sequence, 50)
    assert reader.propose(sequence, 2) == ()
    write(sequence, 16)  # after one that was replaced
    assert reader.propose(sequence, 2) == (17, 18)
    write(sequence, 50, 51, 30, 31, 32, 33)
    assert reader.propose(sequence, 2) == (34, 35)


def test_the_oldest_answers_are_forgotten() -> None:
    answers = Answers(max_tokens=100)
    for number in range(50):
        first = 100 * number
        answers.learn(answered(*range(first, first + 20)))
        assert answers.num_tokens <= 100
        assert len(answers._places) <= 100
    assert proposed(answers, answered(*range(9)), 2) == ()
    assert proposed(answers, answered(*range(4900, 4909)), 2) == (4909, 4910)
    answers.learn(answered(*range(200)))  # too long to keep
    assert proposed(answers, answered(*range(9)), 2) == ()


def test_of_two_answers_the_later_one_is_followed() -> None:
    answers = Answers(max_tokens=60)
    for ending in (1, 2, 3):
        answers.learn(answered(*range(30, 40), *[50 + ending] * 8))
        assert proposed(answers, answered(*range(30, 40)), 1) == (50 + ending,)
