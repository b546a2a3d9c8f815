"""The size study: decoders of several shapes, trained for the same time and compared in a table."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from training import hybrid
from training.data import Books, read_books
from training.pretrain import pretrain
from training.settings import Settings, Shape
from training.vocabulary import train_byte_level_bpe

STUDY_FILE = "study.json"
SHAPES = (
    Shape(width=128, layers=6),
    Shape(width=192, layers=6),
    Shape(width=256, layers=6),
    Shape(width=320, layers=6),
    Shape(width=256, layers=6, vocabulary=12000),
)


@dataclass(frozen=True, slots=True)
class Result:
    """A model of the study, and what it reached under each mask that it was trained with."""

    width: int
    layers: int
    vocabulary: int
    causal_share: float
    parameters: int
    minutes: float
    tokens_seen: int
    bits_per_byte: float | None
    masked_validation_loss: float | None
    masked_top1: float | None


def run_study(settings: Settings, shapes: Sequence[Shape] = SHAPES) -> Path:
    """Trains a hybrid of each shape, and the settings' own shape under either mask only.

    Each takes `settings.minutes`. Results are added to `<out>/study.json` one by one; models whose
    results are there are not trained again.
    """
    file = settings.out / STUDY_FILE
    books = read_books(settings.corpus)
    runs = [(shape, hybrid.CAUSAL_SHARE) for shape in shapes]
    runs += [(settings.shape, 0.0), (settings.shape, 1.0)]
    for shape, causal_share in runs:
        results = _read(file)
        done = [
            (Shape(r.width, r.layers, r.vocabulary), r.causal_share, r.minutes) for r in results
        ]
        if (shape, causal_share, settings.minutes) not in done:
            of_shape = dataclasses.replace(settings, shape=shape)
            results.append(_measure(of_shape, books, causal_share))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n", "utf-8")
    return file


def _measure(settings: Settings, books: Books, causal_share: float) -> Result:
    torch.manual_seed(settings.seed)
    shape = settings.shape
    tokenizer = train_byte_level_bpe(books.train, shape.vocabulary, hybrid.MAX_LENGTH)
    model = hybrid.build_model(tokenizer, shape).to(settings.device)
    stream = hybrid.encode_stream(tokenizer, books.train, settings.seed)
    objective = hybrid.HybridObjective(model, tokenizer, stream, causal_share)
    name = f"width {shape.width}, {shape.layers} layers, {shape.vocabulary} tokens, {causal_share}"
    plan = hybrid.plan(settings)
    if settings.device.type == "cpu":  # so that other programs do not cost a model training time
        plan = dataclasses.replace(plan, clock=time.process_time)
    record = pretrain(objective, plan, settings.out / "study", name, resume=False)
    held_out = hybrid.encode_stream(tokenizer, books.held_out, settings.seed)
    judge = hybrid.HybridObjective(model, tokenizer, held_out, causal_share)
    num_bytes = sum(len(text.encode()) + 1 for text in books.held_out)
    causal = hybrid.evaluate_causal(judge, num_bytes) if causal_share > 0.0 else {}
    masked = hybrid.evaluate_masked(judge) if causal_share < 1.0 else {}
    return Result(
        **asdict(shape),
        causal_share=causal_share,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        minutes=settings.minutes,
        tokens_seen=record.tokens,
        bits_per_byte=causal.get("bits_per_byte"),
        masked_validation_loss=masked.get("masked_validation_loss"),
        masked_top1=masked.get("masked_top1"),
    )


def _read(file: Path) -> list[Result]:
    if not file.exists():
        return []
    return [Result(**row) for row in json.loads(file.read_text(encoding="utf-8"))]


def read_study(out: Path) -> str:
    """The study in `out` as a Markdown table, or an empty string."""
    results = _read(out / STUDY_FILE)
    if not results:
        return ""
    kinds = {0.0: "full mask alone", 1.0: "causal mask alone"}
    rows = "\n".join(
        f"| {r.minutes:g} | {r.width} | {r.layers} | {r.vocabulary} "
        f"| {kinds.get(r.causal_share, 'both masks')} | {r.parameters / 1e6:.2f} M "
        f"| {r.tokens_seen / 1e6:.1f} M | {_figure(r.bits_per_byte)} "
        f"| {_figure(r.masked_validation_loss)} | {_figure(r.masked_top1)} |"
        for r in results
    )
    return (
        "Short runs, measured on held-out text:\n\n"
        "| minutes | width | layers | vocabulary | trained under | parameters | tokens seen "
        "| bits per byte | masked loss | masked top-1 |\n" + "| --- " * 10 + "|\n" + rows
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
