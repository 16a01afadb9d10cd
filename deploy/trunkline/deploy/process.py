"""What every Trunkline process does first: a title that names its role, a parent to die with, a log.

A leaf (it imports nothing of Trunkline), so that each role's `__main__` may use it although `deploy`
stands above the roles (docs/architecture.md).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import Final

import setproctitle
import structlog

_PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends (Linux only).

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


def configure_logging(role: str, level: str = "info") -> None:
    """Structured lines on stderr: readable on a terminal, JSON elsewhere; every line names the role."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if sys.stderr.isatty() or os.environ.get("TRUNKLINE_LOG") == "console"
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(role=role)


def enter_role(role: str, *, parent_pid: int = 0, log_level: str = "info") -> None:
    """First call of a process's `main`: title `trunkline: <role>`, logging, and death with the parent.

    `parent_pid` 0 means that nobody supervises this process (it was started by hand or by Kubernetes).
    """
    setproctitle.setproctitle(f"trunkline: {role}")
    configure_logging(role, log_level)
    if parent_pid:
        die_with_parent(parent_pid)
