"""``maskdial export``: arguments, progress and exit code."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from maskdial.errors import MaskdialError
from maskdial.models.bundle import Manifest, read_manifests
from maskdial_export.export import MASKS, PRECISIONS, TASKS, TOLERANCE, export
from maskdial_export.quality import MAX_LOSS, Gate

__all__ = ["add_arguments", "export", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial export``."""
    parser.add_argument("source", help="a checkpoint folder, or a Hugging Face Hub id")
    parser.add_argument("dest", type=Path, help="the bundle to make; it must not exist yet")
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="auto",
        help="what the model is to do; auto reads it from config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--mask",
        choices=MASKS,
        help="what the model reads texts under; full lets causal models fill masks that were "
        "trained with masked next-token prediction as well, both does so beside generation, from "
        "the same weights (default: what the architecture is made for)",
    )
    parser.add_argument(
        "--precision",
        default="fp32",
        metavar=f"{{{','.join(PRECISIONS)}}}",
        help="how weights are stored and multiplied; int8 is about twice as fast as fp32 on "
        "processors with VNNI, int4 the smallest; fp16 is for CUDA, and so is int4-fp16, with a "
        "quarter of the weights' bytes to read for each token (default: %(default)s)",
    )
    _add_gate_arguments(parser)
    parser.add_argument("--revision", help="a branch, tag or commit, where the source is a Hub id")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read weights from .bin files too, if there are no .safetensors; only for files that "
        "you trust",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="the largest difference allowed between logits of torch's and of ONNX Runtime's; it "
        "grows in proportion where logits exceed 10 (default: %(default)s)",
    )


def _add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-loss",
        type=_loss,
        default=MAX_LOSS,
        metavar="LOSS",
        help="how much of fp32's answers a lower precision may lose: 0.01 is one changed decision "
        "in a hundred, or for causal models a perplexity 1%% higher; beyond it nothing is "
        "exported; inf refuses nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--quality-text",
        type=Path,
        metavar="FILE",
        help="a text that is like those to be served, UTF-8, to measure the loss on (default: a "
        "page of mixed English)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep the layers in fp32 (of int4-fp16: in fp16) whose names in the checkpoint match, "
        "as with '*.down_proj'; may be given several times",
    )
    parser.add_argument(
        "--keep-worst",
        type=_count,
        metavar="{auto,N}",
        help="keep the N layers that lose most, too, or as few of them as --max-loss needs, at "
        "most an eighth (default: auto)",
    )
    parser.add_argument(
        "--no-calibrate",
        dest="calibrate",
        action="store_false",
        help="find a scale for each row of int8's activations as the model runs, also where the "
        "quality text shows that one scale fits all",
    )
    parser.add_argument(
        "--reduce-range",
        action="store_true",
        help="give int8's weights 7 bits, which every processor adds up exactly; without it, the "
        "server needs one with VNNI (or an ARM one)",
    )


def _loss(text: str) -> float:
    loss = float(text)
    if not loss >= 0:
        raise argparse.ArgumentTypeError(f"{text} is no loss; say 0 or more, or inf")
    return loss


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text} is neither auto nor a number of layers")
    return count


def run(args: argparse.Namespace) -> int:
    """Exports; 0 when the bundle is there, 1 after one sentence on why it is not."""
    console = Console(stderr=True)
    try:
        export(
            args.source,
            args.dest,
            task=args.task,
            mask=args.mask,
            precision=args.precision,
            gate=Gate(
                text=args.quality_text,
                max_loss=args.max_loss,
                keep=tuple(args.keep),
                keep_worst=args.keep_worst,
                calibrate=args.calibrate,
                reduce_range=args.reduce_range,
            ),
            revision=args.revision,
            allow_pickle=args.allow_pickle,
            tolerance=args.tolerance,
            console=console,
        )
    except MaskdialError as error:
        print(f"maskdial export: {error.message}", file=sys.stderr)
        return 1
    for manifest in read_manifests(args.dest.name, args.dest):
        console.print(f"{args.dest}: {_summary(manifest)}", highlight=False, soft_wrap=True)
    return 0


def _summary(manifest: Manifest) -> str:
    differences = manifest.parity.model_dump(exclude={"tolerance"}, exclude_none=True).values()
    close = f"within {max(differences):.1e} of torch"
    if manifest.quality is not None:
        close += f" in fp32, of which {manifest.precision} loses {manifest.quality.loss:.2%}"
    invariant = "batch invariant" if manifest.batch_invariant else "not batch invariant"
    return f"{manifest.architecture} for {manifest.task}, {close}, {invariant}"
