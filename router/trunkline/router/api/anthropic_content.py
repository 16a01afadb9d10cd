"""Translate the conversation of `/v1/messages` into the messages of a chat completion. Pure.

Consecutive turns of one role become one, as in Anthropic's API. `thinking` blocks become the message's thought,
which templates show or leave out; `redacted_thinking` blocks of other models are left out.
"""

from __future__ import annotations

import json
from typing import Any

from trunkline.router.errors import bad_value, unsupported
from trunkline.router.tools.functions import FunctionTool
from trunkline.router.tools.plan import (
    Choice,
    check_functions,
    named,
    read_function,
    required,
)

Message = dict[str, Any]


def to_messages(system: Any, turns: list[Any]) -> list[Message]:
    """Translate `system` and `messages`.

    Raises:
        ApiError: 400, naming the place of the error (`messages[2].content[0]`).
    """
    messages: list[Message] = []
    if system is not None:
        text = _text_of(system, "system")
        if text:
            messages.append({"role": "system", "content": text})
    if not turns:
        raise bad_value("messages", "`messages` must not be empty")
    for index, turn in enumerate(turns):
        path = f"messages[{index}]"
        role = turn.get("role") if isinstance(turn, dict) else None
        if role not in ("user", "assistant"):
            raise bad_value(f"{path}.role", f'`{path}.role` must be "user" or "assistant"')
        for message in _turn(role, turn.get("content"), f"{path}.content"):
            _append(messages, message)
    if messages[-1]["role"] == "assistant":
        raise unsupported(
            "messages", "the last message is the assistant's; continuing an answer that has begun is not supported"
        )
    return messages


def _append(messages: list[Message], message: Message) -> None:
    last: Message = messages[-1] if messages else {"role": ""}
    if message["role"] == "tool" or last["role"] != message["role"]:
        messages.append(message)
        return
    last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
    if "reasoning_content" in message:
        thoughts = (last.get("reasoning_content", ""), message["reasoning_content"])
        last["reasoning_content"] = "\n".join(thought for thought in thoughts if thought)
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]


def _turn(role: str, content: Any, path: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    messages: list[Message] = []
    for index, block in enumerate(_blocks(content, path)):
        place = f"{path}[{index}]"
        kind = block["type"]
        if kind == "text":
            messages.append({"role": role, "content": _string(block, "text", place)})
        elif kind == "tool_use" and role == "assistant":
            messages.append({"role": role, "content": "", "tool_calls": [_call(block, place)]})
        elif kind == "tool_result" and role == "user":
            messages.append(_result(block, place))
        elif kind == "thinking" and role == "assistant":
            thought = _string(block, "thinking", place)
            messages.append({"role": role, "content": "", "reasoning_content": thought})
        elif not (kind == "redacted_thinking" and role == "assistant"):
            allowed = "text, tool_use, thinking" if role == "assistant" else "text, tool_result"
            raise unsupported(
                f"{place}.type",
                f"blocks of type {kind[:40]!r} are not supported in a {role} message, only {allowed}",
            )
    return messages or [{"role": role, "content": ""}]


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad_value(f"{path}.input", f"`{path}.input` must be an object")
    text = json.dumps(arguments, ensure_ascii=False)  # with the spaces that models write, for the prefix cache
    return {
        "id": _string(block, "id", path),
        "type": "function",
        "function": {"name": _string(block, "name", path), "arguments": text},
    }


def _result(block: dict[str, Any], path: str) -> Message:
    content = block.get("content")
    text = "" if content is None else _text_of(content, f"{path}.content")
    if block.get("is_error") is True:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", path), "content": text}


def _text_of(content: Any, path: str) -> str:
    """Return a string, or the text of text blocks joined by line ends."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(_blocks(content, path)):
        if block["type"] != "text":
            raise unsupported(
                f"{path}[{index}].type", f"blocks of type {block['type'][:40]!r} are not supported here, only text"
            )
        texts.append(_string(block, "text", f"{path}[{index}]"))
    return "\n".join(texts)


def _blocks(content: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        code = "missing_required_parameter" if content is None else None
        raise bad_value(path, f"`{path}` must be a string or a list of blocks", code=code)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            place = f"{path}[{index}]"
            raise bad_value(place, f'`{place}` must be an object like {{"type": "text", "text": "…"}}')
    return content


def _string(block: dict[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_value(f"{path}.{name}", f"`{path}.{name}` must be a string")
    return value


def to_functions(tools: Any) -> list[FunctionTool]:
    """Read the functions in `tools`.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_value("tools", "`tools` must be a list")
    functions = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is not None and kind != "custom":
            raise unsupported(
                f"tools[{index}].type", f"tools of type {str(kind)[:40]!r} are not supported, only custom"
            )
        functions.append(read_function(tool, f"tools[{index}]", schema_field="input_schema"))
    check_functions(functions)
    return functions


def to_choice(choice: Any, functions: list[FunctionTool]) -> tuple[Choice, bool | None]:
    """Return the choice in `tool_choice`, and whether several calls are allowed (None: `tool_choice` does not
    say).

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    if choice is None:
        return Choice("auto" if functions else "none"), None
    kind = choice.get("type") if isinstance(choice, dict) else None
    single = choice.get("disable_parallel_tool_use") if isinstance(choice, dict) else None
    if single is not None and not isinstance(single, bool):
        param = "tool_choice.disable_parallel_tool_use"
        raise bad_value(param, f"`{param}` must be true or false")
    parallel = None if single is None else not single
    if kind == "auto":
        return Choice("auto" if functions else "none"), parallel
    if kind == "none":
        return Choice("none"), parallel
    if kind == "any":
        return required(functions), parallel
    if kind == "tool" and isinstance(choice.get("name"), str):
        return named(choice["name"], functions), False
    raise bad_value(
        "tool_choice", '`tool_choice` must have the type "auto", "any", "none", or "tool" with a `name`'
    )
