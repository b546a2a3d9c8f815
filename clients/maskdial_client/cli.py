"""The terminal front end: ``maskdial fill``, ``classify``, ``score``, ``generate``, ``chat``.

For each command there is a function that adds its arguments to a parser and one that runs it and
returns the exit status: 0, 1 for an error (one sentence on standard error), 130 after Ctrl-C, 141
when the reader of standard output went away, as for any program in a pipe.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maskdial_client.chat import Chat
from maskdial_client.client import Client
from maskdial_client.errors import MaskdialClientError
from maskdial_client.results import Classification, FillMaskResult, TextScore
from maskdial_client.transport import DEFAULT_URL


def add_fill_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``maskdial fill``."""
    parser.add_argument("text", nargs="+", help="text with one or more [MASK]; - reads lines")
    parser.add_argument("--top-k", type=int, metavar="K", help="candidates for each mask")
    parser.add_argument(
        "--target", action="append", metavar="WORD", help="score only this word; may be repeated"
    )
    _add_common_arguments(parser)


def run_fill(args: argparse.Namespace) -> int:
    """Prints the candidates for every mask of every text."""

    def command(client: Client) -> None:
        texts = _texts(args.text)
        results = client.fill_mask(texts, model=args.model, top_k=args.top_k, targets=args.target)
        if args.json:
            _print_json(results)
            return
        for text, result in zip(texts, results, strict=True):
            _print_fills(text, result, heading=len(texts) > 1)

    return _run(args, command)


def add_classify_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``maskdial classify``."""
    parser.add_argument("text", nargs="+", help="text to classify; - reads lines")
    parser.add_argument("--pair", metavar="TEXT", help="second text, for models that take two")
    parser.add_argument("--top-k", type=int, metavar="K", help="labels for each text")
    parser.add_argument(
        "--function-to-apply",
        choices=("softmax", "sigmoid", "none"),
        help="what turns logits into scores; default: by the model's problem type",
    )
    _add_common_arguments(parser)


def run_classify(args: argparse.Namespace) -> int:
    """Prints the labels of every text."""

    def command(client: Client) -> None:
        texts = _texts(args.text)
        results = client.classify(
            texts if args.pair is None else [(text, args.pair) for text in texts],
            model=args.model,
            top_k=args.top_k,
            function_to_apply=args.function_to_apply,
        )
        if args.json:
            _print_json(results)
            return
        for text, result in zip(texts, results, strict=True):
            _print_labels(text, result, heading=len(texts) > 1)

    return _run(args, command)


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``maskdial score``."""
    parser.add_argument("text", nargs="+", help="text to score; - reads lines")
    parser.add_argument(
        "--truncate", action="store_true", help="cut a text that is longer than the model"
    )
    _add_common_arguments(parser)


def run_score(args: argparse.Namespace) -> int:
    """Prints the log-probability of every token of every text, and what they add up to."""

    def command(client: Client) -> None:
        texts = _texts(args.text)
        results = client.score(texts, model=args.model, truncate=args.truncate or None)
        if args.json:
            _print_json(results)
            return
        for text, result in zip(texts, results, strict=True):
            _print_score(text, result, heading=len(texts) > 1)

    return _run(args, command)


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``maskdial generate``."""
    parser.add_argument("prompt", help="text to go on from; - reads standard input")
    parser.add_argument("--stream", action="store_true", help="print the text as it is generated")
    _add_sampling_arguments(parser)
    output = parser.add_argument_group("constrained output").add_mutually_exclusive_group()
    output.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="JSON that this schema describes"
    )
    output.add_argument("--regex", metavar="PATTERN", help="text that matches as a whole")
    request = parser.add_argument_group("the request")
    request.add_argument(
        "--deadline", type=_positive_seconds, metavar="S", help="seconds that it may take in all"
    )
    request.add_argument("--priority", type=int, metavar="N", help="lower is earlier; 0")
    _add_common_arguments(parser)


def run_generate(args: argparse.Namespace) -> int:
    """Prints the text that follows the prompt, in one piece or token by token."""

    def command(client: Client) -> None:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        parameters = _stream_options(args) | {
            "grammar": _grammar(args),
            "deadline": args.deadline,
            "priority": args.priority,
        }
        if args.stream:
            _print_stream(client, prompt, parameters, as_json=args.json)
        elif args.json:
            _print_json(client.generate(prompt, details=True, **parameters))
        else:
            print(client.generate(prompt, **parameters).generated_text)

    return _run(args, command)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``maskdial chat``."""
    parser.add_argument("--system", metavar="TEXT", help="instructions for the whole conversation")
    _add_sampling_arguments(parser)
    _add_connection_arguments(parser)


