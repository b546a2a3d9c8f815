"""The masked family's routes, one for each task, and `/score`, which both families serve.

A masked task is registered here: its request, its body, and how its answer is written. The rest is
the same for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from fastapi import Response
from numpy.typing import NDArray

from maskdial.ask import score as scoring
from maskdial.ask.catalogue import SCORE, task_of
from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.dialects.call import Call, task_route
from maskdial.dialects.masked_body import MaskedBody
from maskdial.dialects.native import replies
from maskdial.dialects.native.classify_bodies import ClassifyBody, ZeroShotClassifyBody
from maskdial.dialects.native.extract_bodies import ExtractBody, render
from maskdial.dialects.native.fill_mask_bodies import FillMaskBody, ScoreBody
from maskdial.dialects.native.span_bodies import (
    QuestionAnsweringBody,
    RedactBody,
    TokenClassifyBody,
)
from maskdial.dialects.native.vector_bodies import (
    ChunkEmbedBody,
    EmbedAllBody,
    EmbedBody,
    HybridEmbedBody,
    RerankBody,
    SimilarityBody,
    SparseEmbedBody,
)
from maskdial.engine.timing import Timed
from maskdial.http.replies import json_reply, timing_headers
from maskdial.http.route import TaskRoute
from maskdial.masked.tasks.classify import ClassifyRequest
from maskdial.masked.tasks.embed import EmbedRequest, SimilarityRequest, SparseEmbedRequest
from maskdial.masked.tasks.embed_all import EmbedAllRequest
from maskdial.masked.tasks.embed_chunks import ChunkEmbedRequest
from maskdial.masked.tasks.embed_hybrid import HybridEmbedRequest, HybridVectors
from maskdial.masked.tasks.extract import ExtractRequest
from maskdial.masked.tasks.fill_mask import MASK_ALIASES, FillMaskRequest
from maskdial.masked.tasks.question_answering import Answer, QuestionAnsweringRequest
from maskdial.masked.tasks.redact import Redaction, RedactRequest
from maskdial.masked.tasks.rerank import Rank, RerankRequest
from maskdial.masked.tasks.task import TaskRequest
from maskdial.masked.tasks.token_classify import TokenClassifyRequest
from maskdial.masked.tasks.zero_shot import ZeroShotRequest
from maskdial.registry.served import ServedModel

BodyT = TypeVar("BodyT", bound=MaskedBody)

Claim = Callable[[Mapping[str, Any], ServedModel], bool]
"""Whether a body that was sent to `/models/NAME` is for this task, and not for the model's main
one.
"""


def _never(_: Mapping[str, Any], __: ServedModel) -> bool:
    return False


def _first_if_single(body: MaskedBody, answers: Sequence[object]) -> object:
    """A list of texts gets the list of their answers, one text its answer."""
    return answers if body.batch else answers[0]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRoute(Generic[BodyT]):
    """A task of the masked family on the wire.

    Attributes:
        kind: the neutral request.
        body: the body that becomes one.
        reply: the type of the reply, for the documentation.
        description: of the route, for the documentation.
        render: from a body and the task's answer to what is sent as JSON.
        claims: see `Claim`.
        aliases: other paths of the route, as other servers have them.
    """

    kind: type[TaskRequest[Any]]
    body: type[BodyT]
    reply: Any
    description: str
    render: Callable[[BodyT, Any], object] = _first_if_single
    claims: Claim = _never
    aliases: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.kind.task

    @property
    def head(self) -> TaskName:
        """The task in the manifests of the models that may serve it."""
        return self.kind.head

    def serves(self, manifest: Manifest) -> bool:
        """Whether a model can do the task."""
        return self.kind.serves(manifest)

    def routes(self) -> Sequence[TaskRoute]:
        """`POST /NAME`, and the aliases."""

        return [
            task_route(
                path,
                self.answer,
                self.body,
                self.reply,
                tags=["masked"],
                name=self.name,
                description=self.description,
                include_in_schema=path not in self.aliases,
            )
            for path in (f"/{self.name}", *self.aliases)
        ]

    async def answer(self, call: Call[BodyT]) -> Response:
        """Answers a body of the task."""
        answer = await self.content(call)
        return json_reply(answer.content, headers=timing_headers(answer.timings))

    async def content(self, call: Call[BodyT]) -> Timed[object]:
        """The answer to a body of the task, as it is sent."""
        model = await call.masked(task_of(self.kind))
        answer = await call.answer(call.body.request(), model)
        return Timed(self.render(call.body, answer.content), answer.timings)


def _render_fillings(body: FillMaskBody, answers: list[list[Any]]) -> object:
    """The fillings of a text's only mask are not nested once more; whole texts are not at all."""
    if body.joint:
        return _first_if_single(body, answers)
    texts = [masks[0] if len(masks) == 1 else masks for masks in answers]
    return _first_if_single(body, texts)


