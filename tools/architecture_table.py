"""Writes ``docs/supported-models.md``: the architectures that the tests prove.

    make format

A test fails when the page is out of date.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from maskdial_export.direct import backbones, encoders, families, text_parts
from tests.export.zoo import ZOO, Specimen

PAGE = Path(__file__).resolve().parents[1] / "docs" / "supported-models.md"
_INTRODUCTION = (
    "# Model architectures\n\n"
    "Generated from `tests/export/zoo.py` by `make format`.\n\n"
    "`maskdial export` tries every architecture that transformers can load, and compares with "
    "torch. These are proven by our tests, with tiny random checkpoints: logits equal torch's in "
    "ragged batches, and each row has the same bits in every batch; for `generate` also in chunks "
    "and decode steps, and greedy decoding equals `transformers.generate`. `make test` proves "
    "those in bold, `make test-zoo` the others. For other architectures, and for these with "
    "other settings, the same comparison at export decides: see "
    "[What is checked](export.md#what-is-checked). Those that are written "
    "[directly](export.md#two-ways), without torch, are marked so; all can be traced.\n"
)
_DIRECT = frozenset[str]().union(
    *(each.architectures() for each in (backbones, encoders, families, text_parts))
)


# The zoo has none of them: it is exported in a way of its own, or no architecture of transformers.
_OTHERS = """## block-diffusion

| architecture | proven with |
|---|---|
| `DiffusionGemmaForBlockDiffusion` | the text part in fp32: passes equal torch's, and texts \
those of `generate` with the same random numbers; `make test-zoo` |

## Checkpoints of other libraries

| library | proven with, in `make test` | |
|---|---|---|
| gliner 0.2 | spans and tokens, BERT, DeBERTa-v3 and ModernBERT, an LSTM, an encoder for labels | \
[GLiNER](export.md#gliner) |
| gliner2 2.1 | the architecture `span` on BERT; `boundary` (GLiNER2.5) in `make test-zoo` | \
[GLiNER2](export.md#gliner2) |
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION]
    for task, zoo in ZOO.items():
        parts.append(f"## {task}\n\n| architecture | proven with | |\n|---|---|---|\n" + _rows(zoo))
    return "\n".join([*parts, _OTHERS])


def _rows(zoo: Mapping[str, Specimen]) -> str:
    specimens = defaultdict(list)
    for specimen in zoo.values():
        specimens[specimen.architecture].append(specimen)
    return "".join(_row(name, of) for name, of in sorted(specimens.items(), key=_by_name))


def _by_name(entry: tuple[str, list[Specimen]]) -> str:
    return entry[0].lower()


def _row(architecture: str, specimens: list[Specimen]) -> str:
    name = f"`{architecture}`"
    if any(specimen.quick for specimen in specimens):
        name = f"**{name}**"
    notes = [specimen.note for specimen in specimens if specimen.note]
    if not all(specimen.batch_invariant for specimen in specimens):
        notes.append("not batch-invariant")
    direct = " direct" if architecture in _DIRECT else ""
    return f"| {name} | {'; '.join(notes)} |{direct} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
