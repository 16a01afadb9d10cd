"""Translate the conversation of `/v1/messages` into the messages of a chat completion. Pure.

Consecutive turns of one role become one, as in Anthropic's API. `thinking` blocks become the message's thought,
which templates show or leave out. Documents and search results become text. What only Anthropic's own servers can
make use of (tools that they run and their results, thoughts that they have encrypted) is left out, and named in
the `warnings` of the answer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Any, Final

from trunkline.router.errors import bad_value, unsupported
from trunkline.router.text.document_marks import DocumentMarks
from trunkline.router.tools.functions import FunctionTool
from trunkline.router.tools.plan import (
    Choice,
    check_functions,
    named,
    read_function,
    required,
)

Message = dict[str, Any]
ROLES: Final = ("user", "assistant", "system")
_ALLOWED: Final = {
    "user": "text, document, search_result, tool_result",
    "assistant": "text, tool_use, thinking",
    "system": "text",
}
"""The blocks that messages of a role may have, for people."""
_FOREIGN: Final = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload", "tool_reference")
_HIDDEN_MARK: Final = "tl_"
"""Beginning of a signature that contains the thought itself."""


class Warnings:
    """What of a request has no effect, in words, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Add a warning, unless it is there already."""
        if text not in self.texts:
            self.texts.append(text)


def system_text(system: Any, warnings: Warnings) -> str:
    """Return the text of `system`.

    Raises:
        ApiError: 400, naming the place of the error (`system[0]`).
    """
    return "" if system is None else _text_of(system, "system", warnings, only_text=True)


def with_marks(turns: list[Any], marks: DocumentMarks | None, warnings: Warnings) -> list[Any]:
    """Return `messages` with marks around the documents and search results before the first answer, which become
    blocks of text.

    Raises:
        ApiError: As in `turn_messages`.
    """
    if marks is None:
        return turns
    marked = list(turns)
    for index, turn in enumerate(turns):
        content = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(turn, dict) and turn.get("role") == "assistant":
            break
        if not isinstance(content, list) or turn.get("role") != "user":
            continue
        blocks = _blocks(content, f"messages[{index}].content")
        places = [f"messages[{index}].content[{place}]" for place in range(len(blocks))]
        shown = [
            {**block, "type": "text", "text": marks.around(_text_in(block, place, warnings))}
            if block["type"] in _TEXTS
            else block
            for block, place in zip(blocks, places, strict=True)
        ]
        marked[index] = {**turn, "content": shown}
    return marked


def turn_messages(role: str, content: Any, path: str, warnings: Warnings) -> list[Message]:
    """Translate a turn, a message for each block.

    Raises:
        ApiError: 400, naming the place of the error below `path`.
    """
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    messages: list[Message] = []
    for index, block in enumerate(_blocks(content, path)):
        place = f"{path}[{index}]"
        kind = block["type"]
        if kind == "text" or (role == "user" and kind in _TEXTS):
            messages.append({"role": role, "content": _text_in(block, place, warnings)})
        elif kind == "tool_use" and role == "assistant":
            messages.append({"role": role, "content": "", "tool_calls": [_call(block, place)]})
        elif kind == "tool_result" and role == "user":
            messages.append(_result(block, place, warnings))
        elif kind == "thinking" and role == "assistant":
            messages.append({"role": role, "content": "", "reasoning_content": _thought(block, place)})
        elif _is_foreign(kind):
            warnings.add(f"blocks of type {kind[:60]!r} are not shown to the model")
        else:
            raise unsupported(
                f"{place}.type",
                f"blocks of type {kind[:40]!r} are not supported in a {role} message, only {_ALLOWED[role]}",
            )
    return messages or [{"role": role, "content": ""}]


def _is_foreign(kind: str) -> bool:
    """Return whether only Anthropic's own servers can make use of a block."""
    return kind in _FOREIGN or kind.endswith("_tool_result")


