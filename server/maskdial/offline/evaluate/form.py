"""A task's file: the fields of lm-evaluation-harness that are known here, and two kinds of our own.

What a file says beyond that is an error, never left out: a score that was made otherwise than the
file says is none. Its format: github.com/EleutherAI/lm-evaluation-harness, docs/task_guide.md.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field

from maskdial.errors import ConfigError, io_reason
from maskdial.offline.evaluate.filters import ExactMatch, Filter, Strict

OutputType = Literal[
    "multiple_choice",
    "loglikelihood",
    "loglikelihood_rolling",
    "generate_until",
    "classification",
    "similarity",
]
"""The last two are not the harness': the label of a text, and how alike two texts are."""

METRICS: Mapping[OutputType, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity",),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
    "classification": ("acc", "f1_macro"),
    "similarity": ("spearman", "pearson"),
}
"""Those of each kind of task."""


class Metric(ExactMatch):
    """A metric, and how texts are compared for it."""

    metric: str
    aggregation: str | None = None
    higher_is_better: bool | None = None


class Generation(Strict):
    """How texts are written."""

    until: list[str] | None = None
    max_gen_toks: Annotated[int, Field(ge=1)] = 256
    do_sample: Literal[False] = False
    temperature: Annotated[float, Field(ge=0, le=0, strict=False)] = 0.0


class Dataset(Strict):
    """Where the questions are."""

    data_files: str | dict[str, str | list[str]]


class Examples(Strict):
    """Where the examples before a question are, and which are taken."""

    sampler: Literal["default", "first_n"] = "default"
    split: str | None = None
    samples: list[dict[str, Any]] | None = None


class TaskFile(Strict):
    """The whole file."""

    task: str
    dataset_path: Literal["json"]
    dataset_kwargs: Dataset
    output_type: OutputType
    doc_to_target: str | int
    doc_to_text: str = ""
    doc_to_pair: str | None = None
    doc_to_choice: str | list[str] | None = None
    description: str = ""
    target_delimiter: str = " "
    test_split: str | None = None
    validation_split: str | None = None
    num_fewshot: Annotated[int, Field(ge=0)] = 0
    fewshot_split: str | None = None
    fewshot_config: Examples = Examples()
    fewshot_delimiter: str = "\n\n"
    filter_list: list[Filter] | None = None
    repeats: Literal[1] = 1
    metric_list: list[Metric] | None = None
    generation_kwargs: Generation = Generation()
    metadata: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "TaskFile":
        """The content of a file.

        Raises:
            ConfigError: it cannot be read or used, or says what is not known here.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {io_reason(error)}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
        try:
            file = cls.model_validate(content)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigError(
                f"{path}: {where}: {first['msg']}; docs/evaluation.md lists what is known"
            ) from error
        file._check(path)
        return file

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that are to be shown."""
        given = self.metric_list
        return METRICS[self.output_type] if given is None else tuple(m.metric for m in given)

    def _check(self, path: Path) -> None:
        known = METRICS[self.output_type]
        for metric in self.metrics:
            if metric not in known:
                listed = ", ".join(known)
                raise ConfigError(
                    f"{path}: metric {metric!r} is not one of {self.output_type}: {listed}"
                )
        if self.output_type == "multiple_choice" and self.doc_to_choice is None:
            raise ConfigError(f"{path}: multiple_choice needs doc_to_choice")
        if self.output_type == "similarity" and self.doc_to_pair is None:
            raise ConfigError(f"{path}: similarity needs doc_to_pair, the second text")
        if (
            self.output_type not in ("classification", "similarity")
            and self.doc_to_pair is not None
        ):
            raise ConfigError(f"{path}: doc_to_pair is for classification and similarity")
        if self.filter_list is not None and self.output_type != "generate_until":
            raise ConfigError(f"{path}: filter_list is for generate_until")
