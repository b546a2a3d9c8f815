"""Windows over a text that grows: they depend on its words, never on how they came."""

import random

import pytest

from maskdial.policy.windows import Before, Both, Window, Words

TEXTS = [
    "One two three. Four five, six seven eight! Nine ten eleven twelve thirteen fourteen",
    "a",
    "  spaces   before\n\nand behind  \n",
    "日本語のテキストは空白なしで書かれる。short words と漢字",
    "x" * 300 + " y",
    "Ends here. And. Again? Yes!" * 5,
]


def windows_of(kind: type[Both] | type[Before], pieces: list[str]) -> list[Window]:
    """The windows of a text that comes in pieces."""
    words, made = Words(), kind(4, 3)
    found = []
    for piece in pieces:
        words.add(piece)
        found += made.next(words)
    words.finish()
    return found + made.next(words)


def split(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 12))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("kind", [Both, Before])
@pytest.mark.parametrize("text", TEXTS)
def test_windows_are_those_of_the_whole_text(kind: type[Both] | type[Before], text: str) -> None:
    whole = windows_of(kind, [text])
    assert windows_of(kind, list(text)) == whole
    rng = random.Random(text)
    for _ in range(50):
        assert windows_of(kind, split(text, rng)) == whole


@pytest.mark.parametrize("kind", [Both, Before])
@pytest.mark.parametrize("text", TEXTS)
def test_windows_cover_every_word(kind: type[Both] | type[Before], text: str) -> None:
    read = set()
    for window in windows_of(kind, [text]):
        assert window.start <= window.core < window.end
        read |= set(range(window.core, window.end))
    assert all(i in read for i, character in enumerate(text) if not character.isspace())


def test_a_core_has_its_words_and_their_context() -> None:
    text = " ".join(f"w{i}" for i in range(10))
    first, second, third, last = windows_of(Both, [text])
    assert text[first.start : first.end] == "w0 w1 w2 w3"
    assert text[first.cleared :].startswith("w1")
    assert text[second.start : second.end] == "w0 w1 w2 w3 w4 w5"
    assert text[second.cleared :].startswith("w3")
    assert text[third.start : third.end] == "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9"
    assert (text[third.core :][:2], text[third.cleared :]) == ("w3", "w7 w8 w9")
    assert (text[last.start :], text[last.core :]) == ("w4 w5 w6 w7 w8 w9", "w7 w8 w9")
    assert last.cleared == len(text)


def test_no_core_passes_before_its_context_is_there() -> None:
    words, made = Words(), Both(8, 2)
    words.add("a b c d")  # the last word may go on
    assert made.next(words) == []
    words.add(" ")
    (window,) = made.next(words)
    assert words.text[: window.cleared] == "a b "


def test_a_judged_text_is_cut_where_sentences_end() -> None:
    text = "One two. Three four. Five six seven eight nine ten"
    found = [text[w.core : w.end] for w in windows_of(Before, [text])]
    assert found == ["One", "two.", "Three four.", "Five six seven eight", "nine ten"]


def test_a_text_of_white_space_has_no_window() -> None:
    assert windows_of(Both, ["  ", "\n"]) == windows_of(Before, [" "]) == []
