"""The `maskdial` command."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import maskdial
from maskdial import logs
from maskdial.config import Config, default_text, load_config
from maskdial.errors import ConfigError, MaskdialError
from maskdial.models.bundle import Bundle, load_bundles
from maskdial_client import cli as client_cli

Command = Callable[[argparse.Namespace], int]

_METAVARS = {
    "model_dir": "DIR",
    "uds": "FILE",
    "ssl_certfile": "FILE",
    "ssl_keyfile": "FILE",
    "root_path": "PREFIX",
    "forwarded_allow_ips": "ADDRESSES",
    "api_key_file": "FILE",
    "admin_key": "KEY",
    "metrics_key": "KEY",
    "otlp_endpoint": "URL",
}
_REPEATED = {
    "models": ("--model", "NAME=PATH"),
    "api_keys": ("--api-key", "KEY"),
    "cors_allow_origins": ("--cors-allow-origin", "ORIGIN"),
}
"""Flags that may be repeated, by the setting that has all their values."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        parser = _parser(arguments[0] if arguments else "")
        options = parser.parse_args(arguments)
        command: Command = options.command
        return command(options)
    except MaskdialError as error:
        print(f"maskdial: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("maskdial: interrupted", file=sys.stderr)
        return 130


def _parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="maskdial", description="Serves masked and causal language models."
    )
    parser.add_argument("--version", action="version", version=maskdial.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, help_: str, run: Command) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:])
        command.set_defaults(command=run)
        return command

    _add_serve_arguments(add("serve", "start the server", _serve))
    export = add("export", "export a Hugging Face checkpoint to a bundle", _export)
    if chosen == "export":
        # Its arguments are the exporter's own, which a serving installation does not carry.
        _add_export_arguments(export)
    ray = add("ray", "serve from the replicas of a Ray cluster", _ray)
    if chosen == "ray":
        _add_ray_arguments(ray)
    inspect = add("inspect", "show the contents of a bundle", _inspect)
    inspect.add_argument("bundle", type=Path, help="bundle folder")
    inspect.add_argument(
        "--json",
        action="store_true",
        help="print the manifest as JSON, a list for a bundle with two; tool_format and "
        "thinking_marks are those that the server uses",
    )
    client_cli.add_fill_arguments(
        add("fill", "fill the masks of a text (needs a running server)", client_cli.run_fill)
    )
    client_cli.add_classify_arguments(
        add("classify", "classify a text (needs a running server)", client_cli.run_classify)
    )
    client_cli.add_score_arguments(
        add("score", "score a text's likelihood (needs a running server)", client_cli.run_score)
    )
    client_cli.add_generate_arguments(
        add("generate", "continue a prompt (needs a running server)", client_cli.run_generate)
    )
    client_cli.add_chat_arguments(
        add("chat", "chat with a model (needs a running server)", client_cli.run_chat)
    )
    return parser


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of `Config`, described by the field."""
    parser.epilog = (
        "Each flag is also an environment variable (MASKDIAL_PORT) and a key of the TOML file "
        "(port). Flags override variables, variables override the file."
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with any of these settings"
    )
    for name, field in Config.model_fields.items():
        if name in _REPEATED:
            flag, metavar = _REPEATED[name]
            parser.add_argument(
                flag,
                dest=name,
                action="append",
                metavar=metavar,
                default=argparse.SUPPRESS,
                help=f"{field.description}; may be repeated",
            )
            continue
        options: dict[str, Any] = {"action": "store"}
        if field.annotation in (int, float, int | None, float | None):
            options["metavar"] = "N"
        elif name in _METAVARS:
            options["metavar"] = _METAVARS[name]
        elif choices := get_args(field.annotation):
            options["metavar"] = "|".join(map(str, choices))
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            default=argparse.SUPPRESS,
            help=f"{field.description} (default: {default_text(name)})",
            **options,
        )


def _serve(options: argparse.Namespace) -> int:
    from maskdial.http.server import Server  # the other commands start faster without it

    flags = {name: value for name, value in vars(options).items() if name in Config.model_fields}
    config = load_config(flags, options.config)
    logs.configure(config.log_level, config.log_format)
    server = Server(config, ends_process=True)
    server.run()
    if server.failure is not None or not server.started:
        return 1
    return 0


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    # Read when torch is imported. Otherwise its idle threads wait in loops, which on a busy machine
    # takes several times as long as the export's own work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import maskdial_export.cli
    except ImportError as error:
        raise ConfigError(
            f"export needs torch and transformers ({error}): pip install 'maskdial[export]'"
        ) from error
    maskdial_export.cli.add_arguments(parser)


def _add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    try:
        import maskdial.ray.cli
    except ImportError as error:
        raise ConfigError(f"this needs Ray Serve ({error}): pip install 'maskdial[ray]'") from error
    maskdial.ray.cli.add_arguments(parser, _add_serve_arguments)


def _ray(options: argparse.Namespace) -> int:
    import maskdial.ray.cli  # it needs Ray, which only this command does

    return maskdial.ray.cli.run(options)


def _export(options: argparse.Namespace) -> int:
    import maskdial_export.cli  # it needs torch, which only this command does

    return maskdial_export.cli.run(options)


def _inspect(options: argparse.Namespace) -> int:
    bundles = load_bundles(options.bundle.name, options.bundle)
    manifests = [
        {**bundle.manifest.model_dump(mode="json"), **_replies(bundle)} for bundle in bundles
    ]
    if options.json:
        print(json.dumps(manifests if len(manifests) > 1 else manifests[0], indent=2))
        return 0
    for manifest in manifests:
        table = Table(show_header=False, box=None)
        for key, value in manifest.items():
            if key not in ("golden", "files"):
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                table.add_row(key, escape(text))
        size = sum((options.bundle / name).stat().st_size for name in manifest["files"])
        files = f"{size / 1e6:.1f} MB in {len(manifest['files'])} files, hashes verified"
        table.add_row("size", files)
        Console().print(table)
    return 0


def _replies(bundle: Bundle) -> dict[str, Any]:
    """How a causal model writes tool calls and reasoning, as the server derives it."""
    if bundle.manifest.family != "causal":
        return {}
    # The other commands start faster without them.
    from maskdial.causal.tools import ReplyFormat
    from maskdial.models.loading import read_chat_template
    from maskdial.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens)
    found = ReplyFormat.of_bundle(bundle, tokenizer, read_chat_template(bundle, tokenizer))
    return {
        "tool_format": None if found.calls is None else found.calls.to_json(),
        "thinking_marks": found.thinking and [found.thinking.begin, found.thinking.end],
    }


if __name__ == "__main__":
    sys.exit(main())
