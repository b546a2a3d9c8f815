"""The `maskdial` command."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

import maskdial
from maskdial import health, logs, prefixes, ps, settings
from maskdial.bundle.manifest import CHAT_TEMPLATE
from maskdial.bundle.starters import starters
from maskdial.config import (
    BRIEF,
    HEADINGS,
    SETTINGS,
    Config,
    default_text,
    load_config,
    model_name_fault,
    repeated,
)
from maskdial.errors import ConfigError, MaskdialError, printable
from maskdial.extras import how_to_install
from maskdial.intake import take_in
from maskdial.model_cache import (
    GGUF,
    VARIABLE,
    cache_folder,
    cached_models,
    remove,
)
from maskdial.runtime.host_limits import reservable_bytes

if TYPE_CHECKING:
    from maskdial.bundle.bundle import Bundle

Command = Callable[[argparse.Namespace], int]

_CLIENT_COMMANDS = {
    "fill": "fill the masks of a text",
    "classify": "classify a text",
    "embed": "turn a text into a vector",
    "score": "score a text's likelihood",
    "generate": "continue a prompt",
    "chat": "chat with a model",
}

_LEAST_ADDRESSES = 512 * 2**20  # bytes

_METAVARS = {
    "model_dir": "DIR",
    "batch_dir": "DIR",
    "policy": "FILE",
    "receipt_key": "FILE",
    "prefix_cache_dir": "DIR",
    "uds": "FILE",
    "ssl_certfile": "FILE",
    "ssl_keyfile": "FILE",
    "root_path": "PREFIX",
    "forwarded_allow_ips": "ADDRESSES",
    "api_key_file": "FILE",
    "admin_key": "KEY",
    "metrics_key": "KEY",
    "otlp_endpoint": "URL",
    "auto_truncate": "off|on|NAMES",
    "host": "HOST",
    "provider": "NAMES",
    "draft": "MODEL",
    "responses_store": "FILE",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = command_parser(arguments[0] if arguments else "").parse_args(arguments)
        command: Command = options.command
        return command(options)
    except MaskdialError as error:
        print(f"maskdial: {printable(error.message)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("; ".join(("maskdial: interrupted", *map(str, interrupt.args))), file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Takes whole names of flags only, and never repeats a value.

    argparse shows all arguments that it does not know: ``--api-keys KEY`` with the key.

    Attributes:
        rare: flags that the help leaves out, but for that of ``--help-all``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.rare: list[argparse.Action] = []

    def error(self, message: str) -> NoReturn:
        """Ends the process with 2, after one sentence: all flags would hide it."""
        hint = "" if "--help" in message or "did you mean" in message else "; see --help"
        self.exit(2, f"{self.prog}: {printable(message)}{hint}\n")

    def format_help(self) -> str:
        """The help, without what is rare."""
        texts = [action.help for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(self.rare, texts, strict=True):
                action.help = text

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses all arguments; ends the process with 2 if some are unknown."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            if not re.fullmatch(r"--[a-z][a-z-]*", flag):
                self.error("there are more arguments than the command takes; see --help")
            self.error(_unknown_flag(flag, self._option_string_actions))
        return options, unknown


def command_parser(chosen: str) -> argparse.ArgumentParser:
    """The parser of all commands; the chosen one has its arguments.

    Those of the others may need packages that are not installed, or slow to import.
    """
    parser = _Parser(prog="maskdial", description="Serves masked and causal language models.")
    parser.add_argument("--version", action="version", version=maskdial.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, help_: str, run: Command) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:])
        command.set_defaults(command=run)
        return command

    _add_serve_arguments(add("serve", "start the server", _serve))
    add("doctor", "tell what this machine and installation have, and what is slow", _doctor)
    ps.add_arguments(add("ps", "list the models of a running server", ps.run))
    health = add("health", "ask the server on this machine whether it is ready", _health)
    _add_health_arguments(health)
    run = add("run", "chat with a model, or have it read a text, without a server", _run)
    run.epilog = (
        "The flags of the command that fits the model follow: those of chat, generate, fill, "
        "classify or embed."
    )
    run.add_argument(
        "source",
        metavar="SOURCE",
        help="a GGUF file, a checkpoint's folder, ORG/NAME of the Hub or ORG/NAME:Q4_K_M, a GGUF "
        "file there, exported the first time; a bundle; or a starter model's name",
    )
    run.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="a text or a message; without one, a model with a chat template chats",
    )
    _add_pull_arguments(add("pull", "download a model and take it into the cache", _pull))
    for name in ("models", "list"):
        add(name, "list the models in the cache", _models).epilog = _CACHE
    _add_rm_arguments(add("rm", "remove models from the cache", _rm))
    prefill = add("prefill", "have a server read a prompt before it is asked for", prefixes.prefill)
    prefixes.add_prefill_arguments(prefill)
    cache = add("cache", "list the prefixes that are on disk, or remove some", prefixes.cache)
    prefixes.add_cache_arguments(cache)
    export = add("export", "export a Hugging Face checkpoint to a bundle", _export)
    if chosen == "export":
        _add_export_arguments(export)
    adapter = add("export-adapter", "export a LoRA adapter of a bundle", _export_adapter)
    if chosen == "export-adapter":
        _add_export_arguments(adapter, adapter=True)
    calibrate = add(
        "calibrate", "find the thresholds of a classifier's labels by labelled texts", _calibrate
    )
    if chosen == "calibrate":
        _add_calibrate_arguments(calibrate)
    evaluate = add("eval", "measure bundles on tasks of lm-evaluation-harness", _evaluate)
    if chosen == "eval":
        _add_evaluate_arguments(evaluate)
    batch = add("batch", "answer a file of requests, without a server", _batch)
    if chosen == "batch":
        _add_batch_arguments(batch)
    verify = add("verify", "check that the replies of a log are the model's", _verify)
    if chosen == "verify":
        _add_verify_arguments(verify)
    ray = add("ray", "serve from the replicas of a Ray cluster, or answer a file there", _ray)
    if chosen == "ray":
        _add_ray_arguments(ray)
    inspect = add("inspect", "show the contents of a bundle", _inspect)
    inspect.add_argument("bundle", type=Path, help="bundle folder")
    inspect.add_argument(
        "--json",
        action="store_true",
        help="print the whole manifest as JSON, a list for a bundle with two; tool_format and "
        "thinking_marks are those that the server uses",
    )
    exactness = add("exactness", "compare a server's answers, alone and in company", _exactness)
    if chosen == "exactness":
        _add_exactness_arguments(exactness)
    for name, help_ in _CLIENT_COMMANDS.items():
        help_ = f"{help_}, with a running server or without"
        client = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:])
        if chosen == name:
            _add_client_arguments(name, client)
    return parser


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of `Config`, described by the field."""
    assert isinstance(parser, _Parser)
    parser.add_argument(
        "--help-all",
        action=_HelpAll,
        help=f"show all {len(SETTINGS)} settings; --help has the {len(BRIEF)} that matter first",
    )
    parser.epilog = (
        "Each flag is also an environment variable (--api-key: MASKDIAL_API_KEY) and a key of the "
        "TOML file (api_key). Flags override variables, variables override the file. Flags that "
        "may be repeated are a list in the file (model: a table), and separated by commas in the "
        "variable. Empty values and unknown names are errors."
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with any of these settings"
    )
    for name, field_name in SETTINGS.items():
        if field_name in HEADINGS:
            group = parser.add_argument_group(HEADINGS[field_name])
        field = Config.model_fields[field_name]
        options: dict[str, Any] = {"action": _Once}
        default = default_text(field_name)
        help_ = f"{field.description} (default: {default})" if default else str(field.description)
        if (mark := repeated(field_name)) is not None:
            options = {"action": "append", "metavar": mark.metavar}
            help_ = f"{field.description}; may be repeated"
        elif field.annotation in (int, float, int | None, float | None):
            options["metavar"] = "N"
        elif name in _METAVARS:
            options["metavar"] = _METAVARS[name]
        elif get_origin(field.annotation) is Literal:
            options["metavar"] = "|".join(map(str, get_args(field.annotation)))
        flag = group.add_argument(
            settings.flag(name), dest=name, default=argparse.SUPPRESS, help=help_, **options
        )
        if name not in BRIEF:
            parser.rare.append(flag)


