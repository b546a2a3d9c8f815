"""Evaluations: what a graph makes of a sample text, and how much of it another graph keeps.

One for each task. All of them ask the same questions of both graphs, so the two answers to one
question can be compared, and the same questions whenever they are made from the same text.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from maskdial.models.bundle import KVLayout
from maskdial_export.sample import Sample
from maskdial_export.session import CausalSession, Floats, Ids, MaskedSession

Answers = NDArray[Any]

_WINDOW = 128  # tokens of a text that is read at once
_CAUSAL_WINDOW = 256
_PASSAGE = 48
# So much that one decision in a hundred is several, and no more than a BERT-base reads in fp32 on
# two cores in a quarter of a minute.
_MOST_TOKENS = 4096
_MOST_MASKED = 2048  # each is read as often as others are masked
_MOST_PASSAGES = 320
_MOST_PAIRS = 160
_BATCH_TOKENS = 1024  # padding included
_MOST_LOGITS = 2**25  # of one pass, 128 MB
_SEED = 20240229
_MASK_EVERY = 7  # about as many tokens are masked at once as in training, where it is 15%
# Choices of which one is at least this likely as the other are a tie: rounding that tips one is no
# loss. Of a small model's fillings of masks, some in a hundred are as close.
_TIE = 0.9
_MOST_TIED = 8
_TIED_SCORES = 0.05  # standard deviations between two passages' scores

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a graph lost against another: 0.01 is one decision in a hundred, or 1% perplexity."""

    loss: float
    positions: int
    figures: dict[str, float]


class Evaluation(ABC):
    """The questions that a sample makes for one task; their texts are token ids."""

    texts: list[Ids]

    @abstractmethod
    def answers(self, graph: Path) -> Answers:
        """What the graph answers, one row for each question."""

    @abstractmethod
    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        """How the answers differ from the reference's."""