def _render_redactions(body: RedactBody, redactions: list[Redaction]) -> object:
    """What was replaced is only there if it was wanted."""
    texts = [
        {
            "text": each.text,
            "replacements": [
                {name: value for name, value in asdict(one).items() if value is not None}
                for one in each.replacements
            ],
        }
        for each in redactions
    ]
    return _first_if_single(body, texts)


def _render_answers(body: QuestionAnsweringBody, answers: list[list[Answer]]) -> object:
    single = body.parameters is None or (body.parameters.top_k or 1) == 1
    return _first_if_single(body, [each[0] if single else each for each in answers])


def _render_token_vectors(body: EmbedAllBody, texts: list[NDArray[np.float32]]) -> object:
    vectors = [each.tolist() for each in texts]
    muvera = body.request().muvera
    return vectors if muvera is None else {"muvera": asdict(muvera), "vectors": vectors}


def _render_ranks(body: RerankBody, ranks: list[Rank]) -> object:
    if body.texts is None or not body.return_text:
        return ranks
    return [
        {"index": rank.index, "score": rank.score, "text": body.texts[rank.index]} for rank in ranks
    ]


def _render_kinds(body: HybridEmbedBody, answers: list[HybridVectors]) -> object:
    texts = []
    for vectors in answers:
        kinds: replies.HybridVector = {}
        if vectors.dense is not None:
            kinds["dense"] = vectors.dense.tolist()
        if vectors.sparse is not None:
            kinds["sparse"] = vectors.sparse
        if vectors.multi_vector is not None:
            kinds["multi_vector"] = vectors.multi_vector.tolist()
        texts.append(kinds)
    return _first_if_single(body, texts)


def _has_mask(content: Mapping[str, Any], model: ServedModel) -> bool:
    """Of a model that is served under both masks, texts with masks in them are to be filled."""
    inputs = content.get("inputs")
    texts = inputs if isinstance(inputs, list) else [inputs]
    marks = (*MASK_ALIASES, model.tokenizer.mask_token or MASK_ALIASES[0])
    return any(mark in text for text in texts if isinstance(text, str) for mark in marks)


def _has_labels(content: Mapping[str, Any], _: ServedModel) -> bool:
    parameters = content.get("parameters")
    return isinstance(parameters, dict) and "candidate_labels" in parameters


CLASSIFY = MaskedRoute(
    ClassifyRequest,
    ClassifyBody,
    replies.ClassifyReply,
    "Scores a text, or a pair of texts, for each label of a classifier.",
    # One text is nested as well: transformers' clients take the first element.
    lambda _, answers: answers,
)

