"""Change the number of groups of a cluster that serves. Pure.

    more    the processes of the new groups are started; each group that has become ready is published to routers
    fewer   the groups with the highest numbers are published no more; their streams finish or go on in other
            groups, and then their processes end

A *published* group is one that routers know. `fleet.py` owns the groups and feeds the events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from trunkline.deploy.supervisor.members import Action, CommandError, Limits, Member, Publish, Say, Tell
from trunkline.deploy.supervisor.units import Group, Mode

Further = Callable[[int, Sequence[int]], Sequence[Member]]
"""Returns the members of groups that are missing, given how many groups there are to be and the numbers of those
that are missing. Raises `CommandError` if there is no room for them; the text says for what."""


def no_further(count: int, missing: Sequence[int]) -> Sequence[Member]:
    """Refuse further groups: see `Further`."""
    raise CommandError(
        "the number of groups cannot be changed here; only `trunkline serve` starts groups. On several hosts, "
        "start another `trunkline group`, or change the cluster file and say `trunkline launch up`"
    )


class Scaling:
    """Which groups routers know, and a change of their number that is under way."""

    def __init__(self, groups: list[Group], limits: Limits, further: Further) -> None:
        """`groups`: the groups in the order of their numbers. The list is changed in place."""
        self._groups = groups
        self._limits = limits
        self._further = further
        self._published = {group.number for group in groups}
        self._count = len(groups)
        """The number of groups that there are to be. Those with higher numbers are leaving."""
        self._ticket: int | None = None
        """The ticket of the command under way."""

    def begin(self, count: int, ticket: int, now: float, busy: Iterable[Group]) -> list[Action]:
        """Begin to change the number of groups; a change that is under way is superseded.

        Args:
            count: the number of groups that there are to be.
            busy: groups that are being restarted.

        Raises:
            CommandError: it is not possible; nothing has changed.
        """
        for group in busy:
            if group.number >= count:
                raise CommandError(f"{group.title} is being restarted; try again when it is ready")
        present = {group.number for group in self._groups}
        missing = [number for number in range(count) if number not in present]
        # A cluster whose groups are started elsewhere cannot lose any here, either.
        members = self._further(count, missing)
        self._check_that_some_serve(count, missing)
        actions: list[Action] = []
        if self._ticket is not None:
            actions.append(Tell(self._ticket, f"changed again, to {_groups(count)}", done=True, ok=False))
        self._ticket, self._count = ticket, count
        change = f"from {_groups(len(present))} to {_groups(count)}"
        actions += [Tell(ticket, change), Say(f"Scaling {change}.")]
        returning = [
            group for group in self._groups if group.number < count and group.number not in self._published
        ]
        for number in missing:
            own = [member for member in members if member.group == number]
            returning.append(Group(number, own, self._limits, now, runs=False))
        self._groups[:] = sorted({*self._groups, *returning}, key=lambda group: group.number)
        self._published = {number for number in self._published if number < count}
        actions.append(self._publish())  # before the groups stop; and again, if it has failed before
        for group in returning:
            actions += group.start(now)
        for group in self._groups:
            if group.number >= count:
                actions += group.stop(Mode.DOWN, now)
        return actions

    def go_on(self) -> list[Action]:
        """Publish new groups that are ready, forget groups that have ended, and answer when all is done."""
        actions: list[Action] = []
        new = [g for g in self._groups if g.number < self._count and g.number not in self._published]
        ready = {group.number for group in new if group.is_ready}
        if ready:
            self._published |= ready
            actions.append(self._publish())
        failed = [group for group in new if group.outcome]  # given up, or drained before it was ready
        leaving = [group for group in self._groups if self.is_leaving(group)]
        for group in [*failed, *leaving]:
            if group.has_ended and (group.mode is Mode.LOST or group in leaving):
                self._groups.remove(group)
        failed += [group for group in leaving if group.mode is Mode.LOST and not group.has_ended]
        if failed:
            return [*actions, *self._end("; ".join(f"{each.title} {each.outcome}" for each in failed), ok=False)]
        if len(self._groups) == self._count == len(self._published):
            return [*actions, *self._end(f"the cluster has {_groups(self._count)} now", ok=True)]
        return actions

    def is_leaving(self, group: Group) -> bool:
        """Return whether a group ends because there are to be fewer groups."""
        return group.number >= self._count and group.number not in self._published

    def close(self) -> list[int]:
        """End the change that is under way without an answer, and return its ticket, if there is one."""
        ticket, self._ticket = self._ticket, None
        return [] if ticket is None else [ticket]

    def _check_that_some_serve(self, count: int, missing: Sequence[int]) -> None:
        """Refuse to stop the last groups that run, while those that would stay are down."""
        staying = [group for group in self._groups if group.number < count]
        returning = [group for group in staying if group.number not in self._published]
        if missing or returning or not all(_is_down(group) for group in staying):
            return
        if all(_is_down(group) for group in self._groups):
            return
        names = ", ".join(group.title for group in staying)
        raise CommandError(
            f"no group would be left: {names} {'is' if len(staying) == 1 else 'are'} down; "
            f"`trunkline undrain {staying[0].number}` starts {staying[0].title}"
        )

    def _end(self, text: str, *, ok: bool) -> list[Action]:
        tickets = self.close()
        said = [Say(f"Scaling: {text}.", "info" if ok else "warning")] if tickets else []
        return [*said, *(Tell(ticket, text, done=True, ok=ok) for ticket in tickets)]

    def _publish(self) -> Publish:
        return Publish(tuple(sorted(self._published)))


def _is_down(group: Group) -> bool:
    return group.is_to_be_down or group.mode is Mode.LOST


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"