class _HelpAll(argparse.Action):
    """Prints the help with all flags, and ends the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, _Parser)
        parser.rare = []
        parser.print_help()
        parser.exit()


class _Once(argparse.Action):
    """Stores the value of a flag that is given once: a second one would silently replace it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings among the options of a command line, by name."""
    return {name: value for name, value in vars(options).items() if name in SETTINGS}


def _serve(options: argparse.Namespace) -> int:
    room = reservable_bytes()
    if room is not None and room < _LEAST_ADDRESSES:  # where libraries end the process
        raise ConfigError(
            f"the process may reserve no more than {room / 1e6:.0f} MB of addresses, too few for "
            "any model; raise the limit (ulimit -v)"
        )
    from maskdial.server import Server  # the other commands start faster without it

    config = load_config(given_settings(options), options.config)
    logs.configure(config.log_level, config.log_format)
    config = _export_missing(config)
    server = Server(config, ends_process=True)
    server.run()
    if server.failure is not None or not server.started:
        return 1
    return 0


def _export_missing(config: Config) -> Config:
    """Exports the models that are named as on the Hub, and GGUF files, unless the cache has them.

    In a process of its own: what it needs would stay in this one's memory, and write into its log.

    Returns:
        The settings, with the folders of bundles in place of files and checkpoints.
    """
    models = {name: take_in(name, path, config.provider) for name, path in config.models.items()}
    return config.model_copy(update={"models": models})


_FITTING = {"fill-mask": "fill", "classify": "classify", "embed": "embed", "generate": "generate"}
"""The command for a model's head; one that generates with a chat template chats."""


