"""The adapters of a group: which its ranks have, which are being read or are on their way out. Pure.

    configuration ─► new workers: all are ordered ─┐                 ┌─ all ranks have it: requests may use it
    AdapterCall ──► load: one is ordered ──────────┴─► AdapterReady ─┴─ one has not: it is dropped, with the reason
                └─► unload: no new request may use it; the ranks forget it when no request does any more

Workers have no memory of adapters: new ones are told all of them before they get requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

import structlog

from trunkline.controller.config import ADAPTERS_MAX
from trunkline.controller.messages import AdapterCall
from trunkline.controller.reports import AdapterReady
from trunkline.kvstore.adapters import adapter_of
from trunkline.router.messages import AdapterReply, LoadedAdapter
from trunkline.worker.messages import LoadAdapter, UnloadAdapter

NAME_CHARACTERS_MAX: Final = 256
_PATH_CHARACTERS_MAX: Final = 4096

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Adapter:
    name: str
    path: str
    key: bytes = b""
    """Empty: no ranks have had it."""
    ticket: int = 0
    """Number of the order to the ranks."""
    found: dict[int, bytes] = field(default_factory=dict)
    """Its key by rank, as far as ranks have answered."""
    problem: str = ""
    is_loading: bool = False
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Routers, and their tickets, that wait for the answer."""
    leftover: set[bytes] = field(default_factory=set)
    """Keys of earlier adapters of this name that ranks may still have: forgotten when this one's key is known."""


