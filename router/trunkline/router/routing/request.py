"""What a choice of a controller depends on, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.controller.messages import PromptLayout


class Origin(msgspec.Struct, frozen=True):
    """Whose request it is, as people know it; no choice depends on this."""

    request: str = ""
    """The HTTP request's id."""
    tenant: str = ""
    session: str = ""
    """As its client named it."""


class RouteRequest(msgspec.Struct, frozen=True):
    """A request that is to be sent to a controller."""

    tokens: bytes
    """int32, little-endian: the prompt, or of a prompt with modules its own tokens; of a stream that goes on
    elsewhere with its output so far."""
    salt: bytes = b""
    session: str = ""
    """Requests with the same one belong together; tenants must not share any. "": none."""
    home: int = -1
    """The controller that keeps the record of its session or schema, and most likely the KV; -1: none does."""
    drops: tuple[tuple[int, int], ...] = ()
    """As in `Submit`."""
    layout: PromptLayout | None = None
    """As in `Submit`."""
    exclude: frozenset[int] = frozenset()
    """Controllers that have just failed it: used only if there is no other."""
    pinned: int = -1
    """It can run on this controller only; -1: on any."""
    names: Sequence[bytes] | None = None
    """The names of its whole chunks, if the caller knows them; then `token_count` counts, and `tokens`, `salt`,
    `drops` and `layout` are not looked at. For controllers of one identity only. None: as computed from the
    tokens."""
    token_count: int = 0
    """Tokens of the prompt; with `names` only."""
    origin: Origin = Origin()


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """What was known of all controllers when a choice was made."""

    candidates: NDArray[np.int64]
    """Those that could take it."""
    tiers: NDArray[np.int64]
    """Prompt tokens that each has, `[controllers, 4]`: device, host, disk, expected there."""
    costs: NDArray[np.float64]
    """By the prefix-aware rule, of all."""


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and why."""

    controller: int
    reason: str
    """"prefix": it is cheapest there, and some of it is cached there; "load": it is cheapest there; "session": its
    session's last request went there; "home": its session's record is there; "only": no other can take it;
    "pinned"; or the name of a policy other than the prefix-aware one."""
    new_tokens: int
    """Prompt tokens that will have to be computed there, as far as is known, …"""
    cached_tokens: int
    """… those that are found there in some tier, …"""
    tier_tokens: list[int]
    """… by where they are: device, host, disk, expected to be computed by other requests."""
    cost: float
    """Of this controller, by the prefix-aware rule, whatever the policy …"""
    best_cost: float
    """… and of the cheapest one."""
    names: list[bytes]
    """Of those of its chunks that the controller has not told of, for `ChunkIndex.expect`."""
    blocks: int = 0
    """Chunks that its prompt takes there."""
    weighed: Weighed | None = None
    """For people."""
