"""The tables of `docs/architecture.md` with every module in a line: the first paragraph of its docstring.

python docs/generate/module_tables.py           # writes them anew
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "architecture.md"
_SECTIONS: Final = {
    "Router": "router/trunkline/router",
    "Prompts": "router/trunkline/prompts",
    "Controller": "controller/trunkline/controller",
    "Worker": "worker/trunkline/worker",
    "Kernels": "kernels/trunkline/kernels",
    "KV store": "kvstore/trunkline/kvstore",
    "Deploy": "deploy/trunkline/deploy",
}
_TABLE: Final = re.compile(r"\| module \| what lives there \|\n\|---\|---\|\n(?:\|.*\n)*")


def rendered(text: str) -> str:
    """The page with tables that say what the modules say now."""
    for title, folder in _SECTIONS.items():
        start = text.index(f"\n### {title}\n")
        found = _TABLE.search(text, start)
        if found is None:
            raise ValueError(f"{PAGE.name}: no table behind the heading {title!r}")
        text = text[: found.start()] + table(ROOT / folder) + text[found.end() :]
    return text


def table(folder: Path) -> str:
    """Of all modules below a folder."""
    lines = ["| module | what lives there |", "|---|---|"]
    for path in sorted(folder.rglob("*.py")):
        if said := summary(path):
            name = path.relative_to(folder.parent).as_posix()
            lines.append(f"| `{name}` | {said} |")
    return "\n".join(lines) + "\n"


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring in one line; "" for packages that are only a folder."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    said = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")
    package = path.parent.name if path.name == "__init__.py" and path.parent.parent.name == "trunkline" else ""
    return said if package in ("", "prompts") else ""


def main(arguments: Sequence[str]) -> int:
    """Exit code 1, with `--check`: the page is out of date."""
    before = PAGE.read_text(encoding="utf-8")
    after = rendered(before)
    if "--check" in arguments:
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
