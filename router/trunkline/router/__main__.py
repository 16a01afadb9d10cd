"""`python -m trunkline.router --config FILE.json`: one router process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import Any

import uvloop

import trunkline.runtime.light_imports  # noqa: F401 (before what imports structlog)
from trunkline.router.config import load_config
from trunkline.router.request_context import log_fields
from trunkline.router.server import inherited, listen, serve
from trunkline.runtime.process import SHORT_SLICES_NS, ask_for_slices, enter_role


def main() -> int:
    """Run a router and return the exit code: 0 after a clean drain, 2 for an impossible configuration, else 1."""
    parser = argparse.ArgumentParser(prog="python -m trunkline.router", description=__doc__)
    parser.add_argument("--config", required=True, help="JSON file with the fields of RouterConfig")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config)
    except ValueError as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    try:
        if config.parent_pid:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # also while it starts; see server.py
        fields: dict[str, Any] = {"router": config.number} if config.routers > 1 else {}
        enter_role(
            "router",
            parent_pid=config.parent_pid,
            log_level=config.log_level,
            log_format=config.log_format,
            context=log_fields,
            **fields,
        )
        ask_for_slices(SHORT_SLICES_NS)
        listener = inherited(config.listen_fd) if config.listen_fd else listen(config.host, config.port)
        with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(config, listener))
    except (ValueError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
