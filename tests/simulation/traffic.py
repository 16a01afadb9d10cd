"""Random traffic from a seed: every kind of request in one engine, and what must hold of all of them.

`Traffic` submits, aborts, flushes and steps; each request that ends is compared with its oracle and forgotten, so
that hundreds of thousands of them run in bounded memory. Progress is bounded, too: what is computed more than once
must batch_seq_id in proportion.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from simulation.driver import Simulation
from simulation.model import VOCABULARY
from simulation.module_prompts import Schemas
from simulation.module_traffic import ModuleCallers, modules_fit, needed_tokens
from simulation.streams import Options, verify

from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, Grammar
from trunkline.kvstore.chunks import blocks_for
from trunkline.router.messages import FinishReason
from trunkline.worker.messages import POOL_LAST, POOL_MEAN

WIDTHS: Final = (2, 3, 4)
SHARES: Final = {"a": (0.0, 1.0), "b": (0.2, 1.0), "c": (0.1, 0.4)}
"""Floor and ceiling of each tenant's part of the tiers."""
BAD_GRAMMAR: Final = "("
CHECK_EVERY: Final = 200
"""Events between two checks of the whole engine."""
RECOMPUTED_MAX: Final = 1.5
"""Tokens that may be computed for each one that a group without a cache and without preemptions computes."""


@dataclass(frozen=True)
class Mix:
    """What is asked for, as probabilities, and how much of it."""

    prompt_max: int = 40
    output_max: int = 24
    samples: float = 0.2
    beams: float = 0.2
    priorities: float = 0.2
    tenants: float = 0.3
    """Of a request: it is of one of three tenants with names."""
    salts: float = 0.1
    scored: float = 0.1
    pooled: float = 0.1
    """Of the plain requests: they ask for the prompt's hidden states, and one token."""
    grammars: float = 0.1
    aborts: float = 0.05
    cuts: float = 0.0
    """Of the requests that are neither scored nor searches: parts of the prompt are not seen."""
    modules: float = 0.0
    """Prompts of texts of schemas."""
    schemas: int = 4
    """How many there are."""
    calls: float = 0.0
    """Of an event: something is asked about the texts of a schema."""
    ttl: float = 0.0
    hints: float = 0.0
    """Of a request: its client says when the next one follows, or that none does."""
    losses: float = 0.0
    """Of an event: the workers are lost, and others come some time later."""
    preempts: float = 0.0
    """Of a step: somebody is preempted for no reason."""
    crowd: int = 12
    """Requests that wait or run at once, about."""


def fits(config: EngineConfig, prompt_len: int, max_tokens: int, width: int, *, is_plain: bool) -> bool:
    """Whether a request can ever run: its sequences have rows, and at their longest share only whole prompt blocks
    (without the cache nothing, after a preemption)."""
    if is_plain and config.longest_plain > config.longest_sequence:
        return prompt_len < config.longest_plain
    room = config.whole_blocks or config.num_blocks
    longest = min(config.max_context, room * config.chunk_size)
    shared = prompt_len // config.chunk_size if config.prefix_cache else 0
    own = blocks_for(min(prompt_len + max_tokens, longest), config.chunk_size) - shared
    return prompt_len < longest and width <= config.max_rows and shared + width * own <= room


