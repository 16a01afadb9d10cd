"""Calls of routers about the texts of a schema: encode, pin or drop them, tell in which tiers they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.allocation.modules import find_text, name_texts
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.messages import ModulesCall, ModuleText
from trunkline.controller.scheduling.fair_queue import FairQueue
from trunkline.controller.scheduling.module_jobs import ModuleJobs, Wish
from trunkline.controller.sequences.module_prompt import CachedText
from trunkline.controller.sequences.sequence import Sequence as TokenSequence
from trunkline.controller.sequences.sequence import SequenceGroup
from trunkline.controller.tiers.fetching import Fetching
from trunkline.kvstore.chunks import TOKEN_BYTES, ChunkName, blocks_for, pack_int32
from trunkline.kvstore.module_names import RelocationRule
from trunkline.router.messages import ModulesReply

JOBS_AT_ONCE: Final = 32
"""Largest number of texts of all calls that are encoded at the same time (at least one of each call): enough to
fill steps, and few enough that new requests soon have their turn."""
TEXTS_PER_STEP: Final = 256
"""Largest number of texts of all calls that are named, or searched for, before one plan. Each takes some 20 µs:
the 20,000 texts of a large schema would stop every stream for half a second."""
PINNED_DEVICE_SHARE: Final = 0.5
"""Share of the device blocks that pins may take where there is no tier below."""


@dataclass(eq=False, slots=True)
class TextsCall:
    """A call to encode texts, to look for them, or to drop them. Compared by identity: jobs are registered under
    it."""

    id: int
    """Id of the call; negative for a call of the engine itself, which gets no answer."""
    sources: Sequence[ModuleText]
    salt: bytes
    moves: RelocationRule
    encodes: bool
    pin_name: str = ""
    ttl: float = 0.0
    forgets: bool = False
    tenant: str = ""
    pins: float = 1.0
    """Part of the room for pins that the tenant's pins may take."""
    texts: list[CachedText] = field(default_factory=list)
    """Texts that have been named. If the call encodes, each was present, is being encoded, or has been encoded."""
    tiers: list[int] = field(default_factory=list)
    """The tier of each text that was searched for after it was named, as in `ModulesReply`."""
    chunks: dict[Node, None] = field(default_factory=dict)
    """Chunks of the named texts, to be pinned, each once: texts that begin alike share chunks."""
    computed_tokens: int = 0

    @classmethod
    def of(cls, call_id: int, call: ModulesCall, *, positions_shift: bool) -> TextsCall:
        """Return a router's call. `positions_shift`: whether the model's KV can be read at other positions."""
        moves = RelocationRule.of(positions_shift, call.relocate)
        encodes, forgets = call.op == "encode", call.op == "forget"
        pin_name, ttl = (call.pin_name, call.ttl) if encodes else ("", 0.0)
        return cls(call_id, call.texts, call.salt, moves, encodes, pin_name, ttl, forgets, call.tenant, call.pins)


