"""The console script's entry point.

Ctrl-C while the command line is being imported ends the process without a traceback; from then on it means what
the command makes of it. So nothing may be imported here before.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the `trunkline` command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from trunkline.deploy.cli import app  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()
