"""How many draft tokens are verified: what they cost, what they gain, and what became of them."""

import pytest

from maskdial.causal.drafts.answers import Answers
from maskdial.causal.drafts.budget import PassCosts, choose
from maskdial.causal.drafts.prediction import Follower, Prediction
from maskdial.causal.drafts.record import Record
from maskdial.causal.drafts.speculation import Speculation
from maskdial.causal.plan import Plan
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
    assert costs.seconds(1, 15) == pytest.approx(2.5, rel=0.1)
    for _ in range(300):
        costs.observe(1, 0, 3.0)
        costs.observe(1, 3, 9.0)
    assert costs.seconds_per_draft == pytest.approx(2.0, rel=0.1)


def test_a_text_more_says_nothing_of_draft_tokens() -> None:
    """It costs eight times as much here, and the drafts of either number of texts as much."""
    costs = costs_of({(1, 0): 1.0, (1, 4): 1.4, (8, 0): 6.6, (8, 8): 7.4})
    assert costs.seconds_per_draft == pytest.approx(0.1, rel=0.2)
    assert costs.seconds(8) == pytest.approx(6.6, rel=0.1)
    unseen = costs.seconds(7)
    assert 6.0 < unseen < 6.6


def test_a_pass_that_was_interrupted_changes_little() -> None:
    costs = costs_of({(1, 0): 1.0, (1, 3): 1.3})
    costs.observe(1, 3, 100.0)
    assert costs.seconds(1, 3) < 1.5


@pytest.mark.parametrize("num_rows", [1, 8])
def test_without_drafts_a_draft_token_costs_a_guess(num_rows: int) -> None:
    """The same, however many rows share the pass, as long as rows cost as much."""
    costs = costs_of({(num_rows, 0): 1.0 + 0.04 * (num_rows - 1)})
    assert costs.seconds_per_draft == pytest.approx(0.04, rel=0.1)


@pytest.mark.parametrize(
    ("rates", "limits", "per_draft", "extra", "wanted"),
    [
        ([0.0], [8], 0.1, 0.0, [0]),
        ([1.0], [8], 0.1, 0.0, [8]),
        ([0.5], [8], 0.1, 0.0, [2]),  # 0.25 of a token for less than a tenth of the time of 1.75
        ([0.5], [8], 0.9, 0.0, [0]),
        ([1.0], [8], 1.0, 0.0, [0]),
        ([0.9, 0.0, 0.5], [3, 3, 3], 0.1, 0.0, [3, 0, 1]),
        ([0.9, 0.9], [0, 2], 0.1, 0.0, [0, 2]),
        # What a draft model of a tenth writes at 70%: 2.8 tokens in 1.48 of the time.
        ([0.7], [16], 0.05, 0.07, [4]),
        ([0.1], [16], 0.05, 0.07, [0]),
    ],
)
def test_drafts_are_verified_as_far_as_they_pay(
    rates: list[float], limits: list[int], per_draft: float, extra: float, wanted: list[int]
) -> None:
    rows = len(rates)
    costs = costs_of({(rows, 0): 1.0, (rows, 10): 1.0 + 10 * per_draft})
    assert choose(rates, limits, costs, rows, 64, [extra] * rows) == wanted


def test_a_pass_has_no_more_than_its_most_drafts() -> None:
    costs = costs_of({(2, 0): 1.0, (2, 10): 1.1})
    assert sum(choose([0.99, 0.98], [16, 16], costs, 2, 20, [0.0] * 2)) == 20


def test_more_rows_leave_less_to_gain() -> None:
    """The tokens of the others are lost meanwhile."""
    few = costs_of({(1, 0): 1.1, (1, 10): 2.1})
    many = costs_of({(32, 0): 2.0, (32, 10): 3.0})
    assert choose([0.6], [8], few, 1, 64, [0.0])[0] > 0
    assert choose([0.6] * 32, [8] * 32, many, 32, 64, [0.0] * 32) == [0] * 32


def test_a_record_follows_what_was_right() -> None:
    record = Record(0.5)
    assert record.rate == 0.5
    for _ in range(10):
        record.note(4, 0)
    assert record.rate > 0.9
    for _ in range(60):
        record.note(0, 1)
    assert record.rate < 0.1


def test_looking_pauses_as_long_as_drafts_are_wrong() -> None:
    record = Record(0.5)
    pauses = []
    for length in range(100, 1000, 100):
        record.note(0, 1)
        record.pause(length)
        pauses.append(record.resume_at - length)
    assert pauses == [1, 3, 7, 15, 31, 32, 32, 32, 32]
    record.note(1, 0)
    record.pause(1000)
    assert record.resume_at == 1001


