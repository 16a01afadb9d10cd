"""What a supervisor does outside its own processes: start further groups, and say which groups there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.deploy.supervisor.members import Member
from trunkline.deploy.supervisor.scaling import no_further


@dataclass(frozen=True)
class ChildSpec:
    """A process to run."""

    member: Member
    argv: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    """File descriptors that it inherits, under the same numbers."""


class Membership:
    """Does nothing, for a part of a cluster whose groups are listed by others."""

    def grow(self, count: int, missing: Sequence[int]) -> Sequence[ChildSpec]:
        """Return how to start the processes of further groups.

        Args:
            count: The number of groups that there are to be.
            missing: The numbers of the groups that are missing.

        Raises:
            CommandError: There is no room for them, or none can be started here.
        """
        no_further(count, missing)
        return []

    def publish(self, groups: Sequence[int]) -> None:
        """Tell routers which groups there are.

        Args:
            groups: The numbers of the groups.

        Raises:
            OSError: That cannot be written; routers know the groups of the last time.
        """

    def leave(self) -> None:
        """Take note that the supervisor stops. Return at once."""
