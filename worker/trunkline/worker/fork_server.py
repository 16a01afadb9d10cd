"""The fork server: a process that has imported what a worker needs, and makes workers by forking.

Importing torch takes longer than all else that a small worker does until it serves. Done once, it serves all ranks
of a machine, and each rank that is started again. Forked workers share the memory of what was imported, too.

    supervisor ──path of a configuration, pipe──► fork server ──fork──► (ends at once) ──fork──► worker
        ▲└──────────────── process id ────────────────┘                                            │
        └────────── parent of, once the process between has ended ─────────────────────────────────┘

The supervisor is a subreaper (prctl(2)) meanwhile, so that the orphan becomes its child. A worker that was forked
behaves as one that was started by its command line. The fork server has one thread, opens no device and keeps no
secrets. If a file of what it has imported has changed (the package was upgraded), it makes no further workers.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from trunkline.runtime.process import enter_role

STALE: Final = b"stale"
"""The answer if files of the program are others than those that this process has read."""
_PATH_BYTES_MAX: Final = 4096
_POLL_S: Final = 0.0005


def serve(descriptor: int, parent_pid: int, run: Callable[[Path], int]) -> int:
    """Make a worker for each request, until the supervisor closes the connection; return 0.

    Args:
        descriptor: A connected socket that keeps the borders of messages. A request is the path of a
            configuration, with the descriptor that the worker writes its output to. The answer is the worker's
            process id in ASCII, or `STALE`; it comes once the worker is the supervisor's child.
        parent_pid: The supervisor.
        run: Runs a worker with a configuration, and returns its exit code if it returns.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter_role("worker", title="fork server of the workers", parent_pid=parent_pid)
    files = _files_read()
    gc.freeze()  # a collection in a worker must not write to, and so copy, what all share
    with socket.socket(fileno=descriptor) as channel:
        while True:
            request, outputs, _, _ = socket.recv_fds(channel, _PATH_BYTES_MAX, 1)
            if not request:
                return 0
            answer = STALE
            if files == _files_read() and threading.active_count() == 1:
                answer = str(_fork(channel, Path(os.fsdecode(request)), outputs[0], run)).encode()
            for output in outputs:
                os.close(output)
            channel.send(answer)


def _files_read() -> dict[str, int]:
    """Return when the files of the imported modules were changed last, in nanoseconds."""
    changed = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and (name.startswith("trunkline.") or "." not in name):
            with suppress(OSError):
                changed[path] = os.stat(path).st_mtime_ns
    return changed


def _fork(channel: socket.socket, config: Path, output: int, run: Callable[[Path], int]) -> int:
    """Make a worker, and return its process id once it is a child of this process's parent's.

    Raises:
        OSError: There is no memory, or no process id, left.
    """
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        # From here on nothing may return to the loop of the server.
        code = 1
        try:
            os.close(read)
            between = os.getpid()
            code = 0 if os.fork() else _become_worker(channel, between, config, output, write, run)
        finally:
            os._exit(code)
    os.close(write)
    try:
        said = os.read(read, 32)
        os.waitpid(between, 0)
    finally:
        os.close(read)
    return int(said or b"0")


def _become_worker(
    channel: socket.socket, between: int, config: Path, output: int, write: int, run: Callable[[Path], int]
) -> int:
    """Take leave of the fork server; return the worker's exit code."""
    channel.close()
    os.setsid()  # before the supervisor knows its id, so that it can end the whole session
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.write(write, str(os.getpid()).encode())
    os.close(write)
    while os.getppid() == between:
        time.sleep(_POLL_S)
    if torch.cuda._is_in_bad_fork():  # something that was imported has asked the driver: begin anew
        os.execv(sys.executable, (sys.executable, "-P", "-m", "trunkline.worker", "--config", str(config)))
    try:
        return run(config)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 (the last words of a process, as the interpreter would print them)
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