def _run(options: argparse.Namespace) -> int:
    """Runs the command that fits a model, in this process."""
    from maskdial.bundle.bundle import read_manifests

    _check_flags(options.arguments)
    config = load_config({"model": [_as_setting(options.source)]})
    ((name, path),) = config.models.items()
    folder = take_in(name, path, config.provider)
    manifests = read_manifests(name, folder)
    heads = [manifest.task for manifest in manifests]
    command = next((_FITTING[head] for head in heads if head in _FITTING), None)
    if command is None:
        raise ConfigError(
            f"model {name} is for {heads[0]}, which no command does: serve it with 'maskdial serve "
            f"--model {options.source}'"
        )
    if command == "generate" and any(CHAT_TEMPLATE in each.files for each in manifests):
        command = "chat"
    return main([command, *options.arguments, "--bundle", str(folder)])


def _check_flags(arguments: Sequence[str]) -> None:
    """Refuses a flag that no command knows: an export, which takes minutes, comes before theirs.

    Raises:
        ConfigError: there is one.
    """
    known: set[str] = set()
    for command in (*_FITTING.values(), "chat"):
        parser = _Parser()
        _add_client_arguments(command, parser)
        known.update(parser._option_string_actions)
    for flag in takewhile(lambda each: each != "--", arguments):
        name = flag.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]*", name) and name not in known:
            raise ConfigError(_unknown_flag(name, known))


def _unknown_flag(flag: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(flag, known, 1)
    return f"there is no flag {flag}; {f'did you mean {near[0]}?' if near else 'see --help'}"


def _as_setting(source: str) -> str:
    """A model's source as the setting ``model`` has it: a path has a name before it."""
    path = Path(source)
    if source in starters() or path.suffix == GGUF or not path.exists():
        return source
    name = path.resolve().name
    return f"{'model' if model_name_fault(name) else name}={source}"


_CACHE = f"The cache is {VARIABLE}, or maskdial in the system's folder of caches."


def _add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"{_CACHE} 'maskdial serve --model SOURCE' serves what is there, and takes in what is not."
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="ORG/NAME of the Hub or ORG/NAME:Q4_K_M, a GGUF file there, either with @REVISION; a "
        "GGUF file, or a checkpoint's folder",
    )


