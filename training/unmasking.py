"""Unmasking: how well hybrids fill gaps and write texts in several passes, as one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from training import hybrid, stories
from training.data import read_books
from training.hybrid import HybridObjective
from training.pretrain import cross_entropy
from training.settings import Settings
from training.shipped import read_tokenizer

BATCH = 64
"""Rows that are read at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: gaps of held-out texts, and texts behind the beginnings of others."""

    span_words: Sequence[int] = (1, 2, 4, 8)
    spans: int = 64
    """Gaps of each length, each in a text of its own of `span_context` tokens."""
    span_context: int = 64
    texts: int = 32
    prompt_tokens: int = 16
    text_tokens: int = 64
    block: int = 32
    tokens_per_pass: Sequence[int] = (1, 2, 4, 8)
    temperature: float = 0.8


Row = dict[str, float]
"""The figures of one model."""


def compare(settings: Settings, sizes: Sizes | None = None) -> str:
    """A Markdown table of the bundle `settings.start` and of the checkpoint in `out`, if any.

    The bundle's causal mask judges the texts of both.
    """
    sizes = sizes or Sizes()
    assert settings.start is not None
    tokenizer = read_tokenizer(settings.start, hybrid.MAX_LENGTH)
    books = read_books(settings.corpus)
    stream = hybrid.encode_stream(tokenizer, books.held_out, settings.seed)
    num_bytes = sum(len(text.encode()) + 1 for text in books.held_out)
    bundle = hybrid.build_model(tokenizer, settings.shape)
    hybrid.restore(bundle, settings.start)
    judge = HybridObjective(bundle, tokenizer, stream, 1.0)
    columns = {"--start": judge}
    if (settings.out / "hybrid").exists():
        model = Qwen3ForCausalLM.from_pretrained(
            settings.out / "hybrid", attn_implementation="eager"
        )
        columns["--out"] = HybridObjective(model, tokenizer, stream, 1.0)
    rows = [
        {
            "bits per byte, causal": hybrid.evaluate_causal(objective, num_bytes)["bits_per_byte"],
            **hybrid.evaluate_masked(objective),
            **measure_gaps(objective, sizes),
            **measure_texts(objective, judge, sizes),
        }
        for objective in columns.values()
    ]
    figures = "\n".join(
        f"| {name} | " + " | ".join(f"{row[name]:.3f}" for row in rows) + " |" for name in rows[0]
    )
    return f"| | {' | '.join(columns)} |\n{'| --- ' * (1 + len(columns))}|\n{figures}"


@torch.no_grad()
def fill(
    objective: HybridObjective, texts: Tensor, hidden: Tensor, per_pass: int, temperature: float
) -> Tensor:
    """`texts`, `[rows, length]` int64, with their `hidden` positions filled, `[rows, length]` bool.

    Each pass fills the `per_pass` hidden positions of each row whose candidates are most probable.
    A candidate is drawn at `temperature`, or is the likeliest token if that is 0. Other positions
    may be masked, too, and stay so.
    """
    texts, hidden = texts.clone(), hidden.clone()
    while hidden.any():
        before = nn.functional.pad(hidden[:, 1:], (0, 1))
        logits = objective.logits(texts, 0, before).cpu().float()
        logits[:, objective.mask] = -math.inf
        if temperature > 0.0:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            drawn = logits.argmax(-1, keepdim=True)
        candidates, confidence = texts.clone(), torch.full(texts.shape, -1.0)
        candidates[hidden] = drawn[:, 0]
        confidence[hidden] = logits.softmax(-1).gather(1, drawn)[:, 0]
        rank = confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        filled = hidden & (rank < per_pass)
        texts[filled] = candidates[filled]
        hidden &= ~filled
    return texts


@torch.no_grad()
def measure_gaps(objective: HybridObjective, sizes: Sizes) -> Row:
    """How well gaps of so many words are filled.

    That is the share filled with the very words, one token a pass, and the words' perplexity by
    token: each masked alone (pseudo-perplexity), or with all of the gap that comes after it.
    """
    objective.model.eval()
    figures: Row = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for count in sizes.span_words:
            windows, hidden = draw_spans(objective, sizes, count)
            masked = torch.where(hidden, objective.mask, windows)
            filled = fill(objective, masked, hidden, 1, 0.0)
            exact = (filled == windows).all(1).float().mean()
            alone, later = (_span_loss(objective, windows, hidden, rest) for rest in (False, True))
            figures |= {
                f"gap of {count} words, exact": float(exact),
                f"gap of {count} words, pseudo-perplexity": math.exp(alone),
                f"gap of {count} words, perplexity left to right": math.exp(later),
            }
    return figures


def draw_spans(objective: HybridObjective, sizes: Sizes, count: int) -> tuple[Tensor, Tensor]:
    """Held-out windows and the positions of `count` whole words in the middle of each."""
    windows = objective.sample_windows(sizes.spans, sizes.span_context)
    words = objective.word_numbers(windows)
    # Punctuation is a word of its own here.
    first = words.gather(1, torch.full((sizes.spans, 1), sizes.span_context // 3))
    hidden = (words >= first) & (words < first + count) & (windows != objective.end)
    hidden[:, 0] = False
    return windows, hidden


def _span_loss(objective: HybridObjective, windows: Tensor, hidden: Tensor, rest: bool) -> float:
    """Mean loss in nats of the hidden tokens, each masked alone or with those after it."""
    rows, columns = hidden.nonzero(as_tuple=True)
    positions = torch.arange(windows.shape[1])
    asked = positions == columns[:, None]
    masked = asked | (hidden[rows] & (positions > columns[:, None])) if rest else asked
    inputs = torch.where(masked, objective.mask, windows[rows])
    before = nn.functional.pad(asked[:, 1:], (0, 1))
    losses = [
        cross_entropy(
            objective.logits(inputs[start : start + BATCH], 0, before[start : start + BATCH]),
            windows[hidden][start : start + BATCH],
        )
        for start in range(0, len(rows), BATCH)
    ]
    return float(torch.cat(losses).mean())


@torch.no_grad()
def measure_texts(objective: HybridObjective, judge: HybridObjective, sizes: Sizes) -> Row:
    """Texts that are written behind held-out beginnings, under the causal mask and by unmasking.

    Their bits per byte are those of the judge's causal mask. A text that repeats itself has few,
    so its words in runs of two and four are counted: the share of them that is new in the text.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        windows = objective.sample_windows(sizes.texts, sizes.prompt_tokens + sizes.text_tokens)
        prompts = windows[:, : sizes.prompt_tokens]
        written = {"held out": windows}
        objective.model.eval()
        written["causal"] = objective.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=sizes.text_tokens,
            min_new_tokens=sizes.text_tokens,
            do_sample=True,
            temperature=sizes.temperature,
            top_k=0,
            min_p=None,
            repetition_penalty=1.0,
        )
        for per_pass in sizes.tokens_per_pass:
            written[f"{per_pass} a pass"] = write(objective, prompts, per_pass, sizes)
    figures: Row = {}
    for name, texts in written.items():
        shown = objective.tokenizer.batch_decode(
            texts[:, sizes.prompt_tokens :], skip_special_tokens=True
        )
        told = [stories.words(text) for text in shown]
        figures |= {
            f"text, {name}: bits per byte": _bits(judge, texts, sizes.prompt_tokens)
            / sum(len(text.encode()) for text in shown),
            f"text, {name}: new pairs of words": stories.distinct(told, 2),
            f"text, {name}: new fours of words": stories.distinct(told, 4),
        }
    return figures


def write(objective: HybridObjective, prompts: Tensor, per_pass: int, sizes: Sizes) -> Tensor:
    """`[rows, prompt and text]` int64: texts behind the prompts, block by block."""
    start = prompts.shape[1]
    texts = nn.functional.pad(prompts, (0, sizes.text_tokens), value=objective.mask)
    positions = torch.arange(texts.shape[1]).expand(texts.shape)
    for first in range(start, texts.shape[1], sizes.block):
        hidden = (positions >= first) & (positions < first + sizes.block)
        texts = fill(objective, texts, hidden, per_pass, sizes.temperature)
    return texts


def _bits(judge: HybridObjective, texts: Tensor, start: int) -> float:
    """The bits of all tokens from `start` on, under the judge's causal mask."""
    inputs, targets = texts[:, :-1], texts[:, 1:]
    predicted = (torch.arange(inputs.shape[1]) >= start - 1).expand(inputs.shape)
    judge.model.eval()
    losses = cross_entropy(judge.logits(inputs, len(texts), predicted), targets[predicted])
    return float(losses.sum()) / math.log(2)
