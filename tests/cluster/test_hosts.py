"""A group whose ranks are on two hosts, with what lies between them: real processes in two network namespaces.

Host 0 has the router, the controller and rank 0; host 1 has rank 1. Each part is started by its own command, and
all sockets between them have keys. Texts must be those of one machine, whatever happens to the other host.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from cluster.faults import Network
from cluster.harness import Cluster, wait_for

from trunkline.runtime import wire_keys

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

PROMPT = "def read_lines(path):\n"
TOKENS = 160
START_S = 90.0
ANSWER_S = 120.0
LEADER = Network.address(0, 0)
HEALTH = {"group": 9400, "workers": 9401, "router": 9402}
BODY = {
    "prompt": PROMPT,
    "max_tokens": TOKENS,
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
}
_COMMAND = (sys.executable, "-P", "-m", "trunkline.deploy.cli.app")
HEADERS = {"Content-Type": "application/json"}


class Hosts:
    """Two hosts and the parts of a cluster that run there."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.folder = Path(tempfile.mkdtemp(prefix="tl-hosts-"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.keys = self.folder / "wire.key"
        wire_keys.write(wire_keys.generate(), self.keys)

    def start(self, kind: str, host: int, *options: str) -> None:
        """Run a command of this kind there."""
        common = ["--wire-keys", str(self.keys), "--health-port", str(HEALTH[kind])]
        if kind != "router":
            common += ["--tp", "2", "--dtype", "float32", "--threads", "1", "--kv-memory", "32MiB"]
            common += ["--disk-tier", "0"]
        environment = {"TMPDIR": str(self.folder), "XDG_CACHE_HOME": str(self.folder / f"cache-{host}")}
        with (self.folder / f"{kind}.log").open("ab") as log:
            self.processes[kind] = subprocess.Popen(
                [*self.network.prefix(host), *_COMMAND, kind, "demo", *options, *common],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "NO_COLOR": "1", "COLUMNS": "200"},
            )

    def start_workers(self) -> None:
        self.start("workers", 1, "--ranks", "1", "--leader", f"{LEADER}:7400")

    def log(self, kind: str) -> str:
        return (self.folder / f"{kind}.log").read_text(errors="replace")

    def health(self, kind: str, check: str = "readyz") -> tuple[int, str]:
        """What a part says of itself."""
        host = 1 if kind == "workers" else 0
        try:
            with closing(self.network.connection(host, HEALTH[kind], ANSWER_S)) as connection:
                connection.request("GET", f"/{check}")
                answer = connection.getresponse()
                return answer.status, answer.read().decode().strip()
        except OSError as error:
            return 0, str(error)

    def wait_ready(self) -> None:
        for kind in HEALTH:
            wait_for(lambda kind=kind: self.health(kind)[0] == 200, START_S)  # type: ignore[misc]

    def stream(self) -> Stream:
        return Stream(self.network.connection(0, 8000, ANSWER_S))

    def sent_bytes(self) -> int:
        """By host 0, on the cable."""
        path = "/sys/class/net/far0/statistics/tx_bytes"
        return int(subprocess.check_output([*self.network.prefix(0), "cat", path]))

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Stream:
    """An answer that comes token by token."""

    def __init__(self, connection: HTTPConnection) -> None:
        connection.request("POST", "/v1/completions", json.dumps(BODY), HEADERS)
        self._connection = connection
        self._answer = connection.getresponse()
        assert self._answer.status == 200
        self._text = ""
        while not self._text:
            self._take(next(self._answer))

    def finish(self) -> str:
        """The whole text, once it is there."""
        with closing(self._connection):
            for line in self._answer:
                self._take(line)
        return self._text

    def _take(self, line: bytes) -> None:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            return
        event = json.loads(data)
        assert "error" not in event, event
        self._text += event["choices"][0]["text"]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    found = Network(2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def hosts(network: Network) -> Iterator[Hosts]:
    found = Hosts(network)
    try:
        # The router comes first and the leader last: nobody needs the others to start.
        found.start("router", 0, "--controllers", f"{LEADER}:7400", "--resume-seconds", "120")
        found.start_workers()
        found.start("group", 0, "--ranks", "0-0", "--listen", f"{LEADER}:7400")
        found.wait_ready()
        yield found
    finally:
        for kind in found.processes:
            print(f"--- {kind}\n{found.log(kind)}")
        found.close()


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> str:
    """What two ranks on one machine say."""
    with cluster.client() as client:
        done = client.completions.create(
            model="trunkline-demo",
            prompt=PROMPT,
            max_tokens=TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    return done.choices[0].text


def test_two_hosts_say_what_one_says(hosts: Hosts, expected: str) -> None:
    before = hosts.sent_bytes()
    assert hosts.stream().finish() == expected
    # Two all-reduces per layer and token, of which one machine's shared memory would send nothing.
    assert hosts.sent_bytes() - before > TOKENS * 1024
    # A busy machine may take longer for a single answer than it is waited for.
    wait_for(lambda: hosts.health("group", "livez") == (200, "the supervisor answers"), ANSWER_S)
    wait_for(lambda: hosts.health("workers") == (200, "the ranks here are in the group's epoch"), ANSWER_S)


def test_the_other_host_dies_and_comes_back(hosts: Hosts, expected: str) -> None:
    stream = hosts.stream()
    hosts.processes["workers"].send_signal(signal.SIGKILL)
    hosts.processes["workers"].wait()
    wait_for(lambda: hosts.health("group")[0] == 503, 20)
    for kind in ("group", "router"):  # to restart it would help nobody
        wait_for(lambda kind=kind: hosts.health(kind, "livez")[0] == 200, ANSWER_S)  # type: ignore[misc]
    wait_for(lambda: hosts.health("router")[0] == 503, 20)
    # First by somebody who has not the leader's options.
    hosts.start("workers", 1, "--ranks", "1", "--leader", f"{LEADER}:7400", "--chunk-size", "32")
    refusal = "rank 1 has another chunk_size (32) than the group (64)"
    wait_for(lambda: refusal in hosts.log("workers") and refusal in hosts.log("group"), START_S)
    hosts.processes["workers"].send_signal(signal.SIGTERM)
    assert hosts.processes["workers"].wait(60) == 0
    hosts.start_workers()
    assert stream.finish() == expected
    hosts.wait_ready()


def test_the_cable_between_the_hosts_is_cut(hosts: Hosts, expected: str) -> None:
    stream = hosts.stream()
    with hosts.network.cut(0):
        wait_for(lambda: hosts.health("group")[0] == 503, 20)
        wait_for(lambda: hosts.health("workers")[0] == 503, 20)
    assert stream.finish() == expected
    hosts.wait_ready()
    assert "given up" not in hosts.log("workers") + hosts.log("group")


@pytest.mark.soak
def test_the_leader_dies_and_comes_back(hosts: Hosts, expected: str) -> None:
    stream = hosts.stream()
    hosts.processes["group"].send_signal(signal.SIGKILL)
    hosts.processes["group"].wait()
    wait_for(lambda: hosts.health("workers")[0] == 503, 20)
    wait_for(lambda: hosts.health("workers", "livez")[0] == 200, ANSWER_S)
    hosts.start("group", 0, "--ranks", "0-0", "--listen", f"{LEADER}:7400")
    assert stream.finish() == expected
    hosts.wait_ready()


def test_a_stop_drains(hosts: Hosts, expected: str) -> None:
    """The last: afterwards nothing runs."""
    stream = hosts.stream()
    hosts.processes["group"].send_signal(signal.SIGTERM)
    wait_for(lambda: hosts.health("group") == (503, "it is stopping") or hosts.health("group")[0] == 0, 30)
    assert stream.finish() == expected
    # Only once: a second signal means to stop at once.
    assert hosts.processes["group"].wait(60) == 0
    for kind in ("router", "workers"):
        hosts.processes[kind].send_signal(signal.SIGTERM)
        assert hosts.processes[kind].wait(60) == 0, kind
    wait_for(lambda: not list(hosts.folder.glob("trunkline-*")), 10)
