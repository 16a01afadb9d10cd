"""Prompts with modules through the engine and a rank, on the kernels that serve: equal to a block-masked forward.

Texts are encoded as scheduled work beside other requests, in pieces, preempted, evicted, fetched from every tier
and moved; what is answered is always what one forward of `transformers` says over the same tokens at the same
positions (Prompt Cache §3; theorems 1, 3, 4 and 5 of the specification).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from worker.checkpoints import Models
from worker.cuts import draw
from worker.module_driver import ModulePrompt, Part, Text
from worker.module_group import (
    ENGINE,
    Answer,
    LayoutJudge,
    ModuleGroup,
    Prompt,
    as_prompt,
    compile_prompt,
    compile_schema,
    random_prompts,
)
from worker.redis_server import RedisServer

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.tier import TierKind
from trunkline.router import pml
from trunkline.worker.messages import Sampling

SAME = 1e-5
"""Of log-probabilities that come from the same KV."""
POSITIONS = {"gqa": True, "deepseek-v3": True, "gpt2": False, "falcon-rw": True, "mpt": True, "gemma3": True}
"""Families by whether their KV may stand elsewhere."""
HOST_BYTES = 1 << 22


class Bench:
    """A model, its judge, and groups that serve it."""

    def __init__(self, model: Path, engine: EngineConfig) -> None:
        self.model = model
        self.judge = LayoutJudge(model)
        self.engine = engine
        self._groups: list[ModuleGroup] = []

    def serve(self, engine: dict[str, Any] | None = None, **worker: Any) -> ModuleGroup:
        self._groups.append(ModuleGroup(self.model, replace(self.engine, **(engine or {})), **worker))
        return self._groups[-1]

    def stop(self, *groups: ModuleGroup) -> None:
        """Close groups; all of them if none are given."""
        for group in groups or tuple(self._groups):
            self._groups.remove(group)
            group.close()


MakeBench = Callable[[str], Bench]


@pytest.fixture
def make_bench(models: Models) -> Iterator[MakeBench]:
    """Makes benches by the name of their model."""
    made: list[Bench] = []

    def make(name: str) -> Bench:
        made.append(Bench(models(name), replace(ENGINE, positions_shift=POSITIONS[name])))
        return made[-1]

    yield make
    for bench in made:
        bench.stop()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """Of a model with rotary positions."""
    return make_bench("gqa")


@pytest.fixture
def tiers(tmp_path: Path) -> dict[str, Any]:
    """Fields of a group with a host pool, and a disk below it that outlives the group."""
    slab, index = tmp_path / "slab", tmp_path / "index.sqlite"
    return {"host_memory_bytes": HOST_BYTES, "disk_path": str(slab), "disk_bytes": 1 << 23, "index": index}


PRESSURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "roomy": ({}, {}),
    "small steps": ({"token_budget": 9, "max_rows": 8}, {}),
    "small pool": ({"num_blocks": 22, "token_budget": 40, "preemption": "recompute"}, {}),
    "small pool, swapping": (
        {"num_blocks": 22, "token_budget": 40, "preemption": "swap"},
        {"host_memory_bytes": HOST_BYTES},
    ),
}
"""Fields of the engine's and the worker's configuration."""


@pytest.mark.parametrize(
    ("name", "pressure"),
    [
        pytest.param(name, pressure, marks=[] if "gqa" in name or pressure == "small pool" else pytest.mark.soak)
        for name in POSITIONS
        for pressure in PRESSURES
    ],
)
def test_answers_are_those_of_a_masked_forward(name: str, pressure: str, make_bench: MakeBench) -> None:
    """Requests of several schemas at once, some with several samples, some without modules (theorem 4)."""
    bench = make_bench(name)
    engine, worker = PRESSURES[pressure]
    group = bench.serve(engine, **worker)
    prompts = random_prompts(1, schemas=3, count=4)
    answers = []
    for index, prompt in enumerate(prompts):
        answers.append(group.submit_prompt(prompt, 24, n=1 + 2 * (index % 4 == 1)))
        if index % 3 == 2:
            group.submit_prompt(prompt.own, 24)
        if index == 2:
            group.run()
    group.run()
    for answer in answers:
        bench.judge.check(answer)
    preemptions = group.engine.scheduler.counters.preemptions
    assert (preemptions > 0) == pressure.startswith("small pool")
    assert group.engine.is_idle


def test_sampled_answers_do_not_depend_on_what_the_engine_does(bench: Bench) -> None:
    """Alone and together, in a pool that is too small for all."""
    prompts = random_prompts(2, schemas=2, count=5)
    sampling = [Sampling(temperature=1.0, seed=seed) for seed in range(len(prompts))]
    alone = []
    group = bench.serve()
    for prompt, how in zip(prompts, sampling, strict=True):
        alone.append(group.submit_prompt(prompt, 30, n=2, sampling=how))
        group.run()
    tight = bench.serve({"num_blocks": 22})
    together = [
        tight.submit_prompt(prompt, 30, n=2, sampling=how) for prompt, how in zip(prompts, sampling, strict=True)
    ]
    tight.run()
    assert tight.engine.scheduler.counters.preemptions > 0
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert all(answer.tokens[0] != answer.tokens[1] for answer in alone)


def test_a_text_that_many_wait_for_is_computed_once(bench: Bench) -> None:
    group = bench.serve()
    prompts = random_prompts(3, schemas=1, count=10)
    answers = [group.submit_prompt(prompt, 6) for prompt in prompts]
    group.run()
    for answer in answers:
        bench.judge.check(answer)
    totals = group.engine.counters
    texts = {(text.tokens, text.position) for prompt in prompts for text in prompt.layout.texts if text.seen}
    assert totals.encoded_texts == len(texts)
    own = sum(len(prompt.own) for prompt in prompts)
    assert group.engine.computed_tokens <= totals.encoded_tokens + own


SCHEMA = """<schema name="guide">
You answer in few words and with much care. <module name="city">Miami is a city by the sea, and warm.
It has <param name="what" len="6"/> in plenty. <module name="beach">The beach is long, white and full of
people at any time of the year.</module> Nobody lives there for nothing.</module>
<union><module name="summer">In summer it rains every day, but never for long at all.</module>
<module name="winter">Winters are dry.</module></union>
<module name="fresh" cache="false">Today the wind comes from the north.</module>
More was never said.
{appended}
{scaffold}</schema>"""
APPENDED = '<module name="food">People eat what the sea brings them, and oranges.</module>'
PROMPTS = [
    '<prompt schema="guide"><city what="birds"/><winter/>Is it cold now?</prompt>',
    '<prompt schema="guide"><summer/><city what="ships and sand and sun"><beach/></city><fresh/>When?</prompt>',
    '<prompt schema="guide"><fresh/></prompt>',
    '<prompt schema="guide"><city><beach/></city><summer/></prompt>',
]


@pytest.mark.parametrize(("name", "scope"), [("gqa", "ancestors"), ("gpt2", "self"), ("mpt", "ancestors")])
def test_schemas_are_answered_as_they_are_written(name: str, scope: Any, make_bench: MakeBench) -> None:
    """From PML to log-probabilities: parameters, unions, modules within modules and such that are not cached."""
    bench = make_bench(name)
    schema = compile_schema(SCHEMA.format(appended="", scaffold=""), scope)
    group = bench.serve()
    answers = [group.submit_prompt(compile_prompt(schema, source), 10) for source in PROMPTS]
    group.run()
    for answer in answers:
        bench.judge.check(answer)
    assert len({tuple(answer.tokens[0]) for answer in answers}) == len(answers)


@pytest.mark.parametrize("name", ["gqa", "gpt2"])
def test_a_scaffold_over_everything_is_a_plain_prefill(name: str, make_bench: MakeBench) -> None:
    """Theorem 1, from PML to the answer: the same as a request without modules."""
    source = """<schema name="all">Everything begins here, where nothing was before.
