"""Everything that models can be asked for."""

import functools
from typing import Any

from maskdial.ask.decide import method_of
from maskdial.ask.score import ScoreRequest
from maskdial.bundle.manifest import Manifest
from maskdial.masked.tasks.classify import ClassifyRequest
from maskdial.masked.tasks.denoise import DenoiseRequest
from maskdial.masked.tasks.embed import EmbedRequest, SimilarityRequest, SparseEmbedRequest
from maskdial.masked.tasks.embed_all import EmbedAllRequest
from maskdial.masked.tasks.embed_chunks import ChunkEmbedRequest
from maskdial.masked.tasks.embed_hybrid import HybridEmbedRequest
from maskdial.masked.tasks.extract import ExtractRequest
from maskdial.masked.tasks.fill_mask import FillMaskRequest
from maskdial.masked.tasks.infill import InfillRequest
from maskdial.masked.tasks.masked_diffusion import UnmaskRequest
from maskdial.masked.tasks.question_answering import QuestionAnsweringRequest
from maskdial.masked.tasks.redact import RedactRequest
from maskdial.masked.tasks.rerank import RerankRequest
from maskdial.masked.tasks.task import TaskRequest
from maskdial.masked.tasks.token_classify import TokenClassifyRequest
from maskdial.masked.tasks.zero_shot import ZeroShotRequest
from maskdial.registry.served import Task


def _writes(manifest: Manifest) -> bool:
    return manifest.task == "generate" or DenoiseRequest.serves(manifest)


def _unmasks(manifest: Manifest) -> bool:
    return UnmaskRequest.serves(manifest) or DenoiseRequest.serves(manifest)


def _infills(manifest: Manifest) -> bool:
    if manifest.task == "generate":
        return manifest.infill is not None
    return InfillRequest.serves(manifest) and not manifest.reads_left


@functools.cache
def task_of(kind: type[TaskRequest[Any]]) -> Task:
    """The task that a kind of request to masked models is for."""
    return Task(kind.task, kind.serves)


WRITE = Task("generate", _writes)
"""A text, under the mask that a model was trained to write under."""
UNMASK = Task("generate", _unmasks)
"""A text under the full mask."""
SUMMARIZE = Task("summarize", lambda manifest: manifest.summarizes)
TRANSLATE = Task("translate", lambda manifest: manifest.translates)
INFILL = Task("infill", _infills)
SCORE = Task("score", ScoreRequest.serves)
DECIDE = Task("decide", lambda manifest: method_of(manifest) is not None)
TOKENIZE = Task("tokenize", lambda _: True)

LISTED: tuple[Task, ...] = (
    *map(
        task_of,
        (
            FillMaskRequest,
            ClassifyRequest,
            TokenClassifyRequest,
            RedactRequest,
            ExtractRequest,
            QuestionAnsweringRequest,
            EmbedRequest,
            SparseEmbedRequest,
            EmbedAllRequest,
            ChunkEmbedRequest,
            HybridEmbedRequest,
            ZeroShotRequest,
            RerankRequest,
            SimilarityRequest,
        ),
    ),
    WRITE,
    SUMMARIZE,
    TRANSLATE,
    INFILL,
    SCORE,
    TOKENIZE,
)
"""Those that listings and errors name, in their order."""
