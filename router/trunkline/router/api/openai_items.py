"""The form of `/v1/responses`: its request, and the items of the answer. Pure. Its input: `response_input.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.router.api.blocks import Block
from trunkline.router.errors import ApiError, bad_value
from trunkline.router.jobs.generation_parameters import DialogParameters
from trunkline.router.jobs.known_parameters import KNOWN
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.jobs.parameter_table import Endpoint, row
from trunkline.router.jobs.parameters import Count, LogprobCount, ToolChoice
from trunkline.router.tools.response_tools import OwnTool, custom_input

Object = dict[str, Any]


def _input(value: Any) -> str | list[Any]:
    if not isinstance(value, str | list):
        raise PydanticCustomError("input", "must be a string or a list of items")
    if not value:
        raise PydanticCustomError("input", "must not be empty")
    return value


def _optional_input(value: Any) -> str | list[Any] | None:
    return None if value is None else _input(value)


def _conversation(value: Any) -> str:
    """Return the id of a conversation, which is given alone or as the only field of an object."""
    found = value.get("id") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise PydanticCustomError("conversation", 'must be the id of a conversation, or {"id": …}')
    return found


_INPUT: Final[dict[str, Any]] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
}
_STRUCTURED: Final = "see [structured output](#structured-output)"
_ID: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    ]
}


class TextFormat(LateModel):
    """The field `text.format`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(LateModel):
    """The field `text`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Not applied: templates know no such switch. Coding agents always send it, so the answer says it."""


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(LateModel):
    """The field `reasoning`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    """Whether the thought is also shown as its summary. It is the whole thought, whichever is asked for."""
    generate_summary: Summary | None = None
    """An older name of `summary`."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """Not applied: templates decide which thoughts of earlier turns they show."""
    mode: str | None = None
    """Not applied."""
    max_tokens: Count | None = None
    """Largest number of tokens of the thought."""


class ContextEdit(LateModel):
    """An entry of the field `context_management`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["compaction"]
    compact_threshold: Count | None = None
    """Tokens of the prompt above which the conversation is compacted; None: three quarters of the context."""


