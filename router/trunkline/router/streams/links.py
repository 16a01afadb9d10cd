"""The connections to the controllers that are members of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from trunkline.controller.messages import WentOn
from trunkline.router.routing.request import Left
from trunkline.router.streams.link import ControllerLink


class Links(Collection[ControllerLink]):
    """The connections by slot (`routing/slots.py`). Controllers come and go, so slots may be missing."""

    def __init__(self) -> None:
        self._links: dict[int, ControllerLink] = {}
        self.on_remove: Callable[[ControllerLink], None] = lambda link: None
        """Called when a connection was removed."""

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[ControllerLink]:
        """Return the connections in the order of their slots."""
        return iter(self._links.values())

    def __contains__(self, link: object) -> bool:
        return isinstance(link, ControllerLink) and self._links.get(link.index) is link

    def __getitem__(self, slot: int) -> ControllerLink:
        return self._links[slot]

    def get(self, slot: int) -> ControllerLink | None:
        """Return the connection with a slot; None: no controller has it."""
        return self._links.get(slot)

    def conversation_left(self, left: Left) -> None:
        """Tell a group that a conversation goes on at another one."""
        for link in self:
            if link.member.id == left.member:
                link.tell(lambda _: WentOn(left.names, left.prompt_tokens))

    def add(self, link: ControllerLink) -> None:
        """Add a connection."""
        self._links = dict(sorted({**self._links, link.index: link}.items()))

    def remove(self, link: ControllerLink) -> None:
        """Remove a connection."""
        self._links = {slot: each for slot, each in self._links.items() if each is not link}
        self.on_remove(link)
