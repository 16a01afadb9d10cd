"""The console script's entry point.

Ctrl-C while the command line is being imported ends the process without a traceback; from then on it means what
the command makes of it. So nothing may be imported here before.
"""

from __future__ import annotations

import signal
import sys
from typing import Final

_START_WORKERS: Final = ("serve", "group", "workers")
_HELP: Final = {"-h", "--help"}


def main() -> None:
    """Run the `trunkline` command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:] and sys.argv[1] in _START_WORKERS and not _HELP.intersection(sys.argv):
        from trunkline.deploy.supervisor import forks  # noqa: PLC0415

        forks.begin()
    from trunkline.deploy.cli import app  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()
