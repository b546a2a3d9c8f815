"""Setup: where the models are, and how they run; and what a runner is."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadtests.compare.shapes import SHAPES, Shape
from loadtests.compare.work import ROOM, Load, Provider, Room, Work

BUNDLE = "bundle"
HALF = ("fp16", "int4-fp16")
"""Precisions of our bundles that are written without what trained weights are asked."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a child process is told.

    Attributes:
        folder: holds the models, from one run to the next.
        shape: the name of the model's.
        variant: the entrant's own, such as a quantisation.
        makes: what it makes of the checkpoint once: ``bundle``, a name of its own, or nothing.
        precision: of our bundle.
        exporter: `exporter_digest` when the run began.
        threads: of one pass.
        seed: draws weights, prompts and texts.
        provider: where passes run.
        load: how much work there is at most.
    """

    folder: str
    shape: str
    variant: str
    makes: str
    precision: str
    exporter: str
    threads: int
    seed: int
    provider: Provider = "cpu"
    load: Load = "small"

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def room(self) -> Room:
        return ROOM[self.load]

    @property
    def checkpoint(self) -> Path:
        """On CUDA everyone draws the weights, and it has none."""
        name = self.shape if self.provider == "cpu" else f"{self.shape}-cuda"
        return Path(self.folder) / f"{name}-{self.seed}"

    @property
    def bundle(self) -> Path:
        """Its name changes with the exporter, so that an old bundle is not measured."""
        return self.cached(f"bundle-{self.precision}-{self.exporter}")

    def bundles(self) -> list[Path]:
        """Those that there are, of all exporters, the newest last."""
        made = Path(self.folder).glob(self.cached(f"bundle-{self.precision}-*").name)
        return sorted(made, key=lambda path: path.stat().st_mtime)

    @property
    def product(self) -> Path:
        """Where that is kept; of those that make nothing, the checkpoint, which they run."""
        if not self.makes:
            return self.checkpoint
        return self.bundle if self.makes == BUNDLE else self.cached(self.makes)

    def cached(self, name: str) -> Path:
        """Where something made from the checkpoint is kept."""
        return self.checkpoint.with_name(f"{self.checkpoint.name}-{name}")


class Runner(Protocol):
    """Something that does the work, loaded and warm."""

    def run(self, work: Work) -> float:
        """Seconds for a prefill, or on average for a step or pass."""
        ...

    def close(self) -> None:
        """Ends processes and threads of its own."""
        ...


def exporter_digest() -> str:
    """The exporter's sources as eight hexadecimal digits."""
    spec = importlib.util.find_spec("maskdial_export")
    assert spec is not None, "this project's own package"
    assert spec.origin is not None, "a package with a file"
    digest = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
