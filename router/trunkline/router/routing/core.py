"""The choice of a controller for a request, from index, loads, circuit breakers, sessions and a rule. Pure.

      route ──► Decision ──► sent(ticket) ──► started(ticket) ──► ended(ticket)
                             load, expected     no queued          no load
                             chunks, session    tokens any more

A *ticket* is one sending of one request to one controller. `route` changes nothing but whose turn it is among
equals, so a decision that is not carried out leaves nothing behind.

Controllers come and go. Each has a name and, as long as it is here, a slot (`slots.py`): the number by which all
methods and arrays know it. Arrays have room for more slots than there are controllers; a slot without a controller
is never available.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from trunkline.controller.messages import Holder, KeptChunks
from trunkline.kvstore.adapters import adapter_of
from trunkline.kvstore.chunks import blocks_for
from trunkline.router.errors import RouterError
from trunkline.router.routing.controllers import (
    Breaker,
    FloatArray,
    Loads,
    SentRequest,
    SessionPlaces,
    resized,
)
from trunkline.router.routing.decision_log import DecisionLog
from trunkline.router.routing.index import TIERS, ChunkIndex, Columns, IntArray
from trunkline.router.routing.names import KvIdentity, prompt_names, with_kept
from trunkline.router.routing.overlaps import Found, best_way, known_tails, left_behind, missing, own_tail
from trunkline.router.routing.peers import NOTHING, Given, Run, holders, keeps_cut, kept_runs, pullable, sleeping
from trunkline.router.routing.policies import POLICIES, Policy, RoutingSettings, TieBreaker, View
from trunkline.router.routing.request import Decision, RouteRequest, Sleeping, Weighed
from trunkline.router.routing.roles import Prospect, StreamGroup, prefill_group
from trunkline.router.routing.slots import Slots
from trunkline.router.routing.tails import Tails
from trunkline.router.routing.traits import Traits

_NONE: Final = np.zeros(0, np.int64)
_ONES: Final = np.ones(TIERS, np.int64)
_FLOAT_ONES: Final = np.ones(TIERS)
"""Both add up tiers: in matrices this small, `take` and `dot` are several times faster than indexing and `sum`."""
__all__ = ["Decision", "NoControllerError", "RouteRequest", "RoutingCore", "RoutingSettings"]


class NoControllerError(RouterError):
    """No controller can take the request now."""

    def __init__(self, message: str, wait_seconds: float) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds
        """Seconds until a controller that has failed may be tried again; infinity: waiting alone does not help."""


class RoutingCore:
    """Chooses controllers. Times are seconds of any clock that does not go back."""

    def __init__(
        self,
        controllers: Iterable[str] = (),
        policy: str = "prefix",
        *,
        settings: RoutingSettings | None = None,
        replica_seed: int = 0,
    ) -> None:
        """
        Args:
            controllers: names of those that are there from the start; they get the slots 0, 1, ….
            policy: name of a rule in `POLICIES`.
            settings: None: the defaults.
            replica_seed: differs between routers, so that they do not all choose the same one of equal
                controllers.

        Raises:
            ValueError: there is no such policy, or a setting is wrong.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
        self.settings = settings or RoutingSettings()
        self.settings.validate()
        self.index = ChunkIndex(0, self.settings.index_bytes_max)
        self.loads = Loads(0)
        self.traits = Traits(self.settings.host_worth, self.settings.disk_worth, self.settings.peer_worth)
        """What controllers have told of themselves."""
        self.log = DecisionLog()
        self._policy_name = policy
        self._policy: Policy = POLICIES[policy](self.settings, TieBreaker(replica_seed))
        self._slots = Slots()
        self._available = np.zeros(0, bool)
        self._breakers: list[Breaker] = []
        self._failing: set[int] = set()
        """Controllers whose breakers are not closed."""
        self._warming: set[int] = set()
        self._sessions = SessionPlaces(self.settings.sessions_max)
        self._tails = Tails()
        names = list(controllers)
        self._grow(len(names))
        for name in names:
            self.add(name)

    # Controllers that come and go

    @property
    def names(self) -> Sequence[str]:
        """By slot: the name of the controller that is there or was there a moment ago; ""."""
        return self._slots.names

    def add(self, name: str) -> int:
        """Add a controller, which is not available yet, and return its slot.

        A controller that was removed less than `slots.AWAY_SECONDS` ago gets its old slot. Its chunks are still in
        the index, and count until its next snapshot replaces them. Its load and its failures begin anew.

        Raises:
            ValueError: a controller with this name is there.
        """
        slot = self._slots.add(name)
        if slot >= len(self._available):
            self._grow(max(slot + 1, 2 * len(self._available)))
        if slot not in self.index:
            self.index.add(slot)
        self._breakers[slot] = Breaker()
        self.traits.reset(slot)
        return slot

    def remove(self, slot: int, now: float) -> None:
        """Remove a controller: it gets no more requests. Those that it has end as usual, and it may still export
        (`Traits.set_exports`). Another controller gets the slot when they have ended and the time is over in
        which this one may come back.

        Raises:
            ValueError: there is no such controller.
        """
        self._slots.remove(slot, now)
        self._available[slot] = False
        self._failing.discard(slot)
        self._warming.discard(slot)
        self.loads.lost(slot)
        self._forget_gone(now)

    def _grow(self, slots: int) -> None:
        self.index.grow(slots)
        self.loads.grow(slots)
        self.traits.grow(slots)
        self._available = resized(self._available, slots)
        self._breakers += [Breaker() for _ in range(slots - len(self._breakers))]

    def _forget_gone(self, now: float) -> None:
        """Forget the controllers that were away for too long."""
        while (slot := self._slots.next_gone(now)) >= 0:
            self.index.remove(slot)
            self.traits.reset(slot)
            self._free_unused(slot)

    def _free_unused(self, slot: int) -> None:
        if not self.loads.own_inflight[slot]:
            self._slots.free(slot)

    # What is known of controllers

    def peers(self, controller: int) -> IntArray:
        """Return the controllers that a controller exchanges chunks with, and itself, ascending: the same array
        as long as nothing changes; []: none."""
        identity = self.traits.identity(controller)
        return _NONE if identity is None or not self.traits.exports(controller) else self.traits.peers(identity)

    def set_available(self, controller: int, available: bool) -> None:
        """Set whether a controller can take requests. Only a change has an effect: a controller that comes back
        after failures gets a single request first. One that was removed stays unavailable."""
        if not self._slots.is_present(controller):
            return
        if not available:
            self.loads.lost(controller)
        elif not self._available[controller]:
            self._breakers[controller].back()
        self._available[controller] = available

    def set_warming(self, controller: int, warming: bool) -> None:
        """Set whether a controller fetches what it will need first. Then it gets requests only if no other can
        take them."""
        (self._warming.add if warming else self._warming.discard)(controller)

    def is_available(self, controller: int, now: float) -> bool:
        """Return whether a request may be sent to a controller."""
        return bool(self._available[controller]) and self._breakers[controller].allows(now)

    def inflight(self, controller: int) -> int:
        """Return how many of this router's requests a controller has."""
        return int(self.loads.own_inflight[controller])

    # A request's life

    def route(self, request: RouteRequest, now: float, *, in_full: bool = True) -> Decision:
        """Return which controller should get a request. Without `in_full` the decision may say no more, if there
        is one controller only and none from which it could pull: `sent` decides the rest, behind the message.

        Raises:
            NoControllerError: no controller can take it now.
            ValueError: see `prompt_names`.
        """
        self._forget_gone(now)
        candidates, prefills = self._candidates(request, now)
        is_plain = not (len(prefills) or request.drops or request.layout)
        if not in_full and is_plain and len(candidates) == 1 and len(self.peers(only := int(candidates[0]))) <= 1:
            return Decision(only, "only", 0, 0, [], 0.0, 0.0, [])
        return self._decide(request, candidates, prefills, now)

    def _decide(self, request: RouteRequest, candidates: IntArray, prefills: IntArray, now: float) -> Decision:
        found, tiers, effective, pulled, tail = self._look_up(request, now)
        prompt = max((each.names.prompt_tokens for each in found.values()), default=request.prompt_tokens)
        new, goes_on, loads, matched = prompt - effective, -1, self.loads, tiers.dot(_ONES)
        inflight, queued = loads.inflight, loads.queued
        displaced = loads.displaced(prompt + request.output_tokens - matched, queued)
        costs = self.settings.costs(new, displaced, inflight, queued)
        if request.pinned >= 0:
            chosen, reason = request.pinned, "pinned"
        elif request.planned >= 0 and request.planned in candidates:
            chosen, reason = request.planned, "planned"
        elif len(candidates) == 1:
            chosen, reason = int(candidates[0]), "only"
        else:
            view = View(
                candidates,
                prompt,
                self.traits.chunk_size,
                new,
                matched,
                inflight,
                loads.own_inflight,
                queued,
                loads.own_queued,
                loads.own_blocks,
                loads.running,
                loads.kv_used,
                costs,
                request.session,
                self._slots.find(self._sessions.find(request.session)) if request.session else -1,
                request.home,
                self._slots.names,
                tail,
            )
            chosen, reason = self._policy.choose(view)
        if request.may_part and len(prefills):
            apart = self._apart(chosen, prompt - int(matched[chosen]), int(pulled[chosen]), prefills, new)
            if apart >= 0:
                chosen, goes_on, reason = apart, chosen, "prefill"
        own = found[identity] if (identity := self.traits.identity(chosen)) is not None else None
        pulls = self.traits.exports(chosen)
        given = NOTHING if own is None or not pulls else self._from_peers(own, chosen)
        return Decision(
            chosen,
            reason or self._policy_name,
            max(0, prompt - int(matched[chosen])),
            int(matched[chosen]),
            tiers[chosen].tolist(),
            float(costs[chosen]),
            min(costs.take(candidates).tolist()),
            missing(own, chosen) if own is not None else [],
            blocks_for(prompt, int(self.traits.chunk_size[chosen])),
            Weighed(candidates, tiers, costs, self._slots.names),
            self._slots.names[chosen],
            own.tail if own is not None else None,
            int(pulled[chosen]) if pulls else 0,
            given.holders,
            given.sleeping,
            goes_on,
            given.texts,
            given.kept,
            left_behind(own, given.holders, prompt),
        )

    def sent(self, ticket: int, decision: Decision, request: RouteRequest, now: float) -> Decision:
        """Note that a request was sent as decided; return the whole decision.

        Raises:
            ValueError: the ticket is in use.
        """
        controller = decision.controller
        if decision.weighed is None:
            decision = self._decide(request, np.array([controller]), _NONE, now)
        self.log.add(decision, request, now)
        breaker = self._breakers[controller]
        computed = decision.new_tokens - decision.pulled_tokens
        self.loads.sent(ticket, SentRequest(controller, computed, decision.blocks, now, breaker))
        self.index.expect(ticket, controller, decision.names, now)
        goes_on = self._slots.names[decision.goes_on] if decision.goes_on >= 0 else ""
        if decision.tail is not None and not goes_on:
            self._tails.expect(ticket, decision.tail, decision.name)
        breaker.sent(ticket)
        if request.session:
            self._sessions.sent(request.session, goes_on or decision.name)
        return decision

    def started(self, ticket: int, now: float) -> None:
        """Note that a request's prompt is computed. Do nothing if its ticket is unknown or has started before."""
        live = self.loads.started(ticket)
        if live is not None:
            self.index.settle(ticket, now)
            live.breaker.succeeded(live.sent_at)
            if self._breakers[live.controller].is_closed:
                self._failing.discard(live.controller)

    def ended(self, ticket: int, now: float, *, failed: bool = False) -> None:
        """Note that a request has ended in any way. Do nothing if its ticket is unknown or has ended before.

        Args:
            failed: whether the controller is at fault: it or its workers were lost, or it did not answer. False if
                the request was wrong or refused, or its client left.
        """
        live = self.loads.ended(ticket)
        if live is None:
            return
        live.breaker.ended(ticket)
        self._tails.ended(ticket, now, is_kept=live.started and not failed)
        if failed:
            live.breaker.failed(live.sent_at, now)
            if live.breaker is self._breakers[live.controller] and self._slots.is_present(live.controller):
                self._failing.add(live.controller)
        if failed or not live.started:
            self.index.drop(ticket)
        if self._slots.is_gone(live.controller):
            self._free_unused(live.controller)

    # Inside

    def _candidates(self, request: RouteRequest, now: float) -> tuple[IntArray, IntArray]:
        """Return the controllers that can take a request, and the prefill groups that can compute its prompt for
        one of them."""
        usable = self._available
        if request.model or request.salt:
            usable = usable & self.traits.serves(request.model, adapter_of(request.salt))
        served = usable
        paused = [i for i in self._failing if not self._breakers[i].allows(now)]
        if paused:
            usable = usable.copy()
            usable[paused] = False
        if request.pinned >= 0:
            if not usable[request.pinned]:
                wait = self._breakers[request.pinned].wait_seconds(now)
                raise NoControllerError(
                    f"controller {self._slots.names[request.pinned]}, which the request needs, is not available",
                    wait if self._available[request.pinned] else float("inf"),
                )
            return np.array([request.pinned]), _NONE
        if True not in usable.tolist():
            waits = [self._breakers[i].wait_seconds(now) for i in np.flatnonzero(served)]
            raise NoControllerError("no controller is available", min(waits, default=float("inf")))
        if request.exclude:
            rest = usable.copy()
            rest[list(request.exclude)] = False
            if rest.any():
                usable = rest
        if self._warming:
            rest = usable.copy()
            rest[list(self._warming)] = False
            if rest.any():
                usable = rest
        prefills = _NONE
        if self.traits.prefills:
            rest = usable.copy()
            rest[self.traits.prefills] = False
            if rest.any():
                usable, prefills = rest, (usable & ~rest).nonzero()[0]
        return usable.nonzero()[0], prefills

    def _apart(self, chosen: int, lacking: int, pulled: int, prefills: IntArray, work: FloatArray) -> int:
        """Return the prefill group that is to compute a prompt whose stream goes on at the chosen controller; -1:
        the chosen one computes it."""
        traits, identity = self.traits, self.traits.identity(chosen)
        if identity is None or not traits.exports(chosen):
            return -1
        stream = StreamGroup(chosen, lacking - pulled, lacking, traits.is_decode(chosen))
        prospect = Prospect(work, self.loads.queued, self.loads.inflight, traits.times)
        return prefill_group(stream, np.intersect1d(prefills, traits.peers(identity)), prospect, self.settings)

    def _look_up(
        self, request: RouteRequest, now: float
    ) -> tuple[dict[KvIdentity, Found], IntArray, FloatArray, IntArray, int]:
        """Look up what is cached of a request's prompt.

        Returns:
            The names of the prompt's chunks by identity; the cached tokens, `[controllers, 4]`; by controller the
            number of computed tokens that they save, those that it can pull included; by controller the tokens
            that it can pull; and `View.tail`.
        """
        count = len(self._available)
        tiers = np.zeros((count, TIERS), np.int64)
        effective = np.zeros(count)
        pulled = np.zeros(count, np.int64)
        found: dict[KvIdentity, Found] = {}
        longest, tail = 0, -1
        serves = self.traits.serves(request.model) if request.model else None
        for identity, controllers in self.traits.members.items():
            members = controllers if serves is None else controllers[serves[controllers]]
            if not len(members):
                continue
            names = prompt_names(request, identity)
            matches = [self.index.look_up(chain.names, now) for chain in names.chains]
            if names.kept is not None:
                names, matches = with_kept(names, matches, lambda names: self.index.look_up(names, now))
            overlaps = [(chain, match.counts) for chain, match in zip(names.chains, matches, strict=True)]
            tail_of = own_tail(request.tokens, names, identity.chunk_size)
            peers = self.traits.peers(identity)
            own_found = found[identity] = Found(names, overlaps, tail_of, matches, peers)
            cached = best_way(overlaps).take(members, axis=0)
            whole = cached.dot(_ONES)
            for name, depth, tokens in known_tails(request.tokens, own_found, whole, self._tails, now):
                own = np.flatnonzero((members == self._slots.find(name)) & (whole >= depth))
                cached[own[whole[own] == depth], -1] += tokens
                if len(own) and depth + tokens > longest:
                    longest, tail = depth + tokens, int(members[own[0]])
            tiers[members] = cached
            saved = (cached * self.traits.worth.take(members, axis=0)).dot(_FLOAT_ONES)
            if len(peers) and matches[-1].known:
                whole = cached.dot(_ONES) if tail >= 0 else whole
                columns = self.index.columns(peers)
                reach = pulled[members] = pullable(own_found, members, whole, columns, has_tail=tail >= 0)
                saved += reach * self.traits.pull_worth.take(members)
            effective[members] = saved
        return found, tiers, effective, pulled, tail

    def _from_peers(self, found: Found, chosen: int) -> Given:
        """Return which peers have what a controller lacks: chunks in host memory and then on disk, or what they
        have kept behind the prompt's cut; and chunks of texts."""
        *told, expected = found.last.counts[chosen].tolist()
        has = 0 if expected else sum(told)
        if not len(found.peers) or (has == found.last.known and len(found.matches) == 1):
            return NOTHING
        columns, shift, chain = self.index.columns(found.peers), self.index.shift(chosen), found.names.chains[-1]
        leaves, inflight = self.traits.leaves, self.loads.inflight
        texts = self._texts_from_peers(found, columns, shift) if len(found.matches) > 1 else {}
        runs, at = holders(found.last, shift, columns, leaves, inflight, start=has)
        if found.names.kept is not None:
            kept = kept_runs(found, shift, columns, leaves, inflight)
            if kept is not None and kept.tokens > at * chain.tokens:
                packed = b"".join(kept.chain.names[: kept.runs[-1].stop])
                return Given([], None, {}, KeptChunks(packed, self._as_holders(kept.runs)))
            if keeps_cut(found, np.array([chosen])).any():
                return NOTHING
        given, asleep = self._as_holders(runs), None
        if at < found.last.known and (disk := sleeping(found.last, at, columns)) is not None:
            asleep = Sleeping(disk.controller, chain.names[at], (disk.stop - disk.start) * chain.tokens)
        return Given(given, asleep, texts, None)

    def _texts_from_peers(self, found: Found, columns: Columns, shift: int) -> dict[int, list[Holder]]:
        """Return which peers have chunks in host memory of texts that a controller lacks, by the text."""
        given: dict[int, list[Holder]] = {}
        for chain, match in zip(found.names.chains, found.matches, strict=True):
            if chain.text >= 0 and match.known:
                runs, _ = holders(match, shift, columns, self.traits.leaves, self.loads.inflight)
                if runs:
                    given[chain.text] = self._as_holders(runs)
        return given

    def _as_holders(self, runs: list[Run]) -> list[Holder]:
        return [Holder(self.names[giver], self.traits.exports(giver), start, stop) for giver, start, stop in runs]
