"""The dashboard's files: digests and licences of what others wrote, weight, and no address of anybody else."""

from __future__ import annotations

import hashlib
import re

from trunkline.router.ui.assets import FOLDER, PAGE

VENDOR = FOLDER / "vendor"
ROW = re.compile(
    r"^\| `([^`]+)` \| `[^`]+`, `[^`]+` \| [\d.]+ \| [\w.-]+ \| `([^`]+)` \| `([0-9a-f]{64})` \|$", re.MULTILINE
)
WEIGHT_MAX = 400_000


def test_vendored_files_are_listed_with_their_digests() -> None:
    rows = ROW.findall((VENDOR / "VENDORED.md").read_text())
    assert {name: digest for name, _, digest in rows} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.suffix in (".js", ".css", ".woff2")
    }
    assert {text for _, text, _ in rows} == {path.name for path in VENDOR.glob("LICENSE.*")}


def test_the_page_is_light() -> None:
    files = [path for path in FOLDER.rglob("*") if path.suffix in (".html", ".js", ".css", ".woff2", ".svg")]
    assert sum(path.stat().st_size for path in files) < WEIGHT_MAX


def test_all_that_the_page_names_is_there() -> None:
    names = re.findall(r'(?:src|href)="ui/static/([^"]+)"', (FOLDER / PAGE).read_text())
    assert len(names) > 10
    assert [name for name in names if not (FOLDER / name).is_file()] == []


def test_own_files_name_no_other_host_and_parse_no_html() -> None:
    own = [FOLDER / PAGE, *(FOLDER / "js").rglob("*.js"), *(FOLDER / "css").glob("*.css")]
    for path in own:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|\beval\(|document\.write", text), path.name
    page = (FOLDER / PAGE).read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", page)
