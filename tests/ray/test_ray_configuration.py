"""The Serve configuration that `maskdial ray config` writes."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from maskdial import cli

pytest.importorskip("ray", reason="ray is not installed; make test-ray installs it")

# Ray's own warnings are not ours to heed.
pytestmark = pytest.mark.filterwarnings("ignore")


def configuration(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert cli.main(["ray", "config", *flags]) == 0
    written: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return written


def test_ray_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    from ray.serve.schema import ServeDeploySchema

    written = configuration(capsys, "--model", "m=bundle", "--max-replicas", "4", "--port", "80")
    (application,) = ServeDeploySchema(**written).applications
    assert application.import_path == "maskdial.ray:app"
    assert application.args == {"model": {"m": str(Path("bundle").resolve())}, "threads": 1}
    assert written["http_options"] == {"host": "127.0.0.1", "port": 80}


def test_options_follow_from_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-queue", "10", "--grace-period", "60", "--threads", "4"]
    flags += ["--provider", "cuda,cpu"]
    (application,) = configuration(capsys, *flags, "--replicas", "3")["applications"]
    (deployment,) = application["deployments"]
    assert deployment["num_replicas"] == 3
    assert deployment["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 1}
    # Our 429 comes first, when slots and queue are full; and a replica has its whole grace period.
    assert deployment["max_ongoing_requests"] > 32 + 10
    assert deployment["max_queued_requests"] > 32 + 10
    assert deployment["backpressure_config"]["status_code"] == 429
    assert deployment["graceful_shutdown_timeout_s"] > 60


def test_behind_haproxy() -> None:
    """It takes no router, and may send requests for a while after a replica is to go."""
    command = [sys.executable, "-m", "maskdial.cli", "ray", "config", "--grace-period", "60"]
    variables = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "45",
    }
    written = subprocess.run(
        command, env=os.environ | variables, check=True, capture_output=True, timeout=120
    ).stdout
    (deployment,) = yaml.safe_load(written)["applications"][0]["deployments"]
    assert "request_router_config" not in deployment
    assert deployment["graceful_shutdown_timeout_s"] > 45 + 60


@pytest.mark.parametrize(
    ("flags", "target"),
    [([], 8), (["--slots", "16"], 16), (["--target-ongoing-requests", "5"], 5)],
)
def test_a_replica_is_busy_when_its_slots_are_taken(
    capsys: pytest.CaptureFixture[str], flags: list[str], target: int
) -> None:
    (application,) = configuration(capsys, "--max-replicas", "9", *flags)["applications"]
    scaling = application["deployments"][0]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 9)
    assert scaling["target_ongoing_requests"] == target


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--admin-key", "secret"], "admin_key: keys are not written"),
        (["--uds", "/tmp/socket"], "not by a Unix socket"),
        (["--batch-dir", "/tmp/batches"], "belongs to one server"),
        (["--prefix-cache-dir", "/tmp/prefixes"], "belongs to one server"),
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas is less than --replicas"),
        (["--threads", "0"], "setting 'threads'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert cli.main(["ray", "config", *flags]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "secret" not in printed.out + printed.err


@dataclass
class Dashboard:
    """A cluster's, which tells one state of the application after the other."""

    states: list[dict[str, Any]]

    def get_serve_details(self) -> dict[str, Any]:
        state = self.states.pop(0)
        return {"applications": {"maskdial": state} if state else {}}


BEFORE = {"last_deployed_time_s": 1.0, "status": "RUNNING"}
STARTING = {"last_deployed_time_s": 2.0, "status": "DEPLOYING"}
RUNNING = {"last_deployed_time_s": 2.0, "status": "RUNNING"}
FAILED = {
    "last_deployed_time_s": 2.0,
    "status": "DEPLOY_FAILED",
    "deployments": {"maskdial": {"message": "Traceback:\n  ...\nno such bundle\n"}},
}


@pytest.mark.parametrize(
    ("states", "flags", "message"),
    [
        ([{}, STARTING, STARTING, RUNNING], [], None),
        ([BEFORE, BEFORE, STARTING, RUNNING], [], None),
        ([{}], ["--wait", "0"], None),
        ([BEFORE, STARTING, FAILED], [], "the replicas do not run; no such bundle; "),
        ([{}, STARTING], ["--wait", "1e-9"], "they have not started in time"),
    ],
)
def test_a_deployment_is_waited_for(
    states: list[dict[str, Any]],
    flags: list[str],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from maskdial.ray import cli as ray_cli

    dashboard = Dashboard(list(states))
    monkeypatch.setattr(ray_cli, "ServeSubmissionClient", lambda address: dashboard)
    monkeypatch.setattr(ray_cli, "_POLL_SECONDS", 0.0)
    done = subprocess.CompletedProcess[str]([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)
    assert cli.main(["ray", "deploy", *flags]) == (message is not None)
    assert dashboard.states == []
    assert (message or "") in capsys.readouterr().err


def test_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ray", "deploy", "--address", "http://127.0.0.1:1"]) == 1
    assert "no Ray cluster answers at http://127.0.0.1:1" in capsys.readouterr().err
