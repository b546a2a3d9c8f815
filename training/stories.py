"""Stories: what the causal models are asked to continue, and how the results are judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PROMPTS = (
    "Once upon a time there was a little",
    "The old man looked at the sea and",
    '"Where are you going?" said the',
    "In the middle of the forest there stood",
    "The king had three daughters, and",
    "It was a dark night, and the wind",
    "She opened the letter and",
    "One morning the children found",
    "There was once a poor woodcutter who",
    '"I am not afraid," said',
    "The dog ran down the road",
    "When the doctor came into the room,",
    "The ship sailed for many days",
    "Her mother had told her never to",
    "At last they came to a house",
    "The boy put the money in his pocket and",
    "Far away, beyond the mountains,",
    "He had been in the army for ten years when",
    "The cat sat by the fire and",
    "That evening, after supper,",
)
SAMPLING = {"do_sample": True, "temperature": 0.8, "min_p": 0.1, "repetition_penalty": 1.2}
"""The causal models' defaults: of those tried, texts without circles and with the fewest garbled
words."""
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")


@dataclass(frozen=True, slots=True)
class Story:
    """A prompt with its continuation, and whether the model ended it."""

    text: str
    ended: bool


@torch.no_grad()
def tell(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    max_length: int,
) -> list[Story]:
    """A story for each prompt, sampled with the models' defaults and a fixed seed."""
    model.eval()
    inputs = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    inputs = inputs.to(model.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Without top_k=0, transformers would draw from the 50 likeliest tokens.
        outputs = model.generate(**inputs, max_length=max_length, top_k=0, **SAMPLING)
    told = outputs[:, inputs["input_ids"].shape[1] :]
    return [
        Story(
            text=str(tokenizer.decode(output, skip_special_tokens=True)),
            ended=bool((rest == tokenizer.eos_token_id).any()),
        )
        for output, rest in zip(outputs, told, strict=True)
    ]


def words(text: str) -> list[str]:
    """The words of `text`, in lower case."""
    return _WORD.findall(text.lower())


def garbled(stories: Iterable[Story], known: frozenset[str]) -> list[str]:
    """The words of the stories that occur in no training text."""
    return [word for story in stories for word in words(story.text) if word not in known]


def most_repeated(stories: Iterable[Story], length: int = 4) -> int:
    """How often a story says the same `length` words, at most: a model that circles does so."""
    counts = (Counter(_runs(words(story.text), length)) for story in stories)
    return max((max(count.values(), default=0) for count in counts), default=0)


def distinct(told: Iterable[Sequence[str]], length: int) -> float:
    """The share of the texts' runs of `length` words that are new in their text."""
    runs = [list(_runs(words, length)) for words in told]
    return sum(len(set(of_text)) for of_text in runs) / max(1, sum(map(len, runs)))


def _runs(told: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    return (tuple(told[i : i + length]) for i in range(len(told) - length + 1))
