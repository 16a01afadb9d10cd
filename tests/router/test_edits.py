"""What edits clear, where that stands in a prompt, and that no other request finds the KV behind it; no router."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any, cast

import pytest
from router.routing.test_names import CHUNK, Controller
from router.test_chat_template import SPECIAL, TOOL_TEMPLATES
from seeds import seeds

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.api.context_edits import applied_edits, read_edits, tool_names
from trunkline.router.api.edited_prompts import cleared
from trunkline.router.api.left_out import EditedPrompt
from trunkline.router.api.marked_turns import mark_conversation
from trunkline.router.errors import ApiError
from trunkline.router.jobs.request_models import Message
from trunkline.router.routing.names import KvIdentity, prompt_names
from trunkline.router.routing.request import RouteRequest
from trunkline.router.text.chat_template import ChatRenderer
from trunkline.router.text.edits import (
    ClearThinking,
    ClearToolUses,
    ConversationPart,
    Edit,
    ToolUse,
    plan_edits,
)
from trunkline.router.text.marked_text import Marks, left_out
from trunkline.router.text.token_places import TokenPlaces
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.tool_styles import ToolStyle
from trunkline.router.text.truncation import merge_spans

TOOLS = ("read", "write", "search")
WORDS = ("tide", "Gezeiten", "§ 7", "é", "日本", "{}", '"x"', "a\n b", "\\n", "😀", "10", "<end>")


def words(draw: random.Random, most: int = 6) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(0, most)))


def conversation(draw: random.Random, turns: int = 3, calls_max: int = 2) -> list[dict[str, Any]]:
    """Questions, thoughts, calls of tools and their results, in OpenAI's form."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(draw)}]
    for turn in range(draw.randint(1, turns)):
        messages.append({"role": "user", "content": words(draw) or "?"})
        for step in range(draw.randint(0, 3)):
            calls = [
                {"id": f"c{turn}.{step}.{number}", "type": "function", "function": {
                    "name": draw.choice(TOOLS),
                    "arguments": json.dumps(
                        {"path": words(draw), "lines": [draw.randint(0, 9), words(draw)]}, ensure_ascii=False
                    )}}
                for number in range(draw.randint(1, calls_max))
            ]  # fmt: skip
            messages.append({"role": "assistant", "content": words(draw), "tool_calls": calls})
            if draw.random() < 0.5:
                messages[-1]["reasoning_content"] = words(draw)
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": words(draw)} for call in calls]
        messages.append({"role": "assistant", "content": words(draw), "reasoning_content": words(draw)})
    return [*messages, {"role": "user", "content": "Go on."}]


def rendered(template: ChatRenderer, messages: list[Message]) -> str:
    return template.render([message.for_template() for message in messages], tools=[{"x": 1}])


# -- where parts stand


@pytest.mark.parametrize("seed", seeds(1))
def test_marks_change_nothing_and_show_where_each_part_stands(seed: int) -> None:
    draw = random.Random(seed)
    for name, source in TOOL_TEMPLATES.items():
        template = ChatRenderer(source, SPECIAL, ToolStyle(cast(Any, name)))
        calls = 1 if "one call" in source else 2
        for _ in range(15):
            given = [Message.model_validate(message) for message in conversation(draw, calls_max=calls)]
            marked = mark_conversation(given)
            assert marked is not None
            found = marked.conversation
            placed = marked.marks.read(rendered(template, found.messages))
            assert placed is not None
            assert placed.text == rendered(template, given)
            for one, other in pairwise(placed.places):
                assert one.start < one.stop <= other.start
            results = [message.content.strip() for message in given if message.role == "tool"]
            numbers = [index for index, part in enumerate(found.parts) if part.kind == "result"]
            shown = {place.part: placed.text[place.start : place.stop] for place in placed.places}
            assert [shown.get(number, "") for number in numbers] == results
            inputs = [index for index, part in enumerate(found.parts) if part.kind == "input"]
            texts = [text for index in inputs if (text := shown.get(index))]
            whole = json.dumps([call.function.arguments for message in given for call in message.tool_calls or ()])
            assert all(text in whole or json.dumps(text)[1:-1] in whole for text in texts)


