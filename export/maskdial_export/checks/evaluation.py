"""Evaluations: how much of one graph's answers about a sample text another graph keeps.

There is one for each task. It runs both graphs on the same questions and compares their answers,
one by one. The same text always gives the same questions.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from maskdial.bundle.manifest import Entities, Extraction, KVLayout, TextToText
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.phase import Progress, silent
from maskdial_export.session import (
    CausalSession,
    EncoderDecoderSession,
    Floats,
    Graph,
    Ids,
    MaskedSession,
)

Answers = NDArray[Any]

_WINDOW = 128  # tokens per pass
_PASSAGE = 48
# Enough that a loss of 1% is several decisions, and at most what a BERT-base in fp32 reads on two
# cores in 15 seconds.
MAX_TOKENS = 4096
_MAX_MASKED = 2048  # each is read _MASK_EVERY times
_MAX_PASSAGES = 320
_MAX_PAIRS = 160
BATCH_TOKENS = 1024  # padding included
MAX_LOGITS = 2**24  # per pass, 64 MB
_MAX_SOURCES = 48
_SOURCES_AT_ONCE = 16
_WRITTEN = 24  # tokens
_SEED = 20240229
_MASK_EVERY = 7  # masks 14% of the tokens at once; training masks 15%
# Two choices tie if the less likely one is at least this likely as the other; then a change is no
# loss. In small models a few percent of the masks are that close.
_TIE = 0.9
_MAX_TIED = 8
_TIED_SCORES = 0.05  # standard deviations

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Comparison:
    """How much of fp32's answers a graph loses.

    Attributes:
        losses: float64, of each window, decision or passage; their mean is the loss.
        positions: the number of decisions.
        figures: what else was measured, by name.
    """

    losses: NDArray[np.float64]
    positions: int
    figures: dict[str, float]

    @property
    def loss(self) -> float:
        """0.01 is one decision in a hundred, or a divergence of 0.01 nats for each token."""
        return float(self.losses.mean())

    @property
    def error(self) -> float | None:
        """The standard error of the loss; None of a single value."""
        return _standard_error(self.losses)

    def improves(self, other: "Comparison") -> bool:
        """Whether the loss is lower than another one's, by more than the difference's standard
        error: both are of the same text, so that what is hard in it counts in neither. Of a single
        value, whose error is unknown, any lower loss is one.
        """
        difference = self.losses - other.losses
        return float(difference.mean()) < -(_standard_error(difference) or 0.0)


def _standard_error(values: NDArray[np.float64]) -> float | None:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


class Evaluation(ABC):
    """The questions about a sample for one task. ``texts`` are their token ids.

    ``negligible`` is a loss that is not worth a slower form of the same precision.
    """

    texts: list[Ids]
    negligible = 0.005

    @abstractmethod
    def answers(self, graph: Graph, show: Progress = silent) -> Answers:
        """The graph's answers, one row per question."""

    @abstractmethod
    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        """Compares answers with those of the reference graph."""

    def weakness(self, reference: Answers) -> str | None:
        """Why the reference is no better than a guess by how often each token occurs in the text.

        None if it is better, or if the text does not show it.
        """
        return None


