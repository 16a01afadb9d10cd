"""The rules by which a controller is chosen. Pure.

The prefix-aware rule is Trunkline's. The others are what it is compared with: simple ones, and the rules of other
systems. Here all rules look at the same exact index, so that a comparison shows the rule and not the index:

      rule          value of a controller                                             chosen
      prefix        (new prefill + floor) · (1 + requests / 2 + queued tokens / T)    lowest, but a session stays
      sglang        see `Sglang`; the load is that of the router's own requests
      dynamo        queued prompt + new prefill + prompts in memory, in blocks        lowest
      lmetric       new prefill · (requests + 1)                                      lowest
      llm-d         3 · cached part + 2 · relative queue + 2 · free KV                highest

Controllers with equal values take turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.router.routing.controllers import FloatArray
from trunkline.router.routing.index import IntArray

_EQUAL: Final = 1.0 + 1e-9
"""Ratio up to which two values count as equal: they differ by rounding only."""
_SGLANG_ABSOLUTE: Final = 32
_SGLANG_RELATIVE: Final = 1.1
_SGLANG_MATCHED: Final = 0.5


class RoutingSettings(msgspec.Struct, frozen=True):
    """Settings of the prefix-aware rule; `benchmarks/routing.py` measures their effect."""

    chunk_tokens: int = 2048
    """Number of waiting prompt tokens that count as one unit of load: each unit raises the cost of a request by
    its cost at an idle controller. About the number of tokens that one step computes. It is T in the module's
    table."""
    request_tokens: int = 1024
    """Weight of each request, in waiting prompt tokens, for its decode steps and the memory that it holds. It is
    less than `chunk_tokens`: a queue of prompts delays a first token more than rows that decode."""
    floor_tokens: int = 512
    """Number of tokens that is added to those that a request has to compute, so that load counts even where its
    whole prompt is cached."""
    displaced_weight: float = 0.3
    """What it costs, in tokens to compute, that a token of the prompt takes the place of another one which the
    controller has: that one may have to be computed again."""
    stay_ratio: float = 1.5
    """Ratio of costs up to which a session stays at its controller: it moves if the cost there is more than the
    lowest cost times this ratio."""
    near_ratio: float = 1.25
    """Ratio of costs up to which controllers count as equal for a new session of which nothing is cached: their
    cost is at most the lowest cost times this ratio. The session goes to the one of them that all routers would
    choose."""
    host_worth: float = 0.9
    """Work that a cached token in host memory saves, as a part (0 to 1) of the work that a token on the device
    saves. Used until loading and computing have been measured."""
    disk_worth: float = 0.5
    """Work that a cached token on disk saves, as a part (0 to 1) of the work that a token on the device saves.
    Used until loading and computing have been measured."""
    peer_worth: float = 0.5
    """Work that a token pulled from another group saves, as a part (0 to 1) of the work of computing it. Used
    until pulling and computing have been measured."""
    long_tokens: int = 512
    """Number of tokens to compute from which on a prompt may be computed at a prefill group while its stream goes
    on elsewhere (`roles.py`)."""
    stream_weight: float = 1.0
    """How much a second for which a running stream waits counts beside a second for which the request waits whose
    prompt is computed there."""
    apart_tokens: int = 256
    """What it costs, in prompt tokens, that a stream goes on at another group than the one that has computed its
    prompt: a second attempt, and its last, partial chunk is computed again."""
    sessions_max: int = 100_000
    """Largest number of sessions whose controllers are remembered."""
    index_bytes_max: int = 256 << 20
    """Memory that the index of chunks may take, about (`ChunkIndex`)."""

    def costs(
        self, new: FloatArray, displaced: FloatArray, inflight: FloatArray, queued: FloatArray
    ) -> FloatArray:
        """Return what a request costs at each controller (`View.costs`), by the tokens to compute, those that must
        leave, and `Loads`."""
        waiting = (inflight * self.request_tokens + queued) / self.chunk_tokens
        return (new + self.displaced_weight * displaced + self.floor_tokens) * (1.0 + waiting)

    def validate(self) -> None:
        """Check each setting by itself.

        Raises:
            ValueError: naming the setting that is wrong.
        """
        for name in ("chunk_tokens", "floor_tokens", "sessions_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("request_tokens", "displaced_weight", "long_tokens", "apart_tokens", "stream_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("stay_ratio", "near_ratio"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("host_worth", "disk_worth", "peer_worth"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")


class View(msgspec.Struct, frozen=True):
    """The properties of a request and of all controllers that a rule sees. Arrays are by controller."""

    candidates: IntArray
    """The controllers that can take the request, ascending; at least one."""
    prompt_tokens: int
    chunk_size: IntArray
    new_tokens: FloatArray
    """Prompt tokens that each controller would have to compute; cached tokens that it has to load, and those that
    it can pull from peers, count in part."""
    matched_tokens: IntArray
    """Prompt tokens that each controller has cached, in any tier."""
    inflight: FloatArray
    """This array and those up to `kv_used` are as in `Loads`."""
    own_inflight: FloatArray
    queued: FloatArray
    own_queued: FloatArray
    own_blocks: FloatArray
    running: FloatArray
    kv_used: FloatArray
    costs: FloatArray
    """Cost of the request at each controller by the prefix-aware rule, in prompt tokens to compute, weighted by
    load (docs/routing.md)."""
    session: str
    place: int
    """The controller to which this router sent the session's last request; -1: not known."""
    home: int
    """The controller where the modules of the request's schema are pinned; -1: there is none."""
    names: Sequence[str]
    """The controllers' names."""
    tail: int = -1
    """The controller to which this router sent the last prompt with which this one begins, if that ended with an
    open tail: it is the conversation's last turn. -1: not known."""


