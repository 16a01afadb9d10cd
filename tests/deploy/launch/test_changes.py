"""What `up` does to the units that run."""

from __future__ import annotations

import pytest
from deploy.launch.plans import plan

from trunkline.deploy.launch.changes import decide, difference
from trunkline.deploy.launch.plan import Plan
from trunkline.deploy.launch.protocol import Place, UnitState
from trunkline.deploy.launch.unit_options import command_rules


@pytest.fixture(scope="module")
def smallest() -> Plan:
    return plan("version: 1", command_rules())


def running(smallest: Plan, state: str = "ready", digest: str = "d", version: str = "1") -> dict[Place, UnitState]:
    return {
        (unit.host, unit.name): UnitState(
            name=unit.name, kind=unit.kind, state=state, digest=digest, version=version, argv=list(unit.argv)
        )
        for unit in smallest.units
    }


DIGESTS = {"group-0": "d", "router": "d"}


def test_nothing_runs(smallest: Plan) -> None:
    decision = decide(smallest, DIGESTS, {"local": "1"}, {})
    assert decision.start == ["group-0", "router"]
    assert not decision.is_disruptive


@pytest.mark.parametrize("state", ["starting", "ready", "unready", "waiting"])
def test_what_runs_as_it_should_stays(smallest: Plan, state: str) -> None:
    decision = decide(smallest, DIGESTS, {"local": "1"}, running(smallest, state))
    assert decision.keep == ["group-0", "router"]
    assert not decision.is_disruptive


@pytest.mark.parametrize("state", ["stopped", "failed", "gone"])
def test_what_has_ended_is_started(smallest: Plan, state: str) -> None:
    assert decide(smallest, DIGESTS, {"local": "1"}, running(smallest, state)).start == ["group-0", "router"]


def test_what_is_different_is_changed_and_said(smallest: Plan) -> None:
    decision = decide(smallest, {**DIGESTS, "router": "e"}, {"local": "1"}, running(smallest))
    assert decision.change == {"router": "its environment or its wire keys"}
    assert decide(smallest, DIGESTS, {"local": "2"}, running(smallest)).change["group-0"] == "version 1 → 2"
    assert decision.is_disruptive


def test_what_the_file_does_not_name_is_stopped_or_forgotten(smallest: Plan) -> None:
    states = running(smallest)
    for name, state in (("old", "ready"), ("older", "stopped")):
        states["local", name] = UnitState(name=name, kind="group", state=state)
    states["elsewhere", "group-0"] = UnitState(name="group-0", kind="group", state="ready")
    decision = decide(smallest, DIGESTS, {"local": "1"}, states)
    assert decision.extra == [("local", "old"), ("elsewhere", "group-0")]
    assert decision.forget == [("local", "older")]
    assert decision.keep == ["group-0", "router"]


def test_differences_are_told_option_by_option() -> None:
    old, new = ["group", "m", "--tp=1", "--a=1", "--x"], ["group", "m", "--tp=2", "--x", "--b=3"]
    assert difference(old, new) == "--tp=1 → 2, without --a=1, with --b=3"
