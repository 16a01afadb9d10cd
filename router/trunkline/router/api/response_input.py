"""The input of `/v1/responses`: its items as messages of a chat, and as items to be stored. Pure.

An assistant's text and the calls right after it become one message, as the model wrote them. What is stored of a
response or a conversation are its items.

Clients send back items that other servers made: a call with an id and its output become a call of a function of
that name and its result; what tells the model nothing is left out. An item whose type is not known is left out,
too, and named in the answer. It is refused where it would be missed: if it has a role, as messages have, or if
nothing is left of the request.

A compaction item of this cluster stands for what is before it. Of that, the model sees only the messages of users,
and of the client's instructions. So it does not matter whether a client sends the rest once more:

    instructions, user, assistant, call, output, user, compaction, rest
    └► instructions, compaction (the summary, user, user), rest
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from trunkline.router.api.input_files import file_text
from trunkline.router.api.item_types import CALL, OUTPUT, TRIGGER, is_known_type, problem_of_type
from trunkline.router.api.known_turns import TurnMemory, Turns, continuable_messages, translated
from trunkline.router.api.openai_items import Object, text_part, thought_part
from trunkline.router.errors import bad_value, not_found, unsupported
from trunkline.router.stores.seals import Seal, is_sealed
from trunkline.router.text.conversation_memory import beginning
from trunkline.router.text.document_marks import DocumentMarks
from trunkline.router.tools.response_tools import custom_arguments, function_name

_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""For each type of a part of a message, the name of the field that has its text."""
_UNSEEN: Final = ("input_image", "input_file")
"""Types of parts of a tool's output that the model cannot see. It is told so: an agent could not go on after an
error."""
SUMMARY: Final = "Summary of the conversation so far:\n"
"""What stands before the text of a compaction item in a prompt."""
NO_SEAL: Final = Seal()
_FIRST: Final = 2
"""Number of first items by which a conversation is found."""
_FOREIGN_MAX: Final = 16
"""Largest number of items of other servers that an answer names."""

Message = dict[str, Any]


class Placed(NamedTuple):
    """An item with its place in the request."""

    path: str
    """Such as `input[2]`, for errors."""
    item: Any