def _thought(block: dict[str, Any], path: str) -> str:
    """Return the text of a thinking block; if it was not shown, it is in the signature. Signatures are not
    checked: a thought is text for the model like any other."""
    text, signature = _string(block, "thinking", path), block.get("signature")
    if text or not isinstance(signature, str) or not signature.startswith(_HIDDEN_MARK):
        return text
    try:
        return base64.b64decode(signature[len(_HIDDEN_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def signature_of(thought: str, *, hidden: bool) -> str:
    """Return the signature of a thinking block: a digest of its text or, if the block does not show its text
    (`hidden`), the text in base64, so that a client that sends the block back sends its text."""
    content = thought.encode("utf-8", "replace")
    if hidden:
        return _HIDDEN_MARK + base64.b64encode(content).decode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


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


def _result(block: dict[str, Any], path: str, warnings: Warnings) -> Message:
    content = block.get("content")
    text = "" if content is None else _text_of(content, f"{path}.content", warnings)
    if block.get("is_error") is True:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", path), "content": text}


def _text_of(content: Any, path: str, warnings: Warnings, *, only_text: bool = False) -> str:
    """Return a string, or the text of blocks joined by line ends. `only_text`: no documents are allowed."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(_blocks(content, path)):
        kind, place = block["type"], f"{path}[{index}]"
        if kind == "text" or (kind in _TEXTS and not only_text):
            texts.append(_text_in(block, place, warnings))
        elif _is_foreign(kind) and not only_text:
            warnings.add(f"blocks of type {kind[:60]!r} are not shown to the model")
        else:
            allowed = "text" if only_text else ", ".join(("text", *_TEXTS))
            raise unsupported(
                f"{place}.type", f"blocks of type {kind[:40]!r} are not supported here, only {allowed}"
            )
    return "\n".join(texts)


_TEXTS: Final = ("document", "search_result")
"""Blocks that become text."""


def _text_in(block: dict[str, Any], path: str, warnings: Warnings) -> str:
    """Return a block of text, or a document or search result as text."""
    if block["type"] == "text":
        return _string(block, "text", path)
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        warnings.add("answers have no citations")
    if block["type"] == "search_result":
        text = _text_of(block.get("content"), f"{path}.content", warnings, only_text=True)
        return _marked("search_result", ("title", "source"), block, text, path)
    return _marked("document", ("title", "context"), block, _document(block.get("source"), path, warnings), path)


def _document(source: Any, path: str, warnings: Warnings) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(kind, str):
        raise bad_value(f"{path}.source", f"`{path}.source` must be an object with a `type`")
    if kind == "text":
        return _string(source, "data", f"{path}.source")
    if kind == "content":
        return _text_of(source.get("content"), f"{path}.source.content", warnings, only_text=True)
    form = source.get("media_type")
    what = f"{kind[:40]!r} ({form[:40]})" if isinstance(form, str) else repr(kind[:40])
    raise unsupported(
        f"{path}.source.type",
        f"documents with a source of type {what} are not supported, only text and content; send the text of a PDF",
    )


def _marked(tag: str, names: tuple[str, ...], block: dict[str, Any], text: str, path: str) -> str:
    """Return a text between tags, behind some fields of its block."""
    given = [(name, _string(block, name, path)) for name in names if block.get(name) is not None]
    fields = [f"<{name}>{value}</{name}>" for name, value in given]
    return "\n".join([f"<{tag}>", *fields, text, f"</{tag}>"])


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


def cache_lifetime(*parts: Any) -> str | None:
    """Return the longest lifetime that `cache_control` asks for anywhere, "5m" or "1h"; None: it stands nowhere.

    Args:
        parts: The request's `system`, `tools`, messages and so on, as they were sent.
    """
    found = None
    todo = list(parts)
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            mark = part.get("cache_control")
            if isinstance(mark, dict):
                found = "1h" if "1h" in (found, mark.get("ttl")) else "5m"
            todo.append(part.get("content"))
    return found


def to_functions(tools: Any, warnings: Warnings) -> list[FunctionTool]:
    """Read the functions in `tools`. Tools that Anthropic's servers or models know by their type are left out.

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
            if not isinstance(kind, str):
                raise bad_value(f"tools[{index}].type", f"`tools[{index}].type` must be a string")
            warnings.add(f"tools of type {kind[:60]!r} are not available to the model")
            continue
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
