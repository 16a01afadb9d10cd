"""The console script's entry point.

Ctrl-C while the command line is being imported ends the process without a traceback; from then on it means what
the command makes of it. So nothing may be imported here before.
"""

from __future__ import annotations

import gc
import signal
import sys
from typing import Final

_START_WORKERS: Final = ("serve", "group", "workers")
_SERVE: Final = (*_START_WORKERS, "router")
_HELP: Final = {"-h", "--help"}


def main() -> None:
    """Run the `trunkline` command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # there is no garbage among modules
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in _START_WORKERS and not _HELP.intersection(sys.argv):
        from trunkline.deploy.supervisor import forks  # noqa: PLC0415

        forks.begin()
    if command in _SERVE:
        from trunkline.deploy.cli.serving import main as run  # noqa: PLC0415
    else:
        from trunkline.deploy.cli.app import main as run  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
