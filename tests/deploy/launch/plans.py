"""Plans of clusters from the text of their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trunkline.deploy.launch.document import Document, FileError, parse
from trunkline.deploy.launch.fileformat import read
from trunkline.deploy.launch.plan import Plan, Unit, make_plan
from trunkline.deploy.launch.resources import Facts
from trunkline.deploy.launch.unit_options import Rules


def plan(text: str, rules: Rules, facts: dict[str, Facts] | None = None) -> Plan:
    return planned(parse(text, "c.yaml"), rules, facts)


def planned(document: Document, rules: Rules, facts: dict[str, Facts] | None = None) -> Plan:
    return make_plan(document, read(document), rules, facts, "c", Path("/files"))


def problem(text: str, rules: Rules, facts: dict[str, Facts] | None = None) -> str:
    with pytest.raises(FileError) as caught:
        plan(text, rules, facts)
    return str(caught.value)


def option(unit: Unit, name: str) -> str | None:
    found = [word.partition("=")[2] for word in unit.argv if word.startswith(f"--{name}=")]
    assert len(found) <= 1, unit.argv
    return found[0] if found else None