def cut(
    tokenizer: Tokenizer, text: str, longest: int, max_tokens: int = MAX_TOKENS
) -> list[Encoding]:
    """A text in windows of at most ``longest`` tokens, special tokens included."""
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.enable_truncation(longest)
    first = cutting.encode(text)
    windows = [first, *first.overflowing]
    return windows[: -(-max_tokens // longest)]


def batches_of(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of texts of similar length, in batches of at most ``max_tokens`` padded tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class Agreement(Evaluation):
    """Models that choose a token, a label or a position.

    The loss is the share of fp32's clear decisions that the other graph changes.
    """

    types: list[Ids] | None = None
    asked: list[Ids] | None = None
    pairs: list[Ids] | None = None
    columns = 1  # output columns per token, to bound the memory of a pass
    cache: KVLayout | None = None  # of a model with a KV cache

    def answers(self, graph: Graph, show: Progress = silent) -> Answers:
        """(num_decisions, num_tied): the choice and those tied with it, padded with -1."""
        outputs: dict[int, Answers] = {}
        batch_tokens = min(BATCH_TOKENS, MAX_LOGITS // self.columns)
        batches = list(batches_of([len(text) for text in self.texts], batch_tokens))
        run = self._runner(graph, max(map(len, batches), default=0))
        for number, batch in enumerate(batches):
            show(number, len(batches), "batches")
            for index, output in zip(batch, run(batch), strict=True):
                outputs[index] = self.choose(output)
        chosen = [outputs[index] for index in range(len(outputs))]
        return np.concatenate(chosen) if chosen else np.zeros((0, 1))

    def _runner(self, graph: Graph, slots: int) -> Callable[[list[int]], list[Floats]]:
        """What computes the outputs of a batch, of at most so many texts."""

        def of(values: list[Ids] | None, batch: list[int]) -> list[Ids] | None:
            return values and [values[index] for index in batch]

        if self.cache is None:
            masked = MaskedSession(graph)
            return lambda batch: masked.run(
                [self.texts[index] for index in batch],
                *(of(each, batch) for each in (self.types, self.asked, self.pairs)),
            )
        causal = CausalSession(graph, self.cache, slots, max(map(len, self.texts), default=0))

        def run(batch: list[int]) -> list[Floats]:
            causal.seen[:] = 0
            return causal.run(0, [self.texts[index] for index in batch], of(self.asked, batch))

        return run

    def choose(self, output: Floats) -> Answers:
        """The decisions in the output for one text, a row each."""
        return _best(np.atleast_2d(output))

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        choice = answers[:, :1]
        among = (choice == reference) & (choice >= 0)  # NaN logits choose nothing
        return _agreement(among[:, 0], among.any(axis=1))


def _best(logits: Floats) -> Answers:
    """The best column of each row and those tied with it, best first, padded with -1."""
    count = min(_MAX_TIED, logits.shape[1])
    best = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    best = np.take_along_axis(best, np.argsort(-np.take_along_axis(logits, best, 1)), 1)
    values = np.take_along_axis(logits, best, 1)
    return np.where(values >= values[:, :1] + math.log(_TIE), best, -1)


def _agreement(same: Answers, same_or_tied: Answers) -> Comparison:
    figures = {
        "agreement": float(np.mean(same)),
        "agreement_or_tie": float(np.mean(same_or_tied)),
    }
    return Comparison(1.0 - same_or_tied, len(same), figures)


class GreedyText(Agreement):
    """Encoder-decoder models: the next token, along the texts that fp32 writes by greedy decoding.

    The reference is the first graph that is asked.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: Sample,
        text_to_text: TextToText,
        max_length: int,
        layout: KVLayout,
        eos_token_ids: Sequence[int],
    ) -> None:
        longest = min(_PASSAGE, text_to_text.max_source_length)
        windows = cut(tokenizer, sample.text, longest, _MAX_SOURCES * longest)
        self.texts = [np.array(window.ids) for window in windows]
        self.start = text_to_text.start_token_id
        self.steps = min(_WRITTEN, max_length)
        self.layout = layout
        self.ends = frozenset(eos_token_ids)
        self._written: list[list[int]] | None = None

    def answers(self, graph: Graph, show: Progress = silent) -> Answers:
        """(num_tokens, num_tied): the next token and those tied with it, padded with -1."""
        slots, longest = len(self.texts), max(map(len, self.texts), default=1)
        session = EncoderDecoderSession(graph, self.layout, slots, self.steps, longest)
        for first in range(0, slots, _SOURCES_AT_ONCE):
            session.encode(first, self.texts[first : first + _SOURCES_AT_ONCE])
        written = self._written or [[self.start] for _ in self.texts]
        rows = []
        for step in range(self.steps):
            show(step, self.steps, "steps")
            slots_left = [slot for slot, text in enumerate(written) if len(text) > step]
            if not slots_left:
                break
            logits = session.step(slots_left, [written[slot][step] for slot in slots_left])
            rows.append(_best(logits))
            if self._written is None:
                for slot, token in zip(slots_left, logits.argmax(axis=1).tolist(), strict=True):
                    if token not in self.ends and step + 1 < self.steps:
                        written[slot].append(token)
        self._written = written
        return np.concatenate(rows) if rows else np.zeros((0, 1))


class FillMask(Agreement):
    """The token behind each mask. Every token of the text is masked once."""

    def __init__(
        self, tokenizer: Tokenizer, sample: Sample, max_length: int, vocab_size: int, mask: int
    ) -> None:
        generator = np.random.default_rng(_SEED)
        self.columns = -(-vocab_size // _MASK_EVERY)
        self.texts, self.asked, truth = [], [], [np.zeros(0, np.int64)]
        for window in cut(tokenizer, sample.text, min(_WINDOW, max_length), _MAX_MASKED):
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
        return replace(agreement, figures=agreement.figures | figures)

    def weakness(self, reference: Answers) -> str | None:
        guessed, found = shares(self.truth).max(), np.mean(reference[:, 0] == self.truth)
        if found > guessed:
            return None
        return f"{found:.1%} of the tokens found, and {guessed:.1%} by naming the most frequent one"


class TokenClassify(Agreement):
    """The label of each token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: Sample,
        max_length: int,
        cache: KVLayout | None = None,
    ) -> None:
        self.cache = cache
        windows = cut(tokenizer, sample.text, min(_WINDOW, max_length))
        self.texts = [np.array(window.ids) for window in windows]
        self.asked = [_words(window) for window in windows]


LABELS = ("person", "place", "organization", "date", "object", "event", "number", "animal")


class FindEntities(Agreement):
    """The best of `LABELS` for each word, and for each two words where spans are scored.

    ``vectors`` are those of the labels, (num_labels, columns), where another model encodes them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: Sample,
        max_length: int,
        entities: Entities,
        vectors: Floats | None = None,
    ) -> None:
        self.vectors = vectors
        self.scores_pairs = entities.scores == "token"
        self.columns = entities.num_columns
        ends = tokenizer.encode("a")
        own = _words(ends)
        before, after = ends.ids[: own[0]], ends.ids[own[-1] + 1 :]
        prompt, marks = [*before], []
        if entities.label_token is not None:
            for label in LABELS:
                marks.append(len(prompt) + int(entities.reads_label))
                encoded = tokenizer.encode([label], is_pretokenized=True, add_special_tokens=False)
                prompt += [entities.label_token, *encoded.ids]
        prompt += entities.separator
        room = max(min(_WINDOW, max_length - len(prompt) - len(after)), 1)
        encoded = tokenizer.encode(
            sample.text.split(), is_pretokenized=True, add_special_tokens=False
        )
        ids, words = np.array(encoded.ids), np.array(encoded.word_ids)
        self.texts, self.asked, self.pairs = [], [], []
        for start in range(0, min(len(ids), MAX_TOKENS), room):
            window = slice(start, start + room)
            firsts = len(prompt) + np.flatnonzero(np.diff(words[window], prepend=-1))
            self.texts.append(np.concatenate([prompt, ids[window], after]).astype(np.int64))
            self.asked.append(np.concatenate([marks, firsts]).astype(np.int64))
            rows = np.arange(len(marks), len(marks) + len(firsts))
            pairs = np.meshgrid(rows, np.arange(len(marks)), indexing="ij")
            self.pairs.append(np.stack([each.ravel() for each in pairs], axis=1))

    def choose(self, output: Floats) -> Answers:
        count = len(LABELS)
        if self.scores_pairs:
            scores = output.reshape(-1, count, output.shape[1])
            return _best(np.concatenate([*np.moveaxis(scores, 2, 0)]))
        labels = self.vectors
        if labels is None:
            width = (output.shape[1] - 1) // 3
            labels, output = output[:count, 2 * width :], output[count:, : 2 * width]
        start, end = np.split(output, 2, axis=1)
        spans = [np.maximum(start + end, 0), np.maximum(start[:-1] + end[1:], 0)]
        return _best(np.concatenate(spans) @ labels[:, :-1].T + labels[:, -1])


class FindBySchema(Agreement):
    """The best of `LABELS` for each word and each two words, of a schema of entities; where
    boundaries are paired, for each as a start and as an end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: Sample,
        max_length: int,
        extraction: Extraction,
        model: Any,
    ) -> None:
        self.columns = extraction.num_columns
        self.hidden_size = extraction.hidden_size
        self.pairs_boundaries = extraction.scores == "boundary"
        self.head = model.field_head
        pieces = ["(", "[P]", "entities", "("]
        for label in LABELS:
            pieces += ["[E]", label]
        prompt = _encode_each(tokenizer, [*pieces, ")", ")", "[SEP_TEXT]"])
        marked = [place for place, piece in enumerate(pieces) if piece in ("[P]", "[E]")]
        firsts = np.cumsum([0, *map(len, prompt)])
        before = [token_id for ids in prompt for token_id in ids]
        room = max(min(_WINDOW, max_length - len(before)), 1)
        words = [ids[:room] for ids in _encode_each(tokenizer, sample.text.lower().split()) if ids]
        self.texts, self.asked = [], []
        for line in _lines(words, room):
            starts = np.cumsum([len(before), *map(len, line)])[:-1]
            self.texts.append(np.array([*before, *(each for ids in line for each in ids)]))
            self.asked.append(np.concatenate([firsts[marked], starts]))

    def choose(self, output: Floats) -> Answers:
        import torch  # not needed by the others, which the direct path uses

        count = 1 + len(LABELS)
        hidden = torch.from_numpy(output[:, -self.hidden_size :].copy())
        fields = hidden[1:count]
        if self.pairs_boundaries:
            with torch.no_grad():
                marginals = self.head.marginals(hidden[count:], fields)
            return _best(torch.cat(marginals, dim=1).T.numpy())
        with torch.no_grad():
            labels = self.head(fields, torch.zeros(1, dtype=torch.int64))[0].numpy()
        start, end = np.split(output[count:, : 8 * self.hidden_size], 2, axis=1)
        spans = [np.maximum(start + end, 0), np.maximum(start[:-1] + end[1:], 0)]
        return _best(np.concatenate(spans) @ labels[:, :-1].T + labels[:, -1])


class QuestionAnswering(Agreement):
    """Start and end of the answer; the question is a sentence, the context those around it."""

    def __init__(self, tokenizer: Tokenizer, sample: Sample, max_length: int) -> None:
        sentences = sample.sentences()
        pairs = [
            (sentences[index], " ".join(sentences[index - around : index] + after))
            for around in (1, 2, 4)
            for index in range(around, len(sentences))
            if (after := sentences[index + 1 : index + 1 + around])
        ]
        encodings = _encode(tokenizer, evenly(pairs, _MAX_PAIRS), min(_WINDOW, max_length))
        self.texts = [np.array(encoding.ids) for encoding in encodings]
        self.types = [np.array(encoding.type_ids) for encoding in encodings]

    def choose(self, output: Floats) -> Answers:
        best = _best(output.T)
        room = _MAX_TIED - best.shape[1]  # a short text has fewer candidates
        return np.pad(best, ((0, 0), (0, room)), constant_values=-1)


class _Passages(Agreement):
    """Tasks with one output per text, evaluated on runs of sentences."""

    def __init__(self, tokenizer: Tokenizer, sample: Sample, max_length: int) -> None:
        passages = evenly(sample.passages(), _MAX_PASSAGES)
        encodings = _encode(tokenizer, passages, min(_PASSAGE, max_length))
        self.texts = [np.array(encoding.ids) for encoding in encodings]


class Classify(_Passages):
    """The label of a passage."""


class ClassifyAll(_Passages):
    """The labels of a passage, in a multi-label model."""

    def choose(self, output: Floats) -> Answers:
        return output[None]

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        same = (reference > 0) == (answers > 0)
        tied = np.abs(reference) <= -math.log(_TIE)
        return _agreement(same.all(axis=1), (same | tied).all(axis=1))


class Order(_Passages):
    """Models with a single score: which of two passages scores higher."""

    def choose(self, output: Floats) -> Answers:
        return output

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        first, second = np.triu_indices(len(answers), 1)
        before, after = (scores[first] - scores[second] for scores in (reference, answers))
        same = (before > 0) == (after > 0)
        return _agreement(same, same | (np.abs(before) <= _TIED_SCORES * reference.std()))


class Cosine(_Passages):
    """Embeddings: the cosine between the two vectors of a passage, or of each of its tokens."""

    negligible = 0.001

    def choose(self, output: Floats) -> Answers:
        return np.atleast_2d(output).astype(np.float64)

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        lengths = [np.linalg.norm(vectors, axis=1) for vectors in (reference, answers)]
        cosines = (reference * answers).sum(axis=1) / (lengths[0] * lengths[1])
        figures = {"mean_cosine": float(cosines.mean()), "least_cosine": float(cosines.min())}
        return Comparison(1 - cosines, len(answers), figures)


def shares(tokens: Ids) -> NDArray[np.float64]:
    """How often each token occurs, as a part of all."""
    counts = np.unique(tokens, return_counts=True)[1]
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares


def _words(window: Encoding) -> Ids:
    """The positions of the text's own tokens, without special ones."""
    return np.flatnonzero(np.array(window.special_tokens_mask) == 0)


def _encode_each(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of short texts, each by itself, without special tokens."""
    return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _lines(words: Sequence[list[int]], room: int) -> list[list[list[int]]]:
    """The words of a text in lines of at most ``room`` tokens, about `MAX_TOKENS` together."""
    lines: list[list[list[int]]] = [[]]
    left = room
    for word in words:
        if len(word) > left:
            if len(lines) * room >= MAX_TOKENS:
                break
            lines.append([])
            left = room
        lines[-1].append(word)
        left -= len(word)
    return lines


def evenly(items: Sequence[Item], max_items: int) -> list[Item]:
    """At most ``max_items`` items, evenly spread over the sequence."""
    chosen = np.linspace(0, len(items) - 1, min(max_items, len(items))).astype(int)
    return [items[index] for index in chosen]


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str] | Sequence[tuple[str, str]], longest: int
) -> list[Encoding]:
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.enable_truncation(longest)
    return cutting.encode_batch(texts)
