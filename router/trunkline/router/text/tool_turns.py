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


class ToolTurns:
    """A conversation for a template that supports tools: arguments as objects, results with their function.

    It never changes, and neither do its turns."""

    def __init__(self, style: ToolStyle) -> None:
        """Begin without a turn."""
        self.turns: list[Turn] = []
        self._style = style
        self._names: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._calls = 0

    def extended(self, turns: Iterable[Mapping[str, Any]]) -> ToolTurns:
        """Return the conversation, followed by `turns`.

        Raises:
            TurnError: A result answers no call that was made before it.
        """
        longer = ToolTurns(self._style)
        longer.turns, longer._calls = list(self.turns), self._calls
        longer._names, longer._ids = dict(self._names), dict(self._ids)
        for turn in turns:
            longer._add(turn)
        return longer

    def _add(self, turn: Mapping[str, Any]) -> None:
        ready = dict(turn)
        if turn.get("tool_calls"):
            for call in turn["tool_calls"]:
                name, given = call["function"]["name"], call["id"]
                self._names[given], self._ids[given] = name, _id(given, self._style, name, self._calls)
                self._calls += 1
            ready["tool_calls"] = [_call(call, self._ids[call["id"]]) for call in turn["tool_calls"]]
            if self._style.name == "hermes" and isinstance(turn.get("content"), str):
                # The text of an answer ends with the line end before its first call. Templates write it, too, and
                # with two of them the prompt would be another one than the model has seen.
                ready["content"] = turn["content"].removesuffix("\n")
        if turn["role"] == "tool":
            call_id = turn.get("tool_call_id", "")
            if call_id not in self._names:
                raise TurnError(f"the tool result with id {call_id[:80]!r} answers no call made before it")
            ready["tool_call_id"] = self._ids[call_id]
            ready.setdefault("name", self._names[call_id])
        self.turns.append(ready)


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


class PlainTurns:
    """A conversation for a template that does not support tools. It never changes, and neither do its turns."""

    def __init__(self, style: ToolStyle) -> None:
        """Begin without a turn. `style`: the format in which the model is asked to write calls."""
        self._style = style
        self._turns: list[Turn] = []
        self._after_result = False
        self._described: dict[bool, tuple[Turn | None, str, Turn]] = {}
        """By `system` of `described`: a turn, the description that was added to it, and the turn with it."""

    def extended(self, turns: Iterable[Mapping[str, Any]]) -> PlainTurns:
        """Return the conversation, followed by `turns`, which are as those of `ToolTurns`."""
        longer = PlainTurns(self._style)
        longer._turns, longer._after_result = list(self._turns), self._after_result
        longer._described = self._described
        for turn in turns:
            longer._add(turn)
        return longer

    def _add(self, turn: Mapping[str, Any]) -> None:
        content = turn["content"] or ""
        if turn["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        elif turn.get("tool_calls"):
            calls = [call["function"] for call in turn["tool_calls"]]
            text = calls_text(self._style, [(call["name"], str(call["arguments"])) for call in calls])
            content = f"{content}\n{text}" if content else text
        role = "user" if turn["role"] == "tool" else turn["role"]
        if self._after_result and role == "user":  # many templates insist on alternating roles
            last = self._turns[-1]
            self._turns[-1] = {**last, "content": f"{last['content']}\n{content}"}
        else:
            self._turns.append({"role": role, "content": content})
        self._after_result = role == "user" and (turn["role"] == "tool" or self._after_result)

    def described(self, tools: Sequence[Mapping[str, Any]] | None, *, system: bool) -> list[Turn]:
        """Return the conversation with a description of its tools.

        Args:
            tools: Functions to describe.
            system: Whether the description goes into the system message; else into the user's first message.
        """
        if not tools:
            return self._turns
        text, role = preamble(tools, self._style), "system" if system else "user"
        at = next((at for at, turn in enumerate(self._turns) if turn["role"] == role), None)
        plain = None if at is None else self._turns[at]
        known = self._described.get(system)
        if known is None or known[0] is not plain or known[1] != text:
            if plain is None:
                turn = {"role": role, "content": text}
            else:
                parts = (plain["content"], text) if system else (text, plain["content"])
                turn = {**plain, "content": "\n\n".join(parts)}
            known = self._described[system] = (plain, text, turn)
        if at is None:
            return [known[2], *self._turns]
        return [*self._turns[:at], known[2], *self._turns[at + 1 :]]


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
