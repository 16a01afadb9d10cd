"""A grammar store as tests use it: compile and wait, sequences that follow a grammar, what is allowed next."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from trunkline.controller.reports import GrammarReady
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.grammar.compiler import GrammarStore
from trunkline.worker.messages import Join, Sampling

V: Final = 4096
"""Ids of the demo model."""
STOP: Final = 1


class Grammars:
    """A store, and the ids that it was asked for."""

    def __init__(self, store: GrammarStore) -> None:
        self.store = store
        self._next_id = 0
        self._next_sequence = 0

    def begin(self, kind: str, text: str, *, spaced: bool = False) -> int:
        self._next_id += 1
        self.store.compile(self._next_id, kind, text, spaced=spaced)
        return self._next_id

    def wait(self, seconds: float = 120.0) -> GrammarReady:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.store.pending
            if found := self.store.poll():
                assert len(found) == 1
                assert not self.store.pending
                return found[0]
            time.sleep(0.005)
        raise TimeoutError("no grammar became ready")

    def add(self, kind: str, text: str, *, spaced: bool = False) -> int:
        grammar = self.begin(kind, text, spaced=spaced)
        assert self.wait() == GrammarReady(grammar)
        return grammar

    def problem(self, kind: str, text: str) -> str:
        grammar = self.begin(kind, text)
        ready = self.wait()
        assert ready.grammar == grammar
        return ready.problem

    def row(self, grammar: int, output: list[int] | None = None, **sampling: Any) -> BatchSequence:
        self._next_sequence += 1
        defaults: dict[str, Any] = {"temperature": 1.0, "seed": self._next_sequence, "grammar": grammar}
        if grammar:
            defaults["stop_ids"] = pack_int32([STOP])
        tokens = pack_int32([5, 6, 7, *(output or [])])
        return BatchSequence(
            Join(self._next_sequence, tokens, 0, 3, pack_int32([0]), Sampling(**defaults | sampling))
        )


def allowed(grammars: Grammars, row: BatchSequence, size: int = V) -> set[int]:
    words = np.zeros(-(-size // 32), dtype=np.int32)
    grammars.store.fill(row, words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
