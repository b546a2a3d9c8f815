"""``python -m loadtests decisions``: questions about a text, against transformers' pipeline.

Checkpoints with random weights in real shapes: a decision model on an encoder, whose head answers,
and a language model that answers by letters, or by a head as well (``--head``). The state comes
first in a prompt, so a causal model reads it once. Everything runs on one thread of this process,
in turns, and is timed by its processor time, which other load on the machine changes little.
"""

import argparse
import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from rich.console import Console

from loadtests import add_number, add_seed, add_work, names_of
from loadtests.checkpoints import (
    build_checkpoint,
    causal_words,
    export_random,
    masked_words,
    new_folder,
)
from loadtests.compare.setup import MODERN_BERT, Shape, find
from loadtests.engines import load_served
from loadtests.measurement import (
    Section,
    add_report_options,
    load_averages,
    machine,
    median_ratio,
    take_turns,
    write_reports,
)
from maskdial.ask.decide import decide
from maskdial.causal.decide import likelihoods
from maskdial.causal.model import CausalModel
from maskdial.config import Config, load_config
from maskdial.engine.questions import Option, Question
from maskdial.engine.timing import Deadline
from maskdial.registry.served import ServedModel

if TYPE_CHECKING:
    from transformers.pipelines import DecisionPipeline

