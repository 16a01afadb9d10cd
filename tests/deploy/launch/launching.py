"""What several tests of the launcher need: units that are a few lines of Python, and their keepers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from deploy.waiting import wait_for

from trunkline.deploy.launch.folders import KeeperState, UnitFolder, private_folder
from trunkline.deploy.launch.protocol import UnitRecord

_CODE = """
import sys
from pathlib import Path
from trunkline.deploy.launch.folders import UnitFolder
from trunkline.deploy.launch.keeper import Keeper
folder = UnitFolder(Path(sys.argv[1]))
sys.exit(Keeper(folder, folder.record(), folder.lock(), (sys.executable, "-c")).run())
"""
KEEPER = (sys.executable, "-P", "-c", _CODE)
"""A keeper that runs Python code in place of `trunkline`; a unit's folder follows."""


class Kept:
    """A keeper whose unit is a few lines of Python."""

    def __init__(self, path: Path, code: str) -> None:
        self.folder = UnitFolder(private_folder(path / "host" / "units" / "it"))
        self.folder.write_record(UnitRecord("it", "router", [code, "{state}"], {"GREETING": "hello"}, "d", 1))
        self.process = subprocess.Popen([*KEEPER, str(self.folder.path)])

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def state(self) -> KeeperState | None:
        return self.folder.state()

    @property
    def log(self) -> str:
        try:
            return (self.folder.path / "log").read_text()
        except OSError:
            return ""

    def until(self, condition: Callable[[KeeperState], bool]) -> KeeperState:
        """The first state of which it holds."""
        wait_for(lambda: (state := self.state) is not None and condition(state))
        state = self.state
        assert state is not None
        return state

    def terminate(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)
