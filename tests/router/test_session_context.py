"""What the requests of a stored session see of its history: discards, cuts, another model's tokens."""

from __future__ import annotations

import httpx
from msgspec.structs import replace
from router.fake_controller import FakeController, drops_of, prompt_of
from router.harness import ANSWER, RunningRouter
from router.session_calls import chat, create, error_of, get, reading_of

from trunkline.kvstore.records import Change
from trunkline.router.stores.session_changes import change_between, read_segments, segments_of
from trunkline.router.stores.session_history import History
from trunkline.router.text.tokenizer import Tokenizer


def test_prefetch(http: httpx.Client, fake: FakeController) -> None:
    session = create(http)["id"]
    path = f"/v1/sessions/{session}/prefetch"
    assert http.post(path).json()["tokens"] == 0
    assert not fake.behaviour.prefetches
    assert chat(http, session).status_code == 200
    told = http.post(path).json()
    [asked] = fake.behaviour.prefetches
    tokens = get(http, session)["tokens"]
    counts = {"tokens": tokens, "known_tokens": tokens, "coming_tokens": tokens // 2}
    assert told == {"id": session, "object": "session.prefetch", **counts}
    assert prompt_of(asked)[: len(prompt_of(fake.behaviour.submits[0]))] == prompt_of(fake.behaviour.submits[0])
    assert drops_of(asked) == []


def test_discard_tokens(http: httpx.Client, fake: FakeController) -> None:
    session = create(http)["id"]
    assert chat(http, session).status_code == 200
    path = f"/v1/sessions/{session}/discard"
    tokens = get(http, session)["tokens"]
    told = http.post(path, json={"tokens": [[6, 8], [3, 5]]}).json()
    assert (told["discards"], told["tokens"]) == ([[3, 5], [6, 8]], tokens)
    assert http.post(path, json={"tokens": [[5, 6]]}).json()["discards"] == [[3, 8]]
    answer = chat(http, session).json()
    assert drops_of(fake.behaviour.submits[1]) == [(3, 8)]
    assert answer["truncation"]["occurred"]
    assert answer["truncation"]["dropped_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"]["session_tokens"] == tokens - 5
    assert answer["usage"]["prompt_tokens"] == len(prompt_of(fake.behaviour.submits[1])) - 5
    assert chat(http, session).status_code == 200
    assert drops_of(fake.behaviour.submits[2]) == [(3, 8)], "for ever"
    assert http.post(f"/v1/sessions/{session}/prefetch").status_code == 200
    assert drops_of(fake.behaviour.prefetches[0]) == [(3, 8)]
    for bad in ([[5, 5]], [[9, 3]], [[-1, 4]], [[0, 10**6]]):
        assert http.post(path, json={"tokens": bad}).json()["error"]["param"] == "tokens[0]"
    for worse in ([], [[1]], [["a", "b"]], 5, [[1, 2, 3]], [[True, 4]]):
        assert http.post(path, json={"tokens": worse}).json()["error"]["param"] == "tokens"
    assert http.post(path, json={}).json()["error"]["param"] == "tokens"
    assert http.post(path, json={"tokens": [[1, 2]], "messages": [0]}).json()["error"]["param"] == "tokens"


def test_discard_messages(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    session = create(http, messages=[{"role": "system", "content": "Be kind."}])["id"]
    assert chat(http, session, "one").status_code == 200
    assert chat(http, session, "two").status_code == 200
    path = f"/v1/sessions/{session}/discard"
    assert http.post(path, json={"messages": [2, 1]}).status_code == 200
    assert chat(http, session, "three").status_code == 200
    submit = fake.behaviour.submits[-1]
    prompt, [(start, stop)] = prompt_of(submit), drops_of(submit)
    assert tokenizer.decode(prompt[start:stop], skip_special_tokens=False) == (
        f"<|user|>one<|end|><|assistant|>{ANSWER}<|end|>"
    )
    told = http.post(path, json={"messages": [0, 6]}).json()
    assert told["discards"][0][0] == 1, "the first token stays"
    assert told["discards"][-1][1] == told["tokens"]
    assert http.post(path, json={"messages": [7]}).json()["error"]["param"] == "messages"
    assert http.post(path, json={"messages": [-1]}).json()["error"]["param"] == "messages[0]"


def test_overflow_cuts_by_default(http: httpx.Client, fake: FakeController) -> None:
    session = create(http, messages=[{"role": "system", "content": "Be kind."}])["id"]
    strict = create(http, truncation="disabled")["id"]
    long = "word " * 900
    assert chat(http, strict, long).status_code == 200
    refused = chat(http, strict, long * 2)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    for _ in range(4):
        answer = chat(http, session, long)
        assert answer.status_code == 200
    submit = fake.behaviour.submits[-1]
    [(start, stop)] = drops_of(submit)
    assert submit.prompt_len > 2048 >= submit.prompt_len - (stop - start)
    assert answer.json()["truncation"]["occurred"]
    assert get(http, session)["tokens"] > submit.prompt_len, "the whole history is kept"
    assert error_of(chat(http, session, long, truncation="disabled"))[1] == "context_length_exceeded"
    http.post(f"/v1/sessions/{session}/prefetch")
    [(head, _)] = drops_of(fake.behaviour.prefetches[0])
    assert head == start


def test_another_tokenizer(router: RunningRouter, http: httpx.Client, fake: FakeController) -> None:
    session = create(http)["id"]
    assert chat(http, session).status_code == 200
    assert http.post(f"/v1/sessions/{session}/discard", json={"tokens": [[3, 5]]}).status_code == 200
    record, _, segments, *_ = reading_of(router, session)
    history = read_segments(History(), [segment.content for segment in segments])
    added = segments_of(change_between(history, replace(history, vocabulary="another")))
    change = Change(record.header, record.ttl, record.head, added)
    router.call(router.service.records.put(record.key, record.version, change))
    answer = chat(http, session).json()
    assert answer["usage"]["prompt_tokens_details"]["session_tokens"] == 0
    assert not drops_of(fake.behaviour.submits[1]), "its tokens are others"
    assert get(http, session)["turns"] == 2
