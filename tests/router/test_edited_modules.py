"""Edits and `drop` behind modules of a schema: what is left is computed behind the modules, which stay."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from router.edited_calls import EVERY_TURN, FUNCTIONS, TOOLS, conversation, report
from router.fake_controller import FakeController, prompt_of, seen_tokens
from router.schema_calls import post, runs_of, texts_of

from trunkline.router.text.tokenizer import Tokenizer

TALK = """<schema name="talk">
<system>You know <module name="places">all the places in the world, and each of their rivers</module>.</system>
</schema>"""
PML = '<prompt schema="talk"><places/></prompt>'
CHAT: list[Any] = [
    {"role": "user", "content": "Where is Ulm?"},
    {"role": "assistant", "content": "On the Danube."},
    {"role": "user", "content": "And Bonn?"},
    {"role": "assistant", "content": "On the Rhine."},
    {"role": "user", "content": "And Rome?"},
]


def ask(claude: anthropic.Anthropic, steps: int, *edits: Any, **more: Any) -> Any:
    return claude.beta.messages.create(
        model="demo", max_tokens=60, messages=conversation(steps), tools=TOOLS,
        context_management={"edits": list(edits)} if edits else anthropic.omit, extra_body={"pml": PML} | more,
    )  # fmt: skip


def own_text(fake: FakeController, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False)


def without(text: str, *pieces: str) -> str:
    for piece in pieces:
        assert text.count(piece) == 1
        text = text.replace(piece, "")
    return text


def test_old_results_behind_modules_are_cleared(
    claude: anthropic.Anthropic, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    post(http, TALK)
    plain = ask(claude, 4)
    before, whole = fake.behaviour.submits[-1], own_text(fake, tokenizer)
    edited = ask(claude, 4, EVERY_TURN)
    submit = fake.behaviour.submits[-1]
    assert own_text(fake, tokenizer) == without(whole, *(report(number) for number in range(3)))
    assert texts_of(submit) == texts_of(before)
    assert runs_of(submit)[:-1] == runs_of(before)[:-1]
    (start, count), (same, more) = runs_of(submit)[-1], runs_of(before)[-1]
    dropped = before.prompt_len - submit.prompt_len
    assert (start, count) == (same, more - dropped)
    [applied] = edited.context_management.applied_edits
    assert (applied.cleared_tool_uses, applied.cleared_input_tokens) == (3, dropped)
    assert edited.usage.input_tokens == plain.usage.input_tokens - dropped
    told = {"occurred": True, "prompt_tokens_before": plain.usage.input_tokens, "dropped_tokens": dropped}
    assert edited.to_dict()["truncation"] == told | {"kept": "recomputed"}
    counted = claude.beta.messages.count_tokens(
        model="demo", messages=conversation(4), tools=TOOLS, context_management={"edits": [EVERY_TURN]},
        extra_body={"pml": PML},
    )  # fmt: skip
    assert counted.input_tokens == edited.usage.input_tokens
    assert counted.context_management is not None
    assert counted.context_management.original_input_tokens == plain.usage.input_tokens


def test_the_next_edited_turn_goes_on_from_the_one_before(
    claude: anthropic.Anthropic, http: httpx.Client, fake: FakeController
) -> None:
    post(http, TALK)
    before: list[int] = []
    for steps in range(2, 6):
        ask(claude, steps, EVERY_TURN)
        own = prompt_of(fake.behaviour.submits[-1])
        agreed = next((at for at, pair in enumerate(zip(own, before, strict=False)) if pair[0] != pair[1]), 0)
        assert agreed >= len(before) // 3 * (steps > 2), "all up to what is newly cleared is found"
        before = own


def test_the_trigger_counts_modules(claude: anthropic.Anthropic, http: httpx.Client, fake: FakeController) -> None:
    post(http, TALK)
    ask(claude, 3)
    submit = fake.behaviour.submits[-1]
    assert submit.layout is not None
    seen = submit.prompt_len + seen_tokens(submit.layout)
    for value, clears in ((seen, False), (seen - 1, True)):
        edit = EVERY_TURN | {"trigger": {"type": "input_tokens", "value": value}}
        assert bool(ask(claude, 3, edit).context_management.applied_edits) == clears


def test_messages_behind_modules_are_dropped(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    """The same prompt as that of the messages that are left, in all three APIs."""
    post(http, TALK)

    def send(path: str, messages: list[Any], **fields: Any) -> str:
        name = "input" if path == "responses" else "messages"
        body = {"pml": PML, name: messages, "max_tokens": 20, **fields}
        if path == "responses":
            body["max_output_tokens"] = body.pop("max_tokens")
        answer = http.post("/v1/chat/completions" if path == "chat" else f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return own_text(fake, tokenizer)

    for path in ("chat", "messages", "responses"):
        left = send(path, [CHAT[0], *CHAT[3:]])
        assert send(path, CHAT, drop=[{"from": 1, "to": 3}]) == left
    told = http.post("/v1/responses", json={"pml": PML, "input": CHAT, "store": True}).json()
    more = [{"role": "user", "content": "Ah."}, {"role": "user", "content": "And Kiel?"}]
    send("responses", more, previous_response_id=told["id"], drop=[{"from": 0, "to": 1}])
    assert "Ah." not in own_text(fake, tokenizer)
    assert "And Kiel?" in own_text(fake, tokenizer)


def test_what_does_not_fit_is_made_to_fit(http: httpx.Client, fake: FakeController) -> None:
    post(http, TALK)
    long = [*CHAT[:2], {"role": "user", "content": "Rome? " * 2000}, *CHAT[3:]]
    body = {"pml": PML, "messages": long, "max_tokens": 20}
    assert http.post("/v1/chat/completions", json=body).status_code == 400
    answer = http.post("/v1/chat/completions", json=body | {"drop": [{"from": 2, "to": 3}]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"]["dropped_tokens"] > 2000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"drop": [{"from": 0, "to": 5}]}, "drop[0]"),
        ("chat/completions", {"drop": [{"from": 0, "to": 1}, {"from": 4, "to": 6}]}, "drop[1]"),
        ("chat/completions", {"drop": [{"from": 1, "to": 2}], "use_beam_search": True, "n": 2}, "use_beam_search"),
        ("chat/completions", {"drop": [{"from": 0, "to": 1}], "tools": FUNCTIONS}, "drop[0]"),
        ("completions", {"drop": [{"from": 0, "to": 1}], "messages": None}, "drop"),
        (
            "messages",
            {"context_management": {"edits": [EVERY_TURN | {"exclude_tools": ["fly"]}]}},
            "context_management.edits[0].exclude_tools",
        ),
    ],
)
def test_bad_edits_behind_modules(path: str, fields: dict[str, Any], param: str, http: httpx.Client) -> None:
    post(http, TALK)
    body = {"pml": PML, "messages": CHAT, "max_tokens": 5} | fields
    answer = http.post(f"/v1/{path}", json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 400
    assert param in answer.text
