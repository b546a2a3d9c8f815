"""Guessing ahead changes how fast a text comes, and nothing else.

With the kernels, every reply is the same to the last bit, alone and in company. ONNX Runtime's
attention for several tokens differs from the one for a single token in the last bits; without the
kernels, the texts are compared, and log-probabilities but for as much as these bits decide: in
int8, now and then, which way an activation is rounded.
"""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from maskdial.causal.drafts.sources import Answers
from maskdial.causal.sequence import SharedPrompt
from maskdial.errors import DeadlineError
from tests.engine.conftest import PATIENCE
from tests.engine.test_engine_company import random_params, run_in_company

MAX_DRAFTS = 8
A_STEP = 0.2

PROMPTS = (
    "Once upon a time there was a little",
    'The king said, "Come here." The king said, "Come here." The king said,',
    "red green blue white black red green blue white black red green",
    "I am I am I am I am",
    "the sea and the sea and the",
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
    "He went to the door and opened it. He went to the window and opened it. He went to the",
    "\n\n\n\n\n\n",
)


def prompts(starter: Any) -> list[Any]:
    rng = random.Random(12)
    found: list[Any] = list(PROMPTS)
    for num_prompt in (1, 2, 3, 40, 200):
        found.append(starter.random_prompt(rng, num_prompt))
        few = starter.random_prompt(rng, 4)
        found.append(tuple(rng.choice(few) for _ in range(num_prompt)))
    return found


def check_same(model: Any, drafted: list[Any], plain: list[Any]) -> None:
    """To the last bit, if the kernels are there."""
    if model.session.is_exact:
        assert drafted == plain
    for one, other in zip(drafted, plain, strict=True):
        assert (one.token_ids, one.text, one.reason) == (other.token_ids, other.text, other.reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=A_STEP)


def check_bookkeeping(bench: Any, num_generated: int) -> None:
    """Every pass gives one token, and one more for each draft that held."""
    tally, runner = bench.tally, bench.runner
    assert tally.num_generated == num_generated
    num_accepted = sum(accepted for _, accepted in tally.drafts)
    assert all(0 <= accepted <= num <= MAX_DRAFTS for num, accepted in tally.drafts)
    assert runner.num_decodes + runner.num_prefills + num_accepted == num_generated
    assert runner.num_prefills > 0


@pytest.mark.parametrize("max_new_tokens", [1, 2, 70])
def test_greedy_texts_are_the_same(tiny: Any, max_new_tokens: int) -> None:
    requests = [tiny.request(prompt, max_new_tokens=max_new_tokens) for prompt in prompts(tiny)]
    bench = tiny.bench(max_drafts=MAX_DRAFTS)
    drafted = bench.run_alone(requests)
    check_same(tiny, drafted, tiny.bench().run_alone(requests))
    check_bookkeeping(bench, sum(len(reply.token_ids) for reply in drafted))
    num_accepted = sum(accepted for _, accepted in bench.tally.drafts)
    assert (num_accepted > bench.tally.num_generated / 3) == (max_new_tokens == 70)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.3},
        {"temperature": 0.5, "top_p": 0.8, "repetition_penalty": 1.05},
        {"top_k": 3, "frequency_penalty": 0.1},
        {"typical_p": 0.4, "min_p": 0.1, "logit_bias": ((0, 4.0),), "min_new_tokens": 20},
        {"mirostat": 2, "mirostat_tau": 1.0, "xtc_probability": 0.5},
    ],
)
def test_seeded_texts_are_the_same(tiny: Any, params: dict[str, Any]) -> None:
    """Each token is drawn with its own random number, however it was come by."""
    requests = [
        tiny.request(prompt, max_new_tokens=40, do_sample=True, seed=seed, **params)
        for seed, prompt in enumerate(prompts(tiny))
    ]
    bench = tiny.bench(max_drafts=MAX_DRAFTS)
    drafted = bench.run_alone(requests)
    check_same(tiny, drafted, tiny.bench().run_alone(requests))
    check_bookkeeping(bench, sum(len(reply.token_ids) for reply in drafted))
    assert sum(accepted for _, accepted in bench.tally.drafts) > 0


