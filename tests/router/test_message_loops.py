"""Conversations whose text goes on from that of their beginning: the same as if all of it were written anew."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest
from seeds import seeds

from trunkline.router.errors import PromptError
from trunkline.router.text.chat_template import ChatRenderer, RenderedChat
from trunkline.router.text.tool_styles import ToolStyle

SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>"}
GOES_ON: Final = {
    "plain": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "places": "{% for m in messages %}{{ loop.index }}{{ loop.index0 + 1 }}{% if loop.first %}F{% endif %}"
    "{{ m.content }}"
    "{% if loop.last %}L{% endif %}{% endfor %}{{ messages | length }}",
    "neighbours": "{% for m in messages %}"
    "{% if loop.index0 and messages[loop.index0 - 1].role == m.role %}={% endif %}"
    "{{ m.content }}{% if not loop.last and messages[loop.index0 + 1].role == 'user' %}>{% endif %}{% endfor %}",
    "thoughts": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}"
    "{% if loop.index0 > ns.last and m.reasoning_content %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}",
    "states": "{% set ns = namespace(count=kind or 0, open=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.count = ns.count + 1 %}"
    "{% if not ns.open %}[{% set ns.open = true %}{% endif %}"
    "{% elif ns.open %}]"
    "{% set ns.open = false %}{% endif %}{{ ns.count }}{{ m.content }}{% endfor %}{{ ns.open }}{{ ns.count }}",
    "macros": "{% macro shown(m, mark) %}{% for t in tools or [] %}{{ loop.index }}{{ t.function.name }}"
    "{{ loop.last }}"
    "{% endfor %}{{ mark }}{{ m.content }}{{ kind }}{% endmacro %}{% set mark = '#' if tools else '-' %}"
    "{% for m in messages %}{{ shown(m, mark) }}{% endfor %}",
    "first apart": "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
    "{% set messages = messages[1:] %}"
    "{% else %}{% set first = '' %}{% endif %}{{ first }}{{ messages | length }}:{% for m in messages %}"
    "{% if loop.first %}{{ first }}{% endif %}{{ m.content }}{% endfor %}",
    "jumps": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index }}"
    "{{ m.content }}"
    "{% if m.content == 'stop' %}{% break %}{% endif %}{% endfor %}",
    "tools": "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c.id }}"
    "{{ c.function.arguments }}{% endfor %}{{ m.name }}{{ m.content }}{{ tools is none }}{% endfor %}",
    "inner": "{% for m in messages %}{% set x = m.content %}{% for c in m.tool_calls or [] %}"
    "{% set x = c.function.name %}"
    "{{ loop.length }}{{ c.function.arguments | tojson }}{% endfor %}{{ x }}{% endfor %}",
    "kept": "{% for m in messages %}{% if m.role == 'system' %}{% set y = m.content %}{% endif %}{{ y }}"
    "{{ m.content }}{% endfor %}",
    "branches": "{% if tools %}{% for m in messages %}{{ m.content }};{% endfor %}{% else %}"
    "{% for m in messages %}"
    "{{ m.role }}{{ kind }}{% endfor %}{% endif %}",
}
"""In the manner of ChatML, Qwen 3, DeepSeek, Llama 3.1, and others."""
STAYS: Final = (
    "{% for m in messages %}{{ loop.length }}{% endfor %}",
    "{% for m in messages %}{{ loop.revindex }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem }}{% endfor %}",
    "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
    "{% for m in messages %}{{ messages[loop.index0 - 2].content }}{% endfor %}",
    "{% for m in messages[1:] %}{{ messages[loop.index0 - 1].content }}{% endfor %}",
    "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ strftime_now('%s') }}{% endfor %}",
    "{% for m in messages %}{{ [1, 2] | random }}{% endfor %}",
    "{% macro shown(i) %}{{ messages | length }}{% endmacro %}{% for m in messages %}{{ shown(1) }}{% endfor %}",
    "{% for i in [1, 2] %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}",
    "{% macro all() %}{% for m in messages %}{{ m.content }}{% endfor %}{% endmacro %}{{ all() }}",
)
TOOL: Final = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


class Conversations:
    """Random conversations that grow, part and are edited."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._calls = 0

    def message(self) -> list[dict[str, Any]]:
        """One message, or a call with its result."""
        rng = self.rng
        text = rng.choice(["", "one", "two words", "é", "stop", "<|x|>"])
        kind = rng.choice(["system", "user", "user", "assistant", "assistant", "thought", "call"])
        if kind == "thought":
            return [{"role": "assistant", "content": text, "reasoning_content": "hm"}]
        if kind != "call":
            return [{"role": kind, "content": text}]
        self._calls += 1
        name = f"call_{self._calls}"
        arguments = rng.choice(['{"x": 1}', '{"x":1.0}', '{"x": true}', "cut"])
        call = {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": text},
        ]

    def changed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation that has something in common with another one."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.1 and messages:
            place = rng.randrange(len(messages))
            return [*messages[:place], {**messages[place], "content": "other"}, *messages[place + 1 :]]
        if kind < 0.2:
            return messages[: rng.randrange(len(messages) + 1)] or self.message()
        if kind < 0.25:
            return self.message()
        return [*messages, *(message for _ in range(rng.randrange(1, 4)) for message in self.message())]


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("name", GOES_ON)
def test_random_conversations(name: str, seed: int) -> None:
    made = Conversations(seed)
    rng = made.rng
    style = ToolStyle(rng.choice(["hermes", "mistral", "llama3_json"]))
    source = GOES_ON[name]
    known, anew = (ChatRenderer(source, SPECIAL, style) for _ in range(2))
    assert known.goes_on
    before: RenderedChat | None = None
    messages: list[dict[str, Any]] = []
    options: dict[str, Any] = {}
    skipped = 0
    for _ in range(70):
        messages = made.changed(messages)
        if rng.random() < 0.1:
            options["tools"] = rng.choice([None, [TOOL], [TOOL, {**TOOL, "function": {"name": "b"}}]])
        if rng.random() < 0.1:
            options["extra"] = rng.choice(
                [None, {"kind": 1}, {"kind": True}, {"kind": 1.0}, {"kind": ["a"]}, {"kind": 2}]
            )
        options["add_generation_prompt"] = rng.random() < 0.5
        try:
            wanted = anew.render(messages, **options)
        except PromptError:  # a result without its call
            with pytest.raises(PromptError):
                known.rendered(messages, before=before, **options)
            continue
        found = known.rendered(messages, before=before, **options)
        assert found.text == wanted
        skipped += found.rendered.skipped
        if rng.random() < 0.9:
            before = found
    assert skipped > 0


@pytest.mark.parametrize("source", STAYS)
def test_loops_that_ask_for_more_than_their_turn(source: str) -> None:
    renderer = ChatRenderer(source, SPECIAL, ToolStyle())
    assert not renderer.goes_on
    messages = [{"role": "user", "content": str(number)} for number in range(9)]
    before = renderer.rendered(messages[:6])
    found = renderer.rendered(messages, before=before)
    assert found.rendered.skipped == 0
    if "strftime" not in source and "random" not in source:
        assert found.text == renderer.render(messages)
