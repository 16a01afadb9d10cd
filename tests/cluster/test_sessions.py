"""Conversations over many turns, against real processes: found again, cut, copied, forgotten, and never changed.

Texts are compared with a server that has no prefix cache, in float32. Each test talks about something of its own,
so that it finds no other's KV.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, wait_for

pytestmark = pytest.mark.processes

MODEL = "trunkline-demo"
CONTEXT = 2048
CHUNK = 64
QUESTION = "What does os.path.join do?"
QUESTIONS = ("What does str.split do?", "What does json.dumps do?", "Explain dict.get.", "What does len do?")
FILLER = "The following functions are part of the standard library. " * 28

Message = dict[str, str]


def system(topic: str) -> Message:
    """Instructions that begin with their topic, longer than a chunk."""
    return {"role": "system", "content": f"{topic}. " * CHUNK}


def chat(cluster: Cluster, messages: list[Message], tokens: int = 24, **more: object) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, **more}
    return cluster.post("/v1/chat/completions", body)


def ask(cluster: Cluster, question: str, tokens: int = 24, **more: object) -> dict[str, Any]:
    return chat(cluster, [{"role": "user", "content": question}], tokens, **more)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def details(answer: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt that were cached, and those that the session brought."""
    found = answer["usage"]["prompt_tokens_details"]
    return found["cached_tokens"], found["session_tokens"]


def begin(cluster: Cluster, topic: str, **more: object) -> str:
    return str(cluster.post("/v1/sessions", {"messages": [system(topic)], **more})["id"])


def stored_turns(cluster: Cluster, topic: str) -> list[dict[str, Any]]:
    session = begin(cluster, topic)
    return [ask(cluster, question, session_id=session) for question in QUESTIONS]


def stateless_turns(cluster: Cluster, topic: str) -> list[dict[str, Any]]:
    """The same conversation by somebody who sends all of it each time."""
    messages, answers = [system(topic)], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answers.append(chat(cluster, messages))
        messages.append({"role": "assistant", "content": text_of(answers[-1])})
    return answers


@pytest.mark.parametrize("turns", [stored_turns, stateless_turns])
def test_later_turns_compute_only_what_is_new_and_say_the_same(
    cluster: Cluster, plain: Cluster, turns: Callable[[Cluster, str], list[dict[str, Any]]]
) -> None:
    topic = f"Birds and {turns is stored_turns}"
    answers, expected = turns(cluster, topic), turns(plain, topic)
    assert [text_of(a) for a in answers] == [text_of(a) for a in expected]
    assert all(len(text_of(a)) > 3 for a in answers)
    for before, after in pairwise(answers):
        history = before["usage"]["total_tokens"]
        cached, from_session = details(after)
        # The last token of an answer that was cut short is known, but was never computed with.
        assert history - 1 <= cached < after["usage"]["prompt_tokens"]
        assert from_session == (history if turns is stored_turns else 0)
        assert after["cache"]["tiers"] == {"device": cached}
        assert after["cache"]["exact"] is True
    assert all(details(a)[0] == 0 for a in expected)
    assert expected[0]["cache"]["reason"] == "off"


def test_a_conversation_goes_on_beyond_the_context(cluster: Cluster) -> None:
    session = begin(cluster, "Trees")
    answers = []
    for index in range(12):
        answers.append(ask(cluster, f"{index}: {FILLER}", session_id=session))
        assert answers[-1]["usage"]["total_tokens"] <= CONTEXT
    cut = [a for a in answers if a["truncation"]["occurred"]]
    assert 3 <= len(cut) < len(answers)
    dropped = [a["truncation"]["dropped_tokens"] for a in cut]
    assert set(dropped) == {CONTEXT // 2, CONTEXT}  # a second cut came in time, and each stayed where it was
    assert dropped == sorted(dropped)
    for before, after in pairwise(answers):
        gone = after["truncation"]["dropped_tokens"] - before["truncation"]["dropped_tokens"]
        # Whatever is cut off, nothing that is still seen is computed again.
        assert details(after)[0] >= before["usage"]["total_tokens"] - gone - 1
    assert {a["truncation"]["kept"] for a in cut} == {"cached"}
    assert cut[-1]["cache"]["exact"] is False
    asked = ask(cluster, QUESTION, 40, session_id=session)
    assert asked["truncation"]["kept"] == "cached"
    # Still sense, and to the point: as if nothing had been before.
    assert text_of(asked) == text_of(chat(cluster, [system("Trees"), {"role": "user", "content": QUESTION}], 40))


def test_a_prompt_that_is_too_long_is_cut_if_that_is_asked_for(cluster: Cluster, plain: Cluster) -> None:
    messages = [system("Rivers")]
    for index in range(9):
        messages.append({"role": "user", "content": f"{index}: {FILLER}"})
        messages.append({"role": "assistant", "content": "Noted."})
    messages.append({"role": "user", "content": QUESTION})
    # Nothing of it was computed before, so both compute what is left, at the same positions.
    answers = [chat(c, messages, truncation="auto") for c in (cluster, plain)]
    assert [a["truncation"]["kept"] for a in answers] == ["recomputed"] * 2
    assert text_of(answers[0]) == text_of(answers[1])
    assert answers[0]["usage"]["prompt_tokens"] + 24 <= CONTEXT


def test_what_is_discarded_is_not_seen_any_more(cluster: Cluster) -> None:
    session = begin(cluster, "Clouds")
    for index in range(3):
        first = ask(cluster, f"{index}: {FILLER}", session_id=session)
    shown = cluster.post(f"/v1/sessions/{session}/discard", {"messages": [1, 2]})
    ((start, stop),) = shown["discards"]
    assert shown["tokens"] == first["usage"]["total_tokens"]
    answer = ask(cluster, QUESTION, session_id=session)
    assert answer["truncation"]["kept"] == "cached"
    assert answer["truncation"]["dropped_tokens"] == stop - start > CHUNK
    assert details(answer)[0] >= shown["tokens"] - (stop - start) - 1
    assert text_of(answer)


CLEARED: dict[str, Any] = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 2},
    "keep": {"type": "tool_uses", "value": 2},
}


