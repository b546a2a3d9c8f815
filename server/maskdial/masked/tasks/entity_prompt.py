"""What a GLiNER model reads before a text: labels, each after a token that stands for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from maskdial.bundle.manifest import Entities
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import ValidationError, shortened

_MIN_ROOM = 8  # part of the model's length that labels leave for the text


@dataclass(frozen=True, slots=True)
class LabelPrompt:
    """The labels of a request as tokens; ``rows`` are those whose vectors stand for them."""

    ids: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def read(
        cls, labels: Sequence[str], entities: Entities, tokenizer: Tokenizer, max_length: int
    ) -> "LabelPrompt":
        """Tokenizes labels; the special tokens before them are included. There are only those where
        another model encodes the labels.

        Raises:
            ValidationError: a label has no tokens or a marker of the model in it, or they leave
                next to no room for a text.
        """
        before, after = tokenizer.ends()
        if entities.label_token is None:
            return cls((*before,), ())
        encoded = tokenizer.encode_words(labels)
        parts: list[list[int]] = [[] for _ in labels]
        for token_id, place in zip(*(each.tolist() for each in encoded), strict=True):
            parts[place].append(token_id)
        ids, rows = [*before], []
        for label, part in zip(labels, parts, strict=True):
            marker = next((each for each in entities.markers if each in label), None)
            if marker is not None:
                raise ValidationError(
                    f"{shortened(label)!r} contains {marker}, which marks labels in the model's "
                    "prompt; leave it out",
                    field="candidate_labels",
                )
            if not part:
                raise ValidationError(
                    f"{shortened(label)!r} has no tokens in the model's vocabulary; leave it out",
                    field="candidate_labels",
                )
            rows.append(len(ids) + int(entities.reads_label))
            ids += [entities.label_token, *part]
        ids += entities.separator
        longest = max_length - len(after) - max(max_length // _MIN_ROOM, 1)
        if len(ids) > longest:
            raise ValidationError(
                f"the {len(labels):,} labels take {len(ids):,} tokens, and the model reads at most "
                f"{longest:,} before a text; send fewer of them, or shorter ones",
                field="candidate_labels",
            )
        return cls(tuple(ids), tuple(rows))
