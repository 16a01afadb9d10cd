"""What `up` does to what runs."""

from __future__ import annotations

import pytest

from trunkline.deploy.launch.document import parse
from trunkline.deploy.launch.fileformat import read
from trunkline.deploy.launch.plan import Plan, decide, difference, make_plan
from trunkline.deploy.launch.protocol import UnitState
from trunkline.deploy.launch.unit_options import command_rules

Place = tuple[str, str]


@pytest.fixture(scope="module")
def plan() -> Plan:
    document = parse("version: 1", "c.yaml")
    return make_plan(document, read(document), command_rules(), name="c")


def running(plan: Plan, state: str = "ready", digest: str = "d", version: str = "1") -> dict[Place, UnitState]:
    return {
        (unit.host, unit.name): UnitState(
            name=unit.name, kind=unit.kind, state=state, digest=digest, version=version, argv=list(unit.argv)
        )
        for unit in plan.units
    }


DIGESTS = {"group-0": "d", "router": "d"}


def test_nothing_runs(plan: Plan) -> None:
    decision = decide(plan, DIGESTS, {"local": "1"}, {})
    assert decision.start == ["group-0", "router"]
    assert not decision.is_disruptive


@pytest.mark.parametrize("state", ["starting", "ready", "unready", "waiting"])
def test_what_runs_as_it_should_stays(plan: Plan, state: str) -> None:
    decision = decide(plan, DIGESTS, {"local": "1"}, running(plan, state))
    assert decision.keep == ["group-0", "router"]
    assert not decision.is_disruptive


@pytest.mark.parametrize("state", ["stopped", "failed", "gone"])
def test_what_has_ended_is_started(plan: Plan, state: str) -> None:
    assert decide(plan, DIGESTS, {"local": "1"}, running(plan, state)).start == ["group-0", "router"]


def test_what_is_different_is_changed_and_said(plan: Plan) -> None:
    decision = decide(plan, {**DIGESTS, "router": "e"}, {"local": "1"}, running(plan))
    assert decision.change == {"router": "its environment or its wire keys"}
    assert decide(plan, DIGESTS, {"local": "2"}, running(plan)).change["group-0"] == "version 1 → 2"
    assert decision.is_disruptive


def test_what_the_file_does_not_name_is_stopped_or_forgotten(plan: Plan) -> None:
    states = running(plan)
    for name, state in (("old", "ready"), ("older", "stopped")):
        states["local", name] = UnitState(name=name, kind="group", state=state)
    states["elsewhere", "group-0"] = UnitState(name="group-0", kind="group", state="ready")
    decision = decide(plan, DIGESTS, {"local": "1"}, states)
    assert decision.extra == [("local", "old"), ("elsewhere", "group-0")]
    assert decision.forget == [("local", "older")]
    assert decision.keep == ["group-0", "router"]


def test_differences_are_told_option_by_option() -> None:
    old, new = ["group", "m", "--tp=1", "--a=1", "--x"], ["group", "m", "--tp=2", "--x", "--b=3"]
    assert difference(old, new) == "--tp=1 → 2, without --a=1, with --b=3"
