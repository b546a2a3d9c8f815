"""Questions for models of the masked family, each kind of model by its own method."""

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Manifest
from maskdial.bundle.texts import check_media, tokenizing_seconds
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.elementary import exp, log_sigmoid
from maskdial.engine.questions import (
    DecisionPrompt,
    Probabilities,
    Question,
    check_prompt,
    check_queue,
)
from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.fill_mask import (
    check_masks_kept,
    mask_positions,
    resolve_targets,
    write_masks,
)
from maskdial.masked.tasks.logits import finite, sigmoid, softmax
from maskdial.masked.tasks.pairs import SECONDS_PER_PAIR, read_pairs
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    TaskModel,
    TaskRequest,
    Truncation,
    masked_input,
    read_texts,
)
from maskdial.masked.tasks.zero_shot import contradiction

_VERBALIZERS = (("Yes", "No"), ("yes", "no"))
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class MaskedDecision(TaskRequest[list[Probabilities]]):
    """Questions about one text."""

    task: ClassVar[str] = "decide"

    text: str
    questions: Sequence[Question]
    truncation: Truncation = REFUSE

    @property
    def num_texts(self) -> int:
        return 1

    @property
    @abc.abstractmethod
    def num_inputs(self) -> int:
        """Inputs that the questions make."""

    @property
    def read_seconds(self) -> float:
        texts = [text for question in self.questions for text in question.texts]
        return tokenizing_seconds([self.text, *texts]) + self.num_inputs * SECONDS_PER_PAIR

    def check(self, model: TaskModel) -> None:
        check_queue(self.num_inputs, "inputs", model.max_queue)


@dataclass(frozen=True, slots=True)
class PromptDecision(TaskRequest[list[Probabilities]]):
    """Prompts of a decision model, whose head, or else whose labels, score the options.

    ``num_questions`` are answered by the readouts of all prompts.
    """

    task: ClassVar[str] = "decide"

    prompts: Sequence[DecisionPrompt]
    num_questions: int

    @property
    def num_texts(self) -> int:
        return 1

    @property
    def num_inputs(self) -> int:
        return len(self.prompts)

    @property
    def read_seconds(self) -> float:
        return 0.0

    def check(self, model: TaskModel) -> None:
        check_queue(len(self.prompts), "prompts", model.max_queue)

    def read(self, model: TaskModel) -> Reading[list[Probabilities]]:
        inputs = []
        for prompt in self.prompts:
            with about("questions", prompt.readouts[0].question):
                check_media(prompt.ids, model)
                check_prompt(prompt, model.manifest.max_length, model)
            inputs.append(MaskedInput(prompt.ids, tuple(each.row for each in prompt.readouts)))

        def answer(results: Sequence[MaskedResult]) -> list[Probabilities]:
            found: dict[int, Probabilities] = {}
            for prompt, result in zip(self.prompts, results, strict=True):
                for readout, scores in zip(prompt.readouts, finite(result.logits), strict=True):
                    found[readout.question] = readout.probabilities(
                        scores[list(readout.columns)].tolist()
                    )
            return [found[index] for index in range(self.num_questions)]

        return Reading(inputs, answer)


class EntailmentDecision(MaskedDecision):
    """Questions for an NLI model: the text is the premise, each option makes a hypothesis.

    A choice is a softmax of the entailment logits over its options, a predicate a softmax of
    entailment against contradiction (Yin et al. 2019, "Benchmarking Zero-shot Text
    Classification").
    """

    __slots__ = ()

    @staticmethod
    def serves(manifest: Manifest) -> bool:
        return manifest.task == "classify" and manifest.entailment is not None

    @property
    def num_inputs(self) -> int:
        return sum(max(len(question.options), 1) for question in self.questions)

    def read(self, model: TaskModel) -> Reading[list[Probabilities]]:
        hypotheses = [_hypotheses(question) for question in self.questions]
        owners = [index for index, each in enumerate(hypotheses) for _ in each]

        def error(_: int, hypothesis: int, reason: str) -> ValidationError:
            return ValidationError(
                f"the input and a hypothesis {reason}", field="questions", index=owners[hypothesis]
            )

        inputs, num_truncated = read_pairs(
            model,
            [self.text],
            [hypothesis for each in hypotheses for hypothesis in each],
            self.truncation,
            strategy="only_first",
            error=error,
        )
        entailment = model.manifest.entailment
        assert entailment is not None, "a model without it does not serve this method"
        against = contradiction(model.manifest.labels, entailment)

        def answer(results: Sequence[MaskedResult]) -> list[Probabilities]:
            rows = iter(finite(np.stack([result.logits for result in results])))
            answers = []
            for question, each in zip(self.questions, hypotheses, strict=True):
                logits = np.stack([next(rows) for _ in each])
                if question.kind == "predicate":
                    answers.append(_floats(sigmoid(logits[:, entailment] - logits[:, against])))
                else:
                    answers.append(_floats(softmax(logits[:, entailment])))
            return answers

        return Reading(inputs, answer, num_truncated)


