"""The commands for prompts that a server keeps: `maskdial prefill` and `maskdial cache`."""

import argparse
import json
import time
from pathlib import Path

from maskdial.config import load_config
from maskdial.errors import ConfigError, printable

_DAY = 86400.0  # seconds


def add_prefill_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `prefill`."""
    parser.epilog = "The admin key of the server is that of MASKDIAL_ADMIN_KEY."
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="JSON: messages and tools, as the body of /v1/chat/completions has them",
    )
    parser.add_argument("--model", metavar="NAME", help="the served model, if there are several")
    parser.add_argument("--key", metavar="NAME", help="the name of the key whose requests begin so")
    parser.add_argument(
        "--server", dest="url", metavar="URL", help="its address (default: that of this machine)"
    )


def prefill(options: argparse.Namespace) -> int:
    """`maskdial prefill`: has a server read a conversation into its prefix cache."""
    import httpx

    from maskdial_client.transport import DEFAULT_URL

    try:
        body = json.loads(options.file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{options.file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{options.file} is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{options.file} is not an object with messages")
    for field in ("model", "key"):
        if getattr(options, field) is not None:
            body[field] = getattr(options, field)
    url = options.url or DEFAULT_URL
    headers = {}
    if (key := load_config({}).admin_key) is not None:
        headers["authorization"] = f"Bearer {key.get_secret_value()}"
    try:
        # A long prompt takes as long as it takes.
        reply = httpx.post(
            f"{url.rstrip('/')}/v1/prefill", json=body, headers=headers, timeout=None
        )
        content = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"no answer from {url}: {error}") from error
    if reply.status_code != httpx.codes.OK:
        raise ConfigError(f"{url} refuses it: {json.dumps(content)}")
    usage = content["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{usage['prompt_tokens']} tokens, of which {cached} were in the cache")
    return 0


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `cache`."""
    parser.epilog = (
        "It may run beside the server that has the folder. What that has of the same prompts in "
        "memory stays there until the model is unloaded."
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="DIR",
        help="the server's --prefix-cache-dir (default: that of the variables and the file)",
    )
    parser.add_argument("--model", metavar="NAME", help="only what was read for this model")
    parser.add_argument(
        "--key",
        metavar="NAME",
        help="only prompts of the key of this name; '': those without a key, or shared by all",
    )
    parser.add_argument(
        "--older-than",
        type=float,
        metavar="DAYS",
        help="only what was not used for so long",
    )
    parser.add_argument("--remove", action="store_true", help="remove what is listed")


def cache(options: argparse.Namespace) -> int:
    """`maskdial cache`: whose prompts a folder has, and their removal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from maskdial.causal.prefix_disk.contents import items

    folder = options.folder or load_config({}).prefix_cache_dir
    if folder is None:
        raise ConfigError("name the folder: maskdial cache DIR, that of --prefix-cache-dir")
    days = options.older_than or 0.0
    totals: dict[tuple[str, str], tuple[int, int, float]] = {}
    try:
        for item in items(folder):
            model, key = ("", "") if item.owner is None else (item.owner.model, item.owner.key)
            idle = (time.time() - item.used_at) / _DAY
            if (
                idle < days
                or options.model not in (None, model)
                or options.key not in (None, key)
                or (item.owner is None and (options.model, options.key) != (None, None))
            ):
                continue
            files, size, least = totals.get((model, key), (0, 0, idle))
            totals[model, key] = files + 1, size + item.num_bytes, min(least, idle)
            if options.remove:
                item.remove()
    except OSError as error:
        raise ConfigError(f"the folder {folder}: {error.strerror}") from error
    table = Table("model", "key", "files", "size", "days since its last use", box=None)
    for (model, key), (files, size, idle) in sorted(totals.items()):
        names = (Text(printable(model) or "(damaged)"), Text(printable(key) or "-"))
        table.add_row(*names, str(files), f"{size / 1e6:,.1f} MB", f"{max(idle, 0.0):.1f}")
    total = sum(size for _, size, _ in totals.values())
    what = "removed from" if options.remove else "in"
    console = Console(highlight=False)
    console.print(table if totals else Text("no prefixes"))
    console.print(Text(f"{total / 1e6:,.1f} MB {what} {folder}"), style="dim")
    return 0