class ModuleCalls:
    """The calls that have no answer yet, and the chunks that calls have pinned."""

    def __init__(self, kv: KVCacheManager, jobs: ModuleJobs) -> None:
        self._kv = kv
        self._tree = kv.tree
        self._jobs = jobs
        self._left = 0
        """Number of texts that may still be named or searched for before the next plan."""
        self._calls: dict[int, TextsCall] = {}
        self._pinned: dict[str, list[Node]] = {}
        """The pinned chunks, by the name of the pin."""
        self._pinned_by: dict[str, TextsCall] = {}
        """The call that made a pin, by the name of the pin."""
        self.done: list[ModulesReply] = []
        self._forgotten: list[ChunkName] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def held(self) -> list[Node]:
        """The pinned chunks that are held on the device, because there is no tier below."""
        return [node for nodes in self._pinned.values() for node in nodes] if self._on_device else []

    @property
    def pinned_count(self) -> int:
        """Number of chunks that are pinned, each counted once."""
        return len({id(node) for nodes in self._pinned.values() for node in nodes})

    @property
    def _on_device(self) -> bool:
        return not self._tree.tiers.config.host_slots

    @property
    def is_busy(self) -> bool:
        """Whether calls have texts that could not be named or searched for before the last plan."""
        return bool(self._calls) and not self._left

    def begin(self, call: TextsCall, step: int, now: float) -> None:
        """Begin a call. Its answer comes to `done` when all texts have been searched for, and encoded if asked."""
        if call.id in self._calls:
            detail = "a call with this ticket has not been answered yet"
            self.done.append(ModulesReply(0, call.id, "failed", detail))
            return
        if call.pin_name:
            self._pin_no_more(call.pin_name)
        self._calls[call.id] = call
        if not call.encodes:
            self._left = TEXTS_PER_STEP
            self._name(call, step, now, None)
            self._look(call, step, now)

    def _pin_no_more(self, pin_name: str) -> None:
        """Do not pin texts again under a name, because it was unpinned or another call replaces it."""
        for call in [call for call in self._calls.values() if call.id < 0 and call.pin_name == pin_name]:
            call.pin_name = ""
            if not call.texts:  # otherwise it ends with its jobs
                del self._calls[call.id]

    def postpone(self, call: TextsCall) -> None:
        """Begin a call with the next step."""
        self._calls[call.id] = call

    def begin_again(self) -> list[TextsCall]:
        """Return the calls to repeat after the workers were lost: one for each pin, and all open calls.

        The returned calls refer to nothing of the old tree.
        """
        replaced = {call.pin_name for call in self._calls.values()}
        wanted = [call for pin_name, call in self._pinned_by.items() if pin_name not in replaced]
        wanted = [_unbegun(call, -number) for number, call in enumerate(wanted, start=1)]
        for call in self._calls.values():
            wanted.append(_unbegun(call, call.id if call.id >= 0 else -len(wanted) - 1))
        return wanted

    def cancel(self, call_id: int, status: str = "cancelled", detail: str = "") -> TextsCall | None:
        """Forget a call, whose jobs the caller must leave (`ModuleJobs.left`). An unknown id does nothing."""
        call = self._calls.pop(call_id, None)
        if call is not None:
            self._answer(ModulesReply(0, call_id, status, detail))
        return call

    def _answer(self, done: ModulesReply) -> None:
        if done.ticket >= 0:
            self.done.append(done)

    def ids(self) -> list[int]:
        """Return the ids of the open calls."""
        return list(self._calls)

    def salts(self) -> dict[int, bytes]:
        """Return the salts of the open calls, by the calls' ids."""
        return {call.id: call.salt for call in self._calls.values()}

    def advance(self, step: int, arrival: int, now: float) -> bool:
        """Go on with the open calls; return whether new jobs were started.

        Args:
            arrival: arrival number of the next request; requests from there on go behind the jobs started now.
        """
        started = self._jobs.started_texts
        self._left = TEXTS_PER_STEP
        for call in list(self._calls.values()):
            wish = Wish(call, call.salt, 0, False, arrival, call.ttl) if call.encodes else None
            self._name(call, step, now, wish)
            if len(call.texts) == len(call.sources) and not self._jobs.waits_of(call):
                self._look(call, step, now)
        return self._jobs.started_texts > started

    def _name(self, call: TextsCall, step: int, now: float, wish: Wish | None) -> None:
        """Name a call's next texts and, with a wish, have missing ones encoded."""
        at_once = max(1, JOBS_AT_ONCE // len(self._calls))
        while self._left and len(call.texts) < len(call.sources) and self._jobs.waits_of(call) < at_once:
            self._left -= 1
            index = len(call.texts)
            name_texts(self._tree, call.salt, call.sources[index : index + 1], call.moves, call.texts)
            if wish is None:
                continue
            text = call.texts[index]
            found = find_text(self._tree, text, text.token_count, step)
            if found.nodes:
                self._tree.keep(found.nodes, now, self._ttl(call))
            else:
                call.computed_tokens += text.token_count
                self._jobs.encode(call.texts, index, wish)

    def _look(self, call: TextsCall, step: int, now: float) -> None:
        """Search for a call's named texts; answer the call after the last one."""
        while self._left and len(call.tiers) < len(call.texts):
            self._left -= 1
            text = call.texts[len(call.tiers)]
            if call.forgets:
                self._forget(text)
            nodes = find_text(self._tree, text, text.token_count, step).nodes
            places = [self._tree.tiers.tier_of(node) for node in nodes]
            call.tiers.append(max((int(place) for place in places if place is not None), default=-1))
            if call.encodes:
                self._tree.keep(nodes, now, self._ttl(call))  # another call may have set a shorter time
            if call.pin_name:
                call.chunks.update(dict.fromkeys(nodes))
        if len(call.tiers) == len(call.sources):
            del self._calls[call.id]
            self._finish(call, now)

    def _forget(self, text: CachedText) -> None:
        """Drop a text's chunks that nothing else uses: no request, no pin, and no text that goes on from them."""
        root = self._tree.find_text_root(text.place)
        if root is None:
            return
        path, node, size = list[Node](), root, self._tree.chunk_bytes
        for at in range(0, text.token_count * TOKEN_BYTES, size):
            child = node.children.get(text.tokens[at : at + size])
            if child is None:
                break
            path.append(child)
            node = child
        self._forgotten += self._tree.forget_path(path)
        self._tree.prune_root(root)

    def take_forgotten(self) -> list[ChunkName]:
        """Return the names of the chunks dropped since the last time: to be deleted from the remote tier, too."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _ttl(self, call: TextsCall) -> float:
        return call.ttl or self._kv.ttl

    def _finish(self, call: TextsCall, now: float) -> None:
        status, detail = "ok", ""
        if call.pin_name:
            nodes = [node for node in call.chunks if not node.is_forgotten and (node.on_device or node.is_stored)]
            self._release(call.pin_name, now)
            if -1 in call.tiers:
                status, detail = "quota", "there is no room for all of its texts at once, so none is pinned"
            elif detail := self._beyond_share(call, nodes):
                status = "quota"
            elif self._pin(call.pin_name, nodes):
                if nodes:  # without, the room for pins would not limit the number of holders
                    self._pinned_by[call.pin_name] = _unbegun(call, call.id)
            else:
                status = "quota"
                detail = f"{len(nodes)} chunks would be pinned; this group pins {self._room()} more at most"
        blocks = pack_int32([blocks_for(text.token_count, self._tree.chunk_size) for text in call.texts])
        tiers = pack_int32(call.tiers)
        self._answer(ModulesReply(0, call.id, status, detail, tiers, blocks, call.computed_tokens))

    @property
    def _pins_max(self) -> int:
        """Largest number of chunks that may be pinned."""
        if self._on_device:
            return int(PINNED_DEVICE_SHARE * self._kv.pool.whole_blocks)
        return self._tree.tiers.config.pins_max

    def _room(self) -> int:
        if self._on_device:
            return self._pins_max - len({id(node) for node in self.held})
        return self._pins_max - self._tree.tiers.pinned_count

    def _beyond_share(self, call: TextsCall, nodes: list[Node]) -> str:
        """Return why a call's chunks do not fit into its tenant's part of the pins; "": they do.

        A chunk that the tenant has pinned under other names counts once; one that another tenant has pinned, too,
        counts for both.
        """
        if call.pins >= 1.0:
            return ""
        names = [name for name, other in self._pinned_by.items() if other.tenant == call.tenant]
        own = {id(node) for name in names for node in self._pinned[name]}
        count, most = len(own | {id(node) for node in nodes}), int(call.pins * self._pins_max)
        if count <= most:
            return ""
        return f"the tenant would have {count} chunks pinned; it may have {most} in this group"

    def _new(self, nodes: list[Node]) -> int:
        """Return how many of these chunks are not pinned on the device yet."""
        held = {id(node) for node in self.held}
        return sum(id(node) not in held for node in nodes)

    def _pin(self, pin_name: str, nodes: list[Node]) -> bool:
        if not nodes:
            return True
        if self._on_device:
            is_here = all(node.on_device and not self._tree.is_thin(node) for node in nodes)
            if self._new(nodes) > self._room() or not is_here:
                return False
            for node in nodes:
                self._tree.hold(node)
        elif not self._tree.tiers.pin(nodes):
            return False
        self._pinned[pin_name] = nodes
        return True

    def unpin(self, pin_name: str, now: float) -> None:
        """Unpin the chunks with this pin name, now and when an open call is done. An unknown name does nothing."""
        self._pin_no_more(pin_name)
        for call in self._calls.values():
            if call.pin_name == pin_name:
                call.pin_name = ""
        self._release(pin_name, now)

    def _release(self, pin_name: str, now: float) -> None:
        nodes = self._pinned.pop(pin_name, [])
        self._pinned_by.pop(pin_name, None)
        if not self._on_device:
            self._tree.tiers.unpin([node for node in nodes if not node.is_forgotten])
            return
        for node in nodes:
            self._tree.release(node, now)

    def make_way(self, now: float) -> bool:
        """Undo one pin that takes device blocks, because no request can run; return whether there was one."""
        if not (self._on_device and self._pinned):
            return False
        self._release(next(iter(self._pinned)), now)
        return True


def _unbegun(call: TextsCall, call_id: int) -> TextsCall:
    return replace(call, id=call_id, texts=[], tiers=[], chunks={}, computed_tokens=0)


class ModuleEncoding:
    """The scheduler's state for modules of prompts: encoding jobs, calls, and the chunks held for both."""

    def __init__(self, kv: KVCacheManager, queue: FairQueue, fetching: Fetching) -> None:
        self.jobs = ModuleJobs(kv.tree, queue, fetching)
        self.calls = ModuleCalls(kv, self.jobs)
        self._queue = queue
        self.finishing: list[TokenSequence] = []
        """The jobs whose text is computed to its end by the last plan. They end with the next plan."""

    @property
    def is_working(self) -> bool:
        """Whether texts are being encoded or calls are open."""
        return bool(len(self.jobs) or len(self.calls))

    @property
    def held(self) -> list[Node]:
        """Chunks that are held, but not by running sequences."""
        return [*self.jobs.held, *self.calls.held]

    def hold_for_first(self, step: int) -> SequenceGroup | None:
        """Hold texts of modules for the first request in the queue, and return that request; None if no text is
        being encoded or held, and then it does not matter which one is the first."""
        if not (len(self.jobs) or self.jobs.held):
            return None
        first = next((group for group in self._queue if not group.encodes), None)
        self.jobs.hold_for(first, step)
        return first

    def make_way(self, blocked: SequenceGroup, now: float, *, going: bool) -> bool:
        """Release something that is held for other requests, because a group lacks blocks.

        Return whether there was anything to release.

        Args:
            going: whether running sequences make progress; if not, even pinned chunks are released.
        """
        return self.jobs.make_way(blocked, going=going) or (not going and self.calls.make_way(now))
