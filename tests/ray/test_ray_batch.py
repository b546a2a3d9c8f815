"""`maskdial ray batch` on a cluster of this machine: the files of `maskdial batch`."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskdial import cli
from maskdial.batches.output import Journal, journal_path
from maskdial.registry.catalog import STARTER_FOLDER

ray = pytest.importorskip("ray", reason="ray is not installed; make test-ray installs it")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BUNDLE = ["--bundle", str(STARTER_FOLDER / "sentiment"), "--task", "classify"]
# Few lines are enough for many chunks, and for actors that start anew.
PROGRAM = """
import sys
from maskdial import cli
from maskdial.ray import batch
batch._CHUNK, batch._WINDOW = 50, 8
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE"):
            patch.setenv(name, {"RAY_AUTH_MODE": "disabled"}.get(name, "0"))
        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
        )
        try:
            yield str(context.address_info["gcs_address"])
        finally:
            ray.shutdown()


def write_lines(path: Path) -> Path:
    """Lines of both kinds; some are bad, and one is there twice, in chunks apart."""
    lines = [
        json.dumps({"id": each, "inputs": f"A film about {each} ships."}) for each in range(900)
    ]
    call = {"custom_id": "a", "method": "POST", "url": "/classify", "body": {"inputs": "Fine."}}
    lines[10] = lines[700] = json.dumps(call)
    lines[300] = "{broken"
    lines[500] = json.dumps({"inputs": ""})
    path.write_text("\n".join(lines) + "\n")
    return path


def without_ids(path: Path) -> list[object]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for each in found:
        if "custom_id" in each:
            each.pop("id")
            (each["response"] or {}).pop("request_id", None)
    return found


def test_the_files_are_those_of_one_machine(address: str, tmp_path: Path) -> None:
    source, out, once = write_lines(tmp_path / "in.jsonl"), tmp_path / "out", tmp_path / "once"
    command = [sys.executable, "-c", PROGRAM, "ray", "batch", str(source), str(out), *BUNDLE]
    command += ["--address", address]

    def num_done() -> int:
        journal = Journal.read(journal_path(out))
        return 0 if journal is None else journal.number

    with subprocess.Popen(command) as process:
        until = time.monotonic() + 120
        while not num_done():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert 0 < num_done() < 900
    again = subprocess.run(
        [*command, "--resume"], capture_output=True, text=True, timeout=240, check=False
    )
    assert again.returncode == 1, again.stderr
    assert "3 of 900 lines failed" in again.stderr
    assert cli.main(["batch", str(source), str(once), *BUNDLE]) == 1
    assert without_ids(out) == without_ids(once)
    errors = [path.with_name(f"{path.name}.errors.jsonl") for path in (out, once)]
    assert without_ids(errors[0]) == without_ids(errors[1])


def test_what_cannot_begin_says_why(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    arguments = ["ray", "batch", str(source), str(tmp_path / "out"), *BUNDLE]
    assert cli.main([*arguments, "--actors", "0"]) == 1
    assert "--actors must be at least 1" in capsys.readouterr().err
    folder = str(tmp_path / "nothing")
    refused = subprocess.run(
        [sys.executable, "-m", "maskdial", *arguments, "--bundle", folder, "--address", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode == 1
    assert refused.stderr.strip().splitlines()[-1].startswith("maskdial: ")
