"""What `up` does: the plan beside the units that the hosts know. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trunkline.deploy.launch.plan import Plan
from trunkline.deploy.launch.protocol import Place, UnitState

ENDED: Final = ("stopped", "failed", "gone")
"""States of units that do not run, and are not started again by themselves."""


@dataclass
class Decision:
    """The decisions of `up`: which units it keeps, starts, restarts, stops or forgets."""

    keep: list[str] = field(default_factory=list)
    """Units that run as they should."""
    start: list[str] = field(default_factory=list)
    change: dict[str, str] = field(default_factory=dict)
    """Units that run in another way than the plan says, with the difference in words."""
    extra: list[Place] = field(default_factory=list)
    """Units that run but are not in the file."""
    forget: list[Place] = field(default_factory=list)
    """Units that ran once and are not in the file."""

    @property
    def is_disruptive(self) -> bool:
        """Whether a running unit would be stopped."""
        return bool(self.change or self.extra)


def decide(
    plan: Plan, digests: Mapping[str, str], versions: Mapping[str, str], states: Mapping[Place, UnitState]
) -> Decision:
    """Return the decision of `up` about each unit.

    Args:
        digests: Digests of the plan's units.
        versions: Versions of Trunkline, by host.
        states: States of all units that the hosts know.
    """
    decision = Decision()
    places = {(unit.host, unit.name) for unit in plan.units}
    for unit in plan.units:
        state = states.get((unit.host, unit.name))
        if state is None or state.state in ENDED:
            decision.start.append(unit.name)
        elif state.digest != digests[unit.name]:
            decision.change[unit.name] = difference(state.argv, list(unit.argv))
        elif state.version != versions[unit.host]:
            decision.change[unit.name] = f"version {state.version} → {versions[unit.host]}"
        else:
            decision.keep.append(unit.name)
    for place, state in states.items():
        if place not in places:
            (decision.forget if state.state in ENDED else decision.extra).append(place)
    return decision


def difference(old: list[str], new: list[str]) -> str:
    """Return the difference between two command lines in words."""
    gone, come = [word for word in old if word not in new], [word for word in new if word not in old]
    parts = []
    for word in gone:
        name = word.partition("=")[0]
        match = next((other for other in come if other.partition("=")[0] == name), None)
        if match is not None:
            come.remove(match)
            parts.append(f"{word} → {match.partition('=')[2] or match}")
        else:
            parts.append(f"without {word}")
    parts += [f"with {word}" for word in come]
    return ", ".join(parts) or "its environment or its wire keys"
