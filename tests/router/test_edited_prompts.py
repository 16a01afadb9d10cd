"""Parts of a conversation that the model does not see: context edits, and `drop`, through the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import pytest
from router.api_calls import Say, named_events
from router.edited_calls import EVERY_TURN, TOOLS, conversation, report
from router.fake_controller import FakeController, drops_of, prompt_of
from router.harness import ANSWER, running
from router.model_folders import write_family

from trunkline.router.messages import Started
from trunkline.router.text.tokenizer import Tokenizer


def ask(claude: anthropic.Anthropic, steps: int, *edits: Any, **more: Any) -> anthropic.types.beta.BetaMessage:
    return claude.beta.messages.create(
        model="demo", max_tokens=60, messages=conversation(steps), tools=TOOLS, system="You know the weather.",
        betas=["context-management-2025-06-27"], context_management={"edits": list(edits)}, extra_body=more,
    )  # fmt: skip


def dropped_texts(fake: FakeController, tokenizer: Tokenizer) -> list[str]:
    """What the last request leaves out, range by range."""
    submit = fake.behaviour.submits[-1]
    tokens = prompt_of(submit)
    return [tokenizer.decode(tokens[start:stop], skip_special_tokens=False) for start, stop in drops_of(submit)]


def test_old_results_are_cut_out_of_the_whole_conversation(
    claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer
) -> None:
    ask(claude, 4)
    whole = prompt_of(fake.behaviour.submits[-1])
    assert drops_of(fake.behaviour.submits[-1]) == []
    edited = ask(claude, 4, EVERY_TURN)
    submit = fake.behaviour.submits[-1]
    assert prompt_of(submit) == whole, "so that KV of the turns before the edit is found"
    assert dropped_texts(fake, tokenizer) == [report(number) for number in range(3)]
    assert edited.context_management is not None
    [applied] = edited.context_management.applied_edits
    assert applied.type == "clear_tool_uses_20250919"
    dropped = sum(stop - start for start, stop in drops_of(submit))
    assert (applied.cleared_tool_uses, applied.cleared_input_tokens) == (3, dropped)
    assert edited.usage.input_tokens == len(whole) - dropped
    told = edited.to_dict()["truncation"]
    assert told == {
        "occurred": True, "prompt_tokens_before": len(whole), "dropped_tokens": dropped, "kept": "cached"
    }  # fmt: skip
    assert "warnings" not in edited.to_dict()


def test_the_next_turn_clears_the_same_and_one_more(claude: anthropic.Anthropic, fake: FakeController) -> None:
    before: list[tuple[int, int]] = []
    prompt: list[int] = []
    for steps in range(2, 7):
        ask(claude, steps, EVERY_TURN)
        submit = fake.behaviour.submits[-1]
        drops, tokens = drops_of(submit), prompt_of(submit)
        assert len(drops) == steps - 1
        assert drops[:-1] == before, "KV behind the earlier edits is found by their names"
        end = drops[-1][0]
        assert tokens[: min(end, len(prompt))] == prompt[: min(end, len(prompt))]
        before, prompt = drops, tokens


def test_exact_computes_what_is_left_as_a_plain_prompt(
    claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer
) -> None:
    ask(claude, 4, EVERY_TURN)
    submit = fake.behaviour.submits[-1]
    tokens, drops = prompt_of(submit), drops_of(submit)
    left = [token for at, token in enumerate(tokens) if not any(start <= at < stop for start, stop in drops)]
    exact = ask(claude, 4, EVERY_TURN, exact=True)
    assert prompt_of(fake.behaviour.submits[-1]) == left
    assert drops_of(fake.behaviour.submits[-1]) == []
    shown = tokenizer.decode(left, skip_special_tokens=False)
    assert "<tool_response>\n\n</tool_response>" in shown
    assert report(3) in shown
    told: Any = exact.to_dict()["truncation"]
    assert told["kept"] == "recomputed"
    assert told["prompt_tokens_before"] - told["dropped_tokens"] == len(left) == exact.usage.input_tokens
    assert exact.context_management is not None
    assert exact.context_management.applied_edits[0].cleared_input_tokens == told["dropped_tokens"]


def test_inputs_and_excluded_tools(
    claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer
) -> None:
    edited = ask(claude, 4, {**EVERY_TURN, "clear_tool_inputs": True, "exclude_tools": ["get_tides"]})
    texts = dropped_texts(fake, tokenizer)
    assert texts == ["Place number 0", report(0), "Place number 2", report(2)]
    assert edited.context_management is not None
    [applied] = edited.context_management.applied_edits
    assert applied.to_dict()["cleared_tool_uses"] == 2
    ask(claude, 4, {**EVERY_TURN, "clear_tool_inputs": ["get_tides"]})
    assert dropped_texts(fake, tokenizer)[1:3] == ["Place number 1", report(1)]
    ask(claude, 4, {**EVERY_TURN, "clear_at_least": {"type": "input_tokens", "value": 5000}})
    assert dropped_texts(fake, tokenizer) == []
    rare = ask(claude, 4, {"type": "clear_tool_uses_20250919"})
    assert rare.context_management is not None
    assert rare.context_management.applied_edits == [], "the trigger is 100,000 tokens"


def test_a_stream_tells_at_its_end(http: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.found = lambda submit: Started(submit.request, 40, cut="kept", exact=False)
    body = {
        "model": "demo", "max_tokens": 60, "stream": True, "messages": conversation(3), "tools": TOOLS,
        "context_management": {"edits": [EVERY_TURN]},
    }  # fmt: skip
    events = named_events(http.post("/v1/messages", json=body))
    end = next(event for event in events if event["type"] == "message_delta")
    assert end["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 2
    assert end["truncation"]["kept"] == "cached"
    assert end["cache"]["exact"] is False
    dropped = end["truncation"]["dropped_tokens"]
    assert end["usage"]["input_tokens"] == len(prompt_of(fake.behaviour.submits[-1])) - dropped - 40
    assert "context_management" not in events[0]["message"]


def test_counts_with_and_without(claude: anthropic.Anthropic, fake: FakeController) -> None:
    ask(claude, 4, EVERY_TURN)
    submit = fake.behaviour.submits[-1]
    count = claude.beta.messages.count_tokens(
        model="demo", messages=conversation(4), tools=TOOLS, system="You know the weather.",
        context_management={"edits": [EVERY_TURN]},
    )  # fmt: skip
    assert count.context_management is not None
    assert count.context_management.original_input_tokens == len(prompt_of(submit))
    dropped = sum(stop - start for start, stop in drops_of(submit))
    assert count.input_tokens == len(prompt_of(submit)) - dropped


def test_edits_make_room_for_what_would_not_fit(claude: anthropic.Anthropic, fake: FakeController) -> None:
    with pytest.raises(anthropic.BadRequestError):
        ask(claude, 22)
    edited = ask(claude, 22, EVERY_TURN)
    assert edited.content[0].to_dict()["text"] == ANSWER
    assert len(prompt_of(fake.behaviour.submits[-1])) > fake.behaviour.max_context


def test_wrong_edits_are_refused(claude: anthropic.Anthropic, fake: FakeController) -> None:
    for edits, place in (
        ([{**EVERY_TURN, "exclude_tools": ["none"]}], "edits[0].exclude_tools"),
        ([EVERY_TURN, {"type": "clear_thinking_20251015"}], "edits[1]"),
        ([{"type": "compact_20260112"}], "edits[0].type"),
    ):
        with pytest.raises(anthropic.BadRequestError, match="context_management") as raised:
            ask(claude, 2, *edits)
        assert f"`context_management.{place}`" in raised.value.message
    assert fake.behaviour.submits == []


# -- drop

TURNS: Any = [
    {"role": "system", "content": "Be brief."},
    *(
        {"role": ("user", "assistant")[number % 2], "content": f"Number {number} is {number * 7} or more."}
        for number in range(6)
    ),
    {"role": "user", "content": "And?"},
]


def chat(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/v1/chat/completions", json={"messages": TURNS, "max_tokens": 60} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def left_of(fake: FakeController, tokenizer: Tokenizer) -> str:
    """The text of what the last request leaves of its prompt."""
    submit = fake.behaviour.submits[-1]
    tokens, drops = prompt_of(submit), drops_of(submit)
    left = [token for at, token in enumerate(tokens) if not any(start <= at < stop for start, stop in drops)]
    return tokenizer.decode(left, skip_special_tokens=False)


@pytest.mark.parametrize("ranges", [[(1, 3)], [(0, 1)], [(3, 7)], [(1, 3), (3, 5)], [(0, 1), (4, 5)], [(2, 8)]])
def test_dropped_messages_leave_what_the_template_writes_without_them(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer, ranges: list[tuple[int, int]]
) -> None:
    drop = [{"from": start, "to": stop} for start, stop in ranges]
    rest = [turn for at, turn in enumerate(TURNS) if not any(start <= at < stop for start, stop in ranges)]
    answer = chat(http, drop=drop)
    submit = fake.behaviour.submits[-1]
    assert tokenizer.decode(prompt_of(submit), skip_special_tokens=False) == tokenizer.render_chat(TURNS)
    assert left_of(fake, tokenizer) == tokenizer.render_chat(rest)
    dropped = sum(stop - start for start, stop in drops_of(submit))
    assert answer["truncation"]["dropped_tokens"] == dropped
    assert answer["usage"]["prompt_tokens"] == len(prompt_of(submit)) - dropped
    exact = chat(http, drop=drop, exact=True)
    assert tokenizer.decode(
        prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False
    ) == tokenizer.render_chat(rest)
    assert exact["truncation"]["kept"] == "recomputed"


def test_what_was_written_without_ranges_is_remembered_as_it_is(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    """A long conversation is found again; so are those without its last range, its last two, and so on."""
    turns: list[Any] = [{"role": "user", "content": "Begin."}]
    for number in range(40):
        turns += [
            {"role": "assistant", "content": f"Answer {number}."},
            {"role": "user", "content": f"And {number}?"},
        ]
    ranges = [(1, 3), (9, 11), (21, 25), (40, 60)]
    chat(http, messages=turns)
    chat(http, messages=turns, drop=[{"from": start, "to": stop} for start, stop in ranges])
    rest = turns
    for start, stop in reversed(ranges):
        rest = [*rest[:start], *rest[stop:]]
    assert left_of(fake, tokenizer) == tokenizer.render_chat(rest)
    rest = turns
    for start, stop in reversed(ranges):
        rest = [*rest[:start], *rest[stop:]]
        chat(http, messages=rest)
        assert left_of(fake, tokenizer) == tokenizer.render_chat(rest)


def test_messages_of_anthropic_are_dropped_by_their_own_indices(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    def send(*ranges: tuple[int, int], messages: Any = None) -> httpx.Response:
        drop = [{"from": start, "to": stop} for start, stop in ranges]
        body = {"model": "demo", "max_tokens": 9, "messages": messages or conversation(3), "tools": TOOLS}
        return http.post("/v1/messages", json={**body, "system": "Be brief.", "drop": drop})

    assert send((1, 3)).status_code == 200
    left = left_of(fake, tokenizer)
    http.post("/v1/messages", json={
        "model": "demo", "max_tokens": 9, "system": "Be brief.", "tools": TOOLS,
        "messages": [conversation(3)[0], *conversation(3)[3:]],
    })  # fmt: skip
    assert left == tokenizer.decode(prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False)
    for ranges, place in ((((1, 2),), "drop[0]"), (((1, 3), (5, 9)), "drop[1]"), (((0, 7),), "drop[0]")):
        refused = send(*ranges)
        assert refused.status_code == 400
        assert f"`{place}`" in refused.json()["error"]["message"]
    joined = [{"role": "user", "content": text} for text in "abc"]
    parted = send((0, 1), messages=joined).json()["error"]["message"]
    assert "parts messages that the model is shown as one message" in parted


def respond(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/v1/responses", json={"max_output_tokens": 60, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_items_of_a_response_are_dropped_and_stored(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    drop = [{"from": 1, "to": 3}]
    for store in (True, False):
        first = respond(http, input=TURNS[1:], instructions="Be brief.", drop=drop, store=store)
        assert left_of(fake, tokenizer) == tokenizer.render_chat([TURNS[0], TURNS[1], *TURNS[4:]])
        submit = fake.behaviour.submits[-1]
        assert tokenizer.decode(prompt_of(submit), skip_special_tokens=False) == tokenizer.render_chat(TURNS)
        assert first["truncation_details"]["dropped_tokens"] == sum(
            stop - start for start, stop in drops_of(submit)
        )
        if store:
            stored = first["id"]
    new = [
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "?"},
    ]
    respond(http, input=new, instructions="Be brief.", previous_response_id=stored, drop=[{"from": 0, "to": 2}])
    whole = [*TURNS, {"role": "assistant", "content": ANSWER}, *new]
    assert left_of(fake, tokenizer) == tokenizer.render_chat([*whole[:-3], whole[-1]])
    assert tokenizer.decode(
        prompt_of(fake.behaviour.submits[-1]), skip_special_tokens=False
    ) == tokenizer.render_chat(whole)
    bad = http.post("/v1/responses", json={"input": TURNS[1:], "drop": [{"from": 5, "to": 9}]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "drop[0]")
    assert bad.json()["error"]["message"] == "`drop[0]` ends at 9; there are 7 items"


def test_tokens_of_a_completion(http: httpx.Client, fake: FakeController) -> None:
    tokens = list(range(100, 160))
    body = {"prompt": tokens, "max_tokens": 5, "drop": [{"from": 3, "to": 9}, {"from": 20, "to": 30}]}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert prompt_of(fake.behaviour.submits[-1]) == tokens
    assert drops_of(fake.behaviour.submits[-1]) == [(3, 9), (20, 30)]
    assert answer.json()["truncation"]["dropped_tokens"] == 16
    http.post("/v1/completions", json={**body, "exact": True})
    assert prompt_of(fake.behaviour.submits[-1]) == [*tokens[:3], *tokens[9:20], *tokens[30:]]
    many = [(at, at + 1) for at in range(1, 400, 2)]
    body |= {"prompt": tokens * 30, "drop": [{"from": start, "to": stop} for start, stop in many]}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert drops_of(fake.behaviour.submits[-1]) == many, "single tokens, several within a chunk"
    several = http.post("/v1/completions", json={**body, "prompt": [tokens, tokens]})
    assert (several.status_code, several.json()["error"]["param"]) == (400, "drop")
    cut = {"prompt": "word " * 3000, "max_tokens": 5, "truncation": "auto"}
    kept = http.post("/v1/completions", json=cut).json()["truncation"]
    exact = http.post("/v1/completions", json={**cut, "exact": True}).json()["truncation"]
    assert exact == {**kept, "kept": "recomputed"}
    assert len(prompt_of(fake.behaviour.submits[-1])) == kept["prompt_tokens_before"] - kept["dropped_tokens"]


def test_a_session_goes_on_after_an_exact_turn(http: httpx.Client, fake: FakeController) -> None:
    session = http.post("/v1/sessions", json={"messages": TURNS[:3]}).json()["id"]
    one = {"session_id": session, "messages": [TURNS[3]]}
    assert chat(http, **one)["usage"]["prompt_tokens_details"]["session_tokens"] > 0
    assert http.post(f"/v1/sessions/{session}/discard", json={"tokens": [[2, 9]]}).status_code == 200
    whole = chat(http, **one)["usage"]["prompt_tokens_details"]
    tokens = http.get(f"/v1/sessions/{session}").json()["tokens"]
    exact = chat(http, **one, exact=True)
    assert exact["usage"]["prompt_tokens_details"]["session_tokens"] == tokens - 7 > whole["session_tokens"]
    assert exact["truncation"]["dropped_tokens"] == 7
    refused = http.post("/v1/chat/completions", json={**one, "drop": [{"from": 0, "to": 1}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "drop")


BAD: dict[str, list[dict[str, Any]]] = {
    "drop": [{"drop": 5}, {"drop": [{"from": at, "to": at + 1} for at in range(1025)]}],
    "drop[64]": [{"drop": [{"from": at, "to": at + 1} for at in range(65)]}],
    "drop[0]": [
        *({"drop": [bad]} for bad in ({"from": 2, "to": 2}, {"from": 3, "to": 2}, {"from": 0, "to": 8}, 5)),
        {"drop": [{"from": 5, "to": 9}]},
    ],
    "drop[0].from": [{"drop": [{"to": 2}]}, {"drop": [{"from": -1, "to": 2}]}],
    "drop[0].to": [{"drop": [{"from": 1}]}, {"drop": [{"from": 0, "to": "2"}]}],
    "drop[0].tokens": [{"drop": [{"from": 0, "to": 1, "tokens": 3}]}],
    "drop[1]": [{"drop": [{"from": 1, "to": 3}, {"from": 2, "to": 4}]}],
    "truncate_prompt_tokens": [{"drop": [{"from": 1, "to": 3}], "truncate_prompt_tokens": 5}],
    "use_beam_search": [{"drop": [{"from": 1, "to": 3}], "use_beam_search": True, "n": 2}],
    "prompt_logprobs": [{"drop": [{"from": 1, "to": 3}], "prompt_logprobs": 1}],
    "exact": [{"exact": "yes"}],
}


@pytest.mark.parametrize("param", BAD)
def test_bad_ranges(http: httpx.Client, fake: FakeController, param: str) -> None:
    for fields in BAD[param]:
        answer = http.post("/v1/chat/completions", json={"messages": TURNS, "max_tokens": 5, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (fields, answer.text)
    assert fake.behaviour.submits == []


def test_results_without_calls_name_the_range(http: httpx.Client) -> None:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps({"city": "x"})},
    }
    turns = [
        TURNS[1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        TURNS[3],
    ]
    answer = http.post("/v1/chat/completions", json={"messages": turns, "drop": [{"from": 1, "to": 2}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "drop[0]")
    assert "answers no call" in answer.json()["error"]["message"]


def test_an_answer_keeps_its_tokens_in_an_edited_turn(
    claude: anthropic.Anthropic, fake: FakeController, tokenizer: Tokenizer, say: Say
) -> None:
    """A call that the model wrote with other white space comes back with the tokens that it had."""
    written = 'Look.\n<tool_call>\n{"name":  "get_weather",  "arguments": {"city":   "Remembered"}}\n</tool_call>'
    answer: list[int] = cast(Any, say(written))[0]
    turns = [*conversation(3), {"role": "user", "content": "And there?"}]
    edits: Any = {"edits": [EVERY_TURN]}

    def send(messages: Any) -> anthropic.types.beta.BetaMessage:
        return claude.beta.messages.create(
            model="demo", max_tokens=200, messages=messages, tools=TOOLS, context_management=edits
        )

    first = send(turns)
    before = fake.behaviour.submits[-1]
    call = first.content[-1]
    assert call.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": report(9)}
    send([*turns, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}])
    submit = fake.behaviour.submits[-1]
    tokens, asked = prompt_of(submit), prompt_of(before)
    assert tokens[: len(asked) + len(answer) - 1] == [*asked, *answer[:-1]], "all KV of the turn before is found"
    assert drops_of(submit)[:-1] == drops_of(before)
    assert dropped_texts(fake, tokenizer) == [report(number) for number in range(3)]


@pytest.fixture
def served(tmp_path: Path, place: Path) -> Iterator[tuple[httpx.Client, FakeController, Tokenizer]]:
    """A router with a model that thinks."""
    folder = write_family(tmp_path, "qwen3")
    tokenizer = Tokenizer(folder)
    with running(place, tokenizer, model_path=str(folder)) as (router, [fake]), router.client() as http:
        yield http, fake, tokenizer
    tokenizer.close()


def test_old_thoughts_are_cleared(served: tuple[httpx.Client, FakeController, Tokenizer]) -> None:
    http, fake, tokenizer = served
    turns: list[Any] = []
    for number in range(3):
        thought = {"type": "thinking", "thinking": f"Deep thought {number}.", "signature": "s"}
        turns.append({"role": "user", "content": f"Question {number}"})
        turns.append({"role": "assistant", "content": [thought, {"type": "text", "text": f"Answer {number}"}]})
    turns.append({"role": "user", "content": "Hi"})

    def send(keep: Any) -> tuple[Any, list[str]]:
        edits = [{"type": "clear_thinking_20251015", "keep": keep}]
        body = {"model": "demo", "max_tokens": 9, "messages": turns, "context_management": {"edits": edits}}
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        submit = fake.behaviour.submits[-1]
        tokens = prompt_of(submit)
        texts = [tokenizer.decode(tokens[start:stop]) for start, stop in drops_of(submit)]
        return answer.json()["context_management"]["applied_edits"], texts

    assert send("all") == ([], [])
    assert send({"type": "thinking_turns", "value": 3}) == ([], [])
    [applied], texts = send({"type": "thinking_turns", "value": 2})
    assert (applied["cleared_thinking_turns"], texts) == (1, ["Deep thought 0."])
    [applied], texts = send(None)
    assert (applied["cleared_thinking_turns"], texts) == (2, ["Deep thought 0.", "Deep thought 1."])
    assert applied["cleared_input_tokens"] == sum(
        stop - start for start, stop in drops_of(fake.behaviour.submits[-1])
    )
