"""Set up the process of a role: its title, its log, its status reports, and its end with the supervisor.

This module imports nothing of Trunkline, so that every role's `__main__` may use it although `deploy` stands above
the roles (docs/architecture.md).
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import setproctitle
import structlog

LOG_FORMATS: Final = ("auto", "json", "text")
RARE_LOG_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = "/proc/self/ns/pid"
_REPORT_S_MAX: Final = 1.0
"""Longest time in seconds that sending a status report may take: a supervisor that hangs must not block its
children."""
_KINDS_MAX: Final = 64
"""Largest number of kinds of warnings that a `RareLog` counts separately."""
_ALLOCATIONS_PER_COLLECTION: Final = 20_000
SHORT_SLICES_NS: Final = 100_000
"""For threads that pass messages on (`ask_for_slices`)."""
USUAL_SLICES: Final = 0
"""The length that the kernel gives to all who ask for none, for threads that compute."""
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The call's number by machine, from <asm/unistd.h>: the C library has no name for it before glibc 2.41."""


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` in its first version (sched_setattr(2))."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends (Linux only).

    Without it a `kill -9` of the supervisor would leave ranks behind that hold memory and ports. Other
    systems have no such call; there the supervisor's normal shutdown is what stops children.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the call took effect
        os.kill(os.getpid(), signal.SIGKILL)


def begin_collecting() -> None:
    """Turn the garbage collector on, if it was off while modules were imported. It never visits objects
    that exist already: nearly all of them stay, and one visit takes as long as the imports of a small library."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def spare_the_collector() -> None:
    """Make the garbage collector work less; call it when the process has started. Objects of the start are never
    freed, so it need not visit them again. Requests and steps make many small objects that are freed at once, so
    it need not run so often: visiting all chunks of a large tree takes tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION, *gc.get_threshold()[1:])


def ask_for_slices(length_ns: int) -> None:
    """Ask the kernel for turns of this length on a processor, for this thread and all that it starts from now on.

    Threads that pass messages on run for a fraction of a millisecond and sleep again, beside threads of workers
    that compute on all processors for milliseconds. Since Linux 6.12 a thread that wakes up takes a processor from
    one with longer slices at once; with equal slices a message may wait for the rest of the other's. The share of
    the processors that each gets stays the same. Where slices have one length this does nothing.

    Args:
        length_ns: `SHORT_SLICES_NS` or `USUAL_SLICES`.
    """
    call = _SCHED_SETATTR.get(os.uname().machine) if sys.platform == "linux" else None
    if call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    wish = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        policy=os.SCHED_OTHER,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime_ns=length_ns,
    )
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(wish), 0)  # a kernel that refuses it goes on as before


def configure_logging(
    role: str,
    level: str = "info",
    log_format: str = "auto",
    *,
    context: Callable[[], Mapping[str, Any]] = dict,
    **fields: Any,
) -> None:
    """Log structured lines on stderr, each with the role and the `fields` of this process (`group`, `rank`).

    A line that cannot be written, because the disk is full or the reader of a pipe is gone, is lost.

    Args:
        log_format: "json", "text" (for people), or "auto": text on a terminal, JSON elsewhere.
        context: returns further fields of a line, of what is done when it is written.
    """
    is_text = log_format == "text" or (log_format == "auto" and is_for_people())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), timestamp_key="time")
        if is_text
        else structlog.processors.JSONRenderer()
    )
    own = {"role": role, **fields}

    def of_process(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # Not as context variables: those are known in the main thread only.
        said = {"time": None, "level": None, "event": None, **own, **event}
        return said | {name: value for name, value in context().items() if name not in said}

    structlog.configure(
        processors=[
            of_process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=partial(_LossyLogger, sys.stderr),
    )


class _LossyLogger:
    """Writes lines to a stream, and drops those that it does not take: a full disk must not end the thread that
    logs."""

    def __init__(self, stream: TextIO, *_: object) -> None:
        self._lines = structlog.PrintLogger(stream)

    def msg(self, line: str) -> None:
        with suppress(OSError):
            self._lines.msg(line)

    debug = info = warning = error = critical = msg


def is_for_people() -> bool:
    """Return whether a person reads stderr as it comes."""
    return sys.stderr.isatty() or os.environ.get("TRUNKLINE_LOG") == "console"


def enter_role(
    role: str,
    *,
    parent_pid: int = 0,
    log_level: str = "info",
    log_format: str = "auto",
    title: str = "",
    context: Callable[[], Mapping[str, Any]] = dict,
    **fields: Any,
) -> None:
    """Set up a process: title, files that only its user can read, logging, its garbage collector, and its end with
    its parent.

    Call this first in `main`.

    Args:
        parent_pid: The supervisor; 0 if the process was started by hand or by Kubernetes.
        title: Text for the list of processes, in place of the role.
        context: As in `configure_logging`.
        fields: Fields of this process for its log lines.
    """
    begin_collecting()
    os.umask(0o077)  # only this user may read what a process writes, and connect to its sockets
    setproctitle.setproctitle(f"trunkline: {title or role}")
    configure_logging(role, log_level, log_format, context=context, **fields)
    if parent_pid:
        die_with_parent(parent_pid)


def node_id() -> str:
    """Return a name for the running kernel and the namespace of process ids; "" if it cannot be found out.

    Among processes with the same name, a process id means the same process.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}:{os.stat(_PID_NAMESPACE).st_ino}"
    except OSError:
        return ""


def is_worker(pid: int) -> bool:
    """Return whether this is the id of a worker, by its title or, before it has one, its command line."""
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return line.startswith(b"trunkline: worker ") or b"trunkline.worker" in line.split(b"\0")
    return False


def report_status(path: str, status: str, detail: str = "", *, epoch: int = 0) -> bool:
    """Report a status to the supervisor; never raise.

    Args:
        path: The path of its socket, `status_path` of the configuration; "" if the process has no supervisor.
        status: "starting", "ready", "draining" or "failed".
        detail: The reason, for people.
        epoch: The epoch of a worker's group.

    Returns:
        Whether the report was sent. Callers need not act on it: children end with their supervisor.
    """
    if not path:
        return False
    report = {"pid": os.getpid(), "status": status, "detail": detail[:500], "epoch": epoch}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_REPORT_S_MAX)
            sender.sendto(json.dumps(report).encode(), path)
    except OSError:
        return False
    return True


class RareLog:
    """Writes warnings that a peer can cause, but only a few of each kind.

    The first warning of a kind is written at once; then one in each interval, with the number of warnings left
    out.
    """

    def __init__(self, name: str, interval_s: float = RARE_LOG_S) -> None:
        self.counts: dict[str, int] = {}
        """Number of warnings of each kind, written or not."""
        self._log = structlog.get_logger(name)
        self._interval_s = interval_s
        self._last: dict[str, tuple[float, int]] = {}
        """For each kind of warning: when one was last written, and the kind's count at that time."""

    def warning(self, event: str, now: float, **fields: Any) -> None:
        """Warn, unless a warning of this kind was written lately.

        Args:
            event: The kind of warning, so it must not contain text that a peer sent.
            now: The time, in seconds.
        """
        if event not in self.counts and len(self.counts) >= _KINDS_MAX:
            event = "other"
        count = self.counts[event] = self.counts.get(event, 0) + 1
        written_at, written = self._last.get(event, (float("-inf"), 0))
        if now - written_at < self._interval_s:
            return
        self._last[event] = (now, count)
        unwritten = {"not_logged": count - written - 1} if count - written > 1 else {}
        self._log.warning(event, **fields, **unwritten)