<module name="a">A first module of some length.<module name="b">With one in it.</module>And an end.</module>
<module name="c">Another that stands behind the first one, and is a bit longer than that one was.</module>
Words between. <module name="d">The last.</module>
<scaffold name="together" modules="a a/b c d"/></schema>"""
    bench = make_bench(name)
    schema = compile_schema(source)
    prompt = compile_prompt(schema, '<prompt schema="all"><a><b/></a><c/><d/>What follows?</prompt>')
    chain = sorted(schema.texts[i].position for i in schema.scaffolds[0].member_texts.values())
    texts = {text.position: text.tokens for text in prompt.layout.texts if text.seen}
    assert len(chain) == 5
    plain = np.frombuffer(b"".join(texts[at] for at in sorted(texts)), "<i4").tolist() + prompt.own
    assert len(plain) == schema.extent + len(prompt.own)
    modular, ordinary = bench.serve().ask(prompt, 12), bench.serve().ask(plain, 12)
    bench.judge.check(modular)
    assert modular.tokens == ordinary.tokens
    np.testing.assert_allclose(modular.logprobs, ordinary.logprobs, rtol=0, atol=SAME)


@pytest.mark.parametrize("name", ["gqa", "gpt2"])
def test_beams_behind_modules(name: str, make_bench: MakeBench) -> None:
    """A search behind one chain of texts finds what a search behind the plain prompt finds; searches behind other
    modules find the same in a pool so small that they are preempted."""
    bench = make_bench(name)
    rng = np.random.default_rng(6)
    texts: list[Text] = []
    for count in (9, 21, 16):
        texts.append(Text(draw(rng, count), texts[-1].end if texts else 0, len(texts) - 1))
    parts = [Part(index, [(0, len(text.tokens))], text.position) for index, text in enumerate(texts)]
    chain = as_prompt(texts, ModulePrompt(parts, [(texts[-1].end, draw(rng, 6))]))
    plain = [token for text in texts for token in text.tokens] + chain.own
    roomy = bench.serve()
    expected, found = roomy.search(plain, 4, 12), roomy.search(chain, 4, 12)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([s for _, s in found], [s for _, s in expected], rtol=0, atol=12 * SAME)
    prompts = random_prompts(8, schemas=2, count=3)
    alone = [roomy.search(prompt, 3, 24) for prompt in prompts]
    tight = bench.serve({"num_blocks": 22, "token_budget": 30})
    requests = [tight.submit_search(prompt, 3, 24) for prompt in prompts]
    tight.run()
    assert tight.engine.scheduler.counters.preemptions > 0
    for request, one in zip(requests, alone, strict=True):
        assert [tokens for tokens, _ in tight.found[request]] == [tokens for tokens, _ in one]


def same(actual: Answer, expected: Answer) -> None:
    """From the same KV."""
    assert actual.tokens == expected.tokens
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=SAME)


@pytest.mark.parametrize(("name", "scope"), [("gqa", "self"), ("gpt2", "ancestors")])
def test_a_module_that_is_appended_leaves_the_others_valid(name: str, scope: Any, make_bench: MakeBench) -> None:
    """Theorem 3: nothing but the new module is computed, and what does not import it is answered as before."""
    bench = make_bench(name)
    before = compile_schema(SCHEMA.format(appended="", scaffold=""), scope)
    after = compile_schema(SCHEMA.format(appended=APPENDED, scaffold=""), scope)
    group = bench.serve()
    first = group.call("encode", pml.texts_message(before))
    assert first.computed_tokens == group.engine.computed_tokens == sum(len(t.tokens) for t in before.texts)
    old = [group.ask(compile_prompt(before, source)) for source in PROMPTS[2:]]
    computed = group.engine.computed_tokens
    second = group.call("encode", pml.texts_message(after))
    food = after.modules[after.by_path["food"]].tokens
    assert second.computed_tokens == food == group.engine.computed_tokens - computed
    computed = group.engine.computed_tokens
    # These end in the schema's own last token, which is computed again; the first words stand where they stood.
    new = [group.ask(compile_prompt(after, source)) for source in PROMPTS[2:]]
    own = sum(len(answer.prompt.own) for answer in new if isinstance(answer.prompt, Prompt))
    assert group.engine.computed_tokens - computed <= own
    for one, other in zip(new, old, strict=True):
        same(one, other)
    bench.judge.check(group.ask(compile_prompt(after, '<prompt schema="guide"><food/><city/>What?</prompt>')))


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in some tier is waited for: computing seems to take far longer."""
    monkeypatch.setattr(StepCosts, "token_us", 1e6)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("gqa", "int8"), ("gqa", "fp8"), ("gpt2", "auto"), ("deepseek-v3", "auto"), ("deepseek-v3", "int8")],
)
@pytest.mark.usefixtures("patience")
def test_answers_are_the_same_from_every_tier(
    name: str, kv_dtype: str, make_bench: MakeBench, tiers: dict[str, Any], redis_server: RedisServer
) -> None:
    """Theorem 5: nothing is computed but own tokens, wherever the texts come from, and after a restart."""
    bench = make_bench(name)
    tiers["kv_dtype"] = kv_dtype
    tiers["remote_url"] = redis_server.url
    schema = compile_schema(SCHEMA.format(appended="", scaffold=""))
    prompts = [compile_prompt(schema, source) for source in PROMPTS]
    group = bench.serve(**tiers)
    expected = [group.ask(prompt) for prompt in prompts]
    for answer in expected:
        if kv_dtype == "auto":
            bench.judge.check(answer)
    group.settle()
    for tier in (TierKind.DEVICE, TierKind.HOST, TierKind.DISK):
        check_from(group, tier, expected)
    group.settle()
    bench.stop(group)
    again = bench.serve(**tiers)
    assert again.restored > len(schema.texts)
    for tier in (TierKind.DISK, TierKind.REMOTE):
        check_from(again, tier, expected)


