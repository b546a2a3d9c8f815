"""``maskdial export``: arguments, progress and exit code."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from maskdial.errors import MaskdialError
from maskdial_export.export import PRECISIONS, TASKS, TOLERANCE, export

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
        "--precision",
        default="fp32",
        metavar=f"{{{','.join(PRECISIONS)}}}",
        help="how numbers are stored (default: %(default)s)",
    )
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


def run(args: argparse.Namespace) -> int:
    """Exports; 0 when the bundle is there, 1 after one sentence on why it is not."""
    console = Console(stderr=True)
    try:
        manifest = export(
            args.source,
            args.dest,
            task=args.task,
            precision=args.precision,
            revision=args.revision,
            allow_pickle=args.allow_pickle,
            tolerance=args.tolerance,
            console=console,
        )
    except MaskdialError as error:
        print(f"maskdial export: {error.message}", file=sys.stderr)
        return 1
    differences = manifest.parity.model_dump(exclude={"tolerance"}, exclude_none=True).values()
    console.print(
        f"{args.dest}: {manifest.architecture} for {manifest.task}, within {max(differences):.1e} "
        f"of torch, {'' if manifest.batch_invariant else 'not '}batch invariant",
        highlight=False,
        soft_wrap=True,
    )
    return 0
