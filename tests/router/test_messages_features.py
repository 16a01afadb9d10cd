"""What clients of `/v1/messages` send beside plain conversations, through Anthropic's client."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from router.api_calls import CITY, Say, last_prompt, named_events
from router.fake_controller import FakeController, prompt_of
from router.harness import ANSWER, RunningRouter

from trunkline.router.api.anthropic import MessagesRequest
from trunkline.router.api.anthropic_turns import translated
from trunkline.router.text.reasoning_styles import THINK
from trunkline.router.text.tokenizer import Tokenizer

HI: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"name": "get_weather", "description": "The weather of a place.", "input_schema": CITY}
NAME = "0b5cbbf6-6e5e-4f0a-9d0c-1a2b3c4d5e6f"
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "demo", "max_tokens": 200, "messages": HI, "stream": True, **fields}
    return named_events(http.post("/v1/messages", json=body))


def warnings_of(message: anthropic.types.Message) -> list[str]:
    """What the answer says has no effect."""
    found: list[str] = message.to_dict().get("warnings", [])  # type: ignore[assignment]
    return found


def test_an_answer_that_has_begun_goes_on(
    claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer
) -> None:
    begun: list[Any] = [*HI, {"role": "assistant", "content": "The best answer is ("}]
    answer = claude.messages.create(model="demo", max_tokens=50, messages=begun)
    assert answer.content[0].to_dict()["text"] == ANSWER, "what was sent is not repeated"
    whole = tokenizer.render_chat(begun, add_generation_prompt=False)
    shown = last_prompt(fake, tokenizer)
    assert shown == whole[: whole.rindex("The best answer is (") + len("The best answer is (")]
    count = claude.messages.count_tokens(model="demo", messages=begun)
    assert count.input_tokens == len(prompt_of(fake.behaviour.submits[-1]))
    spaced: list[Any] = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "So \n"}]}]
    claude.messages.create(model="demo", max_tokens=50, messages=spaced)
    assert last_prompt(fake, tokenizer).endswith("So \n"), "to the letter"
    twice: list[Any] = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}, *begun[1:]]
    claude.messages.create(model="demo", max_tokens=50, messages=twice)
    assert last_prompt(fake, tokenizer).endswith("The best answer is (")


def test_a_chat_continues_its_last_message(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    begun = [*HI, {"role": "assistant", "content": "So"}]
    path = "/v1/chat/completions"
    answer = http.post(path, json={"messages": begun, "continue_final_message": True, "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    assert last_prompt(fake, tokenizer).endswith("So")
    for body in (
        {"messages": HI},
        {"messages": begun, "add_generation_prompt": True},
        {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]},
    ):
        refused = http.post(path, json={**body, "continue_final_message": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
    plain = http.post(path, json={"messages": begun, "continue_final_message": False, "max_tokens": 9})
    assert plain.status_code == 200
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(begun)


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_system_messages_stand_where_they_are(
    claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer
) -> None:
    turns: list[Any] = [
        {"role": "system", "content": "First."},
        *HI,
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    ]
    claude.messages.create(model="demo", max_tokens=5, messages=turns, system="Before.")
    same = [
        {"role": "system", "content": "Before.\nFirst."},
        *HI,
        {"role": "system", "content": "Be brief."},
    ]
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(same)


def test_documents_become_text(claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer) -> None:
    plain: Any = {"type": "text", "media_type": "text/plain", "data": "Tides rise."}
    parts: Any = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    found: Any = {"type": "search_result", "title": "T", "source": "http://x", "content": [
        {"type": "text", "text": "c"}]}  # fmt: skip
    turn: Any = [
        {
            "type": "document",
            "title": "Sea",
            "context": "A book.",
            "source": plain,
            "citations": {"enabled": True},
        },
        {"type": "document", "source": parts},
        found,
        {"type": "text", "text": "And?"},
    ]
    answer = claude.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": turn}])
    text = (
        "<document>\n<title>Sea</title>\n<context>A book.</context>\nTides rise.\n</document>\n"
        "<document>\na\nb\n</document>\n"
        "<search_result>\n<title>T</title>\n<source>http://x</source>\nc\n</search_result>\nAnd?"
    )
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat([{"role": "user", "content": text}])
    assert warnings_of(answer) == ["answers have no citations"]
    call: Any = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document", "source": plain}]}
    said: Any = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    claude.messages.create(model="demo", max_tokens=5, messages=said, tools=[WEATHER])
    assert "<document>\nTides rise.\n</document>" in last_prompt(fake, tokenizer)


def test_what_only_other_servers_do_is_named(
    claude: anthropic.Anthropic, http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    searched: list[Any] = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "redacted_thinking", "data": "…"},
        {"type": "text", "text": "Found."},
    ]
    turns: list[Any] = [*HI, {"role": "assistant", "content": searched}, *HI]
    more: dict[str, Any] = {
        "mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}],
        "container": "container_1",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }
    answer = claude.messages.create(
        model="demo", max_tokens=5, messages=turns, tools=[SEARCH, WEATHER], service_tier="auto",
        metadata={"user_id": "u"}, extra_body=more,
    )  # fmt: skip
    said = warnings_of(answer)
    assert [text.split("`")[1] if "`" in text else text.split("'")[1] for text in said] == [
        "container",
        "web_search_20250305",
        "server_tool_use",
        "web_search_tool_result",
        "redacted_thinking",
        "mcp_servers",
    ]
    assert answer.to_dict()["context_management"] == {"applied_edits": []}
    shown = last_prompt(fake, tokenizer)
    assert "get_weather" in shown
    assert "web_search" not in shown
    begun = events_of(http, tools=[SEARCH])[0]["message"]
    assert begun["warnings"] == [said[1]]
    assert "warnings" not in events_of(http)[0]["message"]
    counted = http.post("/v1/messages/count_tokens", json={"messages": HI, "context_management": {"edits": []}})
    assert counted.json()["context_management"]["original_input_tokens"] == counted.json()["input_tokens"]


def test_what_counts_as_kept(claude: anthropic.Anthropic, http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.cached_tokens = 3
    plain = claude.messages.create(model="demo", max_tokens=5, messages=HI)
    size = len(prompt_of(fake.behaviour.submits[-1]))
    usage = plain.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (
        size - 3,
        0,
        3,
    )
    assert usage.cache_creation is None
    for life, mark in (("5m", {"type": "ephemeral"}), ("1h", {"type": "ephemeral", "ttl": "1h"})):
        marked: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": mark}]}]
        usage = claude.messages.create(model="demo", max_tokens=5, messages=marked).usage
        counts = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
        assert counts == (0, size - 3, 3), "marks do not change the prompt, only the names of the counts"
        assert usage.cache_creation is not None
        created = usage.cache_creation.to_dict()
        assert created[f"ephemeral_{life}_input_tokens"] == size - 3
        assert sum(created.values()) == size - 3  # type: ignore[arg-type]
    for where in ({"cache_control": mark}, {"tools": [{**WEATHER, "cache_control": mark}]},
                  {"system": [{"type": "text", "text": "x", "cache_control": mark}]}):  # fmt: skip
        body = http.post("/v1/messages", json={"max_tokens": 5, "messages": HI, **where}).json()
        assert body["usage"]["input_tokens"] == 0
        assert body["cache"]["status"] == "hit"
    assert events_of(http)[-2]["cache"]["status"] == "hit"


def test_more_tokens_than_the_context_leaves(claude: anthropic.Anthropic, fake: FakeController) -> None:
    fake.behaviour.sample_script = lambda submit, _: [300] * submit.max_tokens
    with claude.messages.stream(model="demo", max_tokens=32_000, messages=HI) as stream:
        final = stream.get_final_message()
    submit = fake.behaviour.submits[-1]
    assert (
        submit.max_tokens + len(prompt_of(submit)) == final.usage.input_tokens + final.usage.output_tokens == 2048
    )
    assert final.stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("user_id", "conversation"),
    [
        (f"user_{'a' * 64}_account__session_{NAME}", NAME),
        (f'{{"device_id":"d","session_id":"{NAME}"}}', NAME),
        ("somebody", None),
        (5, None),
    ],
)
def test_which_conversation_it_is(user_id: Any, conversation: str | None) -> None:
    body = MessagesRequest(max_tokens=5, messages=HI, metadata={"user_id": user_id})
    assert body.conversation == conversation


def test_thoughts_that_are_not_shown_come_back(
    claude: anthropic.Anthropic,
    http: httpx.Client,
    say: Say,
    router: RunningRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router.service.tokenizer, "reasoning", THINK)
    say("<think>I see: wörld.</think>Yes.")
    shown = claude.messages.create(model="demo", max_tokens=50, messages=HI)
    seen, text = (block.to_dict() for block in shown.content)
    assert (seen["type"], seen["thinking"], text["text"]) == ("thinking", "I see: wörld.", "Yes.")
    assert shown.usage.output_tokens_details is not None
    assert 0 < shown.usage.output_tokens_details.thinking_tokens < shown.usage.output_tokens
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    thought = (
        claude.messages.create(model="demo", max_tokens=50, messages=HI, thinking=hidden).content[0].to_dict()
    )
    assert thought["thinking"] == ""
    deltas = [event["delta"] for event in events_of(http, thinking=hidden) if "delta" in event]
    assert [delta["signature"] for delta in deltas if "signature" in delta] == [thought["signature"]]
    assert not any("thinking" in delta for delta in deltas)
    other = {**thought, "signature": "EqMDCkYIBhgCKkDX"}
    broken = {**thought, "signature": "tl_?"}
    for given, known in ((thought, seen["thinking"]), (seen, seen["thinking"]), (other, ""), (broken, "")):
        turns = [*HI, {"role": "assistant", "content": [given]}, *HI]
        assert translated(turns, None, b"").messages[1]["reasoning_content"] == known
