"""What encoder-decoder models are told beside a prompt: how to write, for which task, in which
languages.

Where a request says nothing, the checkpoint's own settings apply, as in transformers.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from maskdial.bundle.manifest import TextToText
from maskdial.bundle.texts import check_characters, check_ids
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.beam_search import BeamParams, EarlyStopping
from maskdial.causal.model import CausalModel
from maskdial.causal.sampling.params import SamplingParams
from maskdial.errors import ValidationError, about

MAX_BEAMS = 8

WritingTask = Literal["summarization", "translation"]


@dataclass(frozen=True, slots=True)
class Writing:
    """How a text is searched for, and what encoder-decoder models are told beside it.

    None: as an encoder-decoder checkpoint has it, or nothing of the kind.

    Attributes:
        num_beams: texts that a beam search follows; 1 for none.
        length_penalty: exponent of a text's length, by which its log-probability is divided.
        early_stopping: whether the search ends as soon as it has ``num_beams`` texts; ``never``
            goes on until none can become better.
        no_repeat_ngram_size: no sequence of so many tokens occurs twice; 0 allows it.
        task: whose settings of the checkpoint apply, if it has any for it; as the other fields
            below, for encoder-decoder models only.
        source_language: code of the language of the source text.
        target_language: code of the language to write in.
        truncate_source: whether a source text that is too long is cut.
    """

    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    no_repeat_ngram_size: int | None = None
    task: WritingTask | None = None
    source_language: str | None = None
    target_language: str | None = None
    truncate_source: bool = False


def check_has_no_encoder(writing: Writing, model_name: str) -> None:
    """Refuses what only encoder-decoder models do, for a model that is none.

    Raises:
        ValidationError: it was asked for.
    """
    for name in ("task", "source_language", "target_language"):
        if getattr(writing, name) is not None:
            raise ValidationError(
                f"model {model_name!r} has no encoder; this is for encoder-decoder models",
                field=name,
            )


def resolve_beams(writing: Writing, params: SamplingParams, *, has_grammar: bool) -> BeamParams:
    """How to search.

    Raises:
        ValidationError: a search was asked for that cannot be.
    """
    num_beams = writing.num_beams or 1
    if num_beams > 1 and _excludes_search(params, has_grammar=has_grammar):
        raise ValidationError(
            "a beam search cannot be combined with sampling, stop strings, ignore_eos, a grammar, "
            "top tokens or the prompt's log-probabilities; leave them out, or set num_beams to 1",
            field="num_beams",
        )
    penalty = 1.0 if writing.length_penalty is None else writing.length_penalty
    return BeamParams(num_beams, penalty, writing.early_stopping or False)


def _excludes_search(params: SamplingParams, *, has_grammar: bool) -> bool:
    return (
        not params.greedy
        or has_grammar
        or bool(params.stop)
        or params.top_n_tokens > 0
        or params.ignore_eos
        or params.prompt_logprobs
    )


class TextToTextSettings:
    """A model's settings for one request.

    Raises:
        ValidationError: the model does not have the task or the languages that are asked for.
    """

    def __init__(self, text_to_text: TextToText, writing: Writing) -> None:
        self._text_to_text = text_to_text
        self._writing = writing
        self._decoding = text_to_text.defaults
        self._prefix = ""
        self._source_language = self._language(writing.source_language, "source_language")
        self._target_language = self._language(writing.target_language, "target_language")
        name = _task_name(text_to_text, writing)
        if name is not None:
            own = text_to_text.tasks[name]
            self._decoding = self._decoding.model_copy(update=own.model_dump(exclude_none=True))
        if writing.task is not None:
            self._prefix = self._decoding.prefix or ""

    @property
    def max_new_tokens(self) -> int | None:
        """The checkpoint's limit; None if it has none."""
        return self._decoding.max_new_tokens

    def params(self, params: SamplingParams) -> SamplingParams:
        """A request's parameters with the checkpoint's settings."""
        decoding, ngram_size = self._decoding, self._writing.no_repeat_ngram_size
        if ngram_size is None:
            ngram_size = decoding.no_repeat_ngram_size or 0
        first = self._target_language
        return dataclasses.replace(
            params,
            min_new_tokens=params.min_new_tokens or decoding.min_new_tokens or 0,
            no_repeat_ngram_size=ngram_size,
            no_source_ngram_size=decoding.encoder_no_repeat_ngram_size or 0,
            banned=self._text_to_text.banned,
            forced_first=self._text_to_text.forced_bos_token_id if first is None else first,
            forced_last=self._text_to_text.forced_eos_token_ids,
        )

    def writing(self, params: SamplingParams, *, has_grammar: bool) -> Writing:
        """A request's with the checkpoint's settings of a beam search. If these are the only reason
        for a search, it gives way to what excludes one.
        """
        asked, decoding = self._writing, self._decoding
        num_beams = asked.num_beams
        if num_beams is None and not _excludes_search(params, has_grammar=has_grammar):
            num_beams = min(decoding.num_beams or 1, MAX_BEAMS)
        penalty, early = asked.length_penalty, asked.early_stopping
        return dataclasses.replace(
            asked,
            num_beams=num_beams,
            length_penalty=decoding.length_penalty if penalty is None else penalty,
            early_stopping=decoding.early_stopping if early is None else early,
        )

    def read(
        self, prompt: TextOrIds, model: CausalModel, truncate: int | None, index: int
    ) -> tuple[list[int], int]:
        """The tokens of a source text, and how many were cut off.

        Token ids are used unchanged.

        Raises:
            ValidationError: the text is empty or too long.
        """
        limit = model.max_source_length
        assert limit is not None, "only a model with an encoder reads source texts"
        truncates = truncate is not None or self._writing.truncate_source
        room = min(limit, truncate or limit)
        with about("prompts", index):
            if isinstance(prompt, str):
                text = self._prefix + prompt
                if truncates:
                    ids, num_cut = _cut(text, model, room)
                else:
                    check_characters(text, limit, model)
                    ids, num_cut = model.tokenizer.encode(text).ids, 0
            else:
                check_ids(prompt, model)
                ids, num_cut = list(prompt), 0
                if truncates and len(ids) > room:
                    num_cut = len(ids) - room
                    is_left = model.manifest.tokenization.truncation_side == "left"
                    ids = ids[num_cut:] if is_left else ids[:room]
            if not ids:
                raise ValidationError("the source text has no tokens; write at least one word")
            if len(ids) > limit:
                raise ValidationError(
                    f"the source text has {len(ids)} tokens; model {model.name!r} reads at most "
                    f"{limit}; shorten or truncate it"
                )
        return self._in_language(ids), num_cut

    def _in_language(self, ids: list[int]) -> list[int]:
        """The tokens with the source language's in the place of the tokenizer's default one."""
        if self._source_language is None:
            return ids
        languages = set(self._text_to_text.languages.values())
        return [self._source_language if each in languages else each for each in ids]

    def _language(self, code: str | None, field: str) -> int | None:
        known = self._text_to_text.languages
        if code is None or (not known and self._writing.task == "translation"):
            return None  # the names of T5's tasks have languages, too
        if code not in known:
            raise ValidationError(
                f"the model has no language {code!r}; its languages are {', '.join(known)}"
                if known
                else "the model has no tokens for languages; leave them out",
                field=field,
            )
        return known[code]


