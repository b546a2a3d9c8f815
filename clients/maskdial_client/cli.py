"""The commands ``maskdial fill``, ``classify``, ``embed``, ``score``, ``generate`` and ``chat``.

Each command has a function that adds its arguments to a parser, and one that runs it and returns
the exit status: 0, 1 after an error (one sentence on standard error), 130 after Ctrl-C, or 141 if
standard output is a pipe that was closed.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from maskdial_client import (
    Classification,
    Client,
    FillMaskResult,
    MaskdialClientError,
    TextScore,
)
from maskdial_client.chat import Chat
from maskdial_client.terminal import printable, printable_json
from maskdial_client.transport import DEFAULT_URL

T = TypeVar("T")

_CHAT_TOKENS = 4096  # of a reply; a server's own default is meant for text that is written on


def add_fill_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial fill``."""
    _add_text_argument(parser, "text with mask tokens, such as [MASK]")
    parser.add_argument("--top-k", type=int, metavar="K", help="number of candidates per mask")
    parser.add_argument(
        "--target", action="append", metavar="WORD", help="score only this word; repeat for several"
    )
    _add_common_arguments(parser)


def run_fill(args: argparse.Namespace) -> int:
    """Prints the candidates for each mask of each text."""

    def command(client: Client) -> None:
        texts = _texts(args.text)
        results = client.fill_mask(texts, model=args.model, top_k=args.top_k, targets=args.target)
        _print_results(args, texts, results, _print_fills)

    return _run(args, command)


def add_classify_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial classify``."""
    _add_text_argument(parser, "text to classify")
    parser.add_argument(
        "--pair", metavar="TEXT", help="second text, for models that classify pairs"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="number of labels per text")
    parser.add_argument(
        "--function-to-apply",
        choices=("softmax", "sigmoid", "none"),
        help="how logits become scores (default: by the model's problem type)",
    )
    _add_common_arguments(parser)


def run_classify(args: argparse.Namespace) -> int:
    """Prints the labels of each text."""

    def command(client: Client) -> None:
        texts = _texts(args.text)
        results = client.classify(
            texts if args.pair is None else [(text, args.pair) for text in texts],
            model=args.model,
            top_k=args.top_k,
            function_to_apply=args.function_to_apply,
        )
        _print_results(args, texts, results, _print_labels)

    return _run(args, command)


def add_embed_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial embed``."""
    _add_text_argument(parser, "text to turn into a vector")
    parser.add_argument(
        "--dimensions", type=int, metavar="N", help="keep the first dimensions only (default: all)"
    )
    parser.add_argument(
        "--prompt-name", metavar="NAME", help="the model's prompt to put before every text"
    )
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="truncate texts that exceed the model's maximum length",
    )
    _add_common_arguments(parser)


def run_embed(args: argparse.Namespace) -> int:
    """Prints the vector of each text, as JSON on a line."""

    def command(client: Client) -> None:
        vectors = client.embed(
            _texts(args.text),
            model=args.model,
            dimensions=args.dimensions,
            prompt_name=args.prompt_name,
            truncate=args.truncate or None,
        )
        if args.json:
            _print_json(vectors)
            return
        for vector in vectors:
            print(json.dumps(vector))

    return _run(args, command)


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial score``."""
    _add_text_argument(parser, "text to score")
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="truncate texts that exceed the model's maximum length",
    )
    _add_common_arguments(parser)


def run_score(args: argparse.Namespace) -> int:
    """Prints the log-probability of each token of each text, and their sum."""

    def command(client: Client) -> None:
        texts = _texts(args.text)
        results = client.score(texts, model=args.model, truncate=args.truncate or None)
        _print_results(args, texts, results, _print_score)

    return _run(args, command)


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial generate``."""
    parser.add_argument("prompt", help="text to continue; - reads standard input")
    parser.add_argument("--stream", action="store_true", help="print the text as it is generated")
    _add_sampling_arguments(parser)
    output = parser.add_argument_group("constrained output").add_mutually_exclusive_group()
    output.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="generate JSON that matches this schema"
    )
    output.add_argument(
        "--regex",
        metavar="PATTERN",
        help="generate text that matches this regular expression in full",
    )
    request = parser.add_argument_group("request options")
    request.add_argument(
        "--deadline",
        type=_positive_seconds,
        metavar="S",
        help="timeout in seconds of the whole request, enforced by the server",
    )
    request.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="of a client's requests, those with a lower number start first (default: 0)",
    )
    _add_common_arguments(parser)


