"""Groups on this machine for `kv_travel`: with one supervisor, or each as if it were on a host of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx
import psutil
from serving import free_port

from trunkline.runtime import wire_keys

_COMMAND: Final = (sys.executable, "-P", "-m", "trunkline.deploy.cli.app")
_APART: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Makes a process namespace of its own: nothing outside it is read in place."""
_ADDRESS: Final = "10.213.77.1"
"""A further address of the loopback device for the time of a measurement: groups that listen on 127.0.0.1 export
KV by sockets in the file system."""
_PORTS: Final = 200
"""A group takes so many ports in a row, at most."""
START_S: Final = 120.0
TOUCHED_BYTES: Final = 32 << 20
TOUCH_BYTES: Final = 2 << 20
COMMAND_S: Final = 300.0


def can_part() -> bool:
    """Return whether groups can be started here as if each were on a host of its own."""
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_APART, "true"], capture_output=True, check=False).returncode == 0


def _loopback(change: str) -> None:
    """Add or delete the further address."""
    subprocess.run(["ip", "address", change, f"{_ADDRESS}/32", "dev", "lo"], check=True)


class Groups:
    """Some groups and a router for the time of a `with` block."""

    def __init__(self, model: str, groups: int, *options: str, apart: bool = False) -> None:
        """
        Args:
            apart: Each group has a supervisor and a process namespace of its own, and is reached by TCP with wire
                keys, as on other hosts.
        """
        self.groups = groups
        self._apart = apart
        self._folder = Path(tempfile.mkdtemp(prefix="tl-kv-"))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        if not apart:
            self._commands = [[*_COMMAND, "serve", model, "--groups", str(groups), "--port", str(port), *options]]
            return
        keys = self._folder / "wire.key"
        wire_keys.write(wire_keys.generate(), keys)
        common = ["--wire-keys", str(keys), "--health-port", "0"]
        taken = range(first := 20_000 + os.getpid() % 1000 * 10, first + groups * _PORTS, _PORTS)
        places = [f"{_ADDRESS}:{each}" for each in taken]
        policy = [word for at, word in enumerate(options) if "--policy" in options[max(0, at - 1) : at + 1]]
        rest = [word for at, word in enumerate(options) if "--policy" not in options[max(0, at - 1) : at + 1]]
        self._commands = [
            [*_APART, *_COMMAND, "group", model, "--listen", place, *rest, *common] for place in places
        ]
        self._commands.append(
            [*_COMMAND, "router", model, "--controllers", ",".join(places), "--port", str(port), *policy, *common]
        )

    def __enter__(self) -> Self:
        self._processes = []
        if self._apart:
            _loopback("add")
        for number, command in enumerate(self._commands):
            with (self._folder / f"{number}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self._environment)
                )
        try:
            self.wait_ready(self.groups)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process, command in zip(self._processes, self._commands, strict=False):
            children = psutil.Process(process.pid).children() if command[0] == _APART[0] else []
            for each in children or [process]:  # unshare itself passes no signals on
                with suppress(psutil.NoSuchProcess):
                    each.terminate()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._apart:
            _loopback("del")
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _environment(self) -> dict[str, str]:
        folders = {"TMPDIR": str(self._folder), "XDG_CACHE_HOME": str(self._folder / "cache")}
        return {**os.environ, **folders, "NO_COLOR": "1", "COLUMNS": "200"}

    def command(self, *words: str) -> float:
        """Run `trunkline …` for these groups; return the seconds that it took."""
        started = time.perf_counter()
        subprocess.run(
            [*_COMMAND, *words], env=self._environment, check=True, capture_output=True, timeout=COMMAND_S
        )
        return time.perf_counter() - started

    def wait_ready(self, groups: int, until: float = 0.0) -> None:
        """Wait until so many groups take requests.

        Raises:
            SystemExit: A process ended, or it took too long.
        """
        until = until or time.perf_counter() + START_S
        while self._ready() != groups:
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.perf_counter() > until:
                logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self._folder.glob("*.log"))
                raise SystemExit(f"the groups did not become ready:\n{logs}")
            time.sleep(0.05)

    def _ready(self) -> int:
        try:
            controllers = httpx.get(f"{self.url}/health", timeout=5).json()["controllers"]
        except (httpx.TransportError, ValueError, KeyError):
            return 0
        return sum(each["ready"] for each in controllers)

    def touch_memory(self) -> None:
        """Have the system provide the memory of the workers' pools, which nothing uses yet: on a virtual machine a
        page's first use can take as long as pulling many chunks into it."""
        family = [
            each for process in self._processes for each in psutil.Process(process.pid).children(recursive=True)
        ]
        for worker in family:
            with suppress(psutil.NoSuchProcess):
                if " worker" in " ".join(worker.cmdline()[:4]) or "trunkline.worker" in worker.cmdline():
                    _touch(Path(f"/proc/{worker.pid}"))

    def counted(self, name: str, **labels: str) -> list[float]:
        """The values of a metric that have these labels. Up to a second old."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        found = [line for line in lines if line.startswith(f"trunkline_{name}") and all(w in line for w in wanted)]
        return [float(line.rpartition(" ")[2]) for line in found]

    def settle(self, *names: str) -> None:
        """Wait until metrics stand still: what they count has been done."""
        before: list[list[float]] = []
        while (now := [self.counted(name) for name in names]) != before:
            before = now
            time.sleep(1.2)  # groups tell each second


def _touch(process: Path) -> None:
    """Write what is there into all large mappings."""
    with (process / "mem").open("r+b", buffering=0) as memory:
        for line in (process / "maps").read_text().splitlines():
            where, rights, _, _, inode, *_ = line.split()
            start, stop = (int(each, 16) for each in where.split("-"))
            if rights != "rw-p" or inode != "0" or stop - start < TOUCHED_BYTES:
                continue
            for at in range(start, stop, TOUCH_BYTES):
                memory.seek(at)
                page = memory.read(min(TOUCH_BYTES, stop - at))
                memory.seek(at)
                memory.write(page)


@dataclass(slots=True)
class Answer:
    """A streamed answer. Times are in seconds since its request was sent."""

    first_s: float
    prompt_tokens: int
    cached_tokens: int
    peer_tokens: int
    body: dict[str, Any] = field(default_factory=dict)
    """The last event that has any `cache`."""
    text: str = ""


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Send a request and read its stream.

    Raises:
        SystemExit: It was refused.
    """
    asked = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    began, first_s, text, last = time.perf_counter(), 0.0, "", dict[str, Any]()
    async with client.stream("POST", path, json=asked) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{path}: {reply.status_code} {(await reply.aread()).decode()[:500]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                content = choice.get("text") or choice.get("delta", {}).get("content") or ""
                is_start = "role" in choice.get("delta", {}) and not content
                first_s = first_s or (0.0 if is_start else time.perf_counter() - began)
                text += content
            last = event if event.get("usage") else last
    usage = last["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    tiers = last.get("cache", {}).get("tiers", {})
    return Answer(first_s, usage["prompt_tokens"], cached, tiers.get("peer", 0), last, text)


def option_words(options: Sequence[str], **more: str) -> list[str]:
    """Return options with some more of them."""
    return [*options, *(word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", value))]
