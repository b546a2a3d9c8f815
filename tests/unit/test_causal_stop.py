"""Stop strings in text that arrives in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.causal.stop import StopMatcher


def feed(pieces: list[str], stops: list[str], *, include: bool) -> tuple[str, bool]:
    matcher = StopMatcher(stops, include=include)
    text = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return text, matcher.matched


def expected(text: str, stops: list[str], *, include: bool) -> tuple[str, bool]:
    """Reads the text one character at a time and looks at its ending, the definition itself."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            return text[: end if include else end - max(map(len, endings))], True
    return text, False


@pytest.mark.parametrize(
    ("pieces", "stops", "included", "excluded"),
    [
        (["one", " two", " three"], [" two"], "one two", "one"),
        (["he said ST", "O", "P now"], ["STOP"], "he said STOP", "he said "),
        (["a\n", "\nb"], ["\n\n"], "a\n\n", "a"),
        (["xab", "c"], ["ab", "xabc"], "xab", "x"),
        (["aab"], ["b", "ab"], "aab", "a"),
        (["never"], ["ends"], "never", "never"),
    ],
)
def test_text_ends_at_the_stop_string(
    pieces: list[str], stops: list[str], included: str, excluded: str
) -> None:
    assert feed(pieces, stops, include=True)[0] == included
    assert feed(pieces, stops, include=False)[0] == excluded


@given(
    pieces=st.lists(st.text("ab\n", max_size=5), max_size=8),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_how_the_text_is_cut_makes_no_difference(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    assert feed(pieces, stops, include=include) == expected("".join(pieces), stops, include=include)


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_only_a_possible_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    shown = seen = ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        if matcher.matched:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_is_held_back_when_the_stop_string_is_shown() -> None:
    matcher = StopMatcher(["abc"], include=True)
    assert [matcher.push(piece) for piece in ("xa", "b", "cd")] == ["xa", "b", "c"]
    assert matcher.matched
    assert matcher.push("more") == ""