class TieBreaker:
    """Chooses among equal controllers in turn. Routers with different seeds begin with different controllers."""

    def __init__(self, seed: int) -> None:
        self._turn = seed * 7919

    def pick(self, equals: IntArray) -> int:
        """Return the controller of `equals` (at least one) whose turn it is."""
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
    """A rule by which a controller is chosen."""

    def __init__(self, settings: RoutingSettings, ties: TieBreaker) -> None: ...

    def choose(self, view: View) -> tuple[int, str]:
        """Return one of the candidates, and the reason (`Decision.reason`); "": the rule's name."""


class _Rule:
    def __init__(self, settings: RoutingSettings, ties: TieBreaker) -> None:
        self.settings = settings
        self.ties = ties


class PrefixAware(_Rule):
    """Rule: choose the lowest cost, but leave a session at its controller unless that costs much more.

    A session's controller is the one that has more of its prompt than any other; if there is none, the one to
    which this router sent its last request. So routers agree about sessions whose turns reach different routers.
    A request without a session is taken for the next turn of a conversation if it goes on with an open tail, or if
    one controller has more of the prompt than any other, and more than half. It stays, too.
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
                chosen = rendezvous_among(view.session, near.tolist(), view.names)
                return chosen, "prefix" if view.matched_tokens[chosen] else "load"
        if view.home >= 0 and view.home in candidates and costs[view.home] <= self.settings.stay_ratio * best:
            return view.home, "home"  # the home of its schema, where the modules' KV was computed
        if view.tail >= 0 and view.tail in candidates and costs[view.tail] <= self.settings.stay_ratio * best:
            return view.tail, "tail"
        most = self._holder(view)
        goes_on = most >= 0 and 2 * view.matched_tokens[most] > view.prompt_tokens
        if goes_on and best * _EQUAL < costs[most] <= self.settings.stay_ratio * best:
            return most, "most"
        chosen = self.ties.pick(candidates[among <= best * _EQUAL])
        return chosen, "prefix" if view.matched_tokens[chosen] else "load"

    def _place(self, view: View) -> int:
        """Return the session's controller; -1: not known."""
        holder = self._holder(view)
        return holder if holder >= 0 else view.place

    @staticmethod
    def _holder(view: View) -> int:
        """Return the controller that has more of the prompt than any other; -1: there is none."""
        matched = view.matched_tokens.take(view.candidates)
        deepest = matched.argmax()
        is_only = np.count_nonzero(matched == matched[deepest]) == 1
        return int(view.candidates[deepest]) if is_only else -1


