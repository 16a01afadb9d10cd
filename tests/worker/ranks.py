"""Rank processes, forked from a server that has imported torch once, so that each starts in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from worker.driver import Stream, generate, run_config

from trunkline.worker import __main__ as entry
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Sampling
from trunkline.worker.runner import Runner

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["worker.ranks", "trunkline.worker.__main__"])
DEADLINE_S = 120.0


class RankProcess:
    """A process that calls a function; its methods are those of `subprocess.Popen`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._process = _CONTEXT.Process(target=_enter, args=(function, *arguments), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    def wait(self, timeout: float = DEADLINE_S) -> int:
        """Return the exit code; negative after a signal."""
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"process {self.pid} goes on"
        return code

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it runs."""
        self._process.kill()


def _enter(function: Callable[..., object], *arguments: object) -> None:
    torch.set_num_threads(1)
    function(*arguments)


def worker_process(config: Path) -> RankProcess:
    """Return a process in which `python -m trunkline.worker --config CONFIG` runs."""
    return RankProcess(_run_worker, config)


def _run_worker(config: Path) -> None:
    sys.argv = ["trunkline.worker", "--config", str(config)]
    entry.main()


class Rank(NamedTuple):
    """What a rank of `run_ranks` knows of its group."""

    number: int
    size: int
    meeting: Path
    """A folder that is empty at first, and the same for all ranks."""

    def config(self, folder: Path, **fields: Any) -> WorkerConfig:
        """Return the configuration of this rank with a checkpoint."""
        meeting = f"file://{self.meeting}/{folder.name}"
        return run_config(folder, **{"rank": self.number, "tp": self.size, "rendezvous": meeting, **fields})

    def load(self, folder: Path, **fields: Any) -> Runner:
        """Return a runner that has met the others. Its pool holds NaN: what was not written must not be read."""
        runner = load_runner(self.config(folder, **fields), lambda *_: None)
        runner.pool.data.view(torch.uint8).fill_(255)  # in every type
        return runner


def run_ranks(function: Callable[..., object], size: int, *arguments: object, **environment: str) -> list[Any]:
    """Call `function(rank, *arguments)` in a process for each `Rank`.

    Returns:
        By rank what the function returned, or the exit code of a process in which it did not return.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for number in range(size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            rank = Rank(number, size, Path(folder))
            ranks.append((RankProcess(_send_result, theirs, environment, function, rank, *arguments), ours))
            theirs.close()
        try:
            return [_result(process, connection) for process, connection in ranks]
        finally:
            for process, _ in ranks:
                process.kill()


def _send_result(
    connection: Connection, environment: dict[str, str], function: Callable[..., object], *arguments: object
) -> None:
    os.environ.update(environment)
    connection.send_bytes(pickle.dumps(function(*arguments)))  # not `send`, with which tensors need their sender


def _result(process: RankProcess, connection: Connection) -> Any:
    try:
        assert connection.poll(DEADLINE_S), "a rank does not answer"
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return process.wait()


def generate_with_each(rank: Rank, folders: list[Path], **fields: Any) -> list[list[Stream]]:
    """Return what a group generates with each of some checkpoints; `fields` are of its `WorkerConfig`."""
    results = []
    for folder in folders:
        runner = rank.load(folder, **fields)
        streams = generate(runner)
        # Without log-probabilities the ranks agree on the largest logit among themselves.
        plain = generate(runner, Sampling(temperature=0), first_step=runner.steps + 1)
        runner.close()
        assert rank.number or [stream.output for stream in plain] == [stream.output for stream in streams]
        results.append(streams)
    return results
