"""What controllers have told of themselves: the names of their chunks, their model, how long they take to load and
to compute, where they export KV to peers, and their roles. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.tier import TierKind
from trunkline.router.routing.controllers import resized
from trunkline.router.routing.index import TIERS, IntArray
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.roles import DECODE, PREFILL

_UNKNOWN_CHUNK: Final = 64
"""Number of tokens of a chunk that is assumed until a controller has reported its own."""
_NOBODY: Final = np.zeros(0, np.int64)


class _Models:
    """Which model controllers serve, and which adapters they have."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._of = np.zeros(0, np.int64)
        """Number of the model that each controller serves; 0: not known."""
        self._adapters: dict[int, frozenset[bytes]] = {}
        """Keys of the adapters of those controllers that have any."""

    def grow(self, controllers: int) -> None:
        self._of = resized(self._of, controllers)

    def forget(self, controller: int) -> None:
        self._of[controller] = 0
        self._adapters.pop(controller, None)

    def set(self, controller: int, model: str, adapters: Sequence[bytes]) -> None:
        self._of[controller] = self._numbers.setdefault(model, len(self._numbers) + 1)
        if adapters:
            self._adapters[controller] = frozenset(adapters)
        else:
            self._adapters.pop(controller, None)

    def serves(self, model: str, adapter: bytes) -> NDArray[np.bool_]:
        served = np.ones(len(self._of), bool)
        if model:
            served = self._of == self._numbers.get(model, -1)
        if adapter:
            lacking = [i for i in range(len(served)) if adapter not in self._adapters.get(i, ())]
            served[lacking] = False
        return served


