"""Texts of given numbers of tokens, against an enumeration of all of them."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from maskdial.errors import ValidationError
from maskdial.grammar import fixed_length
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.grammar.fixed_length import FixedLength
from maskdial.grammar.matcher import Grammar
from maskdial.grammar.source import GrammarKind, GrammarValue

TEXTS = ["<end>", "a", "b", "ab", "1", "2", "12", "-", "1-", '"', '"a', "[", "]", ","]
EXCLUDED = 8  # 1-
MAX_LENGTH = 4


class Trusting:
    """Compiles in this process, without a trial."""

    def check(self, grammar: str) -> None: ...
    def close(self) -> None: ...


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    tokenizer = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(TEXTS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(TEXTS[:1])
    compiler = GrammarCompiler(
        tokenizer.to_str(), vocab_size=len(TEXTS), eos_token_ids=[0], checker=Trusting()
    )
    yield compiler
    compiler.close()


New = Callable[[GrammarKind, GrammarValue], FixedLength]


@pytest.fixture(scope="module")
def new(compiler: GrammarCompiler) -> New:
    def make(kind: GrammarKind, value: GrammarValue) -> FixedLength:
        return compiler.submit(kind, value).result().fixed_length({EXCLUDED})

    return make


def is_list(text: str) -> bool:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return False
    # JSON's numbers do not begin with 0, and the grammar writes no second space.
    return isinstance(value, list) and all(type(each) is int for each in value)


CASES: list[tuple[GrammarKind, GrammarValue, Callable[[str], object]]] = [
    ("regex", "[ab]+", re.compile("[ab]+").fullmatch),
    ("regex", "[12]{4}-1", re.compile("[12]{4}-1").fullmatch),
    ("regex", "(ab)*12", re.compile("(ab)*12").fullmatch),
    ("regex", "a.{2}1|b.{2}2", re.compile("a.{2}1|b.{2}2").fullmatch),
    ("regex", "[ab]{1,2}(-[12]{2})?", re.compile("[ab]{1,2}(-[12]{2})?").fullmatch),
    ("lark", 'start: "a" start "b" | "12"', re.compile("12|a12b|aa12bb").fullmatch),
    ("json", {"type": "array", "items": {"type": "integer"}}, is_list),
    ("json", {"enum": ["a", [1, 2]]}, {'"a"', "[1,2]"}.__contains__),
]


@pytest.mark.parametrize(("kind", "value", "matches"), CASES)
def test_completions_are_those_of_the_enumeration(
    new: New, kind: GrammarKind, value: GrammarValue, matches: Callable[[str], object]
) -> None:
    written = [token for token in range(1, len(TEXTS)) if token != EXCLUDED]
    found = {
        tokens
        for length in range(1, MAX_LENGTH + 1)
        for tokens in product(written, repeat=length)
        if matches("".join(TEXTS[token] for token in tokens))
    }
    check_completions(new(kind, value), found, MAX_LENGTH)


def check_completions(constraint: FixedLength, found: set[tuple[int, ...]], most: int) -> None:
    """That a constraint allows these fillings of up to so many tokens, step by step."""
    lengths = sorted({len(tokens) for tokens in found})
    assert constraint.lengths(most) == lengths
    for length in lengths:
        prefixes: set[tuple[int, ...]] = {()}
        for num_left in reversed(range(length)):
            allowed = {tokens[: length - num_left] for tokens in found if len(tokens) == length}
            grown = {
                (*before, token)
                for before in prefixes
                for token in constraint.next_tokens(before)
                if constraint.completes((*before, token), num_left)
            }
            assert grown == allowed
            prefixes = grown


def test_places_are_not_confused_where_the_same_tokens_may_follow(new: New) -> None:
    constraint = new("regex", "[12]{4}")
    # After no digit, one and two, the same tokens may follow.
    assert {constraint.next_tokens(before) for before in [(), (4,), (4, 4)]} == {(4, 5, 6)}
    assert [constraint.lengths(number) for number in (1, 3, 9)] == [[], [2, 3], [2, 3, 4]]


def test_a_search_that_takes_too_long_ends(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_length, "CPU_SECONDS", 0.0)
    with pytest.raises(ValidationError, match="that the grammar allows in blanks takes more than"):
        new("regex", "[ab]+").lengths(2)


# Pieces that read alike behind others, pieces whose text the decoder cleans up, and a space alone.
WORD_PIECE = ["[CLS]", "the", "##the", "cat", "##s", "s", ",", "##,", "'s", '"', '##"', "1", "##1"]
METASPACE = ["<s>", "▁the", "the", "▁cat", "s", "▁", "▁▁", ",", "▁,", '"', '▁"', "1", "▁s"]
SPELLINGS = {
    "word-piece": (WORD_PIECE, decoders.WordPiece()),
    "metaspace": (METASPACE, decoders.Metaspace()),
    "metaspace-kept": (METASPACE, decoders.Metaspace(prepend_scheme="never")),
}
SPELLED_CASES: list[tuple[GrammarKind, GrammarValue, Callable[[str], object]]] = [
    ("regex", " ?[a-z]+,?", re.compile(" ?[a-z]+,?").fullmatch),
    ("regex", "the ?cats?,? ?1*", re.compile("the ?cats?,? ?1*").fullmatch),
    ("regex", "(##)?s?,(the| 1)*", re.compile("(##)?s?,(the| 1)*").fullmatch),
    ("regex", " the", {" the"}.__contains__),
    ("json", {"enum": ["the cat", "s", 11]}, {'"the cat"', '"s"', "11"}.__contains__),
    ("lark", 'start: "the" " cat"* "\'s"?', re.compile("the( cat)*('s)?").fullmatch),
]


@pytest.fixture(scope="module", params=SPELLINGS)
def spelled(request: pytest.FixtureRequest) -> Iterator[tuple[tokenizers.Tokenizer, Any]]:
    """A tokenizer, and a compiler for it; the model has no end-of-sequence token."""
    pieces, decoder = SPELLINGS[request.param]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=pieces[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(pieces[:1])
    compiler = GrammarCompiler(
        tokenizer.to_str(), vocab_size=len(pieces) + 2, eos_token_ids=[], checker=Trusting()
    )
    yield tokenizer, compiler
    compiler.close()


@pytest.mark.parametrize(("kind", "value", "matches"), SPELLED_CASES)
def test_a_blank_matches_as_the_tokenizer_decodes_it(
    spelled: tuple[tokenizers.Tokenizer, GrammarCompiler],
    kind: GrammarKind,
    value: GrammarValue,
    matches: Callable[[str], object],
) -> None:
    tokenizer, compiler = spelled
    found = matching(tokenizer, (), matches)
    check_completions(compiler.submit(kind, value).result().fixed_length(()), found, 3)


@pytest.mark.parametrize(("kind", "value", "matches"), SPELLED_CASES)
@pytest.mark.parametrize("before", [(), (1,)])
def test_a_text_matches_as_the_tokenizer_decodes_it(
    spelled: tuple[tokenizers.Tokenizer, GrammarCompiler],
    before: tuple[int, ...],
    kind: GrammarKind,
    value: GrammarValue,
    matches: Callable[[str], object],
) -> None:
    """Token by token: where it begins, and behind a prompt."""
    tokenizer, compiler = spelled
    grammar = compiler.submit(kind, value).result()
    found: set[tuple[int, ...]] = set()
    with contextlib.suppress(ValidationError):  # no token of this model can begin its text
        found = set(accepted(grammar, 3, first=not before))
    assert found == matching(tokenizer, before, matches)


def matching(
    tokenizer: tokenizers.Tokenizer, before: tuple[int, ...], matches: Callable[[str], object]
) -> set[tuple[int, ...]]:
    """The texts of up to three tokens that match behind others, as the tokenizer decodes them."""
    size, begun = tokenizer.get_vocab_size(), len(tokenizer.decode(before))
    every = [each for length in (1, 2, 3) for each in product(range(1, size), repeat=length)]
    texts = tokenizer.decode_batch([(*before, *tokens) for tokens in every])
    return {tokens for tokens, text in zip(every, texts, strict=True) if matches(text[begun:])}


def accepted(grammar: Grammar, most: int, *, first: bool) -> Iterator[tuple[int, ...]]:
    """The texts of up to so many tokens that a grammar lets end."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        tokens = pending.pop()
        matcher = grammar.matcher(first=first)
        assert matcher.num_allowed(tokens) == len(tokens)
        for token in tokens:
            matcher.accept(token)
        if tokens and matcher._place.may_end:
            yield tokens
        if len(tokens) < most and not matcher.finished:
            try:
                pending += [(*tokens, int(each)) for each in matcher.allowed().nonzero()[0]]
            except ValidationError:  # a dead end
                assert not matcher._place.may_end
