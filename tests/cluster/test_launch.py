"""`trunkline launch` with real clusters: two groups on this machine, and a group over two namespaces as hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from cluster.faults import Network
from cluster.harness import wait_for
from deploy.waiting import free_ports, is_alive
from msgspec import structs

from trunkline.deploy.launch.cluster_files import Loaded
from trunkline.deploy.launch.hosts import Hosts
from trunkline.deploy.launch.protocol import UnitState

SECONDS_MAX = 120.0
# several starts of a cluster in one test, on a machine that may be busy
pytestmark = [pytest.mark.processes, pytest.mark.area("survival"), pytest.mark.timeout(400)]
COMMON = {"dtype": "float32", "threads": 1, "max-context": 512, "log-level": "warning"}
TIERS = {"kv_memory": "64MiB", "host": 0, "disk": 0}


class Launched:
    """A file, and what was launched from it; `close` ends every process."""

    def __init__(self, file: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tl-launch-"))
        self.file = self.folder / "it.yaml"
        self.write(file)
        self.url = f"http://127.0.0.1:{file['routers'][0].get('port', 8000)}"
        for name in ("t", "cache", "state"):
            (self.folder / name).mkdir()
        self.environment = {
            **os.environ,
            "TMPDIR": str(self.folder / "t"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    def write(self, file: dict[str, Any]) -> None:
        self.file.write_text(yaml.safe_dump(file))

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "trunkline.deploy.cli.app", "launch", *words]

    def run(self, *words: str, code: int = 0) -> str:
        """Both outputs of a command that ends with this code."""
        done = subprocess.run(
            self.command(*words),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert done.returncode == code, f"exit code {done.returncode}:\n{done.stdout}"
        return done.stdout

    @contextmanager
    def watching(self, *said: str) -> Iterator[subprocess.Popen[bytes]]:
        """A launcher that stays, once the cluster is ready and these words were shown; it is waited for."""
        log = self.folder / "out"
        with log.open("wb") as out:
            launcher = subprocess.Popen(self.command(str(self.file)), env=self.environment, stdout=out, stderr=out)
        try:
            wait_for(lambda: "Ready:" in log.read_text() or launcher.poll() is not None, SECONDS_MAX)
            assert [text for text in ("Ready:", *said) if text not in log.read_text()] == [], log.read_text()
            yield launcher
        finally:
            launcher.kill()
            launcher.wait()

    @contextmanager
    def reached(self) -> Iterator[Hosts]:
        """The hosts' agents, which say what runs quicker than a command."""
        loaded = Loaded(self.file)
        state = str(self.folder / "state" / "trunkline")
        hosts = {label: structs.replace(host, state=state) for label, host in loaded.plan().hosts.items()}
        with Hosts(loaded.name, hosts) as reached:
            assert reached.connect() == {}
            yield reached

    def units(self) -> dict[str, UnitState]:
        with self.reached() as hosts:
            return units_of(hosts)

    def pids(self) -> dict[str, int]:
        return {name: unit.pid or 0 for name, unit in self.units().items()}

    def wait_until(self, unit: str, condition: Callable[[UnitState], bool]) -> None:
        with self.reached() as hosts:
            wait_for(lambda: condition(units_of(hosts)[unit]), SECONDS_MAX)

    def close(self) -> None:
        try:
            self.run("stop", str(self.file), "--seconds", "20")
            assert left_behind(self.folder) == []
        finally:
            for pid in left_behind(self.folder):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)


def units_of(hosts: Hosts) -> dict[str, UnitState]:
    return {name: state for (_, name), state in hosts.states()[0].items()}


def left_behind(folder: Path) -> list[int]:
    """Processes whose environment names the folder: keepers, units, and their processes."""
    mark = f"XDG_STATE_HOME={folder}/".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes() and is_alive(int(path.name)):
                found.append(int(path.name))
        except OSError:
            continue
    return found


@contextmanager
def launched(file: dict[str, Any]) -> Iterator[Launched]:
    cluster = Launched(file)
    try:
        yield cluster
    finally:
        cluster.close()


