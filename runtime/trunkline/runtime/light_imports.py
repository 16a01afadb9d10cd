"""Import libraries without the parts that no role uses, before others import them; the processes are ready sooner.

structlog imports rich for tracebacks of a form that is not logged here (`process.configure_logging`). And what is
imported stays: the garbage collector would look for garbage among modules and classes again and again, and find
next to none. In the process of a role it is off from here until `process.enter_role`. The `__main__` of each role
imports this module before everything else of Trunkline.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Final

ROLES: Final = {f"trunkline.{role}.__main__" for role in ("router", "controller", "worker")}
"""Modules whose processes call `process.enter_role` when they have imported what they need."""


@contextmanager
def other_modules(wanted: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Let `import` find other modules under these names meanwhile; None: no such module."""
    before = {name: sys.modules[name] for name in wanted if name in sys.modules}
    sys.modules.update(wanted)  # type: ignore[arg-type]  # None is what the import system takes for "none"
    try:
        yield
    finally:
        for name in wanted:
            del sys.modules[name]
        sys.modules.update(before)


def _is_process_of_a_role() -> bool:
    """Return whether this process was started as `python -m trunkline.ROLE`."""
    started = getattr(sys.modules["__main__"], "__spec__", None)
    return started is not None and started.name in ROLES


def _import_structlog() -> None:
    if "structlog" not in sys.modules:
        with other_modules({"rich": None}):
            importlib.import_module("structlog")


if _is_process_of_a_role():
    gc.disable()
_import_structlog()
