"""Log-probabilities and usage, as the OpenAI dialect reports them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maskdial.bundle.tokenizer import TokenSpeller
from maskdial.causal.events import TokenEvent
from maskdial.causal.prompts import Prompt

Alternatives = Iterable[tuple[int, float]]
"""Token ids and their natural log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class DescribedToken:
    """A token to describe.

    Attributes:
        offset: where it begins in the text, in characters.
        logprob: None for a prompt's first token, which nothing precedes.
    """

    token_id: int
    offset: int
    logprob: float | None
    alternatives: Alternatives = ()


class CompletionLogprobs:
    """The log-probabilities of one text, token by token, as `/v1/completions` lays them out.

    Args:
        speller: at the place of the first token.
    """

    def __init__(self, speller: TokenSpeller) -> None:
        self._speller = speller

    def describe(self, tokens: Iterable[DescribedToken]) -> dict[str, list[Any]]:
        """Describes the next tokens."""
        content: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token in tokens:
            text = self._speller.text(token.token_id)
            content["text_offset"].append(token.offset)
            content["token_logprobs"].append(token.logprob)
            content["tokens"].append(text)
            content["top_logprobs"].append(self._top(text, token))
            self._speller.advance(token.token_id)
        return content

    def _top(self, text: str, token: DescribedToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in token.alternatives:
            # Incomplete characters are spelled alike; the first one is the most likely.
            top.setdefault(self._speller.text(token_id), logprob)
        top.setdefault(text, token.logprob)
        return top


def chat_logprobs(events: Iterable[TokenEvent], speller: TokenSpeller) -> dict[str, Any]:
    """The log-probabilities of some tokens, as `/v1/chat/completions` lays them out."""
    content = []
    for event in events:
        alternatives = [_chat_token(speller, *each) for each in event.top]
        token = _chat_token(speller, event.token_id, event.logprob)
        content.append(token | {"top_logprobs": alternatives})
        speller.advance(event.token_id)
    return {"content": content, "refusal": None}


def _chat_token(speller: TokenSpeller, token_id: int, logprob: float) -> dict[str, Any]:
    spelling = speller.spell(token_id)
    return {
        "token": spelling.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(spelling),
    }


def usage(
    prompts: Sequence[Prompt], num_generated: int, details: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many texts it has.

    ``details`` tell what the generated tokens are; None: that is not reported.
    """
    num_prompt = sum(len(prompt.ids) for prompt in prompts)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(prompt.num_cached for prompt in prompts)},
    }
    if details is not None:
        counts["completion_tokens_details"] = details
    return counts
