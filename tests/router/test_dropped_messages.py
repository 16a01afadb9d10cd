"""Many messages dropped at once: the places of all ranges are seen in beginnings of the conversation."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from router.api_calls import CITY
from router.fake_controller import FakeController, drops_of, prompt_of
from router.harness import DEMO_MODEL, running
from seeds import seeds

from trunkline.router.api import edited_prompts
from trunkline.router.text.tokenizer import Tokenizer

TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": CITY}}]


def conversation(rng: random.Random, steps: int, *, calls: float) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return a conversation, and ranges of messages that may be dropped of it. `calls`: share of steps with a call
    of a tool."""
    turns: list[Any] = [{"role": "system", "content": "Be brief."}]
    ranges = []
    for number in range(steps):
        start = len(turns)
        if rng.random() < calls:
            call = {"name": "get_weather", "arguments": json.dumps({"city": f"Place {rng.randrange(3)}"})}
            made = [{"id": f"c{number}", "type": "function", "function": call}]
            turns.append({"role": "assistant", "content": "", "tool_calls": made})
            turns.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"{rng.randrange(4)} °C"})
        else:
            turns.append({"role": "user", "content": rng.choice(["And?", "Why?", "é" * 9, "a a a a"])})
            turns.append({"role": "assistant", "content": rng.choice(["Yes.", "No.", "a a a a"])})
        ranges.append((start, len(turns)))
    turns.append({"role": "user", "content": "In the end?"})
    return turns, ranges


def send(http: httpx.Client, turns: list[Any], ranges: list[tuple[int, int]]) -> httpx.Response:
    drop = [{"from": start, "to": stop} for start, stop in ranges]
    tools = TOOLS if any("tool_calls" in turn for turn in turns) else None
    body = {"messages": turns, "tools": tools, "max_tokens": 5, "drop": drop}
    return http.post("/v1/chat/completions", json=body)


async def _unseen(*_: Any) -> None:
    """Stands for `message_ends` where beginnings are written otherwise."""


@pytest.mark.parametrize("seed", seeds(4))
def test_the_same_tokens_are_dropped_as_by_writing_each_rest(
    http: httpx.Client, fake: FakeController, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, seen = random.Random(seed), 0
    for number in range(8):
        turns, ranges = conversation(rng, rng.randrange(3, 30), calls=(0.0, 0.5)[number % 2])
        chosen = sorted(rng.sample(ranges, rng.randrange(2, len(ranges) + 1)))
        if not number % 2 and chosen[0][0] == 1:
            chosen[0] = (0, chosen[0][1])
        with monkeypatch.context() as patch:
            patch.setattr(edited_prompts, "message_ends", _unseen)
            one_by_one = send(http, turns, chosen)
        if one_by_one.status_code == 400:  # the template joins a result with the message behind it
            assert number % 2
            continue
        dropped = drops_of(fake.behaviour.submits[-1])
        assert send(http, turns, chosen).status_code == 200
        assert drops_of(fake.behaviour.submits[-1]) == dropped
        seen += 1
    assert seen >= 4


def test_hundreds_of_ranges_leave_what_the_template_writes_without_them(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    turns: list[Any] = []
    for number in range(600):
        turns += [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "s"}]
    turns.append({"role": "user", "content": "And?"})
    ranges = [(at, at + 1) for at in range(0, 1200, 2)]
    answer = send(http, turns, ranges)
    assert answer.status_code == 200, answer.text
    submit = fake.behaviour.submits[-1]
    tokens, drops = prompt_of(submit), drops_of(submit)
    assert len(drops) == 600
    left = [token for at, token in enumerate(tokens) if not any(start <= at < stop for start, stop in drops)]
    rest = [turn for at, turn in enumerate(turns) if not any(start <= at < stop for start, stop in ranges)]
    assert tokenizer.decode(left, skip_special_tokens=False) == tokenizer.render_chat(rest)


THOUGHTS_OF_THE_LAST_TURN = (
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.reasoning_content and loop.index0 > last.at %}{{ '<think>' + m.reasoning_content + '</think>' }}"
    "{% endif %}{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_where_beginnings_are_written_otherwise_each_rest_is_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    known = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**known, "chat_template": THOUGHTS_OF_THE_LAST_TURN})
    )
    turns: list[Any] = []
    for number in range(70):
        answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Why not?"}
        turns += [{"role": "user", "content": f"{number}?"}, answer]
    turns.append({"role": "user", "content": "And?"})
    ranges = [(at, at + 1) for at in range(1, 131, 2)]
    with running(tmp_path, tokenizer, model_path=str(folder)) as (router, [fake]), router.client() as http:
        assert send(http, turns, ranges[:64]).status_code == 200
        submit = fake.behaviour.submits[-1]
        tokens, drops = prompt_of(submit), drops_of(submit)
        refused = send(http, turns, ranges)
    left = [token for at, token in enumerate(tokens) if not any(start <= at < stop for start, stop in drops)]
    rest = [turn for at, turn in enumerate(turns) if not any(start <= at < stop for start, stop in ranges[:64])]
    changed = Tokenizer(folder)
    assert changed.decode(left, skip_special_tokens=False) == changed.render_chat(rest)
    changed.close()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "drop[64]")
    assert "than in the whole" in refused.json()["error"]["message"]
