"""``python -m loadtests agreement``: greedy texts of the engine and of torch, token by token."""

import argparse
import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from loadtests import LoadTestError, count
from loadtests.engines import load_served, open_stream
from loadtests.measurement import Section, load_averages, write_json
from loadtests.texts import PROMPTS
from maskdial.causal.events import TokenEvent
from maskdial.models.served import CausalModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DESCRIPTION = (
    "Continue 20 prompts with the server's engine, in this process, and with transformers' "
    "generate at the same precision, and compare the greedy tokens. Exit with 1 if texts diverge "
    "at more than a near tie. MASKDIAL_* variables configure what no flag here does."
)
_NUM_TOP = 10
_NUM_MEASURED = 100
_SAME, _TIE, _OTHER = "same", "near tie", "other"

_RULE = (
    "a divergence is a near tie if, in the next finer precision, the two tokens are no further "
    "apart than twice what torch's own rounding moves one of the 100 likeliest tokens there; what "
    "the engine computes has no part in the rule"
)

Top = Sequence[tuple[int, float]]
"""Token ids and their log-probabilities."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="causal checkpoint for torch"
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="PATH",
        help="bundle of that checkpoint at --precision (default: export one first)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp16", "fp32"),
        default="fp16",
        help="precision on both sides (default: %(default)s)",
    )
    parser.add_argument(
        "--provider",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device on both sides (default: %(default)s)",
    )
    parser.add_argument(
        "--num-tokens",
        type=count,
        default=64,
        metavar="N",
        help="new tokens per text (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")


def main(args: argparse.Namespace) -> int:
    """Compares, prints and writes the report; returns 1 if texts do not `agree`."""
    facts = {
        "load": load_averages(),
        "checkpoint": str(args.checkpoint),
        "precision": args.precision,
        "provider": args.provider,
        "num_tokens": args.num_tokens,
    }
    rows = _compare(args)
    section = section_of(rows, args.num_tokens)
    section.show(Console())
    if args.output is not None:
        write_json(args.output, [section], facts)
    return 0 if agree(rows) else 1


def _compare(args: argparse.Namespace) -> list["Row"]:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        bundle: Path | None = args.bundle
        if bundle is None:
            bundle = Path(folder) / "bundle"
            _export(args.checkpoint, bundle, args.precision, console)
        model = _load(bundle, args)
        try:
            with console.status("comparing"):
                return _measure(model, args)
        finally:
            model.stop()


def _export(checkpoint: Path, bundle: Path, precision: str, console: Console) -> None:
    from maskdial_export.export import export
    from maskdial_export.quality import Gate

    gate = None if precision == "fp32" else Gate(max_loss=math.inf)
    export(str(checkpoint), bundle, mask="causal", precision=precision, gate=gate, console=console)


def _load(bundle: Path, args: argparse.Namespace) -> CausalModel:
    model = load_served(bundle.resolve().name, bundle, {"provider": args.provider})
    manifest = model.bundle.manifest
    if not isinstance(model, CausalModel):
        model.stop()
        raise LoadTestError(f"{bundle} is a {manifest.family} bundle; this needs a causal one")
    if manifest.precision != args.precision:
        model.stop()
        raise LoadTestError(
            f"{bundle} is {manifest.precision}, but --precision is {args.precision}"
        )
    return model


def _measure(model: CausalModel, args: argparse.Namespace) -> list["Row"]:
    prompts = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    longest = max(map(len, prompts)) + args.num_tokens
    if longest > model.max_length:
        raise LoadTestError(
            f"prompt and text take {longest} tokens and exceed the context of {model.max_length}; "
            "lower --num-tokens"
        )
    reference = TorchReference(args.checkpoint, args.precision, args.provider)
    written = asyncio.run(_write_together(model, prompts, args.num_tokens))
    texts = [Text(*pair) for pair in zip(prompts, written, strict=True)]
    return compare(texts, reference, partial(_top, model), partial(_shown, model))


async def _write_together(
    model: CausalModel, prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """Generates all texts at once, so that the engine batches them."""
    streams = await asyncio.gather(*(_write(model, prompt, num_tokens) for prompt in prompts))
    return [[event.token_id for event in events] for events in streams]


async def _write(
    model: CausalModel, prompt: list[int], num_tokens: int, **sampling: Any
) -> list[TokenEvent]:
    stream = open_stream(model.engine, prompt, num_tokens, **sampling)
    return [event async for event in stream]


def _top(model: CausalModel, text: "Text", step: int) -> Top:
    """The engine's likeliest tokens after the first ``step`` ones, which it generates again.

    Empty if it now generates others, because the batch is different.
    """
    events = asyncio.run(_write(model, text.prompt, step + 1, top_n_tokens=_NUM_TOP))
    same = [event.token_id for event in events[:step]] == text.written[:step]
    return events[step].top if same else ()


def _shown(model: CausalModel, token_id: int) -> str:
    return repr(model.tokenizer.id_to_token(token_id))


@dataclass(frozen=True, slots=True)
class Text:
    """The token ids of a prompt, and those that the engine generated after it."""

    prompt: list[int]
    written: list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt.

    Attributes:
        number: of the prompt, from 1.
        same_tokens: new tokens before the first that differs, or all of them.
        engine: the first token that differs, from the engine.
        torch: the first token that differs, from torch.
        gap: torch's log-probability of its own token minus that of the engine's token.
        finer_gap: the same in the finer precision; negative if that prefers the engine's token.
        rounding: largest difference between torch's two precisions in a log-probability there.
        engine_off: largest difference of the engine's log-probabilities there from those in the
            finer precision; None if the engine does not reproduce its text.
        verdict: "same", "near tie" or "other".
    """

    number: int
    same_tokens: int
    engine: str = ""
    torch: str = ""
    gap: float | None = None
    finer_gap: float | None = None
    rounding: float | None = None
    engine_off: float | None = None
    verdict: str = _SAME


