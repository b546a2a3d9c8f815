"""What a model makes of a task's questions, as lm-evaluation-harness asks transformers' models."""

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maskdial.causal.model import CausalModel
from maskdial.errors import ConfigError, ValidationError
from maskdial.local.model import AsyncModel
from maskdial.offline.evaluate.task import EvalTask, Item

_AT_ONCE = 32
_ADDS_BOS = "Gemma"
"""Architectures whose prompts begin with the beginning of text there; others' do not."""

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a question came to, by metric; ``weights`` are what a mean over questions counts it by,
    or, where a metric compares what is found with what is right, that.
    """

    values: dict[str, float]
    weights: dict[str, float]


class Asker:
    """Asks one model.

    Args:
        model: writes token by token.

    Attributes:
        served: the model itself.

    Raises:
        ConfigError: it does not.
    """

    def __init__(self, model: AsyncModel) -> None:
        writer = model.writer
        if not isinstance(writer, CausalModel):
            raise ConfigError(f"{model.name} does not write token by token, which tasks ask for")
        manifest = writer.manifest
        special = manifest.special_tokens
        self.served = writer
        self._model = model
        self._tokenizer = writer.tokenizer
        self._longest = writer.max_length - 2  # the engine needs room for one more token
        self._prefix = special.bos if special.bos is not None else special.eos[0]
        self._adds_bos = manifest.architecture.startswith(_ADDS_BOS)

    async def outcomes(
        self, task: EvalTask, shown: Callable[[int], None] = lambda _: None
    ) -> list[Outcome]:
        """What each question came to.

        Args:
            task: has the questions.
            shown: is told how many are done.

        Raises:
            ConfigError: a question does not fit the model.
        """
        ask = {
            "multiple_choice": self._choice,
            "loglikelihood": self._target,
            "loglikelihood_rolling": self._text,
            "generate_until": self._written,
        }[task.kind]
        found: list[Outcome] = []
        for first in range(0, len(task.items), _AT_ONCE):
            some = task.items[first : first + _AT_ONCE]
            try:
                found += await asyncio.gather(*(ask(task, item) for item in some))
            except ValidationError as error:
                raise ConfigError(
                    f"task {task.name!r}, questions {first + 1} to {first + len(some)}: "
                    f"{error.message}"
                ) from error
            shown(len(found))
        return found

    async def _choice(self, task: EvalTask, item: Item) -> Outcome:
        sums = [
            await self._likelihood(item.context, task.delimiter + choice) for choice in item.choices
        ]
        by_length = [  # an empty choice is none, as the harness' division by zero has it
            total / len(c) if c else -math.inf for total, c in zip(sums, item.choices, strict=True)
        ]
        values = {
            "acc": float(sums.index(max(sums)) == item.target),
            "acc_norm": float(by_length.index(max(by_length)) == item.target),
        }
        return Outcome(values, dict.fromkeys(values, 1.0))

    async def _target(self, task: EvalTask, item: Item) -> Outcome:
        total = await self._likelihood(item.context, task.delimiter + item.choices[0])
        return Outcome({"perplexity": total}, {"perplexity": 1.0})

    async def _text(self, task: EvalTask, item: Item) -> Outcome:
        (text,) = item.choices
        total = math.fsum([sum(await self._given(*each)) for each in self._windows(text)])
        num_bytes, num_words = len(text.encode()), len(re.split(r"\s+", text))
        values = dict.fromkeys(("word_perplexity", "byte_perplexity", "bits_per_byte"), total)
        weights = {
            "word_perplexity": float(num_words),
            "byte_perplexity": float(num_bytes),
            "bits_per_byte": float(num_bytes),
        }
        return Outcome(values, weights)

    async def _written(self, task: EvalTask, item: Item) -> Outcome:
        room = self._longest - task.max_new_tokens
        if room < 1:
            raise ValidationError(
                f"max_gen_toks {task.max_new_tokens:,} leaves no room for a question in the "
                f"model's {self._longest:,} tokens; lower it"
            )
        ids = self._encode(item.context)[-room:]
        (written,) = await self._model.generate(
            [ids], max_new_tokens=task.max_new_tokens, stop=task.until, do_sample=False
        )
        text = written.text
        for end in filter(None, task.until):
            text = text.split(end)[0]
        values = {
            metric: float(
                task.exact_match.matches(each.apply(text) if each else text, item.expected)
            )
            for metric, each in task.filters.items()
        }
        return Outcome(values, dict.fromkeys(values, 1.0))

    async def _likelihood(self, context: str, continuation: str) -> float:
        """The log-likelihood of a text behind another."""
        spaces = len(context) - len(context.rstrip())
        if spaces:  # they belong to the first token behind them
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            before, behind = [self._prefix], self._encode(continuation)
        else:
            whole, before = self._encode(context + continuation), self._encode(context)
            behind = whole[len(before) :]
        if not behind:
            raise ValidationError(f"{continuation!r} adds no token to the text before it")
        return math.fsum(await self._given(before[-(self._longest - len(behind)) :], behind))

    async def _given(self, before: Ids, behind: Ids) -> Sequence[float]:
        """The log-probability of each token behind others."""
        (found,) = await self._model.score_ids([before + behind])
        return found[len(before) - 1 :]

    def _windows(self, text: str) -> list[tuple[Ids, Ids]]:
        """The parts of a text, each behind as much of the text as there is room for."""
        ids, size = self._encode(text), self._longest
        whole = [self._prefix, *ids]
        windows = [(whole[:1], ids[:size])]
        for first in range(size, len(ids), size):
            last = min(first + size, len(ids))
            windows.append((whole[last + 1 - size - 1 : first + 1], ids[first:last]))
        return windows

    def _encode(self, text: str) -> Ids:
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return [self._prefix, *ids] if self._adds_bos else ids
