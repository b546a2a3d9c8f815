"""Seq2Seq: how an encoder-decoder model reads source texts.

Where a request says nothing, the checkpoint's own settings apply, as in transformers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maskdial.bundle.manifest import TextToText
from maskdial.bundle.texts import check_characters, check_ids
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.model import CausalModel
from maskdial.causal.reader import PromptReader, Tokens, excludes_search
from maskdial.causal.request import MAX_BEAMS, GenerationRequest, Writing
from maskdial.causal.sampling.params import SamplingParams
from maskdial.errors import ValidationError, about


class Seq2Seq(PromptReader):
    """Reads source texts for one task, in the languages that the request names.

    Raises:
        ValidationError: the model does not have the task or the languages that are asked for.
    """

    def __init__(self, request: GenerationRequest, model: CausalModel) -> None:
        super().__init__(request, model)
        if request.conversation is not None:
            raise ValidationError(
                f"model {model.name!r} reads a source text and does not chat; send the text to "
                "/generate, /summarize or /translate",
                field="messages",
            )
        if request.params.prompt_logprobs:
            raise ValidationError(
                f"model {model.name!r} reads its source text in one pass, so the text's tokens "
                "have no log-probabilities",
                field="prompt_logprobs",
            )
        text_to_text = model.manifest.text_to_text
        assert text_to_text is not None, "only an encoder-decoder model reads source texts"
        self._text_to_text = text_to_text
        self._writing = writing = request.writing
        self._decoding = text_to_text.defaults
        self._source_language = self._language(writing.source_language, "source_language")
        self._target_language = self._language(writing.target_language, "target_language")
        name = _task_name(text_to_text, writing)
        if name is not None:
            own = text_to_text.tasks[name]
            self._decoding = self._decoding.model_copy(update=own.model_dump(exclude_none=True))
        self._prefix = "" if writing.task is None else self._decoding.prefix or ""
        self.max_new_tokens = self._decoding.max_new_tokens

    def settings(self) -> Mapping[str, Any]:
        decoding, ngram_size = self._decoding, self._writing.no_repeat_ngram_size
        if ngram_size is None:
            ngram_size = decoding.no_repeat_ngram_size or 0
        first = self._target_language
        return {
            "min_new_tokens": self._request.params.min_new_tokens or decoding.min_new_tokens or 0,
            "no_repeat_ngram_size": ngram_size,
            "no_source_ngram_size": decoding.encoder_no_repeat_ngram_size or 0,
            "banned": self._text_to_text.banned,
            "forced_first": self._text_to_text.forced_bos_token_id if first is None else first,
            "forced_last": self._text_to_text.forced_eos_token_ids,
        }

    def writing(self, params: SamplingParams, *, has_grammar: bool) -> Writing:
        """The request's with the checkpoint's settings of a beam search. If these are the only
        reason for a search, it gives way to what excludes one.
        """
        asked, decoding = self._writing, self._decoding
        num_beams = asked.num_beams
        if num_beams is None and not excludes_search(params, has_grammar=has_grammar):
            num_beams = min(decoding.num_beams or 1, MAX_BEAMS)
        penalty, early = asked.length_penalty, asked.early_stopping
        return dataclasses.replace(
            asked,
            num_beams=num_beams,
            length_penalty=decoding.length_penalty if penalty is None else penalty,
            early_stopping=decoding.early_stopping if early is None else early,
        )

    def read(self, prompt: TextOrIds, index: int, borders: Sequence[int] = ()) -> Tokens:
        model, truncate = self._model, self._request.truncate
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
        return Tokens(self._in_language(ids), num_cut)

    def start(self, ids: list[int]) -> tuple[list[int], list[int]]:
        return [self._text_to_text.start_token_id], ids

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
