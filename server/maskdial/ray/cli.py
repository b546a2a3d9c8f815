"""`maskdial ray`: writes the Serve configuration of the application, and deploys it."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from maskdial.config import SETTINGS, Config, load_config
from maskdial.errors import ConfigError
from maskdial.ray import batch
from maskdial.ray.application import DEPLOYMENT, autoscaling, deployment_options, num_threads

_SECRETS = {"api_keys", "admin_key", "metrics_key"}
# What Ray's proxy does in place of our listener.
_LISTENER = {"host", "port", "ssl_certfile", "ssl_keyfile"}
_POLL_SECONDS = 0.5


def add_arguments(
    parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Adds `batch`, `config` and `deploy`.

    Args:
        parser: that of `maskdial ray`.
        add_settings: adds the flags of `maskdial serve`.
    """
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    help_ = "answer a file of requests with actors on a cluster"
    answering = commands.add_parser("batch", help=help_, description=help_[0].upper() + help_[1:])
    answering.set_defaults(run_ray=batch.run)
    batch.add_arguments(answering)
    for name, run, help_ in (
        ("config", _write, "print a configuration that `serve deploy` takes"),
        ("deploy", _deploy, "deploy to a running cluster"),
    ):
        command = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:])
        command.set_defaults(run_ray=run)
        add_settings(command)
        _add_placement(command)
        if name == "deploy":
            command.add_argument(
                "--address",
                default="http://127.0.0.1:8265",
                help="of the cluster's dashboard (default: %(default)s)",
            )
            command.add_argument(
                "--wait",
                type=float,
                default=600.0,
                metavar="S",
                help="seconds that the replicas may take to run; 0: do not wait for them (default: "
                "%(default)g)",
            )


def run(options: argparse.Namespace) -> int:
    """Runs the command that was chosen, and returns its exit code."""
    command: Callable[[argparse.Namespace], int] = options.run_ray
    return command(options)


def _add_placement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "replicas",
        "Each reserves --threads processors (1 if auto), and a GPU with --provider cuda.",
    )
    group.add_argument(
        "--replicas", type=int, default=2, metavar="N", help="number of replicas (default: 2)"
    )
    group.add_argument(
        "--max-replicas",
        type=int,
        metavar="N",
        help="scale between --replicas and this number (default: no scaling)",
    )
    group.add_argument(
        "--target-ongoing-requests",
        type=float,
        metavar="N",
        help="requests that one replica should be busy with; more: replicas are added (default: "
        "--slots)",
    )
    group.add_argument(
        "--name", default="maskdial", help="of the application (default: %(default)s)"
    )
    group.add_argument(
        "--route-prefix", default="/", help="below which its routes are (default: %(default)s)"
    )


def serve_configuration(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """What `serve deploy` takes: one application on the host and port of the settings.

    Raises:
        ConfigError: there are keys or a Unix socket among the settings, or the numbers of replicas
            contradict each other.
    """
    secrets = [
        name for name, field in SETTINGS.items() if field in _SECRETS & config.model_fields_set
    ]
    if secrets:
        raise ConfigError(
            f"{secrets[0]}: keys are not written to the configuration, which the dashboard shows; "
            "use --api-key-file, or MASKDIAL_* variables on the cluster's machines"
        )
    if config.batch_dir is not None:
        raise ConfigError(
            "batch_dir: a folder of batches belongs to one server; answer files with `maskdial ray "
            "batch`"
        )
    if config.prefix_cache_dir is not None:
        raise ConfigError(
            "prefix_cache_dir: a folder of prefixes belongs to one server, and replicas are several"
        )
    if config.uds is not None:
        raise ConfigError("uds: a cluster is reached by its proxies, not by a Unix socket")
    if options.max_replicas is not None and options.max_replicas < options.replicas:
        raise ConfigError("--max-replicas is less than --replicas")
    dump = config.model_dump(mode="json", exclude_unset=True, exclude=_LISTENER)
    settings = {name: dump[field] for name, field in SETTINGS.items() if field in dump}
    paths = {
        name: str(path.resolve())
        for name in ("model_dir", "api_key_file")
        if (path := getattr(config, name)) is not None
    }
    if config.models:
        settings["model"] = {name: str(path.resolve()) for name, path in config.models.items()}
    if options.max_replicas is None:
        scaling: dict[str, Any] = {"num_replicas": options.replicas}
    else:
        target = options.target_ongoing_requests
        scaling = {
            "autoscaling_config": autoscaling(
                config, options.replicas, options.max_replicas, target
            )
        }
    return {
        "proxy_location": "EveryNode",
        "http_options": config.model_dump(mode="json", include=_LISTENER, exclude_none=True),
        "applications": [
            {
                "name": options.name,
                "route_prefix": options.route_prefix,
                "import_path": "maskdial.ray:app",
                "args": {**settings, **paths, "threads": num_threads(config)},
                "deployments": [{"name": DEPLOYMENT, **scaling, **deployment_options(config)}],
            }
        ],
    }


def _configuration(options: argparse.Namespace) -> str:
    flags = {name: value for name, value in vars(options).items() if name in SETTINGS}
    content = serve_configuration(load_config(flags, options.config), options)
    return str(yaml.safe_dump(content, sort_keys=False))


def _write(options: argparse.Namespace) -> int:
    print(_configuration(options), end="")
    return 0


def _deploy(options: argparse.Namespace) -> int:
    content = _configuration(options)
    try:
        client = ServeSubmissionClient(options.address)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at {options.address}; `ray start --head` starts one"
        ) from error
    before = _application(client, options.name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(content, encoding="utf-8")
        command = ["-m", "ray.serve.scripts", "deploy", str(file), "--address", options.address]
        code = subprocess.run([sys.executable, *command], check=False).returncode
    if code == 0 and options.wait:
        _wait(client, options.name, before.get("last_deployed_time_s"), options.wait)
    return code


def _wait(client: ServeSubmissionClient, name: str, before: float | None, seconds: float) -> None:
    """Returns when all replicas of an application run.

    Args:
        client: asks the cluster.
        name: of the application.
        before: when it was last deployed until now; None: never.
        seconds: that it may take.

    Raises:
        ConfigError: they do not.
    """
    until = time.monotonic() + seconds
    while True:
        application = _application(client, name)
        status = None
        if application.get("last_deployed_time_s") != before:
            status = application.get("status")
        if status == "RUNNING":
            return
        if status == "DEPLOY_FAILED" or time.monotonic() > until:
            raise ConfigError(
                f"the replicas do not run; {_reason(application)}; `serve status` and Ray's "
                "dashboard, which has their logs, say more"
            )
        time.sleep(_POLL_SECONDS)


def _application(client: ServeSubmissionClient, name: str) -> dict[str, Any]:
    """What the cluster says of an application; empty if it does not know it."""
    found: dict[str, Any] = client.get_serve_details().get("applications", {}).get(name, {})
    return found


def _reason(application: dict[str, Any]) -> str:
    """The last lines of what the cluster says, which has tracebacks, too."""
    deployments = application.get("deployments", {}).values()
    reports = [each.get("message") or "" for each in (application, *deployments)]
    lines = [report.strip().splitlines()[-1] for report in reports if report.strip()]
    return "; ".join(lines) or "they have not started in time"
