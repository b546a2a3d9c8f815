"""From logits of tokens to entities, and which window of a long text a token is read in."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import InferenceError
from maskdial.masked.tasks.logits import count_windows
from maskdial.masked.tasks.token_classify import (
    AggregationStrategy,
    classify_tokens,
    plan_windows,
    read_tokens,
)

BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
STRATEGIES: tuple[AggregationStrategy, ...] = ("simple", "first", "average", "max")


def word_piece(words: Sequence[str]) -> Tokenizer:
    """A vocabulary of these pieces, uncased, with [CLS] and [SEP] around a text."""
    vocab = {token: index for index, token in enumerate(("[UNK]", "[CLS]", "[SEP]", *words))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return Tokenizer(backend, SpecialTokens())


def byte_level() -> Tokenizer:
    """Every byte a token, with <s> and </s> around a text, as RoBERTa's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(("<s>", "</s>", *alphabet))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, SpecialTokens())


def sentence_piece(words: Sequence[str]) -> Tokenizer:
    """A Unigram vocabulary of these pieces."""
    backend = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in words)], 0, False)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, SpecialTokens())


def certain(tags: Sequence[str], labels: Sequence[str] = BIO) -> np.ndarray:
    """Logits that leave no doubt about the tags."""
    logits = np.zeros((len(tags), len(labels)), np.float32)
    logits[np.arange(len(tags)), [labels.index(tag) for tag in tags]] = 20
    return logits


def log(probabilities: Sequence[Sequence[float]]) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def classify(
    tokenizer: Tokenizer,
    text: str,
    logits: np.ndarray,
    labels: Sequence[str] = BIO,
    strategy: AggregationStrategy = "simple",
    ignore_labels: Sequence[str] = ("O",),
) -> list[Any]:
    """Tagged tokens for the strategy none, entities for the others."""
    tokens = read_tokens(text, tokenizer.encode(text), tokenizer)
    results = classify_tokens(
        logits, tokens, labels, tokenizer, strategy=strategy, ignore_labels=ignore_labels
    )
    return list(results)


