"""Run the processes of a cluster, as `Lifecycle` decides: the shell around its decisions.

One thread waits for everything at once: signals and deaths (through the signal wake-up descriptor), output
of the children (their pipes), their status reports, commands, and deadlines. While a cluster serves nothing wakes
it, so it costs no CPU time. While the cluster starts, a second thread asks the router for its health twice a
second; it ends with the first answer that says "healthy".

Children are spawned by the main thread, because the kernel kills them when the *thread* that spawned them
ends (`process.die_with_parent`), and in sessions of their own, so that Ctrl-C reaches the supervisor only:
it must decide the order in which they stop. Workers are forked where that is possible (`forks.py`).
"""

from __future__ import annotations

import http.client
import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from trunkline.deploy.supervisor.control import ControlServer, StatusSocket
from trunkline.deploy.supervisor.forks import SPAWN_FAILED, ForkedWorker, ForkServer
from trunkline.deploy.supervisor.lifecycle import Lifecycle, Phase
from trunkline.deploy.supervisor.members import (
    EXIT_IMPOSSIBLE,
    EXIT_LEFT,
    Action,
    Command,
    Limits,
    Member,
    Publish,
    Reply,
    Say,
    Send,
    Start,
    Tell,
)
from trunkline.deploy.supervisor.membership import ChildSpec, Membership
from trunkline.deploy.supervisor.reporters import last_words

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_LAST_LINES: Final = 40
_LINE_BYTES_MAX: Final = 64 * 1024


_Process = subprocess.Popen[bytes] | ForkedWorker


class Reporter(Protocol):
    """Show a person what happens. Called from the supervisor's thread only."""

    def spawned(self, name: str, pid: int) -> None:
        """A child process was started."""

    def health(self, answer: Mapping[str, Any] | None) -> None:
        """The router answered while the cluster starts; None: it does not answer yet."""

    def output(self, name: str, line: str) -> None:
        """Receive a line that a child wrote."""

    def say(self, text: str, level: str) -> None:
        """Show a sentence of the supervisor's."""

    def last_lines(self, name: str, lines: Sequence[str]) -> None:
        """A child was lost; these are the last lines that it wrote."""

    def phase(self, phase: Phase) -> None:
        """The cluster entered another phase."""


