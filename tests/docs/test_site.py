"""The documentation as a site: it builds, every link leads somewhere, no page asks another host for anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest
from generate import cli_page, configuration_page, http_page, module_tables, parameter_tables

ROOT: Final = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, built anew."""
    folder = ROOT / "build" / "site"
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "docs/generate/pages.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    return folder


class References(HTMLParser):
    """What a page makes a browser fetch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio"):
            self.fetched.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.fetched.append(given.get("href") or "")


def pages(site: Path) -> Iterator[tuple[Path, References]]:
    for path in site.rglob("*.html"):
        found = References()
        found.feed(path.read_text(encoding="utf-8"))
        yield path, found


@pytest.mark.area("site")
@pytest.mark.processes
def test_every_page_is_there_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    seen = dict(pages(site))
    expected = {site / "index.html", site / "reference" / "cli" / "index.html", site / "changelog" / "index.html"}
    expected |= {
        site / path.relative_to(ROOT / "docs").with_suffix("") / "index.html"
        for path in (ROOT / "docs").rglob("*.md")
        if path.name not in ("index.md", "README.md")
    }
    assert expected - set(seen) == set()
    for path, found in seen.items():
        assert [url for url in found.fetched if url.startswith(("http:", "https:", "//"))] == [], path


@pytest.mark.area("site")
@pytest.mark.processes
def test_the_python_reference_has_the_docstrings(site: Path) -> None:
    text = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    for name in (
        "trunkline.prompts.Client",
        "trunkline.controller.messages.Submit",
        "trunkline.controller.engine.engine.Engine",
    ):
        assert f'id="{name}"' in text


@pytest.mark.processes
def test_every_command_and_field_is_in_the_reference() -> None:
    cli = cli_page.page()
    for text in (
        "## trunkline serve",
        "## trunkline schema add",
        "`--disk-tier PATH:SIZE`",
    ):
        assert text in cli
    fields = configuration_page.page()
    for text in (
        "| `silence_seconds` | `float` | `5.0` |",
        "| `model_path` | `str` | required |",
        "| `step_timeout_s` |",
    ):
        assert text in fields
    endpoints = http_page.page()
    for text in ("## POST /v1/chat/completions", "### ChatRequest", "| `max_tokens` |", "## GET /health"):
        assert text in endpoints


def test_the_tables_of_parameters_are_what_the_code_says() -> None:
    page = parameter_tables.PAGE.read_text(encoding="utf-8")
    assert parameter_tables.rendered(page) == page, "python docs/generate/parameter_tables.py writes them"
    for row in (
        "| `top_p` | above 0, to 1 |",
        "| `max_output_tokens` |",
        "| `stop_sequences` |",
        "| `stop_regex` |",
    ):
        assert row in page
    assert page.count("<!-- parameters: ") == page.count("<!-- end -->") == 17


def test_the_tables_of_modules_are_what_the_modules_say() -> None:
    assert module_tables.main(["--check"]) == 0, "python docs/generate/module_tables.py writes them"
