"""Texts of hundreds of thousands of tokens are read in a thread, and no step holds the GIL for
long: what makes Python objects or copies of a token at a time sees a window of the text at most.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from maskdial.bundle.manifest import Embedding, PairTemplate, SpecialTokens, Tokenization
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.masked.tasks.classify import ClassifyRequest
from maskdial.masked.tasks.embed import EmbedRequest, SimilarityRequest
from maskdial.masked.tasks.question_answering import QAPair, QuestionAnsweringRequest
from maskdial.masked.tasks.rerank import RerankRequest
from maskdial.masked.tasks.task import TaskRequest, Truncation
from maskdial.masked.tasks.token_classify import TokenClassifyRequest
from maskdial.masked.tasks.zero_shot import ZeroShotRequest

LONG = "a " * 100_000
CUT = Truncation(enabled=True)
LENGTH = 64
SLOW = ("offsets", "word_ids", "__getstate__", "__setstate__", "sequence_ids")
"""Fields of an encoding that take 0.1 to 1 s for 2 MB of text."""


class Watched:
    """An encoding that notes the length of what slow calls see."""

    lengths: list[tuple[str, int]]

    def __init__(self, encoding: tokenizers.Encoding, lengths: list[tuple[str, int]]) -> None:
        self.encoding = encoding
        self.lengths = lengths
        self.lengths.append(("encode", len(encoding)))

    def __len__(self) -> int:
        return len(self.encoding)

    def __getstate__(self) -> Any:
        self.lengths.append(("__getstate__", len(self)))
        return self.encoding.__getstate__()

    def __getattr__(self, name: str) -> Any:
        if name in SLOW:
            self.lengths.append((name, len(self)))
        found = getattr(self.encoding, name)
        if name == "overflowing":
            return [Watched(each, self.lengths) for each in found]
        return found


class WatchedBackend:
    """A tokenizer whose encodings are watched."""

    def __init__(self, backend: tokenizers.Tokenizer, lengths: list[tuple[str, int]]) -> None:
        self._backend = backend
        self._lengths = lengths

    def encode(self, *arguments: Any, **options: Any) -> Watched:
        return Watched(self._backend.encode(*arguments, **options), self._lengths)

    def encode_batch(self, *arguments: Any, **options: Any) -> list[Watched]:
        found = self._backend.encode_batch(*arguments, **options)
        return [Watched(each, self._lengths) for each in found]

    def post_process(self, *encodings: Any) -> Watched:
        given = [getattr(each, "encoding", each) for each in encodings]
        self._lengths += [
            ("post_process", len(each) + sum(map(len, each.overflowing)))
            for each in given
            if each is not None
        ]
        return Watched(self._backend.post_process(*given), self._lengths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def watched_model(lengths: list[tuple[str, int]], **changes: Any) -> Any:
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, ":": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = Tokenizer(backend, SpecialTokens())
    for name in ("_backend", "_unprocessed"):
        setattr(tokenizer, name, WatchedBackend(getattr(tokenizer, name), lengths))
    manifest = SimpleNamespace(
        **{
            "task": "classify",
            "max_length": LENGTH,
            "vocab_size": 5,
            "media_tokens": (),
            "labels": ("ENTAILMENT",),
            "tokenization": Tokenization(),
            "pair_template": None,
            "entities": None,
            "extraction": None,
            "embedding": Embedding(dimension=4, pooling="mean", normalized=True),
            **changes,
        }
    )
    return SimpleNamespace(name="m", tokenizer=tokenizer, manifest=manifest, max_queue=10_000)


TEMPLATE = PairTemplate(before="a:", between=" a:", after=" a")
REQUESTS: Sequence[tuple[TaskRequest[Any], dict[str, Any]]] = [
    (ClassifyRequest([(LONG, None), (LONG, LONG)], truncation=CUT), {}),
    (EmbedRequest([LONG], truncation=CUT), {}),
    (SimilarityRequest(LONG, [LONG], truncation=CUT), {}),
    (RerankRequest(LONG, [LONG], truncation=CUT), {}),
    (RerankRequest("a", [LONG, "a"], truncation=CUT), {"pair_template": TEMPLATE}),
    (QuestionAnsweringRequest([QAPair("a", LONG)]), {}),
    (QuestionAnsweringRequest([QAPair(LONG, "a")], max_question_len=9), {}),
    (TokenClassifyRequest([LONG]), {}),
    (ZeroShotRequest([LONG], ["a", "a a"], truncation=CUT), {}),
]


@pytest.mark.parametrize(
    ("request_", "changes"), REQUESTS, ids=[type(each).__name__ for each, _ in REQUESTS]
)
def test_slow_calls_see_a_window_at_most(
    request_: TaskRequest[Any], changes: dict[str, Any]
) -> None:
    lengths: list[tuple[str, int]] = []
    model = watched_model(lengths, **changes)
    request_.check(model)
    assert all(len(each.input_ids) <= LENGTH for each in request_.read(model).inputs)
    assert max(length for name, length in lengths if name == "encode") >= 100_000
    assert [each for each in lengths if each[0] != "encode" and each[1] > LENGTH] == []


@pytest.mark.parametrize(
    ("request_", "changes"), REQUESTS, ids=[type(each).__name__ for each, _ in REQUESTS]
)
def test_long_texts_are_read_in_a_thread(
    request_: TaskRequest[Any], changes: dict[str, Any]
) -> None:
    assert request_.read_seconds > 0.002
