"""``maskdial export``: its arguments, progress output and exit code.

Only a run needs torch, so that the help is there without it.
"""

import argparse
import math
import signal
import sys
from pathlib import Path

from rich.console import Console

from maskdial.bundle.bundle import read_manifests
from maskdial.bundle.manifest import Manifest, loss_in_words
from maskdial.errors import MaskdialError, printable
from maskdial.extras import how_to_install
from maskdial_export.choices import LONGEST, MASKS, MAX_LOSS, PRECISIONS, TASKS, TOLERANCE
from maskdial_export.errors import ExportError
from maskdial_export.phase import say
from maskdial_export.quantize.gate import Gate
from maskdial_export.route import export_any_way, load_tracer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial export`` to a parser."""
    parser.add_argument(
        "source",
        help="a checkpoint folder, a GGUF file, a Hugging Face Hub id, or ID:Q4_K_M, a GGUF file "
        "there",
    )
    parser.add_argument(
        "dest", type=Path, help="folder to write the bundle to; must be new or empty"
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="auto",
        help="task to export for; auto takes it from config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--mask",
        choices=MASKS,
        help="attention mask: full lets a causal model fill masks, if it was also trained with "
        "masked next-token prediction; both exports it for generating and for filling masks, with "
        "shared weights (default: the mask of the architecture)",
    )
    parser.add_argument(
        "--precision",
        metavar=f"{{{','.join(PRECISIONS)}}}",
        help="number format of weights and activations: int8 is about twice as fast as fp32 on "
        "CPUs with VNNI, int4 is the smallest; for CUDA, fp16, or int4-fp16, which reads about a "
        "quarter of fp16's weight bytes per token (default: int8, or fp32 where the quality gate "
        "refuses that; for a GGUF file of integers int4 or int8, which keeps them)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="trace the model with torch, as is done of families that the direct path does not "
        "know: takes minutes, and compares with torch; most options of quality need it (default: "
        "write the graph from the file, where the family is known)",
    )
    _add_gate_arguments(parser)
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="merge a PEFT adapter (LoRA...) into the weights; needs the extra adapter",
    )
    parser.add_argument(
        "--draft",
        metavar="EAGLE",
        help="export an EAGLE-3 head (a folder or a Hub id) with its model, which drafts by it; "
        "needs --precision int8 or int4",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load weights from .bin files if there are no .safetensors; a .bin file is a pickle "
        "and can run code, so use this only for checkpoints you trust",
    )
    parser.add_argument(
        "--no-strict",
        dest="strict",
        action="store_false",
        help="export even if weights of the model are missing, which then are random, or weights "
        "of the checkpoint are not used; nothing is then known of how it compares with the "
        "original",
    )
    parser.add_argument(
        "--ignore-remote-code",
        action="store_true",
        help="export with transformers' own class a checkpoint that brings code of its own "
        "(auto_map), which is never run",
    )
    parser.add_argument(
        "--max-length",
        type=_length,
        metavar="N",
        help="longest text in tokens, of causal models prompt and reply together (default: what "
        f"the model has positions for, at most {LONGEST:,} if they are rotary)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="largest allowed difference between the logits of torch and ONNX Runtime in fp32; "
        "scales with the logits where they exceed 10 (default: %(default)s)",
    )


def _add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-loss",
        type=_loss,
        metavar="LOSS",
        help="largest quality loss allowed for a precision below fp32: 0.01 is one changed "
        "decision in a hundred or, for causal models, a divergence of 0.01 nats; inf accepts any "
        f"loss (default: {MAX_LOSS}, and 0.05 where only what the integers of a GGUF file multiply "
        "is rounded)",
    )
    parser.add_argument(
        "--quality-text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text that the tokenizer must know and to measure the loss on, best similar to "
        "what the model will be served (default: a page of mixed English; for causal "
        "models code and dialogue as well)",
    )
    parser.add_argument(
        "--calibration-text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text by which scales and 4-bit integers are chosen (default: another page of "
        "English, or the quality text if there is one)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep in fp32 (int4-fp16: fp16) the layers whose names in the checkpoint match, for "
        "example '*.down_proj'; repeatable",
    )
    parser.add_argument(
        "--int8",
        action="append",
        default=[],
        metavar="PATTERN",
        help="int4: store as int8 the layers whose names in the checkpoint match, for example "
        "lm_head; repeatable",
    )
    parser.add_argument(
        "--keep-worst",
        type=_count,
        metavar="{auto,N}",
        help="also keep the N most sensitive layers, with int4 as int8; auto keeps as few as "
        "--max-loss needs, at most an eighth of all layers, with int4 a quarter (default: auto)",
    )
    parser.add_argument(
        "--no-calibrate",
        dest="calibrate",
        action="store_false",
        help="int4: round each weight to the nearest integer, instead of by what the layers read",
    )
    parser.add_argument(
        "--tune",
        type=_minutes,
        metavar="MINUTES",
        help="int4 and int4-fp16: train the scales of the weights for so long, until the model "
        "answers most like fp32 on the calibration text, best one of 50,000 characters or more; "
        "takes six times the memory of the fp32 weights",
    )
    parser.add_argument(
        "--reduce-range",
        action="store_true",
        help="int8 with one scale for a row (masked models): use 7 bits for weights, so that "
        "products are exact on any CPU; with 8 bits the server needs its kernels, or a CPU with "
        "VNNI or an ARM one (default: 7 bits if the exporting CPU needs them)",
    )


def _loss(text: str) -> float:
    loss = float(text)
    if not loss >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a loss: expected 0 or more, or inf")
    return loss


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time: expected minutes, more than 0")
    return minutes


def _length(text: str) -> int:
    length = int(text)
    if length < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a length: expected 1 or more")
    return length


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of layers: expected auto, or 0 or more"
        )
    return count


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 on success, or 1 after printing one sentence on the cause.

    SIGTERM ends the process with 143, after the unfinished bundle is removed.
    """
    console = Console(file=sys.stderr)  # torch's own output to stderr is caught while it traces
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        export_any_way(
            args.source,
            args.dest,
            trace=args.trace,
            task=args.task,
            mask=args.mask,
            precision=args.precision,
            gate=Gate(
                text=args.quality_text,
                calibration_text=args.calibration_text,
                max_loss=args.max_loss,
                keep=tuple(args.keep),
                int8=tuple(args.int8),
                keep_worst=args.keep_worst,
                calibrate=args.calibrate,
                tune=args.tune,
                reduce_range=args.reduce_range,
            ),
            revision=args.revision,
            allow_pickle=args.allow_pickle,
            strict=args.strict,
            ignore_remote_code=args.ignore_remote_code,
            max_length=args.max_length,
            adapter=args.adapter,
            draft=args.draft,
            tolerance=args.tolerance,
            console=console,
        )
    except MaskdialError as error:
        print(f"maskdial export: {printable(error.message)}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    for manifest in read_manifests(args.dest.name, args.dest):
        say(console, f"{args.dest}: {_summary(manifest)}")
    return 0


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial export-adapter`` to a parser."""
    parser.add_argument(
        "adapter", type=Path, help="folder of a PEFT adapter of the kinds LoRA and rsLoRA"
    )
    parser.add_argument(
        "dest", type=Path, help="folder to write the adapter bundle to; must be new or empty"
    )
    parser.add_argument(
        "--base",
        type=Path,
        required=True,
        metavar="BUNDLE",
        help="bundle of the model that the adapter was trained on, of fp32, int8 or int4",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="SOURCE",
        help="checkpoint folder or Hub id that the bundle was exported from, to compare with PEFT "
        "(default: the one that the adapter names)",
    )


def run_adapter(args: argparse.Namespace) -> int:
    """Runs ``maskdial export-adapter``; as `run`."""
    console = Console(file=sys.stderr)
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        load_tracer()
        try:
            from maskdial_export.adapting import export_adapter
        except ImportError as error:
            raise ExportError(
                f"export-adapter needs peft ({error}): {how_to_install('adapter')}"
            ) from error
        manifest = export_adapter(
            args.adapter, args.dest, args.base, checkpoint=args.checkpoint, console=console
        )
    except MaskdialError as error:
        print(f"maskdial export-adapter: {printable(error.message)}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    head = ""
    if manifest.head is not None:
        head = f"{manifest.head.task} with {len(manifest.head.labels)} labels, "
    say(
        console,
        f"{args.dest}: {head}rank {manifest.rank} in {manifest.num_layers} layers of "
        f"{manifest.base}, {manifest.dtype}, within {manifest.parity.difference:.1e} of PEFT",
    )
    return 0


def _exit(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _summary(manifest: Manifest) -> str:
    unmeasured = {"reference", "tolerance", "doubt"}
    figures = manifest.parity.model_dump(exclude=unmeasured, exclude_none=True)
    than = {"numpy": "NumPy", "onnxruntime": "the graph by itself"}.get(
        manifest.parity.reference, "torch"
    )
    close = f"within {max(figures.values()):.1e} of {than}"
    if manifest.parity.doubt is not None:
        close = f"not compared with the original model: {manifest.parity.doubt}"
    if manifest.quality is not None:
        loss = loss_in_words(manifest.quality.loss, manifest.quality.figures)
        close += f" in fp32, {manifest.precision} {loss}"
    elif manifest.precision != "fp32" and manifest.parity.reference != "onnxruntime":
        close += f" before activations are rounded, as {manifest.precision} does"
    invariant = "batch-invariant" if manifest.batch_invariant else "not batch-invariant"
    return f"{manifest.architecture} for {manifest.task}, {close}, {invariant}"
