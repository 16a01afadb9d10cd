"""The supervisor's side of the fork server, which makes workers (`trunkline.worker.fork_server`).

A forked worker is a child like one that was started by its command line, but it gets its process id later: when
the fork server answers, which may still be importing torch. If that ends, or cannot fork, workers are started by
their command lines.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

SPAWN_FAILED: Final = 127
"""The exit code of a process that could not be started; shells use the same."""
_PR_SET_CHILD_SUBREAPER: Final = 36  # from <linux/prctl.h>
_ANSWER_BYTES_MAX: Final = 32
_POLL_S: Final = 0.01


def command_line(module: str, *options: str) -> tuple[str, ...]:
    """Return the command line of a process of this program."""
    # -P: a module in the current directory must not stand in for an installed one.
    return (sys.executable, "-P", "-m", module, *options)


class ForkedWorker:
    """A worker that the fork server makes or has made. In what it has, it is as a `subprocess.Popen`."""

    def __init__(self, argv: Sequence[str]) -> None:
        """`argv`: the command line that does the same.

        Raises:
            OSError: There is no room for another pipe.
        """
        self.argv = tuple(argv)
        read, self.write = os.pipe()
        self.stdout = os.fdopen(read, "rb", buffering=0)
        self.pid = 0
        """Its process id; 0: it has none yet."""
        self.returncode: int | None = None
        self._signal: signal.Signals | None = None

    def born(self, pid: int) -> None:
        """Take the process id. What was to be told to the process before, it is told now."""
        os.close(self.write)
        self.pid = pid
        if self._signal is not None:
            self.send_signal(self._signal)

    def spawn(self) -> None:
        """Start the process by its command line."""
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        outputs = [(os.POSIX_SPAWN_DUP2, self.write, standard) for standard in (1, 2)]
        try:
            self.born(
                os.posix_spawn(self.argv[0], self.argv, os.environ, file_actions=[null, *outputs], setsid=True)
            )
        except OSError:
            os.close(self.write)
            self.returncode = SPAWN_FAILED

    def poll(self) -> int | None:
        """See `Popen.poll`."""
        if self.returncode is None and self.pid:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> None:
        """See `Popen.wait`.

        Raises:
            TimeoutExpired: It still runs.
        """
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= end or not self.pid:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(_POLL_S)

    def send_signal(self, number: signal.Signals) -> None:
        """See `Popen.send_signal`; before there is a process, the last signal counts."""
        if not self.pid:
            self._signal = number
        elif self.poll() is None:
            os.kill(self.pid, number)


class _Server(NamedTuple):
    """A fork server that runs, perhaps."""

    process: subprocess.Popen[bytes]
    channel: socket.socket


_begun: list[_Server] = []
"""The fork server that was started before there was a supervisor; empty: none."""


def begin() -> None:
    """Start a fork server already, for the supervisor that this process is going to be: it imports torch while
    the supervisor imports what it needs itself. If that fails, nothing is lost."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        _begun.append(_start())


def _start() -> _Server:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        options = ("--fork-server", str(its.fileno()), str(os.getpid()))
        process = subprocess.Popen(
            command_line("trunkline.worker", *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # if it fails, workers started by their command lines say why
            start_new_session=True,
            pass_fds=(its.fileno(),),
        )
    mine.setblocking(False)
    return _Server(process, mine)


class ForkServer:
    """Makes workers by forking, while a supervisor runs. It begins with the first of them."""

    def __init__(self, selector: selectors.BaseSelector, on_born: Callable[[ForkedWorker], None]) -> None:
        """
        Args:
            selector: Its events are functions that are called with the mask.
            on_born: Called with a worker that has its process id now, or never will.
        """
        self._selector = selector
        self._on_born = on_born
        self._server: _Server | None = None
        self._unborn: deque[ForkedWorker] = deque()
        self._made: list[ForkedWorker] = []
        """All workers but those that have ended and left no process behind."""

    def fork(self, argv: Sequence[str]) -> ForkedWorker | None:
        """Ask for the process with a command line; None: it is no worker's, or no fork server can be had."""
        if sys.platform != "linux" or tuple(argv[:-1]) != command_line("trunkline.worker", "--config"):
            return None
        try:
            server = self._running()
            worker = ForkedWorker(argv)
        except OSError:
            return None
        try:
            socket.send_fds(server.channel, [os.fsencode(argv[-1])], [worker.write])
        except OSError:
            os.close(worker.write)
            worker.stdout.close()
            return None
        self._unborn.append(worker)
        self._made.append(worker)
        _adopt_orphans(True)
        return worker

    def read(self) -> None:
        """Take the answers that have come."""
        while self._server is not None:
            try:
                answer = self._server.channel.recv(_ANSWER_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError:
                answer = b""
            if not answer:
                self._end()
            elif self._unborn:
                self._answered(self._unborn.popleft(), int(answer) if answer.isdigit() else 0)
        if not self._unborn:
            _adopt_orphans(False)

    def reap(self) -> None:
        """Reap processes that workers have left behind when they ended. A worker's child becomes this process's
        child if the worker ends while another one is made, as when all ranks of a group are started again."""
        self._made = [worker for worker in self._made if worker.returncode is None or _reap_group(worker.pid)]

    def close(self) -> None:
        """End the fork server. Workers that it has made run on."""
        for server in _begun:
            _kill(server)
        _begun.clear()
        if self._server is not None:
            self._selector.unregister(self._server.channel)
            _kill(self._server)
            self._server = None
        _adopt_orphans(False)

    def _running(self) -> _Server:
        if self._server is None:
            self._server = _begun.pop() if _begun else _start()
            self._selector.register(self._server.channel, selectors.EVENT_READ, lambda _: self.read())
        return self._server

    def _answered(self, worker: ForkedWorker, pid: int) -> None:
        if pid and _is_child(pid):
            worker.born(pid)
            self._on_born(worker)
            return
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._unborn.appendleft(worker)
        self._end()  # its program is another than the present one, or it cannot fork

    def _end(self) -> None:
        """End the fork server; the next worker begins another one. Those that were not made yet are started by
        their command lines."""
        unborn, self._unborn = list(self._unborn), deque()
        self.close()
        for worker in unborn:
            worker.spawn()
            self._on_born(worker)


def _kill(server: _Server) -> None:
    server.channel.close()
    server.process.kill()
    server.process.wait()


def _reap_group(group: int) -> bool:
    """Reap all children of a process group that have ended; return whether others run."""
    try:
        while group and os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return group > 0


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _adopt_orphans(wanted: bool) -> None:
    """Become the parent of descendants whose parent ends, or no longer. A worker's does so at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
