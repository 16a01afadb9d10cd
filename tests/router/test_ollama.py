"""Ollama's API: its exact field names, lines, calls, thoughts, options, embeddings and errors."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
import numpy as np
import pytest
from router.api_calls import BROKEN_CALL, CITY, TWO_CALLS, last_prompt, say
from router.fake_controller import FakeController, prompt_of
from router.harness import ANSWER, RunningRouter

from trunkline.controller.reports import TopLogprobs
from trunkline.router.text.tokenizer import Tokenizer

HI: Final = [{"role": "user", "content": "Hi"}]
WEATHER: Final = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a place.", "parameters": CITY},
}
CALLED: Final = [
    {"function": {"name": "get_weather", "arguments": {"city": "Köln"}}},
    {"function": {"name": "get_weather", "arguments": {"city": "Bonn"}}},
]
COUNTS: Final = {
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration",
}  # fmt: skip
HEAD: Final = {"model", "created_at", "done"}


def whole(http: httpx.Client, path: str = "/api/chat", **body: Any) -> dict[str, Any]:
    given = {"model": "demo", **({"messages": HI} if path == "/api/chat" else {}), "stream": False, **body}
    response = http.post(path, json=given)
    assert response.status_code == 200, response.text
    return dict(response.json())


def lines(http: httpx.Client, path: str = "/api/chat", **body: Any) -> list[dict[str, Any]]:
    given = {"model": "demo", **({"messages": HI} if path == "/api/chat" else {}), **body}
    response = http.post(path, json=given)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert response.text.endswith("\n")
    return [json.loads(each) for each in response.text.splitlines()]


def refused(http: httpx.Client, path: str, status: int, **body: Any) -> str:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return str(response.json()["error"])


def test_a_whole_chat(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    fake.behaviour.cached_tokens = 3
    turns = [{"role": "system", "content": "Be brief."}, *HI]
    answer = whole(http, messages=turns, keep_alive="5m")
    assert set(answer) >= HEAD | COUNTS | {"message", "done_reason"}
    assert answer["message"] == {"role": "assistant", "content": ANSWER}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("demo", True, "stop")
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(turns)
    assert answer["prompt_eval_count"] == len(prompt_of(fake.behaviour.submits[-1]))
    assert answer["eval_count"] == len(tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
    assert all(type(answer[name]) is int for name in COUNTS)
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"]
    assert "cache" in answer
    assert "warnings" not in answer


def test_a_streamed_chat(http: httpx.Client) -> None:
    """Streams are the default."""
    *parts, end = lines(http)
    assert parts
    assert all(set(part) == HEAD | {"message"} and part["done"] is False for part in parts)
    assert "".join(part["message"]["content"] for part in parts) == ANSWER
    assert end["message"] == {"role": "assistant", "content": ""}
    assert (end["done"], end["done_reason"]) == (True, "stop")
    assert set(end) >= COUNTS


def test_generate(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    answer = whole(http, "/api/generate", prompt="Hi", system="Be brief.", context=[])
    assert set(answer) >= HEAD | COUNTS | {"response", "done_reason"}
    assert (answer["response"], answer["done_reason"]) == (ANSWER, "stop")
    turns = [{"role": "system", "content": "Be brief."}, *HI]
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(turns)
    *parts, end = lines(http, "/api/generate", prompt="Hi", options={"num_predict": 2})
    assert (
        "".join(part["response"] for part in parts) == ANSWER[: len("".join(p["response"] for p in parts))] != ""
    )
    assert (end["response"], end["done_reason"], end["eval_count"]) == ("", "length", 2)


def test_raw_prompts_are_continued_without_the_template(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    answer = whole(http, "/api/generate", prompt="Once upon", raw=True)
    submit = fake.behaviour.submits[-1]
    assert prompt_of(submit) == tokenizer.encode("Once upon", add_special_tokens=True)
    assert submit.max_tokens > 1000
    assert answer["response"] == ANSWER
    whole(http, "/api/generate", prompt="Once upon", raw=True, options={"num_predict": 7})
    assert fake.behaviour.submits[-1].max_tokens == 7
    assert "raw" in refused(http, "/api/generate", 400, prompt="x", raw=True, system="y")


def test_options(http: httpx.Client, fake: FakeController) -> None:
    """Each has its effect; what only says how a model is loaded is accepted."""
    options = {
        "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.25,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": 19, "stop": ["wörld"], "num_ctx": 2048,
        "num_thread": 4, "mirostat": 0, "typical_p": 1.0, "tfs_z": None,
    }  # fmt: skip
    answer = whole(http, options=options)
    submit = fake.behaviour.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 4, 0.9, 0.1)
    assert (sampling.seed, sampling.repetition_penalty, submit.max_tokens) == (7, 1.25, 19)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert answer["message"]["content"] == ANSWER.partition("wörld")[0]
    assert "warnings" not in answer
    for unlimited in (-1, -2, 0, 10**9):
        whole(http, options={"num_predict": unlimited, "seed": -1})
        assert fake.behaviour.submits[-1].max_tokens > 1000
    odd = whole(http, options={"novel": 1, "repeat_last_n": 64, "penalize_newline": False})["warnings"]
    assert [text.split("`")[1] for text in odd] == ["novel", "repeat_last_n", "penalize_newline"]


def test_what_is_refused_is_named(http: httpx.Client, fake: FakeController) -> None:
    chat = {"model": "demo", "messages": HI}
    for options, name in (
        ({"temperature": 9}, "temperature"),
        ({"repeat_penalty": 9}, "repeat_penalty"),
        ({"num_predict": "9"}, "num_predict"),
        ({"mirostat": 1}, "mirostat"),
    ):
        assert name in refused(http, "/api/chat", 400, **chat, options=options)
    assert "num_predict" in refused(http, "/api/chat", 400, **chat, num_predict=3, options={"num_predict": 4})
    assert "options" in refused(http, "/api/chat", 400, **chat, options=[1])
    assert "images" in refused(http, "/api/chat", 400, messages=[{**HI[0], "images": ["aGk="]}])
    assert "images" in refused(http, "/api/generate", 400, prompt="x", images=["aGk="])
    assert "suffix" in refused(http, "/api/generate", 400, prompt="x", suffix="y")
    assert "context" in refused(http, "/api/generate", 400, prompt="x", context=[1])
    assert "template" in refused(http, "/api/generate", 400, prompt="x", template="{{ .Prompt }}")
    assert "messages[0].role" in refused(http, "/api/chat", 400, messages=[{"role": "robot", "content": ""}])
    assert "format" in refused(http, "/api/chat", 400, **chat, format="yaml")
    assert "'none:7b'" in refused(http, "/api/chat", 404, model="none:7b", messages=HI)
    assert "/api/pull" in refused(http, "/api/pull", 404, model="demo")
    assert not fake.behaviour.submits


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_formats_become_grammars(http: httpx.Client, fake: FakeController, form: Any) -> None:
    answers = [whole(http, format=form), whole(http, "/api/generate", prompt="Hi", format=form)]
    assert all("warnings" not in answer for answer in answers)
    first, second = (submit.grammar for submit in fake.behaviour.submits[-2:])
    assert first is not None
    assert second is not None
    assert first.text == second.text
    assert whole(http, format="")["done"]
    assert fake.behaviour.submits[-1].grammar is None


def test_tools_there_and_back(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    """Ollama's calls and results need no ids."""
    say(fake, tokenizer, TWO_CALLS)
    message = whole(http, tools=[WEATHER])["message"]
    assert message["content"] == "Let me see.\n"
    calls = message["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Köln"}, {"city": "Bonn"}]
    assert [(call["function"]["name"], call["function"]["index"]) for call in calls] == [
        ("get_weather", 0),
        ("get_weather", 1),
    ]
    streamed = [call for part in lines(http, tools=[WEATHER]) for call in part["message"].get("tool_calls", [])]
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]
    results = [{"role": "tool", "tool_name": "get_weather", "content": text} for text in ("rain", "sun")]
    said = {"role": "assistant", "content": "Let me see.\n", "tool_calls": CALLED}
    whole(http, messages=[*HI, said, *results], tools=[WEATHER])
    prompt = last_prompt(fake, tokenizer)
    expected: list[dict[str, Any]] = [
        *HI,
        {
            "role": "assistant",
            "content": "Let me see.\n",
            "tool_calls": [
                {"id": f"c{at}", "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}
                for at, city in enumerate(("Köln", "Bonn"))
            ],
        },
        *({"role": "tool", "tool_call_id": f"c{at}", "content": text} for at, text in enumerate(("rain", "sun"))),
    ]
    assert prompt == tokenizer.render_chat(expected, tools=[WEATHER])


def test_a_call_that_was_cut_off_is_not_passed_on(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    """Clients carry out what they get."""
    say(fake, tokenizer, BROKEN_CALL)
    answer = whole(http, tools=[WEATHER])
    assert "tool_calls" not in answer["message"]
    assert all("tool_calls" not in part["message"] for part in lines(http, tools=[WEATHER]))
    assert len(answer["warnings"]) == 1
    assert "get_weather" in answer["warnings"][0]


def test_a_last_message_of_the_assistant_is_continued(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    whole(http, messages=[*HI, {"role": "assistant", "content": "I am the"}])
    assert last_prompt(fake, tokenizer).endswith("I am the")


def test_requests_without_a_prompt_look_the_model_up(http: httpx.Client, fake: FakeController) -> None:
    answer = whole(http, messages=[])
    assert set(answer) == HEAD | {"message", "done_reason"}
    assert answer["done_reason"] == "load"
    gone = http.post("/api/generate", json={"model": "demo", "keep_alive": 0}).json()
    assert (gone["response"], gone["done_reason"]) == ("", "unload")
    assert refused(http, "/api/generate", 404, model="none")
    assert not fake.behaviour.submits


def test_what_is_served(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """Clients add a tag to names that have none."""
    assert int(http.get("/api/version").json()["version"].split(".")[1]) >= 6
    [first, *_] = http.get("/api/tags").json()["models"]
    assert set(first) == {"name", "model", "size", "digest", "details", "modified_at"}
    assert first["name"] == first["model"] == "demo:latest"
    details = {"parent_model", "format", "family", "families", "parameter_size", "quantization_level"}
    assert set(first["details"]) == details
    [loaded, *_] = http.get("/api/ps").json()["models"]
    assert loaded["model"] == "demo:latest"
    assert loaded["context_length"] > 0
    assert whole(http, model="demo:latest")["model"] == "demo:latest"
    shown = http.post("/api/show", json={"model": "demo:latest"}).json()
    assert shown == http.post("/api/show", json={"name": "demo"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == loaded["context_length"]
    assert shown["template"] == tokenizer.files.chat_template
    for path in ("/api/version", "/api/tags", "/api/ps"):
        assert http.head(path).status_code == 200
    assert refused(http, "/api/show", 404, model="none")


def state(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the controller of these tests makes of a prompt."""
    return np.random.default_rng(tokens).normal(0, 3, 256).astype("<f4")


def test_embeddings(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    fake.behaviour.report_of = lambda submit: TopLogprobs(0.0, b"", b"", state(prompt_of(submit)).tobytes())
    texts = ["A tree.", "Ein Baum."]
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    answer = whole(http, "/api/embed", input=texts, options={"num_ctx": 99})
    assert set(answer) == {
        "model",
        "embeddings",
        "total_duration",
        "load_duration",
        "prompt_eval_count",
        "warnings",
    }
    assert answer["warnings"] == ["`stream` is not a known parameter and was ignored"]
    wanted = [state(tokens) / np.linalg.norm(state(tokens)) for tokens in ids]
    np.testing.assert_allclose(answer["embeddings"], wanted, atol=1e-6)
    assert answer["prompt_eval_count"] == sum(map(len, ids))
    one = http.post("/api/embeddings", json={"model": "demo", "prompt": texts[0]}).json()
    assert set(one) == {"embedding"}
    np.testing.assert_allclose(one["embedding"], wanted[0], atol=1e-6)
    short = http.post("/api/embed", json={"input": texts[0], "dimensions": 7}).json()["embeddings"]
    assert np.shape(short) == (1, 7)
    long = "tree " * 20_000
    assert http.post("/api/embed", json={"input": long}).status_code == 200
    cut = prompt_of(fake.behaviour.submits[-1])
    assert cut == tokenizer.encode(long, add_special_tokens=True)[: len(cut)]
    assert "context" in refused(http, "/api/embed", 400, input=long, truncate=False)
    assert "`input`" in refused(http, "/api/embed", 400, model="demo")
    assert "`prompt`" in refused(http, "/api/embeddings", 400, model="demo")


def test_prompts_that_do_not_fit_are_cut(http: httpx.Client, fake: FakeController) -> None:
    turns = [*HI * 3, {"role": "user", "content": "tree " * 20_000}, *HI]
    assert whole(http, messages=turns)["truncation"]
    assert whole(http, "/api/generate", prompt="tree " * 20_000, raw=True)["truncation"]
    before = len(fake.behaviour.submits)
    assert "context" in refused(http, "/api/chat", 400, messages=turns, truncate=False)
    assert len(fake.behaviour.submits) == before


def test_a_stream_that_fails_ends_with_an_error(
    router: RunningRouter, http: httpx.Client, fake: FakeController
) -> None:
    fake.behaviour.fail_after, fake.behaviour.fail_when = 3, router.has_begun
    *parts, last = lines(http)
    assert parts
    assert set(last) == {"error"}


def test_bodies_of_any_type_but_of_pages(http: httpx.Client) -> None:
    body = json.dumps({"model": "demo", "messages": HI, "stream": False})
    for kind in ("", "application/x-www-form-urlencoded", "text/plain"):
        given = {"Content-Type": kind}
        assert http.post("/api/chat", content=body, headers=given).status_code == 200, kind
        for page in (
            {"Origin": str(http.base_url)},
            {"Referer": "https://x.example/"},
            {"Sec-Fetch-Site": "none"},
        ):
            assert http.post("/api/chat", content=body, headers=given | page).status_code == 415, (kind, page)


def test_results_without_calls_before_them(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    turns = [*HI, {"role": "assistant", "content": ""}, {"role": "tool", "content": "17 degrees"}]
    whole(http, messages=turns)
    assert "<|user|><tool_response>\n17 degrees\n</tool_response><|end|>" in last_prompt(fake, tokenizer)
