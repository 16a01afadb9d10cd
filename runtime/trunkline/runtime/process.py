"""Set up a Trunkline process: its title, its log, and its end when its supervisor ends.

A leaf (it imports nothing of Trunkline), so that each role's `__main__` may use it although `deploy`
stands above the roles (docs/architecture.md).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import Any, Final

import setproctitle
import structlog

LOG_FORMATS: Final = ("auto", "json", "text")
_PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


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


def configure_logging(role: str, level: str = "info", log_format: str = "auto", **fields: Any) -> None:
    """Log structured lines on stderr, each with the role and the `fields` of this process (`group`, `rank`).

    Args:
        log_format: "json", "text" (for people), or "auto": text on a terminal, JSON elsewhere.
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
        return {"time": None, "level": None, "event": None, **own, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            of_process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


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
    **fields: Any,
) -> None:
    """Set up a process: title, files that only its user can read, logging, and its end with its parent.

    Call this first in `main`.

    Args:
        parent_pid: The supervisor; 0 if the process was started by hand or by Kubernetes.
        title: Text for the list of processes, in place of the role.
        fields: Fields of this process for its log lines.
    """
    os.umask(0o077)  # only this user may read what a process writes, and connect to its sockets
    setproctitle.setproctitle(f"trunkline: {title or role}")
    configure_logging(role, log_level, log_format, **fields)
    if parent_pid:
        die_with_parent(parent_pid)
