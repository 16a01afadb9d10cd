"""Sequences, costs of steps, and a modelled machine on which recorded answers are decoded with drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

import numpy as np

from trunkline.controller.drafts.drafter import Drafter
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

CONFIG = EngineConfig(num_blocks=100, prefix_cache=False)
Machine = tuple[float, float, float]
"""Microseconds of a step, of each row of it, and of the pause behind a step that is waited for."""


def sequence_of(prompt: Items[int], slot: int, salt: bytes = b"") -> Sequence:
    submit = Submit(slot, pack_int32(list(prompt)), len(prompt), 10_000, Sampling(), salt=salt)
    sequence = SequenceGroup(Request.of(slot, submit), slot, 100_000, submit.sampling).members[0]
    sequence.slot = slot
    return sequence


def known_costs(base: float, row: float) -> StepCosts:
    costs = StepCosts(0.0)
    rng = random.Random(0)
    for _ in range(200):
        rows = rng.randint(1, 64)
        costs.observe(rows=rows, prefill_tokens=0, elapsed_us=base + rows * row)
    return costs


class Replay:
    """Streams whose tokens are known, decoded on a modelled machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.costs = StepCosts(0.0)
        self.drafter = Drafter(CONFIG, self.costs)
        self.now_us = 0.0
        self.plain_us = 0.0
        """Time that the same tokens would have taken without drafts, with as many rows at once."""
        self.tokens = self.drafted = self.accepted = self.steps = 0
        self.looked_us = 0.0
        """Price of what was looked at."""
        allowance = self.drafter._allowance
        spend = allowance.spend

        def counting(price_us: float) -> None:
            self.looked_us += price_us
            spend(price_us)

        allowance.spend = counting  # type: ignore[method-assign]

    def run(self, streams: list[tuple[list[int], list[int]]], rows: int, salts: Items[bytes] = (b"",)) -> None:
        """Decode streams of (prompt, answer), so many at once."""
        waiting = [(number, *stream) for number, stream in enumerate(streams)]
        running: dict[int, tuple[Sequence, list[int]]] = {}
        free, waits = list(range(rows)), False
        while waiting or running:
            while waiting and free:
                number, prompt, answer = waiting.pop(0)
                sequence = sequence_of(prompt, free.pop(), salts[number % len(salts)])
                running[sequence.slot] = sequence, list(answer)
                self.drafter.add(sequence)
            slots = np.array(sorted(running), np.intp)
            waits = self.step(slots, running, waits=waits)
            for slot in [slot for slot, (_, left) in running.items() if not left]:
                sequence, _ = running.pop(slot)
                self.drafter.remove(sequence)
                free.append(slot)

    def step(self, slots: np.ndarray, running: dict[int, tuple[Sequence, list[int]]], *, waits: bool) -> bool:
        """Compute a step; return whether the next one waits for its result."""
        base, row, pause = self.machine
        before = self.tokens
        drafts: Items[np.ndarray] = [np.empty(0, np.int32)] * len(slots)
        if waits:
            room = np.array([len(running[slot][1]) - 1 for slot in slots])
            found = self.drafter.propose(slots, room, 0)
            assert found is None or all(len(chain) <= most for chain, most in zip(found, room, strict=True))
            drafts = found or drafts
        drafted = sum(map(len, drafts))
        elapsed = base + row * (len(slots) + drafted)
        self.steps += 1
        self.drafted += drafted
        self.drafter.planned(self.steps, self.now_us / 1e6, drafted)
        self.drafter.study(is_idle=False)
        self.now_us += elapsed + pause * waits
        self.costs.observe(rows=len(slots) + drafted, prefill_tokens=0, elapsed_us=elapsed)
        self.drafter.answered(self.steps, self.now_us / 1e6, int(elapsed))
        waits = drafted > 0 or self.drafter.waits(slots)
        went_on = {slot: chain.tolist() for slot, chain in zip(slots.tolist(), drafts, strict=True)}
        while went_on:
            drawn = {slot: running[slot][1].pop(0) for slot in went_on}
            self.tokens += len(drawn)
            self.drafter.extend(np.array(list(drawn), np.intp), np.array(list(drawn.values()), np.int32))
            went_on = {
                slot: went_on[slot][1:]
                for slot, token in drawn.items()
                if went_on[slot] and went_on[slot][0] == token and running[slot][1]
            }
            self.accepted += len(went_on)
        self.plain_us += (self.tokens - before) * (base + row * len(slots)) / len(slots)
        return waits


def stream_of(rng: random.Random, copies: float, length: int) -> tuple[list[int], list[int]]:
    """Return a prompt and an answer that copies a part of it, with faults; the rest is of few words."""
    words = [[rng.randrange(2000) for _ in range(rng.randint(1, 6))] for _ in range(100)]
    prompt = [token for _ in range(length) for token in rng.choice(words)]
    answer: list[int] = []
    fault = rng.choice([0.01, 0.1, 0.4])
    while len(answer) < length:
        if rng.random() < copies:
            start = rng.randrange(len(prompt))
            for token in prompt[start : start + rng.randint(5, 80)]:
                answer.append(rng.randrange(2000) if rng.random() < fault else token)
        else:
            answer += [rng.randrange(2000), *rng.choice(words)]
    return prompt, answer
