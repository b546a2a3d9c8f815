"""A task as lm-evaluation-harness has it in YAML: a part of its fields, and local files only.

What a file says beyond that is an error, never left out: a score that was made otherwise than the
file says is none. Its format: github.com/EleutherAI/lm-evaluation-harness, docs/task_guide.md.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jinja2
import pydantic
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field

from maskdial.errors import ConfigError, io_reason

OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]

METRICS: Mapping[OutputType, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity",),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}
"""Those of each kind of task."""

_TEMPLATES = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Metric(_Strict):
    metric: str
    aggregation: str | None = None
    higher_is_better: bool | None = None


class _Generation(_Strict):
    until: list[str] = []
    max_gen_toks: Annotated[int, Field(ge=1)] = 256
    do_sample: Literal[False] = False
    temperature: Annotated[float, Field(ge=0, le=0, strict=False)] = 0.0


class _Dataset(_Strict):
    data_files: str | dict[str, str | list[str]]


class _File(_Strict):
    task: str
    dataset_path: Literal["json"]
    dataset_kwargs: _Dataset
    output_type: OutputType
    doc_to_target: str | int
    doc_to_text: str = ""
    doc_to_choice: str | list[str] | None = None
    description: str = ""
    target_delimiter: str = " "
    test_split: str | None = None
    validation_split: str | None = None
    num_fewshot: Literal[0] = 0
    metric_list: list[_Metric] | None = None
    generation_kwargs: _Generation = _Generation()
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        context: what the model has read.
        choices: what may follow it; of ``loglikelihood`` the target, and of whole texts the text.
        target: the number of the right choice; of texts that are written, nothing.
        expected: of texts that are written: what should be.
    """

    context: str
    choices: tuple[str, ...]
    target: int
    expected: str = ""


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A task with its questions.

    Attributes:
        name: of the task.
        kind: what is done with each question.
        metrics: are to be shown.
        items: the questions.
        delimiter: stands between the context and a choice.
        until: texts that end what is written.
        max_new_tokens: of a text that is written.
    """

    name: str
    kind: OutputType
    metrics: tuple[str, ...]
    items: Sequence[Item]
    delimiter: str
    until: tuple[str, ...]
    max_new_tokens: int

    @property
    def sha256(self) -> str:
        """Of all that it asks."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def read_task(path: Path, limit: int | None = None) -> EvalTask:
    """Reads a task and its questions.

    Args:
        path: the YAML file; data files are looked up beside it.
        limit: take so many questions at most.

    Raises:
        ConfigError: a file cannot be read or used, or says what is not known here.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {io_reason(error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    try:
        file = _File.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path}: {where}: {first['msg']}; docs/evaluation.md lists what is known"
        ) from error
    known = METRICS[file.output_type]
    metrics = known if file.metric_list is None else tuple(m.metric for m in file.metric_list)
    for metric in metrics:
        if metric not in known:
            raise ConfigError(
                f"{path}: metric {metric!r} is not one of {file.output_type}: {', '.join(known)}"
            )
    if file.output_type == "multiple_choice" and file.doc_to_choice is None:
        raise ConfigError(f"{path}: multiple_choice needs doc_to_choice")
    documents = _documents(path, file)[:limit]
    if not documents:
        raise ConfigError(f"{path}: its data has no lines")
    items = []
    for number, document in enumerate(documents, 1):
        try:
            items.append(_item(file, document))
        except (jinja2.TemplateError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: question {number} cannot be made: {error}") from error
    generation = file.generation_kwargs
    return EvalTask(
        file.task,
        file.output_type,
        metrics,
        items,
        file.target_delimiter if file.output_type == "multiple_choice" else "",
        tuple(generation.until),
        generation.max_gen_toks,
    )


def _documents(path: Path, file: _File) -> list[dict[str, Any]]:
    """The lines of the split that is tested."""
    given = file.dataset_kwargs.data_files
    files: str | list[str] = []
    if isinstance(given, str):
        files = given
    else:
        split = file.test_split or file.validation_split
        if split is None or split not in given:
            raise ConfigError(f"{path}: test_split names none of {', '.join(given)}")
        files = given[split]
    documents: list[dict[str, Any]] = []
    for name in [files] if isinstance(files, str) else files:
        data = path.parent / name
        try:
            lines = data.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{data} cannot be read: {io_reason(error)}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{data}, line {number} is no JSON") from error
            if not isinstance(document, dict):
                raise ConfigError(f"{data}, line {number} is no JSON object")
            documents.append(document)
    return documents


def _item(file: _File, document: Mapping[str, Any]) -> Item:
    context = file.description + _rendered(file.doc_to_text, document)
    target = _value(file.doc_to_target, document)
    if file.output_type == "loglikelihood_rolling":
        return Item("", (str(target),), 0)
    if file.output_type == "generate_until":
        return Item(context, (), 0, str(target))
    if file.output_type == "loglikelihood":
        return Item(context, (str(target),), 0)
    choices = _choices(file, document)
    if isinstance(target, str):
        target = choices.index(target) if target in choices else int(target)
    if not 0 <= target < len(choices):
        raise ValueError(f"the target {target} is none of its {len(choices)} choices")
    return Item(context, tuple(choices), target)


def _choices(file: _File, document: Mapping[str, Any]) -> list[str]:
    source = file.doc_to_choice
    if isinstance(source, list):
        return [_rendered(each, document) for each in source]
    assert source is not None, "checked when the file was read"
    if source in document:
        found = document[source]
    else:
        # A template that is one expression gives its value: as text, it would be Python's.
        expression = source.strip().removeprefix("{{").removesuffix("}}")
        found = _TEMPLATES.compile_expression(expression, undefined_to_none=False)(**document)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError("doc_to_choice gives no list of texts")
    return found


def _value(source: str | int, document: Mapping[str, Any]) -> str | int:
    if isinstance(source, int):
        return source
    if source in document:
        found = document[source]
        return found if isinstance(found, int) else str(found)
    return _rendered(source, document)


def _rendered(source: str, document: Mapping[str, Any]) -> str:
    if source in document:
        return str(document[source])
    return _TEMPLATES.from_string(source).render(**document)