class Reference(Protocol):
    """What the engine's texts are compared with; `TorchReference` outside tests."""

    def write(self, prompt: Sequence[int], num_tokens: int) -> list[int]: ...
    def logprobs(self, text: Sequence[int]) -> NDArray[np.float64]: ...
    def finer_logprobs(self, text: Sequence[int]) -> NDArray[np.float64]: ...


def compare(
    texts: Sequence[Text],
    reference: Reference,
    top: Callable[[Text, int], Top],
    decode: Callable[[int], str],
) -> list[Row]:
    """Continues the same prompts with the reference; one row each.

    ``top`` returns the engine's likeliest tokens after a number of those it generated, or none if
    it cannot tell; ``decode`` turns a token id into text.
    """
    rows = []
    for number, text in enumerate(texts, 1):
        expected = reference.write(text.prompt, len(text.written))
        pairs = list(zip(text.written, expected, strict=True))
        step = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if step is None:
            rows.append(Row(number, len(pairs)))
            continue
        ours, theirs = pairs[step]
        prefix = [*text.prompt, *text.written[:step]]
        rounded, exact = reference.logprobs(prefix), reference.finer_logprobs(prefix)
        best = np.argsort(-exact)[:_NUM_MEASURED]
        rounding = float(np.abs(rounded - exact)[best].max())
        gap = float(exact[theirs] - exact[ours])
        row = Row(
            number,
            step,
            engine=decode(ours),
            torch=decode(theirs),
            gap=float(rounded[theirs] - rounded[ours]),
            finer_gap=gap,
            rounding=rounding,
            engine_off=max(
                (abs(logprob - exact[i]) for i, logprob in top(text, step)), default=None
            ),
            verdict=_TIE if abs(gap) <= 2 * rounding else _OTHER,
        )
        rows.append(row)
    return rows


def section_of(rows: Sequence[Row], num_tokens: int) -> Section:
    """The report."""
    same = [row for row in rows if row.verdict == _SAME]
    ties = [row for row in rows if row.verdict == _TIE]
    findings = [
        f"{len(same)} of {len(rows)} texts have the same {num_tokens} tokens, {len(ties)} diverge "
        f"at a near tie and {len(rows) - len(same) - len(ties)} elsewhere",
        f"{sum(row.same_tokens for row in rows):,} tokens agree before the texts diverge",
    ]
    question = "greedy texts of the engine and of torch"
    return Section("agreement", question, 1, tuple(rows), tuple(findings), (_RULE,))


def agree(rows: Sequence[Row]) -> bool:
    """Whether no text diverges at more than a near tie."""
    return all(row.verdict != _OTHER for row in rows)


class TorchReference:
    """A checkpoint in torch at a bundle's precision and at the next finer one.

    Log-probabilities are natural, float64 (vocab_size,). torch is imported here, not above: it
    takes seconds, and ``--help`` does without.
    """

    def __init__(self, checkpoint: Path, precision: str, provider: str) -> None:
        """Loads both models; ``precision`` is fp16 or fp32, ``provider`` cpu or cuda.

        Raises:
            LoadTestError: torch has no such device, or the checkpoint cannot be loaded.
        """
        import torch

        if provider == "cuda" and not torch.cuda.is_available():
            raise LoadTestError("torch finds no GPU; use --provider cpu")
        self._device = provider
        dtypes = {"fp16": (torch.float16, torch.float32), "fp32": (torch.float32, torch.float64)}
        self._model, self._finer = (self._load(checkpoint, dtype) for dtype in dtypes[precision])

    def _load(self, checkpoint: Path, dtype: Any) -> "PreTrainedModel":
        from transformers import AutoModelForCausalLM, GenerationConfig

        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=dtype, local_files_only=True
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise LoadTestError(f"{checkpoint} is not a causal checkpoint: {reason}") from error
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        return model.eval().to(self._device)

    def write(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Generates greedily, past any end of text."""
        import torch

        ids = torch.tensor([prompt], device=self._device)
        with torch.no_grad():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens
            )
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def logprobs(self, text: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities of the next token at the bundle's precision."""
        return self._logprobs(self._model, text)

    def finer_logprobs(self, text: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities of the next token at the finer precision."""
        return self._logprobs(self._finer, text)

    def _logprobs(self, model: "PreTrainedModel", text: Sequence[int]) -> NDArray[np.float64]:
        import torch

        with torch.no_grad():
            logits = model(torch.tensor([text], device=self._device)).logits[0, -1]
        logprobs: NDArray[np.float64] = logits.double().log_softmax(0).cpu().numpy()
        return logprobs
