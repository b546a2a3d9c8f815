"""Questions for causal models: how likely the model is to answer with each option.

Where the options have labels of one token each, which the prompt lists, or the model has a head
that scores them, one pass over the prompt gives all scores (`read_labels`). Otherwise
(`likelihoods`) every option is one sequence that is forced to generate it. The sequences of a
question share their prompt, so it is prefilled once, and decode in the same batches.

The likelihood of an option is the sum of its tokens' log-probabilities, not divided by the length.
The sum gives the model's own probabilities, conditional on it answering with one of the options; a
mean per token is no probability of anything. The prompt lists the options, so a long one costs
little once it has begun. Where one option is a prefix of another, the shorter one stands for the
answers that do not continue as the longer one, so the options exclude each other.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from maskdial.bundle.texts import check_media
from maskdial.causal.forced_tokens import ForcedTokens
from maskdial.causal.model import CausalModel
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence as CausalSequence
from maskdial.causal.sequence import SharedPrompt
from maskdial.causal.stream import TokenStream
from maskdial.config import Config
from maskdial.engine.questions import (
    DecisionPrompt,
    Option,
    Probabilities,
    Question,
    as_text,
    check_input,
    check_prompt,
    check_queue,
)
from maskdial.engine.timing import Deadline, Timings
from maskdial.errors import ValidationError, about

Tokens = tuple[int, ...]

_YES_OR_NO = (Option("yes"), Option("no"))
# The answer is scored without reasoning before it. Other templates ignore the variable.
_TEMPLATE_VARIABLES = {"enable_thinking": False}


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """The answers to all questions, and how many prompt tokens came from the prefix cache."""

    probabilities: list[Probabilities]
    timings: Timings
    num_cached: int


@dataclass(frozen=True, slots=True)
class _Branches:
    """One tokenized question: the prefix that its options share, and the rest of each."""

    prompt: Tokens
    options: tuple[Tokens, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """An option that was generated: its tokens, their log-probability, and what that took."""

    option: Tokens
    logprob: float
    queue_seconds: float
    inference_seconds: float


async def likelihoods(
    text: str, questions: Sequence[Question], model: CausalModel, config: Config, deadline: Deadline
) -> Likelihoods:
    """Answers questions about a text.

    Raises:
        ValidationError: the text is too long, or there are more options than the queue holds.
        OverloadedError: the queue has no room for them.
        DeadlineError: the time is up.
    """
    num_options = sum(max(len(question.options), 2) for question in questions)
    if num_options > config.max_queue:
        raise ValidationError(
            f"the questions have {num_options:,} options; the queue holds at most "
            f"{config.max_queue:,} (--max-queue); ask in several requests",
            field="questions",
        )
    model.engine.check_room(num_options)
    async with deadline.enforced():
        with model.metrics.tokenization_duration.time():
            branches = [
                await _branches(text, index, question, model)
                for index, question in enumerate(questions)
            ]
    sequences = [_sequences(each, model) for each in branches]
    queued = [sequence for options in sequences for sequence in options.values()]
    with deadline.explained():
        async with model.engine.streams(queued, deadline.remaining()) as started:
            streams = iter(started)
            runs = [
                [await _finish(option, next(streams)) for option in options]
                for options in sequences
            ]
    flat = [run for finished in runs for run in finished]
    return Likelihoods(
        [_probabilities(*answered) for answered in zip(questions, branches, runs, strict=True)],
        Timings(
            queue_seconds=max((run.queue_seconds for run in flat), default=0.0),
            inference_seconds=max((run.inference_seconds for run in flat), default=0.0),
            compute_tokens=sum(len(each.prompt) for each in branches)
            + sum(len(run.option) for run in flat),
        ),
        num_cached=sum(next(iter(options.values())).num_cached for options in sequences if options),
    )


async def read_labels(
    prompts: Sequence[DecisionPrompt],
    num_questions: int,
    model: CausalModel,
    config: Config,
    deadline: Deadline,
) -> Likelihoods:
    """Answers questions by the scores of their options' labels in place of the next token, or by
    those that a head gives the options after each prompt.

    A prompt that answers several questions is read up to each of them, as one prefix of another.

    Raises:
        ValidationError: a prompt is too long, or there are more than the queue holds.
        OverloadedError: the queue has no room for them.
        DeadlineError: the time is up.
    """
    readouts = [(prompt, readout) for prompt in prompts for readout in prompt.readouts]
    check_queue(len(readouts), "prompts", config.max_queue)
    for prompt, readout in readouts:
        with about("questions", readout.question):
            check_media(prompt.ids, model)
            # The engine needs room for one more token.
            check_prompt(prompt, model.max_length - 1, model)
    sequences = [
        CausalSequence(
            list(prompt.ids[: readout.row + 1]),
            SamplingParams(max_new_tokens=1, scored_tokens=readout.columns),
            adapter=model.adapter,
        )
        for prompt, readout in readouts
    ]
    found: dict[int, Probabilities] = {}
    finishes = []
    with deadline.explained():
        async with model.engine.streams(sequences, deadline.remaining()) as started:
            for (_, readout), stream in zip(readouts, started, strict=True):
                (event,) = [event async for event in stream]
                found[readout.question] = readout.probabilities(
                    [logprob for _, logprob in event.top]
                )
                assert event.finish is not None, "a text of one token ends with it"
                finishes.append(event.finish)
    return Likelihoods(
        [found[index] for index in range(num_questions)],
        Timings(
            queue_seconds=max(finish.queue_seconds for finish in finishes),
            inference_seconds=max(finish.inference_seconds for finish in finishes),
            compute_tokens=sum(len(prompt.ids) for prompt in prompts),
        ),
        num_cached=sum(sequence.num_cached for sequence in sequences),
    )


def _probabilities(question: Question, branches: _Branches, runs: Sequence[_Run]) -> Probabilities:
    found = {run.option: run.logprob for run in runs}
    # An option that is all of the common prefix was not run: every answer begins with it.
    shares = exclusive({option: found.get(option, 0.0) for option in branches.options})
    chosen = [shares[option] for option in branches.options]
    normalized = tuple(share / sum(chosen) for share in chosen)
    return normalized[:1] if question.kind == "predicate" else normalized


def exclusive(logprobs: Mapping[Tokens, float]) -> dict[Tokens, float]:
    """Relative probabilities of options that exclude each other.

    Args:
        logprobs: of each option, the natural log-probability that the answer begins with it.

    Returns:
        Of each option, the probability that it is the longest one that the answer begins with, in
        multiples of that of the likeliest beginning. At least one is not 0.
    """
    likeliest = max(logprobs.values())
    begins = {option: math.exp(value - likeliest) for option, value in logprobs.items()}
    alone = dict(begins)
    for option, probability in begins.items():
        lengths = range(len(option) - 1, -1, -1)
        shorter = next((option[:n] for n in lengths if option[:n] in begins), None)
        if shorter is not None:
            alone[shorter] -= probability
    return {option: max(probability, 0.0) for option, probability in alone.items()}


async def _branches(text: str, index: int, question: Question, model: CausalModel) -> _Branches:
    with about("questions", index):
        prompt = await _prompt(text, question, model)
        return await asyncio.to_thread(_branch, prompt, question, model)


def _branch(prompt: str, question: Question, model: CausalModel) -> _Branches:
    """Tokenizes prompt and option together, since a token may span the boundary."""
    # After whitespace or a special token, the answer follows without a space.
    space = "" if prompt[-1:].isspace() or prompt.endswith((">", "]")) else " "
    texts = [prompt + space + option.text for option in question.options or _YES_OR_NO]
    check_input(max(texts, key=len), model.max_length, model.tokenizer, model.name)
    wholes = [
        model.tokenizer.encode(text, add_special_tokens=not model.chat_template.exists).ids
        for text in texts
    ]
    for whole in wholes:
        check_media(whole, model)
    longest = max(map(len, wholes))
    if longest > model.max_length:
        raise ValidationError(
            f"the input with the question has {longest} tokens; model {model.name!r} has a context "
            f"of {model.max_length}; shorten it",
            field="text",
        )
    num_common = _num_common(wholes)
    common = tuple(wholes[0][:num_common])
    return _Branches(common, tuple(tuple(whole[num_common:]) for whole in wholes))


def _num_common(texts: Sequence[Sequence[int]]) -> int:
    """The length of the longest common prefix, in tokens."""
    for position, column in enumerate(zip(*texts, strict=False)):
        if any(one != other for one, other in pairwise(column)):
            return position
    return min(map(len, texts))


async def _prompt(text: str, question: Question, model: CausalModel) -> str:
    if question.kind == "predicate":
        asked = f"Statement: {question.instructions}\nIs the statement true? Answer yes or no."
        for word, option in (("yes", "true"), ("no", "false")):
            if meaning := as_text(question.meanings.get(option)):
                asked += f"\n- {word}: {meaning}"
    else:
        kind = "options" if question.kind == "choice" else "levels, from the lowest to the highest"
        listed = "\n".join(
            f"- {option.text}: {option.description}" if option.description else f"- {option.text}"
            for option in question.options
        )
        asked = f"{question.instructions}\nAnswer with one of these {kind}:\n{listed}"
    content = f"{text}\n\n{asked}"
    if not model.chat_template.exists:
        return f"{content}\nAnswer:"
    messages = [{"role": "user", "content": content}]
    rendering = model.chat_template.submit(messages, variables=_TEMPLATE_VARIABLES)
    prompt = await asyncio.wrap_future(rendering)
    thinking = model.reply_format.thinking
    if thinking is not None and thinking.opened_by(prompt):
        return f"{prompt.rstrip()}\n{thinking.end}\n\n"
    return prompt


def _sequences(branches: _Branches, model: CausalModel) -> dict[Tokens, CausalSequence]:
    """One for each distinct option; an option with no tokens beyond the prefix needs no pass."""
    shared = SharedPrompt()
    return {
        option: CausalSequence(
            branches.prompt,
            SamplingParams(max_new_tokens=len(option)),
            grammar=ForcedTokens(option, model.manifest.vocab_size),
            shared_prompt=shared,
            adapter=model.adapter,
        )
        for option in branches.options
        if option
    }


async def _finish(option: Tokens, stream: TokenStream) -> _Run:
    events = [event async for event in stream]
    finish = events[-1].finish
    assert finish is not None, "a stream ends with its finish or an error"
    return _Run(
        option,
        math.fsum(event.logprob for event in events),
        finish.queue_seconds,
        finish.inference_seconds,
    )