class Adapters:
    """What a controller knows of its group's adapters."""

    def __init__(self, configured: Mapping[str, str], rank_max: int, ranks: int) -> None:
        """
        Args:
            configured: Their folders by name.
            rank_max: Largest rank of an adapter that is accepted.
            ranks: Number of the group's ranks.
        """
        self._by_name = {name: _Adapter(name, path) for name, path in configured.items()}
        self._leaving: list[_Adapter] = []
        """Adapters that are being unloaded, but that requests still use."""
        self._gone: dict[bytes, str] = {}
        """Why adapters that earlier ranks had are not on the present ones, by their keys."""
        self._rank_max, self._ranks = rank_max, ranks
        self._tickets = 0
        self._has_workers = False
        self._changed = False
        self.orders: list[LoadAdapter | UnloadAdapter] = []
        """Orders to be sent to all ranks, in this order."""
        self.replies: list[tuple[int, AdapterReply]] = []
        """Replies to be sent to the routers with these numbers, after the new state."""

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The adapters that requests may use."""
        serving = filter(self._serves, self._by_name.values())
        return [LoadedAdapter(each.name, each.path, each.key) for each in serving]

    @staticmethod
    def _serves(adapter: _Adapter) -> bool:
        return bool(adapter.key) and not adapter.is_loading

    def problem_of(self, salt: bytes) -> str:
        """Return why a request with this salt cannot run; "": it can."""
        key = adapter_of(salt)
        if not key or any(each.key == key and self._serves(each) for each in self._by_name.values()):
            return ""
        return "its adapter is not loaded here (any more)"

    def lost_workers(self) -> None:
        """Note that the ranks are gone, and their adapters with them."""
        self._has_workers = False
        self.orders.clear()

    def are_loaded(self) -> bool:
        """Return whether new ranks have, or have refused, all adapters; order them at the first call."""
        everything = [*self._by_name.values(), *self._leaving]
        if not self._has_workers:
            self._has_workers = True
            self._gone.clear()
            for each in everything:
                self._order(each)
        return not any(each.is_loading for each in everything)

    def call(self, router: int, call: AdapterCall) -> None:
        """Begin to load an adapter, or unload one."""
        if not call.path:
            self._unload(router, call)
            return
        known = self._by_name.get(call.name)
        problem, was_so = "", False
        if known is not None and known.path == call.path:
            if known.is_loading:
                known.asked.append((router, call.ticket))
                return
            was_so = True
        elif known is not None:
            problem = f"adapter {call.name!r} is loaded from {known.path}; unload it first"
        elif not 0 < len(call.name) <= NAME_CHARACTERS_MAX:
            problem = f"an adapter's name has 1 to {NAME_CHARACTERS_MAX} characters"
        elif len(call.path) > _PATH_CHARACTERS_MAX:
            problem = f"an adapter's path has at most {_PATH_CHARACTERS_MAX} characters"
        elif len(self._by_name) >= ADAPTERS_MAX:
            problem = f"{ADAPTERS_MAX} adapters are loaded, which is the largest number; unload one first"
        elif not self._has_workers:
            problem = "the group is starting; try again when it is ready"
        if problem or was_so:
            self._reply(router, call.ticket, problem, was_so=was_so)
            return
        adapter = self._by_name[call.name] = _Adapter(call.name, call.path, asked=[(router, call.ticket)])
        self._order(adapter)

    def _unload(self, router: int, call: AdapterCall) -> None:
        adapter = self._by_name.get(call.name)
        if adapter is not None and adapter.is_loading:
            self._reply(router, call.ticket, f"adapter {call.name!r} is being loaded; try again in a moment")
            return
        if adapter is not None:
            del self._by_name[call.name]
            self._leaving.append(adapter)
            self._changed = True
            log.info("adapter unloaded", name=call.name)
        self._reply(router, call.ticket, was_so=adapter is None)

    def _order(self, adapter: _Adapter) -> None:
        self._tickets += 1
        adapter.ticket, adapter.is_loading, adapter.problem = self._tickets, True, ""
        adapter.found.clear()
        adapter.leftover.clear()
        self.orders.append(LoadAdapter(adapter.ticket, adapter.name, adapter.path, self._rank_max))

    def _reply(self, router: int, ticket: int, problem: str = "", *, was_so: bool = False) -> None:
        self.replies.append((router, AdapterReply(0, ticket, problem, was_so)))

    def report(self, report: AdapterReady) -> None:
        """Take what a rank says of an order. Reports of orders to earlier ranks are passed over."""
        everything = (*self._by_name.values(), *self._leaving)
        adapter = next((each for each in everything if each.ticket == report.ticket and each.is_loading), None)
        if adapter is None or report.rank in adapter.found:
            return
        adapter.found[report.rank] = report.key
        adapter.problem = adapter.problem or report.problem
        if len(adapter.found) == self._ranks:
            self._conclude(adapter)

    def _conclude(self, adapter: _Adapter) -> None:
        """Use an adapter that all ranks have, or drop it."""
        keys = set(adapter.found.values())
        if not adapter.problem and len(keys) > 1:
            adapter.problem = f"adapter {adapter.name!r}: the ranks read other files in {adapter.path}"
        adapter.is_loading, self._changed = False, True
        if adapter.problem:
            log.error(
                "an adapter cannot be loaded; it counts as unloaded", name=adapter.name, problem=adapter.problem
            )
            self._gone[adapter.key] = f"adapter {adapter.name!r} cannot be loaded any more: {adapter.problem}"
            if self._by_name.get(adapter.name) is adapter:
                del self._by_name[adapter.name]
            else:
                self._leaving.remove(adapter)
            self._forget(adapter, keys | adapter.leftover)
        else:
            self._gone[adapter.key] = f"adapter {adapter.name!r} has other files than before in {adapter.path}"
            adapter.key = keys.pop()
            self._forget(adapter, adapter.leftover - {adapter.key})
        for router, ticket in adapter.asked:
            self._reply(router, ticket, adapter.problem)
        adapter.asked.clear()

    def _forget(self, adapter: _Adapter, keys: AbstractSet[bytes]) -> None:
        """Have the ranks forget these keys, unless another adapter has them. One of the same name that is being
        loaded may turn out to have one: then they are left to it."""
        for each in (*self._by_name.values(), *self._leaving):
            if each is not adapter and each.name == adapter.name and each.is_loading:
                each.leftover |= keys
                return
        self.orders += [UnloadAdapter(key) for key in sorted(keys - {b""} - self._keys(adapter))]

    def _keys(self, but: _Adapter) -> set[bytes]:
        return {each.key for each in (*self._by_name.values(), *self._leaving) if each is not but}

    @property
    def present(self) -> set[bytes]:
        """The keys of all adapters that the ranks have."""
        return {each.key for each in (*self._by_name.values(), *self._leaving) if self._serves(each)}

    def why_gone(self, key: bytes) -> str:
        """Return why the ranks do not have an adapter that earlier ones had."""
        return self._gone.get(key, "its adapter is not loaded here (any more)")

    def turn(self, used: Callable[[], AbstractSet[bytes]]) -> bool:
        """Forget the unloaded adapters that no request uses any more. Return whether what requests may use has
        changed since the last call.

        Args:
            used: Returns the keys of all requests' adapters. It is called only if adapters are leaving.
        """
        if self._leaving and self._has_workers:
            keys = used()
            # One that is being loaded under the same name may turn out to have the same key.
            loading = {each.name for each in (*self._by_name.values(), *self._leaving) if each.is_loading}
            for adapter in [each for each in self._leaving if each.key not in keys and each.name not in loading]:
                self._leaving.remove(adapter)
                if adapter.key not in self._keys(adapter):
                    self.orders.append(UnloadAdapter(adapter.key))
        changed, self._changed = self._changed, False
        return changed

    def take_replies(self) -> list[tuple[int, AdapterReply]]:
        """Return the replies since the last call."""
        taken, self.replies = self.replies, []
        return taken