def to_messages(
    given: str | list[Any],
    instructions: str | None,
    history: Sequence[Object] = (),
    seal: Seal = NO_SEAL,
    marks: DocumentMarks | None = None,
    borders: list[int | None] | None = None,
    memory: TurnMemory | None = None,
    scope: bytes = b"",
) -> list[Message]:
    """Translate `input`, with `instructions` as its first message.

    Args:
        history: stored items that precede the input.
        seal: reads what this cluster has sealed.
        marks: are put around the files before the first answer.
        borders: gets for each item of `input` the number of messages before it; None where it continues the one
            before, or is not in its place because of a compaction.
        memory: translations of earlier requests; their messages must not be changed.
        scope: names the tenant, whose other requests may use the translation.

    Raises:
        ApiError: 400, naming the item that is wrong (`input[2].content[0]`).
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    head: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    items, count = [*history, *given], len(history)

    def extend(first: Turns) -> Turns | None:
        if _last_compaction(items[len(first.borders) :], seal) is not None:
            return None
        messages, starts = continuable_messages(first) or head, first.borders[:]
        for index in range(len(starts), len(items)):
            before, path = len(messages), "history" if index < count else f"input[{index - count}]"
            _add(messages, items[index], path, seal)
            starts.append(before if len(messages) > before else None)
        return first._replace(messages=messages, borders=starts)

    if marks is None:
        found = translated(items, memory, scope, ("items", instructions, seal, _begins(items)), extend)
        if found is not None:
            if borders is not None:
                borders += found.borders[count:]
            return found.messages
    return _placed_messages(head, given, history, seal, marks, borders)


def _begins(items: Sequence[Any]) -> Hashable:
    """Return what conversations that begin alike have in common: the last part of each of the first items."""
    contents = [item.get("content") if isinstance(item, dict) else None for item in items[:_FIRST]]
    last = [content[-1] if isinstance(content, list) and content else content for content in contents]
    return beginning(each.get("text") if isinstance(each, dict) else each for each in last)


def _placed_messages(
    messages: list[Message],
    given: list[Any],
    history: Sequence[Object],
    seal: Seal,
    marks: DocumentMarks | None,
    borders: list[int | None] | None,
) -> list[Message]:
    """Translate items with a compaction, or with documents that get marks, as `to_messages`, and add them to
    `messages`."""
    placed = [Placed("history", item) for item in history]
    placed += [Placed(f"input[{index}]", item) for index, item in enumerate(given)]
    marked = _with_marks(placed, marks)
    shown = _compacted(marked, seal)
    for path, item in shown:
        before = len(messages)
        _add(messages, item, path, seal)
        if borders is not None and path != "history":
            borders.append(before if len(messages) > before and shown is marked else None)
    return messages


def _with_marks(placed: list[Placed], marks: DocumentMarks | None) -> list[Placed]:
    """Return items in which files before the first answer are parts of text, with marks around them.

    Raises:
        ApiError: 400, a file is wrong.
    """
    if marks is None:
        return placed
    marked = list(placed)
    for index, (path, item) in enumerate(placed):
        if (
            not isinstance(item, dict)
            or item.get("type", "message") != "message"
            or item.get("role") == "assistant"
        ):
            break
        content = item.get("content")
        if not isinstance(content, list):
            continue
        parts = [
            {"type": "input_text", "text": marks.around(file_text(part, f"{path}.content[{place}]"))}
            if isinstance(part, dict) and part.get("type") == "input_file"
            else part
            for place, part in enumerate(content)
        ]
        marked[index] = Placed(path, {**item, "content": parts})
    return marked


def _compacted(placed: list[Placed], seal: Seal) -> list[Placed]:
    """Return items as the model sees them: those before the last compaction in the picture above, the compaction
    itself before the messages of users.

    Raises:
        ApiError: 400, an item that the model does not see is wrong.
    """
    last = _last_compaction([item for _, item in placed], seal)
    if last is None:
        return placed
    for path, item in placed[:last]:
        _add([], item, path, seal)
    lasting = [each for each in placed[:last] if is_lasting(each.item)]
    lead = next((at for at, each in enumerate(lasting) if each.item["role"] == "user"), len(lasting))
    return [*lasting[:lead], placed[last], *lasting[lead:], *placed[last + 1 :]]


def _last_compaction(items: Sequence[Any], seal: Seal) -> int | None:
    """Return the index of the last compaction item of this cluster; None: there is none."""
    for at in reversed(range(len(items))):
        item = items[at]
        if isinstance(item, dict) and item.get("type") == "compaction" and _summary(item, seal) is not None:
            return at
    return None


def _summary(item: Object, seal: Seal) -> str | None:
    return seal.unseal("compaction", item.get("encrypted_content"))


def is_lasting(item: Object) -> bool:
    """Return whether a valid item stays before a compaction: a message of the user's, or an instruction."""
    return item.get("type", "message") == "message" and item.get("role") != "assistant"


def is_compactable(items: Sequence[Object], seal: Seal) -> bool:
    """Return whether a compaction would leave out items: those behind the last one are not all messages that
    stay."""
    last = _last_compaction(items, seal)
    return not all(map(is_lasting, items if last is None else items[last + 1 :]))


def without_trigger(given: str | list[Any]) -> tuple[str | list[Any], bool]:
    """Return `input` without the item that asks for a compaction, and whether there is one.

    Raises:
        ApiError: 400, it is not the last item.
    """
    if isinstance(given, str):
        return given, False
    places = [at for at, item in enumerate(given) if isinstance(item, dict) and item.get("type") == TRIGGER]
    if not places:
        return given, False
    if places[0] != len(given) - 1:
        raise bad_value(f"input[{places[0]}]", f"`input[{places[0]}]`: a {TRIGGER} stands at the end of `input`")
    return given[:-1], True


def has_sealed(items: str | Iterable[Any]) -> bool:
    """Return whether some item has a content that looks as if this cluster had sealed it."""
    return not isinstance(items, str) and any(
        isinstance(item, dict) and is_sealed(item.get("encrypted_content")) for item in items
    )


def foreign_items(given: str | list[Any], seal: Seal) -> list[str]:
    """Return a sentence for each item of a valid input that tells the model nothing, because another server has
    sealed it, or its type is not known."""
    told: list[str] = []
    for index, item in enumerate([] if isinstance(given, str) else given):
        kind = item.get("type", "message")
        if not is_known_type(kind):
            told.append(f"`input[{index}]` was left out: {problem_of_type(kind)}")
        if kind not in ("reasoning", "compaction") or not item.get("encrypted_content"):
            continue
        if _summary(item, seal) is None if kind == "compaction" else not thought_of(item, seal):
            told.append(f"`input[{index}]` was left out: its `encrypted_content` is not of this server")
    return told[:_FOREIGN_MAX]


