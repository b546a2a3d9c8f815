"""What logits mean: fillings and labels, against the formulas in float64 and known texts."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import (
    Tokenizer as Backend,
)

from maskdial.bundle.manifest import ProblemType, SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import InferenceError, ValidationError
from maskdial.masked.tasks.classify import ClassifyRequest, ScoreFunction, classify
from maskdial.masked.tasks.fill_mask import (
    FillMaskRequest,
    check_masks_kept,
    fill_mask,
    mask_positions,
    resolve_targets,
    write_masks,
)

BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT_WORDS = ["paris", "is", "the", "capital", "city", "of", "france", ".", "un", "##seen", "##s"]
BERT_VOCAB = {token: token_id for token_id, token in enumerate(BERT_SPECIAL + BERT_WORDS)}


@pytest.fixture(scope="module")
def bert() -> Tokenizer:
    """A WordPiece tokenizer, lower case, as BERT's."""
    backend = Backend(models.WordPiece(BERT_VOCAB, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(BERT_SPECIAL)
    return Tokenizer(backend, SpecialTokens(pad=0, mask=4))


@pytest.fixture(scope="module")
def roberta() -> Tokenizer:
    """A byte-level BPE tokenizer whose mask takes the space before it, as RoBERTa's."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocab = {token: token_id for token_id, token in enumerate(special)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    merges = []
    for word in ("capital", "city", "the"):
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocab.setdefault(word[:end], len(vocab))
        merges.append(("Ġ", word))
        vocab["Ġ" + word] = len(vocab)
    backend = Backend(models.BPE(vocab, list(dict.fromkeys(merges)), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special[:-1])
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return Tokenizer(backend, SpecialTokens(pad=1, mask=4))


@pytest.fixture(scope="module")
def maskless() -> Tokenizer:
    return Tokenizer(Backend(models.WordLevel({"a": 0}, unk_token="a")), SpecialTokens())


def softmax64(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The definition, in float64."""
    exponents = np.exp(logits.astype(np.float64) - np.max(logits))
    return np.asarray(exponents / exponents.sum())


def bert_logits(**best: float) -> NDArray[np.float32]:
    """One row of zeros but for the words given."""
    row = np.zeros((1, len(BERT_VOCAB)), np.float32)
    for word, logit in best.items():
        row[0, BERT_VOCAB[word]] = logit
    return row


def test_one_mask_is_filled_best_first(bert: Tokenizer) -> None:
    ids = bert.encode("Paris is the [MASK] of France.").ids
    positions = mask_positions(ids, bert)
    assert positions == (4,)
    logits = bert_logits(city=2.0, capital=3.0, un=1.0)
    (fillings,) = fill_mask(logits, ids, positions, bert, top_k=3)
    total = math.exp(3) + math.exp(2) + math.exp(1) + len(BERT_VOCAB) - 3
    assert [(f.token, f.token_str, f.sequence) for f in fillings] == [
        (8, "capital", "paris is the capital of france."),
        (9, "city", "paris is the city of france."),
        (13, "un", "paris is the un of france."),
    ]
    assert [f.score for f in fillings] == pytest.approx(
        [math.exp(logit) / total for logit in (3, 2, 1)], abs=1e-6
    )


def test_several_masks_keep_the_others_visible(bert: Tokenizer) -> None:
    ids = bert.encode("[MASK] is the [MASK].").ids
    positions = mask_positions(ids, bert)
    logits = np.concatenate([bert_logits(paris=5), bert_logits(capital=5)])
    first, second = fill_mask(logits, ids, positions, bert, top_k=1)
    assert [f.sequence for f in first] == ["[CLS] paris is the [MASK]. [SEP]"]
    assert [f.sequence for f in second] == ["[CLS] [MASK] is the capital. [SEP]"]


def test_padding_stays_out_of_the_sequence(bert: Tokenizer) -> None:
    ids = [*bert.encode("[MASK] [MASK]").ids, 0, 0]
    logits = np.concatenate([bert_logits(paris=5), bert_logits(**{"[PAD]": 5})])
    first, second = fill_mask(logits, ids, mask_positions(ids, bert), bert, top_k=1, pad_token_id=0)
    assert first[0].sequence == "[CLS] paris [MASK] [SEP]"
    assert second[0].token == 0
    assert second[0].sequence == "[CLS] [MASK] [SEP]"


def test_a_word_piece_alone_shows_what_it_is(bert: Tokenizer) -> None:
    ids = bert.encode("un [MASK]").ids
    (fillings,) = fill_mask(
        bert_logits(**{"##seen": 4, "[SEP]": 3}), ids, mask_positions(ids, bert), bert, top_k=2
    )
    assert [(f.token_str, f.sequence) for f in fillings] == [("##seen", "unseen"), ("[SEP]", "un")]


def test_byte_level_tokens_bring_their_own_space(roberta: Tokenizer) -> None:
    ids = roberta.encode(write_masks("the [MASK]", roberta)).ids
    (position,) = mask_positions(ids, roberta)
    logits = np.zeros((1, roberta.vocab_size), np.float32)
    logits[0, roberta.token_to_id("Ġcity")] = 9
    logits[0, roberta.token_to_id("city")] = 8
    (fillings,) = fill_mask(logits, ids, [position], roberta, top_k=2)
    assert [(f.token_str, f.sequence) for f in fillings] == [
        (" city", "the city"),
        ("city", "thecity"),
    ]


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=80),
    st.integers(1, 80),
    st.lists(st.integers(0, 79), min_size=1, max_size=20) | st.none(),
)
def test_scores_and_order_are_those_of_a_sorted_float64_softmax(
    values: list[int], top_k: int, targets: list[int] | None
) -> None:
    logits = np.array([values], np.float32) / np.float32(4)
    top_k = min(top_k, len(values))
    allowed = range(len(values))
    target_ids = None
    if targets is not None:
        target_ids = [target % len(values) for target in targets]
        allowed = sorted(set(target_ids))  # type: ignore[assignment]
    expected = softmax64(logits[0])
    ranked = sorted(allowed, key=lambda token: (-expected[token], token))[:top_k]

    (fillings,) = fill_mask(logits, [0], [0], Spelled(), top_k=top_k, target_ids=target_ids)
    assert [f.token for f in fillings] == ranked
    assert [f.score for f in fillings] == pytest.approx(expected[ranked].tolist(), abs=1e-6)


