"""`python -m trunkline.controller --config FILE`: a controller process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import zmq

import trunkline.runtime.light_imports  # noqa: F401 (before what imports structlog)
from trunkline.controller.config import ControllerConfig
from trunkline.controller.engine_config import ConfigError
from trunkline.controller.service.service import ControllerService
from trunkline.controller.storage.database import DatabaseInUseError
from trunkline.runtime.process import SHORT_SLICES_NS, ask_for_slices, enter_role, spare_the_collector
from trunkline.runtime.tracing import TracingError
from trunkline.runtime.wire_keys import WireKeysError


def main() -> int:
    parser = argparse.ArgumentParser(prog="trunkline.controller", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a ControllerConfig")
    parser.add_argument("--name", default="controller", help="name shown in the process list")
    arguments = parser.parse_args()
    try:
        config = msgspec.json.decode(arguments.config.read_bytes(), type=ControllerConfig)
        config.validate()
    except (OSError, msgspec.MsgspecError, ConfigError) as error:
        print(f"controller: {arguments.config}: {error}", file=sys.stderr)
        return 2
    enter_role(
        "controller",
        title=f"controller {config.group}",
        parent_pid=config.parent_pid,
        log_level=config.log_level,
        log_format=config.log_format,
        group=config.group,
    )
    ask_for_slices(SHORT_SLICES_NS)
    try:
        service = ControllerService(config)
    except zmq.ZMQError as error:  # an address in use, a folder that is not there, a path too long
        print(f"controller: {arguments.config}: cannot listen: {error}", file=sys.stderr)
        return 1
    except (DatabaseInUseError, WireKeysError, TracingError) as error:
        print(f"controller: {error}", file=sys.stderr)
        return 1
    spare_the_collector()
    return service.run()


if __name__ == "__main__":
    sys.exit(main())