def ask(url: str, key: str = "") -> dict[str, Any]:
    body = {"model": "trunkline-demo", "prompt": "import os\n", "max_tokens": 6, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def controllers(url: str) -> set[str]:
    """Names of the groups that a router is connected to."""
    return {each["name"] for each in httpx.get(f"{url}/health", timeout=60.0).json()["controllers"]}


def two_groups(first: int) -> dict[str, Any]:
    return {
        "version": 1,
        "groups": [{"name": "group-0"}, {"name": "group-1"}],
        "routers": [{"port": first, "options": {"drain-seconds": 5}}],
        "ports": {"health": first + 1, "groups": first + 6},
        "options": COMMON,
        "tiers": TIERS,
    }


@pytest.fixture(scope="module")
def here() -> Iterator[Launched]:
    """A cluster whose launcher was killed as soon as it was ready."""
    with launched(two_groups(free_ports(24))) as cluster:
        with cluster.watching() as launcher:
            launcher.kill()
        yield cluster


def test_a_launcher_that_is_killed_leaves_a_cluster_that_is_found_again(here: Launched) -> None:
    wait_for(lambda: {unit.state for unit in here.units().values()} == {"ready"}, SECONDS_MAX)
    before = here.pids()
    with here.watching("3 run already") as launcher:
        # As Ctrl-C, which shells let background processes ignore. It stops what it has started: nothing.
        launcher.terminate()
        assert launcher.wait(SECONDS_MAX) == 0
    assert here.pids() == before


def test_up_changes_what_the_file_changes_and_nothing_else(here: Launched) -> None:
    assert ask(here.url)["usage"]["completion_tokens"] == 6
    before = here.pids()
    assert before.keys() == {"group-0", "group-1", "router"}
    assert "3 run already" in here.run("up", str(here.file), "--detach")
    assert here.pids() == before

    file = yaml.safe_load(here.file.read_text())
    file["groups"][1]["options"] = {"max-batch": 8}
    here.write(file)
    said = here.run("up", str(here.file), "--detach", code=2)
    assert "group-1: with --max-batch=8" in said
    assert "--yes" in said
    assert here.pids() == before
    here.run("up", str(here.file), "--detach", "--yes")
    after = here.pids()
    assert {name for name in before if before[name] != after[name]} == {"group-1"}
    assert "--max-batch=8" in here.units()["group-1"].argv
    assert ask(here.url)["usage"]["completion_tokens"] == 6


def test_groups_are_added_and_removed_while_the_others_go_on(here: Launched) -> None:
    before = here.pids()
    file = yaml.safe_load(here.file.read_text())
    here.write({**file, "groups": [*file["groups"], {"name": "group-2"}]})
    assert "3 run already" in here.run("up", str(here.file), "--detach")
    after = here.pids()
    assert after.keys() - before.keys() == {"group-2"}
    assert before.items() < after.items()
    wait_for(lambda: controllers(here.url) == {"group-0", "group-1", "group-2"}, SECONDS_MAX)

    here.write(file)
    here.run("up", str(here.file), "--detach", "--yes")
    assert here.pids() == before
    wait_for(lambda: controllers(here.url) == {"group-0", "group-1"}, SECONDS_MAX)
    assert ask(here.url)["usage"]["completion_tokens"] == 6


def test_a_unit_that_is_killed_comes_back_and_one_that_is_stopped_does_not(here: Launched) -> None:
    died = here.units()["group-1"].restarts
    os.kill(here.pids()["group-1"], signal.SIGKILL)
    here.wait_until("group-1", lambda unit: unit.restarts == died + 1 and unit.state == "ready")
    assert "was killed by SIGKILL; it is started again" in here.run("logs", str(here.file), "group-1")
    here.run("stop", str(here.file), "group-0")

    def states() -> dict[str, str]:
        status = json.loads(here.run("status", str(here.file), "--json", code=1))
        return {unit["name"]: unit["state"] for unit in status["units"]}

    # The router may still have to connect to the group that came back, and has no other one now.
    wait_for(lambda: states() == {"group-0": "stopped", "group-1": "ready", "router": "ready"}, SECONDS_MAX)
    assert ask(here.url)["usage"]["completion_tokens"] == 6


def test_what_fails_is_shown_and_nothing_is_left() -> None:
    first = free_ports(20)
    file = two_groups(first)
    file["groups"] = [{"name": "good"}, {"name": "bad", "options": {"dtype": "float33"}}]
    with launched(file) as cluster:
        said = cluster.run("up", str(cluster.file), code=2)
        assert "bad on local ended with exit code 2" in said
        assert "--dtype is 'float33'" in said
        assert "Stopped." in said
        assert {unit.state for unit in cluster.units().values()} <= {"stopped", "failed"}


def test_a_group_over_two_hosts() -> None:
    network = Network(2)
    try:
        near, far = network.address(0, 0), network.address(0, 1)
        file = {
            "version": 1,
            "hosts": {
                "h1": {"command": network.prefix(0), "address": near, "cores": 1},
                "h2": {"command": network.prefix(1), "address": far, "cores": 1},
            },
            "groups": [{"name": "wide", "tp": 2, "hosts": ["h1", "h2"]}],
            "routers": [{"host": "h2", "listen": far, "options": {"drain-seconds": 5}}],
            "options": COMMON,
            "tiers": TIERS,
            "security": {"api_keys": "keys.json"},
        }
        with launched(file) as cluster:
            said = cluster.run("up", str(cluster.file), "--detach")
            assert "keys of the cluster's processes" in said
            key = next(line.split()[1] for line in said.splitlines() if line.startswith("  user"))
            words = [*network.prefix(0), sys.executable, "-c", ASK, f"http://{far}:8000", key]
            assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "401 200\n"
            assert cluster.pids().keys() == {"wide", "wide.h2", "router"}
            assert key not in cluster.run("logs", str(cluster.file), "-n", "1000")
            assert all(key not in line for line in command_lines(cluster.folder))

            os.kill(cluster.pids()["wide.h2"], signal.SIGKILL)  # a part of the group, on another host
            cluster.wait_until("wide.h2", lambda unit: unit.restarts == 1 and unit.state == "ready")
            cluster.wait_until("wide", lambda unit: unit.state == "ready")
            assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "401 200\n"
    finally:
        network.close()


ASK: Final = """
import sys, httpx
url, key = sys.argv[1:]
body = {"model": "trunkline-demo", "prompt": "import os", "max_tokens": 3}
for each in ("nonsense", key):
    headers = {"Authorization": f"Bearer {each}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, headers=headers)
    print(answer.status_code, end=" " if each == "nonsense" else "\\n")
"""


def command_lines(folder: Path) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in left_behind(folder)]