class Spelled(Tokenizer):
    """Decodes ids to their numbers."""

    def __init__(self) -> None:
        super().__init__(Backend(models.WordLevel({"a": 0}, unk_token="a")), SpecialTokens())

    def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
        return str(ids)


def test_a_large_vocabulary_keeps_the_precision() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 4, (3, 50_000)).astype(np.float32) + 200
    result = fill_mask(logits, [0, 0, 0], [0, 1, 2], Spelled(), top_k=50)
    for row, fillings in zip(logits, result, strict=True):
        expected = softmax64(row)
        scores = np.array([f.score for f in fillings])
        assert np.abs(scores - np.sort(expected)[::-1][:50]).max() < 1e-6


def test_a_row_scores_the_same_alone_to_the_last_bit() -> None:
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 3, (4, 8_001)).astype(np.float32)
    together = fill_mask(logits, [0] * 4, range(4), Spelled(), top_k=9)
    for row in range(4):
        (alone,) = fill_mask(logits[row : row + 1].copy(), [0] * 4, [row], Spelled(), top_k=9)
        assert [(f.token, f.score) for f in alone] == [(f.token, f.score) for f in together[row]]


def test_target_scores_are_shares_of_the_whole_vocabulary(bert: Tokenizer) -> None:
    ids = bert.encode("the [MASK]").ids
    logits = bert_logits(capital=3, city=2, france=7)
    targets = resolve_targets(["city", "Capital"], bert, 16)
    (fillings,) = fill_mask(
        logits, ids, mask_positions(ids, bert), bert, top_k=5, target_ids=targets
    )
    expected = softmax64(logits[0])
    assert [f.token_str for f in fillings] == ["capital", "city"]
    assert [f.score for f in fillings] == pytest.approx(expected[[8, 9]].tolist(), abs=1e-6)


@pytest.mark.parametrize("hole", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_an_error(hole: float) -> None:
    with pytest.raises(InferenceError, match="finite"):
        fill_mask(np.full((1, 4), hole, np.float32), [0], [0], Spelled(), top_k=1)
    with pytest.raises(InferenceError, match="finite"):
        classify(np.array([0, hole], np.float32), ["a", "b"])


def test_a_token_that_is_ruled_out_scores_nothing() -> None:
    logits = np.array([[0, -np.inf]], np.float32)
    (fillings,) = fill_mask(logits, [0], [0], Spelled(), top_k=2)
    assert [f.score for f in fillings] == [1.0, 0.0]


@pytest.mark.parametrize("top_k", [0, -1, 11])
def test_top_k_has_a_range(top_k: int) -> None:
    model: Any = SimpleNamespace(manifest=SimpleNamespace(vocab_size=10))
    with pytest.raises(ValidationError, match=rf"between 1 and 10 .*not {top_k}") as caught:
        FillMaskRequest(["a"], top_k=top_k).check(model)
    assert caught.value.field == "top_k"


def test_a_target_beyond_the_model_is_refused(bert: Tokenizer) -> None:
    assert resolve_targets(["capital"], bert, 9) == (8,)
    with pytest.raises(ValidationError, match="not in the model's vocabulary"):
        resolve_targets(["capital"], bert, 8)


def test_targets_are_looked_up_before_they_are_tokenized(
    bert: Tokenizer, roberta: Tokenizer
) -> None:
    assert resolve_targets(["capital"], bert, 16) == (8,)
    assert resolve_targets(["city", "CAPITAL", "capital", "##s"], bert, 16) == (8, 9, 15)
    without, with_space = roberta.token_to_id("capital"), roberta.token_to_id("Ġcapital")
    assert without != with_space
    vocab_size = roberta.vocab_size
    assert resolve_targets(["capital"], roberta, vocab_size) == (without,)
    assert resolve_targets([" capital"], roberta, vocab_size) == (with_space,)
    assert resolve_targets(["Ġcapital"], roberta, vocab_size) == (with_space,)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["the", "unseen"], r"'unseen' is not a single token .*: it splits into 'un', '##seen'"),
        (["the city"], r"it splits into 'the', 'city'"),
        (["qwerty"], "'qwerty' is not in the model's vocabulary"),
        ([""], "'' is not in the model's vocabulary"),
    ],
)
def test_targets_that_are_not_one_token_are_refused(
    targets: list[str], message: str, bert: Tokenizer
) -> None:
    with pytest.raises(ValidationError, match=message):
        resolve_targets(targets, bert, 16)


