"""The page about the file says what the program reads."""

from __future__ import annotations

import re
from pathlib import Path

from trunkline.deploy.launch.document import parse
from trunkline.deploy.launch.fileformat import read
from trunkline.deploy.launch.option_rules import command_rules
from trunkline.deploy.launch.plan import make_plan
from trunkline.deploy.launch.reference import table

PAGE = (Path(__file__).parents[3] / "docs/launch.md").read_text()


def test_the_table_of_fields_is_up_to_date() -> None:
    """`python -m trunkline.deploy.launch.reference` prints it."""
    assert table() in PAGE


def test_files_on_the_page_can_be_planned() -> None:
    found = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert found
    for text in found:
        document = parse(text, "docs/launch.md")
        assert make_plan(document, read(document), command_rules(), name="c").units