LOOP = "abcdefg" * 6


@pytest.fixture(scope="module")
def loop(tiny: Any) -> Any:
    """A text that repeats itself, so that nearly all drafts hold."""
    (plain,) = tiny.bench().run_alone([tiny.request(LOOP, max_new_tokens=60)])
    return plain


@pytest.mark.parametrize("max_new_tokens", [*range(1, 13), 20, 33])
def test_no_token_beyond_the_last(tiny: Any, loop: Any, max_new_tokens: int) -> None:
    bench = tiny.bench(max_drafts=MAX_DRAFTS)
    request = tiny.request(LOOP, max_new_tokens=max_new_tokens)
    (reply,) = bench.run_alone([request])
    assert bench.runner.furthest < len(request.prompt) + max_new_tokens
    assert reply.token_ids == loop.token_ids[:max_new_tokens]
    assert reply.reason == "length"
    check_bookkeeping(bench, max_new_tokens)
    if max_new_tokens >= 12:
        assert max(accepted for _, accepted in bench.tally.drafts) >= 4


@pytest.mark.parametrize("room", [1, 2, 3, 7, 12, 25])
def test_no_token_beyond_the_context(tiny: Any, loop: Any, room: int) -> None:
    request = tiny.request(LOOP, max_new_tokens=60)
    max_length = len(request.prompt) + room
    bench = tiny.bench(max_drafts=MAX_DRAFTS, max_length=max_length)
    (reply,) = bench.run_alone([request])
    assert reply.token_ids == loop.token_ids[:room]
    assert reply.reason == "length"
    check_bookkeeping(bench, room)


@pytest.mark.parametrize("how", ["stop token", "end of sequence", "ignored end of sequence"])
def test_a_token_that_ends_the_text_ends_it_inside_of_drafts(
    tiny: Any, loop: Any, how: str
) -> None:
    """Every token of the loop in turn, in several places of the drafts."""
    num_inside = 0
    for place in range(3, 30, 2):
        begin = place - 3
        ending = loop.token_ids[place]
        eos_token_ids = [] if how == "stop token" else [ending]
        request = tiny.request(
            tiny.request(LOOP).prompt + loop.token_ids[:begin],
            max_new_tokens=15,
            stop_token_ids=frozenset({ending}) if how == "stop token" else frozenset(),
            ignore_eos=how == "ignored end of sequence",
        )
        bench = tiny.bench(max_drafts=MAX_DRAFTS, eos_token_ids=eos_token_ids)
        (reply,) = bench.run_alone([request])
        (wanted,) = tiny.bench(eos_token_ids=eos_token_ids).run_alone([request])
        assert reply.token_ids == wanted.token_ids
        assert (reply.text, reply.texts, reply.reason) == (wanted.text, wanted.texts, wanted.reason)
        check_bookkeeping(bench, len(wanted.token_ids))
        assert (wanted.reason == "length") == (how == "ignored end of sequence")
        # An ignored one is a draft token like any other, and does not end the draft.
        num_inside += any(
            accepted > 0 if how == "ignored end of sequence" else accepted < num
            for num, accepted in bench.tally.drafts
        )
    assert num_inside > 5