class Oracle:
    """Proposes what it is told to."""

    kind: DraftKind = "prompt"

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids
        self.num_asked = 0

    def serves(self, sequence: Sequence) -> bool:
        return True

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
    return speculation._record(speculation._records_of(sequence), "prompt")


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
    speculation.note(plan, 1.0)
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
    ("seconds", "num_looks"),
    [
        (1e-6, 80),  # in passes of a second: in each step
        (0.02, 16),  # every 5th token takes 0.4% of them
        (5.0, 6),  # at first twice, then every 16th token, which is asked every 5th step
    ],
)
def test_looking_takes_a_small_share_of_the_passes(
    seconds: float, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no text has drafts; here one is looked at per pass of a second."""
    now = 0.0

    class SlowOracle(Oracle):
        def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
            nonlocal now
            now += seconds
            return super().propose(sequence, max_tokens)

    monkeypatch.setattr("maskdial.causal.drafts.speculation.pass_clock", lambda: now)
    oracle = SlowOracle()
    speculation = speculation_of(oracle, Metrics())
    sequence = running(90)
    for _ in range(80):
        plan = plan_of(sequence)
        assert speculation.draft(plan) == ()
        write(sequence, 5)
        speculation.note(plan, 1.0)
    assert abs(oracle.num_asked - num_looks) <= 1


def test_what_a_first_look_takes_makes_no_later_one_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class SlowAtFirst(Oracle):
        def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
            nonlocal now
            now += 1e-6 if sequence.num_tokens > 4 else 5.0
            return super().propose(sequence, max_tokens)

    monkeypatch.setattr("maskdial.causal.drafts.speculation.pass_clock", lambda: now)
    oracle = SlowAtFirst()
    speculation = speculation_of(oracle, Metrics())
    for _ in range(4):
        sequence = running(90)
        for _ in range(20):
            plan = plan_of(sequence)
            speculation.draft(plan)
            write(sequence, 5)
            speculation.note(plan, 1.0)
    assert oracle.num_asked == 80


def test_a_pause_asks_nobody() -> None:
    oracle = Oracle(4)
    speculation = speculation_of(oracle, Metrics())
    sequence = running(90)
    for _ in range(60):
        plan = plan_of(sequence)
        speculation.draft(plan)
        write(sequence, 5)
        speculation.note(plan, 1.0)
    assert oracle.num_asked < 15


def test_without_the_shared_pass_a_sequence_has_drafts_only_while_it_is_alone() -> None:
    speculation = speculation_of(Oracle(4), Metrics(), together=False)
    one, other = running(), running()
    assert speculation.draft(plan_of(one, other)) == ()
    assert speculation.draft(Plan(rows=(one,), decoding_rows=(0,), awaiting_mask=(other,))) == ()
    assert speculation.draft(plan_of(one)) == ((4,),)


def test_a_prediction_is_followed_and_found_again() -> None:
    prediction = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    sequence = Sequence([1, 2], SamplingParams(max_new_tokens=50), prediction=prediction)
    proposer, follower = Prediction(), Follower(sequence.prediction)
    sequence.start(0, 0)
    proposed = []
    text = [10, 11, 12, 50, 51, 14, 15, 16, 17]
    for token_id in text:
        write(sequence, token_id)
        follower.push(token_id)
        proposed.append(proposer.propose(sequence, 2))
    assert proposed == [(11, 12), (12, 13), (13, 14), (), (), (), (), (17, 18), (18, 19)]
    assert (follower.num_right, follower.num_wrong) == (4, 7)


def test_a_sequence_without_a_prediction_has_none() -> None:
    assert not Prediction().serves(running())


def answered(*token_ids: int, salt: str = "", key: str = "") -> Sequence:
    sequence = Sequence([1, 2], SamplingParams(max_new_tokens=50), cache_salt=salt)
    sequence.usage = ClientUsage(key=key)
    sequence.start(0, 0)
    write(sequence, *token_ids)
    return sequence


def test_answers_help_those_of_the_same_salt_and_key() -> None:
    text = (10, 11, 12, 13, 14, 15, 16, 17, 18)
    answers, shared = Answers(), Answers(shared=True)
    for each in (answers, shared):
        assert not each.serves(answered(10))
        each.learn(answered(*text, salt="a", key="k"))
        assert each.serves(answered(10))
    begun = text[:5]
    assert answers.propose(answered(*begun, salt="a", key="k"), 3) == text[5:8]
    assert answers.propose(answered(*begun, salt="b", key="k"), 3) == ()
    assert answers.propose(answered(*begun, salt="a", key="l"), 3) == ()
    assert shared.propose(answered(*begun, salt="b", key="k"), 3) == ()
    assert shared.propose(answered(*begun, salt="a", key="l"), 3) == text[5:8]
    # The prompt's end and the first tokens are enough.
    assert answers.propose(answered(10, 11, salt="a", key="k"), 1) == (12,)


def test_an_answer_is_followed_from_token_to_token() -> None:
    answers = Answers()
    answers.learn(answered(*range(10, 40)))
    sequence = answered(10, 11)
    assert answers.propose(sequence, 2) == (12, 13)
    write(sequence, 12, 13, 14)
    assert answers.propose(sequence, 2) == (15, 16)
    write(sequence, 50)
    assert answers.propose(sequence, 2) == ()
    write(sequence, 20, 21, 22, 23)
    assert answers.propose(sequence, 2) == (24, 25)


def test_the_oldest_answers_are_forgotten() -> None:
    answers = Answers(max_tokens=100)
    for number in range(50):
        first = 100 * number
        answers.learn(answered(*range(first, first + 20)))
        assert answers.num_tokens <= 100
        assert len(answers._places) <= 100
    assert answers.propose(answered(*range(9)), 2) == ()
    assert answers.propose(answered(*range(4900, 4909)), 2) == (4909, 4910)
    answers.learn(answered(*range(200)))  # too long to keep
    assert answers.propose(answered(*range(9)), 2) == ()


def test_of_two_answers_the_later_one_is_followed() -> None:
    answers = Answers(max_tokens=60)
    for ending in (1, 2, 3):
        answers.learn(answered(*range(30, 40), *[50 + ending] * 8))
        assert answers.propose(answered(*range(30, 40)), 1) == (50 + ending,)
