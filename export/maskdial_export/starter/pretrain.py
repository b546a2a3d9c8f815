"""The training loop both language models share: as many steps as fit into a time budget."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

CHECKPOINT_FILE = "checkpoint.pt"


class Objective(Protocol):
    """What is trained: a model, and the loss of the next random batch."""

    @property
    def model(self) -> nn.Module: ...

    def batch_loss(self, progress: float) -> tuple[Tensor, int]:
        """Mean loss (scalar, nats) and number of tokens of a new batch; `progress` is 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to learn. The learning rate follows the clock, not a step count."""

    minutes: float
    learning_rate: float
    warmup: float = 0.02
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    checkpoint_seconds: float = 180.0
    bf16: bool = False

    def rate_at(self, progress: float) -> float:
        """Linear warm-up over the first `warmup` share of the time, then a cosine to 2 %."""
        if progress < self.warmup:
            return self.learning_rate * (progress + 0.001) / self.warmup
        share = min(1.0, (progress - self.warmup) / (1.0 - self.warmup))
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * share)))


@dataclass(slots=True)
class Record:
    """What a run has done so far. `losses` holds a mean training loss for each 1/20 of it."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    """bfloat16 matrix products where asked for; weights and the optimizer stay fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats of each row: `[rows, vocabulary]` logits, `[rows]` int64 labels.

    Written out because the backward pass of PyTorch's own is not vectorised on a CPU and took
    a quarter of a training step.
    """
    logits = logits.float()
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(-1) - chosen


def build_optimizer(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """AdamW that decays matrices only: norms, biases and other vectors are left alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": plan.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98), fused=True)


def pretrain(objective: Objective, plan: Plan, out: Path, title: str, resume: bool) -> Record:
    """Train `objective.model` in place for `plan.minutes`, and say what was done.

    Time spent before an interruption counts when `resume` finds a checkpoint in `out`.
    """
    model = objective.model
    optimizer = build_optimizer(model, plan)
    record = Record()
    checkpoint = out / CHECKPOINT_FILE
    if resume and checkpoint.exists():
        record = _load(checkpoint, model, optimizer)
    device = next(model.parameters()).device
    budget = plan.minutes * 60.0
    started = saved = time.monotonic()
    seconds_before = record.seconds
    interval_sum, interval_count = 0.0, 0
    model.train()
    with _progress_bar() as bar:
        task = bar.add_task(title, total=budget, loss=math.nan, speed=0.0)
        while record.seconds < budget:
            progress = record.seconds / budget
            for group in optimizer.param_groups:
                group["lr"] = plan.rate_at(progress)
            with autocast(device, plan.bf16):
                loss, num_tokens = objective.batch_loss(progress)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), plan.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            now = time.monotonic()
            record.seconds = seconds_before + now - started
            record.steps += 1
            record.tokens += num_tokens
            interval_sum += loss.item()
            interval_count += 1
            speed = record.tokens / record.seconds
            mean_loss = interval_sum / interval_count
            bar.update(task, completed=record.seconds, loss=mean_loss, speed=speed)
            if record.seconds / budget * 20 >= len(record.losses) + 1:
                record.losses.append(mean_loss)
                interval_sum, interval_count = 0.0, 0
                bar.console.log(
                    f"{title} step {record.steps} loss {mean_loss:.3f} {speed:.0f} tokens/s"
                )
            if now - saved > plan.checkpoint_seconds:
                _save(checkpoint, model, optimizer, record)
                saved = now
    checkpoint.unlink(missing_ok=True)
    return record


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "record": [record.steps, record.tokens, record.seconds, record.losses],
        "random": torch.get_rng_state(),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return Record(*state["record"])


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:.0f} tokens/s"),
        TimeRemainingColumn(),
        refresh_per_second=2,
    )
