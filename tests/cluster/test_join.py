"""Groups that anything starts join a cluster by its record store: the command lines of the examples, really run.

Slurm's `srun` is replaced by a program that runs its words; systemd's variables are replaced as systemd does.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest
from cluster.harness import STOP_SECONDS_MAX, wait_for
from deploy.waiting import free_ports
from worker.redis_server import RedisServer

pytestmark = [pytest.mark.processes, pytest.mark.area("survival")]
ROOT: Final = Path(__file__).resolve().parents[2]
SBATCH: Final = ROOT / "examples/join/group.sbatch"
UNIT: Final = ROOT / "deploy/systemd/trunkline-group@.service"
OPTIONS: Final = "--tp 1 --dtype float32 --threads 1 --kv-memory 64MiB --host-tier 0 --disk-tier 0"
SECONDS_MAX: Final = 90.0


class Place:
    """A folder with programs, keys and an environment, as a host has them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in (
            ("srun", 'exec "$@"'),
            ("trunkline", f'exec {shlex.quote(sys.executable)} -P -m trunkline.deploy.cli.app "$@"'),
        ):
            (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (bin_folder / name).chmod(0o755)
        self.trunkline = str(bin_folder / "trunkline")
        self.environment = {
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "TMPDIR": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "NO_COLOR": "1",
            "TRUNKLINE_JOIN": url,
            "TRUNKLINE_WIRE_KEYS": str(folder / "wire.key"),
            "TRUNKLINE_ADDRESS": "127.0.0.1",
        }
        subprocess.run([self.trunkline, "key", "wire", str(folder / "wire.key")], env=self.environment, check=True)

    @contextmanager
    def running(self, words: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process that is ended at the end of the block."""
        process = subprocess.Popen(words, env={**self.environment, **environment}, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS_MAX)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="tl-join-"))  # pytest's own is too long for sockets
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        server = RedisServer(folder)
        server.start()
        stack.callback(server.kill)
        yield Place(folder, server.url)


def exec_start(place: Place, port: int) -> list[str]:
    """The command of the unit, as systemd makes it."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    values = {"TRUNKLINE_MODEL": "demo", "TRUNKLINE_ADDRESS": "127.0.0.1", "TRUNKLINE_OPTIONS": OPTIONS}
    line = unit["Service"]["ExecStart"].replace("%i", str(port))
    line = line.replace("/opt/trunkline/bin/trunkline", place.trunkline)
    line = line.replace("/etc/trunkline/wire.key", str(place.folder / "wire.key"))
    return shlex.split(re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], line))


def groups(url: str) -> set[str]:
    """Names of the groups that are ready, as a router sees them."""
    try:
        health = httpx.get(f"{url}/health", timeout=60.0).json()
    except httpx.TransportError:
        return set()
    return {each["name"] for each in health["controllers"] if each["ready"]}


def test_groups_of_slurm_and_systemd_join_and_leave(place: Place) -> None:
    slurm, http = free_ports(16), free_ports()
    task = (slurm - 7400) // 5 + 1
    slurm, systemd = 7400 + 5 * task, 7400 + 5 * task + 5
    url = f"http://127.0.0.1:{http}"
    router = [place.trunkline, "router", "demo", "--members", "records", "--port", str(http)]
    router += ["--wire-keys", str(place.folder / "wire.key")]
    names = {f"127.0.0.1:{slurm}", f"127.0.0.1:{systemd}"}
    sbatch = ["bash", str(SBATCH), "demo", *OPTIONS.split()]
    with (
        place.running([*router, "--records", place.environment["TRUNKLINE_JOIN"]]) as routing,
        place.running(sbatch, SLURM_ARRAY_TASK_ID=str(task)) as first,
        place.running(exec_start(place, systemd)) as second,
    ):
        wait_for(lambda: groups(url) == names, SECONDS_MAX)
        body = {"model": "trunkline-demo", "prompt": "import os\n", "max_tokens": 6, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).status_code == 200

        first.send_signal(signal.SIGTERM)
        assert first.wait(STOP_SECONDS_MAX) == 0
        wait_for(lambda: len(httpx.get(f"{url}/health", timeout=60.0).json()["controllers"]) == 1, SECONDS_MAX)
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).status_code == 200

        second.kill()
        second.wait()
        with place.running(exec_start(place, systemd)):  # under the same name, at the same address
            wait_for(lambda: groups(url) == {f"127.0.0.1:{systemd}"}, SECONDS_MAX)
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).status_code == 200
        assert routing.poll() is None
