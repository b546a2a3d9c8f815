"""Stop strings in text that arrives in pieces."""

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.causal.stop import Reasoning, ReasoningGate, StopMatcher


def feed(pieces: list[str], stops: list[str], *, include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return text, matcher.found


def expected(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Reads the text one character at a time and looks at its ending, the definition itself."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            longest = max(endings, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "included", "excluded"),
    [
        (["one", " two", " three"], [" two"], "one two", "one"),
        (["he said ST", "O", "P now"], ["STOP"], "he said STOP", "he said "),
        (["a\n", "\nb"], ["\n\n"], "a\n\n", "a"),
        (["xab", "c"], ["ab", "xabc"], "xab", "x"),
        (["aab"], ["b", "ab"], "aab", "a"),
        (["aab"], ["ab", "b"], "aab", "a"),
        (["ab", "c"], ["abc", "z"], "abc", ""),
        (["a", "", "b", ""], ["ab"], "ab", ""),
        (["aa", "ab"], ["aab"], "aaab", "a"),
        (["aabaab", "aaa"], ["aabaaa"], "aabaabaaa", "aab"),
        (["abacababa", "cababx"], ["abacababx"], "abacababacababx", "abacab"),
        (["café\u0301", "語🙂"], ["\u0301語"], "café\u0301語", "café"),
        (list("x" + "ab" * 50 + "c"), ["ab" * 49 + "c"], "x" + "ab" * 50 + "c", "xab"),
        (["never"], ["ends"], "never", "never"),
    ],
)
def test_text_ends_at_the_stop_string(
    pieces: list[str], stops: list[str], included: str, excluded: str
) -> None:
    assert feed(pieces, stops, include=True)[0] == included
    assert feed(pieces, stops, include=False)[0] == excluded


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """A text in pieces, and stop strings that overlap, or nearly are, parts of it."""
    pieces = draw(st.lists(st.text("ab🙂", max_size=5), max_size=12))
    text = "".join(pieces)
    borders = st.integers(0, len(text))
    parts = st.builds(lambda start, end, last: text[start:end] + last, borders, borders, letters)
    return pieces, draw(st.lists(parts | st.text("ab🙂", min_size=1, max_size=4), max_size=4))


letters = st.sampled_from("ab🙂")


@given(cut_text=cut_texts(), include=st.booleans())
def test_how_the_text_is_cut_makes_no_difference(
    cut_text: tuple[list[str], list[str]], include: bool
) -> None:
    pieces, stops = cut_text
    assert feed(pieces, stops, include=include) == expected("".join(pieces), stops, include=include)


@given(cut_texts())
def test_what_may_become_a_stop_string_is_held_back_and_nothing_else(
    cut_text: tuple[list[str], list[str]],
) -> None:
    pieces, stops = cut_text
    matcher = StopMatcher(stops, include=False)
    shown = seen = ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        if matcher.matched:
            return
        endings = [seen[start:] for start in range(len(seen) + 1)]
        held = next(end for end in endings if not end or any(s.startswith(end) for s in stops))
        assert shown + held == seen


def test_nothing_is_held_back_when_the_stop_string_is_shown() -> None:
    matcher = StopMatcher(["abc"], include=True)
    assert [matcher.push(piece) for piece in ("xa", "b", "cd")] == ["xa", "b", "c"]
    assert matcher.matched
    assert matcher.push("more") == ""


@pytest.mark.parametrize(
    ("tokens", "stop", "texts"),
    [
        (["a", "[MASK]", "b"], "ax", ["", "a<call>", "b"]),
        (["a", "[MASK]", "b"], "ab", ["", "a<call>", "b"]),
        (["a", "[MASK]", "b"], "<call>", ["a", ""]),
        (["\u00c3", "[MASK]", "b"], "x", ["", "\ufffd<call>", "b"]),
        (["a", "<bos>", "b"], "ab", ["", "", ""]),
    ],
)
def test_a_token_that_is_spelled_out_keeps_its_place(
    byte_tokenizer: Callable[[], tokenizers.Tokenizer],
    tokens: list[str],
    stop: str,
    texts: list[str],
) -> None:
    """Also where text, or a part of a character, was held back before it."""
    backend = byte_tokenizer()
    tokenizer = Tokenizer(backend, SpecialTokens())
    ids = backend.get_vocab()
    spelled = ((ids["[MASK]"], "<call>"),)
    params = SamplingParams(stop=(stop,), include_stop=False)
    sequence = Sequence([ids["z"]], params, spelled_tokens=spelled)
    events = []
    for token in tokens:
        events.append(
            sequence.accept(
                ids[token],
                0.0,
                detokenizer=tokenizer,
                eos_token_ids=frozenset(),
                max_length=100,
            )
        )
        if events[-1].finish is not None:
            break
    assert [event.text for event in events] == texts


@pytest.mark.parametrize(
    ("text", "opened", "reasoning"),
    [
        ("<t>ab</t>ab", False, "<t>ab</t>"),
        (" \n<t>ab</t></t>", False, " \n<t>ab</t>"),
        ("ab</t>ab", True, "ab</t>"),
        ("<t>ab</t>ab", True, "<t>ab</t>"),
        ("</t>ab", True, "</t>"),
        ("ab<t>ab</t>", False, ""),
        ("<ab>", False, ""),
        ("<", False, ""),
        ("  ", False, ""),
        ("<t>ab</", False, "<t>ab</"),
        ("ab", True, "ab"),
        ("<t></<</t>a", False, "<t></<</t>"),
        ("", True, ""),
    ],
)
def test_reasoning_is_divided_from_the_rest_however_it_is_cut(
    text: str, opened: bool, reasoning: str
) -> None:
    for cut in range(len(text) + 1):
        for size in (1, 2, 3, 50):
            gate = ReasoningGate(Reasoning("<t>", "</t>", opened))
            rest = [text[i : i + size] for i in range(cut, len(text), size)]
            divided = [gate.push(piece) for piece in (text[:cut], *rest)]
            assert "".join(each for each, _ in divided) == reasoning
            content = "".join(each for _, each in divided) + gate.flush()
            assert content == text[len(reasoning) :]


def sequence_text(
    tokenizer: Tokenizer, text: str, params: SamplingParams, reasoning: Reasoning | None = None
) -> tuple[str, str]:
    """What a sequence makes of a text that is generated letter by letter, and how it ends."""
    sequence = Sequence([0], params, reasoning=reasoning)
    told = ""
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        event = sequence.accept(
            token_id, 0.0, detokenizer=tokenizer, eos_token_ids=frozenset({2}), max_length=100
        )
        told += event.text
        if event.finish is not None:
            assert event.finish.generated_text == told
            return told, event.finish.reason
    raise AssertionError("it goes on")


@pytest.mark.parametrize(
    ("text", "opened", "told", "reason"),
    [
        ("<t>stop</t>so it stops here", False, "<t>stop</t>so it ", "stop_sequence"),
        ("stop</t>so it stops here", True, "stop</t>so it ", "stop_sequence"),
        # Neither begins in the reasoning.
        ("<t>st</t>op it stops here", False, "<t>st</t>op it ", "stop_sequence"),
        ("no<t>stop</t>", False, "no<t>", "stop_sequence"),
        ("<t>stop, stop, st", False, "<t>stop, stop, st", "length"),
        ("stops at once", False, "", "stop_sequence"),
        ("<stop", False, "<", "stop_sequence"),
    ],
)
def test_no_stop_string_is_looked_for_in_reasoning(
    byte_tokenizer: Callable[[], tokenizers.Tokenizer],
    text: str,
    opened: bool,
    told: str,
    reason: str,
) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), SpecialTokens())
    params = SamplingParams(
        max_new_tokens=len(text),
        stop=("stop",),
        include_stop=False,
    )
    reasoning = Reasoning("<t>", "</t>", opened)
    assert sequence_text(tokenizer, text, params, reasoning) == (told, reason)