class ResponsesRequest(DialogParameters):
    """The request `POST /v1/responses`."""

    input: Annotated[Any, BeforeValidator(_input, json_schema_input_type=str | list[dict[str, Any]])] = row(
        "a string, or a list of items: messages (`user`, `assistant`, `system`, `developer`; parts of text, and "
        "`input_file` with text in `file_data`), "
        "`reasoning`, `function_call`, `function_call_output`, `custom_tool_call`, `custom_tool_call_output`, "
        "[items of other servers](#foreign-tools-and-items)",
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
        "functions in the flat form, custom tools, namespaces; [others](#foreign-tools-and-items)",
        "none",
        "see [tools](#tools). `strict` counts only if it is true",
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
    include: list[str] | None = row(
        "a list of texts",
        "none",
        "`message.output_text.logprobs`, `reasoning.encrypted_content`; others name what does not exist here, and "
        "have no effect",
    )
    top_logprobs: LogprobCount | None = row(
        "0 to 20", "0", "log-probabilities of the text's tokens, each with so many likeliest ones"
    )
    reasoning: Reasoning | None = row(
        "an object with `effort`, `max_tokens`, `summary` (`auto`, `concise`, `detailed`)",
        "the template's",
        "see [reasoning](#reasoning). With `summary` the thought is also the `summary` of its item",
    )
    context_management: Annotated[list[ContextEdit], Field(max_length=1)] | None = row(
        '`[{"type": "compaction", "compact_threshold"?}]`', "none", "see [compaction](#compaction)"
    )

    @property
    def warnings(self) -> list[str] | None:
        """As in `RequestBody`."""
        text, thoughts = self.text or TextOptions(), self.reasoning or Reasoning()
        switches = (
            ("text.verbosity", text.verbosity, "medium"),
            ("reasoning.context", thoughts.context, "auto"),
            ("reasoning.mode", thoughts.mode, "standard"),
        )
        found = [f"`{name}` is not applied" for name, value, plain in switches if value not in (None, plain)]
        return [*found, *(super().warnings or [])] or None

    @property
    def summary(self) -> Summary | None:
        """How thoughts are to be summed up; None: not at all."""
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary

    def compact_above(self, context: int) -> int | None:
        """Return the number of tokens of a prompt above which the conversation is compacted; None: it never is.
        `context`: tokens of the model's context."""
        if not self.context_management:
            return None
        return self.context_management[0].compact_threshold or max(1, context * 3 // 4)

    @property
    def wants_logprobs(self) -> bool:
        """Whether texts come with log-probabilities of their tokens."""
        return bool(self.top_logprobs) or self.includes("message.output_text.logprobs")

    def includes(self, name: str) -> bool:
        """Return whether the response is to have an optional part."""
        return name in (self.include or ())

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


class HistoryRequest(ResponsesRequest):
    """The request of the endpoints about a conversation that do not answer it: the body of a response, in which
    `input` may be missing if the request continues something."""

    input: Annotated[Any, BeforeValidator(_optional_input), WithJsonSchema(_INPUT)] = None

    @model_validator(mode="after")
    def _check_input(self) -> HistoryRequest:
        if self.input is None:
            if self.previous_response_id is None and self.conversation is None:
                raise PydanticCustomError("missing", "is required, or `previous_response_id`", {"param": "input"})
            self.input = []
        return self


_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
RESPONSES: Final = Endpoint("responses", ResponsesRequest, KNOWN, _NAMES)
HISTORY: Final = Endpoint("responses", HistoryRequest, KNOWN, _NAMES)


def text_part(text: str, logprobs: Sequence[Any] = ()) -> Object:
    """Return the only part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def thought_part(text: str) -> Object:
    """Return the only part of a reasoning item's content."""
    return {"type": "reasoning_text", "text": text}


def summary_part(text: str) -> Object:
    """Return the only part of a reasoning item's summary."""
    return {"type": "summary_text", "text": text}


def thought_item(text: str, item_id: str, status: str, *, summed_up: bool, sealed: str | None) -> Object:
    """Return a reasoning item, without content if its status is "in_progress".

    Args:
        summed_up: Whether the thought is also its summary.
        sealed: Its `encrypted_content`.
    """
    begun = status == "in_progress"
    return {
        "type": "reasoning",
        "id": item_id,
        "summary": [summary_part(text)] if summed_up and not begun else [],
        "content": [] if begun else [thought_part(text)],
        "encrypted_content": sealed,
        "status": status,
    }


def output_item(
    block: Block, item_id: str, status: str, tool: OwnTool | None, logprobs: Sequence[Any] = ()
) -> Object:
    """Return a text or a call as an item of `output`, without content if its status is "in_progress".

    Args:
        tool: The tool that a call means.
        logprobs: Log-probabilities of a text's tokens.
    """
    if block.is_call:
        return _call_item(block, item_id, status, tool or OwnTool(block.name))
    content = [] if status == "in_progress" else [text_part(block.text, logprobs)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def _call_item(block: Block, item_id: str, status: str, tool: OwnTool) -> Object:
    item = {"id": item_id, "call_id": block.call_id, "name": tool.name, "status": status}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.is_custom:
        return {"type": "custom_tool_call", **item, "input": custom_input(block.text) if block.text else ""}
    return {"type": "function_call", **item, "arguments": block.text}


def usage_object(
    prompt_tokens: int, cached_tokens: int, output_tokens: int, thoughts: int, drafts: dict[str, int]
) -> Object:
    """Return token counts as the field `usage`.

    Args:
        drafts: what came of drafts (`answer_fields.draft_details`).
    """
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": cached_tokens,
            "cache_write_tokens": prompt_tokens - cached_tokens,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": thoughts, **drafts},
        "total_tokens": prompt_tokens + output_tokens,
    }


def asked_fields(body: ResponsesRequest) -> Object:
    """Return the fields of a response that say again what the request has asked for."""
    form = None if body.text is None else body.text.format
    thoughts = body.reasoning or Reasoning()
    shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": thoughts.effort, "summary": body.summary},
        "service_tier": "default",
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled" if body.truncation is None else body.truncation.type,
    }


def error_object(error: ApiError) -> Object:
    """Return the field `error` of a failed response."""
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}
