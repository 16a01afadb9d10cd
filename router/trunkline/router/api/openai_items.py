"""Translate the `input` of `/v1/responses`, a text or items, into the messages of a chat completion. Pure.

An assistant's text and the calls right after it become one message, as the model wrote them.
"""

from __future__ import annotations

from typing import Any, Final

from trunkline.router.errors import bad_value, unsupported

_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Field that has the text, by the type of the part."""

Message = dict[str, Any]


def to_messages(given: str | list[Any], instructions: str | None) -> list[Message]:
    """Translate `input`, with `instructions` as its first message.

    Raises:
        ApiError: 400, naming the item that is wrong (`input[2].content[0]`).
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[Message], item: Any, path: str) -> None:
    if not isinstance(item, dict):
        raise bad_value(path, f"`{path}` must be an object")
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, item, path)
    elif kind == "function_call":
        call = {
            "id": _text(item, "call_id", path),
            "type": "function",
            "function": {"name": _text(item, "name", path), "arguments": _text(item, "arguments", path)},
        }
        last = messages[-1] if messages else None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = _text(item, "call_id", path)
        output = _content(item.get("output"), f"{path}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind == "item_reference":
        raise unsupported(f"{path}.type", "responses are not stored, so items cannot be referred to")
    else:
        name = f"{kind[:40]!r}" if isinstance(kind, str) else "this type"
        raise unsupported(
            f"{path}.type", f"items of {name} are not supported, only message, function_call, function_call_output"
        )


def _add_message(messages: list[Message], item: dict[str, Any], path: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_value(f"{path}.role", f"`{path}.role` must be one of {', '.join(_ROLES)}")
    content = _content(item.get("content"), f"{path}.content")
    role = "system" if role == "developer" else role
    # Most templates take a single system message at the beginning, so leading system messages become one.
    if role == "system" and messages and all(message["role"] == "system" for message in messages):
        messages[-1]["content"] += f"\n\n{content}"
    else:
        messages.append({"role": role, "content": content})


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        code = "missing_required_parameter" if value is None else None
        raise bad_value(path, f"`{path}` must be a string or a list of text parts", code=code)
    texts = []
    for index, part in enumerate(value):
        place = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise bad_value(place, f'`{place}` must be an object like {{"type": "input_text", "text": "…"}}')
        if kind not in _TEXT_PARTS:
            raise unsupported(f"{place}.type", f"parts of type {kind[:40]!r} are not supported, only text")
        texts.append(_text(part, _TEXT_PARTS[kind], place))
    return "\n".join(texts)


def _text(fields: dict[str, Any], name: str, path: str) -> str:
    value = fields.get(name)
    if value is None:
        raise bad_value(f"{path}.{name}", f"`{path}.{name}` is required", code="missing_required_parameter")
    if not isinstance(value, str):
        raise bad_value(f"{path}.{name}", f"`{path}.{name}` must be a string")
    return value
