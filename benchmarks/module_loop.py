"""Prompts with modules through a real engine and a real rank in one process (Prompt Cache §3).

A prompt is a root text, documents that stand somewhere behind it, and own tokens. What a document sees while it is
computed is the *scope*: "self" nothing else, "ancestors" the root, "scaffold" everything before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from engine_loop import Done
from tiered_loop import TieredLoop

from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import ModuleText, PromptLayout, Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.messages import Started
from trunkline.worker.messages import Sampling

Scope = Literal["self", "ancestors", "scaffold"]
SCOPES: Final[tuple[Scope, ...]] = ("self", "ancestors", "scaffold")


class Placed(NamedTuple):
    """Tokens of a prompt, and where the first of them stands."""

    position: int
    tokens: list[int]

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.position + len(self.tokens)


def packed(parts: Sequence[list[int]], start: int = 0) -> list[Placed]:
    """One behind the other from a position on."""
    placed: list[Placed] = []
    for tokens in parts:
        placed.append(Placed(placed[-1].end if placed else start, tokens))
    return placed


class ModulePrompt(NamedTuple):
    """Modules, and what the request computes itself."""

    root: list[int]
    """The schema's text before all modules, at position 0."""
    documents: list[Placed]
    """In the order of their positions."""
    own: Placed
    scope: Scope = "ancestors"

    def layout(self) -> PromptLayout:
        """As a router would say it to a controller."""
        texts = [Placed(0, self.root), *self.documents]
        parents = {
            "self": [-1] * len(texts),
            "ancestors": [-1] + [0] * len(self.documents),
            "scaffold": list(range(-1, len(self.documents))),
        }[self.scope]
        return PromptLayout(
            [
                ModuleText(pack_int32(text.tokens), text.position, parent, pack_int32([0, len(text.tokens)]))
                for text, parent in zip(texts, parents, strict=True)
            ],
            pack_int32([self.own.position, len(self.own.tokens)]),
        )

    def plain(self) -> list[int]:
        """The same text without modules."""
        return [*self.root, *(token for part in self.documents for token in part.tokens), *self.own.tokens]


class ModuleLoop(TieredLoop):
    """Keeps what requests were told."""

    def __init__(self, model: Path, engine: EngineConfig, worker: dict[str, Any]) -> None:
        """See `TieredLoop`."""
        super().__init__(model, engine, worker)
        self.started: dict[int, Started] = {}
        self.outputs: dict[int, list[int]] = {}
        """Tokens by request."""

    def ask(self, prompt: ModulePrompt | list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> int:
        """Submit a greedy request; returns its id."""
        own, layout = (prompt.own.tokens, prompt.layout()) if isinstance(prompt, ModulePrompt) else (prompt, None)
        stops, sampling = list(stop_ids), Sampling(temperature=0.0)
        submit = Submit(self._next_id, pack_int32(own), len(own), max_tokens, sampling, stops, layout=layout)
        request = Request.of(self._next_id, submit)
        self._next_id += 1
        now = time.perf_counter()
        self.requests[request.id] = Done(now)
        self.receive(request, now)
        return request.id

    def time_first(self, prompt: ModulePrompt | list[int]) -> tuple[float, Started]:
        """Seconds from a prompt's submission to its first token, which is its last, and what was found of it."""
        started = time.perf_counter()
        request = self.ask(prompt, 1)
        while not self.requests[request].tokens:
            self.step()
        return time.perf_counter() - started, self.started[request]

    def answer(self, prompt: ModulePrompt | list[int], max_tokens: int, stop_id: int) -> tuple[int, list[int]]:
        """A request's id and its greedy output up to a token, which is its last."""
        request = self.ask(prompt, max_tokens, (stop_id,))
        self.run()
        return request, self.outputs[request]

    def _count(self, outputs: EngineOutputs) -> None:
        super()._count(outputs)
        self.started.update({started.request: started for started in outputs.started})
        for requests, tokens in zip(outputs.requests, outputs.tokens, strict=True):
            for request, token in zip(requests.tolist(), tokens.tolist(), strict=True):
                self.outputs.setdefault(request, []).append(token)
