"""What a front end reads of a request by itself, and what it leaves to the owner."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.config import Config
from maskdial.errors import MaskdialError
from maskdial.fronts.inputs import Asked, results_of, results_reply
from maskdial.fronts.reader import Reader, UnreadError, asking_by
from maskdial.masked.model import MaskedModel
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.registry.catalog import STARTER_FOLDER

_MODELS = {"sentiment": STARTER_FOLDER / "sentiment"}


def _scope(path: str = "/classify", **changes: Any) -> dict[str, Any]:
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    return scope | {"query_string": b""} | changes


def _answer(body: object) -> tuple[list[Asked], Any]:
    """What is asked of the owner for a body, and the reply to results of it."""
    asked: list[Asked] = []

    async def ask(what: Asked) -> list[MaskedResult]:
        asked.append(what)
        logits = np.array([0.0, np.log(3)], np.float32)
        return [MaskedResult(logits, 0.5, 0.25, 1, 8) for _ in what.inputs]

    async def run() -> Any:
        reader = Reader(Config(models=_MODELS))
        await reader.open()
        return await reader.answer(_scope(), json.dumps(body).encode(), ask)

    return asked, asyncio.run(run())


def test_texts_become_token_ids_and_results_the_reply() -> None:
    bundle = load_bundle("sentiment", _MODELS["sentiment"])
    tokenizer = Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens)
    (asked,), reply = _answer({"inputs": ["good film", "dull"]})
    expected = [tuple(tokenizer.encode(text).ids) for text in ("good film", "dull")]
    assert [each.input_ids for each in asked.inputs] == expected
    assert (asked.model, asked.sha256) == ("sentiment", bundle.sha256)
    for scores in json.loads(reply.body):
        assert [each["label"] for each in scores] == ["POSITIVE", "NEGATIVE"]
        assert scores[0]["score"] == pytest.approx(0.75)
    assert reply.headers["x-queue-time"] == "500.000"
    assert reply.headers["x-compute-tokens"] == str(sum(map(len, expected)))


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": 5},
        {"inputs": "good", "model": "nobody"},
        {"inputs": "film " * 3000},
        {"inputs": "good", "timeout": 5},
    ],
)
def test_what_fails_or_has_a_timeout_is_the_owners(body: object) -> None:
    with pytest.raises((MaskdialError, UnreadError)):
        _answer(body)


def test_a_further_pass_is_the_owners() -> None:
    """It would be another request there."""

    async def ask(what: Asked) -> list[MaskedResult]:
        return []

    async def run() -> None:
        reader = Reader(Config(models=_MODELS))
        await reader.open()
        (model,) = reader.models
        assert isinstance(model, MaskedModel)
        with asking_by(ask):
            await model.engine.submit_many([MaskedInput((1,))])
            with pytest.raises(UnreadError):
                await model.engine.submit_many([MaskedInput((1,))])

    asyncio.run(run())


def test_requests_that_others_have_to_see_are_not_tried() -> None:
    reader = asyncio.run(_made())
    assert reader.reads(_scope(), b"{}")
    assert not reader.reads(_scope("/generate"), b"{}")
    assert not reader.reads(_scope(method="GET"), b"")
    assert not reader.reads(_scope(), bytes(100_000))
    assert not reader.reads(_scope(root_path="/a"), b"{}")
    assert not reader.reads(_scope(headers=[(b"x-maskdial-receipt", b"1")]), b"{}")
    assert Reader.is_for(Config(models=_MODELS))
    assert not Reader.is_for(Config(log_format="json-texts"))


def test_models_that_come_later_may_be_meant_as_well(tmp_path: Path) -> None:
    """By requests that name none, which only the owner can see to be ambiguous then."""
    assert not Reader.is_for(Config(models=_MODELS, model_dir=tmp_path))
    pulls = Config(models=_MODELS, allow_pull=("a/*",), admin_key="secret-secret-1")
    assert not Reader.is_for(pulls)


async def _made() -> Reader:
    return Reader(Config(models=_MODELS))


def test_inputs_and_results_arrive_as_they_were_sent() -> None:
    inputs = [MaskedInput((1, 2, 3), (1, 2), (0, 0, 1), 1, 1), MaskedInput((7,))]
    asked = Asked("m", "ab", 0.5, inputs)
    assert Asked.unpacked(asked.packed()) == asked
    rng = np.random.default_rng(0)
    results = [
        MaskedResult(rng.random(shape, np.float32), 0.1, 0.2, 3, 4, cached)
        for shape, cached in (((2, 3), True), ((5,), False))
    ]
    found = results_of(bytes(results_reply(results).body))
    for one, other in zip(found, results, strict=True):
        assert one.logits.dtype == np.float32
        np.testing.assert_array_equal(one.logits, other.logits)
        assert (one.queue_seconds, one.batch_tokens, one.is_cached) == (
            other.queue_seconds,
            other.batch_tokens,
            other.is_cached,
        )
