"""Agents before a server (benchmarks/agents.py): what they send, what of it is ideal, and how streams are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_apis import APIS, Part, Reply
from agent_arms import tenants_file
from agent_server import ANSWER_MIN, Pace, Script, Served, fitting
from agent_traces import BLOCK, NONE, conversation, synthetic
from agents import Limits, MostAgents
from report import Report
from seeds import seeds

from trunkline.router.config import RouterConfig
from trunkline.router.errors import ApiError
from trunkline.router.tenancy.auth import Access
from trunkline.router.tenancy.tenants import Tenants

PACE = Pace(turns=60)


def flat(parts: list[Part]) -> list[str]:
    return [word for part in parts for word in part.words]


@pytest.mark.parametrize("seed", seeds(1))
def test_prompts_repeat_what_was_recorded_and_the_answers_that_came(seed: int) -> None:
    """Against the words themselves: what is called ideal is what some earlier prompt and its answer begin with."""
    fronts, sent = set[tuple[int, int]](), [list[str]()]
    for whole in synthetic(6, seed):
        script = Script(whole, PACE, "salt", fronts)
        for request in script.requests():
            parts, ideal = script.prompt(request)
            words = flat(parts)
            longest = max(
                next((at for at, (a, b) in enumerate(zip(words, old, strict=False)) if a != b), len(old))
                for old in sent
            )
            assert 0 <= longest - ideal <= 2, "words are drawn: the next ones may be the same by chance"
            assert len(words) == max(request.prompt // PACE.divide, ideal + 1)
            if request.base != NONE and whole.edited(request):
                assert ideal == request.keep * BLOCK // PACE.divide
            answer = [f"a{whole.id}-{request.number}-{at}" for at in range(ANSWER_MIN)]
            script.answered(request, answer)
            sent.append(words + answer)
    assert len(sent) > 6


def test_conversations_end_where_they_do_not_fit() -> None:
    row = [0.0, 320, 320, 0.0, 1.0, -1, 0]
    grown = [[9.0, 32 * length, 32, 40.0, None, at, 5] for at, length in enumerate((20, 30, 40, 8000))]
    whole = conversation({"id": "x", "tools": 64, "system": 64, "requests": [row, *grown]})
    script = Script(whole, Pace(window=8000), "", set())
    assert [request.number for request in script.requests()] == [0, 1, 2, 3]
    assert [script.pause_s(request) for request in whole.requests[:2]] == [0.0, 2.0]
    assert fitting([whole], Pace(window=8000)) == [whole]
    assert fitting([whole], Pace(window=45)) == []


STREAMS: dict[str, list[dict[str, Any]]] = {
    "completions": [
        {"choices": [{"text": "w7 w8"}], "usage": None},
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}},
    ],
    "chat": [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "w7 w8"}}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}},
    ],
    "messages": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "w7 w8"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    ],
    "responses": [
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.output_text.delta", "delta": "w7 w8"},
        {
            "type": "response.completed",
            "response": {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}},
        },
    ],
}


@pytest.mark.parametrize("name", APIS)
def test_streams_of_all_apis_tell_text_and_cached_tokens(name: str) -> None:
    reply = Reply(0.0)
    assert "".join(APIS[name].read(event, reply) for event in STREAMS[name]) == "w7 w8"
    assert (reply.prompt_tokens, reply.cached_tokens) == (9, 4)


def test_bodies_have_all_words_in_their_order() -> None:
    roles = [("system", "w2 w3"), ("user", "w4"), ("assistant", "w5"), ("user", "w6")]
    parts = [Part(role, tuple(text.split())) for role, text in roles]
    bodies = {name: api.body("m", parts, 7) for name, api in APIS.items()}
    assert bodies["completions"]["prompt"] == [2, 3, 4, 5, 6]
    assert [(m["role"], m["content"]) for m in bodies["chat"]["messages"]] == roles
    assert [(m["role"], m["content"]) for m in bodies["responses"]["input"]] == roles
    assert bodies["messages"]["system"] == [{"type": "text", "text": "w2 w3"}]
    assert [(m["role"], m["content"]) for m in bodies["messages"]["messages"]] == roles[1:]


def test_each_tenants_key_is_its_own_over_every_api(tmp_path: Path) -> None:
    keys = ("tl-first", "tl-second")
    option, path = tenants_file(tmp_path / "tenants.json", keys)
    assert option == "--tenants"
    config = RouterConfig(model_path=str(tmp_path), controllers=["ipc://x"], tenants=path)
    tenants = Tenants(config)
    assert tenants.needs_keys
    for api in APIS.values():
        known = [tenants.identify(httpx.Headers(api.key(key)), Access.USER) for key in keys]
        assert len({identity.tenant for identity in known}) == 2
        assert len({identity.salt for identity in known}) == 2, "they share no KV"
        with pytest.raises(ApiError):
            tenants.identify(httpx.Headers(api.key("tl-third")), Access.USER)
    assert tenants_file(tmp_path / "none.json", ()) == []
    assert not (tmp_path / "none.json").exists()


def test_what_was_found_and_lost_is_counted_by_request() -> None:
    rows = [[0.0, 320, 32, 0.0, 1.0, -1, 0], [9.0, 640, 32, 1.0, 1.0, 0, 5], [9.0, 640, 32, 1.0, 1.0, 1, 5]]
    first, going_on, edited = conversation({"id": "x", "tools": 64, "system": 0, "requests": rows}).requests
    served = Served()
    prompt, answer = Part("user", ("w2",) * 10), Part("assistant", ("w3",) * 4)
    served.count(first, [prompt], 0, Reply(0.0, 2.0, 3.0, ["w3"] * 4, 10, 0))
    served.count(going_on, [prompt, answer, prompt], 14, Reply(0.0, 0.5, 3.5, ["w3"] * 4, 24, 12))
    served.count(edited, [prompt, prompt], 10, Reply(0.0, 0.7, 3.5, ["w3"] * 4, 21, 20))
    assert (served.prompt, served.ideal, served.found, served.miscounted) == (55, 24, 22, 1)
    assert served.lost == {"edited": 0, "going on": 2}
    assert (served.first(), served.ttft(1.0), served.token(1.0)) == (2.0, 0.7, 1.0)


def test_the_most_agents_are_those_within_each_pair_of_limits_of_all_up_to_them() -> None:
    def served(*ttft_s: float) -> Served:
        return Served(ttft_s=list(ttft_s), token_s=[0.05, 0.09])

    strict, loose, quick = Limits(100, 100), Limits(1000, 100), Limits(1000, 80)
    assert [each.hold(served(0.1, 0.2, 3.0)) for each in (strict, loose)] == [False, False]
    assert [each.hold(served(0.05, 0.09)) for each in (strict, loose, quick)] == [True, True, True]
    assert not loose.hold(served()), "no agent came to a second request"
    most = MostAgents([strict, loose])
    key = ("trunkline", "chat", "")
    assert most.add(key, 1, [True, True])
    assert most.add(key, 2, [False, True])
    assert most.add(key, 4, [True, True]), "the loose pair goes on; the strict one was broken with fewer agents"
    assert not most.add(key, 8, [False, False])
    report = Report("agents")
    most.add_to(report)
    assert [(each["metric"], each["value"]) for each in report.results] == [
        ("agents within 100/100 ms", 1),
        ("agents within 1000/100 ms", 4),
    ]