class LabelDecision(MaskedDecision):
    """Questions for a classifier, whose options are some of its labels: one pass answers them all.

    A choice is the model's own distribution, restricted to the options; a predicate is the
    probability of one label. Labels are found without regard to case.
    """

    __slots__ = ()

    @staticmethod
    def serves(manifest: Manifest) -> bool:
        is_classifier = manifest.task == "classify" and manifest.entailment is None
        return is_classifier and manifest.problem_type != "regression"

    @property
    def num_inputs(self) -> int:
        return 1

    def read(self, model: TaskModel) -> Reading[list[Probabilities]]:
        manifest = model.manifest
        columns = []
        for index, question in enumerate(self.questions):
            with about("questions", index):
                columns.append(_columns(question, model))
        with _about_input():
            encodings, num_truncated = read_texts(model, [(self.text, None)], self.truncation)
        is_independent = (
            manifest.problem_type == "multi_label_classification" or len(manifest.labels) == 1
        )

        def answer(results: Sequence[MaskedResult]) -> list[Probabilities]:
            logits = finite(results[0].logits)
            # Of independent labels, the logarithm of the logistic function.
            values = log_sigmoid(logits) if is_independent else logits
            every = exp(values) if is_independent else softmax(values)
            return [
                _floats(every[chosen] if question.kind == "predicate" else softmax(values[chosen]))
                for question, chosen in zip(self.questions, columns, strict=True)
            ]

        return Reading([masked_input(each) for each in encodings], answer, num_truncated)


class MaskDecision(MaskedDecision):
    """Questions for a fill-mask model, whose options are single tokens: one input per question.

    The options are scored at a mask after the question, or where the question has one. A predicate
    follows the text after "[MASK]," and compares Yes with No (Gao et al. 2021, "Making Pre-trained
    Language Models Better Few-shot Learners", table 1).
    """

    __slots__ = ()

    @staticmethod
    def serves(manifest: Manifest) -> bool:
        return manifest.task == "fill-mask"

    @property
    def num_inputs(self) -> int:
        return len(self.questions)

    def read(self, model: TaskModel) -> Reading[list[Probabilities]]:
        tokenizer, vocab_size = model.tokenizer, model.manifest.vocab_size
        texts, targets = [], []
        for index, question in enumerate(self.questions):
            with about("questions", index):
                texts.append(_cloze(self.text, question, tokenizer))
                targets.append(_target_ids(question, tokenizer, vocab_size))
        with _about_input():
            encodings, num_truncated = read_texts(
                model, [(text, None) for text in texts], self.truncation
            )
        inputs = []
        for index, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
            if num_truncated:
                with about("questions", index):
                    check_masks_kept(text, encoding.ids, tokenizer)
            # The text may contain masks of its own; the question's is the last.
            inputs.append(masked_input(encoding, mask_positions(encoding.ids, tokenizer)[-1:]))

        def answer(results: Sequence[MaskedResult]) -> list[Probabilities]:
            answers = []
            for question, chosen, result in zip(self.questions, targets, results, strict=True):
                probabilities = softmax(finite(result.logits[0, chosen]))
                num_kept = 1 if question.kind == "predicate" else len(chosen)
                answers.append(_floats(probabilities[:num_kept]))
            return answers

        return Reading(inputs, answer, num_truncated)


def _hypotheses(question: Question) -> list[str]:
    """A hypothesis for each option: the instructions with it in place of ``{}``, or at the end."""
    if question.kind == "predicate":
        return [question.instructions]
    if "{}" in question.instructions:
        return [question.instructions.replace("{}", option.text) for option in question.options]
    return [f"{question.instructions} {option.meaning}" for option in question.options]


def _columns(question: Question, model: TaskModel) -> list[int]:
    """The indices of the labels that a question's options name."""
    labels: Mapping[str, int] = {
        label.casefold(): index for index, label in reversed([*enumerate(model.manifest.labels)])
    }
    if question.kind == "predicate":
        names = [question.instructions.strip().removesuffix(".")]
    else:
        names = [option.text for option in question.options]
    for name in names:
        if name.casefold() not in labels:
            known = ", ".join(model.manifest.labels[:_MAX_LISTED])
            more = ", ..." if len(model.manifest.labels) > _MAX_LISTED else ""
            raise ValidationError(
                f"model {model.name!r} is a classifier and knows only its own labels: {known}"
                f"{more}; {name!r} is none of them"
            )
    return [labels[name.casefold()] for name in names]


def _cloze(text: str, question: Question, tokenizer: Tokenizer) -> str:
    """The text and the question as one text, whose last mask is the question's."""
    instructions = write_masks(question.instructions, tokenizer)
    mask = write_masks("[MASK]", tokenizer)
    num_masks = instructions.count(mask)
    if num_masks > 1:
        raise ValidationError(f"the instructions have {num_masks} masks; write one at most")
    if num_masks == 1:
        return f"{text} {instructions}"
    if question.kind == "predicate":
        return f"{text} {mask}, {instructions}"
    return f"{text} {instructions} {mask}."


def _target_ids(question: Question, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The token of each option; of a predicate, those of Yes and No."""
    if question.kind != "predicate":
        return [_target_id(option.text, tokenizer, vocab_size) for option in question.options]
    for words in _VERBALIZERS:
        with contextlib.suppress(ValidationError):
            return [_target_id(word, tokenizer, vocab_size) for word in words]
    raise ValidationError(
        "the model's vocabulary has no single tokens for yes and no, so it cannot answer a "
        "predicate; ask a choice"
    )


def _target_id(word: str, tokenizer: Tokenizer, vocab_size: int) -> int:
    """The word's token after a space, or at least as it stands."""
    with contextlib.suppress(ValidationError):
        return resolve_targets([f" {word}"], tokenizer, vocab_size)[0]
    try:
        return resolve_targets([word], tokenizer, vocab_size)[0]
    except ValidationError as error:
        raise ValidationError(error.message) from error  # the field is the question


@contextlib.contextmanager
def _about_input() -> Iterator[None]:
    """Has a ValidationError name the text, of which there is only one."""
    try:
        yield
    except ValidationError as error:
        raise ValidationError(error.message, field="text") from error


def _floats(values: NDArray[np.float64]) -> Probabilities:
    return tuple(values.tolist())