def _pull(options: argparse.Namespace) -> int:
    for source in options.sources:
        config = load_config({"model": [_as_setting(source)]})
        ((name, path),) = config.models.items()
        folder = take_in(name, path, config.provider)
        print(f"{source} is at {folder}")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from maskdial.doctor import report  # ONNX Runtime, whose import takes longer than all else here

    return report()


def _models(_: argparse.Namespace) -> int:
    from maskdial.bundle.bundle import read_manifests

    rows = [("name", "source", "precision", "task", "bytes")]
    found = cached_models()
    for model in found:
        manifests = read_manifests(model.name, model.folder)
        tasks = ", ".join(dict.fromkeys(each.task for each in manifests))
        first = manifests[0]
        rows.append((model.name, first.source, first.precision, tasks, f"{model.num_bytes:,}"))
    total = sum(model.num_bytes for model in found)
    if found:
        print(ps.table(rows))
    print(f"{cache_folder()}: {total:,} bytes")
    return 0


def _add_rm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{_CACHE} What the Hub's own cache has of them stays there: hf cache ls."
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="as 'maskdial models' lists it, or as it was asked"
    )


def _rm(options: argparse.Namespace) -> int:
    for name in options.names:
        remove(name)
    return 0


def _add_health_arguments(parser: argparse.ArgumentParser) -> None:
    _add_serve_arguments(parser)
    parser.epilog = (
        "It takes the flags, variables and file of 'maskdial serve', and asks where these have the "
        "server listen. Exit status 0: it is ready; 1: it is not."
    )
    parser.add_argument(
        "--pid",
        type=int,
        metavar="N",
        help="take the flags from the command line of this process (Linux), as in a container, "
        "where the server is process 1",
    )


def _health(options: argparse.Namespace) -> int:
    flags, file = given_settings(options), options.config
    if options.pid is not None:
        server = command_parser("serve").parse_args(["serve", *health.arguments_of(options.pid)])
        flags, file = given_settings(server) | flags, file or server.config
    health.check(load_config(flags, file))
    print("ready")
    return 0


def _add_client_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    import maskdial_client.cli  # it needs httpx, which takes longer to import than all else here

    getattr(maskdial_client.cli, f"add_{name}_arguments")(parser)
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="DIR",
        help="run this bundle in the command's own process, without a server; without it and "
        "without --server, the starter models run so if no server answers at the default address",
    )
    run = getattr(maskdial_client.cli, f"run_{name}")
    parser.set_defaults(command=lambda options: _ask(options, run))


def _ask(options: argparse.Namespace, run: Command) -> int:
    """Runs a command of the client: with a server, or with models in this process."""
    from maskdial_client.transport import DEFAULT_URL

    if options.bundle is not None and options.url is not None:
        raise ConfigError("give either --bundle or --server: a bundle needs no server")
    if options.url is not None or (options.bundle is None and ps.is_reachable(DEFAULT_URL)):
        return run(options)
    if options.bundle is None:
        note = f"no server at {DEFAULT_URL}; the starter models answer in this process"
        print(f"maskdial: {note}", file=sys.stderr)
    # Commands that ask a server start faster without it.
    from maskdial.offline.application import models_setting
    from maskdial.offline.transport import InProcessTransport

    flags = {} if options.bundle is None else {"model": models_setting(options.bundle)}
    logs.configure("warning", "text")
    with InProcessTransport(load_config(flags)) as options.transport:
        return run(options)


def _add_export_arguments(parser: argparse.ArgumentParser, *, adapter: bool = False) -> None:
    import maskdial_export.cli  # the other commands start faster without it

    add = (
        maskdial_export.cli.add_adapter_arguments if adapter else maskdial_export.cli.add_arguments
    )
    add(parser)


def _add_exactness_arguments(parser: argparse.ArgumentParser) -> None:
    import maskdial_client.exactness.command  # the other commands start faster without it

    maskdial_client.exactness.command.add_arguments(parser)


def _exactness(options: argparse.Namespace) -> int:
    import maskdial_client.exactness.command

    return maskdial_client.exactness.command.run(options)


