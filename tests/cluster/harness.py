"""A real cluster for tests: `trunkline serve` as a child process, its members' process ids, its metrics.

Listens on 127.0.0.1 only. Every run has a folder for temporary files of its own, so that a test can see
whether the cluster left anything behind.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 60.0
COMMAND_SECONDS_MAX = 150.0
PATIENCE_SECONDS = 60.0
"""What is waited for at least: how long a thing takes that comes for certain is the machine's business."""
PAUSE_SECONDS_MIN = 0.05
PAUSE_SECONDS_MAX = 0.5
LOOKING_MAX = 0.05
"""How much of the time goes into looking while a test waits: a look at the metrics takes 8 ms, and what is waited
for needs the processor."""
_LAUNCHER = ("-P", "-m", "trunkline.deploy.cli.app")
_SPAWNED = re.compile(r"^(\S+) started \(process (\d+)\)$", re.MULTILINE)
_READY = re.compile(r"^Ready after .* s: (http://\S+)$", re.MULTILINE)


class Cluster:
    """A served model. `stop` (or the context manager) always ends every process."""

    def __init__(
        self,
        *options: str,
        model: str = "demo",
        launcher: Sequence[str] = _LAUNCHER,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            launcher: what Python is to run as the `trunkline` command.
            environment: variables in addition to this process's.
        """
        # Not pytest's folder: its paths can be too long for sockets.
        self.folder = Path(tempfile.mkdtemp(prefix="tl-test-"))
        self._log = self.folder / "log"
        self.temporary = self.folder / "t"
        self.temporary.mkdir()
        defaults = ("--port", "0", "--kv-memory", "256MiB", "--host", "127.0.0.1")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "serve", model, *defaults, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **self.folders,
                    "NO_COLOR": "1",
                    "COLUMNS": "200",
                    **(environment or {}),
                },
            )
        try:
            wait_for(
                lambda: _READY.search(self.log) is not None or self.process.poll() is not None, START_SECONDS_MAX
            )
            ready = _READY.search(self.log)
            assert ready is not None, f"the cluster did not start:\n{self.log}"
            self.url = ready[1]
            self._wait_for_groups(options)
        except BaseException:
            self.stop()
            raise

    def _wait_for_groups(self, options: Sequence[str]) -> None:
        """Wait until every router uses every group: the launcher says "Ready" when one router has one of them."""
        said = dict(itertools.pairwise(options))
        groups, routers = int(said.get("--groups", "1")), int(said.get("--routers", "1"))
        looks = 1 if routers == 1 else 8 * routers  # each meets one of the routers
        wait_for(lambda: all(len(self.ready_groups()) == groups for _ in range(looks)), START_SECONDS_MAX)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            print(self.log)  # pytest shows it beside the failure
        self.stop()

    @property
    def folders(self) -> dict[str, str]:
        """Environment variables by which other commands find the cluster."""
        # KV on disk is this test's own.
        return {"TMPDIR": str(self.temporary), "XDG_CACHE_HOME": str(self.folder / "cache")}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that were started last."""
        return {name: int(pid) for name, pid in _SPAWNED.findall(self.log)} | {"supervisor": self.process.pid}

    @property
    def log(self) -> str:
        """What the supervisor printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def admin_key(self) -> str:
        """The key that the cluster has drawn for commands on this machine; it opens everything."""
        [path] = self.temporary.glob("trunkline-*/admin.key")
        return path.read_text().strip()

    @property
    def admin_headers(self) -> dict[str, str]:
        """What a request of an admin says."""
        return {"Authorization": f"Bearer {self.admin_key}"}

    def client(self) -> openai.OpenAI:
        """A client that never tries again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)

    def async_client(self) -> openai.AsyncOpenAI:
        """As `client`."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)

    def health(self) -> int:
        """The status code of `/health`; 0 if nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=30.0).status_code
        except httpx.HTTPError:
            return 0

    def wait_healthy(self) -> None:
        """Wait until tokens are generated. A single look gives a token two seconds, which may be too few."""
        wait_for(lambda: self.health() == 200, 10)

    def is_draining(self) -> bool:
        """Whether the router takes no more requests. It is unhealthy, too, when a token takes long."""
        reason: str = httpx.get(f"{self.url}/health", timeout=30.0).json()["reason"]
        return reason == "shutting down"

    def ready_groups(self) -> list[str]:
        """Names of the groups that a router uses now."""
        answer = httpx.get(f"{self.url}/health", timeout=30.0).json()
        return [each["name"] for each in answer["controllers"] if each["ready"]]

    def metric(self, name: str, **labels: str) -> int:
        """A `trunkline_…` value, summed over the samples that have these labels. Up to a second old."""
        return _value_in(self._metrics(), name, labels)

    def gauge(self, name: str) -> int:
        """A `trunkline_controller_…` value, summed over controllers. Up to a second old."""
        return self.metric(f"controller_{name}")

    def gauges(self, *names: str) -> list[int]:
        """Several such values, all of one look."""
        text = self._metrics()
        return [_value_in(text, f"controller_{name}", {}) for name in names]

    def _metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", headers=self.admin_headers, timeout=30.0).text

    def refresh(self) -> None:
        """Wait for metrics that tell all that an idle cluster of one group has done before the call.

        One token more changes them, so those that have changed are newer than the call.
        """
        before = self.gauge("output_tokens_total")
        self.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        wait_for(lambda: self.gauge("output_tokens_total") > before, 10)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer of a call that succeeds, an admin's."""
        answer = httpx.post(f"{self.url}{path}", json=body, headers=self.admin_headers, timeout=60.0)
        assert answer.status_code == 200, answer.text
        return cast(dict[str, Any], answer.json())

    def command(self, *words: str) -> str:
        """What `trunkline …` prints, as a person on this machine would type it."""
        done = subprocess.run(
            [sys.executable, *_LAUNCHER, *words],
            env={**os.environ, **self.folders, "NO_COLOR": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS_MAX,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def blocks_in_use(self) -> int:
        """Device blocks that running requests hold."""
        total, free, cached = self.gauges("blocks_total", "blocks_free", "blocks_cached")
        return total - free - cached

    def is_idle(self) -> bool:
        """Nothing runs and nothing is held."""
        running, total, free, cached = self.gauges(
            "requests_running", "blocks_total", "blocks_free", "blocks_cached"
        )
        return running == 0 and total == free + cached

    def alive(self) -> list[str]:
        """Names of members whose process still exists."""
        return [name for name, pid in self.pids.items() if _exists(pid)]

    def wait(self, seconds: float = STOP_SECONDS_MAX) -> int:
        """The exit code, once the supervisor has ended by itself."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL to every process at once: nobody can tidy up. The folder stays until `stop`."""
        for pid in self.pids.values():
            with suppress(ProcessLookupError):  # it has ended since, because another one is gone
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_for(lambda: self.alive() == [], STOP_SECONDS_MAX)

    def stop(self) -> int:
        """SIGTERM, and the exit code; removes the folder. May be called again."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            return self.process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def _value_in(text: str, name: str, labels: Mapping[str, str]) -> int:
    """The sum of a metric's samples that have these labels."""
    text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(f"trunkline_{name}"))
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    chosen = [s for s in samples if s.name == f"trunkline_{name}" and labels.items() <= s.labels.items()]
    return int(sum(s.value for s in chosen))


def _exists(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Return as soon as `condition` holds; fail if it does not within `seconds`, or `PATIENCE_SECONDS` if that is
    longer."""
    seconds = max(seconds, PATIENCE_SECONDS)
    assert soon(condition, seconds), f"still not so after {seconds:g} s"


def soon(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether `condition` holds within `seconds`, as soon as that is known: for what need not come at the
    first try."""
    deadline = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        if condition():
            return True
        now = time.monotonic()
        if now >= deadline:
            return False
        time.sleep(min(max(PAUSE_SECONDS_MIN, (now - begun) / LOOKING_MAX), PAUSE_SECONDS_MAX))
