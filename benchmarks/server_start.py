"""How long a server takes until it serves, and a worker that was killed until it is back.

    python benchmarks/server_start.py [--quick] [--rounds 5] [--programs PATH,PATH] [--model demo] [--tp 1,2,4]
                                      [--dtype bfloat16] [--json PATH]

Runs `trunkline serve` of each program (default: this environment's) by turns, on loopback. A program is the path
of a `trunkline` command, so two versions in two environments can be compared in one run. The first start of each,
which may compile its modules and reads all weights for their digest, does not count.

- `ready`: from the command to the first answer of `/health`, which a token was generated for; asked every 10 ms.
- `cpu`: CPU seconds of all its processes until then; also by kind of process.
- `first token`: how long the first request takes that is sent then.
- `memory`: what its processes hold then, each shared page counted once (PSS).
- `first grammar`: how long the first request takes whose answer a grammar binds, one of four words.
- `worker back`: from SIGKILL of rank 0 until a completion of one token is answered again.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import psutil
from report import Report, argument_parser, server_environment
from small_model import small_model

POLL_S: Final = 0.01
PATIENCE_S: Final = 120.0
TITLE: Final = "trunkline: "
KINDS: Final = {"router": "router", "controller": "controller", "worker": "workers", "fork": "fork server"}
"""What the processes are called, by the first word of their titles; other processes are the supervisor."""
CPU_OF: Final = [f"cpu of {kind}" for kind in ("supervisor", *KINDS.values())]
UNITS: Final = {
    "ready": "s",
    "cpu": "s",
    **dict.fromkeys(CPU_OF, "s"),
    "memory": "MiB",
    "first token": "s",
    "first grammar": "s",
    "worker back": "s",
}
WORDS: Final = ["w17", "w18", "w19", "w20"]
"""Both models can say them: each is a token of small_model.py."""


class Server:
    """A server that was started a moment ago."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._started = process
        self._process = psutil.Process(process.pid)
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def wait_until_it_serves(self) -> None:
        """Ask for its health until it is well."""
        self._wait_for(lambda: self._client.get("/health").status_code == 200)

    def processes(self) -> list[psutil.Process]:
        """All processes of the server."""
        return [self._process, *self._process.children(recursive=True)]

    def cpu_s(self) -> dict[str, float]:
        """CPU time in seconds of all its processes, together and by kind."""
        found = dict.fromkeys(["cpu", *CPU_OF], 0.0)
        for process in self.processes():
            title = " ".join(process.cmdline()).removeprefix(TITLE)
            times = process.cpu_times()
            spent = float(times.user + times.system)
            found["cpu"] += spent
            found[f"cpu of {KINDS.get(title.partition(' ')[0], 'supervisor')}"] += spent
        return found

    def memory_mib(self) -> float:
        """Their memory in MiB; a page that n of them share counts 1/n for each."""
        return float(sum(process.memory_full_info().pss for process in self.processes())) / (1 << 20)

    def worker(self) -> psutil.Process:
        """The process of rank 0."""
        titles = {" ".join(process.cmdline()).strip(): process for process in self.processes()}
        return next(
            process
            for title, process in titles.items()
            if title.startswith(f"{TITLE}worker ") and "rank 0" in title
        )

    def choose(self) -> None:
        """Ask for an answer that a grammar binds.

        Raises:
            SystemExit: It is none of the words.
        """
        body = {"model": "m", "prompt": [2, 3, 4], "max_tokens": 8, "temperature": 0, "guided_choice": WORDS}
        answer = self._client.post("/v1/completions", json=body)
        if answer.status_code != 200 or answer.json()["choices"][0]["text"].strip() not in WORDS:
            raise SystemExit(f"the grammar did not bind the answer: {answer.text[:500]}")

    def wait_for_a_token(self) -> None:
        """Ask for a token; the answer may have to wait for a worker."""
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}
        self._wait_for(lambda: self._client.post("/v1/completions", json=body).status_code == 200)

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        end = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < end and self._started.poll() is None:
            try:
                if holds():
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        raise SystemExit("the server did not answer in time")


@contextmanager
def serving(program: str, model: str, tp: int, *options: str, cache: str = "") -> Iterator[Server]:
    """Start a server; stop it in the end. `cache`: the folder of the user's caches; "": an empty one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = ["--port", str(port), "--tp", str(tp), "--disk-tier", "0", "--served-model-name", "m", *options]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [program, "serve", model, *given],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=server_environment(XDG_CACHE_HOME=cache or folder),
        )
        try:
            yield Server(process, port)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


def measured(program: str, model: str, tp: int, dtype: str, cache: str) -> dict[str, float]:
    """Return the figures of one start."""
    begun = time.perf_counter()
    with serving(program, model, tp, "--dtype", dtype, cache=cache) as server:
        server.wait_until_it_serves()
        found = {"ready": time.perf_counter() - begun, **server.cpu_s(), "memory": server.memory_mib()}
        begun = time.perf_counter()
        server.wait_for_a_token()
        found["first token"] = time.perf_counter() - begun
        begun = time.perf_counter()
        server.choose()
        found["first grammar"] = time.perf_counter() - begun
        server.worker().kill()
        begun = time.perf_counter()
        server.wait_for_a_token()
        return found | {"worker back": time.perf_counter() - begun}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each program (%(default)s)")
    own = str(Path(sys.executable).with_name("trunkline"))
    parser.add_argument("--programs", default=own, help="paths of `trunkline` commands")
    parser.add_argument("--model", default="demo", help="what to serve, or small: the model of small_model.py")
    parser.add_argument("--tp", default="1,2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="type of the weights (%(default)s)")
    arguments = parser.parse_args()
    model = str(small_model()) if arguments.model == "small" else arguments.model
    report = Report("server_start")
    rounds = 1 if arguments.quick else arguments.rounds
    cache = tempfile.TemporaryDirectory()
    for tp in [2] if arguments.quick else [int(word) for word in arguments.tp.split(",")]:
        found: dict[str, list[dict[str, float]]] = {program: [] for program in arguments.programs.split(",")}
        for round_number in range(rounds + 1):
            for program, figures in found.items():
                each = measured(program, model, tp, arguments.dtype, cache.name)
                if round_number:
                    figures.append(each)
        for program, figures in found.items():
            case = {"model": arguments.model, "tp": tp}
            if len(found) > 1:
                case["program"] = program
            for metric, unit in UNITS.items():
                report.add(case, metric, median(each[metric] for each in figures), unit, rounds)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
