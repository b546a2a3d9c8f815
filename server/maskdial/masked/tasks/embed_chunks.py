"""Late chunking: a vector for each chunk of a text that is read in one pass.

Günther et al., arXiv:2409.04701: the mean of the vectors of a chunk's tokens, which have attended
to the whole text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import spans
from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.embed import lengths
from maskdial.masked.tasks.logits import finite
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    TaskModel,
    TaskRequest,
    Truncation,
    masked_input,
    read_text,
)

_SECONDS_PER_TOKEN = 1e-6
_MAX_OVERLAP = 16


@dataclass(frozen=True, slots=True)
class ChunkEmbedRequest(TaskRequest[NDArray[np.float32]]):
    """A text, and its chunks: where they begin and end, in characters.

    The answer is float32 (num_chunks, dimension). ``normalize``: scale its vectors to length 1.
    """

    task: ClassVar[str] = "embed-chunks"
    head: ClassVar[TaskName] = "embed-all"

    text: str
    chunks: Sequence[tuple[int, int]]
    truncation: Truncation = REFUSE
    normalize: bool = True

    @property
    def num_texts(self) -> int:
        return 1

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([self.text]) + len(self.text) * _SECONDS_PER_TOKEN

    def check(self, model: TaskModel) -> None:
        for index, (_, end) in enumerate(self.chunks):
            if end > len(self.text):
                raise ValidationError(
                    f"ends at {end}, and the text has {len(self.text)} characters",
                    field="chunks",
                    index=index,
                )

    def read(self, model: TaskModel) -> Reading[NDArray[np.float32]]:
        embedding = model.manifest.embedding
        assert embedding is not None, "every bundle for this task has one"
        prompt = embedding.prompts.get("document", "")
        with about("texts"):
            encoding, num_cut = read_text(model, (prompt + self.text, None), self.truncation)
        # The last character of each token, in the text; a special token has none.
        lasts = np.array([end - 1 - len(prompt) for _, end in spans(encoding)])
        own = np.flatnonzero(lasts >= 0)
        bounds = np.searchsorted(lasts[own], np.array(self.chunks))
        for index, (first, end) in enumerate(bounds):
            if first >= end:
                cut = f"; {num_cut} tokens of the text were cut off" if num_cut else ""
                raise ValidationError(f"no token ends in it{cut}", field="chunks", index=index)
        total = int((bounds[:, 1] - bounds[:, 0]).sum())
        if total > _MAX_OVERLAP * len(encoding):
            raise ValidationError(
                f"they overlap so much that they have {total:,} tokens, of a text of "
                f"{len(encoding):,}; at most {_MAX_OVERLAP} times as many are allowed",
                field="chunks",
            )

        def answer(results: Sequence[MaskedResult]) -> NDArray[np.float32]:
            vectors = finite(results[0].logits, "embeddings")
            means = np.stack([vectors[first:end].mean(axis=0) for first, end in bounds])
            if self.normalize:
                means /= lengths(means)[:, None]
            return means.astype(np.float32)

        rows = tuple(own.tolist())
        return Reading([masked_input(encoding, rows)], answer, num_cut, total * _SECONDS_PER_TOKEN)
