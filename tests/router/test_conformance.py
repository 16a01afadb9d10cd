"""What the suites of other servers (vLLM, SGLang) expect of completions and chats, against a scripted engine.
Cases whose answer differs on purpose are marked here and listed in docs/api.md.

What depends on a real engine (an answer that keeps to a grammar, a repeated seed, beams) is tried in the tests of
clusters; images, audio, adapters and prompts of embeddings do not apply.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest
from router.api_calls import last_prompt
from router.conformance import (
    CASES,
    CHAT,
    PROMPT,
    TALK,
    TEXT,
    Case,
    Server,
    case,
    check_matrix,
    check_usage_options,
)
from router.harness import ANSWER, EOS, MESSAGES, VOCAB_SIZE

from trunkline.router.text.chat_template import ChatRenderer
from trunkline.router.text.tool_styles import ToolStyle

IDS: Final[list[int]] = [5, 5, 5, 5, 5]
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL: Final = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


# -- completions


@case
def single_completion_of_text_and_of_ids(server: Server) -> None:
    for prompt, count in ((PROMPT, len(server.tokenizer.encode(PROMPT, add_special_tokens=True))), (IDS, 5)):
        made = server.client.completions.create(model="demo", prompt=prompt, max_tokens=5, temperature=0)
        [choice] = made.choices
        assert choice.text
        assert choice.finish_reason == "length"
        assert made.usage is not None
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (count, 5)
        assert made.usage.total_tokens == count + 5
        extra = choice.model_extra or {}
        assert (extra["prompt_logprobs"], extra["stop_reason"]) == (None, None)


@case
def prompts_are_cut_at_the_side_that_is_asked_for(server: Server) -> None:
    for side, kept in (("right", [10, 11]), ("left", [16, 17])):
        fields = {"truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
        [choice] = server.answer(TEXT, prompt=list(range(10, 18)), **fields)["choices"]
        assert choice["prompt_token_ids"] == kept


@case
def completion_logprobs_none_zero_and_some(server: Server) -> None:
    for count, lengths in ((None, ()), (0, (1,)), (5, (5, 6))):
        made = server.client.completions.create(model="demo", prompt=IDS, max_tokens=5, logprobs=count)
        found = made.choices[0].logprobs
        if count is None:
            assert found is None
            continue
        assert found is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert len(found.top_logprobs[0]) in lengths


@case
def too_many_completion_logprobs(server: Server) -> None:
    server.refused(TEXT, logprobs=21)
    server.refused(TEXT, logprobs=30, stream=True)
    server.refused(TEXT, logprobs=-1)
    assert server.answer(TEXT)["choices"]


@case
def prompt_logprobs_of_several_prompts(server: Server) -> None:
    for count in (0, 1):
        for choice in server.answer(TEXT, prompt=[PROMPT, "My"], prompt_logprobs=count)["choices"]:
            assert len(choice["prompt_logprobs"]) > 0
    server.refused(TEXT, prompt_logprobs=-1)
    assert server.answer(TEXT, prompt_logprobs=None)["choices"][0]["prompt_logprobs"] is None


@case
def completion_stream_is_the_whole_answer(server: Server) -> None:
    [whole] = server.answer(TEXT, max_tokens=5)["choices"]
    choices = [part["choices"][0] for part in server.parts(TEXT, max_tokens=5)]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"
    assert choices[-1]["text"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]


@case
def parallel_samples(server: Server) -> None:
    texts = ["one", "two two", "three three three"]
    server.say(*texts)
    choices = server.answer(TEXT, n=3, max_tokens=50, logprobs=0, temperature=1, seed=42)["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate(texts))
    assert len({len(choice["logprobs"]["tokens"]) for choice in choices}) > 1
    found = ["", "", ""]
    for [choice] in [part["choices"] for part in server.parts(TEXT, n=3, max_tokens=50)]:
        found[choice["index"]] += choice["text"]
    assert found == texts


@case
def completion_stream_options(server: Server) -> None:
    check_usage_options(server, TEXT)


@case
def batches_of_prompts(server: Server) -> None:
    for prompts in ([PROMPT] * 2, [IDS] * 2):
        choices = server.answer(TEXT, prompt=prompts, max_tokens=5)["choices"]
        assert len(choices) == 2
        assert choices[0]["text"] == choices[1]["text"]
        texts = ["", ""]
        for part in server.parts(TEXT, prompt=prompts, max_tokens=5):
            [choice] = part["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts[0] == texts[1] == choices[0]["text"]


@case
def echo_with_logprobs(server: Server) -> None:
    for (prompt, text), count in itertools.product(
        ((PROMPT, PROMPT), (IDS, server.tokenizer.decode(IDS))), (1, 0)
    ):
        [choice] = server.answer(TEXT, prompt=prompt, max_tokens=5, echo=True, logprobs=count)["choices"]
        assert choice["text"].startswith(text)
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert all(max(count, 1) <= len(top) <= count + 1 for top in logprobs["top_logprobs"][1:])
        assert len({len(logprobs[name]) for name in logprobs}) == 1


@case
def completion_matrix(server: Server) -> None:
    check_matrix(server, stream=False)


@case
def completion_matrix_streamed(server: Server) -> None:
    check_matrix(server, stream=True)


@case
def empty_prompts_and_ids_outside_the_vocabulary(server: Server) -> None:
    wrong: list[Any] = [None, "", [], [[]], [VOCAB_SIZE], [999_999], [-1]]
    for prompt in wrong:
        server.refused(TEXT, "prompt", prompt=prompt)


@case
def prompt_embeds_without_a_prompt(server: Server) -> None:
    server.refused(TEXT, "prompt", prompt=None, prompt_embeds=[])
    server.refused(TEXT, "prompt_embeds", prompt_embeds="AAAA")


@case
def zero_tokens_need_echo(server: Server) -> None:
    server.refused(TEXT, max_tokens=0)
    made = server.answer(TEXT, max_tokens=0, echo=True)
    assert (made["choices"][0]["text"], made["usage"]["completion_tokens"]) == (PROMPT, 0)


@case
def best_of(server: Server) -> None:
    assert len(server.answer(TEXT, n=1, best_of=3)["choices"]) == 1
    server.refused(TEXT, "best_of", n=3, best_of=2)
    server.refused(TEXT, "best_of", best_of=2, stream=True)


@case
def a_suffix_needs_a_model_for_it(server: Server) -> None:
    server.refused(TEXT, suffix="x")
    assert server.answer(TEXT, suffix=None)["choices"]


# -- chat


@case
def chat_logprobs_none_zero_and_some(server: Server) -> None:
    assert server.answer(CHAT, logprobs=False)["choices"][0]["logprobs"] is None
    for count in (0, 5):
        content = server.answer(CHAT, logprobs=True, top_logprobs=count)["choices"][0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in content} == {count}


@case
def too_many_chat_logprobs(server: Server) -> None:
    server.refused(CHAT, "top_logprobs", logprobs=True, top_logprobs=21, stream=True)
    server.refused(CHAT, "top_logprobs", logprobs=True, top_logprobs=30)
    server.refused(CHAT, "top_logprobs", top_logprobs=3)
    assert server.answer(CHAT)["choices"][0]["message"]["content"]


@case
def prompt_logprobs_of_chats(server: Server) -> None:
    for count in (0, 1, 2):
        listed = server.answer(CHAT, prompt_logprobs=count)["prompt_logprobs"]
        assert count <= len(listed[3]) <= count + 1
    server.refused(CHAT, prompt_logprobs=-1)
    assert server.answer(CHAT)["prompt_logprobs"] is None


@case
def a_chat_of_several_turns(server: Server) -> None:
    made = server.client.chat.completions.create(model="demo", messages=TALK, max_completion_tokens=5)
    message = made.choices[0].message
    assert (message.role, made.choices[0].finish_reason) == ("assistant", "length")
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + 5
    again = [*TALK, message.model_dump(), {"role": "user", "content": "As JSON."}]
    assert server.client.chat.completions.create(model="demo", messages=again).choices[0].message.content


@case
def chat_stream_is_the_whole_answer(server: Server) -> None:
    [whole] = server.answer(CHAT, max_completion_tokens=10)["choices"]
    choices = [part["choices"][0] for part in server.parts(CHAT, max_completion_tokens=10)]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]


@case
def the_last_event_of_a_chat_has_text(server: Server) -> None:
    last = server.parts(CHAT, max_completion_tokens=5)[-1]["choices"][0]
    assert last["delta"]["content"]
    assert last["finish_reason"] == "length"


@case
def chat_stream_options(server: Server) -> None:
    check_usage_options(server, CHAT)


@case
def chat_samples(server: Server) -> None:
    texts = ["one", "two", "three"]
    server.say(*texts)
    choices = server.answer(CHAT, n=3, seed=42)["choices"]
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == list(enumerate(texts))
    parts = [choice for part in server.parts(CHAT, n=3) for choice in part["choices"]]
    for index, text in enumerate(texts):
        mine = [choice for choice in parts if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert ["role" in choice["delta"] for choice in mine].count(True) == 1
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    server.refused(CHAT, n=0)


@case
def echo_of_a_continued_message(server: Server) -> None:
    saying = "An apple a day, keeps"
    body = {"messages": [*TALK, {"role": "assistant", "content": saying}], "continue_final_message": True}
    for echo in (True, False):
        [choice] = server.answer(CHAT, **body, add_generation_prompt=False, echo=echo)["choices"]
        assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
        assert (saying in choice["message"]["content"]) == echo
        assert last_prompt(server.fake, server.tokenizer).endswith(saying)
    server.refused(CHAT, "continue_final_message", **body, add_generation_prompt=True)


@case
def a_continued_message_may_be_followed_by_a_call(server: Server) -> None:
    server.say(f"then:\n{CALL}")
    begun = [*TALK, {"role": "assistant", "content": "So, "}]
    [choice] = server.answer(CHAT, messages=begun, continue_final_message=True, tools=[TOOL])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


@case
def a_continued_message_in_a_session_is_one_message(server: Server) -> None:
    session = server.http.post("/v1/sessions", json={}).json()["id"]
    begun = [*TALK, {"role": "assistant", "content": "So, "}]
    server.answer(CHAT, messages=begun, continue_final_message=True, session_id=session)
    assert last_prompt(server.fake, server.tokenizer).endswith("So, ")
    stored = server.http.get(f"/v1/sessions/{session}?include=messages").json()["messages"]
    assert [message["content"] for message in stored[-2:]] == [TALK[-1]["content"], "So, " + ANSWER]


@case
def extra_fields_and_parts_of_messages(server: Server) -> None:
    prompts = set()
    for message in ({"content": "What?", "extra_field": "0"}, {"content": [{"type": "text", "text": "What?"}]}):
        assert server.answer(CHAT, messages=[{"role": "user", **message}])["choices"]
        prompts.add(last_prompt(server.fake, server.tokenizer))
    assert len(prompts) == 1


@case
def a_custom_role_is_the_templates_affair(server: Server) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    server.patch.setattr(server.service.tokenizer, "_chat", ChatRenderer(template, {}, ToolStyle()))
    for content in ("What?", [{"type": "text", "text": "What?"}]):
        assert server.answer(CHAT, messages=[{"role": "my-custom-role", "content": content}])["choices"]
        assert last_prompt(server.fake, server.tokenizer) == "<my-custom-role>What?"


@case
def seeds_beyond_64_bits(server: Server) -> None:
    for path, seed in itertools.product((CHAT, TEXT), (-(2**63) - 1, 2**63)):
        server.refused(path, seed=seed)
        assert server.answer(path, seed=2**63 - 1)["choices"]


@case
def null_in_place_of_tools(server: Server) -> None:
    assert server.answer(CHAT, tools=None, tool_choice=None)["choices"]
    assert server.answer(CHAT, tools=[], parallel_tool_calls=None)["choices"]


@case
def tool_choices(server: Server) -> None:
    server.say(CALL)
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("auto", "required", named):
        [made] = server.answer(CHAT, tools=[TOOL], tool_choice=choice)["choices"]
        [call] = made["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert call["function"]["arguments"].replace(" ", "") == '{"a":1}'
        assert made["finish_reason"] == "tool_calls"
    [made] = server.answer(CHAT, tools=[TOOL], tool_choice="none")["choices"]
    assert (made["finish_reason"], "tool_calls" in made["message"]) == ("stop", False)
    server.refused(CHAT, "tool_choice", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "x"}})
    server.refused(CHAT, "tool_choice", tool_choice="required")


@case
def a_call_in_a_stream(server: Server) -> None:
    server.say(CALL)
    choices = [choice for part in server.parts(CHAT, tools=[TOOL]) for choice in part["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["add"]
    assert calls[0]["id"]
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert arguments.replace(" ", "") == '{"a":1}'


# -- both


@case
def logit_bias(server: Server) -> None:
    for path in (CHAT, TEXT):
        assert server.answer(path, logit_bias={"5": -100, "6": 100.0})["choices"]
        for bad in ({str(VOCAB_SIZE): 1}, {"-1": 1}, {"word": 1}, {"5": 101}):
            server.refused(path, logit_bias=bad)


@case
def stop_strings(server: Server) -> None:
    for path in (CHAT, TEXT):
        for stop, included in itertools.product(("STOP", ["never", "STOP"]), (True, False)):
            fields = {"max_tokens": 100, "stop": stop, "include_stop_str_in_output": included}
            [choice] = server.answer(path, **fields)["choices"]
            text = choice["text"] if path == TEXT else choice["message"]["content"]
            assert text == ANSWER.split("STOP")[0] + ("STOP" if included else "")
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
        server.refused(path, stop="")


@case
def stop_token_ids(server: Server) -> None:
    token = server.tokenizer.encode(ANSWER, add_special_tokens=False)[3]
    for path in (CHAT, TEXT):
        [choice] = server.answer(path, stop_token_ids=[token], max_tokens=100)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
        server.refused(path, stop_token_ids=[VOCAB_SIZE])
        server.refused(path, "stop_token_ids[0]", stop_token_ids=[-1])


@case
def matched_stop(server: Server) -> None:
    token = server.tokenizer.encode(ANSWER, add_special_tokens=False)[3]
    wanted: list[tuple[dict[str, Any], Any]] = [({}, EOS), ({"stop": "STOP"}, "STOP"), ({"max_tokens": 5}, None)]
    wanted += [({"stop_regex": "Q|ST.P"}, "Q|ST.P"), ({"stop_token_ids": [token]}, token)]
    for path, (fields, told) in itertools.product((CHAT, TEXT), wanted):
        [choice] = server.answer(path, **{"max_tokens": 100, **fields})["choices"]
        assert choice["matched_stop"] == told
        assert choice["finish_reason"] == ("length" if told is None else "stop")
        last = server.parts(path, **{"max_tokens": 100, **fields})[-1]["choices"][0]
        assert last["matched_stop"] == told


@case
def stop_regex(server: Server) -> None:
    for path, expression in itertools.product((CHAT, TEXT), ("and|he?re", r"[.!?]\s*$")):
        [choice] = server.answer(path, stop_regex=expression, max_tokens=100)["choices"]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert text == ANSWER.split("here" if "r" in expression else "!")[0]
        assert choice["finish_reason"] == "stop"
        assert (
            "".join(
                part["choices"][0].get("text") or part["choices"][0].get("delta", {}).get("content", "")
                for part in server.parts(path, stop_regex=expression, max_tokens=100)
            )
            == text
        )


@case
def end_tokens_may_be_ignored(server: Server) -> None:
    for path in (CHAT, TEXT):
        for ignored in (True, False):
            server.answer(path, ignore_eos=ignored, max_tokens=20)
            assert (EOS in server.fake.behaviour.submits[-1].stop_token_ids) != ignored


@case
def values_out_of_range(server: Server) -> None:
    wrong: dict[str, Any] = {"temperature": -1, "top_p": 0, "top_k": -2, "n": -1, "presence_penalty": 3}
    wrong |= {
        "frequency_penalty": -3,
        "max_tokens": 100_000,
        "min_p": 2,
        "repetition_penalty": 0,
        "min_tokens": -1,
    }
    for path, (name, value) in itertools.product((CHAT, TEXT), wrong.items()):
        server.refused(path, **{name: value})


@case
def bodies_that_are_no_objects(server: Server) -> None:
    for path, body in itertools.product((CHAT, TEXT), (b"[]", b'"x"', b"5", b"null", b"{", b"")):
        assert server.http.post(path, content=body).status_code == 400


@case
def prompts_longer_than_the_context(server: Server) -> None:
    server.refused(TEXT, prompt=[5] * 3000)
    server.refused(CHAT, messages=[{"role": "user", "content": "word " * 5000}])


@case
def token_ids_of_prompts_and_answers(server: Server) -> None:
    for path in (CHAT, TEXT):
        whole = server.answer(path, return_token_ids=True, max_tokens=6)
        [choice] = whole["choices"]
        prompt = whole["prompt_token_ids"] if path == CHAT else choice["prompt_token_ids"]
        assert len(prompt) == whole["usage"]["prompt_tokens"]
        assert len(choice["token_ids"]) == 6
        parts = server.parts(path, return_token_ids=True, max_tokens=6)
        ids = [token for part in parts for each in part["choices"] for token in each.get("token_ids", [])]
        assert ids == choice["token_ids"]


@case
def tokens_named_by_their_ids(server: Server) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 5}
    [choice] = server.answer(TEXT, **fields, logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


@case
def tokens_and_back(server: Server) -> None:
    for special in (False, True):
        made = server.http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": special}).json()
        assert made["tokens"] == server.tokenizer.encode(PROMPT, add_special_tokens=special)
        assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 2048)
        if not special:
            assert server.http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == PROMPT
    rendered = server.http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert rendered["count"] == server.answer(CHAT, messages=MESSAGES)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("check", CASES[__name__])
def test_as_other_servers_answer(server: Server, check: Case) -> None:
    check(server)
