"""``python -m training MODEL --corpus DIR --out DIR``.

The shipped `hybrid` was trained by ``--minutes 109 --vocabulary 12000 --bf16 --compile`` on a
processor (two threads in the first half hour, then one), and then on one H100 by ``--diffusion
--start BUNDLE --minutes 3.3 --bf16 --batch-tokens 16384``. The others, on one thread each: ``masked
--minutes 42 --width 192 --bf16 --compile``, ``sentiment --minutes 12 --bf16`` with teachers of
another kind, and ``sentiment --minutes 40 --width 192 --start`` with the exported result of that.
With glibc, ``MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000
MALLOC_TOP_PAD_=268435456`` in the environment made steps on a processor markedly faster: it keeps
glibc from returning memory to the system after every step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from training.recipes import (
    train_causal,
    train_hybrid,
    train_masked,
    train_personal,
    train_sentiment,
)
from training.settings import Settings, Shape
from training.study import run_study
from training.unmasking import compare

RECIPES = {
    "masked": train_masked,
    "sentiment": train_sentiment,
    "personal": train_personal,
    "causal": train_causal,
    "hybrid": train_hybrid,
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training",
        description="Train the starter models and write Hugging Face checkpoints. `sentiment` "
        "starts from the `masked` checkpoint in --out; `study` trains decoders of several sizes "
        "for the card of `hybrid`; `unmasking` trains nothing and prints how well the hybrids in "
        "--start and --out fill gaps and write texts in several passes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "model", choices=[*RECIPES, "all", "study", "unmasking"], help="what to train or measure"
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the training texts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument(
        "--minutes",
        type=float,
        default=35.0,
        help="time budget per model; the learning rate schedule stretches with it",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="tokens of a decoder's batch",
    )
    parser.add_argument("--resume", action="store_true", help="continue from a checkpoint in --out")
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="bfloat16 matrix products in training: 1.5 times as fast on processors that support "
        "them, slower on others",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the layers first: takes a minute for each length of texts, needs a C++ "
        "compiler and saves a sixth of each step",
    )
    shape = Shape()
    parser.add_argument("--width", type=int, default=shape.width, help="hidden width")
    parser.add_argument("--layers", type=int, default=shape.layers, help="number of layers")
    parser.add_argument("--vocabulary", type=int, default=shape.vocabulary, help="vocabulary size")
    parser.add_argument(
        "--start",
        type=Path,
        metavar="BUNDLE",
        help="an exported bundle of this shape that `hybrid` or `sentiment` starts from; "
        "`sentiment` otherwise starts from `masked`",
    )
    parser.add_argument(
        "--diffusion",
        action="store_true",
        help="train `hybrid` with shares of hidden tokens from 0 to 1, for text by unmasking",
    )
    parser.add_argument(
        "--cloze", type=Path, help="JSON list of fill-in sentences to score on the cards"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.model == "unmasking" and options.start is None:
        parser.error("unmasking needs --start, the bundle to compare with")
    torch.set_num_threads(options.threads)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(
        corpus=options.corpus,
        out=options.out,
        minutes=options.minutes,
        device=torch.device(device),
        seed=options.seed,
        threads=options.threads,
        batch_tokens=options.batch_tokens,
        resume=options.resume,
        bf16=options.bf16,
        compile=options.compile,
        shape=Shape(options.width, options.layers, options.vocabulary),
        start=options.start,
        diffusion=options.diffusion,
        cloze=options.cloze,
    )
    if options.model == "study":
        print(f"the study is in {run_study(settings)}")
        return
    if options.model == "unmasking":
        print(compare(settings))
        return
    for model in RECIPES if options.model == "all" else (options.model,):
        print(f"{model} is in {RECIPES[model](settings)}")


if __name__ == "__main__":
    main()