def check_shown(messages: Sequence[Message], given: str | list[Any], seal: Seal) -> None:
    """Check that the model is shown something of an input.

    Raises:
        ApiError: 400, it is not; the error names what was left out.
    """
    if not messages and (told := foreign_items(given, seal)):
        raise bad_value("input", f"`input` has nothing that the model can be shown: {'; '.join(told)}")


def thought_of(item: Object, seal: Seal) -> str:
    """Return the text of a reasoning item: its content or, if there is none, what this cluster once sealed; "" for
    items of other servers that have neither."""
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    content = "\n".join([text for text in texts if isinstance(text, str)])
    return content or seal.unseal("reasoning", item.get("encrypted_content")) or ""


def resolved(given: str | list[Any], history: Iterable[Object]) -> str | list[Any]:
    """Return `input` with the stored items that its references name in their places.

    Raises:
        ApiError: 404, an item is not in `history`.
    """
    if isinstance(given, str) or not any(_is_reference(item) for item in given):
        return given
    stored = {item["id"]: item for item in history}
    return [
        _referred(stored, item, f"input[{index}]") if _is_reference(item) else item
        for index, item in enumerate(given)
    ]


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and (item.get("type") == "item_reference" or set(item) == {"id"})


def _referred(stored: dict[str, Object], reference: Object, path: str) -> Object:
    item_id = _text(reference, "id", path)
    if item_id not in stored:
        raise not_found(
            f"{path}.id",
            f"item {item_id[:80]!r} is not among the items of the previous response or of the conversation",
            code="item_not_found",
        )
    return {name: value for name, value in stored[item_id].items() if name != "id"}


_ID_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
_ID_CHARACTERS_MAX: Final = 128


def to_items(
    given: str | list[Any], taken: Iterable[str], draw: Callable[[], str], seal: Seal = NO_SEAL
) -> list[Object]:
    """Return a valid input (`to_messages`) as items to be stored. An item without an id, or with the id of another
    item, gets a new one.

    Args:
        taken: ids of items that are stored already.
        draw: returns another random text for each id.
        seal: as in `to_messages`.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    ids = set(taken)
    items = []
    for item in given:
        kind = item.get("type", "message")
        item_id = item.get("id")
        if not isinstance(item_id, str) or not 1 <= len(item_id) <= _ID_CHARACTERS_MAX or item_id in ids:
            item_id = f"{_ID_PREFIXES.get(kind, 'item')}_{draw()}"
        ids.add(item_id)
        status = "incomplete" if item.get("status") == "incomplete" else "completed"
        items.append({"id": item_id, "type": kind, "status": status, **_stored_fields(kind, item, seal)})
    return items


def _stored_fields(kind: str, item: Object, seal: Seal) -> Object:
    namespace = {"namespace": item["namespace"]} if isinstance(item.get("namespace"), str) else {}
    if kind == "message":
        return {"role": item["role"], "content": _stored_parts(item["content"], item["role"])}
    if kind == "function_call":
        return {**{name: item[name] for name in ("call_id", "name", "arguments")}, **namespace}
    if kind == "custom_tool_call":
        return {**{name: item[name] for name in ("call_id", "name", "input")}, **namespace}
    if kind == "reasoning":
        return {"summary": [], "content": [thought_part(thought_of(item, seal))]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item["output"]
        return {
            "call_id": item["call_id"],
            "output": output if isinstance(output, str) else _stored_parts(output, "tool"),
        }
    return {name: value for name, value in item.items() if name not in ("id", "type", "status")}


def _stored_parts(content: str | list[Object], role: str) -> list[Object]:
    own = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": own, "text": content}] if isinstance(content, str) else content
    stored = []
    for part in parts:
        kind = own if part["type"] == "text" else part["type"]
        if kind == "output_text":
            stored.append(text_part(part["text"]))
        elif kind == "input_file" and role != "tool":
            stored.append({name: part[name] for name in ("type", "filename", "file_data") if name in part})
        elif kind in _UNSEEN:
            stored.append({"type": own, "text": _unseen(kind)})
        else:
            stored.append({"type": kind, _TEXT_PARTS[kind]: part[_TEXT_PARTS[kind]]})
    return stored


def _add(messages: list[Message], item: Any, path: str, seal: Seal) -> None:
    if not isinstance(item, dict):
        raise bad_value(path, f"`{path}` must be an object")
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise bad_value(f"{path}.type", f"`{path}.type` must be a string")
    if kind == "message":
        _add_message(messages, item, path)
    elif kind in ("function_call", "custom_tool_call"):
        _add_call(messages, _text(item, "call_id", path), *_function(kind, item, path))
    elif kind == "item_reference":
        raise unsupported(
            f"{path}.type", "only items of a previous response or of a conversation can be referred to"
        )
    elif kind == "reasoning":
        thought = thought_of(item, seal)
        if thought:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif kind == "compaction":
        if (summary := _summary(item, seal)) is not None:
            messages.append({"role": "user", "content": SUMMARY + summary})
    elif kind.endswith(OUTPUT):
        call_id = _text(item, "call_id", path)
        output = _output(item.get("output"), f"{path}.output", is_known=kind in _ID_PREFIXES)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind.endswith(CALL) and isinstance(item.get("call_id"), str):
        asked = {name: value for name, value in item.items() if name not in ("id", "type", "status", "call_id")}
        arguments = json.dumps(asked, ensure_ascii=False)
        _add_call(messages, item["call_id"], function_name(kind.removesuffix(CALL)), arguments)
    elif "role" in item and not is_known_type(kind):
        raise bad_value(
            f"{path}.type", f"`{path}` has a role, which only messages have, but {problem_of_type(kind)}"
        )


def _function(kind: str, item: Object, path: str) -> tuple[str, str]:
    """Return the name and the arguments of a call's function."""
    namespace = item.get("namespace")
    name = _text(item, "name", path)
    if isinstance(namespace, str) and namespace:
        name = function_name(name, namespace)
    if kind == "custom_tool_call":
        return name, custom_arguments(_text(item, "input", path))
    return name, _text(item, "arguments", path)


