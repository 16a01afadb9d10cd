"""`python -m trunkline.worker --config FILE.json`: run one rank of a group; or with `--fork-server`, make such
processes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import trunkline.runtime.light_imports  # (before what imports structlog)
import trunkline.worker.light_torch  # noqa: F401 (before what imports torch)
from trunkline.runtime.process import enter_role, spare_the_collector
from trunkline.worker import fork_server
from trunkline.worker.config import WorkerConfig, load_config
from trunkline.worker.errors import WorkerConfigError
from trunkline.worker.loading import load_runner
from trunkline.worker.runner import Runner
from trunkline.worker.service import serve


def main() -> int:
    """Run the rank, or the fork server; return 0 after an orderly shutdown, 1 after a failure, 2 for a bad
    configuration."""
    parser = argparse.ArgumentParser(prog="trunkline.worker", description="One tensor-parallel rank.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="JSON file with a WorkerConfig")
    what.add_argument(
        "--fork-server",
        type=int,
        nargs=2,
        metavar=("DESCRIPTOR", "PARENT"),
        help="make workers for the supervisor with this process id, which asks through an inherited socket",
    )
    given = parser.parse_args()
    if given.fork_server is not None:
        descriptor, parent = given.fork_server
        return fork_server.serve(descriptor, parent, run)
    return run(given.config)


def run(path: Path) -> int:
    """Run the rank with the configuration in a file; return an exit code as `main` does, or end the process."""
    try:
        config = load_config(path)
    except WorkerConfigError as error:
        print(f"trunkline.worker: {error}", file=sys.stderr)
        return 2
    # Ctrl-C reaches the whole terminal group; the supervisor decides in which order its children leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_on_sigterm()
    enter_role(
        "worker",
        title=f"worker {config.group} rank {config.rank}",
        parent_pid=config.parent_pid,
        log_level=config.log_level,
        log_format=config.log_format,
        group=config.group_label,
        rank=config.rank,
    )
    code = serve(config, _load)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: at interpreter shutdown a collective's threads may wait for peers that are gone.
    os._exit(code)


def _load(config: WorkerConfig, progress: Callable[[str, float], None]) -> Runner:
    runner = load_runner(config, progress)
    spare_the_collector()
    return runner


def _leave_on_sigterm() -> None:
    """Exit with code 0 at SIGTERM, at once: what is on disk survives, and the other ranks see closed connections.

    A thread leaves, because a Python handler would not run while the main thread is inside a collective; the
    interpreter's own handler, which always runs, wakes it through a pipe.
    """
    signal.signal(signal.SIGTERM, lambda _signal, _frame: None)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)

    def wait() -> None:
        while signal.SIGTERM not in os.read(wake_read, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