def message(cluster: Cluster, steps: int, **more: object) -> dict[str, Any]:
    """Anthropic's form of a conversation of so many calls of a tool; above two, older results are cleared."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": f"Winds. {FILLER}"}]
    for number in range(steps):
        call = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {"at": f"place {number}"}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"{number}: {FILLER[:400]}"}
        turns += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "messages": turns}
    return cluster.post("/v1/messages", {**body, "context_management": {"edits": [CLEARED]}, **more})


def test_edited_turns_find_the_kv_of_the_turns_before(cluster: Cluster, plain: Cluster) -> None:
    answers = [message(cluster, steps) for steps in range(1, 6)]
    seen = [sum(a["usage"][f"{kind}input_tokens"] for kind in ("", "cache_read_")) for a in answers]
    step = seen[1] - seen[0]
    for number, answer in enumerate(answers):
        applied = answer["context_management"]["applied_edits"]
        assert sum(edit["cleared_tool_uses"] for edit in applied) == max(0, number - 1)
        if number >= 2:
            assert answer["truncation"]["kept"] == "cached"
            assert answer["cache"]["exact"] is False
            # Only the call and the result that are new were computed, although each turn leaves out one more.
            assert answer["usage"]["cache_read_input_tokens"] >= seen[number] - step - 1
    exact = message(cluster, 5, exact=True)
    assert (exact["cache"]["exact"], exact["truncation"]["kept"]) == (True, "recomputed")
    assert exact["content"] == message(plain, 5)["content"], "as if what is cleared had never been there"


def test_a_fork_goes_its_own_way_over_the_same_kv(cluster: Cluster, plain: Cluster) -> None:
    texts = []
    for server in (cluster, plain):
        session = begin(server, "Stones")
        ask(server, QUESTIONS[0], session_id=session)
        fork = server.post(f"/v1/sessions/{session}/fork")
        assert fork["parent"] == session
        answers = [
            ask(server, q, session_id=s) for q, s in zip(QUESTIONS[1:3], (session, fork["id"]), strict=True)
        ]
        texts.append([text_of(a) for a in answers])
        if server is cluster:
            assert all(cached >= brought - 1 > CHUNK for cached, brought in map(details, answers))
            prefetched = server.post(f"/v1/sessions/{fork['id']}/prefetch")
            assert prefetched["coming_tokens"] == 0  # all of it is on the device
            assert prefetched["known_tokens"] >= fork["tokens"] - CHUNK
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_what_nobody_uses_for_its_time_is_forgotten(cluster: Cluster) -> None:
    session = ""

    def is_asked() -> bool:
        """On a busy machine a session may be forgotten before its first turn arrives."""
        nonlocal session
        session = begin(cluster, "Sands", ttl=1)
        turn = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "session_id": session}
        answer = httpx.post(f"{cluster.url}/v1/chat/completions", json={"model": MODEL, **turn}, timeout=60)
        assert answer.status_code in (200, 404), answer.text
        return answer.status_code == 200

    wait_for(is_asked, 60)

    def listed() -> bool:
        return session in httpx.get(f"{cluster.url}/v1/sessions", params={"limit": 100}, timeout=60).text

    wait_for(lambda: not listed(), 10)
    gone = httpx.get(f"{cluster.url}/v1/sessions/{session}", timeout=60)
    assert gone.json()["error"]["code"] == "session_not_found"

    # Its KV went before it: the listing that did not show it came later.
    assert chat(cluster, [system("Sands")], 1)["cache"]["reason"] == "ttl"
