"""What `up` has to do, from what should run and what does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trunkline.deploy.launch.plan import Plan
from trunkline.deploy.launch.protocol import UnitState

ENDED: Final = ("stopped", "failed", "gone")
"""States of what does not run, and will not by itself."""
Place = tuple[str, str]
"""Host and unit."""


@dataclass
class Decision:
    """Units by what becomes of them."""

    keep: list[str] = field(default_factory=list)
    """They run as they should."""
    start: list[str] = field(default_factory=list)
    change: dict[str, str] = field(default_factory=dict)
    """They run in another way; with what is different."""
    extra: list[Place] = field(default_factory=list)
    """They run, but the file does not know them."""
    forget: list[Place] = field(default_factory=list)
    """They ran once, and the file does not know them."""

    @property
    def is_disruptive(self) -> bool:
        """Whether something that runs is stopped."""
        return bool(self.change or self.extra)


def decide(
    plan: Plan, digests: Mapping[str, str], versions: Mapping[str, str], states: Mapping[Place, UnitState]
) -> Decision:
    """
    Args:
        digests: of the plan's units.
        versions: of Trunkline, by host.
        states: of all that the hosts know.
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
    """What is told of two command lines."""
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
