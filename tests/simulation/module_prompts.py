"""Texts and prompts with modules, by hand and at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from simulation.model import VOCABULARY

from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.chunks import pack_int32

Ranges = Sequence[tuple[int, int]]


def text(tokens: Sequence[int], position: int, parent: int = -1, seen: Ranges | None = None) -> ModuleText:
    """A text of which these ranges are seen; None: all of it."""
    seen = [(0, len(tokens))] if seen is None else seen
    return ModuleText(pack_int32(tokens), position, parent, _packed(seen))


def layout(texts: Sequence[ModuleText], runs: Ranges, ttl: float = 0.0, *, relocate: bool = True) -> PromptLayout:
    """A prompt of these texts, with own tokens at these (position, count)."""
    return PromptLayout(list(texts), _packed(runs), ttl, relocate)


def _packed(ranges: Ranges) -> bytes:
    return pack_int32([value for pair in ranges for value in pair])


@dataclass(frozen=True)
class _Text:
    tokens: tuple[int, ...]
    position: int
    parent: int

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)


class Schemas:
    """Random schemas: trees of texts, of which many are the same, or begin alike, in several places."""

    def __init__(self, rng: random.Random, chunk_size: int, *, count: int = 4, span: int = 60) -> None:
        """
        Args:
            span: positions that a schema takes, about.
        """
        self._rng = rng
        self._span = span
        lengths = [1, chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size, 3 * chunk_size - 1]
        self._words = [
            tuple(rng.randrange(VOCABULARY) for _ in range(max(1, rng.choice(lengths)))) for _ in range(6)
        ]
        self._schemas = [self._schema() for _ in range(count)]

    def _tokens(self) -> tuple[int, ...]:
        rng = self._rng
        word = rng.choice(self._words)
        if rng.random() < 0.25:  # begins alike, is longer
            word += rng.choice(self._words)
        if rng.random() < 0.25:  # begins alike, is shorter
            word = word[: rng.randrange(1, len(word) + 1)]
        return word

    def _schema(self) -> list[_Text]:
        rng, texts = self._rng, list[_Text]()
        position = rng.choice([0, 0, 3])
        scope = rng.choice(["chain", "root", "any", "alone"])
        for _ in range(rng.randrange(1, 7)):
            if position > self._span:
                break
            above = [i for i, text in enumerate(texts) if text.end <= position]
            parent = -1
            if above and scope != "alone":
                parent = {"chain": above[-1], "root": above[0], "any": rng.choice([-1, *above])}[scope]
            texts.append(_Text(self._tokens(), position, parent))
            if rng.random() < 0.8:  # else the next one begins here, too: members of a union
                position = texts[-1].end + rng.choice([0, 0, 1, 5])
        return texts

    def texts(self) -> list[ModuleText]:
        """All texts of one of the schemas, perhaps of its beginning only."""
        schema = self._rng.choice(self._schemas)
        schema = schema[: self._rng.randrange(1, len(schema) + 1)]
        return [ModuleText(pack_int32(t.tokens), t.position, t.parent) for t in schema]

    def prompt(self) -> tuple[list[int], PromptLayout]:
        """Own tokens, and the layout, of a random selection."""
        rng = self._rng
        schema = rng.choice(self._schemas)
        taken: set[int] = set()
        seen: dict[int, list[tuple[int, int]]] = {}
        for index in rng.sample(range(len(schema)), rng.randrange(len(schema) + 1)):
            ranges = self._ranges(len(schema[index].tokens))
            places = {schema[index].position + i for a, b in ranges for i in range(a, b)}
            if not places & taken:
                seen[index] = ranges
                taken |= places
        needed = set(seen)
        if rng.random() < 0.1:
            needed.add(rng.randrange(len(schema)))  # of no use to anybody
        for index in range(len(schema) - 1, -1, -1):
            if index in needed and schema[index].parent >= 0:
                needed.add(schema[index].parent)
        order = self._shuffled(schema, needed)
        number = {index: i for i, index in enumerate(order)}
        number[-1] = -1
        texts = [
            text(schema[i].tokens, schema[i].position, number[schema[i].parent], seen.get(i, [])) for i in order
        ]
        runs = self._runs(taken)
        own = [rng.randrange(4) for _ in range(sum(count for _, count in runs))]
        return own, layout(texts, runs, rng.choice([0.0, 0.0, 5.0]), relocate=rng.random() < 0.7)

    def _ranges(self, count: int) -> list[tuple[int, int]]:
        if self._rng.random() < 0.6 or count < 2:
            return [(0, count)]
        edges = sorted(self._rng.sample(range(count + 1), min(count + 1, 2 * self._rng.randrange(1, 4))))
        return list(zip(edges[::2], edges[1::2], strict=False))

    def _shuffled(self, schema: list[_Text], needed: set[int]) -> list[int]:
        """Any order in which parents come first."""
        order: list[int] = []
        left = set(needed)
        while left:
            free = [i for i in sorted(left) if schema[i].parent not in left]
            order.append(self._rng.choice(free))
            left.remove(order[-1])
        return order

    def _runs(self, taken: set[int]) -> list[tuple[int, int]]:
        """Here and there between the texts, and always behind them."""
        rng, runs = self._rng, list[tuple[int, int]]()
        end = max(taken, default=-1) + 1
        position = rng.randrange(4)
        while position < end and rng.random() < 0.7:
            free = 0
            while position + free < end and position + free not in taken and free < 6:
                free += 1
            if free:
                count = rng.randrange(1, free + 1)
                runs.append((position, count))
                position += count
            position += rng.randrange(1, 8)
        behind = max(end, runs[-1][0] + runs[-1][1] if runs else 0) + rng.choice([0, 0, 0, 2, 7])
        runs.append((behind, rng.choice([1, 1, 2, 5, 9])))
        return runs