def _task_name(text_to_text: TextToText, writing: Writing) -> str | None:
    """What the checkpoint calls a request's task; None if it has no settings for it."""
    tasks = text_to_text.tasks
    if writing.task == "summarization":
        return writing.task if writing.task in tasks else None
    if writing.task is None or text_to_text.languages:
        return None
    source, target = writing.source_language, writing.target_language
    ways = [name for name in tasks if name.startswith("translation")]
    if source is None and target is None:
        if len(ways) > 1:
            raise ValidationError(
                f"the model translates in several ways; name the languages: {_spell(ways)}",
                field="target_language",
            )
        return next(iter(ways), None)
    name = f"translation_{source}_to_{target}"
    if name not in ways:
        raise ValidationError(
            f"the model does not translate from {source} to {target}; it translates {_spell(ways)}"
            if ways
            else "the model translates one way; leave the languages out",
            field="target_language",
        )
    return name


def _spell(ways: list[str]) -> str:
    return ", ".join(way.removeprefix("translation_").replace("_to_", " to ") for way in ways)


def _cut(text: str, model: CausalModel, room: int) -> tuple[list[int], int]:
    """The tokens of a source text, with the special ones, cut to ``room`` where its model cuts
    texts; and how many were cut off.
    """
    num_special = model.tokenizer.num_special_tokens(pair=False)
    if room <= num_special:
        raise ValidationError(
            f"the tokenizer adds {num_special} special tokens to a source text, so at least "
            f"{num_special + 1} are to be kept",
            field="truncate",
        )
    encoding, num_cut = model.tokenizer.encode_cut(
        text, max_length=room, direction=model.manifest.tokenization.truncation_side
    )
    return encoding.ids, num_cut
