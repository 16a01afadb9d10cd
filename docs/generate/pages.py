"""Builds the site into `build/site`: the pages of `docs/`, and those that are made from the code, so that nothing
in them can be out of date. Any link that leads nowhere is an error.

    python docs/generate/pages.py [--serve]
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from generate import cli_page, configuration_page, http_page, python_page

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build" / "docs"
_LINK: Final = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def changelog() -> str:
    """The file at the top of the project, whose links are relative to that."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")


def within(text: str, name: str) -> str:
    """A page without links that leave the site: files of the project are named instead."""

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(name), match[2]))
        return match[0] if target.startswith("docs/") else f"{match[1]} (`{target}`)"

    return _LINK.sub(replaced, text)


def write_pages(folder: Path) -> None:
    """All pages and images of the site, below `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("generate", "*.py", "__pycache__"))
    (folder / "reference").mkdir()
    made = {
        "reference/cli.md": cli_page.page(),
        "reference/configuration.md": configuration_page.page(),
        "reference/http.md": http_page.page(),
        "reference/python.md": python_page.page(),
        "changelog.md": changelog(),
    }
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
    for path in folder.rglob("*.md"):
        path.write_text(
            within(path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix()), encoding="utf-8"
        )


def main(arguments: list[str]) -> int:
    """Exit code 1: something leads nowhere; the output says what."""
    write_pages(FOLDER)
    command = ["serve"] if "--serve" in arguments else ["build", "--strict", "--clean"]
    return subprocess.run([sys.executable, "-m", "zensical", *command], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
