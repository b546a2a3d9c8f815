"""`/fill-mask` with joint, step for step as torch does it: orders, searches, samples, words."""

import asyncio
import concurrent.futures
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from maskdial.engine.philox import Philox
from tests.held import held
from tests.servers import engine_of, metric, wait_for

MASK = 1
SPECIAL = [0, 1, 2]
TEXT = "A [MASK]o[MASK] sat by [MASK][MASK]e fire."
OTHERS = ["One [MASK].", "The longest of these has [MASK] and [MASK].", "[MASK]x"]

New = Callable[..., tokenizers.Tokenizer]


class Reference:
    """The same procedure in torch, on the checkpoint."""

    def __init__(self, checkpoint: Path, tokenizer: tokenizers.Tokenizer) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, attn_implementation="eager"
        )
        self.model: Any = model.eval()
        self.tokenizer = tokenizer

    def ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer.encode(text).ids)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """A row for each position; the hybrid reads the token before it for that."""
        mask = torch.zeros(1, 1, len(ids), len(ids))
        rows = self.model(ids[None], attention_mask=mask).logits[0].double()
        return torch.cat([rows[:1], rows[:-1]])

    def written(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, without those of tokens that are never written."""
        found = logits.log_softmax(-1)
        found[:, SPECIAL] = -torch.inf
        return found

    def pseudo(self, ids: torch.Tensor, positions: list[int]) -> float:
        """The pseudo-log-likelihood of the tokens at some positions."""
        total = 0.0
        for position in positions:
            masked = ids.clone()
            masked[position] = MASK
            total += float(self.logits(masked).log_softmax(-1)[position, ids[position]])
        return total


def confidence(order: str, logprobs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """LLaDA's and Dream's, of each row; greater is earlier."""
    probabilities = logprobs.exp()
    if order == "confidence":
        return probabilities.gather(-1, chosen[:, None])[:, 0]
    if order == "topk_margin":
        two = probabilities.topk(2).values
        return two[:, 0] - two[:, 1]
    if order == "entropy":
        return torch.nan_to_num(probabilities * logprobs, nan=0.0).sum(-1)
    return -torch.arange(len(logprobs), dtype=torch.float64)


def fill(
    reference: Reference,
    text: str,
    order: str,
    num_steps: int | None = None,
    threshold: float | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[torch.Tensor, dict[int, tuple[int, float]]]:
    """The filled ids; and by position the pass and the probability that it had."""
    ids = reference.ids(text)
    masked = torch.nonzero(ids == MASK)[:, 0]
    num_steps = num_steps or len(masked)
    quotas = [len(masked) // num_steps] * num_steps
    quotas = [each + (i < len(masked) % num_steps) for i, each in enumerate(quotas)]
    filled: dict[int, tuple[int, float]] = {}
    for step in itertools.count():
        masked = torch.nonzero(ids == MASK)[:, 0]
        if not len(masked):
            return ids, filled
        logits = reference.logits(ids)[masked]
        logprobs = reference.written(logits)
        chosen = logprobs.argmax(-1)
        if temperature:
            tempered = (logprobs / temperature).softmax(-1).cumsum(-1)
            uniform = [
                Philox().uniform(seed, 2 * (step * len(ids) + position))
                for position in masked.tolist()
            ]
            drawn = torch.tensor(uniform, dtype=torch.float64)[:, None] * tempered[:, -1:]
            chosen = torch.searchsorted(tempered, drawn, right=True)[:, 0]
        scores = confidence(order, logprobs, chosen)
        own = logprobs.gather(-1, chosen[:, None])[:, 0].exp()
        ranked = scores.argsort(descending=True, stable=True)
        if threshold is None:
            ranked = ranked[: quotas[step]]
        else:
            keep = own[ranked] >= threshold
            keep[0] = True
            ranked = ranked[keep]
        for at in ranked.tolist():
            position = int(masked[at])
            ids[position] = chosen[at]
            filled[position] = (step, float(own[at]))
    raise AssertionError


@pytest.fixture(scope="module")
def server(hybrid_bundle: Path, start_server: Callable[..., Any]) -> Iterator[Any]:
    running = start_server(models={"dial": hybrid_bundle}, threads=1)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference(hybrid: Path, byte_tokenizer: New) -> Reference:
    return Reference(hybrid, byte_tokenizer())


def ask(
    http: httpx.Client, inputs: str | list[str], status: int = 200, **parameters: object
) -> Any:
    body = {"model": "dial", "inputs": inputs, "parameters": {"joint": True, **parameters}}
    reply = http.post("/fill-mask", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def check_filling(
    filling: Any, ids: torch.Tensor, filled: dict[int, tuple[int, float]], reference: Reference
) -> None:
    """That a filling has torch's tokens, each in torch's pass, with its scores."""
    tokens, positions = filling["tokens"], sorted(filled)
    assert [token["token"] for token in tokens] == ids[positions].tolist()
    assert [token["step"] for token in tokens] == [filled[p][0] for p in positions]
    scores = [token["score"] for token in tokens]
    assert scores == pytest.approx([filled[p][1] for p in positions], rel=1e-4)
    total = reference.pseudo(ids, positions)
    assert filling["log_likelihood"] == pytest.approx(total, abs=1e-4)
    mean = torch.tensor(total / len(positions)).exp().item()
    assert filling["score"] == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"order": "topk_margin", "num_steps": 2},
        {"order": "entropy", "num_steps": 3},
        {"order": "left_to_right", "num_steps": 3},
        {"threshold": 0.02},
        {"temperature": 0.8, "seed": 5, "num_steps": 3},
        {"temperature": 1.5, "seed": 11, "threshold": 0.005},
    ],
)
def test_masks_are_filled_as_in_torch(
    http: httpx.Client, reference: Reference, parameters: dict[str, Any]
) -> None:
    ids, filled = fill(
        reference,
        TEXT,
        parameters.get("order", "confidence"),
        **{name: value for name, value in parameters.items() if name != "order"},
    )
    wanted = {("steps" if name == "num_steps" else name): each for name, each in parameters.items()}
    (filling,) = ask(http, TEXT, **wanted)
    check_filling(filling, ids, filled, reference)
    assert filling["sequence"] == reference.tokenizer.decode(ids.tolist())


def test_an_order_may_be_given(http: httpx.Client, reference: Reference) -> None:
    (filling,) = ask(http, TEXT, order=[2, 0, 3, 1])
    assert [token["step"] for token in filling["tokens"]] == [1, 3, 0, 2]
    ids = reference.ids(TEXT)
    masks = torch.nonzero(ids == MASK)[:, 0].tolist()
    for place in (2, 0, 3, 1):
        ids[masks[place]] = reference.written(reference.logits(ids))[masks[place]].argmax()
    assert [token["token"] for token in filling["tokens"]] == ids[masks].tolist()


def test_a_search_finds_the_beams_that_torch_finds(
    http: httpx.Client, reference: Reference
) -> None:
    start = reference.ids(TEXT)
    beams = [(0.0, start)]
    while any((ids == MASK).any() for _, ids in beams):
        grown: dict[tuple[int, ...], float] = {}
        for total, ids in beams:
            masked = torch.nonzero(ids == MASK)[:, 0]
            logprobs = reference.written(reference.logits(ids)[masked])
            at = int(logprobs.max(-1).values.argmax())
            for logprob, token in zip(*logprobs[at].topk(4), strict=True):
                new = ids.clone()
                new[masked[at]] = token
                key = tuple(new.tolist())
                grown[key] = max(total + float(logprob), grown.get(key, -torch.inf))
        best = sorted(grown.items(), key=lambda item: -item[1])[:4]
        beams = [(total, torch.tensor(key)) for key, total in best]
    positions = torch.nonzero(start == MASK)[:, 0].tolist()
    ranked = sorted(
        ((reference.pseudo(ids, positions), ids) for _, ids in beams), key=lambda each: -each[0]
    )
    found = ask(http, TEXT, top_k=3, num_beams=4)
    assert [each["sequence"] for each in found] == [
        reference.tokenizer.decode(ids.tolist()) for _, ids in ranked[:3]
    ]
    assert [each["log_likelihood"] for each in found] == pytest.approx(
        [total for total, _ in ranked[:3]], abs=1e-4
    )


def test_words_of_several_tokens_are_tried_at_their_lengths(
    http: httpx.Client, reference: Reference
) -> None:
    words = ["ice", "sun", "tea", "me"]  # a letter is a token
    found = ask(http, "I like [MASK]!", targets=words, top_k=4, num_beams=8)
    expected = {}
    for word in words:
        ids = reference.ids(f"I like {word}!")
        positions = list(range(8, 8 + len(word)))
        expected[f"I like {word}!"] = reference.pseudo(ids, positions) / len(word)
    assert [each["sequence"] for each in found] == sorted(
        expected, key=lambda text: -expected[text]
    )
    for each in found:
        means = each["log_likelihood"] / len(each["tokens"])
        assert means == pytest.approx(expected[each["sequence"]], abs=1e-4)
    # Two masks that one pass fills make a word, too.
    (one,) = ask(http, "I like [MASK]!", targets=["tea", "sun"], steps=1)
    assert one["sequence"] in ("I like tea!", "I like sun!")
    (mixed,) = ask(http, "[MASK] like [MASK]!", targets=[["We"], None])
    assert mixed["sequence"].startswith("We like ")
    assert [token["mask"] for token in mixed["tokens"]] == [0, 0, 1]


def test_samples_have_seeds_of_their_own(http: httpx.Client) -> None:
    drawn = ask(http, TEXT, temperature=1, seed=7, top_k=3)
    alone = [ask(http, TEXT, temperature=1, seed=7 + copy)[0] for copy in range(3)]
    assert sorted(drawn, key=str) == sorted(alone, key=str)
    assert [each["score"] for each in drawn] == sorted(
        (each["score"] for each in drawn), reverse=True
    )
    assert len({each["sequence"] for each in drawn}) == 3


@pytest.mark.parametrize(
    "parameters", [{}, {"top_k": 2, "num_beams": 5, "steps": 2}, {"temperature": 1, "seed": 3}]
)
def test_an_answer_is_the_same_in_any_company(
    http: httpx.Client, parameters: dict[str, Any]
) -> None:
    texts = [TEXT, *OTHERS]
    alone = [ask(http, text, **{**parameters, "steps": None}) for text in texts]
    assert ask(http, texts, **{**parameters, "steps": None}) == alone

    def again(index: int) -> bool:
        return bool(ask(http, texts[index], **{**parameters, "steps": None}) == alone[index])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(again, [*range(4)] * 6))


def test_a_client_that_leaves_between_two_passes_ends_them(server: Any, http: httpx.Client) -> None:
    engine = engine_of(server, "dial:full")
    before = metric(http, "maskdial_cancelled_total", model="dial:full", reason="disconnect")
    body = {"model": "dial", "inputs": TEXT, "parameters": {"joint": True}}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            asking = asyncio.create_task(client.post("/fill-mask", json=body))
            # The first pass is over, and the second one waits.
            await asyncio.to_thread(wait_for, lambda: engine._has_work and engine._finished._count)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    engine._finished._count = 0.0
    with held(engine, 1):
        asyncio.run(leave())
        wait_for(lambda: not engine._has_work)
    after = metric(http, "maskdial_cancelled_total", model="dial:full", reason="disconnect")
    assert after == before + 1


def test_a_timeout_between_two_passes_ends_them(server: Any, http: httpx.Client) -> None:
    engine = engine_of(server, "dial:full")
    body = {"model": "dial", "inputs": TEXT, "timeout": 0.2, "parameters": {"joint": True}}
    with held(engine, 1):
        reply = http.post("/fill-mask", json=body)
        assert reply.status_code == 504, reply.text
        assert reply.json()["error"].startswith("the request did not finish within its timeout")
        wait_for(lambda: not engine._has_work)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"steps": 5}, "parameters.steps: must be at most 4, the tokens to fill, not 5"),
    ({"steps": 0}, "parameters.steps: must be at least 1, not 0"),
    ({"steps": 2, "threshold": 0.5}, "parameters.threshold: with it, steps means nothing; send"),
    (
        {"order": [0, 1]},
        "parameters.order: must have the index of each mask of the text once, from 0 to 3",
    ),
    ({"order": "best"}, 'parameters.order: must be one of "confidence", '),
    ({"top_k": 33}, "parameters.top_k: must be between 1 and 32"),
    ({"top_k": 3, "num_beams": 2}, "parameters.top_k: a search with 2 beams finds as many texts"),
    ({"num_beams": 2, "temperature": 1}, "parameters.num_beams: a search does not draw tokens"),
    ({"num_beams": 2, "threshold": 0.5}, "parameters.num_beams: a search fills as many masks"),
    ({"targets": [["a"], None]}, "parameters.targets: targets for 2 blanks, but the text has 4"),
    ({"targets": ["a", None]}, "parameters.targets: send words for all masks, or a list of words"),
    (
        {"targets": ["x" * 30, "y"]},
        "with 62 tokens in its blanks the text has 81; model 'dial' takes",
    ),
    ({"targets": ["[MASK]"]}, "parameters.targets: the target '[MASK]' cannot be written with"),
    ({"joint": None, "steps": 2}, "parameters.steps: is for masks that are filled together; set"),
    ({"joint": False, "targets": [["a"]]}, "parameters.targets: must be words; lists for each"),
]


@pytest.mark.parametrize(("parameters", "sentence"), REFUSED)
def test_what_cannot_be_filled_is_refused(
    http: httpx.Client, parameters: dict[str, Any], sentence: str
) -> None:
    reply = ask(http, TEXT, 422, **parameters)
    assert reply["error"].startswith(sentence)


def test_texts_without_words_and_with_too_many_masks_are_refused(http: httpx.Client) -> None:
    nothing = "the text has nothing but masks; write at least one word beside [MASK]"
    assert ask(http, "[MASK][MASK]", 422)["error"] == nothing
    many = ask(http, "a" + "[MASK]" * 64, 422)["error"]
    assert many.startswith("the text has 66 tokens; model 'dial' takes at most 64")
    words = ["a", "bc"]
    lengths = ask(http, "a" + "[MASK]" * 20, 422, targets=words)["error"]
    assert lengths.startswith(
        "parameters.targets: the targets have 1,048,576 combinations of length"
    )
    masks = ask(http, ["a" + "[MASK]" * 50] * 7, 422, num_beams=32)["error"]
    assert masks.startswith("11,200 masks to fill in all fillings; one request may ask for at most")
    several = ask(http, ["a [MASK]"] * 9, 422, num_beams=32)["error"]
    assert several.startswith("288 fillings to follow; one request may ask for at most 256")


def fill_under(
    reference: Reference, text: str, order: str, texts: list[list[str]]
) -> tuple[torch.Tensor, dict[int, tuple[int, float]]]:
    """The best filling of blanks whose texts, of one length each, are enumerated; and by position
    the pass and the probability.
    """
    ids = reference.ids(text)
    places = torch.nonzero(ids == MASK)[:, 0].tolist()
    fitting = [[reference.ids(each)[1:].tolist() for each in blank] for blank in texts]
    spread: list[int] = []
    blanks = []
    for at, token in enumerate(ids.tolist()):
        length = len(fitting[places.index(at)][0]) if at in places else 1
        if at in places:
            blanks.append([*range(len(spread), len(spread) + length)])
        spread += [token] * length
    ids = torch.tensor(spread)
    filled: dict[int, tuple[int, float]] = {}
    for step in range(sum(map(len, blanks))):
        logprobs = reference.logits(ids).log_softmax(-1)
        best = []
        for blank, words in zip(blanks, fitting, strict=True):
            place = next((i for i, each in enumerate(blank) if each not in filled), None)
            if place is None:
                continue
            before = ids[blank[:place]].tolist()
            allowed = sorted({word[place] for word in words if word[:place] == before})
            own = logprobs[blank[place], allowed]
            score = own.max() if order == "confidence" else (own.exp() * own).sum()
            best.append((float(score), -blank[place], allowed[int(own.argmax())]))
        _, position, token = max(best)
        ids[-position] = token
        filled[-position] = (step, float(logprobs[-position, token].exp()))
    return ids, filled


DATES = [f"{day}{month}" for day in range(10, 20) for month in ("May", "Jun", "Jul")]
GRAMMARS = [
    {"type": "regex", "value": r"1\d(May|Jun|Jul)"},
    {"type": "json", "value": {"enum": [[], {}]}},
    {"type": "lark", "value": 'start: "May" | "Ju" ("n" | "l")'},
]


@pytest.mark.parametrize("order", ["confidence", "entropy"])
def test_blanks_are_filled_with_what_their_grammars_allow(
    http: httpx.Client, reference: Reference, order: str
) -> None:
    text = "On [MASK] he had [MASK] of it, and on [MASK] he slept."
    texts = [DATES, ["[]", "{}"], ["May", "Jun", "Jul"]]
    ids, filled = fill_under(reference, text, order, texts)
    (filling,) = ask(http, text, grammar=GRAMMARS, order=order)
    check_filling(filling, ids, filled, reference)


def test_a_grammar_of_words_chooses_as_the_words_do(http: httpx.Client) -> None:
    text, words = "I like [MASK]!", ["ice", "sun", "sea", "me", "Mount"]
    grammar = {"type": "regex", "value": "|".join(words)}
    search: dict[str, Any] = {"order": "left_to_right", "top_k": 4, "num_beams": 8}
    found = ask(http, text, grammar=grammar, **search)
    assert found == ask(http, text, targets=words, **search)
    (short,) = ask(http, text, grammar=grammar, max_new_tokens=2)
    assert short["sequence"] == "I like me!"


def test_tokens_after_which_no_text_ends_are_not_drawn(http: httpx.Client) -> None:
    """At two tokens, only the second alternative can be completed."""
    grammar = {"type": "regex", "value": "[a-y]{3}|z[0-9]"}
    for seed in range(5):
        (drawn,) = ask(
            http, "x[MASK]!", grammar=grammar, max_new_tokens=2, temperature=2, seed=seed
        )
        assert drawn["sequence"][:2] == "xz"
        assert drawn["sequence"][2].isdigit()


def test_texts_under_grammars_are_the_same_in_any_company(http: httpx.Client) -> None:
    grammar = {"type": "regex", "value": "[a-z]{1,3}"}
    parameters: list[dict[str, Any]] = [
        {"grammar": grammar},
        {"grammar": grammar, "top_k": 2, "num_beams": 3, "max_new_tokens": 2},
        {"grammar": grammar, "temperature": 1, "seed": 3},
    ]
    text = "One [MASK] sat."
    alone = [ask(http, text, **each) for each in parameters]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(ask, http, text, **each) for each in parameters * 3]
        assert [job.result() for job in jobs] == alone * 3


REFUSED_GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"grammar": GRAMMARS[0], "joint": None}, "parameters.grammar: is for masks that are filled"),
    ({"grammar": GRAMMARS[0], "targets": ["a"]}, "parameters.grammar: a mask has targets or a gr"),
    ({"max_new_tokens": 3}, "parameters.max_new_tokens: is for masks with a grammar; send one"),
    ({"grammar": GRAMMARS[0], "steps": 2}, "parameters.steps: a blank with a grammar is filled"),
    ({"grammar": GRAMMARS[:2]}, "parameters.grammar: grammars for 2 blanks, but the text has 4"),
    ({"grammar": GRAMMARS[0], "max_new_tokens": 33}, "parameters.max_new_tokens: must be between"),
    ({"grammar": {"type": "regex", "value": "(a"}}, "parameters.grammar: the grammar cannot be us"),
    (
        {"grammar": {"type": "regex", "value": "a{9}"}},
        "parameters.grammar: no text of 1 to 8 tokens that matches it was found; allow more",
    ),
    (
        {"grammar": {"type": "regex", "value": "a{1,7}"}},
        "parameters.grammar: the grammars have 2,401 combinations of lengths in the text's masks",
    ),
]


@pytest.mark.parametrize(("parameters", "sentence"), REFUSED_GRAMMARS)
def test_grammars_that_blanks_cannot_have_are_refused(
    http: httpx.Client, parameters: dict[str, Any], sentence: str
) -> None:
    assert ask(http, TEXT, 422, **parameters)["error"].startswith(sentence)
