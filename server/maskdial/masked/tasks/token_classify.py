"""Token classification: the tags of a text's tokens, merged into entities.

Labels, offsets, scores and the aggregation strategies follow transformers'
TokenClassificationPipeline, with three deliberate differences:

* BILOU, BIOES and BMES tags are merged as well as BIO: B, U and S begin an entity, L, E, U and S
  end one, I and M continue one. transformers knows B and I, and treats any other label as a tag of
  its own. So do we, unless the same tag also has a B or an I among the labels.
* A text longer than the model is read in windows, but its tokens are merged once, over the whole
  text: no entity is duplicated or split where windows meet. transformers merges each window
  separately and drops the shorter of two overlapping entities, so one that is cut stays cut.
* An entity's word is decoded once, from all its tokens. transformers decodes words, then joins and
  decodes them again, which loses SentencePiece's spaces and the accents of byte-level words.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import Tokenizer, spans
from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.logits import count_windows, finite, softmax
from maskdial.masked.tasks.task import Reading, TaskModel, TaskRequest, masked_input

AggregationStrategy = Literal["none", "simple", "first", "average", "max"]

_SECONDS_PER_TOKEN = 2e-6
_SPACE = ord(" ")
_SPAN = np.dtype((np.int64, 2))
_OPENING = frozenset("BUS")
_CLOSING = frozenset("LEUS")
_PREFIXES = frozenset("BILEUSM")


@dataclass(frozen=True, slots=True)
class TaggedToken:
    """A token and its most likely label. ``index`` counts the text's tokens, including special
    tokens before them; ``start`` and ``end`` are characters of the text, the end exclusive.
    """

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Entity:
    """Adjacent tokens or words of one tag, and the mean of their scores. ``start`` and ``end``
    are characters of the text, the end exclusive.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenClassifyRequest(TaskRequest[list[list[TaggedToken] | list[Entity]]]):
    """Texts whose tokens to tag. A text longer than the model is read in windows.

    ``stride``: tokens that neighboring windows share; None: a quarter of a window.
    """

    task: ClassVar[str] = "token-classify"
    head: ClassVar[TaskName] = "token-classify"

    texts: Sequence[str]
    aggregation_strategy: AggregationStrategy = "simple"
    ignore_labels: Collection[str] = ("O",)
    stride: int | None = None

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return manifest.task in (cls.head, "entities", "extract")

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds(self.texts)

    def check(self, model: TaskModel) -> None:
        manifest = model.manifest
        if manifest.entities is not None or manifest.extraction is not None:
            raise ValidationError(
                f"model {model.name!r} has no labels of its own; name those to find",
                field="candidate_labels",
            )
        max_length = model.manifest.max_length
        room = _room(model)
        if self.stride is not None and self.stride >= room:
            raise ValidationError(
                f"must be less than {room}, the tokens of a text in one window of model "
                f"{model.name!r} ({max_length} with special tokens), not {self.stride}",
                field="stride",
            )

    def read(self, model: TaskModel) -> Reading[list[list[TaggedToken] | list[Entity]]]:
        room = _room(model)
        stride = room // 4 if self.stride is None else self.stride
        num_special = model.tokenizer.num_special_tokens(pair=False)
        encodings = [model.tokenizer.encode(text) for text in self.texts]
        plans = [
            plan_windows(num_tokens, room, stride)
            for num_tokens in self._checked_lengths(model, encodings, num_special, room, stride)
        ]
        inputs = [
            each
            for text, encoding, plan in zip(self.texts, encodings, plans, strict=True)
            for each in _window_inputs(model, text, encoding, plan, stride)
        ]

        def answer(
            results: Sequence[MaskedResult],
        ) -> list[list[TaggedToken] | list[Entity]]:
            left = iter(results)
            return [
                self._answer(model, text, encoding, [next(left).logits for _ in plan])
                for text, encoding, plan in zip(self.texts, encodings, plans, strict=True)
            ]

        seconds = sum(map(len, encodings)) * _SECONDS_PER_TOKEN
        return Reading(inputs, answer, seconds=seconds)

    def _checked_lengths(
        self,
        model: TaskModel,
        encodings: Sequence[Encoding],
        num_special: int,
        room: int,
        stride: int,
    ) -> list[int]:
        """The texts' lengths in tokens, unless they need more windows than the queue holds."""
        lengths = [len(encoding) - num_special for encoding in encodings]
        counts = [count_windows(length, room, stride) if length else 0 for length in lengths]
        limit = f"(stride {stride}); one request may have at most {model.max_queue} windows"
        for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            if count > model.max_queue:
                raise ValidationError(
                    f"the text has {length:,} tokens, which are {count:,} windows of {room} "
                    f"{limit}",
                    field="texts",
                    index=index,
                )
        if sum(counts) > model.max_queue:
            raise ValidationError(
                f"{len(lengths)} texts are {sum(counts):,} windows of {room} tokens {limit}",
                field="texts",
            )
        return lengths

    def _answer(
        self,
        model: TaskModel,
        text: str,
        encoding: Encoding,
        windows: Sequence[NDArray[np.float32]],
    ) -> list[TaggedToken] | list[Entity]:
        if not windows:  # the tokenizer kept nothing of the text
            return []
        return classify_tokens(
            np.concatenate(windows),
            read_tokens(text, encoding, model.tokenizer),
            model.manifest.labels,
            model.tokenizer,
            strategy=self.aggregation_strategy,
            ignore_labels=self.ignore_labels,
        )


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A piece of a text that the model reads at once, in tokens of the text: it begins at
    ``start``, and the logits of ``tokens`` are taken from it.
    """

    start: int
    tokens: range


def plan_windows(num_tokens: int, room: int, stride: int) -> list[TextWindow]:
    """The windows of a text, as `Tokenizer.windows` cuts them, and which tokens each answers for.

    Where windows overlap, a token is taken from the one that shows more of its context: the overlap
    of two neighbors is halved, and the earlier one answers for the token in the middle.

    Args:
        num_tokens: of the text, without special tokens.
        room: tokens of the text in one window.
        stride: tokens that neighboring windows share, less than ``room``.
    """
    if not num_tokens:
        return []
    starts = np.arange(count_windows(num_tokens, room, stride)) * (room - stride)
    # The middle of the overlap, which reaches from the later start to the earlier end.
    seams = (starts[1:] + starts[:-1] + room + 1) // 2
    firsts = np.append(0, seams)[: len(starts)]
    ends = np.append(seams, num_tokens)[: len(starts)]
    columns = zip(starts.tolist(), firsts.tolist(), ends.tolist(), strict=True)
    return [TextWindow(start, range(first, end)) for start, first, end in columns]


def _room(model: TaskModel) -> int:
    """Tokens of a text in one window."""
    return model.manifest.max_length - model.tokenizer.num_special_tokens(pair=False)


def _window_inputs(
    model: TaskModel, text: str, encoding: Encoding, plan: Sequence[TextWindow], stride: int
) -> Iterator[MaskedInput]:
    """A text's windows; together they ask for the logits of every token once."""
    encodings = [encoding] * len(plan)
    if len(plan) > 1:
        max_length = model.manifest.max_length
        encodings = model.tokenizer.windows(text, max_length=max_length, stride=stride)
    for window, windowed in zip(plan, encodings, strict=True):
        positions = text_positions(windowed)
        first, end = window.tokens.start - window.start, window.tokens.stop - window.start
        yield masked_input(windowed, tuple(positions[first:end].tolist()))


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens of a text, without special ones; arrays are (num_tokens,).

    ``words`` are the tokens as the vocabulary spells them, unknown ones as the text does.
    ``starts`` and ``ends`` are characters of the text. ``continues`` says which tokens continue the
    word before them. ``first_index`` is how many special tokens stand before the text.
    """

    words: list[str]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    continues: NDArray[np.bool_]
    first_index: int

    def __len__(self) -> int:
        return len(self.words)


def text_positions(encoding: Encoding) -> NDArray[np.int64]:
    """Where a text's own tokens are in an encoding with its special tokens."""
    return np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)