def run_chat(args: argparse.Namespace) -> int:
    """Answers the lines of standard input, each in the conversation so far."""

    def command(client: Client) -> None:
        Chat(client, system=args.system, parameters=_stream_options(args)).run()

    return _run(args, command)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the text is generated")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens to generate")
    group.add_argument("--min-new-tokens", type=int, metavar="N", help="fewest tokens to generate")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens that add up to P"
    )
    group.add_argument(
        "--min-p", type=float, metavar="P", help="and at least P times as likely as the likeliest"
    )
    group.add_argument(
        "--typical-p", type=float, metavar="P", help="sample from typical tokens that add up to P"
    )
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="1 is none")
    group.add_argument(
        "--frequency-penalty", type=float, metavar="F", help="for each time it was said; 0 is none"
    )
    group.add_argument(
        "--presence-penalty", type=float, metavar="F", help="if it was said; 0 is none"
    )
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same text")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end at this text; may be repeated"
    )


def _stream_options(args: argparse.Namespace) -> dict[str, Any]:
    """What ``Client.generate`` and ``Client.stream`` take alike."""
    names = (
        "model",
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "stop",
    )
    return {name: getattr(args, name) for name in names}


def _grammar(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.regex is not None:
        return {"type": "regex", "value": args.regex}
    if args.json_schema is None:
        return None
    try:
        return {"type": "json", "value": json.loads(args.json_schema.read_text(encoding="utf-8"))}
    except (OSError, ValueError) as error:
        raise ValueError(f"{args.json_schema} is not a readable JSON file: {error}") from error


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    _add_connection_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="served model; default: the one that fits")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help="bearer token; default: $MASKDIAL_API_KEY, if set"
    )
    parser.add_argument(
        "--timeout",
        type=_positive_seconds,
        default=60.0,
        metavar="S",
        help="seconds that the server may stay silent (default: %(default)g)",
    )


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return seconds


def _run(args: argparse.Namespace, command: Callable[[Client], None]) -> int:
    api_key = args.api_key or os.environ.get("MASKDIAL_API_KEY") or None
    try:
        with Client(args.url, api_key=api_key, timeout=args.timeout) as client:
            command(client)
        # Here, so that a closed pipe is met while it can still be caught.
        sys.stdout.flush()
    except (MaskdialClientError, ValueError) as error:
        print(f"maskdial: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes standard output once more at exit: that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _texts(arguments: list[str]) -> list[str]:
    if arguments != ["-"]:
        return arguments
    texts = [line.rstrip("\r\n") for line in sys.stdin]
    if not texts:
        raise ValueError("standard input is empty")
    return texts


def _print_fills(text: str, result: FillMaskResult, *, heading: bool) -> None:
    if heading:
        print(text)
    for number, fills in enumerate(result.masks, start=1):
        if len(result.masks) > 1:
            print(f"mask {number}")
        width = max(len(fill.token_str) for fill in fills)
        for fill in fills:
            print(f"{fill.score:8.4f}  {fill.token_str:<{width}}  {fill.sequence}")


def _print_labels(text: str, result: Classification, *, heading: bool) -> None:
    if heading:
        print(text)
    for item in result.labels:
        print(f"{item.score:8.4f}  {item.label}")


def _print_score(text: str, result: TextScore, *, heading: bool) -> None:
    if heading:
        print(text)
    for token in result.tokens:
        logprob = "-" if token.logprob is None else f"{token.logprob:.4f}"
        print(f"{logprob:>9}  {token.text}")
    perplexity = "-" if result.perplexity is None else f"{result.perplexity:.4g}"
    print(f"{result.log_likelihood:9.4f}  in all, {result.method}; perplexity {perplexity}")


def _print_stream(
    client: Client, prompt: str, parameters: dict[str, Any], *, as_json: bool
) -> None:
    line_open = False
    try:
        with client.stream(prompt, **parameters) as stream:
            for event in stream:
                text = json.dumps(dataclasses.asdict(event)) + "\n" if as_json else event.text
                print(text, end="", flush=True)
                line_open = not as_json
    except MaskdialClientError:
        if line_open:
            print()
        raise
    if line_open:
        print()


def _print_json(result: Any) -> None:
    # json has no dataclasses; its default hook meets them wherever they stand in lists.
    print(json.dumps(result, default=dataclasses.asdict, ensure_ascii=False, indent=2))