def run_generate(args: argparse.Namespace) -> int:
    """Prints the continuation of a prompt, at once or token by token."""

    def command(client: Client) -> None:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        parameters = _sampling_options(args) | {
            "grammar": _grammar(args),
            "deadline": args.deadline,
            "priority": args.priority,
        }
        if args.stream:
            _print_stream(client, prompt, parameters, as_json=args.json)
        elif args.json:
            _print_json(client.generate(prompt, details=True, **parameters))
        else:
            print(printable(client.generate(prompt, **parameters).generated_text, keep="\n\t"))

    return _run(args, command)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial chat``."""
    parser.add_argument(
        "message",
        nargs="*",
        help="a message, whose answer ends the command; - stands for what standard input has; "
        "without one, each line of standard input is answered",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    _add_sampling_arguments(parser)
    _add_connection_arguments(parser)


def run_chat(args: argparse.Namespace) -> int:
    """Answers a message, or the lines of standard input as one conversation."""

    def command(client: Client) -> None:
        parameters = _sampling_options(args)
        if parameters["max_new_tokens"] is None:
            parameters["max_new_tokens"] = _CHAT_TOKENS
        chat = Chat(client, system=args.system, parameters=parameters)
        if args.message:
            words = [sys.stdin.read() if word == "-" else word for word in args.message]
            message = " ".join(words)
            if not message.strip():
                raise ValueError("the message is empty: expected some text to answer")
            chat.answer(message)
        else:
            chat.run()

    return _run(args, command)


# Flag, type, metavar, help
_SAMPLING_OPTIONS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("--max-new-tokens", int, "N", "maximum number of tokens to generate"),
    ("--min-new-tokens", int, "N", "minimum number of tokens to generate"),
    ("--temperature", float, "T", "sampling temperature; 0 is greedy"),
    ("--top-k", int, "K", "sample from the K most likely tokens"),
    ("--top-p", float, "P", "sample from the most likely tokens with a total probability of P"),
    ("--min-p", float, "P", "drop tokens less likely than P times the most likely one"),
    (
        "--typical-p",
        float,
        "P",
        "sample from the most typical tokens with a total probability of P",
    ),
    ("--repetition-penalty", float, "R", "penalty for tokens in the prompt or output; 1 is none"),
    (
        "--frequency-penalty",
        float,
        "F",
        "penalty per occurrence of a token in the output; 0 is none",
    ),
    ("--presence-penalty", float, "F", "penalty for tokens in the output; 0 is none"),
    ("--seed", int, "N", "seed that makes sampling reproducible"),
)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling options")
    for flag, kind, metavar, text in _SAMPLING_OPTIONS:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop at this text; repeat for several"
    )


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The model, and the sampling options as ``Client.generate`` and ``stream`` take them."""
    names = [flag.removeprefix("--").replace("-", "_") for flag, *_ in _SAMPLING_OPTIONS]
    return {name: getattr(args, name) for name in ("model", *names, "stop")}


def _grammar(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.regex is not None:
        return {"type": "regex", "value": args.regex}
    if args.json_schema is None:
        return None
    try:
        return {"type": "json", "value": json.loads(args.json_schema.read_text(encoding="utf-8"))}
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {args.json_schema} as JSON: {error}") from error


def _add_text_argument(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "text", nargs="+", help=f"{text}; - reads standard input, one text per line"
    )


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    _add_connection_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print results as JSON")


def _add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model name, NAME:full or NAME:causal to say which attention mask (default: the only "
        "one that supports the task)",
    )
    parser.add_argument(
        "--server",
        "--url",
        dest="url",
        metavar="URL",
        help=f"URL of the server (default: {DEFAULT_URL})",
    )
    parser.set_defaults(transport=None)
    parser.add_argument(
        "--api-key", metavar="KEY", help="bearer token (default: $MASKDIAL_API_KEY)"
    )
    parser.add_argument(
        "--timeout",
        type=_positive_seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for data from the server before giving up (default: %(default)g)",
    )


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return seconds


def _run(args: argparse.Namespace, command: Callable[[Client], None]) -> int:
    api_key = args.api_key or os.environ.get("MASKDIAL_API_KEY") or None
    try:
        with Client(
            args.url or DEFAULT_URL,
            api_key=api_key,
            timeout=args.timeout,
            transport=args.transport,
        ) as client:
            command(client)
        # Flush here, where BrokenPipeError can still be caught.
        sys.stdout.flush()
    except (MaskdialClientError, ValueError) as error:
        # The server names the field of a body.
        message = str(error).replace('with "model"', "with --model")
        print(f"maskdial: {printable(message)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes standard output again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _texts(arguments: list[str]) -> list[str]:
    if arguments != ["-"]:
        return arguments
    texts = [line.rstrip("\r\n") for line in sys.stdin]
    if not texts:
        raise ValueError("standard input is empty: expected one text per line")
    return texts


def _print_results(
    args: argparse.Namespace, texts: list[str], results: list[T], print_one: Callable[[T], None]
) -> None:
    if args.json:
        _print_json(results)
        return
    for text, result in zip(texts, results, strict=True):
        if len(texts) > 1:
            print(printable(text))
        print_one(result)


def _print_fills(result: FillMaskResult) -> None:
    for number, fills in enumerate(result.masks, start=1):
        if len(result.masks) > 1:
            print(f"mask {number}")
        tokens = [printable(fill.token_str) for fill in fills]
        width = max(map(len, tokens))
        for fill, token in zip(fills, tokens, strict=True):
            print(f"{fill.score:8.4f}  {token:<{width}}  {printable(fill.sequence)}")


def _print_labels(result: Classification) -> None:
    for item in result.labels:
        print(f"{item.score:8.4f}  {printable(item.label)}")


def _print_score(result: TextScore) -> None:
    for token in result.tokens:
        logprob = "-" if token.logprob is None else f"{token.logprob:.4f}"
        print(f"{logprob:>9}  {printable(token.text)}")
    perplexity = "-" if result.perplexity is None else f"{result.perplexity:.4g}"
    method = printable(result.method)
    print(f"{result.log_likelihood:9.4f}  in total, {method}; perplexity {perplexity}")


def _print_stream(
    client: Client, prompt: str, parameters: dict[str, Any], *, as_json: bool
) -> None:
    line_open = False
    try:
        with client.stream(prompt, **parameters) as stream:
            for event in stream:
                if as_json:
                    text = printable_json(json.dumps(dataclasses.asdict(event)) + "\n")
                else:
                    text = printable(event.text, keep="\n\t")
                print(text, end="", flush=True)
                line_open = not as_json
    except MaskdialClientError:
        if line_open:
            print()
        raise
    if line_open:
        print()


def _print_json(result: Any) -> None:
    # json calls its default hook for each dataclass, however deeply nested in lists.
    text = json.dumps(result, default=dataclasses.asdict, ensure_ascii=False, indent=2)
    print(printable_json(text))
