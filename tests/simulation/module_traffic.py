"""The part of random traffic that concerns modules: calls about texts, and what requests with modules cost."""

from __future__ import annotations

import random
from typing import Final

from simulation.driver import CallOptions, Simulation
from simulation.module_prompts import Schemas

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.chunks import blocks_for, unpack_int32

PIN_NAMES: Final = ("schema 1", "schema 2")
TIERS_MAX: Final = 3


def needed_tokens(layout: PromptLayout) -> int:
    """To be computed for a prompt, besides what it sees, by a group that has none of its texts."""
    return sum(len(text.tokens) // 4 for text in layout.texts)


def modules_fit(config: EngineConfig, layout: PromptLayout, own: int, max_tokens: int, width: int) -> bool:
    """Whether a request with modules can ever run: with all its texts, those that it does not see among them, it
    fits the pool at its longest, and its positions are the model's."""
    size, runs = config.chunk_size, unpack_int32(layout.runs, 2).tolist()
    if not config.prefix_cache or width > config.max_rows:
        return False
    if any(text.position + len(text.tokens) // 4 > config.max_context for text in layout.texts):
        return False
    end = sum(runs[-1])
    if end >= config.max_context or own >= config.longest_sequence:
        return False
    longest = own + min(max_tokens, config.max_context - end)
    texts = sum(blocks_for(len(text.tokens) // 4, size) for text in layout.texts)
    shared = own // size
    return texts + shared + width * (blocks_for(longest, size) - shared) <= config.kept_blocks


def texts_fit(config: EngineConfig, texts: list[ModuleText]) -> bool:
    """Whether each of these can ever be encoded."""
    blocks: list[int] = []
    for text in texts:
        count = len(text.tokens) // 4
        above = blocks[text.parent] if text.parent >= 0 else 0
        blocks.append(above + blocks_for(count, config.chunk_size))
        if text.position + count > config.max_context:
            return False
    return config.prefix_cache and max(blocks) <= min(config.kept_blocks, config.max_table_blocks)


class ModuleCallers:
    """Routers that ask about the texts of schemas."""

    def __init__(self, simulation: Simulation, schemas: Schemas, rng: random.Random) -> None:
        self.needed_tokens = 0
        self.texts_asked = 0
        self._simulation = simulation
        self._schemas = schemas
        self._rng = rng
        self._asked: dict[int, list[ModuleText]] = {}
        """Calls by number."""

    @property
    def pinned_tokens_max(self) -> int:
        """That are computed again if all that is pinned is lost."""
        return len(PIN_NAMES) * self._simulation.engine.config.max_context * TIERS_MAX if self.texts_asked else 0

    def act(self) -> None:
        """Ask something, or look at an answer."""
        simulation, rng = self._simulation, self._rng
        texts = self._schemas.texts()
        op = rng.choice(["encode", "encode", "look", "unpin", "cancel"])
        salt, relocate = rng.choice([b"", b"", b"tenant"]), rng.random() < 0.7
        if op == "encode":
            pin_name, ttl = rng.choice(["", *PIN_NAMES]), rng.choice([0.0, 0.0, 5.0])
            options = CallOptions(salt=salt, pin_name=pin_name, ttl=ttl, relocate=relocate)
            self._ask(simulation.modules_call(op, texts, **options), texts)
            self.texts_asked += len(texts)
            self.needed_tokens += sum(len(text.tokens) // 4 for text in texts)
        elif op == "look":
            self._ask(simulation.modules_call(op, texts, salt=salt, relocate=relocate), texts)
        elif op == "unpin":
            simulation.unpin(rng.choice(PIN_NAMES))
        elif self._asked:
            simulation.cancel_call(rng.choice(list(self._asked)))
        self._check()

    def _ask(self, ticket: int, texts: list[ModuleText]) -> None:
        self._asked[ticket] = texts

    def _check(self) -> None:
        config = self._simulation.engine.config
        for ticket in [ticket for ticket in self._asked if ticket in self._simulation.replies]:
            texts, reply = self._asked.pop(ticket), self._simulation.replies.pop(ticket)
            if not texts_fit(config, texts):
                assert reply.status == "failed"
                continue
            assert reply.status in ("ok", "quota", "cancelled"), reply
            if reply.status == "cancelled":
                continue
            counts = [blocks_for(len(text.tokens) // 4, config.chunk_size) for text in texts]
            assert unpack_int32(reply.blocks).tolist() == counts
            tiers = unpack_int32(reply.tiers).tolist()
            assert len(tiers) == len(texts)
            assert all(-1 <= tier <= TIERS_MAX for tier in tiers)

    def end(self) -> None:
        """Nothing is pinned any more, and all calls have been answered."""
        for pin_name in PIN_NAMES:
            self._simulation.unpin(pin_name)
        self._check()
        assert not self._asked, "a call was not answered"