class Supervisor:
    """One run of a cluster: `run` returns the exit code when no process is left."""

    def __init__(
        self,
        children: Sequence[ChildSpec],
        reporter: Reporter,
        *,
        host: str,
        port: int,
        limits: Limits | None = None,
        restart: bool = True,
        folder: Path | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """
        Args:
            host, port: where a router answers `/health`; port 0: nothing is asked, and what dies is started again
                from the start on, because what it needs may be elsewhere and come later.
            restart: whether processes that die are started again.
            folder: the run folder, for the control and status sockets; None: there are no such sockets.
            listener: the socket that routers accept connections from. It stays open, so that no connection is lost
                when a router dies, and is closed when the cluster stops, so that no client waits in vain.
        """
        self._specs = {spec.member: spec for spec in children}
        self._reporter = reporter
        self._address = (host, port)
        self._folder = folder
        self._listener = listener
        self._processes: dict[str, _Process] = {}
        self._tails: dict[str, _Tail] = {}
        self._selector = selectors.DefaultSelector()
        self._forks = ForkServer(self._selector, self._born)
        self._limits = limits or Limits()
        members = [spec.member for spec in children]
        self._life = Lifecycle(members, self._limits, time.monotonic(), restart=restart, further=self._further)
        self.membership = Membership()
        """Starts further groups, and tells routers about groups. To be set before `run`."""
        self._told_phase = Phase.STARTING
        self._control: ControlServer | None = None
        self._statuses: StatusSocket | None = None

    def run(self) -> int:
        """Start everything, serve until something ends it, and leave nothing behind.

        Must be called by the main thread. Raises nothing that a child does; an `OSError` from a failed
        spawn at the start comes after the children already started were stopped.
        """
        with _wakeups() as (wake_read, wake_write), self._selector, ExitStack() as stack:
            os.set_blocking(wake_read, False)
            try:
                if self._folder is not None:
                    self._open_sockets(self._folder, stack)
                for spec in self._specs.values():
                    self._spawn(spec.member.name, spec)
                health = HealthProbe(*self._address, wake_write)
                self._selector.register(
                    wake_read, selectors.EVENT_READ, lambda _: self._read_wakeups(wake_read, health)
                )
                if self._is_asked:
                    health.start()
                else:
                    self._serve()
                try:
                    while self._life.phase is not Phase.STOPPED:
                        self._wait_and_handle()
                finally:
                    health.stop()
            finally:
                self._kill_rest()
        return self._life.exit_code

    @property
    def _is_asked(self) -> bool:
        return self._address[1] != 0

    def _further(self, count: int, missing: Sequence[int]) -> list[Member]:
        specs = {spec.member: spec for spec in self.membership.grow(count, missing)}
        self._specs |= specs
        return list(specs)

    def _serve(self) -> None:
        self._life.healthy()
        self._do(())

    def _open_sockets(self, folder: Path, stack: ExitStack) -> None:
        self._statuses = stack.enter_context(closing(StatusSocket(folder)))
        self._selector.register(self._statuses, selectors.EVENT_READ, lambda _: self._read_statuses())
        self._control = stack.enter_context(closing(ControlServer(self._selector, folder, self._command)))

    def _spawn(self, name: str, spec: ChildSpec) -> None:
        process: _Process = self._forks.fork(spec.argv) or subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=spec.descriptors,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._processes[name] = process
        self._tails[name] = _Tail(process.stdout.fileno())
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda _: self._read_output(name))
        if process.pid:
            self._reporter.spawned(name, process.pid)

    def _born(self, worker: ForkedWorker) -> None:
        if worker.pid:
            self._reporter.spawned(next(name for name, it in self._processes.items() if it is worker), worker.pid)

    def _spawn_again(self, action: Start) -> None:
        try:
            self._spawn(action.name, self._specs[action.member])
        except OSError as error:  # no memory or no process ids left, say: perhaps later
            self._reporter.say(f"{action.name} cannot be started: {error.strerror or error}", "error")
            self._processes.pop(action.name, None)
            self._do(self._life.exited(action.name, SPAWN_FAILED, time.monotonic()))

    def _wait_and_handle(self) -> None:
        timeout = self._life.deadline - time.monotonic()
        ready = self._selector.select(None if timeout == float("inf") else max(0.0, timeout))
        for key, events in ready:
            if self._selector.get_map().get(key.fd) is key:  # else an earlier one of these has changed it
                key.data(events)
        self._reap()
        self._do(self._life.tick(time.monotonic()))

    def _read_wakeups(self, wake_read: int, health: HealthProbe) -> None:
        with suppress(BlockingIOError):
            for byte in os.read(wake_read, 4096):
                self._wake_up(byte, health)

    def _read_statuses(self) -> None:
        """Take the status reports of children, which are known by their process ids."""
        assert self._statuses is not None
        self._forks.read()  # a worker may report sooner than its process id is taken
        names = {process.pid: name for name, process in self._processes.items() if process.pid}
        for report in self._statuses.receive():
            if report.pid in names:
                if not self._is_asked:
                    self._reporter.say(f"{names[report.pid]} is {report.status}", "info")
                self._do(self._life.reported(names[report.pid], report.status, time.monotonic()))

    def _command(self, command: Command, ticket: int) -> None:
        assert self._control is not None
        now = time.monotonic()
        if command.command != "status":
            self._do(self._life.command(command, ticket, now))
            return
        status = self._life.status(now)
        for row in status["processes"]:
            process = self._processes.get(row.pop("child"))
            row["pid"] = (process.pid or None) if process is not None and process.returncode is None else None
        self._control.reply(ticket, Reply(done=True, status=status))

    def _wake_up(self, byte: int, health: HealthProbe) -> None:
        now = time.monotonic()
        if byte == NEWS and self._life.phase is Phase.STARTING:
            self._reporter.health(health.answer)
            if health.healthy:
                self._serve()
        elif byte in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if self._life.phase in (Phase.STARTING, Phase.SERVING):
                text = f"Stopping ({signal.Signals(byte).name})."
                if byte == signal.SIGINT and self._life.phase is Phase.SERVING and self._limits.drain_s:
                    text += f" Running requests have {self._limits.drain_s:g} s; a second Ctrl-C stops at once."
                self._reporter.say(text, "info")
            self._do(self._life.stop_requested(now))

    def _reap(self) -> None:
        """Tell the lifecycle which children ended. There are few children, so each is asked.

        Of several that ended between two wake-ups, the one whose exit code says most comes first: the others may
        have ended because of it.
        """
        ended = [
            (name, status) for name in self._life.alive if (status := self._processes[name].poll()) is not None
        ]
        for name, status in sorted(ended, key=lambda child: _meaning(child[1])):
            self._read_output(name)
            self._close_output(name)
            self._do(self._life.exited(name, status, time.monotonic(), last_words(self._tails[name].last)))
            if name not in self._life.alive and not any(name == member.name for member in self._specs):
                del self._processes[name], self._tails[name]  # a replacement's name is not used again
        self._forks.reap()

    def _read_output(self, name: str) -> None:
        tail = self._tails[name]
        for line in tail.read():
            self._reporter.output(name, line)
        if tail.closed:
            self._close_output(name)

    def _close_output(self, name: str) -> None:
        stream = self._processes[name].stdout
        assert stream is not None
        if not stream.closed:
            self._selector.unregister(stream)
            stream.close()
            self._tails[name].closed = True

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(name, number):
                    self._send(name, number)
                case Start():
                    self._spawn_again(action)
                case Say(text, level, about):
                    self._reporter.say(text, level)
                    if about in self._tails:
                        self._reporter.last_lines(about, list(self._tails[about].last))
                case Publish(groups):
                    self._publish(groups)
                case Tell(ticket, text, done, ok):
                    if self._control is not None:
                        self._control.reply(ticket, Reply(text, done, ok))
        if self._life.phase is not self._told_phase:
            self._told_phase = self._life.phase
            self._reporter.phase(self._told_phase)
            if self._told_phase is Phase.STOPPING:
                self.membership.leave()
                if self._listener is not None:
                    self._listener.close()

    def _publish(self, groups: Sequence[int]) -> None:
        try:
            self.membership.publish(groups)
        except OSError as error:
            text = f"Routers cannot be told which groups there are: {error}; `trunkline scale` tries again."
            self._reporter.say(text, "error")

    def _send(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return
        if number == signal.SIGKILL:
            _kill_session(process)
        else:
            process.send_signal(number)

    def _kill_rest(self) -> None:
        """Kill all children that still run: none survives `run`."""
        self._forks.close()
        for process in self._processes.values():
            if process.poll() is None:
                _kill_session(process)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._limits.reap_s)
            if process.stdout is not None:
                process.stdout.close()


