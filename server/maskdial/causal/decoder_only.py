"""DecoderOnly: how a model without an encoder reads prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from maskdial.bundle.texts import check_ids, check_media
from maskdial.bundle.tokenizer import TextOrIds, tokens_before
from maskdial.causal.infill import end_ids, read_infilling
from maskdial.causal.model import CausalModel
from maskdial.causal.reader import PromptReader, Tokens
from maskdial.causal.request import GenerationRequest, Infilling
from maskdial.errors import PromptTooLongError, ValidationError, about

_GAP_TOKENS = 100  # that are left free where texts are cut and the request does not say


class DecoderOnly(PromptReader):
    """Reads prompts that the texts continue."""

    def __init__(self, request: GenerationRequest, model: CausalModel) -> None:
        super().__init__(request, model)
        for name in ("task", "source_language", "target_language"):
            if getattr(request.writing, name) is not None:
                raise ValidationError(
                    f"model {model.name!r} has no encoder; this is for encoder-decoder models",
                    field=name,
                )

    def settings(self) -> Mapping[str, Any]:
        settings: dict[str, Any] = {}
        if self._request.writing.no_repeat_ngram_size is not None:
            settings["no_repeat_ngram_size"] = self._request.writing.no_repeat_ngram_size
        if self._request.infill is not None:
            own = self._request.params.stop_token_ids
            settings["stop_token_ids"] = own | end_ids(self._model)
        return settings

    def read(self, prompt: TextOrIds, index: int, borders: Sequence[int] = ()) -> Tokens:
        """The prompt's last tokens, as in transformers, if they leave room in the context. Special
        ones before the text are kept, and count; a chat template writes them itself.
        """
        if self._request.infill is not None:
            return self._read_infilling(prompt, self._request.infill, index)
        with about("prompts", index):
            ids, num_special, offsets, places = self._tokenize(prompt, borders)
            number = min(len(ids), self._request.truncate or len(ids))
            if number < len(ids):
                num_before = min(num_special, number - 1)
                rest = slice(num_before - number, None)
                kept = ids[:num_before] + ids[rest]
                if offsets is not None:
                    offsets = offsets[:num_before] + offsets[rest]
                places = ()
            else:
                kept = ids
            self._check(kept)
        return Tokens(kept, len(ids) - len(kept), offsets, places)

    def _check(self, ids: list[int]) -> None:
        check_media(ids, self._model)
        if not ids:
            raise ValidationError("the prompt has no tokens; write at least one word")
        context = self._model.max_length
        if len(ids) >= context:
            raise PromptTooLongError.of(len(ids), self._model.name, context)

    def _read_infilling(self, prompt: TextOrIds, infill: Infilling, index: int) -> Tokens:
        """The text before a gap and what is around it."""
        request, context = self._request, self._model.max_length
        if not isinstance(prompt, str):
            raise ValidationError(
                "a prompt of token ids has no place for it; send a text", field="suffix"
            )
        if request.truncate is not None:
            raise ValidationError(
                "a prompt with a suffix is not truncated; leave it out", field="truncate"
            )
        room = min(request.max_new_tokens or _GAP_TOKENS, context // 2)
        with about("prompts", index):
            ids, num_cut = read_infilling(prompt, infill, self._model, room)
            self._check(ids)
        return Tokens(ids, num_cut)

    def start(self, ids: list[int]) -> tuple[list[int], list[int]]:
        return ids, []

    def _tokenize(
        self, prompt: TextOrIds, borders: Sequence[int]
    ) -> tuple[list[int], int, list[int] | None, tuple[int, ...]]:
        """A prompt's ids, how many special tokens the tokenizer put before its text, where the
        tokens begin, if the reply describes them, and how many stand before each border.
        """
        request, model = self._request, self._model
        if not isinstance(prompt, str):
            check_ids(prompt, model)
            return list(prompt), 0, None, ()
        if request.truncate is None:
            least = model.tokenizer.least_tokens(prompt)
            if least > model.max_length:  # tokenizing it would take seconds
                raise PromptTooLongError.of(least, model.name, model.max_length, "at least ")
        adds_special = request.conversation is None
        encoding = model.tokenizer.encode(prompt, add_special_tokens=adds_special)
        mask = encoding.special_tokens_mask
        num_special = mask.index(0) if 0 in mask else len(mask)
        describes = request.describe_tokens and request.params.prompt_logprobs
        offsets = model.tokenizer.offsets(prompt, encoding) if describes else None
        return encoding.ids, num_special, offsets, tokens_before(encoding, borders)
