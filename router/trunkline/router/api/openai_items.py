"""The form of `/v1/responses`: its request, the input as messages of a chat, and the items of the answer. Pure.

An assistant's text and the calls right after it become one message, as the model wrote them. What is stored of a
response or a conversation are its items.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.router.api.blocks import Block
from trunkline.router.errors import ApiError, bad_value, not_found, unsupported
from trunkline.router.jobs.generation_parameters import DialogParameters
from trunkline.router.jobs.known_parameters import KNOWN
from trunkline.router.jobs.parameter_table import Endpoint, row
from trunkline.router.jobs.parameters import Count, ToolChoice

Object = dict[str, Any]


def _input(value: Any) -> str | list[Any]:
    if not isinstance(value, str | list):
        raise PydanticCustomError("input", "must be a string or a list of items")
    if not value:
        raise PydanticCustomError("input", "must not be empty")
    return value


def _conversation(value: Any) -> str:
    """Return the id of a conversation, which is given alone or as the only field of an object."""
    found = value.get("id") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise PydanticCustomError("conversation", 'must be the id of a conversation, or {"id": …}')
    return found


def _include(value: Any) -> Any:
    if isinstance(value, list) and "message.output_text.logprobs" in value:
        raise PydanticCustomError("include", "log-probabilities are not supported here; use /v1/chat/completions")
    return value


_STRUCTURED: Final = "see [structured output](#structured-output)"
_ID: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    ]
}


class TextFormat(BaseModel):
    """The field `text.format`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(BaseModel):
    """The field `text`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Not applied: templates know no such switch. Coding agents always send it, so the answer says it."""


class Reasoning(BaseModel):
    """The field `reasoning`. There are no summaries: the whole thought is the content of its item."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    max_tokens: Count | None = None
    """Largest number of tokens of the thought."""


class ResponsesRequest(DialogParameters):
    """The request `POST /v1/responses`."""

    input: Annotated[Any, BeforeValidator(_input, json_schema_input_type=str | list[dict[str, Any]])] = row(
        "a string, or a list of items: messages (`user`, `assistant`, `system`, `developer`; text parts), "
        "`reasoning`, `function_call`, `function_call_output`",
        "required",
        "what is answered",
        value=...,
    )
    instructions: str | None = row(
        "a string",
        "none",
        "the system message, joined with those at the beginning of the history or of `input`. It belongs to this "
        "request alone: a response that continues this one has its own",
    )
    max_output_tokens: Count | None = row(
        "1 to what the context leaves",
        "what the context leaves",
        "more than is left: 400",
        also=("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict"),
    )
    text: TextOptions | None = row(
        "`format`: `text`, `json_object`, `json_schema` with a `schema`; `verbosity`", "free text", _STRUCTURED
    )
    tools: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = row(
        "functions in the flat form", "none", "see [tools](#tools). `strict` counts only if it is true"
    )
    tool_choice: ToolChoice | None = row("", "auto", "see [tools](#tools)")
    parallel_tool_calls: bool | None = row("boolean", "", "see [tools](#tools)")
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = row(
        "an object of at most 16 strings", "none", "given back"
    )
    store: bool | None = row(
        "boolean", "if that is possible", "whether the response is stored; the answer says it"
    )
    previous_response_id: str | None = row(
        "a stored response",
        "none",
        "its history goes on here; any number of requests may continue the same one, also at once",
    )
    conversation: Annotated[str | None, BeforeValidator(_conversation), WithJsonSchema(_ID)] = row(
        'the id of a [conversation](#conversations), or `{"id": ID}`', "none", "not with `previous_response_id`"
    )
    background: bool | None = row(
        "boolean", "false", "the answer comes at once as `queued`; see [below](#responses-in-the-background)"
    )
    include: Annotated[Any, BeforeValidator(_include)] = row("a list", "none", "what the answer should also have")
    reasoning: Reasoning | None = row(
        "an object with `effort` and `max_tokens`",
        "the template's",
        "see [reasoning](#reasoning). `summary` has no effect",
    )

    @property
    def warnings(self) -> list[str] | None:
        """As in `RequestBody`."""
        found = super().warnings or []
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            found = ["`text.verbosity` is not applied", *found]
        return found or None

    @model_validator(mode="after")
    def _check_history(self) -> ResponsesRequest:
        if self.conversation is not None and self.previous_response_id is not None:
            raise PydanticCustomError(
                "conversation", "cannot be used together with `previous_response_id`", {"param": "conversation"}
            )
        return self

    def response_format(self) -> Object | None:
        """Return `text.format` as the `response_format` of a chat completion.

        Raises:
            ApiError: 400, a schema is missing.
        """
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "json_object"}
        if form.schema_ is None:
            raise bad_value(
                "text.format.schema", "`text.format.schema` is required", code="missing_required_parameter"
            )
        return {"type": "json_schema", "json_schema": {"name": form.name or "answer", "schema": form.schema_}}


RESPONSES: Final = Endpoint(
    "responses",
    ResponsesRequest,
    KNOWN,
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    },
)


def text_part(text: str) -> Object:
    """Return the only part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_part(text: str) -> Object:
    """Return the only part of a reasoning item's content."""
    return {"type": "reasoning_text", "text": text}