def _add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder of the bundle")
    parser.add_argument(
        "file", type=Path, metavar="FILE", help='lines of {"text": "...", "label": "..."}'
    )
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--precision", type=float, metavar="P", help="of each label at least (default: best F1)"
    )
    wanted.add_argument("--recall", type=float, metavar="R", help="of each label at least")
    parser.add_argument(
        "--isotonic",
        action="store_true",
        help="fit a rising table to each label's scores in place of a temperature; takes a "
        "thousand texts and more",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what was found, and leave the bundle as it is"
    )


def _calibrate(options: argparse.Namespace) -> int:
    from maskdial.offline.calibrate import calibrate, shown

    report = calibrate(
        options.bundle,
        options.file,
        precision=options.precision,
        recall=options.recall,
        is_isotonic=options.isotonic,
        writes=not options.dry_run,
    )
    print(shown(report))
    return 0


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    import maskdial.offline.evaluate.command

    maskdial.offline.evaluate.command.add_arguments(parser)


def _evaluate(options: argparse.Namespace) -> int:
    import maskdial.offline.evaluate.command

    return maskdial.offline.evaluate.command.run(options)


def _add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    import maskdial.offline.command  # the other commands start faster without it

    maskdial.offline.command.add_arguments(parser)


def _batch(options: argparse.Namespace) -> int:
    import maskdial.offline.command

    return maskdial.offline.command.run(options)


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    import maskdial.offline.verify.command

    maskdial.offline.verify.command.add_arguments(parser)


def _verify(options: argparse.Namespace) -> int:
    import maskdial.offline.verify.command

    return maskdial.offline.verify.command.run(options)


def _add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    try:
        import maskdial.ray.cli
    except ImportError as error:
        raise ConfigError(f"this needs Ray ({error}): {how_to_install('ray')}") from error
    maskdial.ray.cli.add_arguments(parser, _add_serve_arguments)


def _ray(options: argparse.Namespace) -> int:
    import maskdial.ray.cli  # it needs Ray, which only this command does

    return maskdial.ray.cli.run(options)


def _export(options: argparse.Namespace) -> int:
    import maskdial_export.cli

    return maskdial_export.cli.run(options)


def _export_adapter(options: argparse.Namespace) -> int:
    import maskdial_export.cli

    return maskdial_export.cli.run_adapter(options)


def _inspect(options: argparse.Namespace) -> int:
    # The other commands start faster without them.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from maskdial.bundle.bundle import load_bundles
    from maskdial.inspection import describe

    bundles = load_bundles(options.bundle.resolve().name, options.bundle)
    if options.json:
        manifests = [
            {**bundle.manifest.model_dump(mode="json"), **_replies(bundle)} for bundle in bundles
        ]
        text = json.dumps(manifests if len(manifests) > 1 else manifests[0], indent=2)
        print(text.replace("\x7f", "\\u007f"))  # the only control character that json leaves
        return 0
    console = Console(highlight=False)
    console.print(Text(printable(bundles[0].name), style="bold"))
    for bundle in bundles:
        table = Table(show_header=False, box=None)
        for name, text in describe(bundle, _replies(bundle)).items():
            table.add_row(Text(name, style="dim"), Text(printable(text)))
        console.print(table)
    return 0


def _replies(bundle: "Bundle") -> dict[str, Any]:
    """How a causal model writes tool calls and reasoning, as the server derives it."""
    if (bundle.manifest.family, bundle.manifest.task) != ("causal", "generate"):
        return {}
    # The other commands start faster without them.
    from maskdial.bundle.tokenizer import Tokenizer
    from maskdial.causal.chat.template import read_chat_template
    from maskdial.causal.tools import ReplyFormat

    tokenizer = Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens)
    found = ReplyFormat.of_bundle(bundle, tokenizer, read_chat_template(bundle, tokenizer))
    return {
        "tool_format": None if found.calls is None else found.calls.to_json(),
        "thinking_marks": found.thinking and [found.thinking.begin, found.thinking.end],
    }


if __name__ == "__main__":
    sys.exit(main())