def _add_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant":
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    last.setdefault("tool_calls", []).append(call)


def _add_message(messages: list[Message], item: dict[str, Any], path: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_value(f"{path}.role", f"`{path}.role` must be one of {', '.join(_ROLES)}")
    content = _content(item.get("content"), f"{path}.content")
    role = "system" if role == "developer" else role
    # Most templates take a single system message at the beginning, so leading system messages become one.
    if role == "system" and messages and all(message["role"] == "system" for message in messages):
        messages[-1]["content"] += f"\n\n{content}"
    elif role == "user" and messages and _is_summary(messages[-1]):
        messages[-1]["content"] += f"\n\n{content}"  # many templates take no two messages of a user in a row
    elif role == "assistant" and messages and _is_thought(messages[-1]):
        messages[-1]["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _is_summary(message: Message) -> bool:
    return message["role"] == "user" and str(message["content"]).startswith(SUMMARY)


def _is_thought(message: Message) -> bool:
    """Return whether a message has only a thought yet, which the next item of the assistant's belongs to."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _output(value: Any, path: str, *, is_known: bool) -> str:
    """Return a tool's output as text. `is_known`: whether its form is known; else it is shown as JSON."""
    if isinstance(value, list) and is_known:
        shown = [
            {"type": "text", "text": _unseen(part["type"])}
            if isinstance(part, dict) and part.get("type") in _UNSEEN
            else part
            for part in value
        ]
        return _content(shown, path)
    if isinstance(value, str) or is_known:
        return _content(value, path)
    return json.dumps(value, ensure_ascii=False)


def _unseen(kind: str) -> str:
    what = kind.removeprefix("input_")
    return f"[{'an' if what == 'image' else 'a'} {what}, which this model cannot see]"


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
        if kind == "input_file":
            texts.append(file_text(part, place))
            continue
        if kind not in _TEXT_PARTS:
            raise unsupported(
                f"{place}.type", f"parts of type {kind[:40]!r} are not supported, only text and files of text"
            )
        texts.append(_text(part, _TEXT_PARTS[kind], place))
    return "\n".join(texts)


def _text(fields: dict[str, Any], name: str, path: str) -> str:
    value = fields.get(name)
    if value is None:
        raise bad_value(f"{path}.{name}", f"`{path}.{name}` is required", code="missing_required_parameter")
    if not isinstance(value, str):
        raise bad_value(f"{path}.{name}", f"`{path}.{name}` must be a string")
    return value
