"""What routers ask about the texts of a schema: encode them, keep them, say where they are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trunkline.controller.module_jobs import ModuleJobs, Wish
from trunkline.controller.module_prompt import CachedText
from trunkline.controller.modules import find_text
from trunkline.controller.node import Node
from trunkline.controller.residence import Residence
from trunkline.kvstore.layout import blocks_for, pack_int32

JOBS_AT_ONCE: Final = 32
"""Texts of one call that are encoded at the same time: enough to fill steps, few enough that requests which come
meanwhile soon have their turn."""
PINNED_DEVICE_SHARE: Final = 0.5
"""Of the device blocks, those that pins may take where there is no tier below."""


@dataclass(eq=False, slots=True)
class EncodeCall:
    """One call. Compared by identity: it is what its jobs wait under."""

    id: int
    texts: list[CachedText]
    salt: bytes
    holder: str
    ttl: float
    next: int = 0
    """The first text that has not been looked at."""
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CallDone:
    """The answer to a call; fields as in `trunkline.router.messages.ModulesReply`."""

    call: int
    status: str
    detail: str = ""
    tiers: bytes = b""
    blocks: bytes = b""
    computed_tokens: int = 0


class ModuleCalls:
    """Calls that are not done, and what is pinned."""

    def __init__(self, residence: Residence, jobs: ModuleJobs) -> None:
        self._residence = residence
        self._tree = residence.tree
        self._jobs = jobs
        self._calls: dict[int, EncodeCall] = {}
        self._pinned: dict[str, list[Node]] = {}
        """By holder: chunks, each as often as the holder pinned it."""
        self.done: list[CallDone] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def held(self) -> list[Node]:
        """Chunks that are held on the device because they are pinned and there is no tier below."""
        return [node for nodes in self._pinned.values() for node in nodes] if self._on_device else []

    @property
    def pinned_count(self) -> int:
        """Chunks that are pinned, each counted once."""
        return len({id(node) for nodes in self._pinned.values() for node in nodes})

    @property
    def _on_device(self) -> bool:
        return not self._tree.tiers.config.host_slots

    def encode(self, call: EncodeCall) -> None:
        """Begin; `done` gets the answer when everything has been encoded once."""
        self._calls[call.id] = call

    def cancel(self, call_id: int) -> EncodeCall | None:
        """Forget a call; its jobs are to be left (`ModuleJobs.left`). An unknown one is fine."""
        call = self._calls.pop(call_id, None)
        if call is not None:
            self.done.append(CallDone(call_id, "cancelled"))
        return call

    def ids(self) -> list[int]:
        """Calls that are not done."""
        return list(self._calls)

    def advance(self, step: int, arrival: int, now: float) -> bool:
        """Start what may be started now; whether that is anything.

        Args:
            arrival: of the latest request: those that come later go behind what is started now.
        """
        started = self._jobs.started_texts
        for call in list(self._calls.values()):
            wish = Wish(call, call.salt, 0, False, arrival, call.ttl)
            while call.next < len(call.texts) and self._jobs.waits_of(call) < JOBS_AT_ONCE:
                index, call.next = call.next, call.next + 1
                text = call.texts[index]
                found = find_text(self._tree, text, text.token_count, step)
                if found.nodes:
                    self._tree.keep(found.nodes, now, call.ttl or self._residence.ttl)
                else:
                    call.computed_tokens += text.token_count
                    self._jobs.encode(call.texts, index, wish)
            if call.next == len(call.texts) and not self._jobs.waits_of(call):
                del self._calls[call.id]
                self._finish(call, step, now)
        return self._jobs.started_texts > started

    def _finish(self, call: EncodeCall, step: int, now: float) -> None:
        status, detail = "ok", ""
        if call.holder:
            nodes = self._chunks(call.texts, step)
            self.unpin(call.holder, now)
            if not self._pin(call.holder, nodes):
                status = "quota"
                detail = f"{len(nodes)} chunks would be pinned; this group pins {self._room()} more at most"
        tiers, blocks = self.look(call.texts, step)
        self.done.append(CallDone(call.id, status, detail, tiers, blocks, call.computed_tokens))

    def _chunks(self, texts: list[CachedText], step: int) -> list[Node]:
        found = [find_text(self._tree, text, text.token_count, step).nodes for text in texts]
        # Texts that begin alike share chunks.
        return list(dict.fromkeys(node for nodes in found for node in nodes))

    def _room(self) -> int:
        if self._on_device:
            share = int(PINNED_DEVICE_SHARE * self._residence.pool.num_blocks)
            return share - len({id(node) for node in self.held})
        return self._tree.tiers.config.pins_max - self._tree.tiers.pinned_count

    def _pin(self, holder: str, nodes: list[Node]) -> bool:
        if not nodes:
            return True
        if self._on_device:
            if len(nodes) > self._room() or not all(node.on_device for node in nodes):
                return False
            for node in nodes:
                self._tree.hold(node)
        elif not self._tree.tiers.pin(nodes):
            return False
        self._pinned[holder] = nodes
        return True

    def unpin(self, holder: str, now: float) -> None:
        """Undo what was pinned for a holder. An unknown one is fine."""
        nodes = self._pinned.pop(holder, [])
        if not self._on_device:
            self._tree.tiers.unpin([node for node in nodes if not node.is_forgotten])
            return
        for node in nodes:
            self._tree.release(node, now)

    def look(self, texts: list[CachedText], step: int) -> tuple[bytes, bytes]:
        """Where texts are (the slowest tier of each, -1 if not all is there), and how many chunks hold each."""
        tiers = []
        for text in texts:
            nodes = find_text(self._tree, text, text.token_count, step).nodes
            places = [self._tree.tiers.tier_of(node) for node in nodes]
            tiers.append(max((int(place) for place in places if place is not None), default=-1))
        return pack_int32(tiers), pack_int32(
            [blocks_for(text.token_count, self._tree.chunk_size) for text in texts]
        )