def thought_of(item: Object) -> str:
    """Return the text of a reasoning item: its content or, if there is none, what this server once wrote into
    `encrypted_content`. Items of other servers may have neither that it can read."""
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    found = "\n".join([text for text in texts if isinstance(text, str)])
    sealed = item.get("encrypted_content")
    if found or not isinstance(sealed, str):
        return found
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except ValueError:
        return ""


def output_item(block: Block, item_id: str, status: str) -> Object:
    """Return a block as an item of `output`, without content if its status is "in_progress"."""
    if block.is_thought:
        begun = status == "in_progress"
        sealed = None if begun else base64.b64encode(block.text.encode("utf-8", "replace")).decode()
        parts = [] if begun else [thought_part(block.text)]
        return {
            "type": "reasoning",
            "id": item_id,
            "summary": [],
            "content": parts,
            "encrypted_content": sealed,
            "status": status,
        }
    if block.is_call:
        return {
            "type": "function_call",
            "id": item_id,
            "call_id": block.call_id,
            "name": block.name,
            "arguments": block.text,
            "status": status,
        }
    content = [] if status == "in_progress" else [text_part(block.text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def usage_object(prompt_tokens: int, cached_tokens: int, output_tokens: int, thoughts: int) -> Object:
    """Return token counts as the field `usage`."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": prompt_tokens + output_tokens,
    }


def error_object(error: ApiError) -> Object:
    """Return the field `error` of a failed response."""
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}


_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""For each type of a part of a message, the name of the field that has its text."""

Message = dict[str, Any]


def to_messages(given: str | list[Any], instructions: str | None, history: Sequence[Object] = ()) -> list[Message]:
    """Translate `input`, with `instructions` as its first message.

    Args:
        history: stored items that precede the input.

    Raises:
        ApiError: 400, naming the item that is wrong (`input[2].content[0]`).
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in history:
        _add(messages, item, "history")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    return messages


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
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _referred(stored: dict[str, Object], reference: Object, path: str) -> Object:
    item_id = _text(reference, "id", path)
    if item_id not in stored:
        raise not_found(
            f"{path}.id",
            f"item {item_id[:80]!r} is not among the items of the previous response or of the conversation",
            code="item_not_found",
        )
    return {name: value for name, value in stored[item_id].items() if name != "id"}


_ID_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ID_CHARACTERS_MAX: Final = 128


def to_items(given: str | list[Any], taken: Iterable[str], draw: Callable[[], str]) -> list[Object]:
    """Return a valid input (`to_messages`) as items to be stored. An item without an id, or with the id of another
    item, gets a new one.

    Args:
        taken: ids of items that are stored already.
        draw: returns another random text for each id.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    ids = set(taken)
    items = []
    for item in given:
        kind = item.get("type", "message")
        item_id = item.get("id")
        if not isinstance(item_id, str) or not 1 <= len(item_id) <= _ID_CHARACTERS_MAX or item_id in ids:
            item_id = f"{_ID_PREFIXES[kind]}_{draw()}"
        ids.add(item_id)
        status = "incomplete" if item.get("status") == "incomplete" else "completed"
        items.append({"id": item_id, "type": kind, "status": status, **_stored_fields(kind, item)})
    return items


def _stored_fields(kind: str, item: Object) -> Object:
    if kind == "message":
        return {"role": item["role"], "content": _stored_parts(item["content"], item["role"])}
    if kind == "function_call":
        return {name: item[name] for name in ("call_id", "name", "arguments")}
    if kind == "reasoning":
        return {"summary": [], "content": [thought_part(thought_of(item))]}
    output = item["output"]
    return {
        "call_id": item["call_id"],
        "output": output if isinstance(output, str) else _stored_parts(output, "tool"),
    }


def _stored_parts(content: str | list[Object], role: str) -> list[Object]:
    own = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": own, "text": content}] if isinstance(content, str) else content
    stored = []
    for part in parts:
        kind = own if part["type"] == "text" else part["type"]
        if kind == "output_text":
            stored.append(text_part(part["text"]))
        else:
            stored.append({"type": kind, _TEXT_PARTS[kind]: part[_TEXT_PARTS[kind]]})
    return stored


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
    elif kind == "reasoning":
        thought = thought_of(item)
        if thought:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif kind == "item_reference":
        raise unsupported(
            f"{path}.type", "only items of a previous response or of a conversation can be referred to"
        )
    else:
        name = f"{kind[:40]!r}" if isinstance(kind, str) else "this type"
        raise unsupported(
            f"{path}.type",
            f"items of {name} are not supported, only message, reasoning, function_call, function_call_output",
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
    elif role == "assistant" and messages and _is_thought(messages[-1]):
        messages[-1]["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _is_thought(message: Message) -> bool:
    """Return whether a message has only a thought yet, which the next item of the assistant's belongs to."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


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