@pytest.mark.parametrize(
    ("stop", "minimum", "told", "reason"),
    [
        ("b", 0, "a", "stop_sequence"),
        ("b", 2, "a", "stop_sequence"),  # the last token that must be there completes it
        ("b", 3, "abca", "stop_sequence"),
        ("b", 5, "abca", "stop_sequence"),
        ("b", 6, "abcab", "stop_sequence"),
        ("b", 7, "abcabbc", "length"),
        ("bc", 2, "a", "stop_sequence"),
        ("bc", 3, "abcab", "stop_sequence"),  # the first one begins too early
        ("bc", 7, "abcabbc", "length"),
    ],
)
def test_a_stop_string_counts_from_the_last_obligatory_token_on(
    byte_tokenizer: Callable[[], tokenizers.Tokenizer],
    stop: str,
    minimum: int,
    told: str,
    reason: str,
) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), SpecialTokens())
    params = SamplingParams(
        max_new_tokens=7, min_new_tokens=minimum, stop=(stop,), include_stop=False
    )
    assert sequence_text(tokenizer, "abcabbc", params) == (told, reason)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_closing_mark_follows_the_budget_once(opened: bool, budget: int) -> None:
    gate = ReasoningGate(Reasoning("<t>", "</t>", opened, budget, (7, 8)))
    num_free = 0
    if not opened:
        assert gate.closing is None
        assert gate.push_token("<t>") == ("<t>", "")
        num_free = 1  # the mark counts
    while gate.closing is None:
        gate.push_token("a")
        num_free += 1
    assert num_free == max(budget, 0 if opened else 1)
    assert gate.closing == 7
    gate.push_token("</")
    assert gate.closing == 8
    gate.push_token("t>")
    assert gate.closing is None
    assert gate.push_token("b") == ("", "b")


def test_a_closing_mark_that_is_not_found_is_not_written_again() -> None:
    gate = ReasoningGate(Reasoning("<t>", "</t>", opened=True, budget=0, closing=(7,)))
    gate.push_token("something else")
    assert gate.closing is None
    assert gate.push_token("b") == ("b", "")
