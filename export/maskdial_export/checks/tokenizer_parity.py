"""Tokenizer parity: what the server makes of a text is what transformers makes of it.

Some 300 texts (see `maskdial_export.checks.probes`) go through transformers' tokenizer as a caller
uses it, and through the server's class with what the bundle holds: whole, without special tokens,
cut to a length, and in pairs; each with its offsets. Where tokenizer.json overrules the defaults of
transformers' class, transformers' tokenizer has what the file says
(`maskdial_export.checkpoint.tokenizer_file`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from rich.console import Console
from tokenizers import Encoding

from maskdial.bundle.manifest import TOKENIZER, SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checkpoint.tokenization import LoadedTokenizer
from maskdial_export.checks.probes import pairs, probes
from maskdial_export.errors import ExportError
from maskdial_export.phase import finding

_LENGTHS = (4, 11)  # of a text that is cut, beside its special tokens
# Characters of one text times those of the other: of a pair that is cut, transformers also makes
# every pair of what it cuts off, gigabytes where each character is a token
_MAX_CUT = 10_000
_SHOWN = 50  # characters of a text, and as many tokens around the first difference
_AROUND = 3

_Text = str | tuple[str, str]
_Encode = Callable[[_Text], Encoding]


@dataclass(frozen=True, slots=True)
class _Field:
    """What is compared: its name in errors, transformers' name, and the name in an encoding."""

    title: str
    theirs: str
    ours: str


_IDS = _Field("token ids", "input_ids", "ids")
_TYPES = _Field("segment ids", "token_type_ids", "type_ids")
_FAST = (  # transformers' tokenizers in Python do not have them
    _Field("offsets", "offset_mapping", "offsets"),
    _Field("special tokens", "special_tokens_mask", "special_tokens_mask"),
)


def check_tokenizer(
    name: str, loaded: LoadedTokenizer, tokens: SpecialTokens, sample: Sample, *, paired: bool
) -> None:
    """Compares the tokenizer that the server will have with transformers' own.

    Args:
        name: the checkpoint's, for errors.
        loaded: its tokenizer.
        tokens: its special tokens.
        sample: a text of the kind that the model reads.
        paired: whether the model reads two texts as one input.

    Raises:
        ExportError: they differ; the message has the first text for which they do.
        BundleError: the server cannot use the tokenizer.
    """
    served = Tokenizer(
        tokenizers.Tokenizer.from_str(loaded.backend.to_str()), tokens, loaded.settings
    )
    if loaded.original is None:
        return
    comparison = _Comparison(name, loaded.original, loaded.sends_token_types)
    texts = _texts(loaded, sample)
    comparison.run(texts, served.encode, "")
    comparison.run(
        texts,
        lambda text: served.encode(text, add_special_tokens=False),
        " without special tokens",
        add_special_tokens=False,
    )
    two = pairs(texts) if paired else []
    comparison.run(two, lambda pair: served.encode(*pair), " as a pair")
    side = loaded.settings.truncation_side
    short = [pair for pair in two if len(pair[0]) * len(pair[1]) <= _MAX_CUT]
    for length in _LENGTHS:
        for each, suffix in ((texts, ""), (short, " as a pair")):
            limit = length + served.num_special_tokens(pair=bool(suffix))
            comparison.run(
                each,
                lambda text, limit=limit: _cut(served, text, limit, side),
                f"{suffix} cut to {limit} tokens",
                truncation=True,
                max_length=limit,
            )


def show_overruled(loaded: LoadedTokenizer, sample: Sample, console: Console) -> None:
    """Shows the first text that transformers' class would read otherwise than tokenizer.json."""
    by_class = loaded.by_class
    if by_class is None:
        return
    by_class.no_padding()
    by_class.no_truncation()
    for text in _texts(loaded, sample):
        if by_class.encode(text).ids != loaded.backend.encode(text).ids:
            finding(
                console,
                f"{TOKENIZER} overrules defaults of transformers' {type(loaded.original).__name__}"
                f", which would read {_shown(text)!r} otherwise",
            )
            return


def _texts(loaded: LoadedTokenizer, sample: Sample) -> list[str]:
    known = loaded.original.added_tokens_encoder
    added = loaded.backend.get_added_tokens_decoder()
    # transformers' M2M-100 reads a language within a text only where its files list the token
    named = [added[index].content for index in sorted(added) if added[index].content in known]
    others = loaded.backend.get_vocab(with_added_tokens=False)
    return probes(named, sorted(others, key=others.__getitem__), sample.sentences())


def _cut(served: Tokenizer, text: _Text, limit: int, side: Any) -> Encoding:
    parts = (text,) if isinstance(text, str) else text
    encoding, _ = served.encode_cut(*parts, max_length=limit, direction=side)
    return encoding


class _Comparison:
    """Compares encodings with those of transformers' tokenizer."""

    def __init__(self, name: str, original: Any, sends_token_types: bool) -> None:
        self._name = name
        self._original = original
        self._fields = [_IDS]
        self._fields += [_TYPES] if sends_token_types else []
        self._fields += _FAST if original.is_fast else []

    def run(
        self, texts: Sequence[_Text], encode: Callable[..., Encoding], how: str, **settings: Any
    ) -> None:
        """Raises: ExportError: an encoding differs."""
        for text, theirs in zip(texts, self._theirs(texts, settings), strict=True):
            ours = encode(text)
            for field in self._fields:
                expected, found = theirs[field.theirs], getattr(ours, field.ours)
                if list(map(_plain, expected)) != list(map(_plain, found)):
                    raise ExportError(self._difference(text, how, field, expected, found))

    def _theirs(
        self, texts: Sequence[_Text], settings: dict[str, Any]
    ) -> Iterable[dict[str, Sequence[Any]]]:
        if not texts:
            return []
        firsts, seconds = texts, None
        if not isinstance(texts[0], str):
            firsts, seconds = ([pair[i] for pair in texts] for i in (0, 1))
        made = self._original(
            firsts,
            seconds,
            return_token_type_ids=_TYPES in self._fields,
            return_offsets_mapping=self._original.is_fast,
            return_special_tokens_mask=self._original.is_fast,
            verbose=False,
            **settings,
        )
        names = [field.theirs for field in self._fields]
        return [
            dict(zip(names, row, strict=True))
            for row in zip(*(made[name] for name in names), strict=True)
        ]

    def _difference(
        self, text: _Text, how: str, field: _Field, expected: Sequence[Any], found: Sequence[Any]
    ) -> str:
        place = next(
            (i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(found)),
        )
        around = slice(max(place - _AROUND, 0), place + _AROUND)
        shown = _shown(text if isinstance(text, str) else " + ".join(text))
        return (
            f"the tokenizer of {self._name} cannot be exported: of {shown!r}{how}, transformers "
            f"has the {field.title} {list(expected[around])} from place {around.start}, and the "
            f"bundle would have {list(found[around])}"
        )


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
