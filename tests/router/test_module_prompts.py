"""Completions and chats whose prompt is made of modules."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from router.api_calls import last_prompt, payloads
from router.fake_controller import FakeController, prompt_of, seen_tokens
from router.harness import ANSWER, MESSAGES, wait_until
from router.schema_calls import PLAN, PLAN_OBJECT, TRIP, complete, post, runs_of, texts_of
from router.session_calls import error_of
from seeds import seeds

from trunkline.kvstore.chunks import unpack_int32
from trunkline.kvstore.records import Record, RecordKey
from trunkline.router import pml
from trunkline.router.stores.model_text import ModelText
from trunkline.router.stores.schema_records import Definition
from trunkline.router.stores.stored_schema import Compiled, StoredSchema
from trunkline.router.text.tokenizer import Tokenizer

CHAT = """<schema name="talk">
<system>You help with <module name="files">a long file, with many lines in it</module>.</system>
</schema>"""


@pytest.fixture(autouse=True)
def schema(http: httpx.Client, fake: FakeController) -> None:
    post(http)
    post(http, CHAT)


def test_a_completion(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    fake.behaviour.cached_tokens = 7
    post(http, ttl=60)
    answer = complete(http, max_tokens=5).json()
    [submit] = fake.behaviour.submits
    texts = texts_of(submit)
    plain = tokenizer.encode_plain
    assert next(tokens for tokens, _, seen in texts if seen) == [0, *plain(" You plan trips. ")]
    own = prompt_of(submit)
    assert own == plain("two days") + plain("Where do I sleep?")
    city = texts[1]
    [days, trailing] = runs_of(submit)
    stay = len(plain("The city is warm. Stay for "))
    assert days == [city[1] + stay, len(plain("two days"))]
    assert city[2] == [[0, stay], [stay + 6, len(city[0])]], "the placeholders are not seen"
    extent = post(http, warm=False)["extent"]
    assert trailing == [extent, len(plain("Where do I sleep?"))]
    assert submit.prompt_len == len(own)
    assert submit.layout is not None
    assert submit.layout.ttl == 60
    modules = seen_tokens(submit.layout)
    assert answer["usage"]["prompt_tokens"] == modules + len(own)
    details = {"cached_tokens": 7, "session_tokens": 0, "module_tokens": modules}
    assert answer["usage"]["prompt_tokens_details"] == details
    assert answer["cache"]["exact"] is False
    assert answer["choices"][0]["text"]


def test_both_forms_mean_the_same(http: httpx.Client, fake: FakeController) -> None:
    assert complete(http).status_code == 200
    assert http.post("/v1/completions", json={"prompt": PLAN_OBJECT}).status_code == 200
    assert http.post("/v1/chat/completions", json={"prompt": PLAN_OBJECT}).status_code == 200
    one, two, chat = fake.behaviour.submits
    position, count = runs_of(chat)[-1]
    assert chat.max_tokens == 2048 - position - count, "positions count, those of modules left out, too"
    assert (one.tokens, one.layout) == (two.tokens, two.layout) == (chat.tokens, chat.layout)


def test_trailing_text_right_behind(http: httpx.Client, fake: FakeController) -> None:
    complete(http)
    complete(http, trailing="compact")
    fixed, compact = (runs_of(submit)[-1] for submit in fake.behaviour.submits)
    assert compact[0] < fixed[0]
    assert compact[1] == fixed[1]


def test_a_chat(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    body = {"pml": '<prompt schema="talk"><files/></prompt>', "messages": MESSAGES}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    [submit] = fake.behaviour.submits
    own = last_prompt(fake, tokenizer)
    assert own.endswith(f"<|user|>{MESSAGES[0]['content']}<|end|><|assistant|>")
    system, *_ = texts_of(submit)
    assert tokenizer.decode(system[0], skip_special_tokens=False).startswith("<|bos|><|system|>You help with")
    assert answer["usage"]["prompt_tokens_details"]["module_tokens"] > 0


def test_streams_choices_logprobs_and_grammars(http: httpx.Client, fake: FakeController) -> None:
    answer = complete(http, n=2, logprobs=1).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][1]["logprobs"]["token_logprobs"]
    events = payloads(complete(http, stream=True, stream_options={"include_usage": True}))
    assert events[-1]["usage"]["prompt_tokens_details"]["module_tokens"] > 0
    assert events[-1]["cache"]["exact"] is False
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert complete(http, response_format=schema).status_code == 200
    assert fake.behaviour.submits[-1].grammar is not None


def test_searches_and_the_best_of_several(http: httpx.Client, fake: FakeController) -> None:
    searched = complete(http, use_beam_search=True, n=2, beam_width=3).json()
    assert len(searched["choices"]) == 2
    best = complete(http, best_of=3, n=1).json()
    assert len(best["choices"]) == 1
    search, several = fake.behaviour.submits
    assert search.layout == several.layout
    assert search.layout is not None
    assert search.beam is not None
    assert (search.beam.width, several.n) == (3, 3)


def test_tools_are_described_to_the_user(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ]
    body = {"prompt": {"schema": "talk"}, "messages": messages, "tools": [tool]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    own = last_prompt(fake, tokenizer)
    assert "look_up" in own
    assert "<tool_response>" in own
    body["messages"] = messages[-1:]
    assert error_of(http.post("/v1/chat/completions", json=body)) == (400, None, "messages")


@pytest.mark.parametrize(
    ("pml", "status", "code", "extra"),
    [
        ('<prompt schema="none">x</prompt>', 404, "E_SCHEMA_UNKNOWN", {}),
        ('<prompt schema="trip">\n<lake/></prompt>', 400, "E_MODULE_UNKNOWN", {"line": 2, "column": 1}),
        (f'<prompt schema="trip"><city days="{"one two " * 9}"/></prompt>', 400, "E_ARG_TOO_LONG", {"len": 6}),
        ('<prompt schema="trip">' + "word " * 5000 + "</prompt>", 400, "E_CONTEXT_LENGTH", {}),
        ("", 400, "E_XML", {}),
    ],
)
def test_bad_prompts(
    http: httpx.Client, fake: FakeController, pml: str, status: int, code: str, extra: dict[str, Any]
) -> None:
    answer = complete(http, pml)
    assert error_of(answer) == (status, code, "pml")
    assert answer.json()["error"].items() >= extra.items()
    assert not fake.behaviour.submits


@pytest.mark.parametrize("seed", seeds(2))
def test_messages_behind_modules_are_truncated(
    seed: int, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    """A conversation grows beyond the context: the same of it is left out until it overflows again, and what is
    left is the end of the whole."""
    rng = random.Random(seed)
    body = {"pml": '<prompt schema="talk"><files/></prompt>', "truncation": "auto", "max_tokens": 100}
    messages: list[Any] = []
    before: dict[str, Any] = {"dropped_tokens": 0}
    cuts = set()
    for turn in range(12):
        messages.append(
            {"role": ("user", "assistant")[turn % 2], "content": "some words " * rng.randrange(20, 300)}
        )
        answer = http.post("/v1/chat/completions", json=body | {"messages": messages}).json()
        submit, told = fake.behaviour.submits[-1], answer["truncation"]
        dropped = told["dropped_tokens"]
        assert told["occurred"] is (dropped > 0)
        own = prompt_of(submit)
        placed = runs_of(submit)[-1]
        assert sum(placed) + 100 <= 2048
        text = tokenizer.decode(own, skip_special_tokens=False)
        assert text.endswith("<|assistant|>" if turn % 2 == 0 else "<|end|><|assistant|>")
        assert dropped >= before["dropped_tokens"]
        if dropped == before["dropped_tokens"] and turn:
            shared = len(before["own"]) - 2
            assert own[:shared] == before["own"][:shared], "what was computed is found again"
        before = {"dropped_tokens": dropped, "own": own}
        cuts.add(dropped)
    assert len(cuts) > 1
    refused = http.post("/v1/chat/completions", json=body | {"messages": messages, "truncation": "disabled"})
    assert error_of(refused) == (400, "E_CONTEXT_LENGTH", "pml")


def test_what_leaves_no_room_is_refused(http: httpx.Client, fake: FakeController) -> None:
    """Only messages are left out, not a prompt's own texts."""
    long = f'<prompt schema="trip">{"word " * 2500}</prompt>'
    assert error_of(complete(http, long, truncation="auto")) == (400, "context_length_exceeded", "pml")
    assert complete(http, truncation="auto").json()["truncation"]["occurred"] is False
    body = {"pml": PLAN, "messages": [{"role": "user", "content": "word " * 90}], "truncation": "auto"}
    http.post("/v1/chat/completions", json=body)
    room = 2048 - sum(runs_of(fake.behaviour.submits[-1])[-1])
    for extra in (0, 1):
        answer = http.post("/v1/chat/completions", json=body | {"max_tokens": room + extra}).json()
        assert answer["truncation"]["occurred"] is bool(extra), "modules and gaps take positions, too"


