"""Whole hosts that are lost: each serves the model to its own clients, and Redis on a third one has the records.

Three network namespaces. A host's processes are killed all at once, and its cable is cut.
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
from pathlib import Path
from typing import Any

import pytest
from cluster.conversations import QUESTIONS, Conversations, body_of
from cluster.faults import Network
from cluster.harness import Cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]

START_S = 90.0
STORE, ROUTERS = 1, (0, 2)
"""The hosts, of which the store's has a cable to each of the others."""
REDIS_PORT = 6379
PORT = 8000
ANSWER_S = 60.0
_COMMAND = (sys.executable, "-P", "-m", "trunkline.deploy.cli.app")


class Hosts:
    """The hosts and what runs there."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.folder = Path(tempfile.mkdtemp(prefix="tl-hosts-"))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start_store(self) -> None:
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            pytest.skip("neither redis-server nor valkey-server is installed (Debian: apt install redis-server)")
        addresses = (Network.address(0, 1), Network.address(1, 0))
        options = ("--port", str(REDIS_PORT), "--bind", *addresses, "--protected-mode", "no", "--save", "")
        self._run(STORE, binary, *options, "--appendonly", "yes", "--dir", str(self.folder))

    def serve(self, host: int) -> None:
        address = Network.address(0, 1) if host == 0 else Network.address(1, 0)
        options = ("--tp", "1", "--dtype", "float32", "--threads", "1", "--kv-memory", "32MiB", "--disk-tier", "0")
        self._run(host, *_COMMAND, "serve", "demo", *options, "--records", f"redis://{address}:{REDIS_PORT}/0")

    def _run(self, host: int, *command: str) -> None:
        folder = self.folder / str(host)
        folder.mkdir(exist_ok=True)
        with (self.folder / f"{host}.log").open("ab") as log:
            self.processes[host] = subprocess.Popen(
                [*self.network.prefix(host), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder), "NO_COLOR": "1"},
            )

    def ask(self, host: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a host answers to its own clients; {} if nobody does."""
        asked = json.dumps(body) if body is not None else None
        try:
            with closing(self.network.connection(host, PORT, ANSWER_S)) as connection:
                connection.request("POST" if asked else "GET", path, asked, {"Content-Type": "application/json"})
                return dict(json.loads(connection.getresponse().read()))
        except OSError:
            return {}

    def turn(self, host: int, session: str, question: str) -> str:
        answer = self.ask(host, "/v1/chat/completions", body_of(session, question))
        assert "choices" in answer, answer
        return str(answer["choices"][0]["message"]["content"])

    def wait_ready(self, host: int) -> None:
        """Wait until a host answers; its models are known before its workers are there."""
        body = {"model": "trunkline-demo", "prompt": "Ready?", "max_tokens": 1}
        wait_for(lambda: "choices" in self.ask(host, "/v1/completions", body), START_S)

    def kill(self, host: int) -> None:
        """Of a host with a server, all processes: its children die with the supervisor."""
        self.processes[host].send_signal(signal.SIGKILL)
        self.processes[host].wait()

    def close(self) -> None:
        for host in self.processes:
            self.kill(host)
            print(f"--- host {host}\n{(self.folder / f'{host}.log').read_text(errors='replace')}")
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    network = Network(3)
    found = Hosts(network)
    try:
        yield found
    finally:
        found.close()
        network.close()


def test_sessions_of_a_lost_host_go_on_at_another(hosts: Hosts, plain: Cluster) -> None:
    expected = Conversations(plain, "lost host", 1)
    texts = [expected.turn(plain, number)[0] for number in range(4)]
    hosts.start_store()
    for host in ROUTERS:
        hosts.serve(host)
    for host in ROUTERS:
        hosts.wait_ready(host)
    system = {"role": "system", "content": "lost host, Rivers. " * 24}
    session = hosts.ask(0, "/v1/sessions", {"messages": [system]})["id"]
    assert hosts.turn(0, session, QUESTIONS[0]) == texts[0]
    assert hosts.turn(2, session, QUESTIONS[1]) == texts[1]
    assert hosts.turn(0, session, QUESTIONS[2]) == texts[2]
    with hosts.network.cut(0):
        hosts.kill(0)
        assert hosts.ask(0, "/v1/models") == {}
        assert hosts.turn(2, session, QUESTIONS[3]) == texts[3]
    hosts.kill(STORE)
    refused = hosts.ask(2, "/v1/chat/completions", body_of(session, QUESTIONS[0]))
    assert refused["error"]["code"] == "records_unavailable"
    plain_one = {"model": "trunkline-demo", "prompt": QUESTIONS[0], "max_tokens": 4}
    assert hosts.ask(2, "/v1/completions", plain_one)["choices"]
    hosts.start_store()
    wait_for(lambda: "choices" in hosts.ask(2, "/v1/chat/completions", body_of(session, QUESTIONS[0])), START_S)
    said = hosts.ask(2, f"/v1/sessions/{session}?include=messages")["messages"]
    assert [message["content"] for message in said if message["role"] == "assistant"][:4] == texts
