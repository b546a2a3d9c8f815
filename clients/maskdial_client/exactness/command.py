"""The command ``maskdial exactness URL``: runs the checks and prints a table of the outcomes."""

import argparse
import asyncio
import ipaddress
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

import httpx

from maskdial_client.exactness.asking import FailedError, NotAskedError, Server
from maskdial_client.exactness.checks import Plan, number_checks, text_checks
from maskdial_client.exactness.comparing import EQUAL, Outcome
from maskdial_client.exactness.questions import questions
from maskdial_client.terminal import printable
from maskdial_client.transport import http_options

_MOST_QUESTIONS, _MOST_AT_ONCE, _MOST_TOKENS = 64, 64, 512
_NOT_RUN = 1
_WIDTH = 44


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial exactness``."""
    parser.epilog = (
        "Exit status: 0, all answers are equal to the last bit; 10, numbers differ; 20, texts or "
        "labels do; 30, answers are missing or do not fit their schema; 1, nothing could be asked."
    )
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--model", default="", metavar="NAME", help="which one (default: the first that is listed)"
    )
    parser.add_argument(
        "--route",
        choices=("completions", "chat", "none"),
        help="where texts come from; none: vectors and labels only (default: /v1/completions if "
        "it answers, otherwise /v1/chat/completions)",
    )
    parser.add_argument(
        "--requests",
        type=_up_to(_MOST_QUESTIONS),
        default=8,
        metavar="N",
        help="different questions, each of which is asked some 30 times (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=_up_to(_MOST_AT_ONCE),
        default=8,
        metavar="N",
        help="the most requests that are open at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=_up_to(_MOST_TOKENS),
        default=32,
        metavar="N",
        help="of each text (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="bearer token (default: $MASKDIAL_API_KEY)"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="of a request (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument(
        "--remote",
        action="store_true",
        help="ask a server on another machine; it is yours, or its owner knows",
    )


def run(options: argparse.Namespace, transport: httpx.AsyncBaseTransport | None = None) -> int:
    """Runs the checks that the options ask for.

    Args:
        options: of `add_arguments`.
        transport: what carries the requests, for tests.
    """
    fault = _fault_of(options.url, remote=options.remote)
    if fault:
        print(f"maskdial: {fault}", file=sys.stderr)
        return _NOT_RUN
    try:
        return asyncio.run(_run(options, transport))
    except (NotAskedError, FailedError) as error:
        print(f"maskdial: {printable(str(error))}", file=sys.stderr)
        return _NOT_RUN
    except KeyboardInterrupt:
        return 130


async def _run(options: argparse.Namespace, transport: httpx.AsyncBaseTransport | None) -> int:
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if not options.json:
            print(_row(outcome), flush=True)

    key = options.api_key or os.environ.get("MASKDIAL_API_KEY")
    async with httpx.AsyncClient(
        **http_options(options.url, key or None, options.timeout, options.concurrency + 1),
        transport=transport,
    ) as http:
        model, writer, refusal = await _writer(http, options)
        asked = questions(options.requests)
        if not options.json:
            what = "vectors and labels only" if writer is None else writer.path
            print(f"{options.url}, model {printable(model) or 'not named'}, {what}")
            if writer is not None and not writer.describes_tokens:
                print("The server tells no log-probabilities: texts are compared, numbers are not.")
            print(f"{'':{_WIDTH}} {'asked':>6} {'other texts':>12} {'other numbers':>14} largest")
        most = options.concurrency
        if writer is not None:
            await text_checks(Plan(writer, asked, most, options.timeout, note))
        reader = Server(http, model, chat=False, max_tokens=options.max_tokens)
        num_routes = await number_checks(Plan(reader, asked, most, options.timeout, note))
    if writer is None and not num_routes:
        raise NotAskedError(f"the server has no route that could be asked; {refusal}")
    worst = max((each.severity for each in outcomes), default=EQUAL)
    if options.json:
        report = {
            "url": options.url,
            "model": model,
            "route": None if writer is None else writer.path,
            "log_probabilities": writer is not None and writer.describes_tokens,
            "severity": worst,
            "checks": [each.to_json() for each in outcomes],
        }
        print(json.dumps(report, indent=2, ensure_ascii=True))
    else:
        print(_summary(outcomes))
    return worst


async def _writer(
    http: httpx.AsyncClient, options: argparse.Namespace
) -> tuple[str, Server | None, str]:
    """The model's name, what asks it for texts, None if it writes none, and then why.

    Raises:
        FailedError: the server does not answer.
    """

    def server(model: str, *, chat: bool) -> Server:
        return Server(http, model, chat=chat, max_tokens=options.max_tokens)

    model = options.model
    if not model:
        try:
            model = next(iter(await server("", chat=False).models()), "")
        except NotAskedError:
            model = ""
    if options.route == "none":
        return model, None, "texts were not wanted"
    refused = NotAskedError("")
    for chat in (False, True) if options.route is None else (options.route == "chat",):
        for describes in (True, False):
            found = server(model, chat=chat)
            found.describes_tokens = describes
            try:
                written = await found.write("Once")
            except NotAskedError as error:
                refused = error
                continue
            found.describes_tokens = bool(written.tokens)
            return model, found, ""
    if options.route is not None:
        raise refused
    return model, None, str(refused)


def _row(outcome: Outcome) -> str:
    name = f"{outcome.check:{_WIDTH}}"
    if outcome.not_checked:
        return f"{name} not checked: {printable(outcome.not_checked)}"
    if outcome.check.endswith("for comparison"):
        row = f"{name} {outcome.num_asked:>6}"
    else:
        numbers = f"{outcome.num_other_numbers}" if outcome.compares_numbers else "-"
        largest = f"{outcome.largest:.2g}" if outcome.compares_numbers else "-"
        row = f"{name} {outcome.num_asked:>6} {outcome.num_other_texts:>12} {numbers:>14} {largest}"
    lines = [row]
    if outcome.first:
        lines.append(f"    {printable(outcome.first)}")
    lines += [f"    {printable(each)}" for each in outcome.broken[:3]]
    if len(outcome.broken) > 3:
        lines.append(f"    and {len(outcome.broken) - 3} more")
    return "\n".join(lines)


def _summary(outcomes: list[Outcome]) -> str:
    asked = sum(each.num_asked for each in outcomes)
    texts = sum(each.num_other_texts for each in outcomes)
    numbers = sum(each.num_other_numbers for each in outcomes)
    broken = sum(len(each.broken) for each in outcomes)
    if not (texts or numbers or broken):
        return f"All answers to {asked} requests are equal, to the last digit that is shown."
    return (
        f"Of {asked} answers, {texts} had other texts and {numbers} other numbers; {broken} failed."
    )


def _fault_of(url: str, *, remote: bool) -> str:
    """Why a server is not asked; empty if it may be."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{printable(url)} is not an http:// or https:// URL"
    if remote or parts.hostname == "localhost":
        return ""
    try:
        local = ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        local = False
    if local:
        return ""
    return (
        f"{printable(parts.hostname)} is another machine: some hundred requests would load it; "
        "with --remote it is asked all the same"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return seconds


def _up_to(most: int) -> Any:
    def read(text: str) -> int:
        number = int(text)
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"must be 1 to {most}")
        return number

    return read