def check_from(group: ModuleGroup, tier: TierKind, expected: list[Answer]) -> None:
    """The texts are there, and nowhere above; answers are the same, and nothing else was computed."""
    for answer in expected:
        group.settle()
        group.sink(tier)
        prompt = answer.prompt
        assert isinstance(prompt, Prompt)
        computed = group.engine.computed_tokens
        encoded = group.engine.counters.encoded_texts
        again = group.ask(prompt)
        same(again, answer)
        module_tokens = again.started[0].module_tokens
        assert again.found[tier] >= module_tokens, "the texts came from elsewhere"
        assert group.engine.computed_tokens - computed <= len(prompt.own)
        assert group.engine.counters.encoded_texts == encoded


def two_places(rng: np.random.Generator, parent: int) -> tuple[Prompt, Prompt]:
    """A text behind a first one, and the same text farther behind that in another schema."""
    root, moved, other = (draw(rng, count) for count in (19, 37, 23))
    near = [Text(root, 0), Text(moved, 19, parent)]
    far = [Text(root, 0), Text(other, 19, 0), Text(moved, 45, parent)]
    one = ModulePrompt(
        [Part(0, [(0, 19)], 0), Part(1, [(0, 9), (12, 37)], 19)], [(28, draw(rng, 2)), (60, draw(rng, 6))]
    )
    two = ModulePrompt(
        [Part(0, [(0, 19)], 0), Part(1, [(0, 23)], 19), Part(2, [(0, 37)], 45)],
        [(43, draw(rng, 2)), (82, draw(rng, 7))],
    )
    return as_prompt(near, one), as_prompt(far, two)


