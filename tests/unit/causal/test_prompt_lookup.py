"""Draft tokens from the text itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.causal.drafts.prompt_lookup import PromptLookup
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence


def draft(text: str, max_tokens: int = 4) -> str:
    sequence = Sequence([ord(letter) for letter in text], SamplingParams())
    return "".join(map(chr, PromptLookup().propose(sequence, max_tokens)))


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ("the cat sat; the", " cat"),
        ("the cat; the dog sat; the", " dog"),
        ("abcabc", "abca"),  # it goes on with the text that it has just gone on with
        ("ababa", "baba"),
        ("one two", ""),
        ("xya zya", ""),  # two letters are no ground
        ("", ""),
        ("a", ""),
        ("aaa", ""),
        ("aaaa", "aaaa"),
    ],
)
def test_what_followed_last_is_the_draft(text: str, drafted: str) -> None:
    assert draft(text) == drafted


def test_a_longer_match_counts_more_than_a_later_one() -> None:
    assert draft("abcdX bcdY abcd", 8) == "X bcdY a"


def test_no_more_than_the_most() -> None:
    assert draft("the cat sat; the", max_tokens=2) == " c"


@given(st.text("ab", max_size=30), st.integers(1, 9))
def test_a_draft_is_always_what_followed_the_same_tokens(text: str, most: int) -> None:
    drafted = draft(text, most)
    if drafted:
        assert len(drafted) == most
        whole = text + drafted
        assert any(text[-n:] + drafted in whole[:-1] for n in (3, 4) if n < len(text))
    elif len(text) > 3:
        assert text[-3:] not in text[:-1]
