"""Which tokens a prompt leaves out, alone and through the API."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from router.api_calls import payloads
from router.fake_controller import FakeController, drops_of, prompt_of
from router.harness import DEMO_MODEL

from trunkline.router.api.prompting import Rendering, instruction_tokens
from trunkline.router.jobs.request_models import Message
from trunkline.router.messages import Started
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.truncation import (
    CutError,
    PromptCut,
    RetentionPolicy,
    TokenSpan,
    clip_spans,
    merge_spans,
    plan_cut,
    room_for,
    span_tokens,
)

quick = settings(max_examples=80, deadline=None)
contexts = st.integers(16, 400)
policies = st.builds(
    RetentionPolicy, st.floats(0.05, 0.95), keep_instructions=st.booleans(), sink_tokens=st.integers(0, 8)
)


@st.composite
def discards_within(draw: st.DrawFn, tokens: int) -> tuple[TokenSpan, ...]:
    ends = st.integers(0, max(tokens - 1, 0))
    return merge_spans(TokenSpan(*sorted(pair)) for pair in draw(st.lists(st.tuples(ends, ends), max_size=4)))


@quick
@given(st.data(), contexts, policies, st.integers(1, 2000), st.integers(0, 40), st.integers(1, 60))
def test_what_is_left_fits(
    data: st.DataObject, context: int, policy: RetentionPolicy, tokens: int, head: int, room: int
) -> None:
    discards = data.draw(discards_within(tokens))
    try:
        cut = plan_cut(tokens, context, room, policy, head=head, discards=discards)
    except CutError:
        assert max(head, policy.sink_tokens) + room >= context
        return
    assert cut.drops == merge_spans(cut.drops), "ascending, disjoint, not touching"
    assert all(0 <= start < stop <= tokens - 1 for start, stop in cut.drops), "the last token is seen"
    assert tokens - cut.dropped_tokens + room <= context
    left_out = {token for start, stop in cut.drops for token in range(start, stop)}
    discarded = {token for start, stop in discards for token in range(start, stop)}
    assert discarded <= left_out
    assert all(token in discarded for token in left_out if token < max(head, policy.sink_tokens))
    assert cut == plan_cut(tokens, context, room, policy, head=head, discards=discards)


@quick
@given(contexts, policies, st.integers(0, 20), st.integers(1, 60))
def test_a_cut_moves_only_at_the_next_overflow(
    context: int, policy: RetentionPolicy, head: int, room: int
) -> None:
    kept = max(head, policy.sink_tokens)
    assume(kept + room < context)
    unit = min(max(1, int((1 - policy.retention_ratio) * context)), context - room - kept)
    last, jumps = PromptCut(asked=True), 0
    for tokens in range(1, 4 * context):
        cut = plan_cut(tokens, context, room, policy, head=head)
        if cut != last:
            assert tokens - last.dropped_tokens + room > context, "it moved although the last one would have done"
            assert cut.dropped_tokens == last.dropped_tokens + unit
            assert cut.drops == (TokenSpan(kept, kept + cut.dropped_tokens),)
            jumps += 1
        last = cut
    assert jumps >= 2


def test_discards_count_towards_the_room() -> None:
    policy = RetentionPolicy(0.5, sink_tokens=0)
    assert plan_cut(110, 100, 10, policy, discards=(TokenSpan(60, 90),)).drops == (TokenSpan(60, 90),)
    assert plan_cut(110, 100, 10, policy, discards=(TokenSpan(10, 20),)).drops == (TokenSpan(0, 50),)
    assert plan_cut(110, 100, 10, policy, discards=(TokenSpan(50, 60),)).drops == (TokenSpan(0, 60),), (
        "touching ones join"
    )


def test_room_for_the_answer_and_none_behind_the_head() -> None:
    assert [room_for(asked, 2048) for asked in (None, 0, 7)] == [256, 1, 7]
    assert room_for(None, 4) == 1
    with pytest.raises(CutError, match="90 tokens that are to be kept"):
        plan_cut(200, 100, 10, RetentionPolicy(), head=90)
    assert plan_cut(200, 100, 10, RetentionPolicy(), head=89).dropped_tokens == 110


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@quick
@given(spans, st.integers(0, 30))
def test_spans_are_sets_of_tokens(given_spans: list[tuple[int, int]], tokens: int) -> None:
    def members(found: Any) -> set[int]:
        return {token for start, stop in found for token in range(start, stop)}

    merged = merge_spans(given_spans)
    assert members(merged) == members(given_spans)
    assert span_tokens(merged) == len(members(merged))
    assert all(one.stop < other.start for one, other in itertools.pairwise(merged))
    assert members(clip_spans(merged, tokens)) == {token for token in members(merged) if token < tokens}


# -- instructions in other templates


def load(folder: Path, template: str) -> Tokenizer:
    """The demo model's tokenizer with another chat template."""
    for name in ("tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return Tokenizer(folder)


INSIDE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<' + messages[0]['content'] + '>>' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% if not messages %}{{ raise_exception('nobody asks') }}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{% if loop.first %}{{ system }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)
BEFORE = "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "roles", "head"),
    [
        (INSIDE, ["system", "user", "assistant", "user"], "<|bos|>[user]<<text 0>>"),
        (INSIDE, ["user", "assistant"], ""),
        (BEFORE, ["system", "user"], "<|bos|>[system]text 0;"),
        (BEFORE, ["system", "developer", "user", "system"], "<|bos|>[system]text 0;[system]text 1;"),
        (BEFORE, ["system"], "<|bos|>[system]text 0;"),
    ],
)
def test_where_instructions_end(tmp_path: Path, template: str, roles: list[str], head: str) -> None:
    tokenizer = load(tmp_path, template)
    service: Any = SimpleNamespace(tokenizer=tokenizer)
    messages = [Message(role=role, content=f"text {index}") for index, role in enumerate(roles)]

    async def find() -> int:
        text = await Rendering().text(service, messages)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        count = await instruction_tokens(service, Rendering(), messages, text, tokens)
        assert tokenizer.decode(tokens[:count], skip_special_tokens=False) == head
        return count

    assert (asyncio.run(find()) > 0) == bool(head)
    tokenizer.close()