def test_likely_modules_are_fetched_ahead(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    assert complete(http).status_code == 200
    wait_until(lambda: bool(fake.behaviour.prefetches))  # which may be read after the answer has come
    [hint] = fake.behaviour.prefetches
    assert hint.layout is not None
    assert hint.tokens == b""
    wanted = [unpack_int32(text.tokens).tolist() for text in hint.layout.texts if text.seen]
    assert tokenizer.encode_plain("There are many hills around it, and they are high.") in wanted
    parents = [text.parent for text in hint.layout.texts]
    assert all(parent < index for index, parent in enumerate(parents))


def made_of(tokenizer: Tokenizer, source: str, prompt: str) -> tuple[StoredSchema, pml.CompiledPrompt]:
    """A schema as a router knows it, and a prompt of it."""
    text, definition = ModelText(tokenizer), Definition(model="demo", source=source)
    compiled = pml.compile_schema(definition.parse(), text, scope="ancestors", context=2048)
    ready = Compiled(compiled, pml.texts_message(compiled), [])
    document = pml.parse_prompt(prompt)
    made = pml.compile_prompt(compiled, document, text, context=2048, add_generation_prompt=False)
    record = Record(RecordKey("schema", "", "trip"), 1, b"", b"", 0.0, 0.0, 0.0)
    return StoredSchema(b"", record, definition, ready), made


def test_not_with_every_request(tokenizer: Tokenizer) -> None:
    schema, prompt = made_of(tokenizer, TRIP, PLAN)
    hints = [schema.hint(prompt, now) is not None for now in (0.0, 0.5, 0.9, 1.0, 1.5, 2.5)]
    assert hints == [True, False, False, True, False, True]
    alone = "<schema name='trip'>You plan trips.</schema>"
    nothing, prompt = made_of(tokenizer, alone, "<prompt schema='trip'>Where?</prompt>")
    assert nothing.hint(prompt, 0.0) is None
    schema.used(["hill"])
    for _ in range(10_000):
        schema.used(["sea"])
    assert set(schema.uses) == {"sea"}, "what was used lately counts more"
    assert schema.uses.total() <= 4096