@pytest.mark.parametrize("include_stop", [True, False])
def test_a_stop_string_ends_the_text_inside_of_drafts(
    tiny: Any, loop: Any, include_stop: bool
) -> None:
    num_inside = 0
    for start in range(20, len(loop.text) - 8, 5):
        stop = loop.text[:start][-12:]  # it may stand earlier in the text, too
        request = tiny.request(
            LOOP, max_new_tokens=60, stop=(stop,), include_stop=include_stop, min_new_tokens=8
        )
        bench = tiny.bench(max_drafts=MAX_DRAFTS)
        (reply,) = bench.run_alone([request])
        (wanted,) = tiny.bench().run_alone([request])
        assert reply.token_ids == wanted.token_ids
        assert (reply.text, reply.texts, reply.reason) == (wanted.text, wanted.texts, wanted.reason)
        check_bookkeeping(bench, len(wanted.token_ids))
        num_drafts, num_accepted = bench.tally.drafts[-1]
        num_inside += reply.reason == "stop_sequence" and num_accepted < num_drafts
    assert num_inside > 0


def test_each_of_several_texts_has_its_own_drafts(tiny: Any, loop: Any) -> None:
    """Those that repeat themselves need fewer passes, beside one that never does."""
    if not tiny.session.is_exact:
        pytest.skip("the kernels are not built")
    requests = [
        tiny.request(LOOP, max_new_tokens=60),
        tiny.request(range(5, 60), max_new_tokens=60, do_sample=True, temperature=9.0, seed=3),
        tiny.request("bcdefga" * 5, max_new_tokens=40),
        tiny.request(LOOP + "hello", max_new_tokens=50, do_sample=True, temperature=0.5, seed=4),
    ]
    bench = tiny.bench(max_drafts=MAX_DRAFTS)
    assert bench.run_together(requests) == tiny.bench().run_alone(requests)
    steps = []
    for drafted in (True, False):
        bench = tiny.bench(max_drafts=MAX_DRAFTS * drafted)
        bench.run_together([requests[0], requests[2]])
        steps.append(bench.runner.num_decodes)
    assert steps[0] < steps[1] / 2


def test_without_the_kernels_drafting_ends_when_others_come(tiny: Any, loop: Any) -> None:
    """And begins again when they are gone; the text goes on as if nobody had come."""
    other = tiny.request(range(5, 60), max_new_tokens=6)
    (other_alone,) = tiny.bench().run_alone([other])
    bench = tiny.bench(max_drafts=MAX_DRAFTS, together=False)

    async def main() -> None:
        reader = bench.submit(tiny.request(LOOP, max_new_tokens=60))
        await bench.step(4)
        num_alone = len(bench.tally.drafts)
        assert num_alone > 0
        second = bench.submit(other)
        await bench.step(6)
        assert len(bench.tally.drafts) == num_alone
        assert second.reply == other_alone
        await bench.run_dry()
        assert len(bench.tally.drafts) > num_alone
        assert reader.reply.token_ids == loop.token_ids

    asyncio.run(main())


def test_leaving_between_drafts(tiny: Any) -> None:
    """Rejected draft tokens leave nothing behind in the slot or the cache."""
    bench = tiny.bench(max_drafts=MAX_DRAFTS, cache_blocks=170, slots=1)
    requests = [tiny.request(LOOP, max_new_tokens=60), tiny.request(range(9, 250))]
    wanted = tiny.bench().run_alone(requests)

    async def main() -> None:
        reader = bench.submit(requests[0], timeout=0.001)
        for _ in range(4):
            bench.engine.step()
        await reader.ended()
        assert isinstance(reader.error, DeadlineError)
        assert 4 < len(reader.events) < 60
        await bench.run_dry()

    asyncio.run(main())
    assert [reply.token_ids for reply in bench.run_alone(requests)] == [
        reply.token_ids for reply in wanted
    ]


