"""Setup: where the models are, and how they run; and what a runner is."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadtests.compare.work import Family, Work

BUNDLE = "bundle"
MAX_BATCH = 16
MAX_CONTEXT = 1152
"""Room for the longest prompt of the work and the tokens after it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a child process is told.

    Attributes:
        folder: holds the models, from one run to the next.
        family: which model.
        variant: the entrant's own, such as a quantisation.
        makes: what it makes of the checkpoint once: ``bundle``, a name of its own, or nothing.
        precision: of our bundle.
        exporter: `exporter_digest` when the run began.
        threads: of one pass.
        seed: draws weights, prompts and texts.
    """

    folder: str
    family: Family
    variant: str
    makes: str
    precision: str
    exporter: str
    threads: int
    seed: int

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / f"{self.family}-{self.seed}"

    @property
    def bundle(self) -> Path:
        """Its name changes with the exporter, so that an old bundle is not measured."""
        return self.cached(f"bundle-{self.precision}-{self.exporter}")

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