def read_tokens(text: str, encoding: Encoding, tokenizer: Tokenizer) -> TextTokens:
    """The tokens of a whole text.

    As in transformers, a token continues a word when it is not as long as its text, in a vocabulary
    with a prefix for such tokens (``##``); in others, when no space is at its first character or
    before it. An unknown token is a word.

    Args:
        encoding: of the text, with special tokens.
    """
    positions = text_positions(encoding)
    tokens = encoding.tokens
    words = [tokens[position] for position in positions]
    starts, ends = np.fromiter(spans(encoding), _SPAN, len(encoding))[positions].T
    if tokenizer.marks_subwords:
        continues = np.array([len(word) for word in words], np.int64) != ends - starts
    else:
        is_space = np.frombuffer(text.encode("utf-32-le"), np.uint32) == _SPACE
        is_space = np.append(is_space, False)  # a token may begin at the text's end
        continues = (starts > 0) & ~is_space[starts] & ~is_space[starts - 1]
    unknown = np.array(encoding.ids, np.int64)[positions] == (
        -1 if tokenizer.unknown_id is None else tokenizer.unknown_id
    )
    continues &= ~unknown
    for token in np.flatnonzero(unknown):
        words[token] = text[starts[token] : ends[token]]
    return TextTokens(words, starts, ends, continues, int(positions[0]) if len(positions) else 0)


