"""`docs/modules.md`: every module in a line, by package and room, from the first paragraphs of the docstrings.

python docs/generate/module_tables.py           # writes it anew
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "modules.md"
_PACKAGES: Final = {
    "Router": "router/trunkline/router",
    "Prompts": "router/trunkline/prompts",
    "Controller": "controller/trunkline/controller",
    "Worker": "worker/trunkline/worker",
    "Kernels": "kernels/trunkline/kernels",
    "KV store": "kvstore/trunkline/kvstore",
    "Deploy": "deploy/trunkline/deploy",
    "Runtime": "runtime/trunkline/runtime",
}
_HEAD: Final = """# Modules

Every module in a line, room by room. How they work together: [architecture](architecture.md). This page is
written by `python docs/generate/module_tables.py` from the docstrings.
"""


def rendered() -> str:
    """The page as the modules' docstrings say it now."""
    parts = [_HEAD]
    for title, folder in _PACKAGES.items():
        parts.append(f"\n## {title}\n")
        package = ROOT / folder
        for room in [package, *sorted(path.parent for path in package.rglob("*/__init__.py"))]:
            if room != package:
                parts.append(f"\n### {title}: `{room.relative_to(package).as_posix()}/`\n")
            if said := summary(room / "__init__.py"):
                parts.append(f"\n{said}\n")
            parts.append("\n" + table(room, package))
    return "".join(parts)


def table(room: Path, package: Path) -> str:
    """Return the table of the modules that lie in `room` itself."""
    lines = ["| module | what lives there |", "|---|---|"]
    for path in sorted(room.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"| `{path.relative_to(package.parent).as_posix()}` | {summary(path)} |")
    return "\n".join(lines) + "\n"


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring in one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    """Exit code 1, with `--check`: the page is out of date."""
    after = rendered()
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
