"""The Serve configuration that `maskdial ray config` writes."""

import os
import subprocess
import sys
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
    assert application.args == {"models": {"m": str(Path("bundle").resolve())}, "threads": 1}
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
