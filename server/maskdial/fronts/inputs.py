"""Inputs that a front end has made of a request's texts, and the engine's results, on their way."""

import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from fastapi import Response

from maskdial.masked.request import MaskedInput, MaskedResult

RESULTS = b"application/x-maskdial-results"
"""The media type of results; no reply to a client has it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a front end asks an engine for.

    Attributes:
        model: the name of a masked model.
        sha256: of the bundle by which the texts were read.
        seconds: how long that took.
        inputs: of its passes, which have neither a canvas nor ``reduce``.
    """

    model: str
    sha256: str
    seconds: float
    inputs: Sequence[MaskedInput]

    def packed(self) -> tuple[Any, ...]:
        """As a frame has it."""
        inputs = [
            (each.input_ids, each.rows, each.token_type_ids, each.num_unattended, each.num_labels)
            for each in self.inputs
        ]
        return self.model, self.sha256, self.seconds, inputs

    @classmethod
    def unpacked(cls, packed: tuple[Any, ...]) -> Self:
        """Of what a frame has."""
        model, sha256, seconds, inputs = packed
        return cls(model, sha256, seconds, [MaskedInput(*each) for each in inputs])


def results_reply(results: Sequence[MaskedResult]) -> Response:
    """Results as the reply to a front end."""
    content = marshal.dumps(
        [
            (
                each.logits.tobytes(),
                each.logits.shape,
                each.queue_seconds,
                each.inference_seconds,
                each.batch_size,
                each.batch_tokens,
                each.is_cached,
            )
            for each in results
        ]
    )
    return Response(content, media_type=RESULTS.decode())


def results_of(content: bytes) -> list[MaskedResult]:
    """The results of such a reply."""
    return [
        MaskedResult(np.frombuffer(logits, np.float32).reshape(shape), *rest)
        for logits, shape, *rest in marshal.loads(content)
    ]