# -- through the API; the context is 2,048


def talk(turns: int, words: int = 120) -> list[dict[str, str]]:
    """A long conversation with instructions."""
    messages = [{"role": "system", "content": "Answer briefly."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} " + "word " * words})
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return [*messages, {"role": "user", "content": "And now?"}]


def test_auto(client: openai.OpenAI, fake: FakeController, tokenizer: Tokenizer) -> None:
    messages: Any = talk(30)
    answer = client.chat.completions.create(model="demo", messages=messages, extra_body={"truncation": "auto"})
    [submit] = fake.behaviour.submits
    prompt = prompt_of(submit)
    head = tokenizer.encode("<|bos|><|system|>Answer briefly.<|end|>", add_special_tokens=False)
    assert prompt[: len(head)] == head
    [(start, stop)] = drops_of(submit)
    assert start == len(head), "the instructions are kept"
    assert (stop - start) % 1024 == 0
    seen = len(prompt) - (stop - start)
    assert submit.prompt_len == len(prompt) > 2048 > seen + 256
    assert submit.max_tokens == 2048 - seen, "what is left is the answer's"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == seen
    assert answer.model_extra is not None
    assert answer.model_extra["truncation"] == {
        "occurred": True,
        "prompt_tokens_before": len(prompt),
        "dropped_tokens": stop - start,
        "kept": "cached",
    }


def test_what_is_kept(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    def dropped(**keep: Any) -> tuple[int, int]:
        policy = {"type": "retention_ratio", "retention_ratio": 0.25, "keep": keep}
        body = {"messages": talk(30), "truncation": policy, "max_tokens": 20}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        [cut] = drops_of(fake.behaviour.submits[-1])
        return cut

    head = len(tokenizer.encode("<|bos|><|system|>Answer briefly.<|end|>", add_special_tokens=False))
    assert dropped(instructions=False, sink_tokens=0)[0] == 0
    assert dropped(instructions=False)[0] == 4
    assert dropped()[0] == head
    assert dropped(sink_tokens=head + 9)[0] == head + 9
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    body = {"messages": talk(30), "truncation": "auto", "max_tokens": 20, "tools": [tool]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert drops_of(fake.behaviour.submits[-1])[0][0] > head + 10, "instructions and tools are kept together"
    start, stop = dropped(instructions=False, sink_tokens=2)
    assert (stop - start) % 1536 == 0


def test_no_cut_where_it_fits(http: httpx.Client, fake: FakeController) -> None:
    answer = http.post("/v1/completions", json={"prompt": [7] * 2000, "truncation": "auto"}).json()
    assert not fake.behaviour.submits[0].drops
    assert answer["truncation"] == {
        "occurred": False,
        "prompt_tokens_before": 2000,
        "dropped_tokens": 0,
        "kept": None,
    }
    plain = http.post("/v1/completions", json={"prompt": [7] * 2000}).json()
    assert "truncation" not in plain


def test_completions(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.found = lambda submit: Started(submit.request, 5, cut="recomputed")
    body = {"prompt": [7] * 3000, "truncation": "auto", "max_tokens": 48}
    answer = http.post("/v1/completions", json=body).json()
    assert drops_of(fake.behaviour.submits[0]) == [(4, 4 + 1024)]
    assert fake.behaviour.submits[0].max_tokens == 48
    assert answer["truncation"]["kept"] == "recomputed"
    assert answer["usage"]["prompt_tokens"] == 3000 - 1024
    assert http.post("/v1/completions", json=body | {"n": 2}).status_code == 200
    parts = payloads(http.post("/v1/completions", json=body | {"stream": True}))
    assert parts[-1]["truncation"]["dropped_tokens"] == 1024


def test_responses(client: openai.OpenAI, fake: FakeController) -> None:
    answer = client.responses.create(model="demo", input="word " * 2500, truncation="auto", max_output_tokens=50)
    assert answer.truncation == "auto"
    assert answer.model_extra is not None
    assert answer.model_extra["truncation_details"]["occurred"]
    assert answer.model_extra["cache"]["status"] == "miss"
    [(start, stop)] = drops_of(fake.behaviour.submits[0])
    assert answer.usage is not None
    assert answer.usage.input_tokens == fake.behaviour.submits[0].prompt_len - (stop - start)


def test_messages(http: httpx.Client, fake: FakeController) -> None:
    system, *turns = talk(30)
    body = {"model": "demo", "system": system["content"], "messages": turns, "max_tokens": 50}
    assert http.post("/v1/messages", json=body).status_code == 400
    answer = http.post("/v1/messages", json=body | {"truncation": "auto"})
    assert answer.status_code == 200, answer.text
    [submit] = fake.behaviour.submits
    [(start, stop)] = drops_of(submit)
    assert (stop - start) % 1024 == 0
    usage = answer.json()["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert read == submit.prompt_len - (stop - start)