@pytest.mark.parametrize(
    ("name", "scope", "from_disk"),
    [
        ("gqa", "ancestors", False),
        ("gqa", "self", True),
        ("falcon-rw", "self", False),
        ("mpt", "ancestors", True),
        ("gemma3", "self", False),
    ],
)
@pytest.mark.usefixtures("patience")
def test_a_text_serves_another_schema_at_another_place(
    name: str, scope: str, from_disk: bool, make_bench: MakeBench, tiers: dict[str, Any]
) -> None:
    """Moved by a shift: exact if it saw only itself; else as it was computed, right behind what it saw there."""
    bench = make_bench(name)
    group = bench.serve(**(tiers if from_disk else {}))
    near, far = two_places(np.random.default_rng(4), -1 if scope == "self" else 0)
    bench.judge.check(group.ask(near))
    if from_disk:
        group.settle()
        bench.stop(group)
        group = bench.serve(**tiers)
    computed = group.engine.computed_tokens
    answer = group.ask(far)
    assert group.engine.computed_tokens - computed == 23 + len(far.own), "the text was computed again"
    bench.judge.check(answer, {} if scope == "self" else {2: 19})
    if scope == "ancestors":
        off = bench.judge.expected(far, answer.tokens[0]) - answer.logprobs
        assert np.abs(off).max() > 10 * LayoutJudge.TOLERANCE, "the judge does not see where it was computed"


def test_with_learned_positions_a_text_is_computed_for_each_place(make_bench: MakeBench) -> None:
    bench = make_bench("gpt2")
    group = bench.serve()
    for prompt in two_places(np.random.default_rng(4), -1):
        bench.judge.check(group.ask(prompt))
    assert group.engine.counters.encoded_tokens == 19 + 37 + 19 * 0 + 23 + 37


def test_rows_read_a_module_once_wherever_it_stands(bench: Bench) -> None:
    """Every decode step reads each module's KV once for all rows, in whatever order they have it."""
    rng = np.random.default_rng(9)
    tokens = [draw(rng, count) for count in (20, 40, 7, 33)]
    prompts = []
    for order in ([0, 1, 2], [2, 1], [3, 0], [1, 3, 2, 0]):
        texts, parts, end = [], [], 0
        for place, index in enumerate(order):
            texts.append(Text(tokens[index], end))
            parts.append(Part(place, [(0, len(tokens[index]))], end))
            end = texts[-1].end
        prompts.append(as_prompt(texts, ModulePrompt(parts, [(end, draw(rng, 5))])))
    group = bench.serve({"token_budget": 200})
    group.call("encode", prompts[-1].layout.texts)
    answers = [group.submit_prompt(prompt, 7) for prompt in prompts]
    group.run()
    for answer in answers:
        bench.judge.check(answer)
    modules = sum(map(len, tokens))
    own = [sum(len(prompt.own) + step for prompt in prompts) for step in range(1, 7)]
    read = [count for count in group.engine.bytes_read if count]
    assert read == [group.token_bytes * (modules + count) for count in own]


def test_pinned_texts_stay_while_others_need_the_room(bench: Bench) -> None:
    """On a device with nothing below it."""
    group = bench.serve({"num_blocks": 40})
    schema = compile_schema(SCHEMA.format(appended="", scaffold=""))
    assert group.call("encode", pml.texts_message(schema), pin_name="guide").status == "ok"
    encoded = group.engine.counters.encoded_texts
    rng = np.random.default_rng(5)
    for _ in range(6):
        group.ask(draw(rng, 230))
    answers = [group.ask(compile_prompt(schema, source)) for source in PROMPTS]
    for answer in answers:
        bench.judge.check(answer)
    assert group.engine.counters.encoded_texts == encoded
