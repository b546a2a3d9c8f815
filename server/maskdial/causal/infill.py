"""Infilling prompts: the texts before and after a gap, between a model's own tokens.

They are those that the models were trained on (Bavarian et al. 2022, arXiv:2207.14255; for other
files Qwen2.5-Coder, arXiv:2409.12186), arranged as llama.cpp's ``/infill`` does.
"""

from collections.abc import Sequence

from maskdial.bundle.manifest import InfillTokens
from maskdial.bundle.texts import check_characters
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.model import CausalModel
from maskdial.causal.request import Infilling, Snippet
from maskdial.errors import ValidationError

_PROJECT, _FILE_NAME = "myproject", "filename"  # llama.cpp's, for what a request does not name
_SNIPPET = "\n\n--- snippet ---\n\n"


def infill_tokens(model: CausalModel) -> InfillTokens:
    """The model's fill-in-the-middle tokens.

    Raises:
        ValidationError: it has none.
    """
    tokens = model.manifest.infill
    if tokens is None:
        raise ValidationError(
            f"model {model.name!r} has no fill-in-the-middle tokens, so it cannot write before a "
            'suffix; leave it out, or ask a model whose "tasks" in /models have infill',
            field="suffix",
        )
    return tokens


def end_ids(model: CausalModel) -> frozenset[int]:
    """The tokens that end the text of a gap, beside the model's own."""
    found = map(model.tokenizer.token_to_id, infill_tokens(model).ends)
    return frozenset(each for each in found if each is not None)


def read_infilling(
    prefix: str, infilling: Infilling, model: CausalModel, max_new_tokens: int
) -> tuple[list[int], int]:
    """The prompt's tokens, and how many were cut off.

    Args:
        prefix: the text before the gap.
        infilling: what is around it else.
        model: that reads it.
        max_new_tokens: room to leave for the gap where texts are cut.

    Raises:
        ValidationError: it is too long and must not be cut.
    """
    tokens, tokenizer = infill_tokens(model), model.tokenizer
    if not infilling.cut:
        for text in (prefix, infilling.suffix):
            check_characters(text, model.max_length, model)
    before = _encode(prefix, tokenizer)
    after = encode_inside(infilling.suffix, tokenizer)
    beginning = encode_inside(infilling.beginning, tokenizer) if infilling.beginning else []
    extra = _snippet_ids(infilling.snippets, tokens, tokenizer)
    starts, _ = tokenizer.ends()
    num_cut = 0
    if infilling.cut:
        marks = len(starts) + 2 + (tokens.middle is not None) + len(beginning)
        room = max(model.max_length - max_new_tokens - marks, 0)
        lengths = _shares(len(before), len(after), room)
        kept_extra = min(len(extra), max(room - sum(lengths), 0))
        num_cut = len(before) + len(after) + len(extra) - sum(lengths) - kept_extra
        before, after = before[len(before) - lengths[0] :], after[: lengths[1]]
        extra = extra[len(extra) - kept_extra :]
    first = [_id(tokens.prefix, tokenizer), *before, *beginning]
    second = [_id(tokens.suffix, tokenizer), *after]
    gap = [] if tokens.middle is None else [_id(tokens.middle, tokenizer)]
    parts = (second, first) if tokens.suffix_first else (first, second)
    return [*starts, *extra, *parts[0], *parts[1], *gap], num_cut


def _shares(num_before: int, num_after: int, room: int) -> tuple[int, int]:
    """How many tokens of both texts are kept: three quarters and one, or what the other leaves."""
    kept_after = min(num_after, max(room // 4, room - num_before))
    return min(num_before, room - kept_after), kept_after


def _snippet_ids(
    snippets: Sequence[Snippet], tokens: InfillTokens, tokenizer: Tokenizer
) -> list[int]:
    """The other files before the gap's own, in the form of repositories where the model has it."""
    if not snippets:
        return []
    ids: list[int] = []
    if tokens.repository is not None:
        ids += [_id(tokens.repository, tokenizer), *encode_inside(f"{_PROJECT}\n", tokenizer)]
    for snippet in snippets:
        if tokens.file is not None:
            ids += [_id(tokens.file, tokenizer)]
            ids += encode_inside(f"{snippet.filename}\n", tokenizer)
        else:
            ids += encode_inside(_SNIPPET, tokenizer)
        ids += encode_inside(snippet.text, tokenizer)
    if tokens.file is not None:
        ids += [_id(tokens.file, tokenizer), *encode_inside(f"{_FILE_NAME}\n", tokenizer)]
    return ids


def encode_inside(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text within another one: without the space that SentencePiece puts before a
    text (as transformers' CodeLlamaTokenizer reads a suffix).
    """
    newline = _encode("\n", tokenizer)
    if len(newline) > 1:
        ids = _encode(f"\n{text}", tokenizer)
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
    return _encode(text, tokenizer)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _id(token: str, tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, "the export found it in the tokenizer"
    return token_id
