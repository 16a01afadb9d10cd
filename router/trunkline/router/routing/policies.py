"""Routing rules. Pure: a rule sees what is known of all controllers and names one that can take the request.

`PrefixAware` is Trunkline's. The others are what it is compared with: simple ones, and the rules of other systems,
which here look at the same exact index, so that a comparison shows the rule and not the index:

      rule          value of a controller                                             chosen
      prefix        (new prefill + floor) · (1 + requests / 2 + queued tokens / T)    lowest, but a session stays
      sglang        see `Sglang`; the load is that of the router's own requests
      dynamo        queued prompt + new prefill + prompts in memory, in blocks        lowest
      lmetric       new prefill · (requests + 1)                                      lowest
      llm-d         3 · cached part + 2 · relative queue + 2 · free KV                highest

Of equal values none is preferred: they take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.router.routing.index import IntArray
from trunkline.router.routing.loads import FloatArray
from trunkline.router.routing.rendezvous import rendezvous_among

_EQUAL: Final = 1.0 + 1e-9
"""Values that differ by no more than rounding are equal."""
_SGLANG_ABSOLUTE: Final = 32
_SGLANG_RELATIVE: Final = 1.1
_SGLANG_MATCHED: Final = 0.5


class RoutingSettings(msgspec.Struct, frozen=True):
    """Of the prefix-aware rule; what they are worth is measured in `benchmarks/routing.py`."""

    chunk_tokens: int = 2048
    """T: prompt tokens waiting that double what a request costs: about what a step computes."""
    request_tokens: int = 1024
    """What each request weighs, in prompt tokens that wait: its decode steps, and the memory that it holds. Less
    than T: a queue of prompts delays a first token more than rows that decode."""
    floor_tokens: int = 512
    """Added to what a request has to compute, so that the load counts even where all of its prompt is cached."""
    stay_ratio: float = 1.5
    """A session stays where it is unless the cost there exceeds the best one by this."""
    near_ratio: float = 1.25
    """Of a new session, if nothing of it is cached anywhere, all controllers whose cost is within this of the best
    are equal, and it goes where all routers would send it."""
    host_worth: float = 0.9
    """What a cached token saves that has to come from host memory, of what one on the device saves, while neither
    loading nor computing has been measured; …"""
    disk_worth: float = 0.5
    """… the same from disk."""
    sessions_max: int = 100_000
    """Sessions whose places are remembered."""
    index_bytes_max: int = 256 << 20
    """See `ChunkIndex`."""

    def validate(self) -> None:
        """
        Raises:
            ValueError: what is wrong.
        """
        for name in ("chunk_tokens", "floor_tokens", "sessions_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.request_tokens < 0:
            raise ValueError(f"request_tokens is {self.request_tokens}; it must be at least 0")
        for name in ("stay_ratio", "near_ratio"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("host_worth", "disk_worth"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")


class View(msgspec.Struct, frozen=True):
    """What a rule sees of a request and of all controllers (arrays by controller)."""

    candidates: IntArray
    """The controllers that can take it, ascending; at least one."""
    prompt_tokens: int
    chunk_size: IntArray
    new_tokens: FloatArray
    """Prompt tokens to compute; those that are loaded count in part."""
    matched_tokens: IntArray
    """Prompt tokens that are cached, in whichever tier."""
    inflight: FloatArray
    own_inflight: FloatArray
    queued: FloatArray
    own_queued: FloatArray
    own_blocks: FloatArray
    running: FloatArray
    kv_used: FloatArray
    costs: FloatArray
    """By the prefix-aware rule."""
    session: str
    place: int
    """Where this router sent its session's last request; -1: not known."""
    home: int


class Turns:
    """Whose turn it is among equals. Routers that begin with different seeds do not all favour the same."""

    def __init__(self, seed: int) -> None:
        self._turn = seed * 7919

    def pick(self, equals: IntArray) -> int:
        """Return the one of `equals` whose turn it is; there is at least one."""
        if len(equals) == 1:
            return int(equals[0])
        self._turn += 1
        return int(equals[self._turn % len(equals)])

    def lowest(self, values: NDArray[np.float64], candidates: IntArray) -> int:
        """Return the candidate with the lowest value.

        Args:
            values: by controller; not negative.
        """
        among = values[candidates]
        return self.pick(candidates[among <= among.min() * _EQUAL])


class Policy(Protocol):
    """A rule."""

    def __init__(self, settings: RoutingSettings, turns: Turns) -> None: ...

    def choose(self, view: View) -> tuple[int, str]:
        """Return one of the candidates, and the reason (`Decision.reason`); "": the rule's name."""


