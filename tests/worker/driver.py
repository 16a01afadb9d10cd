"""A stand-in for the controller: turns prompts into step plans with shuffled block tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from trunkline.controller.reports import StepResult, TopLogprobs
from trunkline.kvstore.chunks import blocks_for, pack_int32, unpack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.messages import Fork, Join, Sampling, StepPlan
from trunkline.worker.runner import Runner

VOCAB_SIZE: Final = 101
"""Of the tests' checkpoints; odd, so that every TP degree pads it."""

Execute = Callable[[StepPlan], StepResult | None]


@dataclass
class Stream:
    """A request as the driver sees it."""

    id: int
    prompt: list[int]
    sampling: Sampling
    blocks: list[int]
    shared_blocks: int = 0
    """Leading blocks that belong to another stream; their KV is not stored again."""
    computed: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] = field(default_factory=list)
    forks: list[Stream] = field(default_factory=list)
    """Further samples: they come out of this one at the end of its prompt."""
    adapter: bytes = b""
    """Key of its adapter."""


class Driver:
    """Admits one stream per step, prefills in pieces beside the others' decoding, and collects the output."""

    def __init__(self, execute: Execute, *, num_blocks: int, chunk_size: int, seed: int = 0) -> None:
        self._execute = execute
        self._chunk_size = chunk_size
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self.step = 0
        self._next_id = 1

    def add(self, prompt: list[int], sampling: Sampling, like: Stream | None = None, shared: int = 0) -> Stream:
        """A new stream; its first `shared` tokens (whole blocks) are read from the blocks of `like`."""
        shared_blocks = shared // self._chunk_size
        blocks = like.blocks[:shared_blocks] if like else []
        return Stream(self.take_id(), prompt, sampling, blocks, shared_blocks)

    def add_samples(self, prompt: list[int], samplings: list[Sampling]) -> list[Stream]:
        """Several samples of a prompt, of which only the first is given to `run`: the others fork from it."""
        samples = [self.add(prompt, sampling) for sampling in samplings]
        samples[0].forks = samples[1:]
        return samples

    def run(self, streams: list[Stream], count: int, piece: int = 7) -> None:
        """Generate `count` tokens for each stream, then let all leave."""
        waiting, prefilling, rows = list(streams), [], []  # type: ignore[var-annotated]
        first_rows: list[int] = []
        copies: list[tuple[int, int, int, int]] = []
        while waiting or prefilling or any(len(row.output) < count for row in rows):
            joins, entries, tables = [], [], []
            if waiting:
                stream = waiting.pop(0)
                self._grow(stream, 1)
                joins.append(self._join(stream))
                stream.computed = 0 if stream.shared_blocks == 0 else self._start_of(stream)
                prefilling.append(stream)
            for row in rows:
                tables += self._grow(row, len(row.prompt) + len(row.output))
            sampled = []
            for stream in prefilling:
                stop = min(stream.computed + piece, len(stream.prompt))
                tables += self._grow(stream, stop)
                write_from = max(stream.computed, stream.shared_blocks * self._chunk_size)
                last = int(stop == len(stream.prompt))
                entries.append((stream.id, stream.computed, stop - stream.computed, write_from, last))
                stream.computed = stop
                sampled += [stream] if last else []
            new_rows = [row.id for row in rows]
            changed = new_rows != first_rows
            first_rows = new_rows
            parents = [stream for stream in sampled if stream.forks]
            forks = [self._fork(fork, parent) for parent in parents for fork in parent.forks]
            children = [fork for parent in parents for fork in parent.forks]
            result = self.send(
                joins=joins,
                copies=pack_int32(np.array(copies, dtype=np.int32)),
                forks=forks,
                blocks=pack_int32(np.array(tables, dtype=np.int32)),
                prefill=pack_int32(np.array(entries, dtype=np.int32)),
                rows=pack_int32(new_rows) if changed else None,
                runs=self._runs(rows) if changed else None,
            )
            self._collect(rows + sampled + children, result)
            copies = [copy for parent in parents for copy in self._tail_copies(parent)]
            rows = rows + sampled + children
            prefilling = [stream for stream in prefilling if stream not in sampled]
        everyone = [stream.id for first in streams for stream in (first, *first.forks)]
        self.send(leaves=pack_int32(everyone), rows=b"", runs=b"")

    def send(self, **fields: object) -> StepResult | None:
        """Execute one plan, the next in order."""
        self.step += 1
        return self._execute(StepPlan(self.step, 1, **fields))  # type: ignore[arg-type]

    def take_id(self) -> int:
        """A sequence id that nobody else gets."""
        self._next_id += 1
        return self._next_id - 1

    def take_blocks(self, count: int) -> list[int]:
        """Blocks that nobody else gets."""
        return [self._free.pop() for _ in range(count)]

    def _start_of(self, stream: Stream) -> int:
        """With everything shared, the last token is computed again for its logits."""
        return min(stream.shared_blocks * self._chunk_size, len(stream.prompt) - 1)

    def _fork(self, child: Stream, parent: Stream) -> Fork:
        full = len(parent.prompt) // self._chunk_size
        child.blocks = parent.blocks[:full]
        if len(parent.prompt) % self._chunk_size:
            child.blocks = child.blocks + self.take_blocks(1)
        return Fork(parent.id, child.id, pack_int32(child.blocks), child.sampling.seed)

    def _tail_copies(self, parent: Stream) -> list[tuple[int, int, int, int]]:
        """What the plan after the fork copies."""
        used = len(parent.prompt) % self._chunk_size
        return [(parent.blocks[-1], child.blocks[-1], 0, used) for child in parent.forks if used]

    def _join(self, stream: Stream) -> Join:
        return Join(
            stream.id,
            pack_int32(stream.prompt),
            0,
            len(stream.prompt),
            pack_int32(stream.blocks),
            stream.sampling,
            adapter=stream.adapter,
        )

    def _grow(self, stream: Stream, length: int) -> list[tuple[int, int, int]]:
        added = []
        while len(stream.blocks) < blocks_for(length, self._chunk_size):
            stream.blocks += self.take_blocks(1)
            added.append((stream.id, len(stream.blocks) - 1, stream.blocks[-1]))
        return added

    def _runs(self, rows: list[Stream]) -> bytes:
        """One run per pair of neighbours or more that share a prefix."""
        runs, start = [], 0
        while start < len(rows):
            stop = start + 1
            shared = len(rows[start].prompt) // self._chunk_size
            while stop < len(rows):
                common = _common(rows[start].blocks, rows[stop].blocks)
                if not common:
                    break
                shared = min(shared, common)
                stop += 1
            if stop - start > 1 and shared:
                runs.append((start, stop, 0, shared))
            start = stop
        return pack_int32(np.array(runs, dtype=np.int32))

    def _collect(self, sampled: list[Stream], result: StepResult | None) -> None:
        # Ranks other than 0 report nothing; here only the number of tokens matters then.
        tokens = unpack_int32(result.tokens).tolist() if result else [0] * len(sampled)
        for index, (stream, token) in enumerate(zip(sampled, tokens, strict=True)):
            stream.output.append(token)
            if result and result.logprobs and index in result.logprobs:
                stream.logprobs.append(result.logprobs[index])


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def dense_logprobs(report: TopLogprobs, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Log-probabilities by token id, of a report about the whole vocabulary."""
    dense = np.full(vocab_size, np.nan, dtype=np.float32)
    dense[unpack_int32(report.top_ids)] = np.frombuffer(report.top_logprobs, dtype="<f4")
    return dense


def run_config(folder: Path, **fields: Any) -> WorkerConfig:
    settings: dict[str, Any] = {"chunk_size": 8, "pool_blocks": 64, "plan_endpoint": "", "report_endpoint": ""}
    return WorkerConfig(model=str(folder), **{**settings, **fields})


def generate(runner: Runner, sampling: Sampling | None = None, first_step: int = 1) -> list[Stream]:
    """Four prompts; the second and third share the first's prefix, computed for one and read by all.

    Args:
        sampling: greedy with all log-probabilities if None.
        first_step: the runner's next step.
    """
    driver = Driver(runner.execute, num_blocks=64, chunk_size=8, seed=1)
    driver.step = first_step - 1
    rng = np.random.default_rng(2)
    sampling = sampling or Sampling(temperature=0, logprobs=VOCAB_SIZE)
    prefix = rng.integers(VOCAB_SIZE, size=24).tolist()
    streams = [driver.add(prefix + rng.integers(VOCAB_SIZE, size=5).tolist(), sampling)]
    driver.run(streams[:1], 4)
    for length in (3, 9):
        prompt = prefix + rng.integers(VOCAB_SIZE, size=length).tolist()
        streams.append(driver.add(prompt, sampling, like=streams[0], shared=24))
    streams.append(driver.add(rng.integers(VOCAB_SIZE, size=19).tolist(), sampling))
    driver.run(streams[1:], 12)
    return streams