def _cut(tokenizer: Tokenizer, text: str, longest: int, most: int = _MOST_TOKENS) -> list[Encoding]:
    """A text in windows of at most ``longest`` tokens, each with the special tokens of a text."""
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.enable_truncation(longest)
    first = cutting.encode(text)
    windows = [first, *first.overflowing]
    return windows[: -(-most // longest)]


def _batches(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Indices of texts of like length, in batches of at most ``most_tokens`` padded tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class Perplexity(Evaluation):
    """Causal models: how surprised a graph is by each next token, and which it would have said."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: Sample,
        max_length: int,
        vocab_size: int,
        layout: KVLayout,
    ) -> None:
        windows = _cut(tokenizer, sample.text, min(_CAUSAL_WINDOW, max_length))
        self.texts = [np.array(window.ids) for window in windows if len(window.ids) > 1]
        self.layout = layout
        self.batch_tokens = min(_BATCH_TOKENS, _MOST_LOGITS // vocab_size)

    def answers(self, graph: Path) -> Answers:
        """(num_tokens, 2): minus the log-probability of the token in nats, and the likeliest."""
        lengths = [len(text) for text in self.texts]
        batches = list(_batches(lengths, self.batch_tokens))
        slots, room = max(map(len, batches), default=0), max(lengths, default=0)
        session = CausalSession(graph, self.layout, slots, room)
        rows = []
        for batch in batches:
            session.seen[:] = 0
            texts = [self.texts[index] for index in batch]
            for text, logits in zip(texts, session.run(0, texts), strict=True):
                rows.append(_next_tokens(text, logits))
        return np.concatenate(rows) if rows else np.zeros((0, 2))

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        before, after = (np.exp(np.mean(each[:, 0])) for each in (reference, answers))
        figures = {
            "perplexity_fp32": float(before),
            "perplexity": float(after),
            "top1_agreement": float(np.mean(reference[:, 1] == answers[:, 1])),
        }
        return Comparison(float(after / before) - 1, len(answers), figures)


def _next_tokens(text: Ids, logits: Floats) -> Answers:
    rows = logits[:-1]
    peak = rows.max(axis=1)
    total = np.exp(rows - peak[:, None]).sum(axis=1, dtype=np.float64)
    surprise = np.log(total) + peak - rows[np.arange(len(rows)), text[1:]]
    return np.stack([surprise, rows.argmax(axis=1)], axis=1)


class Agreement(Evaluation):
    """Masked models that choose: a token, a label, a place in the text.

    Lost is a decision that fp32 takes clearly and the other graph takes otherwise.
    """

    types: list[Ids] | None = None
    asked: list[Ids] | None = None
    columns = 1  # of the output, as far as it bears on how much memory a pass takes

    def answers(self, graph: Path) -> Answers:
        """(num_decisions, num_tied): what is chosen and what is as good, -1 for nothing more."""
        session = MaskedSession(graph)
        outputs: dict[int, Answers] = {}
        batch_tokens = min(_BATCH_TOKENS, _MOST_LOGITS // self.columns)
        for batch in _batches([len(text) for text in self.texts], batch_tokens):
            types = self.types and [self.types[index] for index in batch]
            asked = self.asked and [self.asked[index] for index in batch]
            results = session.run([self.texts[index] for index in batch], types, asked)
            for index, output in zip(batch, results, strict=True):
                outputs[index] = self.choose(output)
        chosen = [outputs[index] for index in range(len(outputs))]
        return np.concatenate(chosen) if chosen else np.zeros((0, 1))

    def choose(self, output: Floats) -> Answers:
        """The decisions in the output for one text."""
        return _best(np.atleast_2d(output))

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        choice = answers[:, :1]
        among = (choice == reference) & (choice >= 0)  # logits that are no numbers choose nothing
        return _agreement(among[:, 0], among.any(axis=1))


def _best(logits: Floats) -> Answers:
    """The largest of each row and what ties with it, best first, -1 where nothing does."""
    count = min(_MOST_TIED, logits.shape[1])
    best = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    best = np.take_along_axis(best, np.argsort(-np.take_along_axis(logits, best, 1)), 1)
    values = np.take_along_axis(logits, best, 1)
    return np.where(values >= values[:, :1] + math.log(_TIE), best, -1)


def _agreement(same: Answers, same_or_tied: Answers) -> Comparison:
    figures = {
        "agreement": float(np.mean(same)),
        "agreement_or_tie": float(np.mean(same_or_tied)),
    }
    return Comparison(1 - figures["agreement_or_tie"], len(same), figures)


class FillMask(Agreement):
    """Which token stands behind each mask; every token of the text is masked once."""

    def __init__(
        self, tokenizer: Tokenizer, sample: Sample, max_length: int, vocab_size: int, mask: int
    ) -> None:
        generator = np.random.default_rng(_SEED)
        self.columns = -(-vocab_size // _MASK_EVERY)
        self.texts, self.asked, truth = [], [], [np.zeros(0, np.int64)]
        for window in _cut(tokenizer, sample.text, min(_WINDOW, max_length), _MOST_MASKED):
            ids = np.array(window.ids)
            for part in np.array_split(generator.permutation(_words(window)), _MASK_EVERY):
                if len(part):
                    masked = ids.copy()
                    masked[part] = mask
                    self.texts.append(masked)
                    self.asked.append(part)
                    truth.append(ids[part])
        self.truth = np.concatenate(truth)

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        agreement = super().compare(reference, answers)
        figures = {
            "top1_fp32": float(np.mean(reference[:, 0] == self.truth)),
            "top1": float(np.mean(answers[:, 0] == self.truth)),
        }
        return Comparison(agreement.loss, agreement.positions, agreement.figures | figures)


class TokenClassify(Agreement):
    """Which label each token gets."""

    def __init__(self, tokenizer: Tokenizer, sample: Sample, max_length: int) -> None:
        windows = _cut(tokenizer, sample.text, min(_WINDOW, max_length))
        self.texts = [np.array(window.ids) for window in windows]
        self.asked = [_words(window) for window in windows]


class QuestionAnswering(Agreement):
    """Where the answer begins and where it ends: each sentence asked of those around it."""

    def __init__(self, tokenizer: Tokenizer, sample: Sample, max_length: int) -> None:
        sentences = sample.sentences()
        pairs = [
            (sentences[index], " ".join(sentences[index - around : index] + after))
            for around in (1, 2, 4)
            for index in range(around, len(sentences))
            if (after := sentences[index + 1 : index + 1 + around])
        ]
        encodings = _encode(tokenizer, evenly(pairs, _MOST_PAIRS), min(_WINDOW, max_length))
        self.texts = [np.array(encoding.ids) for encoding in encodings]
        self.types = [np.array(encoding.type_ids) for encoding in encodings]

    def choose(self, output: Floats) -> Answers:
        best = _best(output.T)
        room = _MOST_TIED - best.shape[1]  # of a text that has fewer tokens
        return np.pad(best, ((0, 0), (0, room)), constant_values=-1)


class _Passages(Agreement):
    """Tasks on whole texts."""

    def __init__(self, tokenizer: Tokenizer, sample: Sample, max_length: int) -> None:
        passages = evenly(sample.passages(), _MOST_PASSAGES)
        encodings = _encode(tokenizer, passages, min(_PASSAGE, max_length))
        self.texts = [np.array(encoding.ids) for encoding in encodings]


class Classify(_Passages):
    """Which label a passage gets."""


class ClassifyAll(_Passages):
    """Which labels a passage gets, of a model that gives each or not."""

    def choose(self, output: Floats) -> Answers:
        return output[None]

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        same = (reference > 0) == (answers > 0)
        tied = np.abs(reference) <= -math.log(_TIE)
        return _agreement(same.all(axis=1), (same | tied).all(axis=1))


class Order(_Passages):
    """Models with one score: of two passages, which one scores higher."""

    def choose(self, output: Floats) -> Answers:
        return output

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        first, second = np.triu_indices(len(answers), 1)
        before, after = (scores[first] - scores[second] for scores in (reference, answers))
        same = (before > 0) == (after > 0)
        return _agreement(same, same | (np.abs(before) <= _TIED_SCORES * reference.std()))


class Cosine(_Passages):
    """How far the vectors of passages turn."""

    def choose(self, output: Floats) -> Answers:
        return output[None].astype(np.float64)

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        lengths = [np.linalg.norm(vectors, axis=1) for vectors in (reference, answers)]
        cosines = (reference * answers).sum(axis=1) / (lengths[0] * lengths[1])
        figures = {"mean_cosine": float(cosines.mean()), "least_cosine": float(cosines.min())}
        return Comparison(1 - figures["mean_cosine"], len(answers), figures)


def _words(window: Encoding) -> Ids:
    """The positions of tokens that the text itself has."""
    return np.flatnonzero(np.array(window.special_tokens_mask) == 0)


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of the items, from all over the sequence."""
    chosen = np.linspace(0, len(items) - 1, min(most, len(items))).astype(int)
    return [items[index] for index in chosen]


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str] | Sequence[tuple[str, str]], longest: int
) -> list[Encoding]:
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.enable_truncation(longest)
    return cutting.encode_batch(texts)