class RoundRobin(_Rule):
    """Rule: choose the controllers in turn."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        return self.ties.pick(view.candidates), ""


class LeastLoaded(_Rule):
    """Rule: choose the controller with the fewest requests."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        return self.ties.lowest(view.inflight, view.candidates), ""


class SessionHash(_Rule):
    """Rule: choose the same controller for all requests of a session, the least loaded one for other requests."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        if view.session:
            return rendezvous_among(view.session, view.candidates.tolist(), view.names), ""
        return self.ties.lowest(view.inflight, view.candidates), ""


class Sglang(_Rule):
    """SGLang's rule. If the queues are out of balance, choose the shortest queue. Otherwise choose the controller
    that has most of the prompt, if that is more than half of it, or else the least loaded one. Only the router's
    own requests count as load."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        load = view.own_inflight[view.candidates]
        is_unbalanced = load.max() - load.min() > _SGLANG_ABSOLUTE and load.max() > _SGLANG_RELATIVE * load.min()
        matched = view.matched_tokens[view.candidates]
        if not is_unbalanced and matched.max() > _SGLANG_MATCHED * view.prompt_tokens:
            return self.ties.pick(view.candidates[matched == matched.max()]), ""
        return self.ties.lowest(view.own_inflight, view.candidates), ""


class Dynamo(_Rule):
    """Dynamo's rule: choose the controller with the least work, counted in blocks. Work is the prompt tokens still
    to be computed, including this request's, and the blocks in use.

    Blocks in use are those of the prompts of the router's own live requests. Shared blocks count once per request.
    """

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        prefill = np.maximum(0.0, view.queued + view.prompt_tokens - view.matched_tokens)
        return self.ties.lowest(prefill / view.chunk_size + view.own_blocks, view.candidates), ""


class LMetric(_Rule):
    """LMetric's rule: choose the lowest product of new prefill and requests."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        new = view.prompt_tokens - view.matched_tokens
        return self.ties.lowest(new * (view.inflight + 1.0), view.candidates), ""


class LlmD(_Rule):
    """llm-d's rule: choose the highest weighted sum of the cached part of the prompt, of how short the queue is
    compared to the others, and of free KV. The queue is the number of known requests less those that were last
    reported to run."""

    def choose(self, view: View) -> tuple[int, str]:
        """See `Policy`."""
        queue = np.maximum(0.0, view.inflight - view.running)
        among = queue[view.candidates]
        width = among.max() - among.min()
        shortness = (among.max() - queue) / width if width else np.ones(len(queue))
        cached = view.matched_tokens / max(1, view.prompt_tokens)
        lack = 7.0 - (3.0 * cached + 2.0 * shortness + 2.0 * (1.0 - view.kv_used))
        return self.ties.lowest(np.maximum(0.0, lack), view.candidates), ""


POLICIES: Final[dict[str, Callable[[RoutingSettings, TieBreaker], Policy]]] = {
    "prefix": PrefixAware,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "session-hash": SessionHash,
    "sglang": Sglang,
    "dynamo": Dynamo,
    "lmetric": LMetric,
    "llm-d": LlmD,
}
"""The routing rules by the names that `--policy` takes."""


def rendezvous(key: str, names: Iterable[str]) -> str:
    """Return which of some controllers `key` belongs to, by their names (rendezvous hashing).

    It is the name with the highest hash of name and key, so that processes agree without talking. If a controller
    goes, only the keys that belonged to it move; if one is added, only those that belong to it from then on.

    Raises:
        ValueError: `names` is empty.
    """
    return max(names, key=lambda name: _hash(key, name))


def rendezvous_among(key: str, controllers: Iterable[int], names: Sequence[str]) -> int:
    """Return which of some controllers `key` belongs to.

    Args:
        names: of all controllers, by controller.

    Raises:
        ValueError: `controllers` is empty.
    """
    return max(controllers, key=lambda controller: _hash(key, names[controller]))


def _hash(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{name} {key}".encode(), digest_size=8).digest()
