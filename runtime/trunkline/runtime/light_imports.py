"""Import libraries without the parts that no role uses, before others import them; the processes are ready sooner.

structlog imports rich for tracebacks of a form that is not logged here (`process.configure_logging`). The
`__main__` of each role imports this module before everything else of Trunkline.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType


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


def _import_structlog() -> None:
    if "structlog" not in sys.modules:
        with other_modules({"rich": None}):
            importlib.import_module("structlog")


_import_structlog()