def spans(tags: Sequence[str], labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """The entities of one-letter words with these tags: group, first word, end word."""
    tokenizer = word_piece(["a"])
    text = " ".join("a" * len(tags))
    entities = classify(tokenizer, text, certain(tags, labels), labels)
    return [(each.entity_group, each.start // 2, each.end // 2 + 1) for each in entities]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER O I-PER", [("PER", 0, 2), ("PER", 3, 4)]),
        ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("I-PER I-LOC B-LOC", [("PER", 0, 1), ("LOC", 1, 2), ("LOC", 2, 3)]),
        ("O O O", []),
    ],
)
def test_bio(tags: str, expected: list[tuple[str, int, int]]) -> None:
    assert spans(tags.split(), BIO) == expected


@pytest.mark.parametrize("letters", ["BILU", "BIES", "BMES"])
@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER L-PER O U-LOC", [("PER", 0, 3), ("LOC", 4, 5)]),
        ("B-PER L-PER B-PER L-PER", [("PER", 0, 2), ("PER", 2, 4)]),
        ("U-PER U-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("U-PER L-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("B-PER L-PER I-PER I-PER", [("PER", 0, 2), ("PER", 2, 4)]),
        ("I-PER U-PER I-PER", [("PER", 0, 1), ("PER", 1, 2), ("PER", 2, 3)]),
        ("B-PER L-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),
    ],
)
def test_bilou_and_its_spellings(
    letters: str, tags: str, expected: list[tuple[str, int, int]]
) -> None:
    spelled = str.maketrans("BILU", letters)
    labels = ["O", *(f"{letter}-{tag}" for letter in letters for tag in ("PER", "LOC"))]
    written = [tag[0].translate(spelled) + tag[1:] if tag != "O" else tag for tag in tags.split()]
    assert spans(written, labels) == expected


def test_labels_without_a_scheme_are_tags() -> None:
    labels = ("NOUN", "VERB", "E-MAIL", "S-BAR")
    assert spans(["NOUN", "NOUN", "VERB"], labels) == [("NOUN", 0, 2), ("VERB", 2, 3)]
    # Neither is an end: no label begins such an entity. Their names lose the prefix all the same.
    assert spans(["E-MAIL", "E-MAIL", "S-BAR", "S-BAR"], labels) == [("MAIL", 0, 2), ("BAR", 2, 4)]


def test_strategies_give_a_word_one_label() -> None:
    """The word's first token says PER, its surest one LOC, and the mean of its three O."""
    tokenizer = word_piece(["be", "##rl", "##in", "is"])
    labels = ("O", "PER", "LOC")
    logits = log([[0.41, 0.50, 0.09], [0.50, 0.10, 0.40], [0.36, 0.02, 0.62], [0.98, 0.01, 0.01]])

    def entities(strategy: AggregationStrategy, *ignored: str) -> list[tuple[str, float, str]]:
        found = classify(tokenizer, "Berlin is", logits, labels, strategy, ignored)
        return [(each.entity_group, round(each.score, 4), each.word) for each in found]

    assert entities("first", "O") == [("PER", 0.5, "berlin")]
    assert entities("max", "O") == [("LOC", 0.62, "berlin")]
    average = (0.41 + 0.50 + 0.36) / 3
    assert entities("average") == [("O", round((average + 0.98) / 2, 4), "berlin is")]
    assert entities("simple") == [
        ("PER", 0.5, "be"),
        ("O", 0.5, "##rl"),
        ("LOC", 0.62, "##in"),
        ("O", 0.98, "is"),
    ]


def test_an_entity_spans_the_text_and_has_the_mean_of_its_words_scores() -> None:
    tokenizer = word_piece(["new", "york", "in"])
    labels = ("O", "B-LOC", "I-LOC")
    logits = log([[0.9, 0.05, 0.05], [0.2, 0.7, 0.1], [0.2, 0.3, 0.5]])
    (entity,) = classify(tokenizer, "In  New\nYork", logits, labels, "average")
    assert (entity.entity_group, entity.word) == ("LOC", "new york")
    assert entity.score == pytest.approx(0.6)
    assert (entity.start, entity.end) == (4, 12)


def test_no_strategy_gives_tokens() -> None:
    tokenizer = word_piece(["be", "##rl", "##in"])
    tags = ("O", "B-LOC", "I-LOC", "O")
    tokens = classify(tokenizer, "Berlin ö", certain(tags), strategy="none")
    assert [(each.entity, each.index, each.word, each.start, each.end) for each in tokens] == [
        ("B-LOC", 2, "##rl", 2, 4),
        ("I-LOC", 3, "##in", 4, 6),
    ]
    everything = classify(tokenizer, "Berlin ö", certain(tags), strategy="none", ignore_labels=())
    assert [each.word for each in everything] == ["be", "##rl", "##in", "ö"]


def test_ignored_labels_are_those_of_tokens_or_the_tags_of_entities() -> None:
    tokenizer = word_piece(["a"])
    logits = certain(["B-PER", "O", "B-LOC"])
    by_token = classify(tokenizer, "a a a", logits, strategy="none", ignore_labels=["B-PER"])
    assert [each.entity for each in by_token] == ["O", "B-LOC"]
    by_tag = classify(tokenizer, "a a a", logits, ignore_labels=["PER", "B-LOC"])
    assert [each.entity_group for each in by_tag] == ["O", "LOC"]


def test_unknown_tokens_are_words_of_the_text() -> None:
    tokenizer = word_piece(["a", "##b"])
    text = "Ab 東京ab 😀"
    encoding = tokenizer.encode(text)
    tokens = read_tokens(text, encoding, tokenizer)
    assert encoding.tokens[1:-1] == ["a", "##b", "[UNK]", "[UNK]", "a", "##b", "[UNK]"]
    assert tokens.words == ["a", "##b", "東", "京", "a", "##b", "😀"]
    assert tokens.continues.tolist() == [False, True, False, False, False, True, False]
    (entity,) = classify(tokenizer, text, certain(["O", "O", *["I-LOC"] * 5]))
    assert entity.word == "東 京 ab 😀"
    assert text[entity.start : entity.end] == "東京ab 😀"


def test_without_a_prefix_words_begin_at_spaces() -> None:
    tokenizer = byte_level()
    text = "éa  b,\nc 😀"
    tokens = read_tokens(text, tokenizer.encode(text), tokenizer)
    begins = [
        text[start:end]
        for start, end, continues in zip(tokens.starts, tokens.ends, tokens.continues, strict=True)
        if not continues and end > start
    ]
    # A character of several tokens behind a space begins with each of them, as in transformers.
    assert begins == ["é", "é", "b", *["😀"] * 4]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_words_keep_their_accents_and_spaces(strategy: AggregationStrategy) -> None:
    accents = byte_level()
    text = "été là"
    logits = certain(["I-LOC"] * (len(accents.encode(text)) - 2))
    assert [each.word for each in classify(accents, text, logits, strategy=strategy)] == [text]
    spaces = sentence_piece(["▁New", "▁York", "▁Ci", "ty"])
    (entity,) = classify(spaces, "New York City", certain(["I-LOC"] * 4), strategy=strategy)
    assert (entity.word, entity.start, entity.end) == ("New York City", 0, 13)


@pytest.mark.parametrize("strategy", ["none", *STRATEGIES])
def test_a_text_without_tokens_has_no_entities(strategy: AggregationStrategy) -> None:
    tokenizer = word_piece(["a"])
    logits = np.empty((0, len(BIO)), np.float32)
    assert classify(tokenizer, "\u200b", logits, strategy=strategy) == []


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(InferenceError, match="not finite"):
        classify(word_piece(["a"]), "a", np.full((1, len(BIO)), np.nan, np.float32))


def test_large_logits_are_no_overflow() -> None:
    logits = np.full((1, len(BIO)), -3e38, np.float32)
    logits[0, 1] = 3e38
    (entity,) = classify(word_piece(["a"]), "a", logits)
    assert (entity.entity_group, entity.score) == ("PER", 1.0)


@given(st.integers(0, 90), st.integers(1, 20), st.integers(0, 19))
@example(21, 20, 19)
@example(20, 20, 0)
def test_every_token_is_read_once_where_it_sees_most(
    num_tokens: int, room: int, stride: int
) -> None:
    stride = min(stride, room - 1)
    windows = plan_windows(num_tokens, room, stride)
    assert len(windows) == (count_windows(num_tokens, room, stride) if num_tokens else 0)
    assert [token for window in windows for token in window.tokens] == list(range(num_tokens))
    ends = [min(window.start + room, num_tokens) for window in windows]

    def context(number: int, token: int) -> float:
        """Tokens to the nearer of the edges where the window cuts the text."""
        start, end = windows[number].start, ends[number]
        if not start <= token < end:
            return -1
        before = token - start if start else np.inf
        after = end - 1 - token if end < num_tokens else np.inf
        return min(before, after)

    for number, window in enumerate(windows):
        for token in window.tokens:
            most = max(range(len(windows)), key=lambda each: context(each, token))
            assert number == most


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 19))
def test_windows_are_those_that_the_tokenizer_cuts(num_tokens: int, room: int, stride: int) -> None:
    stride = min(stride, room - 1)
    tokenizer = word_piece(["a"])
    text = " ".join("a" * num_tokens)
    encodings = tokenizer.windows(text, max_length=room + 2, stride=stride)
    starts = [encoding.offsets[1][0] // 2 for encoding in encodings]
    assert [window.start for window in plan_windows(num_tokens, room, stride)] == starts
    assert all(later - earlier == room - stride for earlier, later in pairwise(starts))
