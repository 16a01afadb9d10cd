"""Prompts with modules through a real engine, a real rank and its real tiers in one process, and their judge.

Both are given what a router sends: a layout, and the request's own tokens. The judge reads who sees whom out of it
and asks `transformers`; chunks, tables, shifts and tiers are unknown to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import torch
from engine_loop import Done
from msgspec.structs import replace
from router.pml.words import PLAIN, SPECIAL, Words
from tiered_loop import TieredLoop
from worker.block_masks import BlockMaskedModel, TextJudge
from worker.cuts import CHUNK, Logprobs
from worker.driver import VOCAB_SIZE, Driver, dense_logprobs
from worker.module_driver import ModulePrompt, Modules, Part, Text
from worker.module_prompts import random_prompt, random_texts

from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import CallTexts, EngineOutputs, Event, Ready
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, ModulesCall, ModuleText, PromptLayout, Submit
from trunkline.controller.reports import StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.storage.persistence import Persistence
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.router import pml
from trunkline.router.messages import ModulesReply, Started
from trunkline.router.pml.compiled import Scope
from trunkline.worker.messages import Sampling

Found = tuple[list[int], float]
"""Tokens and score of a hypothesis."""
GREEDY: Final = Sampling(temperature=0.0, logprobs=VOCAB_SIZE)
ENGINE: Final = EngineConfig(num_blocks=200, chunk_size=CHUNK, max_context=256, token_budget=64, max_rows=16)


class Prompt(NamedTuple):
    """A prompt with modules, as it travels."""

    layout: PromptLayout
    own: list[int]


@dataclass
class Answer:
    """What a client gets; by sample where there are lists of lists."""

    prompt: Prompt | list[int]
    tokens: list[list[int]]
    rows: list[list[Logprobs]]
    """What the model said where each token was drawn."""
    started: list[Started] = field(default_factory=list)

    @property
    def logprobs(self) -> Logprobs:
        """Of the first sample."""
        return np.array(self.rows[0], dtype=np.float32)

    @property
    def found(self) -> list[int]:
        """Prompt tokens that were found, by tier."""
        (started,) = self.started
        return started.tier_tokens


class CountingEngine(Engine):
    """Notes what its plans compute and what its results read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.computed_tokens = 0
        """By prefills."""
        self.bytes_read: list[int] = []
        """By decode attention, of each step."""

    def step(self, events: Iterable[Event], now: float) -> Ready:
        ready = super().step(events, now)
        check_integrity(self.scheduler)
        if ready.plan is not None and ready.plan.prefill:
            self.computed_tokens += int(unpack_int32(ready.plan.prefill, columns=5)[:, 2].sum())
        return ready

    def receive(self, event: Event, now: float) -> None:
        if isinstance(event, StepResult):
            self.bytes_read.append(event.kv_bytes_read)
        super().receive(event, now)


