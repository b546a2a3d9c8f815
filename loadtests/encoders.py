"""``python -m loadtests encoders``: vectors and classes of texts, against transformers in torch.

A checkpoint with random weights in the shape of ModernBERT-base or DeBERTa-v3-base, as a model of
embeddings and as a classifier. A request has one text, or several of mixed lengths, which the
library pads to the longest. Everything runs on one thread of this process, in turns, and is timed
by its processor time, which other load on the machine changes little.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtests import add_number, add_seed, add_work
from loadtests.checkpoints import build_checkpoint, export_random, masked_words, new_folder
from loadtests.compare.setup import DEBERTA, MODERN_BERT, TINY, Shape
from loadtests.engines import load_served
from loadtests.measurement import (
    Section,
    add_report_options,
    load_averages,
    machine,
    median,
    median_ratio,
    take_turns,
    write_reports,
)
from maskdial.config import load_config
from maskdial.engine.timing import Deadline
from maskdial.masked import run
from maskdial.masked.tasks.classify import ClassifyRequest
from maskdial.masked.tasks.embed import EmbedRequest
from maskdial.masked.tasks.task import TaskRequest

DESCRIPTION = (
    "Measure vectors and classes of texts: our engine, and transformers in float32, each on one "
    "thread and by its processor time. The model has random weights in a real shape."
)
_SHAPES = {shape.name: shape for shape in (MODERN_BERT, DEBERTA, TINY["masked"])}
_HEADS = {"embed": "AutoModel", "classify": "AutoModelForSequenceClassification"}
_PRECISIONS = ("int8", "fp32")
_LABELS = 4
_SHORTEST = 8
_THEIRS = "transformers"


@dataclass(frozen=True, slots=True)
class Row:
    """A task, and what computed it; ``times_int8`` is the median of the rounds' ratios."""

    task: str
    texts: int
    computed: str
    ms: float
    times_int8: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--shape", choices=_SHAPES, default=MODERN_BERT.name, help="(default: %(default)s)"
    )
    add_number(parser, "--texts", 32, "N", "texts of the larger request")
    add_number(parser, "--longest", 128, "N", "words of the longest text; the shortest has 8")
    add_number(parser, "--seconds", 240.0, "S", "measuring time")
    add_work(parser, "runs/encoders", "where checkpoints and bundles stay")
    add_seed(parser)
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0."""
    import torch

    torch.set_num_threads(1)
    console = Console()
    section = asyncio.run(_measure(_SHAPES[args.shape], args))
    section.show(console)
    console.print(f"{machine()}, load {load_averages()}")
    write_reports(args, [section], {"seed": args.seed})
    return 0


async def _measure(shape: Shape, args: argparse.Namespace) -> Section:
    rng = random.Random(args.seed)
    turns: dict[tuple[str, int, str], Callable[[], Awaitable[float]]] = {}
    for task in _HEADS:
        checkpoint = _build(shape, args.work / f"{shape.name}-{task}-{args.seed}", task, args.seed)
        ways = {}
        for precision in _PRECISIONS:
            bundle = checkpoint.with_name(f"{checkpoint.name}-{precision}")
            if not bundle.exists():
                export_random(checkpoint, bundle, precision, task)
            ways[precision] = await _ours(f"{task}-{precision}", bundle, task)
        ways[_THEIRS] = _theirs(checkpoint, task)
        for number in (1, args.texts):
            draw = partial(_texts, rng, number, args.longest)
            turns |= {(task, number, name): partial(_turn, way, draw) for name, way in ways.items()}
    samples = await take_turns(turns, args.seconds)
    return Section(
        shape.name,
        f"texts of {_SHORTEST} to {args.longest} words, by processor time of one thread",
        min(map(len, samples.values())),
        tuple(
            Row(task, number, name, 1000 * median(each), median_ratio(each, int8))
            for (task, number, name), each in samples.items()
            for int8 in (samples[task, number, _PRECISIONS[0]],)
        ),
        ("times int8 is above 1 where our int8 is faster",),
    )


def _build(shape: Shape, folder: Path, task: str, seed: int) -> Path:
    """Writes the checkpoint of a task unless it exists, and returns its folder."""
    if folder.exists():
        return folder
    import torch
    import transformers

    plain = build_checkpoint(folder.with_name(f"{folder.name}-plain"), shape.config, weights=False)
    torch.manual_seed(seed)
    with new_folder(folder) as path:
        transformers.AutoTokenizer.from_pretrained(plain).save_pretrained(path)
        config = shape.config
        config.num_labels = _LABELS
        getattr(transformers, _HEADS[task]).from_config(config).save_pretrained(path)
    return folder


async def _ours(name: str, bundle: Path, task: str) -> Callable[[Sequence[str]], Awaitable[object]]:
    settings: dict[str, Any] = {"threads": 1}
    model: Any = load_served(name, bundle, settings)
    config = load_config(settings)
    await model.engine.warm_up()
    requests: dict[str, Callable[[Sequence[str]], TaskRequest[Any]]] = {
        "embed": EmbedRequest,
        "classify": lambda texts: ClassifyRequest([(text, None) for text in texts]),
    }

    async def compute(texts: Sequence[str]) -> object:
        return await run.answer(requests[task](texts), model, config, Deadline(None, config))

    return compute


def _theirs(checkpoint: Path, task: str) -> Callable[[Sequence[str]], Awaitable[object]]:
    """The mean of the hidden states of each text, or the likelihoods of its classes."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = getattr(transformers, _HEADS[task]).from_pretrained(checkpoint).eval()

    async def compute(texts: Sequence[str]) -> object:
        inputs = tokenizer(list(texts), padding=True, return_tensors="pt")
        with torch.inference_mode():
            output = model(**inputs)
            if task == "classify":
                return output.logits.softmax(-1).numpy()
            mask = inputs["attention_mask"][..., None]
            return ((output[0] * mask).sum(1) / mask.sum(1)).numpy()

    return compute


async def _turn(
    way: Callable[[Sequence[str]], Awaitable[object]], draw: Callable[[], Sequence[str]]
) -> float:
    """The processor time of a request with new texts, in seconds."""
    texts = draw()
    started = time.process_time()
    await way(texts)
    return time.process_time() - started


def _texts(rng: random.Random, number: int, longest: int) -> list[str]:
    """Texts whose lengths are spread evenly; a single one has the mean of them."""
    if number == 1:
        lengths = [(_SHORTEST + longest) // 2]
    else:
        lengths = [_SHORTEST + (longest - _SHORTEST) * i // (number - 1) for i in range(number)]
        rng.shuffle(lengths)
    return [" ".join(rng.choices(masked_words(), k=length)) for length in lengths]