class Traits:
    """What controllers have told of themselves; arrays are by controller."""

    def __init__(self, host_worth: float, disk_worth: float, peer_worth: float) -> None:
        """The arguments are parts of the work of computing a token that a cached token saves, until measured."""
        self.members: dict[KvIdentity, IntArray] = {}
        """The controllers of each identity."""
        self.chunk_size = np.zeros(0, np.int64)
        self.worth = np.zeros((0, TIERS))
        """Part of the work of computing a token that a cached token of each tier saves, 0 to 1; `[controllers,
        4]`."""
        self.pull_worth = np.zeros(0)
        """The same for a token that the controller pulls from a peer; 0: it pulls none."""
        self.leaves = np.zeros(0, bool)
        """Whether the controller drains, so that what only it has will be lost."""
        self.times = np.zeros((0, 2))
        """Measured times to compute and to pull a prompt token, `[controllers, 2]`; 0: not known."""
        self._roles: dict[int, str] = {}
        """Roles of the controllers whose role is not "both"."""
        self._peers: dict[KvIdentity, IntArray] = {}
        """The controllers of each identity that export chunks and pull them."""
        self._exports: dict[int, list[str]] = {}
        self._identities: dict[int, KvIdentity] = {}
        self._models = _Models()
        self._default_worth = (1.0, host_worth, disk_worth, 1.0)
        self._measured_pull_worth = np.zeros(0)
        self._default_pull_worth = peer_worth

    def grow(self, controllers: int) -> None:
        """Make room for so many controllers."""
        self.chunk_size = resized(self.chunk_size, controllers)
        self.worth = resized(self.worth, controllers)
        self.pull_worth = resized(self.pull_worth, controllers)
        self.leaves = resized(self.leaves, controllers)
        self.times = resized(self.times, controllers)
        self._models.grow(controllers)
        self._measured_pull_worth = resized(self._measured_pull_worth, controllers)

    def reset(self, controller: int) -> None:
        """Forget what a controller has told."""
        self.chunk_size[controller] = _UNKNOWN_CHUNK
        self.worth[controller] = self._default_worth
        self._measured_pull_worth[controller] = self._default_pull_worth
        self._models.forget(controller)
        self.times[controller] = 0.0
        self._roles.pop(controller, None)
        self.set_exports(controller, [])
        if self._identities.pop(controller, None) is not None:
            self._group()

    def identity(self, controller: int) -> KvIdentity | None:
        """Return how a controller names its chunks; None: not known."""
        return self._identities.get(controller)

    def set_identity(self, controller: int, identity: KvIdentity) -> None:
        """Set how a controller names its chunks."""
        if self._identities.get(controller) != identity:
            self._identities[controller] = identity
            self.chunk_size[controller] = identity.chunk_size
            self._group()

    def set_model(self, controller: int, model: str, adapters: Sequence[bytes] = ()) -> None:
        """Set which model a controller serves, by its main name, and the keys of its adapters."""
        self._models.set(controller, model, adapters)

    def serves(self, model: str, adapter: bytes = b"") -> NDArray[np.bool_]:
        """Return by controller whether it serves a model and has the adapter with this key. Empty: whatever."""
        return self._models.serves(model, adapter)

    def set_costs(self, controller: int, prefill_us: float, load_us: Sequence[float]) -> None:
        """Set the times per prompt token that a controller has measured.

        Args:
            prefill_us: time to compute a token; 0: not measured.
            load_us: time to load a token, by `TierKind`; 0 or left out: not measured.
        """

        def worth(tier: int, default: float) -> float:
            load = load_us[tier] if tier < len(load_us) else 0.0
            return 1.0 - min(1.0, load / prefill_us) if prefill_us > 0 and load > 0 else default

        for tier in (TierKind.HOST, TierKind.DISK):
            self.worth[controller, tier] = worth(tier, self._default_worth[tier])
        self.times[controller] = prefill_us, load_us[TierKind.PEER] if len(load_us) > TierKind.PEER else 0.0
        self._measured_pull_worth[controller] = worth(TierKind.PEER, self._default_pull_worth)
        self._set_pull_worth(controller)

    # Roles

    @property
    def prefills(self) -> list[int]:
        """The prefill groups."""
        return [controller for controller, role in self._roles.items() if role == PREFILL] if self._roles else []

    def is_decode(self, controller: int) -> bool:
        """Return whether a controller's role is "decode"."""
        return self._roles.get(controller) == DECODE

    def set_role(self, controller: int, role: str) -> None:
        """Set a controller's role: "both", "prefill" or "decode". Any other counts as "both"."""
        self._roles.pop(controller, None)
        if role in (PREFILL, DECODE):
            self._roles[controller] = role

    # Peers

    def peers(self, identity: KvIdentity) -> IntArray:
        """Return the controllers with an identity that exchange chunks with each other, ascending."""
        return self._peers.get(identity, _NOBODY)

    def exports(self, controller: int) -> list[str]:
        """Return where a controller's ranks export KV, by rank; []: they export none."""
        return self._exports.get(controller, [])

    def set_exports(self, controller: int, endpoints: Sequence[str], *, leaves: bool = False) -> None:
        """Set where a controller's ranks export KV to peers, by rank, and whether it drains. []: its ranks export
        none, and pull none."""
        self.leaves[controller] = leaves
        if self.exports(controller) == list(endpoints):
            return
        if endpoints:
            self._exports[controller] = list(endpoints)
        else:
            del self._exports[controller]
        self._set_pull_worth(controller)
        self._group()

    def _set_pull_worth(self, controller: int) -> None:
        pulls = controller in self._exports
        self.pull_worth[controller] = self._measured_pull_worth[controller] if pulls else 0.0

    def _group(self) -> None:
        members: dict[KvIdentity, list[int]] = {}
        for controller, identity in self._identities.items():
            members.setdefault(identity, []).append(controller)
        self.members = {identity: np.array(sorted(slots)) for identity, slots in members.items()}
        self._peers = {
            identity: np.array(peers)
            for identity, slots in members.items()
            if len(peers := sorted(self._exports.keys() & slots)) > 1
        }
