"""What the suites of other servers (vLLM, SGLang) expect of log-probabilities, token ids, errors and small routes,
against a scripted engine. Cases whose answer differs on purpose are marked, as in
`test_conformance.py`."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from router import test_conformance, test_conformance_calls
from router.api_calls import last_prompt, named_events
from router.conformance import CASES, CHAT, PROMPT, TALK, TEXT, Case, Server, case, differs, text_of
from router.harness import ANSWER, MESSAGES, VOCAB_SIZE


@differs("log-probabilities of tokens that the client chooses are refused: the device reports the likeliest only")
def logprobs_of_chosen_tokens(server: Server) -> None:
    assert server.answer(CHAT, logprobs=True, top_logprobs=3, logprob_token_ids=[100, 1000, 5000])["choices"]


@case
def offsets_of_tokens_in_streams_with_text_held_back(server: Server) -> None:
    fields: dict[str, Any] = {"logprobs": 0, "stop": ["here!!"], "max_tokens": 100}
    whole = server.answer(TEXT, **fields)["choices"][0]["logprobs"]["text_offset"]
    parts = [part["choices"][0]["logprobs"] for part in server.parts(TEXT, **fields)]
    assert [offset for part in parts if part for offset in part["text_offset"]] == whole


@case
def stop_strings_that_stay(server: Server) -> None:
    for path in (CHAT, TEXT):
        [choice] = server.answer(path, stop="STOP", no_stop_trim=True, max_tokens=100)["choices"]
        assert text_of(choice).endswith("STOP")


@case
def penalties_and_other_sampling_parameters(server: Server) -> None:
    fields: dict[str, Any] = {"frequency_penalty": 1.0, "presence_penalty": -0.5, "repetition_penalty": 1.1}
    fields |= {"top_k": 40, "min_p": 0.05, "top_p": 0.9, "seed": 3, "bad_words": ["word"]}
    for path in (CHAT, TEXT):
        server.answer(path, **fields)
        sampling = server.fake.behaviour.submits[-1].sampling
        for name in fields:
            if name != "bad_words":
                assert getattr(sampling, name) == fields[name], name
        for no_limit in (-1, 0):
            server.answer(path, top_k=no_limit)
            assert server.fake.behaviour.submits[-1].sampling.top_k == 0


@case
def allowed_tokens(server: Server) -> None:
    for path in (CHAT, TEXT):
        assert server.answer(path, allowed_token_ids=[5, 6])["choices"]
        server.refused(path, allowed_token_ids=[])
        server.refused(path, allowed_token_ids=[VOCAB_SIZE])
        server.refused(path, "min_tokens", min_tokens=20, max_tokens=10)


@case
def null_in_place_of_every_parameter(server: Server) -> None:
    names = "temperature top_p top_k min_p seed stop stop_token_ids logit_bias max_tokens n stream logprobs user "
    names += "presence_penalty frequency_penalty response_format stream_options ignore_eos min_tokens metadata"
    for path in (CHAT, TEXT):
        assert server.answer(path, **dict.fromkeys(names.split()))["choices"]


@case
def unknown_parameters_are_let_through(server: Server) -> None:
    for path in (CHAT, TEXT):
        assert server.answer(path, unheard_of=5)["choices"]


@case
def prompt_logprobs_do_not_go_with_streams(server: Server) -> None:
    for path in (CHAT, TEXT):
        server.refused(path, "prompt_logprobs", prompt_logprobs=1, stream=True)


# -- messages


@case
def system_messages_of_parts(server: Server) -> None:
    prompts = set()
    for content in ("Be helpful.", [{"type": "text", "text": "Be helpful."}]):
        server.answer(CHAT, messages=[{"role": "system", "content": content}, *MESSAGES])
        prompts.add(last_prompt(server.fake, server.tokenizer))
    assert len(prompts) == 1


@case
def messages_that_are_none(server: Server) -> None:
    wrong: list[Any] = [[], None, [{}], [{"role": "user"}], ["Hello"], "Hello", [{"content": "Hello"}]]
    for messages in wrong:
        answer = server.http.post(CHAT, json={"messages": messages})
        assert answer.status_code == 400, messages


@case
def a_conversation_that_ends_with_a_prefix(server: Server) -> None:
    server.say(' "name": "Mini"}')
    begun = [*TALK, {"role": "assistant", "content": "{"}]
    [choice] = server.answer(CHAT, messages=begun, continue_final_message=True)["choices"]
    assert choice["message"]["content"].strip().startswith('"name"')
    assert last_prompt(server.fake, server.tokenizer).endswith("{")


# -- token ids


@case
def token_ids_of_texts_with_emoji(server: Server) -> None:
    [choice] = server.answer(TEXT, prompt="I love coding 🚀", return_token_ids=True, max_tokens=100)["choices"]
    decode = server.tokenizer.decode
    assert "I love coding 🚀" in decode(choice["prompt_token_ids"])
    assert decode(choice["token_ids"]).startswith(choice["text"])
    assert choice["text"] == ANSWER
    [without] = server.answer(TEXT, max_tokens=5, return_token_ids=False)["choices"]
    assert without.get("token_ids") is None
    assert without.get("prompt_token_ids") is None


@case
def token_ids_and_log_probabilities_agree(server: Server) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
    [choice] = server.answer(TEXT, **fields, echo=True, prompt_logprobs=1, max_tokens=8)["choices"]
    told = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    assert told == choice["prompt_token_ids"] + choice["token_ids"]
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    parts = [part["choices"][0] for part in server.parts(TEXT, **fields, max_tokens=8)]
    assert parts[0]["prompt_token_ids"]
    names = [name for part in parts if part["logprobs"] for name in part["logprobs"]["tokens"]]
    ids = [token for part in parts for token in part.get("token_ids", [])]
    assert names == [f"token_id:{token}" for token in ids]


@case
def token_ids_of_prompts_come_once_in_streams(server: Server) -> None:
    first, *others = server.parts(CHAT, return_token_ids=True, max_completion_tokens=5)
    assert "Be helpful." in server.tokenizer.decode(first["prompt_token_ids"])
    assert not any("prompt_token_ids" in part for part in others)


@differs("a conversation is given as messages; token ids are for /v1/completions")
def token_ids_in_place_of_messages(server: Server) -> None:
    tokens = server.http.post("/tokenize", json={"messages": TALK}).json()["tokens"]
    made = server.answer(CHAT, messages=[], prompt_token_ids=tokens, return_token_ids=True)
    assert made["prompt_token_ids"] == tokens


@case
def token_ids_of_a_conversation_continue_it(server: Server) -> None:
    tokens = server.http.post("/tokenize", json={"messages": TALK}).json()["tokens"]
    made = server.answer(TEXT, prompt=tokens, return_token_ids=True)
    assert made["choices"][0]["prompt_token_ids"] == tokens
    assert server.answer(CHAT, return_token_ids=True)["prompt_token_ids"] == tokens


@case
def tokens_of_conversations(server: Server) -> None:
    """As the template writes them, with every combination of its switches."""
    tokenizer = server.tokenizer
    for begins, continues, special, tools in itertools.product(
        (False, True), (False, True), (False, True), (0, 1)
    ):
        if begins and continues:
            continue
        said = [*TALK, {"role": "assistant", "content": "Sure,"}] if continues else TALK
        made = server.http.post(
            "/tokenize",
            json={
                "messages": said,
                "add_generation_prompt": begins,
                "continue_final_message": continues,
                "add_special_tokens": special,
                "tools": [test_conformance_calls.WEATHER] * tools,
            },
        )
        assert made.status_code == 200, made.text
        tokens = made.json()["tokens"]
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert text.endswith("Sure,") == continues
        assert text.rstrip().endswith("<|assistant|>") == begins
        assert ("get_weather" in text) == bool(tools)
        body = {
            "add_generation_prompt": begins,
            "continue_final_message": continues,
            "add_special_tokens": special,
        }
        chat = server.answer(
            CHAT,
            messages=said,
            tools=[test_conformance_calls.WEATHER] * tools or None,
            return_token_ids=True,
            **body,
        )
        assert chat["prompt_token_ids"] == tokens


@case
def strings_of_tokens(server: Server) -> None:
    made = server.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert made["token_strs"] == [server.tokenizer.token_string(token) for token in made["tokens"]]
    plain = server.http.post("/tokenize", json={"prompt": PROMPT}).json()
    assert (plain["tokens"], plain["token_strs"]) == (made["tokens"], None)
    back = server.http.post("/detokenize", json={"tokens": made["tokens"]}).json()
    assert list(back) == ["prompt"]
    assert back["prompt"].endswith(PROMPT)


@case
def the_tokenizers_configuration(server: Server) -> None:
    told = server.http.get("/tokenizer_info").json()
    assert told["tokenizer_class"]
    assert isinstance(told["tokenizer_class"], str)
    assert told["model_max_length"] >= server.http.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"]
    assert told["chat_template"].strip()
    assert all(isinstance(told[name], str) for name in ("bos_token", "eos_token") if told.get(name) is not None)


# -- errors


@case
def engines_that_fail(server: Server) -> None:
    for path in (CHAT, TEXT):
        server.fake.behaviour.fail_after = 0
        body = {"prompt": PROMPT} if path == TEXT else {"messages": TALK}
        answer = server.http.post(path, json=body)
        assert answer.status_code >= 500
        assert answer.json()["error"]["message"]
        *_, last = failed_stream(server, path)
        assert json.loads(last.removeprefix("data: "))["error"]["message"]


def failed_stream(server: Server, path: str) -> list[str]:
    """The events of a stream whose engine fails behind two tokens."""
    server.fake.behaviour.fail_after = 2
    body = {"prompt": PROMPT, "messages": TALK, "stream": True, "max_tokens": 10}
    if path == CHAT:
        del body["prompt"]
    else:
        del body["messages"]
    return [line for line in server.http.post(path, json=body).text.split("\n\n") if line]


@differs("a stream that fails ends with the error, so that `[DONE]` always means a whole answer")
def the_end_of_streams_that_fail(server: Server) -> None:
    assert failed_stream(server, CHAT)[-1] == "data: [DONE]"


@case
def errors_of_token_ids_name_them(server: Server) -> None:
    body = {"messages": TALK, "stop_token_ids": [VOCAB_SIZE + 1]}
    error = server.http.post(CHAT, json=body).json()["error"]
    assert str(VOCAB_SIZE + 1) in error["message"]
    assert re.search(rf"{VOCAB_SIZE}|{VOCAB_SIZE - 1}", error["message"])


@case
def errors_of_lengths(server: Server) -> None:
    long: list[Any] = [{"role": "user", "content": "hello " * 3000}]
    for messages, count in ((TALK, 5000), (long, 5)):
        with pytest.raises(openai.BadRequestError, match="context"):
            server.client.chat.completions.create(model="demo", messages=messages, max_tokens=count)


@case
def other_kinds_of_content(server: Server) -> None:
    for path in (CHAT, TEXT):
        kind = {"content-type": "application/x-www-form-urlencoded"}
        assert 400 <= server.http.post(path, content=b"prompt=x", headers=kind).status_code < 500


@case
def errors_of_responses(server: Server) -> None:
    answer = server.http.post("/v1/responses", json={"input": "Hi", "previous_response_id": "bad"})
    assert answer.status_code in (400, 404)
    assert {"message", "type", "code"} <= answer.json()["error"].keys()


# -- others


@case
def events_of_responses(server: Server) -> None:
    server.say("Hello there.")
    events = named_events(server.http.post("/v1/responses", json={"input": "Hi", "stream": True, "user": "me"}))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(texts) == "Hello there."
    assert kinds[-1] == "response.completed"
    assert {"input_tokens", "output_tokens", "total_tokens"} <= events[-1]["response"]["usage"].keys()
    whole = server.http.post("/v1/responses", json={"input": "Hi", "frequency_penalty": 1.0}).json()
    assert (whole["object"], whole["status"], whole["error"]) == ("response", "completed", None)
    assert whole["created_at"]


@case
def tokens_that_were_cached(server: Server) -> None:
    server.fake.behaviour.cached_tokens = 4
    for path in (CHAT, TEXT):
        assert server.answer(path)["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        *_, last = server.parts(path, stream_options={"include_usage": True})
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


@case
def usage_of_several_choices_in_a_stream(server: Server) -> None:
    for path in (CHAT, TEXT):
        *_, last = server.parts(path, n=2, max_tokens=5, stream_options={"include_usage": True})
        assert last["usage"]["completion_tokens"] == 10


@case
def cards_of_models(server: Server) -> None:
    [card, *_] = server.client.models.list().data
    assert isinstance((card.model_extra or {})["max_model_len"], int)
    found = server.client.models.retrieve("demo")
    assert (found.id, (found.model_extra or {})["root"]) == ("demo", "demo")
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("non-existent-model")


@case
def small_routes(server: Server) -> None:
    for path in ("/health", "/ping", "/version", "/load", "/metrics"):
        assert server.http.get(path).status_code == 200, path
    assert isinstance(server.http.get("/version").json()["version"], str)
    assert server.http.get("/load").json()["server_load"] == 0


@case
def a_request_that_is_given_up(server: Server) -> None:
    server.fake.behaviour.hold = True
    with pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=0.1).chat.completions.create(model="demo", messages=TALK)
    server.fake.behaviour.hold = False
    assert server.answer(CHAT, max_tokens=5)["choices"]


@case
def models_and_unknown_models(server: Server) -> None:
    assert "demo" in [model.id for model in server.client.models.list()]
    for path in (CHAT, TEXT):
        body = {"model": "none", "prompt": PROMPT} if path == TEXT else {"model": "none", "messages": TALK}
        answer = server.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("check", CASES[__name__])
def test_as_other_servers_answer(server: Server, check: Case) -> None:
    check(server)


def test_the_documentation_counts_the_cases() -> None:
    modules = (test_conformance.__name__, test_conformance_calls.__name__, __name__)
    every = [each for name in modules for each in CASES[name]]
    otherwise = [each for each in every if each.marks]
    page = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")
    section = page.split("### As other servers\n")[1].split("\n## ")[0]
    assert f"{len(every)} cases, of which {len(otherwise)} are answered" in section
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(otherwise)
    assert len(otherwise) <= len(every) // 20