def test_marks_that_a_template_damages_are_known() -> None:
    marks = Marks.unused(["plain", "\ufdd0 is taken"])
    assert marks is not None
    assert marks.opening != "\ufdd0"
    whole = f"<{marks.around(3, ' a b ')}>"
    placed = marks.read(whole)
    assert placed is not None
    assert (placed.text, placed.places) == ("< a b >", [(3, 2, 5)])
    for damaged in (
        whole[::-1],
        whole[:-3],
        json.dumps(whole),
        whole.replace("3", "x"),
        whole[1:].lstrip(" \ufdd1")[1:],
    ):
        assert marks.read(damaged) is None
    assert Marks.unused(["".join(chr(code) for code in range(0xFDD0, 0xFDF0))]) is None
    assert marks.around(0, " \n") == " \n"


@pytest.mark.parametrize("seed", seeds(1))
def test_what_is_left_out_of_a_text_is_found(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(2000):
        text = "".join(draw.choices("ab\n", k=draw.randint(0, 12)))
        start, stop = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        rest = text[:start] + text[stop:]
        found = left_out(text, rest)
        assert found is not None
        assert found.first <= start <= found.last
        for place in range(found.first, found.last + 1):
            assert text[:place] + text[place + found.length :] == rest
        for place in (found.first - 1, found.last + 1):
            assert (
                place < 0
                or place + found.length > len(text)
                or text[:place] + text[place + found.length :] != rest
            )
    assert left_out("abc", "ac!") is None
    assert left_out("abcd", "da") is None


@pytest.mark.parametrize("seed", seeds(1))
def test_the_tokens_of_a_range_stand_for_nothing_else(tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        text = words(draw, 30)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        same, places = tokenizer.places(text, tokens, add_special_tokens=False)
        assert same == tokens
        told = TokenPlaces.of_offsets(tokenizer._tokenizer.encode(text, add_special_tokens=False).offsets)
        assert places.starts.tolist() == told.starts.tolist()
        assert places.stops.tolist() == told.stops.tolist()
        start, stop = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        span = places.within(start, stop)
        inside = [
            index
            for index, (begin, end) in enumerate(zip(places.starts.tolist(), places.stops.tolist(), strict=True))
            if start <= begin and end <= stop
        ]
        assert list(range(*span)) == inside
    other, places = tokenizer.places("one two", [5, 6], add_special_tokens=False)
    assert other == tokenizer.encode("one two", add_special_tokens=False), "tokens of another text"
    assert places.stops[-1] == len("one two")


def test_tokens_of_an_answer_that_reads_the_same(tokenizer: Tokenizer) -> None:
    """Remembered tokens of an answer may stand for other characters: here for other white space in a call."""
    before, after = "<|bos|><|user|>Why?<|end|><|assistant|>", "<|end|><|user|>result here<|end|><|assistant|>"
    shown, written = '{"a": 1, "b": 2}', '{"a":1,"b":2}'

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    text = before + shown + after
    tokens = encoded(before) + encoded(written) + encoded(after)
    same, places = tokenizer.places(text, tokens, add_special_tokens=False)
    assert same == tokens, "so that their KV is found"
    start = text.index("result here")
    span = places.within(start, start + len("result here"))
    assert tokenizer.decode(tokens[span.start : span.stop]) == "result here"
    place = text.index('"a"')
    assert len(tokens[slice(*places.within(place, place + 3))]) == 0, "which of them these are is not known"
    whole = places.within(0, len(text))
    assert whole == (0, len(tokens))


# -- what is cleared


def drawn_plan(draw: random.Random) -> tuple[list[ConversationPart], list[ToolUse], list[int]]:
    uses = [ToolUse(draw.choice(TOOLS), draw.random() < 0.9) for _ in range(draw.randint(0, 12))]
    parts = [
        ConversationPart("thought", turn) for turn in range(draw.randint(0, 5)) for _ in range(draw.randint(0, 2))
    ]
    for number, use in enumerate(uses):
        parts += [ConversationPart("input", number)] * draw.randint(0, 2)
        parts += [ConversationPart("result", number)] * use.answered
    return parts, uses, [draw.choice((0, 1, 50, 400)) for _ in parts]


@pytest.mark.parametrize("seed", seeds(1))
def test_random_plans_keep_what_they_must(seed: int) -> None:
    draw = random.Random(seed)
    triggered = 0
    for _ in range(3000):
        parts, uses, tokens = drawn_plan(draw)
        size = sum(tokens) + draw.randint(0, 2000)
        thinking = ClearThinking(draw.choice((None, 1, 2, 3)))
        tooling = ClearToolUses(
            trigger_tokens=draw.choice((None, 500, 2000)),
            trigger_uses=draw.randint(0, 6),
            keep=draw.randint(0, 4),
            clear_at_least=draw.choice((0, 0, 600)),
            exclude=frozenset(draw.sample(TOOLS, draw.randint(0, 1))),
            inputs=draw.choice((False, True, frozenset({"read"}))),
        )
        both: list[Edit] = [thinking, tooling]
        edits = both[draw.randint(0, 1) : draw.randint(1, 2)]
        plan = plan_edits(edits, parts, uses, tokens, size)
        assert sum(done.tokens for done in plan.applied) == sum(tokens[index] for index in plan.cleared)
        turns = sorted(
            {part.group for part, count in zip(parts, tokens, strict=True) if part.kind == "thought" and count}
        )
        kept_turns = turns if thinking.keep is None else turns[max(0, len(turns) - thinking.keep) :]
        answered = [number for number, use in enumerate(uses) if use.answered]
        kept_uses = answered[len(answered) - tooling.keep :] if tooling.keep else []
        for index in plan.cleared:
            part = parts[index]
            assert tokens[index]
            if part.kind == "thought":
                assert thinking in edits
                assert part.group not in kept_turns
                continue
            assert tooling in edits
            assert part.group not in kept_uses
            assert uses[part.group].answered
            assert uses[part.group].tool not in tooling.exclude
            assert part.kind == "result" or tooling.clears_input(uses[part.group].tool)
        for done in plan.applied:
            if done.edit == tooling:
                triggered += 1
                before = size - sum(each.tokens for each in plan.applied if each.edit == thinking)
                by_tokens = tooling.trigger_tokens
                assert before > by_tokens if by_tokens is not None else len(uses) > tooling.trigger_uses
                assert done.tokens >= tooling.clear_at_least
        grown = [*parts, ConversationPart("result", len(uses))]
        later = plan_edits(edits, grown, [*uses, ToolUse("read", True)], [*tokens, 9], size + 9)
        assert plan.cleared <= later.cleared, "what is cleared stays cleared"
    assert triggered > 300


def test_defaults_and_order() -> None:
    parts = [ConversationPart("result", number) for number in range(5)] + [ConversationPart("thought", 0)]
    uses = [ToolUse("read", True)] * 5
    tokens = [30_000] * 5 + [10]
    thinking, tooling = read_edits(
        {"edits": [{"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}]}, ()
    )
    plan = plan_edits([thinking, tooling], parts, uses, tokens, 150_010)
    assert plan.cleared == {0, 1}, "the last three results stay, and the last turn's thoughts"
    assert applied_edits(plan.applied) == [
        {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2, "cleared_input_tokens": 60_000}
    ]
    assert plan_edits([tooling], parts, uses, tokens, 100_000).cleared == frozenset()
    thoughts = [ConversationPart("thought", turn) for turn in range(2)]
    plan = plan_edits([thinking, tooling], [*parts[:5], *thoughts], uses, [*tokens[:5], 60_000, 5], 100_001)
    assert [done["type"] for done in applied_edits(plan.applied)] == ["clear_thinking_20251015"]
    assert applied_edits(plan.applied)[0]["cleared_thinking_turns"] == 1


# -- what is refused

USES = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
BAD: dict[str, list[Any]] = {
    "edits": [{"edits": "x"}, {"edits": {"type": USES}}],
    "edits[0]": [{"edits": ["x"]}, {"edits": [{}]}, {"edits": [{"type": 5}]}],
    "edits[0].type": [
        {"edits": [{"type": kind}]} for kind in ("compact_20260112", "clear_all", "clear_tool_uses")
    ],
    "edits[0].trigger.type": [{"edits": [{"type": USES, "trigger": {"type": "turns", "value": 3}}]}],
    "edits[0].trigger.value": [
        {"edits": [{"type": USES, "trigger": {"type": "tool_uses", **bad}}]}
        for bad in cast(Any, ({}, {"value": 0}, {"value": "9"}, {"value": True}, {"value": 2**40}))
    ],
    "edits[0].trigger": [{"edits": [{"type": USES, "trigger": 5}]}],
    "edits[0].keep.value": [
        {"edits": [{"type": USES, "keep": {"type": "tool_uses", "value": -1}}]},
        {"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}]},
    ],
    "edits[0].keep.type": [{"edits": [{"type": THINKING, "keep": {"type": "turns", "value": 1}}]}],
    "edits[0].keep": [{"edits": [{"type": THINKING, "keep": bad}]} for bad in ("none", 3, [1])],
    "edits[0].clear_at_least.type": [{"edits": [{"type": USES, "clear_at_least": {"type": "x", "value": 1}}]}],
    "edits[0].exclude_tools": [{"edits": [{"type": USES, "exclude_tools": bad}]} for bad in ("read", ["none"])],
    "edits[0].exclude_tools[0]": [{"edits": [{"type": USES, "exclude_tools": [5]}]}],
    "edits[0].clear_tool_inputs": [
        {"edits": [{"type": USES, "clear_tool_inputs": bad}]} for bad in ("read", ["none"], [5], 1)
    ],
    "edits[1]": [
        {"edits": [{"type": USES}, {"type": USES}]},
        {"edits": [{"type": USES}, {"type": THINKING}]},
        {"edits": [{"type": THINKING}, {"type": THINKING, "keep": "all"}]},
        {"edits": [{"type": THINKING}, None]},
    ],
    "edits[1].keep.value": [
        {"edits": [{"type": THINKING}, {"type": USES, "keep": {"type": "tool_uses", "value": 1.5}}]}
    ],
}


@pytest.mark.parametrize("param", BAD)
def test_bad_edits_are_named_by_their_index(param: str) -> None:
    for given in BAD[param]:
        with pytest.raises(ApiError) as raised:
            read_edits(given, {"read"})
        assert (raised.value.status, raised.value.param) == (400, f"context_management.{param}"), given
        assert f"`context_management.{param}" in raised.value.message


def test_edits_are_read() -> None:
    assert read_edits(None, ()) == read_edits({}, ()) == read_edits({"edits": []}, ()) == ()
    assert read_edits({"edits": [{"type": THINKING, "keep": "all"}]}, ()) == (ClearThinking(None),)
    assert read_edits({"edits": [{"type": THINKING, "keep": {"type": "all"}}]}, ()) == (ClearThinking(None),)
    full = {
        "type": USES,
        "trigger": {"type": "tool_uses", "value": 7},
        "keep": {"type": "tool_uses", "value": 0},
        "clear_at_least": {"type": "input_tokens", "value": 20},
        "exclude_tools": ["read"],
        "clear_tool_inputs": ["write"],
    }
    [edit] = read_edits({"edits": [full]}, {"read", "write"})
    assert edit == ClearToolUses(
        trigger_tokens=None, trigger_uses=7, keep=0, clear_at_least=20, exclude=frozenset({"read"}),
        inputs=frozenset({"write"}),
    )  # fmt: skip
    server = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f"}, "x", {"name": 5}]
    called = [
        {"role": "assistant", "content": [{"type": "tool_use", "name": "g"}, {"type": "text", "name": "h"}]},
        5,
    ]
    assert tool_names(server, called) == {"web_search", "f", "g"}


# -- on an engine


def grown(tokenizer: Tokenizer, steps: int, keep: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """The prompt of a conversation of so many calls, and what an edit that keeps the last results leaves out."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather everywhere?"}]
    for number in range(steps):
        call = {"name": "read", "arguments": json.dumps({"path": f"Place {number}"})}
        calls = [{"id": f"c{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": f"Step {number}.", "tool_calls": calls})
        content = f"Report {number}:" + f" rain on the {number}th;" * 4
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": content})
    marked = mark_conversation([Message.model_validate(message) for message in messages])
    assert marked is not None
    found = marked.conversation
    placed = marked.marks.read(tokenizer.render_chat([message.for_template() for message in found.messages]))
    assert placed is not None
    ids = tokenizer.encode(placed.text, add_special_tokens=False)
    tokens, places = tokenizer.places(placed.text, ids, add_special_tokens=False)
    edit = ClearToolUses(trigger_tokens=None, keep=keep)
    spans = [places.within(place.start, place.stop) for place in placed.places]
    edited = cleared(EditedPrompt(placed.text, tokens, ()), spans, found, placed, [edit])
    assert edited.applied[0].groups == len(edited.drops) == steps - keep
    return list(tokens), tuple(edited.drops)


def test_each_edited_turn_finds_the_one_before(tokenizer: Tokenizer) -> None:
    """In a real engine's tree: behind each edit all is found but what is new, and only the first edit meets KV of
    a turn that made none."""
    controller, keep, before = Controller(), 2, 0
    for steps in range(keep + 1, 9):
        tokens, drops = grown(tokenizer, steps, keep)
        seen = len(tokens) - sum(stop - start for start, stop in drops)
        if not before:
            controller.run(tokens, 1)
            before = len(tokens)
        predicted, found, _ = controller.run(tokens, 1, RouteRequest(b"", drops=drops))
        assert found - CHUNK <= predicted.cached_tokens <= found + CHUNK, "routers see it, and route there"
        new = len(tokens) - before
        assert found >= seen - new - 2 * CHUNK, (steps, found, seen, new)
        assert found > 0.4 * seen
        before = len(tokens)


# -- names

SIZE = 4
IDENTITY = KvIdentity(b"model", "float32", SIZE)


def looked_up(tokens: list[int], drops: tuple[tuple[int, int], ...]) -> tuple[set[bytes], set[bytes]]:
    """The names under which a request may find KV, and those of what it computes behind its cut."""
    names = prompt_names(RouteRequest(pack_int32(tokens), drops=drops), IDENTITY)
    found = {name for chain in names.chains for name in chain.names}
    if names.kept is None:
        return found, set()
    behind: set[bytes] = set()
    for count in range(names.kept.first, len(names.kept.names) + 1):
        behind.update(names.kept.moved(count)[count:])
    return found | behind, behind


@pytest.mark.parametrize("seed", seeds(1))
def test_kv_behind_an_edit_is_found_by_the_same_edit_only(seed: int) -> None:
    """10,000 edits. What is computed behind a cut may only be found by requests with the very same cut, over
    histories that agree as far as the chunk goes."""
    draw = random.Random(seed)
    owner: dict[bytes, tuple[Any, ...]] = {}
    finders: list[tuple[list[int], tuple[tuple[int, int], ...], set[bytes]]] = []
    shared = 0
    for _ in range(500):
        history = [draw.randint(0, 2) for _ in range(draw.randint(8, 40))]
        drops: tuple[tuple[int, int], ...] = ()
        for number in range(20):
            tokens = history[: draw.randint(6, len(history))]
            if number % 4 == 0:
                tokens = [*tokens, *(draw.randint(0, 2) for _ in range(8))]
            if draw.random() < 0.6 or (drops and drops[-1][1] >= len(tokens)):
                ends = sorted(draw.choices(range(len(tokens)), k=2 * draw.randint(0, 3)))
                drops = tuple(merge_spans(zip(ends[::2], ends[1::2], strict=True)))
            found, behind = looked_up(tokens, drops)
            key = (drops, tuple(tokens[: drops[-1][1]])) if drops else ()
            for name in behind:
                shared += name in owner
                assert owner.setdefault(name, key) == key
            finders.append((tokens, drops, found))
    assert shared > 1000, "requests with the same edit do find it"
    for tokens, drops, found in finders:
        for name in found & owner.keys():
            theirs, begun = owner[name]
            assert drops == theirs, "only a request that made the edit finds what is behind it"
            assert tuple(tokens[: len(begun)]) == begun