class _Rule:
    def __init__(self, settings: RoutingSettings, turns: Turns) -> None:
        self.settings = settings
        self.turns = turns


class PrefixAware(_Rule):
    """The lowest cost, but a session stays where it is unless that is much dearer.

    Where it is: where more of its prompt is than anywhere else, or else where this router sent it last. So routers
    agree about sessions whose turns reach now one, now the other.
    """

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        costs, candidates = view.costs, view.candidates
        among = costs[candidates]
        best = among.min()
        if view.session:
            for where, reason in ((self._place(view), "session"), (view.home, "home")):
                if where < 0:
                    continue
                if where in candidates and costs[where] <= self.settings.stay_ratio * best:
                    return where, reason
                break
            else:
                is_new = not view.matched_tokens[candidates].any()
                near = candidates[among <= best * (self.settings.near_ratio if is_new else _EQUAL)]
                chosen = rendezvous_among(view.session, near.tolist())
                return chosen, "prefix" if view.matched_tokens[chosen] else "load"
        if view.home in candidates and costs[view.home] <= self.settings.stay_ratio * best:
            return view.home, "home"  # of its schema, whose modules are computed there
        chosen = self.turns.pick(candidates[among <= best * _EQUAL])
        return chosen, "prefix" if view.matched_tokens[chosen] else "load"

    def _place(self, view: View) -> int:
        """-1: not known."""
        matched = view.matched_tokens[view.candidates]
        deepest = np.flatnonzero(matched == matched.max())
        return int(view.candidates[deepest[0]]) if len(deepest) == 1 else view.place


class RoundRobin(_Rule):
    """One after the other."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        return self.turns.pick(view.candidates), ""


class LeastLoaded(_Rule):
    """Fewest requests."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        return self.turns.lowest(view.inflight, view.candidates), ""


class SessionHash(_Rule):
    """A session always goes to the same controller; what has none, to the least loaded."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        if view.session:
            return rendezvous_among(view.session, view.candidates.tolist()), ""
        return self.turns.lowest(view.inflight, view.candidates), ""


class Sglang(_Rule):
    """Shortest queue if the queues are out of balance; else the one that has most of the prompt, if that is more
    than half of it; else the least loaded. Knows the router's own requests only."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        load = view.own_inflight[view.candidates]
        is_unbalanced = load.max() - load.min() > _SGLANG_ABSOLUTE and load.max() > _SGLANG_RELATIVE * load.min()
        matched = view.matched_tokens[view.candidates]
        if not is_unbalanced and matched.max() > _SGLANG_MATCHED * view.prompt_tokens:
            return self.turns.pick(view.candidates[matched == matched.max()]), ""
        return self.turns.lowest(view.own_inflight, view.candidates), ""


class Dynamo(_Rule):
    """Least work: prompt tokens still to be computed, this request's included, and blocks in use, all in blocks.

    Blocks in use are those of the prompts of the router's own live requests, each counted for itself.
    """

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        prefill = np.maximum(0.0, view.queued + view.prompt_tokens - view.matched_tokens)
        return self.turns.lowest(prefill / view.chunk_size + view.own_blocks, view.candidates), ""


class LMetric(_Rule):
    """New prefill times requests."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        new = view.prompt_tokens - view.matched_tokens
        return self.turns.lowest(new * (view.inflight + 1.0), view.candidates), ""


class LlmD(_Rule):
    """A weighted sum of what is cached, of how short the queue is among all, and of free KV. The queue is what
    does not run: all requests that are known of, less those that were last reported to run."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        queue = np.maximum(0.0, view.inflight - view.running)
        among = queue[view.candidates]
        width = among.max() - among.min()
        shortness = (among.max() - queue) / width if width else np.ones(len(queue))
        cached = view.matched_tokens / max(1, view.prompt_tokens)
        lack = 7.0 - (3.0 * cached + 2.0 * shortness + 2.0 * (1.0 - view.kv_used))
        return self.turns.lowest(np.maximum(0.0, lack), view.candidates), ""


POLICIES: Final[dict[str, Callable[[RoutingSettings, Turns], Policy]]] = {
    "prefix": PrefixAware,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "session-hash": SessionHash,
    "sglang": Sglang,
    "dynamo": Dynamo,
    "lmetric": LMetric,
    "llm-d": LlmD,
}
"""By the name that `--policy` takes."""
