"""The command line of the load tests: ``python -m loadtests run``, ``engine`` and others."""

import argparse
import asyncio
import ipaddress
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from loadtests.agreement.arguments import add_agreement_parser
from loadtests.arguments import count, positive
from loadtests.arrivals import poisson_schedule
from loadtests.batching.arguments import add_batching_parser
from loadtests.compare.arguments import add_compare_parser
from loadtests.engine.arguments import add_engine_parser
from loadtests.errors import LoadTestError
from loadtests.overhead.arguments import add_overhead_parser
from loadtests.report import Report, Settings, make_report
from loadtests.runner import Limits, Runner
from loadtests.scaling.arguments import add_scaling_parser
from loadtests.scenarios import SCENARIOS, draw_jobs
from loadtests.sender import Sender, load_client
from loadtests.terminal import print_report, progress_bar
from maskdial_client.errors import MaskdialClientError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one load test, or measures the engine of a bundle.

    Returns 0; 1 if a request failed and --allow-errors was not given, or no run could be made; 130
    after Ctrl-C. Wrong arguments exit with 2.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "engine":
        from loadtests.engine.command import run_engine  # with the server and ONNX Runtime

        return run_engine(args)
    if args.command == "batching":
        from loadtests.batching.command import run_batching  # likewise

        return run_batching(args)
    if args.command == "overhead":
        from loadtests.overhead.command import run_overhead

        return run_overhead(args)
    if args.command == "scaling":
        from loadtests.scaling.command import run_scaling

        return run_scaling(args)
    if args.command == "compare":
        from loadtests.compare.command import run_compare  # likewise

        return run_compare(args)
    if args.command == "agreement":
        from loadtests.agreement.command import run_agreement  # with torch as well

        return run_agreement(args)
    settings = Settings(
        url=args.url,
        scenario=args.scenario,
        model=args.model,
        rate=args.rate,
        duration=args.duration,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        timeout=args.timeout,
        drain_timeout=args.drain_timeout,
        max_in_flight=args.max_in_flight,
    )
    if settings.model is not None and settings.scenario == "mixed":
        parser.error("--model names one model, and the mixed scenario needs several")
    if not args.allow_remote and not is_loopback(settings.url):
        parser.error(
            f"{settings.url} is not this machine; a load test of another one needs --allow-remote"
        )
    try:
        report = asyncio.run(run_load_test(settings, Console(stderr=True)))
        if args.output is not None:
            args.output.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    except (LoadTestError, MaskdialClientError, OSError) as error:
        print(f"loadtests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtests: interrupted, no report", file=sys.stderr)
        return 130
    print_report(Console(), report)
    return 1 if report.failed and not args.allow_errors else 0


async def run_load_test(settings: Settings, console: Console) -> Report:
    """Checks that the server is ready, then runs. Shows progress on the console."""
    schedule = poisson_schedule(settings.rate, settings.duration, settings.seed)
    if not schedule:
        raise LoadTestError("no request falls into so short a run: raise --rate or --duration")
    jobs = draw_jobs(settings.scenario, len(schedule), settings.seed)
    async with load_client(settings.url) as client:
        try:
            async with asyncio.timeout(settings.timeout):
                health = await client.health()
        except TimeoutError as error:
            raise LoadTestError(f"the server at {settings.url} does not answer") from error
        if not health.ready:
            raise LoadTestError(f"the server at {settings.url} is not ready: {health.status}")
        send = Sender(client, model=settings.model, max_new_tokens=settings.max_new_tokens)
        limits = Limits(settings.timeout, settings.drain_timeout, settings.max_in_flight)
        with progress_bar(console, len(jobs)) as show:
            run = await Runner(send, limits, show).run(jobs, schedule, settings.duration)
    return make_report(settings, run)


def is_loopback(url: str) -> bool:
    """Whether a URL's host is ``localhost`` or a loopback address, by its text alone."""
    host = urlsplit(url).hostname
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests",
        description="Open-loop load tests, and measurements of the engine.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="load a running server and report latencies",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    run.add_argument("--scenario", choices=SCENARIOS, default="mixed", help="what to ask for")
    run.add_argument("--model", metavar="NAME", help="served model, where several fit")
    run.add_argument("--rate", type=positive, default=2.0, metavar="R", help="requests per second")
    run.add_argument("--duration", type=positive, default=30.0, metavar="S", help="seconds of load")
    run.add_argument("--seed", type=int, default=0, help="draws the arrivals and the texts")
    run.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="per generation")
    run.add_argument(
        "--timeout", type=positive, default=60.0, metavar="S", help="seconds for one request"
    )
    run.add_argument(
        "--drain-timeout",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds after the load in which open requests may end; then they count as errors",
    )
    run.add_argument(
        "--max-in-flight",
        type=count,
        default=1000,
        metavar="N",
        help="open requests; more wait here, and the wait counts in their latency",
    )
    run.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    run.add_argument(
        "--allow-errors", action="store_true", help="exit with 0 even if requests failed"
    )
    run.add_argument("--allow-remote", action="store_true", help="load a server on another machine")
    add_engine_parser(commands)
    add_batching_parser(commands)
    add_overhead_parser(commands)
    add_scaling_parser(commands)
    add_compare_parser(commands)
    add_agreement_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
