"""Which weights serve a model when its groups do not all have the same. Pure.

    weights of the first group that serves ──► in force while a group that has them serves
                                          ──► its groups leave, drain, or are away for long ──► the others' weights

Two checkpoints can have one tokenizer, so nothing but the digest of their weights tells them apart. Without this
rule, an upgrade of the weights would answer half of the requests with one model and half with the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from typing import Final, NamedTuple, TypeVar

SETTLE_SECONDS: Final = 2.0
"""Time in seconds after weights came into force in which older groups that are found take their place. So routers
that start while two sets of weights serve choose alike, in whatever order they reach the groups."""
HOLD_SECONDS: Final = 10.0
"""Time in seconds for which weights stay in force that no group serves at the moment, if some group that has them
has not left: it may have lost its connection, or be started again after a fault."""
_CHECK_SECONDS: Final = 2.0
"""Weights that a group served this short a time ago are not looked for again when nothing has changed."""

Group = TypeVar("Group", bound=Hashable)


class Said(NamedTuple):
    """What a group says of itself, as far as it matters here."""

    weights: str
    """Digest of its checkpoint."""
    serves: bool
    """Whether it takes requests."""
    leaves: bool = False
    """Whether it drains."""
    epoch: int = 0
    """Epoch of its workers: milliseconds since 1970 as a rule, so the smaller one has served for longer."""


class WeightsInForce(Collection[Group]):
    """The weights that serve one model; as a collection, the groups that have told theirs."""

    def __init__(self) -> None:
        self.current = ""
        """Digest of the weights in force; "": none are."""
        self._groups: dict[Group, Said] = {}
        self._counts = Counter[str]()
        self._since = float("-inf")
        """When the present weights came into force."""
        self._served_at = float("-inf")
        """When a group with the present weights was last seen to serve."""

    def __len__(self) -> int:
        """Return the number of groups that are known."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups))

    def __contains__(self, group: object) -> bool:
        return group in self._groups

    def note(self, group: Group, said: Said, now: float) -> None:
        """Note what a group says of itself. `said`: has weights. `now`: the time in seconds."""
        before = self._groups.get(group)
        if said != before:
            self._drop(group)
            self._groups[group] = said
            self._counts[said.weights] += 1
        if said.serves and said.weights == self.current:
            self._served_at = now
        is_settled = now - self._since >= SETTLE_SECONDS and now - self._served_at < _CHECK_SECONDS
        if said != before or not is_settled:
            self._choose(now)

    def lost(self, group: Group, now: float) -> None:
        """Note that a group's connection was lost."""
        if said := self._groups.get(group):
            self.note(group, said._replace(serves=False), now)

    def forget(self, group: Group, now: float) -> None:
        """Note that a group is no member any more, or serves another model."""
        if self._drop(group):
            self._choose(now)

    def refuses(self, group: Group) -> str:
        """Return the digest of the weights in force if a group must not be used beside them; "": it may. That a
        group drains needs no further reason."""
        said = self._groups.get(group)
        if said is None or said.leaves or said.weights == self.current:
            return ""
        return self.current

    def _drop(self, group: Group) -> bool:
        said = self._groups.pop(group, None)
        if said is None:
            return False
        self._counts[said.weights] -= 1
        if not self._counts[said.weights]:
            del self._counts[said.weights]
        return True

    def _choose(self, now: float) -> None:
        if list(self._counts) == [self.current]:
            return
        groups = list(self._groups.values())
        serving = [said for said in groups if said.serves]
        is_serving = any(said.weights == self.current for said in serving)
        if is_serving and now - self._since >= SETTLE_SECONDS:
            return
        may_serve_again = any(said.weights == self.current and not said.leaves for said in groups)
        if not is_serving and may_serve_again and now - self._served_at < HOLD_SECONDS:
            return
        oldest = min(serving, key=lambda said: (said.epoch, said.weights), default=None)
        chosen = oldest.weights if oldest else ""
        if chosen != self.current:
            self.current = chosen
            if not is_serving:
                self._since = now
        self._served_at = now if oldest else float("-inf")