class Traffic:
    """Requests from a seed into one engine."""

    def __init__(self, config: EngineConfig, mix: Mix, seed: int, *, check: bool = True) -> None:
        self.config = config
        self.mix = mix
        self.simulation = Simulation(config, check=check, seed=seed)
        self.ended = 0
        self.needed_tokens = 0
        """Computed by a group that forgets everything but shares nothing, and is never short of blocks."""
        self._rng = random.Random(seed)
        self._tenants = random.Random(seed)
        self._pooled = random.Random(seed)
        self._bases = [self._tokens(mix.prompt_max) for _ in range(5)]
        self._schemas = Schemas(self._rng, config.chunk_size, count=mix.schemas, span=config.max_context // 2)
        self._callers = ModuleCallers(self.simulation, self._schemas, self._rng)
        self._acts = 0
        self.losses = 0
        self._lost_tokens = 0
        """Of those who ran when workers were lost, at most."""
        self._wrong: dict[int, str] = {}
        """Requests that cannot run: "size" or "grammar"."""

    def _tokens(self, most: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randrange(1, most + 1))]

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def submit(self) -> int:
        """One random request; its beginning is often that of others."""
        rng, mix = self._rng, self.mix
        if self._chance(mix.modules):
            return self._submit_modules()
        base = rng.choice(self._bases)
        prompt = base[: rng.randrange(1, len(base) + 1)] if self._chance(0.7) else []
        prompt = (prompt + self._tokens(6))[: mix.prompt_max]
        options: Options = {"seed": rng.randrange(4), "n": 1}
        options["stop_ids"] = tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 3, 10])))
        if self._chance(mix.beams):
            options["beam"] = searched = self._beam()
            options["n"] = rng.randrange(1, searched.width + 1)
        else:
            options["n"] = rng.choice(WIDTHS) if self._chance(mix.samples) else 1
            if self._chance(mix.grammars):
                options["grammar"] = Grammar(
                    "regex", rng.choice(["a", "b", "c", BAD_GRAMMAR]), "structured_outputs"
                )
            if self._chance(mix.scored):
                options["prompt_logprobs"] = rng.randrange(3)
        if self._chance(mix.priorities):
            options["priority"] = rng.randrange(-1, 3)
        if self._tenants.random() < mix.tenants:
            options["tenant"] = self._tenants.choice("abc")
            options["kv_share"] = SHARES[options["tenant"]]
        if self._chance(mix.salts):
            options["salt"] = b"tenant"
        if self._chance(mix.cuts) and "beam" not in options and "prompt_logprobs" not in options:
            options["drops"] = self._drops(len(prompt))
        if self._chance(mix.ttl):
            options["ttl"] = rng.choice([1.0, 20.0])
        if mix.hints and self._chance(mix.hints):
            options["next_s"], options["is_last"] = rng.choice([0.0, 0.1, 2.0, 60.0]), self._chance(0.1)
        max_tokens = rng.randrange(1, mix.output_max + 1)
        is_plain = "beam" not in options and options["n"] == 1 and not options.get("drops")
        if is_plain and self._pooled.random() < mix.pooled:
            options["pooling"], max_tokens = self._pooled.choice([POOL_LAST, POOL_MEAN]), 1
        beam = options.get("beam")
        width = beam.width if beam else options["n"]
        is_single = "beam" not in options and options["n"] == 1
        is_plain = is_single and "prompt_logprobs" not in options and options.get("pooling") != POOL_MEAN
        request = self.simulation.submit(prompt, max_tokens, **options)
        grammar = options.get("grammar")
        seen = len(self.simulation.streams[request].prompt)
        if not fits(self.config, seen, max_tokens, width, is_plain=is_plain):
            self._wrong[request] = "size"
        elif grammar is not None and grammar.text == BAD_GRAMMAR:
            self._wrong[request] = "grammar"
        self.settle()
        return request

    def _beam(self) -> BeamSearch:
        width, penalty = self._rng.choice(WIDTHS), self._rng.choice([1.0, 0.0, -0.5, 2.0, 0.7])
        return BeamSearch(width, penalty, self._rng.choice([True, False, None]))

    def _submit_modules(self) -> int:
        """One whose prompt is made of texts."""
        rng, mix = self._rng, self.mix
        own, layout = self._schemas.prompt()
        options: Options = {"seed": rng.randrange(4), "layout": layout}
        options["stop_ids"] = tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 3, 10])))
        beam = self._beam() if self._chance(mix.beams) else None
        if beam is not None:
            options["beam"], options["n"] = beam, rng.randrange(1, beam.width + 1)
        else:
            options["n"] = rng.choice(WIDTHS) if self._chance(mix.samples) else 1
            options["history"] = self._chance(0.1)
            if self._chance(mix.grammars):
                kind = rng.choice(["a", "b", "c", BAD_GRAMMAR])
                options["grammar"] = Grammar("regex", kind, "structured_outputs")
        if self._chance(mix.priorities):
            options["priority"] = rng.randrange(-1, 3)
        if self._tenants.random() < mix.tenants:
            options["tenant"] = self._tenants.choice("abc")
            options["kv_share"] = SHARES[options["tenant"]]
        if self._chance(mix.salts):
            options["salt"] = b"tenant"
        if self._chance(mix.ttl):
            options["ttl"] = rng.choice([1.0, 20.0])
        if mix.hints and self._chance(mix.hints):
            options["next_s"], options["is_last"] = rng.choice([0.0, 0.1, 2.0, 60.0]), self._chance(0.1)
        max_tokens = rng.randrange(1, mix.output_max + 1)
        request = self.simulation.submit(own, max_tokens, **options)
        grammar = options.get("grammar")
        width = beam.width if beam else options["n"]
        if not modules_fit(self.config, layout, len(own), max_tokens, width):
            self._wrong[request] = "size"
        elif grammar is not None and grammar.text == BAD_GRAMMAR:
            self._wrong[request] = "grammar"
        self.settle()
        return request

    def _drops(self, length: int) -> tuple[tuple[int, int], ...]:
        """Often the oldest part behind a head, in steps, as a policy would cut; sometimes anything."""
        rng = self._rng
        if self._chance(0.7):
            head, unit = rng.choice([0, 1, 4, 5]), rng.choice([4, 6])
            stop = head + unit * rng.randrange(1, 5)
            return ((head, stop),) if stop < length else ()
        edges = sorted(rng.sample(range(length), min(length, 2 * rng.randrange(1, 4))))
        ranges = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if b < length]
        return tuple(r for i, r in enumerate(ranges) if not i or ranges[i - 1][1] < r[0])

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self.simulation.streams)

    def act(self) -> None:
        """One random event besides submissions."""
        rng, simulation = self._rng, self.simulation
        self._acts += 1
        if self._acts % CHECK_EVERY == 0:
            self.check_bounds()
        if simulation.engine.is_away and self._chance(0.2):
            simulation.replace_workers()
        elif self.mix.losses and self._chance(self.mix.losses):
            self._lose_workers()
        elif self.live and self._chance(self.mix.aborts):
            simulation.abort(rng.choice(list(simulation.engine.requests())))
        elif self._chance(self.mix.aborts):
            several = [number for number, stream in simulation.streams.items() if stream.n > 1 and stream.started]
            if several:
                request = rng.choice(several)
                simulation.abort(request, rng.randrange(simulation.streams[request].n))
        elif self._chance(0.002):
            simulation.flush_cache()
        elif self._chance(0.002) and (known := simulation.engine._requests.groups):
            simulation.forget(known[rng.choice(list(known))].request)  # while it waits, runs, or was preempted
        elif simulation.grammars and self._chance(0.3):
            grammar = simulation.grammars[rng.choice(list(simulation.grammars))]
            simulation.compiled(grammar.grammar, "it is bad" if grammar.text == BAD_GRAMMAR else "")
        elif self._chance(self.mix.calls):
            self._callers.act()
        elif self._chance(self.mix.preempts):
            groups = [s.group for s in simulation.engine.scheduler.running()]
            if groups:
                simulation.engine.scheduler.preempt(rng.choice(groups), simulation.now)
        elif self._chance(0.3):
            simulation.move_chunks()
        elif self._chance(0.5):
            simulation.now += simulation.pace_s
            simulation.plan()
        else:
            simulation.answer()
        self.settle()

    def _lose_workers(self) -> None:
        self.losses += 1
        self._lost_tokens += self._running_tokens() + self._callers.pinned_tokens_max
        self.simulation.lose_workers()

    def _running_tokens(self) -> int:
        """Of all requests that live now, at most."""
        running = self.live * (self.mix.prompt_max + max(WIDTHS) * self.mix.output_max)
        if self.mix.modules:
            running += self.live * 3 * self.config.max_context
        return running

    def settle(self) -> None:
        """Compare what has ended with the oracle, and forget it."""
        for request in self.simulation.take_ended():
            stream = self.simulation.streams.pop(request)
            longest = stream.longest(self.config)
            wrong = self._wrong.pop(request, "")
            assert wrong != "size" or stream.reason == FinishReason.INVALID, "what cannot run was let in"
            assert wrong or stream.reason != FinishReason.INVALID, "what can run was refused"
            assert wrong != "grammar" or stream.reason not in (FinishReason.STOP, FinishReason.LENGTH)
            verify(stream, longest)
            self.ended += 1
            width = stream.beam.width if stream.beam else stream.n
            self.needed_tokens += len(stream.prompt) + width * min(stream.max_tokens, longest)
            if stream.layout is not None:
                self.needed_tokens += needed_tokens(stream.layout)
                continue
            if stream.reason == FinishReason.LENGTH and stream.n == 1 and not stream.beam and self._chance(0.05):
                next_turn = (stream.prompt + stream.output)[: self.mix.prompt_max]
                self._bases[self._rng.randrange(len(self._bases))] = next_turn

    def run(self, requests: int) -> None:
        """So many requests, from the first to the last end."""
        simulation, engine = self.simulation, self.simulation.engine
        for _ in range(requests):
            while self.live >= self.mix.crowd:
                self.act()
            self.submit()
            for _ in range(self._rng.randrange(6)):
                self.act()
        while not engine.is_idle:
            if engine.is_away:
                simulation.replace_workers()
            if not simulation.step():
                waiting = simulation.grammars or simulation.wanted.wake_at < float("inf")
                assert waiting, f"requests {list(engine.requests())} wait, and nothing runs"
            for message in list(simulation.grammars.values()):
                simulation.compiled(message.grammar, "it is bad" if message.text == BAD_GRAMMAR else "")
            self.settle()
        self._callers.end()
        assert not simulation.streams
        assert self.ended == requests
        self.check_empty()

    def check_bounds(self) -> None:
        """What the engine remembers is in proportion to the pools and to who is there; little work is repeated."""
        scheduler, workers = self.simulation.engine.scheduler, self.simulation.workers
        check_integrity(scheduler)
        tree, config = scheduler.kv.tree, self.config
        chunks = config.num_blocks + config.host_slots + config.disk_slots
        elsewhere = sum(map(len, tree.tiers.copies.at_peers.values()))  # chunks that only other groups may have
        if config.window:  # chunks without KV stay while they lead to others
            chunks *= config.max_blocks_per_sequence
        assert config.remote or tree.node_count <= chunks + elsewhere
        assert len(tree.idle_leaves) <= 4 * chunks + 65
        assert self.mix.cuts or self.mix.modules or len(list(tree.roots())) <= 2
        jobs = len(scheduler.encoding.jobs)
        assert scheduler.waiting_count <= len(scheduler.queue) <= self.live + jobs
        assert jobs <= self._callers.texts_asked + self.live * 2 * 7
        assert len(scheduler.forks.searches) <= self.live
        assert len(workers.grammars) <= self.live + 64
        assert len(workers.residents) <= 2 * self.config.max_rows + scheduler.running_count
        needed = self.needed_tokens + self._callers.needed_tokens + self._running_tokens() + self._lost_tokens
        assert workers.computed_tokens <= RECOMPUTED_MAX * needed

    def check_empty(self) -> None:
        """Nothing is held when nothing runs; cached chunks can all be dropped."""
        engine = self.simulation.engine
        self.check_bounds()
        encoding = engine.scheduler.encoding
        assert not encoding.is_working
        assert not encoding.finishing
        assert not encoding.held
        assert engine.scheduler.kv.tree.active_count == 0
        self.simulation.flush_cache()
        assert engine.scheduler.kv.tree.node_count == 0
        assert engine.scheduler.kv.pool.free_count == self.config.num_blocks
        assert not engine.scheduler.forks.searches
