"""Card: a checkpoint's figures, as JSON for programs and as a model card for people."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import nn

Figure = str | int | float | list[str] | list[float]

SOURCES = """\
- Public-domain books in the editions of Standard Ebooks (CC0 1.0) and, in the same form, by
  HendrikBK; only works free in countries with terms of life plus 70 years too. They keep the
  views and the language of their time, and the model may repeat them."""
WORDNET = """\
- Open English WordNet (CC BY 4.0), derived from Princeton WordNet (WordNet License):
  a sample of its definitions and example sentences."""
POLARITY = """\
- Sentence polarity dataset v1.0 by Bo Pang and Lillian Lee (ACL 2005), CC BY 4.0 as distributed
  with NLTK; sentences that stand in the test or validation part of SST-2 were removed."""

EMBEDDINGS = """\
- Its teachers read sentence embeddings of all-MiniLM-L6-v2 (Apache 2.0)."""

PERSONAL = """\
- Made-up names, addresses and numbers in sentences written for it; no data of a person."""
INTENTS = """\
- Banking77 (Casanueva et al. 2020), CC BY 4.0: questions of customers, as texts without personal
  data."""


@dataclass(frozen=True, slots=True)
class Card:
    """A model card: what the model is, what it was trained on, and what was measured."""

    title: str
    summary: str
    task: str
    sources: list[str]
    limits: str
    figures: Mapping[str, Figure]
    study: str = ""
    """How the size was chosen, in Markdown."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """Unedited output of the model, by prompt."""

    def write(self, folder: Path) -> None:
        """Writes `README.md`, and `training.json` with the same figures and samples."""
        record = asdict(self)
        measured = {**record["figures"], "samples": record["samples"]}
        (folder / "training.json").write_text(json.dumps(measured, indent=2) + "\n", "utf-8")
        (folder / "README.md").write_text(self.text(), "utf-8")

    def text(self) -> str:
        """The card in Markdown, with the Hugging Face hub's front matter."""
        rows = "\n".join(
            f"| {name.replace('_', ' ')} | {_shown(value)} |"
            for name, value in self.figures.items()
        )
        samples = "\n\n".join(
            f"`{prompt}`\n\n> " + sample.replace("\n", "\n> ")
            for prompt, sample in self.samples.items()
        )
        shown_samples = f"## Unedited samples\n\n{samples}\n\n" if samples else ""
        shown_study = f"## Choice of size\n\n{self.study}\n\n" if self.study else ""
        return (
            f"---\nlanguage: en\npipeline_tag: {self.task}\nlibrary_name: transformers\n---\n\n"
            f"# {self.title}\n\n{self.summary}\n\n"
            f"## Measured\n\n| figure | value |\n| --- | --- |\n{rows}\n\n"
            f"{shown_study}{shown_samples}## Trained on\n\n" + "\n".join(self.sources) + "\n\n"
            f"## Limits\n\n{self.limits}\n"
        )


def model_figures(model: nn.Module, folder: Path) -> dict[str, Figure]:
    """The number of parameters (a tied matrix counts once) and the file sizes in bytes."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_bytes": (folder / "model.safetensors").stat().st_size,
        "tokenizer_bytes": (folder / "tokenizer.json").stat().st_size,
    }


def machine(device: str, threads: int) -> str:
    """One line on the machine of a run."""
    return f"{device}, {threads} thread(s) of {os.cpu_count()} CPU cores, {platform.machine()}"


def _shown(value: Figure) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
