"""The evaluation of causal models: how far each next token's distribution moves."""

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from maskdial.bundle.manifest import KVLayout
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checks.evaluation import (
    BATCH_TOKENS,
    MAX_LOGITS,
    MAX_TOKENS,
    Answers,
    Comparison,
    Evaluation,
    batches_of,
    cut,
    shares,
)
from maskdial_export.phase import Progress, silent
from maskdial_export.session import CausalSession, Floats, Graph, Ids, Loaded

_WINDOW = 256
# Log-probabilities of the reference, 4 GiB of a file: those of large vocabularies in 16 bits
_MAX_KEPT, _MAX_EXACT = 2**31, 2**30
NOT_MEASURED = -1.0
"""In place of a divergence."""
_MANY_TOKENS = 100_000
"""A vocabulary of as many is one of several languages."""
_MOST_UNKNOWN = 0.3


class NextTokens(Evaluation):
    """Causal models: the distribution of each next token, in windows of 256 tokens.

    The loss is the mean divergence (Kullback-Leibler, in nats) from the distributions of the first
    graph that is asked: how much the logarithm of the perplexity rises on texts as that graph would
    write them. On other texts the perplexity also falls by chance, which a divergence cannot.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: Sample,
        max_length: int,
        vocab_size: int,
        layout: KVLayout,
    ) -> None:
        longest = min(_WINDOW, max_length)
        texts = [sample.text, *sample.others]
        if vocab_size >= _MANY_TOKENS and _knows(tokenizer, sample.languages):
            texts.append(sample.languages)
        most = MAX_TOKENS if len(texts) == 1 else MAX_TOKENS // 2
        windows = [window for text in texts for window in cut(tokenizer, text, longest, most)]
        self.texts = [np.array(window.ids) for window in windows if len(window.ids) > 1]
        self.layout = layout
        self.batch_tokens = min(BATCH_TOKENS, MAX_LOGITS // vocab_size)
        num_positions = sum(len(text) - 1 for text in self.texts)
        self._every = -(-num_positions * vocab_size // _MAX_KEPT)
        exact = num_positions * vocab_size <= _MAX_EXACT
        self._kept_as: type[np.floating[Any]] = np.float32 if exact else np.float16
        self._reference: list[NDArray[np.floating[Any]]] = []

    def answers(self, graph: Graph, show: Progress = silent) -> Answers:
        """(num_tokens, 4): the negative log-probability of the token in nats, the argmax, the
        divergence from the reference in nats, `NOT_MEASURED` where it is not measured, and the
        window.
        """
        lengths = [len(text) for text in self.texts]
        batches = list(batches_of(lengths, self.batch_tokens))
        slots, room = max(map(len, batches), default=0), max(lengths, default=0)
        session = CausalSession(graph, self.layout, slots, room)
        rows: list[Answers] = []
        is_reference = not self._reference
        for number, batch in enumerate(batches):
            show(number, len(batches), "batches")
            session.seen[:] = 0
            texts = [self.texts[index] for index in batch]
            for index, logits in zip(batch, session.run(0, texts), strict=True):
                text = self.texts[index]
                probabilities = log_softmax(logits[: -1 : self._every])
                divergence = np.full(len(text) - 1, NOT_MEASURED)
                if is_reference:
                    self._reference.append(_in_file(probabilities, self._kept_as, graph))
                else:
                    of_reference = self._reference[len(rows)].astype(np.float32)
                    if self._kept_as is np.float16:  # probabilities again, whose sum is 1
                        of_reference = log_softmax(of_reference)
                    divergence[:: self._every] = divergences(of_reference, probabilities)
                window = np.full(len(text) - 1, index)
                rows.append(np.column_stack([next_tokens(text, logits), divergence, window]))
        return np.concatenate(rows) if rows else np.zeros((0, 4))

    def compare(self, reference: Answers, answers: Answers) -> Comparison:
        before, after = (np.exp(np.mean(each[:, 0])) for each in (reference, answers))
        measured = answers[answers[:, 2] != NOT_MEASURED]
        windows = measured[:, 3].astype(np.int64)
        counts = np.bincount(windows)
        sums = np.bincount(windows, measured[:, 2]).astype(np.float64)[counts > 0]
        counts = counts[counts > 0]
        # A short window counts by its tokens
        losses: NDArray[np.float64] = sums * (len(sums) / len(measured))
        comparison = Comparison(losses, len(answers), {})
        comparison.figures.update(
            {
                "perplexity_fp32": float(before),
                "perplexity": float(after),
                "top1_agreement": float(np.mean(reference[:, 1] == answers[:, 1])),
                "kl_divergence": comparison.loss,
                "kl_worst_window": float((sums / counts).max()),
            }
        )
        if comparison.error is not None:
            comparison.figures["kl_error"] = comparison.error
        return comparison

    def weakness(self, reference: Answers) -> str | None:
        share = shares(np.concatenate([text[1:] for text in self.texts]))
        guessed, read = math.exp(-(share * np.log(share)).sum()), np.exp(reference[:, 0].mean())
        if read < guessed:
            return None
        return f"perplexity {read:.4g}, and {guessed:.4g} by the frequency of tokens alone"


def _knows(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a tokenizer has tokens for most of a text."""
    tokens: Sequence[str] = tokenizer.encode(text, add_special_tokens=False).tokens
    unknown = getattr(tokenizer.model, "unk_token", None)
    return bool(tokens) and tokens.count(unknown) < _MOST_UNKNOWN * len(tokens)


def _in_file(
    values: Floats, dtype: type[np.floating[Any]], graph: Graph
) -> NDArray[np.floating[Any]]:
    """Log-probabilities in a file without a name, beside the graph: those of a large vocabulary
    take more memory than the model.

    They are written before the file is mapped: pages of an empty one that find no room on the disk
    would end the process by a signal.

    Raises:
        OSError: the disk is full.
    """
    path: Path = graph.path if isinstance(graph, Loaded) else graph
    with TemporaryFile(dir=path.parent) as file:
        for row in values:
            file.write(row.astype(dtype).tobytes())
        file.flush()
        return np.memmap(file, dtype=dtype, mode="r", shape=values.shape)


def log_softmax(logits: Floats) -> Floats:
    """Of each row, in float32; sums are in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    probabilities: Floats = shifted - np.log(total).astype(np.float32)
    return probabilities


def divergences(reference: Floats, other: Floats) -> NDArray[np.float64]:
    """Kullback-Leibler, of each row of log-probabilities, in nats."""
    difference = np.where(reference > -np.inf, reference - other, 0)  # tokens that are ruled out
    divergence: NDArray[np.float64] = (np.exp(reference) * difference).sum(axis=1, dtype=np.float64)
    return divergence


def next_tokens(text: Ids, logits: Floats) -> Answers:
    """What logits (length, vocab_size) say of a text's next tokens, (length - 1, 2): the negative
    log-probability of the token in nats, and the argmax.
    """
    rows = logits[:-1]
    peak = rows.max(axis=1)
    total = np.exp(rows - peak[:, None]).sum(axis=1, dtype=np.float64)
    surprise = np.log(total) + peak - rows[np.arange(len(rows)), text[1:]]
    return np.stack([surprise, rows.argmax(axis=1)], axis=1)
