"""Translate the conversation of `/api/chat` into the messages of a chat completion. Pure.

Ollama's calls need no ids, and its results need only the name of their tool: a call without an id gets one from
its place in the conversation, and a result belongs to the first call of its tool that has none yet. A result
without any call before it is what the user says.
"""

from __future__ import annotations

import json
from typing import Any, Final

from trunkline.router.errors import bad_value, unsupported

Message = dict[str, Any]
_ROLES: Final = ("system", "user", "assistant", "tool")


def to_messages(turns: list[Any]) -> list[Message]:
    """Translate `messages`.

    Raises:
        ApiError: 400, naming the place of the error (`messages[2].tool_calls[0]`).
    """
    waiting: list[tuple[str, str]] = []
    count = 0
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        path = f"messages[{index}]"
        role = turn.get("role") if isinstance(turn, dict) else None
        if role not in _ROLES:
            raise bad_value(f"{path}.role", f"`{path}.role` must be one of {', '.join(_ROLES)}")
        if turn.get("images"):
            raise unsupported(f"{path}.images", "the served models read text only, so images are not supported")
        content = turn.get("content")
        if content is not None and not isinstance(content, str):
            raise bad_value(f"{path}.content", f"`{path}.content` must be a string")
        message: Message = {"role": role, "content": content or ""}
        if role == "assistant":
            calls = _calls(turn.get("tool_calls"), f"{path}.tool_calls", count)
            count += len(calls)
            waiting += [(call["id"], call["function"]["name"]) for call in calls]
            message |= {"tool_calls": calls} if calls else {}
            message |= _thought(turn.get("thinking"), f"{path}.thinking")
        elif role == "tool" and not waiting and not turn.get("tool_call_id"):
            # Some clients leave out the calls, and Ollama takes such results.
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif role == "tool":
            message["tool_call_id"] = _answered(turn, waiting, path)
        messages.append(message)
    return messages


def _thought(thought: Any, path: str) -> Message:
    if thought is not None and not isinstance(thought, str):
        raise bad_value(path, f"`{path}` must be a string")
    return {"reasoning_content": thought} if thought else {}


def _calls(calls: Any, path: str, count: int) -> list[Message]:
    """Translate an assistant's calls. `count`: number of calls before them."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise bad_value(path, f"`{path}` must be a list")
    translated = []
    for index, call in enumerate(calls):
        place = f"{path}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise bad_value(place, f"`{place}` must have a `function` with a `name`")
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            # with the spaces that models write, for the prefix cache
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str | None):
            raise bad_value(place, f"`{place}.function.arguments` must be an object")
        given = call.get("id")
        call_id = given if isinstance(given, str) and given else f"call_{count + index}"
        translated.append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
        )
    return translated


def _answered(turn: Message, waiting: list[tuple[str, str]], path: str) -> str:
    """Return the id of the call that a tool's message answers, and take it out of those that wait."""
    given = turn.get("tool_call_id")
    if isinstance(given, str) and given:
        waiting[:] = [call for call in waiting if call[0] != given]
        return given
    name = turn.get("tool_name") or turn.get("name")
    found = next((call for call in waiting if name in (None, "", call[1])), None)
    if found is None:
        raise bad_value(path, f"`{path}` is the result of a tool, but answers no call made before it")
    waiting.remove(found)
    return found[0]
