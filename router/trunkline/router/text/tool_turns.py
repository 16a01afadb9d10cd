"""Prepare conversations with tool calls for chat templates, in the format in which the model writes calls.

Conversations come in OpenAI's form: an assistant's `tool_calls`, whose arguments are JSON texts, and messages with
role "tool". Templates that support tools need the arguments as objects, some of them as text (`Arguments` is
both). For other templates, the system message describes the functions, and calls and results become text in
ordinary messages. This way tools work with every model that has a chat template.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic_core import from_json

from trunkline.router.errors import PromptError
from trunkline.router.text.tool_styles import ToolStyle, calls_text

Turn = dict[str, Any]
"""A message in the form that chat templates expect."""
_MISTRAL_ID: Final = re.compile(r"[A-Za-z0-9]{9}")


class TurnError(PromptError):
    """The result of a tool answers no call."""


class Arguments(dict[str, Any]):
    """A call's arguments: a dict for templates that use `tojson`, and their JSON text for templates that join
    texts."""

    def __init__(self, fields: Mapping[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def for_tool_template(turns: Iterable[Mapping[str, Any]], style: ToolStyle) -> list[Turn]:
    """Return a conversation for a template that supports tools: arguments as objects, results with their function.

    Raises:
        TurnError: A result answers no call that was made before it.
    """
    names: dict[str, str] = {}
    ids: dict[str, str] = {}
    count = 0
    result: list[Turn] = []
    for turn in turns:
        ready = dict(turn)
        if turn.get("tool_calls"):
            for call in turn["tool_calls"]:
                name, given = call["function"]["name"], call["id"]
                names[given], ids[given] = name, _id(given, style, name, count)
                count += 1
            ready["tool_calls"] = [_call(call, ids[call["id"]]) for call in turn["tool_calls"]]
            if style.name == "hermes" and isinstance(turn.get("content"), str):
                # The text of an answer ends with the line end before its first call. Templates write it, too, and
                # with two of them the prompt would be another one than the model has seen.
                ready["content"] = turn["content"].removesuffix("\n")
        if turn["role"] == "tool":
            call_id = turn.get("tool_call_id", "")
            if call_id not in names:
                raise TurnError(f"the tool result with id {call_id[:80]!r} answers no call made before it")
            ready["tool_call_id"] = ids[call_id]
            ready.setdefault("name", names[call_id])
        result.append(ready)
    return result


def _call(call: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    function = call["function"]
    arguments = _arguments(function["arguments"])
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _arguments(text: str) -> Arguments | str:
    """Parse a call's arguments. Text that is no JSON object stays text: the model may have been cut off."""
    try:
        fields = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    return Arguments(fields, text) if isinstance(fields, dict) else text


def _id(call_id: str, style: ToolStyle, name: str, number: int) -> str:
    """Return the id of a call in the prompt. Mistral's templates refuse ids other than nine letters and digits;
    those of numbered forms write the id in place of the function's name."""
    if style.form.numbered:
        return f"functions.{name}:{number}"
    if style.name != "mistral" or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def for_plain_template(
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    style: ToolStyle,
    *,
    system: bool,
) -> list[Turn]:
    """Return a conversation for a template that does not support tools.

    Args:
        turns: Messages as `for_tool_template` returns them.
        tools: Functions to describe.
        style: The format in which the model is asked to write calls.
        system: Whether the description goes into the system message; else into the user's first message.
    """
    result: list[Turn] = []
    after_result = False
    for turn in turns:
        content = turn["content"] or ""
        if turn["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        elif turn.get("tool_calls"):
            calls = [call["function"] for call in turn["tool_calls"]]
            text = calls_text(style, [(call["name"], str(call["arguments"])) for call in calls])
            content = f"{content}\n{text}" if content else text
        role = "user" if turn["role"] == "tool" else turn["role"]
        if after_result and role == "user":  # many templates insist on alternating roles
            result[-1]["content"] += "\n" + content
        else:
            result.append({"role": role, "content": content})
        after_result = role == "user" and (turn["role"] == "tool" or after_result)
    if tools:
        _describe(result, preamble(tools, style), "system" if system else "user")
    return result


def _describe(turns: list[Turn], text: str, role: str) -> None:
    place = next((turn for turn in turns if turn["role"] == role), None)
    if place is not None:
        place["content"] = f"{place['content']}\n\n{text}" if role == "system" else f"{text}\n\n{place['content']}"
    else:
        turns.insert(0, {"role": role, "content": text})


def preamble(tools: Sequence[Mapping[str, Any]], style: ToolStyle) -> str:
    """Return the description of tools for a model whose template does not support them."""
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = calls_text(style, [("function_name", '{"parameter_name": "value"}')])
    return (
        "You can call functions to help with the user's request. These are their signatures:\n"
        f"<tools>\n{described}\n</tools>\n"
        "To call a function, write its name and its arguments as JSON, exactly in this form:\n"
        f"{example}"
    )
