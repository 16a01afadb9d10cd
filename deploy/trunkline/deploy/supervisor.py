"""Runs a cluster's processes and does what `Lifecycle` decides: the shell around it.

One thread waits for everything at once: signals and deaths (through the signal wake-up descriptor), output
of the children (their pipes) and deadlines. A cluster that serves wakes it never, so it costs nothing idle.
While the cluster starts, a second thread asks the router for its health twice a second; it ends with the
first answer that says "healthy".

Children are spawned by the main thread, because the kernel kills them when the *thread* that spawned them
ends (`process.die_with_parent`), and in sessions of their own, so that Ctrl-C reaches the supervisor only:
it must decide the order in which they stop.
"""

from __future__ import annotations

import http.client
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from trunkline.deploy.lifecycle import Action, Lifecycle, Limits, Member, Phase, Say, Send

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_HEALTH_NEWS: Final = 0  # the byte that the health thread writes; no signal has this number
_HEALTH_INTERVAL_S: Final = 0.5
_HEALTH_TIMEOUT_S: Final = 10.0
_LAST_LINES: Final = 40
_LINE_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True)
class ChildSpec:
    """A process to run."""

    member: Member
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own."""


class Reporter(Protocol):
    """Shows a person what happens. Called from the supervisor's thread only."""

    def spawned(self, name: str, pid: int) -> None:
        """A child runs."""

    def health(self, answer: Mapping[str, Any] | None) -> None:
        """What the router said while the cluster starts; None: it does not answer yet."""

    def output(self, name: str, line: str) -> None:
        """A child wrote a line."""

    def say(self, text: str, level: str) -> None:
        """Something to know."""

    def last_lines(self, name: str, lines: Sequence[str]) -> None:
        """The end of what a lost child wrote."""

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
    ) -> None:
        self._specs = children
        self._reporter = reporter
        self._address = (host, port)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tails: dict[str, _Tail] = {}
        self._selector = selectors.DefaultSelector()
        self._limits = limits or Limits()
        members = [spec.member for spec in children]
        self._life = Lifecycle(members, self._limits, time.monotonic())
        self._told_phase = Phase.STARTING

    def run(self) -> int:
        """Start everything, serve until something ends it, and leave nothing behind.

        Must be called by the main thread. Raises nothing that a child does; an `OSError` from a failed
        spawn comes after the children already started were stopped.
        """
        with _wakeups() as (wake_read, wake_write), self._selector:
            os.set_blocking(wake_read, False)
            self._selector.register(wake_read, selectors.EVENT_READ)
            try:
                for spec in self._specs:
                    self._spawn(spec)
                health = _HealthProbe(*self._address, wake_write)
                health.start()
                try:
                    while self._life.phase is not Phase.STOPPED:
                        self._wait_and_handle(wake_read, health)
                finally:
                    health.stop()
            finally:
                self._kill_rest()
        return self._life.exit_code

    def _spawn(self, spec: ChildSpec) -> None:
        name = spec.member.name
        process = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.environment},
            start_new_session=True,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._processes[name] = process
        self._tails[name] = _Tail(process.stdout.fileno())
        self._selector.register(process.stdout, selectors.EVENT_READ, name)
        self._reporter.spawned(name, process.pid)

    def _wait_and_handle(self, wake_read: int, health: _HealthProbe) -> None:
        timeout = self._life.deadline - time.monotonic()
        ready = self._selector.select(None if timeout == float("inf") else max(0.0, timeout))
        for key, _ in ready:
            if key.data is not None:
                self._read_output(key.data)
        with suppress(BlockingIOError):
            for byte in os.read(wake_read, 4096):
                self._wake_up(byte, health)
        self._reap()
        self._do(self._life.tick(time.monotonic()))

    def _wake_up(self, byte: int, health: _HealthProbe) -> None:
        now = time.monotonic()
        if byte == _HEALTH_NEWS and self._life.phase is Phase.STARTING:
            self._reporter.health(health.answer)
            if health.healthy:
                self._do(self._life.healthy(now))
        elif byte in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if self._life.phase in (Phase.STARTING, Phase.SERVING):
                self._reporter.say(f"Stopping ({signal.Signals(byte).name}).", "info")
            self._do(self._life.stop_requested(now))

    def _reap(self) -> None:
        """Tell the lifecycle about children that ended. The number of children is small: ask each.

        Of several that ended between two wake-ups, those that a signal killed come first: who merely
        exited may have done so because of them.
        """
        ended = [
            (name, status) for name in self._life.alive if (status := self._processes[name].poll()) is not None
        ]
        for name, status in sorted(ended, key=lambda child: child[1] >= 0):
            self._read_output(name)
            self._close_output(name)
            self._do(self._life.exited(name, status, time.monotonic()))

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
                case Say(text, level, about):
                    self._reporter.say(text, level)
                    if about:
                        self._reporter.last_lines(about, list(self._tails[about].last))
        if self._life.phase is not self._told_phase:
            self._told_phase = self._life.phase
            self._reporter.phase(self._told_phase)

    def _send(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return
        if number == signal.SIGKILL:
            _kill_session(process)
        else:
            process.send_signal(number)

    def _kill_rest(self) -> None:
        """Whatever happened: no child survives `run`."""
        for process in self._processes.values():
            if process.poll() is None:
                _kill_session(process)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._limits.reap_s)
            if process.stdout is not None:
                process.stdout.close()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the child and what it started itself (a compiler, say)."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Tail:
    """Splits what a child writes into lines and keeps the last ones."""

    def __init__(self, descriptor: int) -> None:
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self.closed = False
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[str]:
        """The complete lines that are there now; never blocks."""
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
    """A pipe on which every signal of interest appears as a byte; previous handlers come back at the end."""
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


class _HealthProbe(threading.Thread):
    """Asks the router for its health until it says yes. A thread, because an answer may take seconds (the
    router generates a token for it) and a Ctrl-C must not wait for that."""

    def __init__(self, host: str, port: int, wake_write: int) -> None:
        super().__init__(name="health", daemon=True)
        self.healthy = False
        self.answer: Mapping[str, Any] | None = None
        self._address = (host, port)
        self._wake_write = wake_write
        self._stop_asked = threading.Event()
        self._write_lock = threading.Lock()

    def run(self) -> None:
        """Probe, report, wait; until healthy or stopped."""
        while not self.healthy and not self._stop_asked.is_set():
            self.answer, self.healthy = self._ask()
            with self._write_lock:
                if not self._stop_asked.is_set():  # after `stop` the descriptor may be somebody else's
                    os.write(self._wake_write, bytes([_HEALTH_NEWS]))
            self._stop_asked.wait(_HEALTH_INTERVAL_S)

    def stop(self) -> None:
        """Never write to the pipe again. Does not wait for an answer on its way."""
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