DESCRIPTION = (
    "Measure questions about a text: our engine, and transformers' DecisionPipeline in float32, "
    "each on one thread and by its processor time. Models have random weights in real shapes."
)
_SHAPES = ("bert-base", "135m", "modernbert-base", "tiny-bert", "tiny-llama")
_OPTIONS, _OPTION_WORDS, _QUESTION_WORDS = 4, 2, 16
_OURS, _THEIRS, _TEXTS = "ours", "pipeline", "ours, by the options' texts"
_ASKED = "{% for option in question.options %} {{ question.labels[loop.index0] }}{{ option }}"
_TEMPLATES = {
    "masked": "[CLS] {{ state }} [SEP] {{ question.instructions }}"
    + _ASKED
    + "{% endfor %} [SEP]<|mark|>",
    "causal": "{{ state }}\n{{ question.instructions }}" + _ASKED + "\n{% endfor %}\n<|mark|>",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One number of questions, and what answered them; ratios are medians of the rounds'.

    Attributes:
        asked: which of the two.
        questions: in a request.
        requests_per_second: the inverse of the mean time.
        p50_ms, p99_ms: of a request's time.
        times_ours: the time, relative to ours in the same round.
        rounds: how many there were.
    """

    asked: str
    questions: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    times_ours: float
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--shapes",
        type=names_of(_SHAPES),
        default=_SHAPES[:2],
        metavar="A,B",
        help=f"shapes to measure, of {','.join(_SHAPES)} (default: {','.join(_SHAPES[:2])})",
    )
    parser.add_argument("--precision", default="int8", help="of our bundles (default: int8)")
    parser.add_argument(
        "--questions",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(1, 4, 16),
        metavar="N,N",
        help="questions in a request (default: 1,4,16)",
    )
    parser.add_argument(
        "--head", action="store_true", help="give causal shapes a head, too, instead of letters"
    )
    add_number(parser, "--state-tokens", 128, "N", "tokens of the text")
    add_number(parser, "--seconds", 240.0, "S", "measuring time")
    add_work(parser, "runs/decisions", "where checkpoints and bundles stay")
    add_seed(parser)
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0."""
    import torch

    torch.set_num_threads(1)
    console = Console()
    sections = []
    for name in args.shapes:
        shape = MODERN_BERT if name == MODERN_BERT.name else find((name,))[0]
        section = asyncio.run(_measure(shape, args))
        section.show(console)
        sections.append(section)
    console.print(f"{machine()}, load {load_averages()}")
    write_reports(args, sections, {"precision": args.precision, "seed": args.seed})
    return 0


async def _measure(shape: Shape, args: argparse.Namespace) -> Section:
    has_head = args.head or shape.family == "masked"
    folder = args.work / f"{shape.name}-{args.seed}{'-head' * args.head}"
    bundle = folder.with_name(f"{folder.name}-{args.precision}")
    _build(shape, folder, args.seed, head=has_head)
    if not bundle.exists():
        export_random(folder, bundle, args.precision)
    settings: dict[str, Any] = {"threads": 1}
    asked = _Asked(load_served(shape.name, bundle, settings), load_config(settings))
    theirs = _pipeline(folder, head=has_head)
    words = causal_words() if shape.family == "causal" else masked_words()
    draw = partial(_request, random.Random(args.seed), words, args.state_tokens)
    ways: dict[str, Callable[[str, list[Question]], Awaitable[object]]] = {_OURS: asked.decide}
    if not has_head:
        ways[_TEXTS] = asked.by_texts
    ways[_THEIRS] = partial(_ask_pipeline, theirs)
    await asked.model.engine.warm_up()
    writer = _child_seconds()
    turns = {
        (name, number): partial(_turn, way, draw, number)
        for number in args.questions
        for name, way in ways.items()
    }
    samples = await take_turns(turns, args.seconds / len(args.shapes))
    writer = (_child_seconds() - writer) / max(asked.num_written, 1)
    return Section(
        shape.name,
        f"questions with {_OPTIONS} options about a text of {args.state_tokens} tokens, "
        f"{args.precision}, by processor time of one thread",
        min(map(len, samples.values())),
        tuple(
            summarize(name, number, each, samples[_OURS, number])
            for (name, number), each in samples.items()
        ),
        ("times ours is above 1 where we are faster",),
        (
            f"the process that writes our prompts takes another {1000 * writer:.1f} ms for a "
            "request, to the nearest 10 ms of all of them",
        ),
    )


def summarize(asked: str, questions: int, seconds: Sequence[float], ours: Sequence[float]) -> Row:
    """Summarizes the rounds of one way to ask; seconds per request."""
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    rate = len(seconds) / math.fsum(seconds)
    ratio = median_ratio(seconds, ours)
    return Row(asked, questions, rate, 1000 * p50, 1000 * p99, ratio, len(seconds))


class _Asked:
    """A served model, and the number of requests whose prompts a template wrote."""

    def __init__(self, model: ServedModel, config: Config) -> None:
        self.model: Any = model
        self.num_written = 0
        self._config = config

    async def decide(self, state: str, questions: list[Question]) -> None:
        """As `/v1/systemone` and `/v1/decisions` do."""
        self.num_written += 1
        deadline = Deadline(None, self._config)
        await decide(state, questions, self.model, self._config, deadline)

    async def by_texts(self, state: str, questions: list[Question]) -> None:
        """As they do for a model without labels for the options."""
        assert isinstance(self.model, CausalModel), "masked models have no other way"
        deadline = Deadline(None, self._config)
        await likelihoods(state, questions, self.model, self._config, deadline)


async def _ask_pipeline(
    pipeline: "DecisionPipeline", state: str, questions: list[Question]
) -> None:
    pipeline(
        {
            "state": state,
            "questions": {
                each.name: {
                    "type": "choice",
                    "instructions": each.instructions,
                    "criteria": dict.fromkeys(option.text for option in each.options),
                }
                for each in questions
            },
        }
    )


async def _turn(
    way: Callable[[str, list[Question]], Awaitable[object]],
    draw: Callable[[int], tuple[str, list[Question]]],
    number: int,
) -> float:
    """The processor time of a request with a new text, in seconds."""
    state, questions = draw(number)
    started = time.process_time()
    await way(state, questions)
    return time.process_time() - started


def _request(
    rng: random.Random, words: list[str], state_tokens: int, number: int
) -> tuple[str, list[Question]]:
    def text(count: int) -> str:
        return " ".join(each.strip() for each in rng.choices(words, k=count))

    questions = []
    for index in range(number):
        options = [Option(f" {text(_OPTION_WORDS)} {place}") for place in range(_OPTIONS)]
        questions.append(Question("choice", text(_QUESTION_WORDS), tuple(options), name=str(index)))
    return text(state_tokens), questions


def _child_seconds() -> float:
    """The processor time of this process's children so far."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return math.fsum(each.user + each.system for each in times)


def _build(shape: Shape, folder: Path, seed: int, *, head: bool) -> None:
    """Writes the checkpoint unless it exists."""
    if folder.exists():
        return
    import torch
    import transformers
    from transformers.decision import DecisionConfig

    decision = DecisionConfig(chat_template=_TEMPLATES[shape.family])
    plain = folder.with_name(f"{folder.name}-plain")
    build_checkpoint(plain, shape.config, seed, weights=shape.family == "causal")
    with new_folder(folder) as path:
        transformers.AutoTokenizer.from_pretrained(plain).save_pretrained(path)
        if not head:
            transformers.AutoModelForCausalLM.from_pretrained(plain).save_pretrained(path)
            decision.save_pretrained(path)
            return
        torch.manual_seed(seed)
        config = transformers.JevConfig(
            text_config=shape.config, hidden_size=shape.config.hidden_size
        )
        model = transformers.JevForDecision(config)
        model.decision_config = decision
        model.save_pretrained(path)


def _pipeline(folder: Path, *, head: bool) -> "DecisionPipeline":
    import transformers
    from transformers.pipelines import DecisionPipeline

    kind = "AutoModelForDecision" if head else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    return DecisionPipeline(
        model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder)
    )
