"""``python -m loadtests sessions``: what replicas find of conversations in their prefix caches."""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass

import httpx
from rich.console import Console

from loadtests import LoadTestError, UsageError, count
from loadtests.measurement import Section, add_report_options, load_averages, write_reports
from loadtests.report import percentile
from loadtests.run import is_loopback

DESCRIPTION = (
    "Hold conversations with a running server, some of which begin with the same instructions, and "
    "report the share of their prompts that came from a prefix cache: with a session each "
    "(x-session-id), which a router may keep on one replica, and without."
)
_QUESTION = "share of prompt tokens found in the prefix caches"
_NOTES = (
    "with and without sessions take turns, each with conversations of its own; latencies in ms",
)
_NUM_INSTRUCTIONS = 4
_INSTRUCTION_TOKENS, _TURN_TOKENS, _NEW_TOKENS = 96, 48, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="of the server or proxy (default: %(default)s)",
    )
    parser.add_argument("--model", default="hybrid", help="served model (default: %(default)s)")
    parser.add_argument(
        "--conversations",
        type=count,
        default=24,
        metavar="N",
        help="a round (default: %(default)s)",
    )
    parser.add_argument(
        "--turns",
        type=count,
        default=6,
        metavar="N",
        help="of a conversation (default: %(default)s)",
    )
    parser.add_argument(
        "--clients", type=count, default=8, metavar="N", help="at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=count, default=3, metavar="N", help="of each (default: %(default)s)"
    )
    parser.add_argument(
        "--allow-remote", action="store_true", help="load a server on another machine"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the tokens")
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report.

    Raises:
        UsageError: the server is on another machine, and the options do not allow that.
    """
    if not args.allow_remote and not is_loopback(args.url):
        raise UsageError(f"{args.url} is another machine; loading it needs --allow-remote")
    facts = {"load": load_averages(), "seed": args.seed}
    rows = asyncio.run(_measure(args))
    section = Section("sessions", _QUESTION, args.rounds, rows, tuple(map(_finding, rows)), _NOTES)
    section.show(Console())
    write_reports(args, [section], facts)
    return 0


@dataclass(frozen=True, slots=True)
class Row:
    """All rounds of one way of routing; ``possible`` is what one endless cache would have had."""

    routing: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    possible: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Request:
    """One answered request: its prompt's tokens, those from a cache, and how long it took."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float


def _finding(row: Row) -> str:
    return f"{row.routing}: {row.hit_rate:.1%} of the prompt tokens, {row.possible:.1%} possible"


async def _measure(args: argparse.Namespace) -> tuple[Row, ...]:
    draw = random.Random(args.seed)
    found: dict[bool, list[Request]] = {True: [], False: []}
    async with httpx.AsyncClient(base_url=args.url, timeout=120) as http:
        for number in range(args.rounds):
            for sessions in (True, False) if number % 2 else (False, True):
                found[sessions] += await _round(http, args, draw, sessions=sessions)
    return tuple(_row(name, found[key], args) for name, key in (("session", True), ("none", False)))


def _row(routing: str, requests: list[Request], args: argparse.Namespace) -> Row:
    prompt = sum(request.prompt_tokens for request in requests)
    cached = sum(request.cached_tokens for request in requests)
    # Each conversation has to be read once, and so have the instructions that several share.
    new = args.conversations * args.turns * _TURN_TOKENS
    new += min(_NUM_INSTRUCTIONS, args.conversations) * _INSTRUCTION_TOKENS
    seconds = sorted(request.seconds for request in requests)
    return Row(
        routing=routing,
        requests=len(requests),
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_rate=cached / prompt,
        possible=1 - args.rounds * new / prompt,
        p50=percentile(seconds, 50) * 1e3,
        p99=percentile(seconds, 99) * 1e3,
    )


async def _round(
    http: httpx.AsyncClient, args: argparse.Namespace, draw: random.Random, *, sessions: bool
) -> list[Request]:
    instructions = [_tokens(draw, _INSTRUCTION_TOKENS) for _ in range(_NUM_INSTRUCTIONS)]
    free = asyncio.Semaphore(args.clients)

    async def hold(number: int, history: list[int], turns: list[list[int]]) -> list[Request]:
        headers = {"x-session-id": f"{number}-{draw.random()}"} if sessions else {}
        async with free:
            answered = []
            for turn in turns:
                history += turn
                answered.append(await _ask(http, args.model, history, headers))
            return answered

    conversations = [
        hold(
            number,
            [*instructions[number % _NUM_INSTRUCTIONS]],
            [_tokens(draw, _TURN_TOKENS) for _ in range(args.turns)],
        )
        for number in range(args.conversations)
    ]
    return [request for held in await asyncio.gather(*conversations) for request in held]


def _tokens(draw: random.Random, number: int) -> list[int]:
    return [draw.randrange(300, 4000) for _ in range(number)]


async def _ask(
    http: httpx.AsyncClient, model: str, prompt: list[int], headers: dict[str, str]
) -> Request:
    body = {"model": model, "prompt": prompt, "max_tokens": _NEW_TOKENS}
    started = time.perf_counter()
    reply = await http.post("/v1/completions", json=body, headers=headers)
    seconds = time.perf_counter() - started
    if reply.status_code != 200:
        raise LoadTestError(f"{reply.status_code}: {reply.text}")
    usage = reply.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Request(usage["prompt_tokens"], cached, seconds)