def classify_tokens(
    logits: NDArray[np.float32],
    tokens: TextTokens,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    *,
    strategy: AggregationStrategy,
    ignore_labels: Collection[str],
) -> list[TaggedToken] | list[Entity]:
    """A text's tokens or entities, in order.

    Args:
        logits: (num_tokens, num_labels) float32.
        tokens: the text's.
        labels: the name of each logit.
        strategy: ``none`` gives tokens. ``simple`` merges neighboring tokens of one tag. The
            others first give every word one label: that of its ``first`` token, the most likely on
            ``average``, or that of its surest token (``max``).
        ignore_labels: labels of tokens, or tags of entities, that are left out.

    Raises:
        InferenceError: a logit is not a finite number.
    """
    if not len(tokens):
        return []
    scores = softmax(finite(logits))
    if strategy in ("none", "simple"):
        firsts = np.arange(len(tokens))
    else:
        begins = ~tokens.continues
        begins[0] = True
        firsts = np.flatnonzero(begins)
        scores = _word_scores(scores, firsts, strategy)
    chosen = scores.argmax(axis=1)
    best = scores.max(axis=1)
    if strategy == "none":
        return _tagged_tokens(tokens, [labels[label] for label in chosen], best, ignore_labels)

    groups = np.flatnonzero(_begins_entity(chosen, labels))
    means = np.add.reduceat(best, groups) / _lengths(groups, len(chosen))
    names = [labels[label].split("-", 1)[-1] for label in chosen[groups]]
    spans = np.append(firsts[groups], len(tokens))
    return _entities(tokens, names, means, spans, ignore_labels, tokenizer)


def _word_scores(
    scores: NDArray[np.float64], firsts: NDArray[np.int64], strategy: AggregationStrategy
) -> NDArray[np.float64]:
    """The scores (num_words, num_labels) of words whose first tokens are ``firsts``."""
    lengths = _lengths(firsts, len(scores))
    if strategy == "average":
        sums: NDArray[np.float64] = np.add.reduceat(scores, firsts, axis=0)
        return sums / lengths[:, None]
    if strategy == "max":
        surest = scores.max(axis=1)
        is_surest = surest == np.repeat(np.maximum.reduceat(surest, firsts), lengths)
        candidates = np.where(is_surest, np.arange(len(scores)), len(scores))
        return scores[np.minimum.reduceat(candidates, firsts)]
    return scores[firsts]


def _lengths(firsts: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """The lengths of adjacent segments, given their first indices."""
    return np.diff(firsts, append=total)


def _begins_entity(chosen: NDArray[np.int64], labels: Sequence[str]) -> NDArray[np.bool_]:
    """Which of the tokens or words, given the indices of their labels, begin an entity."""
    parted = [_part(label, labels) for label in labels]
    numbers = {tag: number for number, (_, tag) in enumerate(parted)}
    tags = np.array([numbers[tag] for _, tag in parted])[chosen]
    opens = np.array([prefix in _OPENING for prefix, _ in parted])[chosen]
    closes = np.array([prefix in _CLOSING for prefix, _ in parted])[chosen]
    begins = np.ones(len(chosen), np.bool_)
    begins[1:] = opens[1:] | closes[:-1] | (tags[1:] != tags[:-1])
    return begins


def _part(label: str, labels: Sequence[str]) -> tuple[str, str]:
    """A label's prefix and tag; a label without a prefix continues while it is the same."""
    prefix, dash, tag = label.partition("-")
    if dash and prefix in _PREFIXES and (f"B-{tag}" in labels or f"I-{tag}" in labels):
        return prefix, tag
    return "I", label


def _tagged_tokens(
    tokens: TextTokens,
    entities: Sequence[str],
    scores: NDArray[np.float64],
    ignore_labels: Collection[str],
) -> list[TaggedToken]:
    columns = zip(
        entities,
        scores.tolist(),
        range(tokens.first_index, tokens.first_index + len(tokens)),
        tokens.words,
        tokens.starts.tolist(),
        tokens.ends.tolist(),
        strict=True,
    )
    return [TaggedToken(*row) for row in columns if row[0] not in ignore_labels]


def _entities(
    tokens: TextTokens,
    names: Sequence[str],
    scores: NDArray[np.float64],
    spans: NDArray[np.int64],
    ignore_labels: Collection[str],
    tokenizer: Tokenizer,
) -> list[Entity]:
    """The entities that are not ignored; each reaches to where the next of ``spans`` begins."""
    columns = zip(
        names,
        scores.tolist(),
        spans[:-1].tolist(),
        spans[1:].tolist(),
        tokens.starts[spans[:-1]].tolist(),
        tokens.ends[spans[1:] - 1].tolist(),
        strict=True,
    )
    return [
        Entity(name, score, tokenizer.decode_tokens(tokens.words[first:end]), start, stop)
        for name, score, first, end, start, stop in columns
        if name not in ignore_labels
    ]
