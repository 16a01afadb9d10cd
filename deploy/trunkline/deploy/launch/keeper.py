"""`python -m trunkline.deploy.launch.keeper FOLDER`: run one unit, apart from the launcher that started it.

It holds the unit's lock, writes its output into a log of bounded size, and starts it again when it dies, by the
same rule as a cluster's own processes (`DeathRecord`). The unit ends with its keeper, by the kernel's doing.
SIGTERM is passed on, and means that the unit is not started again.

A unit that says that what it was asked for is impossible (exit code 2) is not tried again, nor one whose folder is
gone; one that ends with 0 was told to stop by another process.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import setproctitle

from trunkline.deploy.launch.folders import (
    STATE,
    KeeperState,
    LogFile,
    Process,
    UnitFolder,
    process_of,
    this_process,
)
from trunkline.deploy.launch.protocol import UnitRecord
from trunkline.deploy.supervisor.forks import SPAWN_FAILED
from trunkline.deploy.supervisor.members import EXIT_IMPOSSIBLE, LASTING_S, DeathRecord, describe_exit
from trunkline.runtime.process import die_with_parent, node_id

PROGRAM: Final = (sys.executable, "-P", "-m", "trunkline.deploy.cli.app")
BUSY: Final = 3
"""The exit code if the unit runs already."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Keeper:
    """One unit, from its start to its last end."""

    def __init__(
        self, folder: UnitFolder, record: UnitRecord, lock: int, program: Sequence[str] = PROGRAM
    ) -> None:
        """
        Args:
            lock: The descriptor of the folder's lock, which is held.
            program: The command that gets the words in the record.
        """
        self._folder = folder
        self._record = record
        self._lock = lock
        self._program = program
        self._log = LogFile(folder.path)
        self._deaths = DeathRecord()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._again_s: float | None = None
        """Time of the monotonic clock, in seconds, at which the unit is started again; None: it is not waiting for
        that."""
        self._stopping = False
        self._state = KeeperState(node_id(), this_process(), None, "running", time.time())

    def run(self) -> int:
        """Run the unit until it is not to be started again; return 0 if it ended as it should."""
        with selectors.DefaultSelector() as selector:
            wake_read = _wakeups(selector)
            self._start(selector)
            while self._process is not None or self._again_s is not None:
                pause = None if self._again_s is None else max(0.0, self._again_s - time.monotonic())
                for key, _ in selector.select(pause):
                    if key.fd == wake_read:
                        self._take_signals(wake_read)
                    else:
                        self._copy(selector)
                self._reap(selector)
                if self._again_s is not None and time.monotonic() >= self._again_s:
                    self._again_s = None
                    self._start(selector)
        self._log.close()
        return 0 if self._state.state == "stopped" else 1

    def _start(self, selector: selectors.BaseSelector) -> None:
        self._started_s = time.monotonic()
        keeper = os.getpid()
        home = str(self._folder.path.parents[1])
        argv = [word.replace(STATE, home) for word in self._record.argv]
        try:
            process = subprocess.Popen(
                [*self._program, *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self._folder.path,
                env={"COLUMNS": "160", **os.environ, "NO_COLOR": "1", **self._record.environment},
                start_new_session=True,
                pass_fds=(self._lock,),
                # There are no threads here. It outlives the exec that follows.
                preexec_fn=lambda: die_with_parent(keeper),
            )
        except (OSError, subprocess.SubprocessError) as error:  # no memory or no process ids left, say
            self._say(f"cannot be started: {error}")
            self._ended(SPAWN_FAILED)
            return
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        selector.register(process.stdout, selectors.EVENT_READ)
        self._process = process
        self._say(f"started (process {process.pid})")
        self._tell("running", process_of(process.pid))

    def _take_signals(self, wake_read: int) -> None:
        with suppress(BlockingIOError):
            for number in os.read(wake_read, 4096):
                if number == signal.SIGCHLD:
                    continue
                self._stopping = True
                self._again_s = None
                if self._process is None:
                    self._tell("stopped", None)
                    return
                self._say(f"is told to stop ({signal.Signals(number).name})")
                self._tell("stopping", self._state.unit)
                self._process.send_signal(signal.SIGTERM)

    def _copy(self, selector: selectors.BaseSelector) -> None:
        """Copy what the unit wrote into the log."""
        stream = self._process.stdout if self._process is not None else None
        if stream is None or stream.closed:
            return
        with suppress(BlockingIOError):
            while data := os.read(stream.fileno(), 1 << 16):
                self._log.write(data)
            selector.unregister(stream)
            stream.close()

    def _reap(self, selector: selectors.BaseSelector) -> None:
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._copy(selector)
        stream = self._process.stdout
        if stream is not None and not stream.closed:  # a process that it started still has it
            selector.unregister(stream)
            stream.close()
        self._process = None
        self._ended(code)

    def _ended(self, code: int) -> None:
        now = time.monotonic()
        if self._stopping or code in (0, EXIT_IMPOSSIBLE):
            self._say(describe_exit(code))
            self._tell("failed" if code == EXIT_IMPOSSIBLE else "stopped", None, code)
            return
        if not self._folder.path.is_dir():  # no launcher finds the unit any more, so none could stop it
            self._state = msgspec.structs.replace(self._state, state="failed")
            return
        if now - self._started_s > LASTING_S:
            self._deaths.works()
        self._again_s = self._deaths.died(now)
        self._say(f"{describe_exit(code)}; it is started again in {self._again_s - now:.0f} s")
        self._tell("waiting", None, code, restarts=self._state.restarts + 1)

    def _say(self, text: str) -> None:
        """Write a line into the log, between those of the unit."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._log.write(f"[{stamp}] {self._record.name} {text}\n".encode())

    def _tell(
        self, state: str, unit: Process | None, code: int | None = None, restarts: int | None = None
    ) -> None:
        old = self._state
        self._state = KeeperState(
            old.node,
            old.keeper,
            unit,
            state,
            time.time(),
            old.restarts if restarts is None else restarts,
            old.exit_code if code is None else code,
        )
        # On a full disk the state is out of date, but the unit goes on.
        with suppress(OSError):
            self._folder.write_state(self._state)


def _wakeups(selector: selectors.BaseSelector) -> int:
    """Open a pipe on which each signal of interest appears as a byte, until the end of the process."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    selector.register(read, selectors.EVENT_READ)
    return read


def main(argv: list[str]) -> int:
    """Run the process; return its exit code."""
    folder = UnitFolder(Path(argv[0]))
    record = folder.record()
    if record is None:
        print(f"{folder.path} is no unit's folder", file=sys.stderr)
        return EXIT_IMPOSSIBLE
    lock = folder.lock()
    if lock is None:
        return BUSY
    setproctitle.setproctitle(f"trunkline: keeper of {record.name}")
    return Keeper(folder, record, lock).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
