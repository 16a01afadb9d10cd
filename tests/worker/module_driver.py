"""Prompts with modules as a rank sees them: the stand-in for the controller beside `driver` and `cuts`.

Texts are computed one by one, each behind those that it sees, and stay in blocks of their own. A prompt then reads
ranges of them, in any order of its table and at any places, and computes its own tokens between and behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from worker.cuts import CHUNK, REPORT_ALL, Logprobs, dense_scores
from worker.driver import VOCAB_SIZE, Driver, dense_logprobs

from trunkline.kvstore.chunks import OPEN_COUNT, Int32Array, blocks_for, pack_int32, unpack_int32
from trunkline.worker.messages import Join

Range = tuple[int, int]


@dataclass
class Text:
    """Tokens that are computed once."""

    tokens: list[int]
    position: int
    """Of the first one, when they are computed."""
    parent: int = -1
    """Index of the text before it on its path: it sees that one and what that one sees; -1: nothing."""
    blocks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.position + len(self.tokens)


@dataclass
class Part:
    """What a prompt sees of a text."""

    text: int
    ranges: list[Range]
    """Of its tokens."""
    at: int
    """Where its first token acts in this prompt."""


@dataclass
class ModulePrompt:
    """Parts in the order of the block table, and own tokens by position."""

    parts: list[Part]
    runs: list[tuple[int, list[int]]]
    """(position, tokens), ascending; the output goes on behind the last."""
    blocks: list[int] = field(default_factory=list)
    """Of its own tokens."""
    output: list[int] = field(default_factory=list)
    rows: list[NDArray[np.float32]] = field(default_factory=list)
    """What the model said after each own token and each output token but the last."""

    @property
    def own(self) -> list[int]:
        """Its own tokens in order."""
        return [token for _, tokens in self.runs for token in tokens]


class SentSequence:
    """One sequence in the batch: a prompt, or a text that is computed."""

    def __init__(self, modules: Modules, prompt: ModulePrompt, skip: int = 0) -> None:
        """
        Args:
            skip: own tokens whose KV is in the prompt's blocks already.
        """
        self.id = modules.driver.take_id()
        self.prompt = prompt
        table, extents = modules.read_extents(prompt.parts)
        self.entries = len(table)
        """Of the table, those before its own."""
        first = sum(extent[2] for extent in extents)
        used = 0
        for position, tokens in prompt.runs:
            extents.append((len(table) + used // CHUNK, used % CHUNK, len(tokens), position, 0))
            used += len(tokens)
        extents[-1] = (*extents[-1][:2], OPEN_COUNT, *extents[-1][3:])
        self.table = table + prompt.blocks
        self.done, self.stop = first + skip, first + used
        self.join = Join(
            self.id,
            pack_int32(prompt.own[skip:]),
            self.done,
            self.stop,
            pack_int32(self.table),
            REPORT_ALL,
            pack_int32(np.array(extents, dtype=np.int32)),
        )

    def entry(self, piece: int) -> tuple[int, int, int, int, int]:
        """The next prefill entry."""
        start, self.done = self.done, min(self.done + piece, self.stop)
        return self.id, start, self.done - start, start, int(self.done == self.stop)


class Modules:
    """Texts and prompts on one rank."""

    def __init__(self, driver: Driver, texts: list[Text], piece: int = 7) -> None:
        """
        Args:
            piece: tokens of a sequence that are prefilled per step.
        """
        self.driver = driver
        self.texts = texts
        self._piece = piece

    def chain(self, text: int) -> list[int]:
        """What a text sees besides itself, the first one first."""
        parent = self.texts[text].parent
        return [*self.chain(parent), parent] if parent >= 0 else []

    def encode(self, index: int) -> Logprobs:
        """Compute a text; what the model says after each of its tokens."""
        text = self.texts[index]
        text.blocks = self.driver.take_blocks(blocks_for(len(text.tokens), CHUNK))
        parts = [
            Part(seen, [(0, len(self.texts[seen].tokens))], self.texts[seen].position)
            for seen in self.chain(index)
        ]
        prompt = ModulePrompt(parts, [(text.position, text.tokens)], text.blocks)
        self._run([SentSequence(self, prompt)], 1)
        return np.array(prompt.rows, dtype=np.float32)

    def run(self, prompts: list[ModulePrompt], count: int) -> None:
        """Compute the prompts' own tokens side by side and generate `count` for each."""
        for prompt in prompts:
            prompt.blocks = self.driver.take_blocks(blocks_for(len(prompt.own) + count, CHUNK))
        self._run([SentSequence(self, prompt) for prompt in prompts], count)

    def resume(self, prompt: ModulePrompt, skip: int, count: int) -> None:
        """As after a preemption: compute a prompt again, but for `skip` own tokens, whose KV is there."""
        prompt.output, prompt.rows = [], []
        self._run([SentSequence(self, prompt, skip)], count)

    def read_extents(self, parts: list[Part]) -> tuple[list[int], list[tuple[int, int, int, int, int]]]:
        """Table and extents of what is only read."""
        table: list[int] = []
        extents = []
        for part in parts:
            text = self.texts[part.text]
            extents += [
                (
                    len(table) + start // CHUNK,
                    start % CHUNK,
                    stop - start,
                    text.position + start,
                    part.at - text.position,
                )
                for start, stop in part.ranges
            ]
            table += text.blocks
        return table, extents

    def _run(self, sequences: list[SentSequence], count: int) -> None:
        joins = [sequence.join for sequence in sequences]
        waiting = list(sequences)
        rows: list[SentSequence] = []
        known = b""
        while waiting or any(len(sequence.prompt.output) < count for sequence in sequences):
            working = [sequence for sequence in rows if len(sequence.prompt.output) < count]
            entries = [sequence.entry(self._piece) for sequence in waiting]
            ids = pack_int32([sequence.id for sequence in working])
            changed = ids != known
            known = ids
            sampled = [sequence for sequence in waiting if sequence.done == sequence.stop]
            prefill = pack_int32(np.array(entries, dtype=np.int32))
            result = self.driver.send(
                joins=joins,
                prefill=prefill,
                rows=ids if changed else None,
                runs=_runs(working) if changed else None,
            )
            joins = []
            # Ranks other than 0 report nothing; here only the number of tokens matters then.
            tokens = unpack_int32(result.tokens).tolist() if result else [0] * len(working + sampled)
            for sequence in waiting:
                scored = (result.prompt_logprobs or {}).get(sequence.id) if result else None
                sequence.prompt.rows += dense_scores(scored) if scored else []
            for index, (sequence, token) in enumerate(zip(working + sampled, tokens, strict=True)):
                sequence.prompt.output.append(token)
                if result and result.logprobs:
                    sequence.prompt.rows.append(dense_logprobs(result.logprobs[index], VOCAB_SIZE))
            waiting = [sequence for sequence in waiting if sequence.done < sequence.stop]
            rows = working + sampled
        self.driver.send(leaves=pack_int32([sequence.id for sequence in sequences]), rows=b"", runs=b"")


def _runs(rows: list[SentSequence]) -> bytes:
    """Of each row alone: its modules' blocks may be shared, whoever else has them."""
    runs: Int32Array = np.array(
        [(row, row + 1, 0, sequence.entries) for row, sequence in enumerate(rows) if sequence.entries],
        dtype=np.int32,
    )
    return pack_int32(runs)