class ModuleGroup(TieredLoop):
    """Answers prompts. What was never written to the device is NaN there."""

    def __init__(
        self, folder: Path, engine: EngineConfig = ENGINE, index: Path | None = None, **worker: Any
    ) -> None:
        """
        Args:
            index: of the disk tier, in a file that outlives this group.
            worker: fields of `WorkerConfig`.
        """
        settings = {"max_context": engine.max_context, **worker}
        super().__init__(folder, replace(engine, preemption="auto"), settings)  # the host pool is not known yet
        self.runner.pool.data.view(torch.uint8).fill_(255)  # NaN in every type, scales of int8 among them
        now = time.perf_counter()
        self.persistence = Persistence(str(index or ""), b"00", time.time(), now)
        limits: EngineConfig = replace(self.engine.config, preemption=engine.preemption)
        stored = self.persistence.load(limits.disk_slots, now)
        self.engine: CountingEngine = CountingEngine(limits, 1, self.persistence.first_generation, stored, now)
        self.restored = sum(node.disk_ready for node in self.engine.scheduler.kv.tree.nodes())
        """Chunks found on disk."""
        self.answers: dict[int, Answer] = {}
        self.replies: list[ModulesReply] = []
        self.found: dict[int, list[Found]] = {}
        """The hypotheses of searches, best first, by request."""

    def submit_prompt(
        self, prompt: Prompt | list[int], max_tokens: int = 8, *, n: int = 1, sampling: Sampling = GREEDY
    ) -> Answer:
        """Returns what will be filled while the group runs."""
        own, places = (prompt.own, prompt.layout) if isinstance(prompt, Prompt) else (prompt, None)
        submit = Submit(self._next_id, pack_int32(own), len(own), max_tokens, sampling, n=n, layout=places)
        request = Request.of(self._next_id, submit)
        self._next_id += 1
        answer = self.answers[request.id] = Answer(prompt, [[] for _ in range(n)], [[] for _ in range(n)])
        now = time.perf_counter()
        self.requests[request.id] = Done(now)
        self.receive(request, now)
        return answer

    def submit_search(self, prompt: Prompt | list[int], width: int, max_tokens: int) -> int:
        """Start a beam search; returns the request whose hypotheses will be in `found`."""
        own, places = (prompt.own, prompt.layout) if isinstance(prompt, Prompt) else (prompt, None)
        beam, number = BeamSearch(width), self._next_id
        submit = Submit(number, pack_int32(own), len(own), max_tokens, GREEDY, n=width, beam=beam, layout=places)
        self._next_id += 1
        self.answers[number] = Answer(prompt, [], [])
        now = time.perf_counter()
        self.requests[number] = Done(now)
        self.receive(Request.of(number, submit), now)
        return number

    def search(self, prompt: Prompt | list[int], width: int, max_tokens: int) -> list[Found]:
        """One search alone."""
        number = self.submit_search(prompt, width, max_tokens)
        self.run()
        return self.found[number]

    def ask(self, prompt: Prompt | list[int], max_tokens: int = 8) -> Answer:
        """One prompt alone, greedily."""
        answer = self.submit_prompt(prompt, max_tokens)
        self.run()
        return answer

    def call(self, op: str, texts: Sequence[ModuleText], pin_name: str = "") -> ModulesReply:
        """What a call about texts is answered."""
        ticket = self._next_id
        self._next_id += 1
        self.receive(
            CallTexts(ticket, ModulesCall(ticket, op, list(texts), pin_name=pin_name)), time.perf_counter()
        )
        self.run()
        reply = self.replies.pop()
        assert reply.ticket == ticket
        return reply

    @property
    def token_bytes(self) -> int:
        """Of a token's KV, all layers."""
        block = self.runner.pool.data[0]
        return block.numel() * block.element_size() // self.engine.config.chunk_size

    def close(self) -> None:
        """As when it is stopped in order."""
        self._act(self.engine.step((), time.perf_counter()))
        self.persistence.close()
        super().close()

    def _act(self, ready: Ready) -> None:
        self.persistence.note(ready.disk_changes)
        super()._act(ready)

    def _count(self, outputs: EngineOutputs) -> None:
        super()._count(outputs)
        for started in outputs.started:
            self.answers[started.request].started.append(started)
        results = zip(outputs.requests, outputs.samples, outputs.tokens, outputs.logprobs, strict=True)
        for requests, samples, tokens, logprobs in results:
            rows = zip(requests.tolist(), samples.tolist(), tokens.tolist(), strict=True)
            for index, (request, sample, token) in enumerate(rows):
                self.answers[request].tokens[sample].append(token)
                if logprobs and index in logprobs:
                    self.answers[request].rows[sample].append(dense_logprobs(logprobs[index], VOCAB_SIZE))
        self.replies += outputs.modules
        for beams in outputs.beams:
            self.found[beams.request] = [(unpack_int32(h.tokens).tolist(), h.score) for h in beams.hypotheses]