def test_a_mask_may_be_written_either_way(bert: Tokenizer, roberta: Tokenizer) -> None:
    assert write_masks("a <mask> and a [MASK]", bert) == "a [MASK] and a [MASK]"
    assert write_masks("a <mask> and a [MASK]", roberta) == "a <mask> and a <mask>"
    assert write_masks("[mask] <MASK>", bert) == "[mask] <MASK>"


def test_a_text_without_a_mask_says_how_to_write_one(bert: Tokenizer, roberta: Tokenizer) -> None:
    with pytest.raises(ValidationError, match=r"no mask; write \[MASK\] where"):
        mask_positions(bert.encode("paris").ids, bert)
    with pytest.raises(ValidationError, match=r"no mask; write <mask> where"):
        mask_positions([], roberta)


@pytest.mark.parametrize(("kept", "message"), [(2, "1 of the text's 2 masks"), (0, "2 of the")])
def test_a_mask_that_is_cut_off_is_an_error(kept: int, message: str, bert: Tokenizer) -> None:
    text = "[MASK] is [MASK]"
    ids = bert.encode(text, add_special_tokens=False).ids
    assert len(ids) == 3
    check_masks_kept(text, ids, bert)
    with pytest.raises(ValidationError, match=f"{message}.*truncation_direction"):
        check_masks_kept(text, ids[:kept], bert)


def test_a_model_without_masks_cannot_fill_them(maskless: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="has no mask token"):
        write_masks("a [MASK]", maskless)
    with pytest.raises(ValidationError, match="has no mask token"):
        mask_positions([0], maskless)


LOGITS = np.array([0.5, -1.0, 2.0], np.float32)
SOFTMAX = [math.exp(x) / (math.exp(0.5) + math.exp(-1) + math.exp(2)) for x in (2, 0.5, -1)]
SIGMOID = [1 / (1 + math.exp(-x)) for x in (2, 0.5, -1)]
PLAIN = [2.0, 0.5, -1.0]


@pytest.mark.parametrize(
    ("problem_type", "function", "scores"),
    [
        (None, None, SOFTMAX),
        ("single_label_classification", None, SOFTMAX),
        ("multi_label_classification", None, SIGMOID),
        ("regression", None, PLAIN),
        ("regression", "softmax", SOFTMAX),
        ("single_label_classification", "sigmoid", SIGMOID),
        ("multi_label_classification", "none", PLAIN),
    ],
)
def test_labels_come_best_first_with_the_function_of_the_problem(
    problem_type: ProblemType | None, function: ScoreFunction | None, scores: list[float]
) -> None:
    result = classify(LOGITS, ["a", "b", "c"], problem_type, function_to_apply=function)
    assert [each.label for each in result] == ["c", "a", "b"]
    assert [each.score for each in result] == pytest.approx(scores, abs=1e-6)


def test_a_single_label_has_a_sigmoid() -> None:
    (result,) = classify(np.array([0.0], np.float32), ["only"], "single_label_classification")
    assert result.score == 0.5


def test_extreme_logits_neither_overflow_nor_warn() -> None:
    logits = np.array([-1e4, 1e4], np.float32)
    functions: list[ScoreFunction] = ["sigmoid", "softmax"]
    for function in functions:
        result = classify(logits, ["low", "high"], function_to_apply=function)
        assert [(each.label, each.score) for each in result] == [("high", 1.0), ("low", 0.0)]


def test_equal_labels_keep_their_order_and_top_k_cuts() -> None:
    logits = np.array([1, 2, 1, 2], np.float32)
    labels = ["a", "b", "c", "d"]
    assert [each.label for each in classify(logits, labels)] == ["b", "d", "a", "c"]
    assert [each.label for each in classify(logits, labels, top_k=3)] == ["b", "d", "a"]
    assert len(classify(logits, labels, top_k=99)) == 4


@pytest.mark.parametrize("top_k", [0, -3])
def test_fewer_than_one_label_is_refused(top_k: int) -> None:
    model: Any = None  # it does not matter which
    with pytest.raises(ValidationError, match="must be at least 1") as caught:
        ClassifyRequest([("a", None)], top_k=top_k).check(model)
    assert caught.value.field == "top_k"
