"""Every parameter of Ollama's chats has an effect, beside `options` and within them, or is refused."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import httpx
import pytest
from router.harness import MESSAGES
from router.schema_calls import post
from router.test_parameters import ADD, CUT, FUNCTION, SHARED, Probe, Seen, spied  # noqa: F401 (a fixture)

from trunkline.router.jobs.ollama_models import OLLAMA_CHAT

BODY: Final[dict[str, Any]] = {
    "model": "demo",
    "messages": MESSAGES,
    "stream": False,
    "seed": 7,
    "truncate": False,
}
PROBES: Final[dict[str, Probe]] = {
    "stream": Probe(True),
    "num_predict": Probe(3),
    "format": Probe({"type": "object"}),
    "think": Probe(True),
    "truncate": Probe(True),
    "repeat_last_n": Probe(64),
    "penalize_newline": Probe(False),
    "messages": Probe([{"role": "user", "content": "Other"}]),
    "tools": Probe([FUNCTION]),
    "truncation": Probe(CUT),
}
NO_EFFECT: Final = ("keep_alive",)
"""Parameters about the server, not about the answer."""
ELSEWHERE: Final = ("thinking_budget", "pml", "trailing", "document_modules", "drop", "exact")
"""Parameters that need more than a plain conversation; they act as in chats, where each is proven."""
_CHANGING: Final = re.compile(r'"(created_at|\w+_duration)":\s*("[^"]*"|\d+)')


def send(http: httpx.Client, seen: Seen, body: dict[str, Any]) -> Seen:
    seen.jobs.clear()
    seen.options.clear()
    answer = http.post("/api/chat", json=body)
    lines = sorted(set(_CHANGING.sub("", answer.text).splitlines())) if body["stream"] else [answer.text]
    return Seen(answer.status_code, _CHANGING.sub("", " ".join(lines)), list(seen.jobs), list(seen.options))


@pytest.mark.parametrize("within", [False, True])
def test_each_parameter_has_an_effect(http: httpx.Client, spied: Seen, within: bool) -> None:  # noqa: F811
    post(http)
    without = send(http, spied, BODY)
    assert without == send(http, spied, BODY), "nothing is drawn"
    for parameter in OLLAMA_CHAT.parameters:
        name = parameter.name
        if name in ELSEWHERE or (within and name in ("messages", "stream", "model")):
            continue
        if name in NO_EFFECT:
            assert send(http, spied, BODY | {name: "5m"}) == without
            continue
        probe = PROBES.get(name) or SHARED[name]
        body = BODY | probe.beside
        before = send(http, spied, body)
        assert before.status == 200, (name, before.reply)
        if within:
            body = {key: value for key, value in body.items() if key != name}
            made = send(http, spied, body | {"options": {name: probe.value}})
        else:
            made = send(http, spied, body | {name: probe.value})
        assert made != before, f"{name} has no effect"
        assert made.status == (404 if name == "model" else 200), (name, made.reply)


def test_what_is_known_and_not_applied(http: httpx.Client, spied: Seen) -> None:  # noqa: F811
    without = send(http, spied, BODY)
    for name, known in OLLAMA_CHAT.known:
        made = send(http, spied, BODY | {"options": {name: {"a": 1}}})
        if known.neutral is None:
            assert made == without, name
        else:
            assert (made.status, name in json.loads(made.reply)["error"]) == (400, True), (name, made.reply)
    told = http.post("/api/chat", json=BODY | {"options": {"unheard_of": ADD}}).json()["warnings"]
    assert told == ["`unheard_of` is not a known parameter and was ignored"]
