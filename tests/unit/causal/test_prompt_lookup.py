"""Draft tokens from the text itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.causal.drafts.sources import PromptLookup, Reader
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence


def draft(text: str, max_tokens: int = 4) -> str:
    """What is drafted after a text, of which all but the last token is the prompt."""
    sequence = Sequence([ord(letter) for letter in text[:-1]], SamplingParams())
    write(sequence, text[-1:])
    return proposed(PromptLookup().reader(sequence), sequence, max_tokens)


def write(sequence: Sequence, text: str) -> None:
    token_ids = [*sequence.token_ids.tolist(), *map(ord, text)]
    sequence.rewrite(np.array(token_ids, np.int64))


def proposed(reader: Reader, sequence: Sequence, max_tokens: int = 4) -> str:
    return "".join(map(chr, reader.propose(sequence, max_tokens)))


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ("the cat sat; the", " cat"),
        ("the cat; the dog sat; the", " dog"),
        ("abcabc", "abca"),  # it goes on with the text that it has just gone on with
        ("ababa", "baba"),
        ("one two", ""),
        ("xya zya", ""),  # two letters are no ground
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


@given(st.text("ab", min_size=1, max_size=30), st.integers(1, 9))
def test_a_draft_is_always_what_followed_the_same_tokens(text: str, most: int) -> None:
    drafted = draft(text, most)
    if drafted:
        assert len(drafted) == most
        whole = text + drafted
        assert any(text[-n:] + drafted in whole[:-1] for n in (3, 4) if n < len(text))
    elif len(text) > 3:
        assert text[-3:] not in text[:-1]


SOURCE = "The quick brown fox jumps over the lazy dog. "


@pytest.mark.parametrize(
    ("written", "drafted"),
    [
        ("The qu", "ick "),
        ("The quick bXo", "wn f"),  # one replaced, and the next one is the source's
        ("The quick bXXw", "n fo"),
        ("The quick brXo", "wn f"),  # one added
        ("The quick fox", " jum"),  # a word left out
        ("The quick brow#%&*+", ""),  # too far
        ("The quick brow#%&*+jum", "ps o"),  # three in a row are found anywhere
    ],
)
def test_an_edit_is_followed(written: str, drafted: str) -> None:
    """As well if the text is looked at now and then only."""
    for step in (1, 3, len(written)):
        sequence = Sequence([ord(letter) for letter in SOURCE], SamplingParams())
        write(sequence, written[:1])
        reader = PromptLookup().reader(sequence)
        found = proposed(reader, sequence)
        for start in range(1, len(written), step):
            write(sequence, written[start : start + step])
            found = proposed(reader, sequence)
        assert found == drafted
