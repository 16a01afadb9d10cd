"""The page about clients: each row of its table names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_ROW: Final = re.compile(r"^\| (.+) \| (.+) \| `(\S+\.py)::(\w+)` \|$", re.MULTILINE)


def test_each_row_is_made_by_a_test() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    rows = _ROW.findall(page)
    assert len(rows) == page.count(".py::") >= 20
    assert len(set(rows)) == len(rows)
    for _, _, file, name in rows:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)
