"""``python -m loadtests policies``: streams that a policy reads, beside streams that none does.

A server with the models writes as many streams at a time under each policy as without one, in
turns. Policies are asked for by header, so that all requests go to the same engine. Rules that only
flag hold nothing back, so that the pauses between tokens show how long the guards' passes delay a
step. `second server` is the usual way beside it: the guards run in a server of their own, and
whoever reads the stream sends it the same windows and passes on what it has judged. Without
bundles, models have random weights in real shapes: a Llama of 135 million, a tagger as MiniLM, and
a classifier as DeBERTa-base.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from loadtests import LoadTestError, add_number, add_seed, add_work
from loadtests.checkpoints import build_checkpoint, export_random, llama_config, new_folder
from loadtests.compare.setup import DEBERTA, find
from loadtests.measurement import (
    Section,
    add_report_options,
    load_averages,
    machine,
    median,
    median_ratio,
    take_turns,
    write_reports,
)
from loadtests.server import running_server
from maskdial.policy.file import CONTEXT, EVERY
from maskdial.policy.windows import Before, Both, Words

DESCRIPTION = (
    "Measure streams that a policy's tagger and classifier read, beside streams that nothing reads."
)
_NONE, _SECOND = "none", "both, second server"
_POLICIES = {
    "tagger": {"tagger": "redact"},
    "classifier": {"classifier": "stop"},
    "both": {"tagger": "redact", "classifier": "stop"},
    "both, flagged": {"tagger": "flag", "classifier": "flag"},
}
"""What a policy's models do; as names of policies, without spaces and commas."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. Times are medians over the streams of a round, and then over rounds.

    Attributes:
        policy: that was asked for.
        first_ms: until the first text.
        token_ms: between the texts of two tokens, the mean of a stream.
        pause_ms: between the texts of two tokens, the longest of a stream.
        last_ms: until the last text.
        tokens_per_second: of all streams.
        times_none: the time of a round, relative to that without a policy.
        rounds: how many there were.
    """

    policy: str
    first_ms: float
    token_ms: float
    pause_ms: float
    last_ms: float
    tokens_per_second: float
    times_none: float
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    for name in ("writer", "tagger", "classifier"):
        parser.add_argument(f"--{name}", type=Path, metavar="BUNDLE", help=f"the {name}")
    add_number(parser, "--streams", 16, "N", "at a time")
    add_number(parser, "--tokens", 200, "N", "of a stream")
    add_number(parser, "--every", EVERY, "N", "words of the largest window")
    add_number(parser, "--context", CONTEXT, "N", "words beside them")
    add_number(parser, "--seconds", 240.0, "S", "measuring time")
    add_work(parser, "runs/policies", "where checkpoints and bundles stay")
    add_seed(parser)
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0."""
    console = Console()
    models = {
        "writer": args.writer or _writer(args),
        "tagger": args.tagger or _encoder(args, "tagger"),
        "classifier": args.classifier or _encoder(args, "classifier"),
    }
    manifest = json.loads((models["classifier"] / "maskdial.json").read_text(encoding="utf-8"))
    guards = {name: models[name] for name in ("tagger", "classifier")}
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.toml"
        policy.write_text(_policy_file(manifest["labels"][0], args), encoding="utf-8")
        with (
            running_server(models, policy=policy, slots=args.streams) as server,
            running_server(guards) as second,
        ):
            section = asyncio.run(_measure(server.url, second.url, args))
    section.show(console)
    console.print(f"{machine()}, load {load_averages()}")
    write_reports(args, [section], {"seed": args.seed})
    return 0


def _policy_file(label: str, args: argparse.Namespace) -> str:
    """All policies; no score reaches their thresholds."""
    lines = []
    for policy, rules in _POLICIES.items():
        lines.append(f"[policies.{_named(policy)}]")
        for model, action in rules.items():
            lines += [
                f"[[policies.{_named(policy)}.rules]]",
                f'name = "{model}"',
                'on = "output"',
                f'model = "{model}"',
                f'action = "{action}"',
                "threshold = 1.0",
                "timeout = 600",
                f"every = {args.every}",
                f"context = {args.context}",
            ]
            if model == "classifier":
                lines.append(f'labels = ["{label}"]')
    return "\n".join(lines)


def _named(policy: str) -> str:
    return policy.replace(", ", "-")


@dataclass(frozen=True, slots=True)
class _Round:
    seconds: float
    tokens: int
    first: float
    token: float
    pause: float
    last: float


async def _measure(url: str, second: str, args: argparse.Namespace) -> Section:
    policies = (_NONE, *_POLICIES, _SECOND)
    async with (
        httpx.AsyncClient(base_url=url, timeout=600) as client,
        httpx.AsyncClient(base_url=second, timeout=600) as guards,
    ):
        seeds = itertools.count(args.seed * 1_000_000)  # verdicts on equal texts are kept
        turns = {name: partial(_round, client, guards, name, args, seeds) for name in policies}
        rounds = await take_turns(turns, args.seconds)
    rows = []
    for name in policies:
        of = rounds[name]
        rows.append(
            Row(
                name,
                median(each.first * 1e3 for each in of),
                median(each.token * 1e3 for each in of),
                median(each.pause * 1e3 for each in of),
                median(each.last * 1e3 for each in of),
                median(each.tokens / each.seconds for each in of),
                median_ratio((each.seconds for each in of), (e.seconds for e in rounds[_NONE])),
                len(of),
            )
        )
    findings = [
        f"{row.policy}: {row.times_none:.2f} times the time without a policy" for row in rows[1:]
    ]
    question = f"{args.streams} streams of {args.tokens} tokens under a policy"
    return Section("policies", question, len(rounds[_NONE]), tuple(rows), tuple(findings))