RECORD = {
    "type": "object",
    "properties": {
        "first_name_of_the_person": {"type": "string", "maxLength": 8},
        "number_of_children": {"type": "integer", "minimum": 0, "maximum": 99},
        "favorite_color": {"enum": ["light green", "light blue"]},
    },
    "required": ["first_name_of_the_person", "number_of_children", "favorite_color"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", [None, 5])
def test_what_a_grammar_forces_is_drafted(
    starter: Any, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of JSON take a pass or two, and masks after drafts are those of single steps."""
    monkeypatch.setattr("maskdial.causal.output_processor._DRAFT_PATIENCE_SECONDS", PATIENCE)
    if not starter.session.is_exact:
        pytest.skip("the kernels are not built")
    request = starter.request(
        "Tell me about a person.", max_new_tokens=90, do_sample=seed is not None, seed=seed
    )
    request = replace(request, grammar=starter.grammar("json", RECORD))
    bench = starter.bench(max_drafts=16)
    (reply,) = bench.run_alone([request])
    assert reply == starter.bench().run_alone([request])[0]
    assert reply.reason == "eos_token"
    share = 3 if seed is None else 8  # it often divides keys otherwise than the tokenizer does
    assert sum(accepted for _, accepted in bench.tally.drafts) > len(reply.token_ids) / share


class WatchedMatcher:
    """A grammar's matcher that keeps the drafts whose masks it has to prepare."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.drafts: list[tuple[int, ...]] = []

    def matcher(self) -> "WatchedMatcher":
        return self

    def prepare(self, drafts: tuple[int, ...] = ()) -> None:
        self.drafts += [drafts] if drafts else []
        self._matcher.prepare(drafts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_no_draft_is_one_that_the_grammar_forbids(
    starter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt goes on otherwise than the grammar lets the text."""
    monkeypatch.setattr("maskdial.causal.output_processor._DRAFT_PATIENCE_SECONDS", PATIENCE)
    grammar = starter.grammar("regex", "( la){3,30}")
    watched = WatchedMatcher(grammar.matcher())
    request = starter.request(
        "la la lo la la lo la la lo la la", max_new_tokens=40, ignore_eos=True
    )
    bench = starter.bench(max_drafts=MAX_DRAFTS)
    (reply,) = bench.run_alone([replace(request, grammar=watched)])
    assert reply == starter.bench().run_alone([replace(request, grammar=grammar)])[0]
    assert len(watched.drafts) == len(bench.tally.drafts) > 1
    for drafts in watched.drafts:
        assert set(starter.tokenizer.decode(drafts)) <= set(" la")
        assert len(drafts) <= MAX_DRAFTS


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "cache_blocks"), [(8, 0), (3, 6)])
def test_alone_and_in_random_company_are_equal(starter: Any, slots: int, cache_blocks: int) -> None:
    """With any of the parameters; copies of a prompt and clients that leave come in between."""
    if not starter.session.is_exact:
        pytest.skip("the kernels are not built")
    rng = random.Random(slots)
    grammars = [
        starter.grammar("regex", "([a-z]{2,4} ){8,12}"),
        starter.grammar("json", RECORD),
        starter.grammar("lark", 'start: ("red and green, " | "red and blue, ")+'),
    ]
    requests = []
    for number in range(24):
        few = starter.random_prompt(rng, rng.choice((3, 9, 25)))
        prompt: tuple[int, ...] = few * rng.choice((1, 4, 8))
        if number % 3 == 0:
            prompt = tuple(starter.tokenizer.encode(rng.choice(PROMPTS)).ids)
        params = random_params(rng, prompt, starter.manifest.vocab_size)
        requests.append(
            replace(
                starter.request(prompt),
                params=replace(params, max_new_tokens=rng.randint(5, 40)),
                seed=rng.randrange(2**64),
                grammar=rng.choice(grammars) if number % 4 == 1 else None,
            )
        )
    bench = starter.bench(slots=slots, cache_blocks=cache_blocks, max_drafts=MAX_DRAFTS)
    together = run_in_company(bench, requests, rng)
    alone = starter.bench().run_alone(requests)
    for number, (reply, wanted) in enumerate(zip(together, alone, strict=True)):
        assert reply == wanted, f"request {number}: {requests[number]}"
    assert sum(accepted for _, accepted in bench.tally.drafts) > 20
    assert bench.tally.kv_bytes == 0


def test_copies_of_a_prompt_have_their_own_drafts(tiny: Any) -> None:
    """As with ``n``: each is what it is alone with its seed."""
    if not tiny.session.is_exact:
        pytest.skip("the kernels are not built")
    requests = [
        tiny.request(LOOP, max_new_tokens=30, do_sample=True, temperature=0.7, seed=seed)
        for seed in range(5)
    ]
    bench = tiny.bench(slots=3, max_drafts=MAX_DRAFTS)

    async def main() -> list[Any]:
        shared = SharedPrompt()
        readers = [bench.submit(request, shared) for request in requests]
        await bench.run_dry()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == tiny.bench().run_alone(requests)
    assert sum(accepted for _, accepted in bench.tally.drafts) > 0


def test_an_answer_that_was_given_before_comes_sooner(starter: Any) -> None:
    """To those of the same cache salt; the text is the same to the last bit."""
    if not starter.session.is_exact:
        pytest.skip("the kernels are not built")
    first = starter.request(
        PROMPTS[0], max_new_tokens=60, do_sample=True, temperature=0.9, seed=2, ignore_eos=True
    )
    (wanted,) = starter.bench().run_alone([first])
    bench = starter.bench(max_drafts=16, answers=Answers())
    passes = []
    for request in (first, replace(first, salt="other"), first):
        before = bench.runner.num_decodes
        assert bench.run_alone([request]) == [wanted]
        passes.append(bench.runner.num_decodes - before)
    assert passes[0] == passes[1] > 50
    assert passes[2] < 15


def drawn_requests(starter: Any) -> list[Any]:
    """Prompts of all lengths; some texts are greedy, others part from what is likeliest."""
    rng = random.Random(8)
    return [
        starter.request(
            starter.random_prompt(rng, rng.choice((1, 2, 30, 100))),
            max_new_tokens=rng.randint(4, 40),
            do_sample=number % 3 > 0,
            temperature=0.8,
            seed=number,
            ignore_eos=True,
        )
        for number in range(14)
    ]


@pytest.mark.parametrize("slots", [1, 4])
def test_a_draft_model_writes_for_all_texts_at_once(starter: Any, slots: int) -> None:
    """Here the model is its own draft model, so that drafts are wrong only where others are drawn.

    Its slots hold what the texts have, whoever comes and goes.
    """
    if not starter.session.is_exact:
        pytest.skip("the kernels are not built")
    requests = drawn_requests(starter)
    wanted = starter.bench().run_alone(requests)
    model = starter.draft_model(slots)
    bench = starter.bench(slots=slots, max_drafts=MAX_DRAFTS, proposers=(), model=model)
    assert run_in_company(bench, requests, random.Random(slots)) == wanted
    num_drafts, num_accepted = map(sum, zip(*bench.tally.drafts, strict=True))
    assert num_accepted > 100
    assert num_drafts - num_accepted > 10
    greedy = [request for request in requests if not request.params.do_sample]
    tally = starter.bench(slots=slots, max_drafts=MAX_DRAFTS, proposers=(), model=model)
    assert tally.run_together(greedy) == [
        reply for request, reply in zip(requests, wanted, strict=True) if request in greedy
    ]
    assert all(num == accepted for num, accepted in tally.tally.drafts)


def test_a_draft_model_that_fails_leaves_the_texts_alone(
    starter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if not starter.session.is_exact:
        pytest.skip("the kernels are not built")
    requests = drawn_requests(starter)[:4]
    model = starter.draft_model(fail_at=3)
    bench = starter.bench(max_drafts=MAX_DRAFTS, proposers=(), model=model)
    assert bench.run_together(requests) == starter.bench().run_alone(requests)
    assert len(bench.tally.drafts) > 3
    (failure,) = (each for each in caplog.records if "draft model" in each.message)
    assert failure.levelname == "ERROR"
