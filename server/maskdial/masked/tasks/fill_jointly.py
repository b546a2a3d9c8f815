"""Joint fill-mask: the masks of a text are filled together, and each pass sees what was filled.

Filled texts are ranked by the pseudo-log-likelihood of the tokens that were filled (Salazar et al.
2020, arXiv:1910.14659), per token, so that fillings of several lengths can be compared.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import ClassVar

from maskdial.bundle.manifest import TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.engine.philox import draw_seed, told_seed
from maskdial.engine.timing import Deadline
from maskdial.errors import ValidationError, about
from maskdial.grammar.fixed_length import FixedLength
from maskdial.grammar.source import GrammarRequest
from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks import passes
from maskdial.masked.tasks.fill_mask import check_masks_kept, mask_positions, write_masks
from maskdial.masked.tasks.fill_passes import MAX_WAVE, fill
from maskdial.masked.tasks.passes import Passes
from maskdial.masked.tasks.pseudo_likelihood import Masking, log_probability, maskings
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    TaskModel,
    TaskRequest,
    Truncation,
    read_texts,
)
from maskdial.unmasking.canvas import Blank, Block, Canvas, Draft
from maskdial.unmasking.unmasker import Unmasker, Unmasking

Targets = Sequence[Sequence[str] | None]
"""For each blank of a text, the words that may stand there; None for any token."""

MAX_BEAMS = 32
MAX_BLANK = 32
"""Tokens in a blank that a grammar fills."""
DEFAULT_BLANK = 8
SECONDS_OF_SEARCH = 0.05
"""Typical, of what a grammar allows in blanks."""
_MAX_CANVASES = 256
_MAX_MASKS = 10_000
_MAX_SEED = 2**63
_SECONDS_PER_LOGIT = 5e-9


@dataclass(frozen=True, slots=True)
class JointToken:
    """A token that was filled in: the index of its mask among the text's, its id and text, its
    probability in the pass that filled it, and that pass, counted from 0.
    """

    mask: int
    token: int
    token_str: str
    score: float
    step: int


@dataclass(frozen=True, slots=True)
class JointFilling:
    """A text with all of its masks filled.

    ``log_likelihood`` is the natural pseudo-log-likelihood of its ``tokens``: the sum of the
    log-probabilities that each has where only it is masked. ``score`` is the exponential of their
    mean, between 0 and 1.
    """

    sequence: str
    score: float
    log_likelihood: float
    tokens: tuple[JointToken, ...]


@dataclass(frozen=True, slots=True)
class JointFillRequest(TaskRequest[list[list[JointFilling]]]):
    """Texts whose masks to fill together.

    Attributes:
        top_k: filled texts to return for each: the best ones of a search, or as many drawn ones.
        unmasking: how to fill them.
        steps: passes, over which the masks are spread; None: a pass for each mask.
        targets: the words that may stand in each blank, of one token or several, or one entry for
            all blanks. A blank gets as many masks as its word has tokens; all numbers are tried.
        grammars: in place of targets, what the text of each blank has to match, or one entry for
            all blanks; None for any single token.
        max_tokens: the most tokens of a blank with a grammar, from 1 to `MAX_BLANK`; all numbers
            that the grammar allows are tried.
        seed: of a text's random numbers; its copy i has the seed plus i. None draws one.
    """

    task: ClassVar[str] = "fill-mask"
    head: ClassVar[TaskName] = "fill-mask"

    texts: Sequence[str]
    truncation: Truncation = REFUSE
    top_k: int = 1
    unmasking: Unmasking = field(default_factory=Unmasking)
    steps: int | None = None
    targets: Targets | None = None
    grammars: Sequence[GrammarRequest | None] | None = None
    max_tokens: int = DEFAULT_BLANK
    seed: int | None = None
    constraints: Sequence[FixedLength | None] | None = None
    """The grammars, compiled."""

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        search = 0.0 if self.constraints is None else SECONDS_OF_SEARCH
        return tokenizing_seconds(self.texts) + search

    def check(self, model: TaskModel) -> None:
        how = self.unmasking
        if not 1 <= self.top_k <= MAX_BEAMS:
            raise ValidationError(
                f"must be between 1 and {MAX_BEAMS} for masks that are filled together, not "
                f"{self.top_k}",
                field="top_k",
            )
        if self.steps is not None and how.threshold is not None:
            raise ValidationError(
                "with it, steps means nothing; send one of them", field="threshold"
            )
        if how.num_beams > 1 and how.samples:
            raise ValidationError(
                "a search does not draw tokens; leave out temperature, or num_beams",
                field="num_beams",
            )
        if how.num_beams > 1 and how.threshold is not None:
            raise ValidationError(
                "a search fills as many masks of each beam in a pass; leave out threshold, or "
                "num_beams",
                field="num_beams",
            )
        if self.top_k > how.num_beams and not how.samples:
            raise ValidationError(
                f"a search with {how.num_beams} beams finds as many texts, not {self.top_k}",
                field="top_k",
            )

        if self.steps is not None and self.grammars is not None:
            raise ValidationError(
                "a blank with a grammar is filled from left to right, a token in a pass; leave "
                "out steps",
                field="steps",
            )

    async def prepared(self, model: TaskModel, deadline: Deadline) -> "JointFillRequest":
        # Here, as the texts may be read in another thread.
        known = replace(self, seed=told_seed(self.seed))
        if self.grammars is None:
            return known
        constraints = [
            None if each is None else await compile_constraint(each, model, deadline)
            for each in self.grammars
        ]
        return replace(known, constraints=constraints)

    def read(self, model: TaskModel) -> Reading[list[list[JointFilling]]]:
        """The answer has, for each text, its fillings, best first."""
        tokenizer = model.tokenizer
        words: Sequence[Contents] | None = None
        if self.targets is not None:
            words = [
                None if each is None else resolve_words(each, tokenizer, model.manifest.vocab_size)
                for each in self.targets
            ]
        if self.constraints is not None:
            with about("grammar"):
                words = [
                    None if each is None else lengths_of(each, self.max_tokens)
                    for each in self.constraints
                ]
        texts = [write_masks(text, tokenizer) for text in self.texts]
        encodings, num_truncated = read_texts(
            model, [(text, None) for text in texts], self.truncation
        )
        canvases = []
        for index, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
            with about("texts", index):
                check_masks_kept(text, encoding.ids, tokenizer)
                whole = MaskedInput(tuple(encoding.ids), (), tuple(encoding.type_ids))
                masks = mask_positions(encoding.ids, tokenizer)
                own = len(encoding.ids) - sum(encoding.special_tokens_mask)
                _check_context(own, len(masks), tokenizer)
                variants = list(self._variants(whole, masks, words, model))
            canvases.append([each for variant in variants for each in self._copies(variant)])
        return rank_fillings(
            canvases, self.unmasking, self.top_k, model, num_truncated=num_truncated
        )

    def _variants(
        self,
        whole: MaskedInput,
        masks: Sequence[int],
        words: "Sequence[Contents] | None",
        model: TaskModel,
    ) -> Iterator[Canvas]:
        """The text with as many masks in each blank as a word has tokens."""
        field, of = ("targets", "targets") if self.grammars is None else ("grammar", "grammars")
        _check_order(self.unmasking.order, len(masks))
        if words is None:
            words = [None]
        if len(words) == 1:
            words = [*words] * len(masks)
        if len(words) != len(masks):
            raise ValidationError(
                f"{of} for {len(words)} blanks, but the text has {len(masks)}",
                field=field,
            )
        lengths = [[1] if each is None else sorted(each) for each in words]
        if (num_variants := prod(map(len, lengths))) > _MAX_CANVASES:
            raise ValidationError(
                f"the {of} have {num_variants:,} combinations of lengths in the text's masks; at "
                f"most {_MAX_CANVASES} are tried: send fewer lengths for each",
                field=field,
            )
        for chosen in product(*lengths):
            canvas = spread(whole, masks, chosen, words, model, self.steps)
            if (self.steps or 1) > canvas.num_masks:
                raise ValidationError(
                    f"must be at most {canvas.num_masks}, the tokens to fill, not {self.steps}",
                    field="steps",
                )
            yield canvas

    def _copies(self, canvas: Canvas) -> Iterator[Canvas]:
        """The canvas, once for each text that is drawn."""
        first = draw_seed() if self.seed is None else self.seed
        for copy in range(self.top_k if self.unmasking.samples else 1):
            yield replace(canvas, seed=(first + copy) % _MAX_SEED)


Words = dict[int, tuple[tuple[int, ...], ...]]
"""Words as token ids, by their number of tokens."""

Contents = Words | dict[int, FixedLength] | None
"""What may stand in a blank, by its number of tokens; None for any single token."""


async def compile_constraint(
    wanted: GrammarRequest, model: TaskModel, deadline: Deadline
) -> FixedLength:
    """A grammar as a constraint on blanks.

    Raises:
        ValidationError: it is none, or the model's tokenizer cannot follow any.
        OverloadedError: too many wait to be compiled.
        DeadlineError: the time is up.
    """
    assert model.grammars is not None, "a model that fills masks has them"
    with about(wanted.field):
        async with deadline.enforced():
            grammar = await asyncio.wrap_future(model.grammars.submit(wanted.kind, wanted.value))
    return grammar.fixed_length(never_written(model))


def lengths_of(constraint: FixedLength, max_tokens: int) -> dict[int, FixedLength]:
    """A constraint by the numbers of tokens that meet it, ascending.

    Raises:
        ValidationError: none do.
    """
    lengths = constraint.lengths(max_tokens)
    if not lengths:
        raise ValidationError(
            f"no text of 1 to {max_tokens} tokens that matches it was found; allow more tokens, "
            "or shorter texts"
        )
    return dict.fromkeys(lengths, constraint)


def never_written(model: TaskModel) -> frozenset[int]:
    """The tokens that fill no mask unless they are asked for."""
    tokenizer = model.tokenizer
    return tokenizer.special_ids | tokenizer.ids_without_token(model.manifest.vocab_size)


def resolve_words(targets: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> Words:
    """The token ids of words, by their number of tokens; see `fill_mask.resolve_targets`.

    Raises:
        ValidationError: a word has a token that the model does not have.
    """
    found: dict[int, set[tuple[int, ...]]] = {}
    for target in targets:
        token_id = tokenizer.token_to_id(target)
        if token_id is None:
            ids = tuple(tokenizer.encode(target, add_special_tokens=False).ids)
        else:
            ids = (token_id,)
        if not ids or max(ids) >= vocab_size or not tokenizer.special_ids.isdisjoint(ids):
            raise ValidationError(
                f"the target {target!r} cannot be written with the model's vocabulary",
                field="targets",
            )
        found.setdefault(len(ids), set()).add(ids)
    return {length: tuple(sorted(words)) for length, words in found.items()}


def spread(
    whole: MaskedInput,
    masks: Sequence[int],
    lengths: Sequence[int],
    contents: Sequence[Contents],
    model: TaskModel,
    steps: int | None = None,
) -> Canvas:
    """A text with so many masks in the place of each of its masks, to be filled in so many passes.

    Raises:
        ValidationError: it does not fit the model.
    """
    ids, types = list(whole.input_ids), list(whole.token_type_ids or ())
    blanks: list[Blank] = []
    grown = 0
    for mask, length, allowed in zip(masks, lengths, contents, strict=True):
        at = mask + grown
        ids[at : at + 1] = [ids[at]] * length
        if types:
            types[at : at + 1] = [types[at]] * length
        fitting = None if allowed is None else allowed[length]
        positions = tuple(range(at, at + length))
        if isinstance(fitting, FixedLength):
            blanks.append(Blank(positions, constraint=fitting))
        else:
            blanks.append(Blank(positions, fitting))
        grown += length - 1
    max_length = model.manifest.max_length
    if len(ids) > max_length:
        raise ValidationError(
            f"with {sum(lengths)} tokens in its blanks the text has {len(ids)}; model "
            f"{model.name!r} takes at most {max_length}; shorten it, or what fills it"
        )
    places = tuple(range(len(blanks)))
    block = Block(places, steps)
    return Canvas([Draft(tuple(ids))], tuple(blanks), (block,), tuple(types) or None)


def rank_fillings(
    canvases: Sequence[Sequence[Canvas]],
    unmasking: Unmasking,
    top_k: int,
    model: TaskModel,
    *,
    num_truncated: int = 0,
) -> Reading[list[list[JointFilling]]]:
    """Fills canvases and ranks what comes of them.

    Args:
        canvases: for each text, its variants.
        unmasking: how.
        top_k: fillings of each text to return.
        model: that fills them.
        num_truncated: tokens of the texts that were cut off.

    Raises:
        ValidationError: there are too many.
    """
    everything = [canvas for variants in canvases for canvas in variants]
    num_drafts = len(everything) * unmasking.num_beams
    if num_drafts > _MAX_CANVASES:
        raise ValidationError(
            f"{num_drafts} fillings to follow; one request may ask for at most {_MAX_CANVASES}: "
            "send fewer texts, lengths of words, beams or samples"
        )
    num_masks = sum(canvas.num_masks for canvas in everything) * unmasking.num_beams
    if num_masks > _MAX_MASKS:
        raise ValidationError(
            f"{num_masks:,} masks to fill in all fillings; one request may ask for at most "
            f"{_MAX_MASKS:,}: send fewer texts, beams or samples"
        )
    tokenizer, vocab_size = model.tokenizer, model.manifest.vocab_size
    seconds = num_masks * vocab_size * _SECONDS_PER_LOGIT
    if any(blank.constraint is not None for canvas in everything for blank in canvas.blanks):
        seconds += SECONDS_OF_SEARCH

    def run() -> Passes[list[list[JointFilling]]]:
        unmasker = Unmasker(unmasking, never_written(model), model.vocabulary_kernels())
        yield from fill(unmasker, everything)
        answers = []
        for variants in canvases:
            ranked = yield from _ranked(variants, tokenizer)
            answers.append(ranked[:top_k])
        return answers

    return passes.reading(run(), num_truncated, seconds)


def _ranked(canvases: Sequence[Canvas], tokenizer: Tokenizer) -> Passes[list[JointFilling]]:
    """The fillings of a text, best first."""
    drafts = [(canvas, draft) for canvas in canvases for draft in canvas.drafts]
    sums = [0.0] * len(drafts)
    mask_token_id = tokenizer.mask_token_id
    assert mask_token_id is not None, "a text with masks was read"
    entries: list[Masking] = []
    for index, (canvas, draft) in enumerate(drafts):
        *_, last = draft.filled
        others = draft.filled[:-1]
        if all(each.step < last.step for each in others):
            # The pass that filled it alone has seen all others.
            sums[index] = last.logprob
        else:
            others = draft.filled
        whole = MaskedInput(draft.input_ids, (), canvas.token_type_ids)
        entries += maskings(index, whole, [each.position for each in others], mask_token_id)
    for first in range(0, len(entries), MAX_WAVE):
        wave = entries[first : first + MAX_WAVE]
        results = yield [each.input for each in wave]
        for each, result in zip(wave, results, strict=True):
            sums[each.text] += log_probability(result.logits[0], each.target)
    fillings = [
        _filling(canvas, draft, total, tokenizer)
        for (canvas, draft), total in zip(drafts, sums, strict=True)
    ]
    return sorted(fillings, key=lambda filling: -filling.score)


def _filling(canvas: Canvas, draft: Draft, total: float, tokenizer: Tokenizer) -> JointFilling:
    masks = {at: mask for mask, blank in enumerate(canvas.blanks) for at in blank.positions}
    tokens = tuple(
        JointToken(
            masks[each.position],
            each.token,
            tokenizer.decode([each.token], skip_special_tokens=False),
            math.exp(each.logprob),
            each.step,
        )
        for each in sorted(draft.filled, key=lambda each: each.position)
    )
    score = math.exp(total / len(tokens))
    return JointFilling(tokenizer.decode(draft.input_ids), score, total, tokens)


def _check_context(num_own: int, num_masks: int, tokenizer: Tokenizer) -> None:
    if num_own == num_masks:
        raise ValidationError(
            f"the text has nothing but masks; write at least one word beside {tokenizer.mask_token}"
        )


def _check_order(order: object, num_masks: int) -> None:
    if isinstance(order, tuple) and sorted(order) != list(range(num_masks)):
        raise ValidationError(
            f"must have the index of each mask of the text once, from 0 to {num_masks - 1}",
            field="order",
        )