async def _round(
    client: httpx.AsyncClient,
    guards: httpx.AsyncClient,
    policy: str,
    args: argparse.Namespace,
    seeds: Iterator[int],
) -> _Round:
    began = time.perf_counter()
    if policy == _SECOND:
        streams = [_judged(client, guards, args, next(seeds)) for _ in range(args.streams)]
    else:
        streams = [_told(client, policy, args, next(seeds)) for _ in range(args.streams)]
    told = await asyncio.gather(*streams)
    seconds = time.perf_counter() - began
    return _Round(
        seconds,
        args.streams * args.tokens,
        statistics.median(times[0] - start for start, times in told),
        statistics.median((times[-1] - times[0]) / (len(times) - 1) for _, times in told),
        max(b - a for _, times in told for a, b in itertools.pairwise(times)),
        statistics.median(times[-1] - start for start, times in told),
    )


async def _told(
    client: httpx.AsyncClient, policy: str, args: argparse.Namespace, seed: int
) -> tuple[float, list[float]]:
    """When a stream was asked for, and when each of its texts came."""
    start = time.perf_counter()
    texts = _stream(client, policy, args, seed)
    return start, [time.perf_counter() async for _ in texts]


async def _judged(
    client: httpx.AsyncClient, guards: httpx.AsyncClient, args: argparse.Namespace, seed: int
) -> tuple[float, list[float]]:
    """The same where whoever reads the stream asks a second server about its windows."""
    start = time.perf_counter()
    words = Words()
    kinds = {"/token-classify": Both, "/classify": Before}
    windows = {path: kind(args.every, args.context) for path, kind in kinds.items()}
    models = {"/token-classify": "tagger", "/classify": "classifier"}
    cleared, ends, times = dict.fromkeys(windows, 0), list[int](), list[float]()

    async def judge(path: str) -> None:
        for window in windows[path].next(words):
            body = {"model": models[path], "inputs": words.text[window.start : window.end]}
            (await guards.post(path, json=body)).raise_for_status()
            cleared[path] = window.cleared

    async def release() -> None:
        await asyncio.gather(*map(judge, windows))
        while len(times) < len(ends) and ends[len(times)] <= min(cleared.values()):
            times.append(time.perf_counter())

    async for text in _stream(client, _NONE, args, seed):
        words.add(text)
        ends.append(len(words.text))
        await release()
    words.finish()
    await release()
    return start, times + [time.perf_counter()] * (len(ends) - len(times))


async def _stream(
    client: httpx.AsyncClient, policy: str, args: argparse.Namespace, seed: int
) -> AsyncIterator[str]:
    """The texts of a stream."""
    body: dict[str, Any] = {
        "model": "writer",
        "prompt": "Once upon a time there was a king who",
        "max_tokens": args.tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": seed,
        "stream": True,
    }
    headers = {} if policy == _NONE else {"x-policy": _named(policy)}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        if reply.status_code != 200:
            raise LoadTestError((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if line.startswith('data: {"error"'):
                raise LoadTestError(line)
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def _writer(args: argparse.Namespace) -> Path:
    (shape,) = find(("135m",))
    folder = args.work / f"writer-{args.seed}"
    bundle = folder.with_name(f"{folder.name}-int8")
    if not bundle.exists():
        build_checkpoint(folder, llama_config(**shape.measures), args.seed)
        export_random(folder, bundle, "int8")
    return Path(bundle)


def _encoder(args: argparse.Namespace, name: str) -> Path:
    """A tagger in the shape of MiniLM, 22 million parameters, or a classifier in that of
    DeBERTa-base, 184 million.
    """
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        BertConfig,
        PreTrainedTokenizerFast,
    )

    from loadtests.checkpoints import MASKED_WORDS, masked_tokenizer

    folder = args.work / f"{name}-{args.seed}"
    bundle = folder.with_name(f"{folder.name}-int8")
    if bundle.exists():
        return Path(bundle)
    torch.manual_seed(args.seed)
    if name == "tagger":
        labels = {"id2label": {0: "O", 1: "B-NAME", 2: "I-NAME"}}
        config: Any = BertConfig(
            vocab_size=MASKED_WORDS,
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            **labels,
        )
        model = AutoModelForTokenClassification.from_config(config)
    else:
        config = DEBERTA.config
        config.id2label = {0: "BENIGN", 1: "INJECTION"}
        model = AutoModelForSequenceClassification.from_config(config)
    with new_folder(folder) as path:
        model.eval().save_pretrained(path)
        PreTrainedTokenizerFast(
            tokenizer_object=masked_tokenizer(),
            model_max_length=512,
            pad_token="[PAD]",
            unk_token="[UNK]",
            cls_token="[CLS]",
            sep_token="[SEP]",
            mask_token="[MASK]",
        ).save_pretrained(path)
    export_random(folder, bundle, "int8")
    return Path(bundle)
