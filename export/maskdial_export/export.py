"""Export: a checkpoint becomes a bundle, phase by phase, or nothing is left behind."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, get_args

from rich.console import Console

from maskdial.models.bundle import Manifest, Task
from maskdial_export.errors import ExportError
from maskdial_export.join import join
from maskdial_export.phase import finding, phase
from maskdial_export.quality import Gate
from maskdial_export.sample import read_sample
from maskdial_export.source import Source, find
from maskdial_export.writing import Precision, Settings, write_bundle

TASKS = ("auto", *get_args(Task))
PRECISIONS = get_args(Precision)
MaskChoice = Literal["full", "causal", "both"]
MASKS = get_args(MaskChoice)
TOLERANCE = 1e-4


def export(
    source: str,
    dest: Path,
    *,
    task: str = "auto",
    mask: MaskChoice | None = None,
    precision: str = "fp32",
    gate: Gate | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    tolerance: float = TOLERANCE,
    console: Console | None = None,
) -> Manifest:
    """Exports a local checkpoint folder or a Hub id to the new folder ``dest``.

    ``mask`` is what the model reads texts under; None for what its architecture is made for.
    "both" makes two graphs over one file of weights, and the manifest is the causal one's.
    ``gate`` says what a precision other than fp32 may cost. ``tolerance`` is the largest difference
    allowed between a logit of torch's and of ONNX Runtime's, in fp32; where logits exceed 10 it
    grows in proportion, as float32's rounding does.

    Raises:
        ExportError: it cannot be exported; nothing is left at ``dest``.
    """
    console = console or Console(quiet=True)
    if precision not in PRECISIONS:
        raise ExportError(f"there is no precision {precision}; there are {', '.join(PRECISIONS)}")
    if precision == "fp32" and gate not in (None, Gate()):
        raise ExportError(
            "--keep, --keep-worst, --max-loss and the like are for lower precisions; say "
            "--precision int8, int4 or int4-fp16 with them"
        )
    gate = gate or Gate()
    if precision == "fp16" and (gate.keep or gate.keep_worst):
        raise ExportError(
            "--keep and --keep-worst are for int8, int4 and int4-fp16; fp16 is for all layers"
        )
    sample = read_sample(gate.text)
    _check_vacant(dest)
    with phase(console, "Finding the checkpoint"):
        found = find(source, task, revision=revision, allow_pickle=allow_pickle)
    try:
        with _new_folder(dest) as folder:
            to = cast(Precision, precision)
            settings = Settings(to, gate, sample, tolerance, console)
            if mask == "both":
                manifest = _write_both(found, folder, settings)
            else:
                under = found if mask is None else found.under(mask)
                manifest = write_bundle(under, folder, settings).manifest
    except OSError as error:
        reason = error.strerror or str(error)
        raise ExportError(f"the bundle cannot be written to {dest}: {reason}") from error
    return manifest


def _check_vacant(dest: Path) -> None:
    if dest.is_dir() and not any(dest.iterdir()):
        return
    if dest.exists() or dest.is_symlink():
        raise ExportError(f"{dest} exists already; remove it or choose another name")


@contextmanager
def _new_folder(dest: Path) -> Iterator[Path]:
    """A folder that takes the name ``dest`` when all went well, and else is gone."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", suffix=".partial", dir=dest.parent))
    try:
        folder.chmod(0o755)
        yield folder
        _check_vacant(dest)
        os.replace(folder, dest)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_both(found: Source, folder: Path, settings: Settings) -> Manifest:
    """One model under both masks; layers that one graph needs in fp32 are so in the other too."""
    sources = found.under("causal"), found.under("full")
    with tempfile.TemporaryDirectory(prefix=".masks.", dir=folder) as parts:
        while True:
            round_ = Path(tempfile.mkdtemp(dir=parts))
            causal_folder, full_folder = round_ / "causal", round_ / "full"
            causal_folder.mkdir(parents=True)
            full_folder.mkdir()
            finding(settings.console, "under the causal mask:")
            causal = write_bundle(sources[0], causal_folder, settings)
            finding(settings.console, "under the full mask:")
            settings = settings.keeping(causal.kept)
            full = write_bundle(sources[1], full_folder, settings, causal.packs)
            if set(full.kept) == set(causal.kept):
                break
            settings = settings.keeping(full.kept)
            shutil.rmtree(round_)
        with phase(settings.console, "Sharing the weights"):
            join(causal_folder, full_folder, (causal.manifest, full.manifest), folder)
    return causal.manifest
