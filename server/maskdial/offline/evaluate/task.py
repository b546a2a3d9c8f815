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
from pydantic import Field

from maskdial.errors import ConfigError, io_reason
from maskdial.offline.evaluate.filters import ExactMatch, Filter, Strict
from maskdial.offline.evaluate.shots import Shots

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

_TEMPLATES = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)


class _Metric(ExactMatch):
    metric: str
    aggregation: str | None = None
    higher_is_better: bool | None = None


class _Generation(Strict):
    until: list[str] | None = None
    max_gen_toks: Annotated[int, Field(ge=1)] = 256
    do_sample: Literal[False] = False
    temperature: Annotated[float, Field(ge=0, le=0, strict=False)] = 0.0


class _Dataset(Strict):
    data_files: str | dict[str, str | list[str]]


class _Shots(Strict):
    sampler: Literal["default", "first_n"] = "default"
    split: str | None = None
    samples: list[dict[str, Any]] | None = None


class _File(Strict):
    task: str
    dataset_path: Literal["json"]
    dataset_kwargs: _Dataset
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
    fewshot_config: _Shots = _Shots()
    fewshot_delimiter: str = "\n\n"
    filter_list: list[Filter] | None = None
    repeats: Literal[1] = 1
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
        expected: of texts that are written: what should be; of labels, the right one.
        gold: how alike two texts are; the second one is its choice.
    """

    context: str
    choices: tuple[str, ...]
    target: int
    expected: str = ""
    gold: float = 0.0


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
        filters: what of it is compared, by metric; None for all.
        exact_match: how.
    """

    name: str
    kind: OutputType
    metrics: tuple[str, ...]
    items: Sequence[Item]
    delimiter: str
    until: tuple[str, ...]
    max_new_tokens: int
    filters: Mapping[str, Filter | None]
    exact_match: ExactMatch

    @property
    def sha256(self) -> str:
        """Of all that it asks."""
        content = json.dumps(asdict(self), default=Strict.model_dump)
        return hashlib.sha256(content.encode()).hexdigest()


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
    if file.output_type == "similarity" and file.doc_to_pair is None:
        raise ConfigError(f"{path}: similarity needs doc_to_pair, the second text")
    if file.output_type not in ("classification", "similarity") and file.doc_to_pair is not None:
        raise ConfigError(f"{path}: doc_to_pair is for classification and similarity")
    if file.filter_list is not None and file.output_type != "generate_until":
        raise ConfigError(f"{path}: filter_list is for generate_until")
    documents = _documents(path, file, file.test_split or file.validation_split)[:limit]
    if not documents:
        raise ConfigError(f"{path}: its data has no lines")
    shots = _shots(path, file)
    items = []
    for number, document in enumerate(documents, 1):
        try:
            examples = [] if shots is None else shots.of(document)
            before = "".join(_example(file, each) for each in examples)
            items.append(_item(file, document, before))
        except (jinja2.TemplateError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: question {number} cannot be made: {error}") from error
    generation = file.generation_kwargs
    filters: dict[str, Filter | None] = dict.fromkeys(metrics)
    if file.filter_list is not None:
        filters = {f"{metric},{each.name}": each for metric in metrics for each in file.filter_list}
    ways = [ExactMatch.model_validate(m.model_dump(include=_WAYS)) for m in file.metric_list or ()]
    return EvalTask(
        file.task,
        file.output_type,
        tuple(filters),
        items,
        file.target_delimiter if file.output_type == "multiple_choice" else "",
        tuple([file.fewshot_delimiter] if generation.until is None else generation.until),
        generation.max_gen_toks,
        filters,
        ways[0] if ways else ExactMatch(),
    )


_WAYS = set(ExactMatch.model_fields)


def _shots(path: Path, file: _File) -> Shots | None:
    """What chooses the examples before each question; None for none."""
    if not file.num_fewshot:
        return None
    if file.output_type not in ("multiple_choice", "loglikelihood", "generate_until"):
        raise ConfigError(f"{path}: num_fewshot is not for {file.output_type}")
    how = file.fewshot_config
    split = file.fewshot_split if how.split is None else how.split
    if split is not None:
        documents = _documents(path, file, split)
    elif how.samples is not None:
        documents = how.samples
    else:
        raise ConfigError(f"{path}: num_fewshot needs fewshot_split, or samples in fewshot_config")
    return Shots(
        documents,
        file.num_fewshot,
        in_order=how.sampler == "first_n",
        excludes=split is not None and split == file.test_split,
    )


def _example(file: _File, document: Mapping[str, Any]) -> str:
    """A question with its answer."""
    item = _item(file, document, "")
    answer = item.choices[item.target] if item.choices else item.expected
    question = _rendered(file.doc_to_text, document)
    if not answer:
        return question
    return question + file.target_delimiter + answer + file.fewshot_delimiter


def _documents(path: Path, file: _File, split: str | None) -> list[dict[str, Any]]:
    """The lines of a split."""
    given = file.dataset_kwargs.data_files
    files: str | list[str] = []
    if isinstance(given, str):
        files = given
    else:
        if split is None or split not in given:
            raise ConfigError(f"{path}: a split names none of {', '.join(given)}: {split}")
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


def _item(file: _File, document: Mapping[str, Any], examples: str) -> Item:
    description = _TEMPLATES.from_string(file.description).render(**document)
    context = description + examples + _rendered(file.doc_to_text, document)
    target = _value(file.doc_to_target, document)
    if file.output_type == "loglikelihood_rolling":
        return Item("", (str(target),), 0)
    if file.output_type == "generate_until":
        return Item(context, (), 0, str(target))
    pair = () if file.doc_to_pair is None else (_rendered(file.doc_to_pair, document),)
    if file.output_type == "classification":
        return Item(context, pair, 0, str(target))
    if file.output_type == "similarity":
        return Item(context, pair, 0, gold=float(target))
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
