"""Draft tokens from the text itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.causal.prompt_lookup import PromptLookup


def draft(text: str, max_drafts: int = 100, lookup: PromptLookup | None = None) -> str:
    token_ids = np.array([ord(letter) for letter in text], np.int64)
    return "".join(map(chr, (lookup or PromptLookup()).draft(token_ids, max_drafts)))


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ("the cat sat; the", " cat"),
        ("the cat; the dog sat; the", " dog"),  # the last place with enough after it
        ("abcabc", "abc"),  # the whole period, and no more than there is
        ("one two", ""),
        ("xa ya za", ""),  # a single letter is no ground
        ("", ""),
        ("a", ""),
        ("aa", ""),
        ("aaa", "a"),
    ],
)
def test_what_followed_before_is_the_draft(text: str, drafted: str) -> None:
    assert draft(text) == drafted


def test_a_longer_match_counts_more_than_a_later_one() -> None:
    assert draft("abcX bcY abc") == "X bc"


def test_no_more_than_the_most() -> None:
    assert draft("the cat sat; the", max_drafts=2) == " c"


def test_accepted_drafts_make_it_bolder_and_rejected_ones_shy() -> None:
    lookup = PromptLookup()
    text = "abcdefghijklmnopqrstuvwxyz abc"
    lengths = []
    for share_right in (1, 1, 0, 0, 0, 0):
        lengths.append(len(draft(text, lookup=lookup)))
        lookup.note(lengths[-1], lengths[-1] * share_right)
    assert lengths == [4, 8, 16, 8, 4, 2]


def test_it_pauses_when_nothing_is_right() -> None:
    lookup = PromptLookup()
    text = "abab" * 10
    while drafts := draft(text, lookup=lookup):
        lookup.note(len(drafts), 0)
    resumed = next(n for n in range(1, 100) if draft(text + "ab" * n, lookup=lookup))
    assert 1 < resumed < 20


@given(st.text("ab", max_size=30), st.integers(1, 9))
def test_a_draft_is_always_what_followed_the_same_tokens(text: str, most: int) -> None:
    drafted = draft(text, most)
    assert len(drafted) <= most
    if drafted:
        assert any(text[-n:] + drafted in text for n in (2, 3))