def _meaning(status: int) -> int:
    """Return the rank of an exit: impossible configurations, then signals, failures, and workers that left."""
    return 0 if status == EXIT_IMPOSSIBLE else 1 if status < 0 else 3 if status == EXIT_LEFT else 2


def _kill_session(process: _Process) -> None:
    """SIGKILL the child and what it started itself (a compiler, say)."""
    with suppress(ProcessLookupError):
        if process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGKILL)  # at its birth, when it has started nothing yet


class _Tail:
    """The lines that a child writes, of which the last ones are kept."""

    def __init__(self, descriptor: int) -> None:
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self.closed = False
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[str]:
        """Return the complete lines written so far; never block."""
        if self.closed:
            return []
        data = self._rest
        with suppress(BlockingIOError):
            while block := os.read(self._descriptor, 65536):
                data += block
                if len(data) > 16 * _LINE_BYTES_MAX:  # leave the rest for the next wake-up
                    break
            else:
                self.closed = True
        *lines, self._rest = data.split(b"\n")
        if self._rest and (self.closed or len(self._rest) > _LINE_BYTES_MAX):
            lines.append(self._rest)
            self._rest = b""
        decoded = [line.decode(errors="replace").rstrip() for line in lines]
        decoded = [line for line in decoded if line]
        self.last.extend(decoded)
        return decoded


@contextmanager
def _wakeups() -> Iterator[tuple[int, int]]:
    """Open a pipe on which each signal of interest appears as a byte; restore the previous handlers at the end."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    old_descriptor = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read, write
    finally:
        signal.set_wakeup_fd(old_descriptor)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


NEWS: Final = 0
"""The byte on the wake-up pipe that announces an answer; no signal has this number."""
_HEALTH_INTERVAL_S: Final = 0.5
_HEALTH_TIMEOUT_S: Final = 10.0


class HealthProbe(threading.Thread):
    """Ask a router for its health until it is healthy.

    This is a thread because an answer may take seconds (the router generates a token for it), and Ctrl-C must not
    wait for that.
    """

    def __init__(self, host: str, port: int, wake_write: int) -> None:
        super().__init__(name="health", daemon=True)
        self.healthy = False
        self.answer: Mapping[str, Any] | None = None
        self._address = (host, port)
        self._wake_write = wake_write
        self._stop_asked = threading.Event()
        self._write_lock = threading.Lock()

    def run(self) -> None:
        """Ask, report and wait, until the router is healthy or `stop` was called."""
        while not self.healthy and not self._stop_asked.is_set():
            self.answer, self.healthy = self._ask()
            with self._write_lock:
                if not self._stop_asked.is_set():  # after `stop` the descriptor may be another file's
                    os.write(self._wake_write, bytes([NEWS]))
            self._stop_asked.wait(_HEALTH_INTERVAL_S)

    def stop(self) -> None:
        """Never write to the pipe again. Do not wait for an answer on its way."""
        with self._write_lock:
            self._stop_asked.set()

    def _ask(self) -> tuple[Mapping[str, Any] | None, bool]:
        connection = http.client.HTTPConnection(*self._address, timeout=_HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = json.loads(response.read() or b"{}")
            return (body if isinstance(body, dict) else {}), response.status == 200
        except (OSError, ValueError, http.client.HTTPException):
            return None, False
        finally:
            connection.close()