class LayoutJudge:
    """What greedy answers should be."""

    TOLERANCE: Final = 1e-4

    def __init__(self, folder: Path) -> None:
        self._model = BlockMaskedModel(folder)

    def check(self, answer: Answer, computed_at: Mapping[int, int] | None = None) -> None:
        """Every sample is greedy, and the model said what it should."""
        assert isinstance(answer.prompt, Prompt)
        for tokens, rows in zip(answer.tokens, answer.rows, strict=True):
            expected = self.expected(answer.prompt, tokens, computed_at)
            assert tokens == expected.argmax(axis=1).tolist()
            np.testing.assert_allclose(np.array(rows), expected, rtol=0, atol=self.TOLERANCE)

    def expected(
        self, prompt: Prompt, output: list[int], computed_at: Mapping[int, int] | None = None
    ) -> Logprobs:
        """What the model should say before each token of the output.

        Args:
            computed_at: by text: at which position its KV was computed, with all that it sees right where it was
                then; the same as in the prompt, if left out.
        """
        texts, parts = [], []
        for index, text in enumerate(prompt.layout.texts):
            position = (computed_at or {}).get(index, text.position)
            texts.append(Text(unpack_int32(text.tokens).tolist(), position, text.parent))
            seen = [(start, stop) for start, stop in unpack_int32(text.seen, 2).tolist()]
            if seen:
                parts.append(Part(index, seen, text.position))
        runs, used = [], 0
        for position, count in unpack_int32(prompt.layout.runs, 2).tolist():
            runs.append((position, prompt.own[used : used + count]))
            used += count
        modules = Modules(Driver(lambda _: None, num_blocks=0, chunk_size=CHUNK), texts)
        said = TextJudge(self._model, modules).read(ModulePrompt(parts, runs, output=output))[1]
        return said[used - 1 :]


def as_prompt(texts: Sequence[Text], prompt: ModulePrompt) -> Prompt:
    """A prompt of `module_prompts`, without the texts that it does not need."""
    seen = {part.text: part.ranges for part in prompt.parts}
    needed: set[int] = set()
    for index in seen:
        while index >= 0:
            needed.add(index)
            index = texts[index].parent
    order = sorted(needed)
    new = {-1: -1, **{old: place for place, old in enumerate(order)}}
    sent = [
        ModuleText(
            pack_int32(texts[index].tokens),
            texts[index].position,
            new[texts[index].parent],
            _pairs(seen.get(index, [])),
        )
        for index in order
    ]
    return Prompt(PromptLayout(sent, _pairs([(at, len(run)) for at, run in prompt.runs])), prompt.own)


def _pairs(values: Sequence[tuple[int, int]]) -> bytes:
    return pack_int32(np.array(values, dtype=np.int32).reshape(-1))


class FewWords(Words):
    """Words of a model with few tokens."""

    def encode_plain(self, text: str) -> list[int]:
        room = VOCAB_SIZE - len(SPECIAL)
        return [len(SPECIAL) + crc32(b"%d" % token) % room for token in super().encode_plain(text)]


WORDS: Final = FewWords(PLAIN)


def compile_schema(source: str, scope: Scope = "ancestors", context: int = 256) -> pml.CompiledSchema:
    """PML as a router compiles it."""
    return pml.compile_schema(pml.parse_schema(source), WORDS, scope=scope, context=context)


def compile_prompt(schema: pml.CompiledSchema, source: str, context: int = 256) -> Prompt:
    """Likewise."""
    document = pml.parse_prompt(source)
    compiled = pml.compile_prompt(schema, document, WORDS, context=context, add_generation_prompt=False)
    return Prompt(pml.to_layout(compiled), compiled.own.tolist())


def random_prompts(seed: int, schemas: int, count: int) -> list[Prompt]:
    """Several of each of some schemas, in turn; all of them begin with the same texts."""
    rng = np.random.default_rng(seed)
    common = random_texts(rng, 3)
    end = max(text.end for text in common)
    prompts: list[Prompt] = []
    for _ in range(schemas):
        further = [Text(text.tokens, text.position + end, -1) for text in random_texts(rng, 3)]
        for index, text in enumerate(further):
            above = [i for i, other in enumerate([*common, *further[:index]]) if other.end <= text.position]
            text.parent = int(rng.choice([-1, *above]))
        texts = common + further
        prompts += [as_prompt(texts, random_prompt(rng, texts)) for _ in range(count)]
    return prompts[::2] + prompts[1::2]