TASKS: tuple[MaskedRoute[Any], ...] = (
    MaskedRoute(
        FillMaskRequest,
        FillMaskBody,
        replies.FillMaskReply,
        "Fills the masks of a text: for each mask, the best tokens with their probabilities; with "
        "joint, all masks together, pass by pass.",
        _render_fillings,
        claims=_has_mask,
    ),
    CLASSIFY,
    MaskedRoute(
        TokenClassifyRequest,
        TokenClassifyBody,
        replies.TokenClassifyReply,
        "Tags the tokens of a text, and merges them into entities; or finds entities of the "
        "labels in the request, with a GLiNER model.",
    ),
    MaskedRoute(
        RedactRequest,
        RedactBody,
        replies.RedactReply,
        "Puts something else in the place of a text's entities.",
        _render_redactions,
    ),
    MaskedRoute(
        ExtractRequest,
        ExtractBody,
        replies.ExtractReply,
        "Finds what a schema names in a text: entities, records, relations and labels, with a "
        "GLiNER2 model.",
        lambda body, texts: _first_if_single(body, [render(body, found) for found in texts]),
    ),
    MaskedRoute(
        QuestionAnsweringRequest,
        QuestionAnsweringBody,
        replies.QuestionAnsweringReply,
        "Answers a question with spans of its context.",
        _render_answers,
    ),
    MaskedRoute(
        EmbedRequest,
        EmbedBody,
        replies.EmbedReply,
        "Turns a text into a vector, or several texts into one each.",
        lambda body, vectors: body.form.write(vectors),
    ),
    MaskedRoute(
        SparseEmbedRequest,
        SparseEmbedBody,
        replies.SparseEmbedReply,
        "Weighs the vocabulary for a text (SPLADE), or for several texts each: the weights that "
        "are not 0.",
        lambda _, vectors: vectors,
        aliases=("/embed_sparse",),
    ),
    MaskedRoute(
        EmbedAllRequest,
        EmbedAllBody,
        replies.EmbedAllReply,
        "Turns each token of a text into a vector (ColBERT), or of several texts each.",
        _render_token_vectors,
        aliases=("/embed_all",),
    ),
    MaskedRoute(
        ChunkEmbedRequest,
        ChunkEmbedBody,
        replies.ChunkEmbedReply,
        "Turns chunks of a text into a vector each, the mean of their tokens' vectors, after one "
        "pass over the whole text (late chunking).",
        lambda _, vectors: vectors.tolist(),
        claims=lambda content, _: "chunks" in content,
    ),
    MaskedRoute(
        HybridEmbedRequest,
        HybridEmbedBody,
        replies.HybridEmbedReply,
        "Turns a text into a dense vector, sparse weights and a vector for each token (BGE-M3), or "
        "those that are wanted, in one pass; or several texts each.",
        _render_kinds,
    ),
    MaskedRoute(
        ZeroShotRequest,
        ZeroShotClassifyBody,
        replies.ZeroShotReply,
        "Scores a text for each of the labels, or choices, in the request.",
        claims=_has_labels,
    ),
    MaskedRoute(
        RerankRequest,
        RerankBody,
        replies.RerankReply,
        "Orders texts by how well they answer a query, with their scores.",
        _render_ranks,
        claims=lambda content, _: "query" in content,
    ),
    MaskedRoute(
        SimilarityRequest,
        SimilarityBody,
        replies.SimilarityReply,
        "Compares a sentence with others: the cosine similarities of their embeddings.",
        lambda _, cosines: cosines.tolist(),
        claims=lambda content, _: isinstance(content.get("inputs"), dict),
    ),
)


async def score(call: Call[ScoreBody]) -> Response:
    """Scores a text by how likely a model finds it, token by token: the log-likelihood of a causal
    model, the pseudo-log-likelihood of a masked one.
    """
    model = await call.model(SCORE)
    answer = await scoring.score(call.body.request(), model, call.server.config, call.deadline)
    return json_reply(answer.content, headers=timing_headers(answer.timings))


ROUTES = (
    *(route for task in TASKS for route in task.routes()),
    task_route("/score", score, ScoreBody, replies.ScoreReply, tags=["masked", "causal"]),
)
