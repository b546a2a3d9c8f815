"""The run of ``python -m loadtests agreement``."""

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from loadtests.agreement.compare import NUM_TOP, Row, Text, Top, agree, compare, section_of
from loadtests.agreement.prompts import PROMPTS
from loadtests.agreement.reference import Reference
from loadtests.errors import LoadTestError
from loadtests.reports import load_averages, write_json
from maskdial.causal.events import TokenEvent
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence as Generated
from maskdial.config import load_config
from maskdial.errors import MaskdialError
from maskdial.metrics import Metrics
from maskdial.models.loading import load_model
from maskdial.models.registry import CausalModel
from maskdial_export.export import export
from maskdial_export.quality import Gate


def run_agreement(args: argparse.Namespace) -> int:
    """Compares, prints and writes the report; see `add_agreement_parser` for the arguments.

    Returns 0; 1 if texts part at more than a near tie or the report could not be made, 130 after
    Ctrl-C.
    """
    facts = {
        "load": load_averages(),
        "checkpoint": str(args.checkpoint),
        "precision": args.precision,
        "provider": args.provider,
        "num_tokens": args.num_tokens,
    }
    try:
        rows = _compare(args)
        section = section_of(rows, args.num_tokens)
        section.show(Console())
        if args.output is not None:
            write_json(args.output, [section], facts)
    except (LoadTestError, MaskdialError, OSError) as error:
        print(f"loadtests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtests: interrupted, no report", file=sys.stderr)
        return 130
    return 0 if agree(rows) else 1


def _compare(args: argparse.Namespace) -> list[Row]:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        bundle: Path | None = args.bundle
        if bundle is None:
            bundle = Path(folder) / "bundle"
            gate = None if args.precision == "fp32" else Gate(max_loss=math.inf)
            export(
                str(args.checkpoint),
                bundle,
                mask="causal",
                precision=args.precision,
                gate=gate,
                console=console,
            )
        model = _load(bundle, args)
        try:
            with console.status("comparing"):
                return _measure(model, args)
        finally:
            model.stop()


def _load(bundle: Path, args: argparse.Namespace) -> CausalModel:
    config = load_config({"provider": args.provider})
    model = load_model(bundle.resolve().name, bundle, config, Metrics(()))
    manifest = model.bundle.manifest
    if not isinstance(model, CausalModel):
        model.stop()
        raise LoadTestError(f"{bundle} holds a {manifest.family} model; this compares causal ones")
    if manifest.precision != args.precision:
        model.stop()
        raise LoadTestError(f"{bundle} is {manifest.precision}, and {args.precision} was asked for")
    return model


def _measure(model: CausalModel, args: argparse.Namespace) -> list[Row]:
    prompts = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    longest = max(map(len, prompts)) + args.num_tokens
    if longest > model.max_length:
        raise LoadTestError(
            f"{longest} tokens of prompt and text do not fit into a context of {model.max_length}"
        )
    reference = Reference(args.checkpoint, args.precision, args.provider)
    written = asyncio.run(_write_together(model, prompts, args.num_tokens))
    texts = [Text(*pair) for pair in zip(prompts, written, strict=True)]
    return compare(texts, reference, partial(_top, model), partial(_shown, model))


async def _write_together(
    model: CausalModel, prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """All texts at once, as the engine batches them."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    streams = await asyncio.gather(*(_write(model, prompt, params) for prompt in prompts))
    return [[event.token_id for event in events] for events in streams]


async def _write(model: CausalModel, prompt: list[int], params: SamplingParams) -> list[TokenEvent]:
    return [event async for event in model.engine.stream(Generated(prompt, params))]


def _top(model: CausalModel, text: Text, step: int) -> Top:
    """The engine's likeliest tokens after ``step`` of those it wrote; it writes them once more.

    None where it writes others now, because the text has other company.
    """
    params = SamplingParams(max_new_tokens=step + 1, ignore_eos=True, top_n_tokens=NUM_TOP)
    events = asyncio.run(_write(model, text.prompt, params))
    same = [event.token_id for event in events[:step]] == text.written[:step]
    return events[step].top if same else ()


def _shown(model: CausalModel, token_id: int) -> str:
    return repr(model.tokenizer.id_to_token(token_id))
