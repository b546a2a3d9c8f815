"""A query and each of many documents in the template of a reranker, as one text.

The text is tokenized as a whole, as the model was trained: tokens may span the seams.
"""

from collections.abc import Iterator, Sequence

from tokenizers import Encoding

from maskdial.bundle.manifest import PairTemplate
from maskdial.bundle.tokenizer import spans
from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks.pairs import PairError
from maskdial.masked.tasks.task import TaskModel, Truncation

SECONDS_PER_TEMPLATE = 0.1e-3


def read_in_template(
    model: TaskModel,
    template: PairTemplate,
    query: str,
    documents: Sequence[str],
    truncation: Truncation,
    *,
    error: PairError,
) -> tuple[list[MaskedInput], int]:
    """Tokenizes the query with every document.

    Args:
        truncation: whether, and at which end, a document is cut if the text is too long.
        error: makes the error about a pair.

    Returns:
        The inputs, and how many tokens were cut off.

    Raises:
        ValidationError: a text is too long, or has no room for its document.
    """
    max_length = model.manifest.max_length
    start = template.before + query + template.between
    if model.tokenizer.exceeds(start, max_length):
        raise error(0, 0, f"have {len(start):,} characters with the model's template; shorten them")
    inputs = []
    num_truncated = 0
    for index, document in enumerate(documents):
        if not truncation.cuts(model) and model.tokenizer.exceeds(document, max_length):
            reason = f"have {len(start) + len(document):,} characters together; shorten them"
            raise error(0, index, reason)
        text = start + document + template.after
        encoding = model.tokenizer.encode(text, add_special_tokens=False)
        excess = max(len(encoding) - max_length, 0)
        if excess and not truncation.cuts(model):
            raise error(
                0,
                index,
                f"take {len(encoding)} tokens together; model {model.name!r} takes at most "
                f'{max_length}; shorten them, or set "truncate"',
            )
        ids = encoding.ids
        if excess:
            first, end = _span(encoding, len(start), len(start) + len(document), max_length)
            if end - first <= excess:
                reason = f"leave no room for the text in the {max_length} tokens of the model"
                raise error(0, index, f"{reason}; shorten the query")
            cut = first if truncation.side(model) == "left" else end - excess
            ids = ids[:cut] + ids[cut + excess :]
            num_truncated += excess
        inputs.append(MaskedInput(tuple(ids)))
    return inputs, num_truncated


def _span(encoding: Encoding, start: int, end: int, limit: int) -> tuple[int, int]:
    """The first token of some characters, and the one after their last; none spans their ends.

    Both are looked for among the first and the last ``limit`` tokens only: in a text that can be
    cut to so many, all others are within.
    """

    def inside(tokens: range) -> Iterator[int]:
        for token, (begins, ends) in zip(tokens, spans(encoding, tokens), strict=True):
            if start <= begins < ends <= end:
                yield token

    length = len(encoding)
    first = next(inside(range(min(limit, length))), None)
    last = next(inside(range(length)[: -limit - 1 : -1]), None)
    return (0, 0) if first is None or last is None else (first, last + 1)
