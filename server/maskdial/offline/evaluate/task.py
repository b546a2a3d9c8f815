"""A task: questions as lm-evaluation-harness makes them of a file and of its data."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maskdial.errors import ConfigError, io_reason
from maskdial.offline.evaluate.filters import ExactMatch, Filter, Strict
from maskdial.offline.evaluate.form import OutputType, TaskFile
from maskdial.offline.evaluate.shots import Shots

_TEMPLATES = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)


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
    file = TaskFile.read(path)
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
    filters: dict[str, Filter | None] = dict.fromkeys(file.metrics)
    if file.filter_list is not None:
        filters = {
            f"{metric},{each.name}": each for metric in file.metrics for each in file.filter_list
        }
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


def _shots(path: Path, file: TaskFile) -> Shots | None:
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


def _example(file: TaskFile, document: Mapping[str, Any]) -> str:
    """A question with its answer."""
    item = _item(file, document, "")
    answer = item.choices[item.target] if item.choices else item.expected
    question = _rendered(file.doc_to_text, document)
    if not answer:
        return question
    return question + file.target_delimiter + answer + file.fewshot_delimiter


def _documents(path: Path, file: TaskFile, split: str | None) -> list[dict[str, Any]]:
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


def _item(file: TaskFile, document: Mapping[str, Any], examples: str) -> Item:
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


def _choices(file: TaskFile, document: Mapping[str, Any]) -> list[str]:
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
        if isinstance(found, list | dict):
            raise TypeError("doc_to_target gives several answers, and one is compared")
        return found if isinstance(found, int) else str(found)
    return _rendered(source, document)


def _rendered(source: str, document: Mapping[str, Any]) -> str:
    if source in document:
        return str(document[source])
    return _TEMPLATES.from_string(source).render(**document)
