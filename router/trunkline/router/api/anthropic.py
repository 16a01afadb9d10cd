"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's form of a chat completion.

A request is translated into a chat completion and runs as one (`blocks.py`). Errors also have Anthropic's form
(`http/answers.py`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from msgspec import UNSET
from msgspec.structs import replace
from pydantic import ConfigDict, Field
from pydantic.json_schema import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.answer_fields import cache_use, draft_details, truncation_result
from trunkline.router.api.anthropic_content import (
    Warnings,
    cache_lifetime,
    signature_of,
    system_text,
    to_choice,
    to_functions,
    with_marks,
)
from trunkline.router.api.anthropic_turns import behind_system, translated
from trunkline.router.api.blocks import (
    AnswerBlocks,
    Block,
    BlockChange,
    as_chat,
    named_event,
    session_label,
)
from trunkline.router.api.context_edits import applied_edits, read_edits, tool_names, unknown_fields
from trunkline.router.api.document_prompts import dialog_tokens, marks_of, modular_job, unmarked
from trunkline.router.api.edited_prompts import edited_prompt
from trunkline.router.api.left_out import dropped_messages
from trunkline.router.api.prompt_batch import start
from trunkline.router.api.prompting import chat_job
from trunkline.router.api.requests import check_length, check_model, read_parameters, service_of
from trunkline.router.http.answers import (
    BODY_OUTLET,
    EventStream,
    JsonResponse,
    anthropic_error,
    while_connected,
)
from trunkline.router.http.body import beside_loop
from trunkline.router.jobs.generation_parameters import DialogParameters
from trunkline.router.jobs.known_parameters import KNOWN
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.jobs.parameter_table import Endpoint, row
from trunkline.router.jobs.parameters import Count, Stops
from trunkline.router.jobs.request_models import ChatRequest, Message
from trunkline.router.request_context import current, draw_hex
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Generation
from trunkline.router.streams.takers import Outlet
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.document_marks import DocumentMarks
from trunkline.router.text.edits import AppliedEdit, Edit
from trunkline.router.text.truncation import span_tokens
from trunkline.router.text.volatile_lines import without_volatile
from trunkline.router.tools.plan import ToolPlan, plan_tools

routes = APIRouter()

Object = dict[str, Any]
_Text = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
_ToolList = WithJsonSchema({"type": "array", "items": {"type": "object"}})
_ObjectForm = WithJsonSchema({"type": "object"})
_CONVERSATION: Final = re.compile(r"session_(?:id\W+)?([0-9a-fA-F-]{36})")
"""Matches the name of a conversation in the `user_id` that Claude Code sends."""


class OutputFormat(LateModel):
    """The field `output_config.format`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(LateModel):
    """The field `output_config`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Thinking(LateModel):
    """The field `thinking`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class CountTokensRequest(DialogParameters):
    """The request `POST /v1/messages/count_tokens`: the fields that make up the prompt. Others are only
    checked."""

    messages: Annotated[
        list[Any], WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1})
    ] = row(
        "`user`, `assistant` and `system` in any order; a string or blocks: `text`, `document`, `search_result`, "
        "`tool_use` (assistant), `tool_result` (user)",
        "required",
        "consecutive ones of a role become one; `thinking` blocks are the message's thought, `redacted_thinking` "
        "ones are left out; a last one of the assistant's is continued",
        value=...,
    )
    system: Annotated[Any, _Text] = row("a string or text blocks", "none", "the system message")
    tools: Annotated[Any, _ToolList] = row(
        "a list of `name`, `description`, `input_schema`, `strict`", "none", "see [tools](#tools)"
    )
    tool_choice: Annotated[Any, _ObjectForm] = row(
        "`auto`, `any`, `tool` with a `name`, `none`; `disable_parallel_tool_use`", "auto", "see [tools](#tools)"
    )
    thinking: Thinking | None = row(
        "an object with `type`, `budget_tokens`, `display`", "the template's", "see [reasoning](#reasoning)"
    )
    output_config: OutputConfig | None = row(
        "`format`: `json_schema` with a `schema`; `effort`",
        "free text",
        "see [structured output](#structured-output) and [reasoning](#reasoning)",
    )
    cache_control: Annotated[Any, _ObjectForm] = row("an object", "none", "see [below](#v1messages)")
    context_management: Annotated[Object | None, _ObjectForm] = row(
        "`edits`: a list of `clear_thinking_20251015` and `clear_tool_uses_20250919`",
        "none",
        "see [edits](#edits)",
    )
    mcp_servers: Annotated[list[Any] | None, _ToolList] = row("a list", "none", "see [below](#v1messages)")

    def edits(self) -> tuple[Edit, ...]:
        """Return the edits of `context_management`.

        Raises:
            ApiError: 400, naming the edit that is wrong.
        """
        if self.context_management is None:
            return ()
        return read_edits(self.context_management, tool_names(self.tools, self.messages))

    def template_variables(self) -> Object | None:
        """Return what `thinking` and `output_config.effort` mean in chat templates."""
        variables: Object = {}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            variables["enable_thinking"] = variables["thinking"] = self.thinking.type == "enabled"
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return {**variables, **(self.chat_template_kwargs or {})} or None


class MessagesRequest(CountTokensRequest):
    """The request `POST /v1/messages`."""

    max_tokens: Count = row(
        "1 or more",
        "required",
        "largest number of tokens of the answer",
        also=("max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict"),
        value=...,
    )
    stop: Stops = row(
        "as `stop` in chat completions",
        "none",
        "found across token borders",
        also=("stop_words", "stop_strings"),
        alias="stop_sequences",
        value=[],
    )
    temperature: Annotated[float, Field(ge=0, le=1)] | None = row("0 to 1", "model ¹", "as in chat completions")
    output_format: OutputFormat | None = row("an object", "free text", "the older name of `output_config.format`")
    container: Annotated[Any, _ObjectForm] = row("an object", "none", "has no effect: no code is executed here")
    metadata: Annotated[Object | None, _ObjectForm] = row(
        "an object", "none", "`user_id` of Claude Code names the conversation"
    )

    @property
    def conversation(self) -> str | None:
        """The name of the conversation that the client has in `metadata.user_id`."""
        user = (self.metadata or {}).get("user_id")
        found = _CONVERSATION.search(user) if isinstance(user, str) else None
        return None if found is None else found[1]

    def response_format(self) -> Object | None:
        """Return `output_config.format` as the `response_format` of a chat completion."""
        form = None if self.output_config is None else self.output_config.format
        form = form or self.output_format
        if form is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}


_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "continue_final_message": "messages",
    "response_format.json_schema": "output_config.format",
}
MESSAGES: Final = Endpoint("messages", MessagesRequest, KNOWN, _NAMES)
_COUNT_TOKENS: Final = Endpoint("messages", CountTokensRequest, KNOWN, _NAMES, like=MessagesRequest)


@routes.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, MESSAGES)
    service = check_model(service, body.model)
    fields = {
        "response_format": body.response_format(),
        "session_id": session_label(request, body) or body.conversation,
        "thinking_budget": None if body.thinking is None else body.thinking.budget_tokens,
    }
    warnings = Warnings()
    for text in body.warnings or ():
        warnings.add(text)
    if body.container is not None:
        warnings.add("`container` has no effect: no code is executed here")
    edits = body.edits()
    for name in unknown_fields(body.context_management):
        warnings.add(f"`{name}` is not a known parameter and was ignored")
    marks = None if edits else marks_of(body)
    chat, plan, lifetime = await beside_loop(
        request, lambda: as_conversation(service, body, fields, warnings, marks)
    )
    edited = await edited_prompt(service, chat, plan, edits)
    job = await modular_job(service, chat, plan, marks, edited=edited)
    job = job or await chat_job(service, unmarked(chat, marks), plan, edited=edited)
    job = replace(job, max_tokens=min(job.max_tokens, body.max_tokens))
    generation = await start(service, job, request)
    writer = _MessageWriter(service, body, generation, plan, warnings)
    writer.lifetime = lifetime
    writer.applied = () if edited is None else edited.applied
    if body.stream:
        events = writer.events(request.scope.get(BODY_OUTLET))
        return EventStream(generation, events, lambda error: named_event("error", anthropic_error(error)))
    try:
        return JsonResponse(await while_connected(request, writer.whole()))
    finally:
        generation.close()


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""
    service = service_of(request)
    body = await read_parameters(request, _COUNT_TOKENS)
    service = check_model(service, body.model)
    edits = body.edits()
    marks = None if edits else marks_of(body)
    chat, plan, _ = await beside_loop(request, lambda: as_conversation(service, body, {}, Warnings(), marks))
    check_length(sum(map(_characters, chat.messages)), "messages")
    edited = await edited_prompt(service, chat, plan, edits)
    if edited is None:
        original = await dialog_tokens(service, chat, plan, marks)
    else:
        original = edited.before + len(edited.tokens)
    left = original - span_tokens(() if edited is None else edited.drops)
    answer: Object = {"input_tokens": left}
    if body.context_management is not None:
        answer["context_management"] = {"original_input_tokens": original}
    return JsonResponse(answer)


def _characters(message: Message) -> int:
    return len(message.content) + sum(len(call.function.arguments) for call in message.tool_calls or ())


def as_conversation(
    service: RouterService,
    body: CountTokensRequest,
    fields: Object,
    warnings: Warnings,
    marks: DocumentMarks | None,
) -> tuple[ChatRequest, ToolPlan, str | None]:
    """Return a request as a chat, its tools, and the lifetime that its `cache_control` asks for, "5m" or "1h"."""
    functions = to_functions(body.tools, warnings)
    choice, parallel = to_choice(body.tool_choice, functions)
    tokenizer = service.tokenizer
    plan = plan_tools(functions, choice, tokenizer.tool_style, tokenizer.reasoning, parallel=parallel)
    variables = body.template_variables()
    system, rule = without_volatile(body.system, service.config.show_lines)
    if rule:
        warnings.add(f"a line of `system` that changes with every request was left out (rule {rule})")
    text, memory = system_text(system, warnings), current().conversations
    known = None if memory is None else memory.turns
    turns = translated(with_marks(body.messages, marks, warnings), known, cache_salt(body.cache_salt))
    for _, warning in turns.warnings:
        warnings.add(warning)
    messages, borders = behind_system(text, turns)
    if body.mcp_servers:
        warnings.add("the tools of `mcp_servers` are not available to the model")
    given: Object = {"messages": messages, "chat_template_kwargs": variables, **fields}
    given |= {"pml": body.pml, "trailing": body.trailing}
    if body.drop:
        given["drop"] = dropped_messages(body.drop, [*borders, len(messages)])
    if messages[-1]["role"] == "assistant":
        given["continue_final_message"] = True
    marked = {"cache_control": body.cache_control}
    lifetimes = {cache_lifetime(marked, body.system, body.tools), *(each for _, each in turns.lifetimes)}
    lifetime = next((each for each in ("1h", "5m") if each in lifetimes), None)
    return as_chat(body, given), plan, lifetime


class _MessageWriter:
    """Writes the answer to one request, whole or as a stream."""

    def __init__(
        self,
        service: RouterService,
        body: MessagesRequest,
        generation: Generation,
        plan: ToolPlan,
        warnings: Warnings,
    ) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        self._thinks = plan.reasoning is not None
        self._answer = AnswerBlocks(generation, plan, at_least_one=False, id_prefix="toolu_")
        self._id = f"msg_{draw_hex('id', 12)}"
        self._warnings = warnings.texts
        self.applied: tuple[AppliedEdit, ...] = ()
        """What the edits of `context_management` have done."""
        self._hides = body.thinking is not None and body.thinking.display == "omitted"
        """Whether thinking blocks do not show their text."""
        self.lifetime: str | None = None
        """How long `cache_control` asks for the prompt to be kept; None: it stands nowhere."""

    async def whole(self) -> Object:
        """Return the whole message."""
        content = [self._block(block, whole=True) for block in await self._answer.whole()]
        return {**self._message(content), **self._end(), "usage": self._usage(), **self._report()}

    async def events(self, outlet: Outlet | None) -> AsyncIterator[bytes]:
        """Yield the message as server-sent events, but for those that go straight to `outlet`."""
        begun = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message=begun) + _event("ping")
        async for part in self._answer.encoded(self._change_events, outlet):
            yield part
        end = _event("message_delta", delta=self._end(), usage=self._usage(), **self._report())
        yield end + _event("message_stop")

    def _message(self, content: list[Object]) -> Object:
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model or self._service.model_name,
            "content": content,
        }
        return {**message, "warnings": self._warnings} if self._warnings else message

    def _report(self) -> Object:
        """Return what is said of the whole request: the edits that were applied, and what was cached."""
        report: Object = {}
        if self._body.context_management is not None:
            report["context_management"] = {"applied_edits": applied_edits(self.applied)}
        extras = {"cache": cache_use(self._generation), "truncation": truncation_result(self._generation)}
        return report | {name: value for name, value in extras.items() if value is not UNSET}

    def _end(self) -> Object:
        answer = self._answer
        calls = answer.blocks.calls
        if answer.finish == "length":
            is_asked = self._generation.output_tokens >= self._body.max_tokens
            reason = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif calls and all(call.arguments() is not None for call in calls):
            reason = "tool_use"
        else:  # a client must not carry out a call whose arguments are not valid JSON
            reason = "end_turn" if answer.stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}

    def _usage(self) -> Object:
        generation = self._generation
        computed = generation.job.seen_tokens - generation.cached_tokens
        usage: Object = {
            "input_tokens": computed,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": generation.cached_tokens,
            "output_tokens": generation.output_tokens,
        }
        if self.lifetime is not None:
            # All that is computed is kept, whatever is marked.
            usage |= {"input_tokens": 0, "cache_creation_input_tokens": computed}
            usage["cache_creation"] = {
                f"ephemeral_{life}_input_tokens": computed if life == self.lifetime else 0 for life in ("5m", "1h")
            }
        details = draft_details(generation)
        if self._thinks:
            thoughts = self._service.tokenizer.count_thoughts(self._answer.thought, self._answer.tokens)
            details["thinking_tokens"] = thoughts
        if details:
            usage["output_tokens_details"] = details
        return usage

    def _block(self, block: Block, *, whole: bool) -> Object:
        """Return a block as an entry of `content`; without its text or arguments if these follow in deltas."""
        if block.is_thought:
            text = "" if self._hides or not whole else block.text
            return {"type": "thinking", "thinking": text, "signature": self._signature(block) if whole else ""}
        if not block.is_call:
            return {"type": "text", "text": block.text if whole else ""}
        arguments = block.arguments() if whole else {}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments or {}}

    def _signature(self, block: Block) -> str:
        return signature_of(block.text, hidden=self._hides)

    def _change_events(self, changes: list[BlockChange]) -> bytes:
        return b"".join(map(self._change_event, changes))

    def _change_event(self, change: BlockChange) -> bytes:
        block = change.block
        if change.kind == "open":
            return _event("content_block_start", index=block.index, content_block=self._block(block, whole=False))
        if change.kind == "close":
            end = _event("content_block_stop", index=block.index)
            if not block.is_thought:
                return end
            signed = {"type": "signature_delta", "signature": self._signature(block)}
            return _event("content_block_delta", index=block.index, delta=signed) + end
        if block.is_thought:
            delta = {"type": "thinking_delta", "thinking": change.text}
        elif block.is_call:
            delta = {"type": "input_json_delta", "partial_json": change.text}
        else:
            delta = {"type": "text_delta", "text": change.text}
        if self._hides and block.is_thought:
            return b""
        return _event("content_block_delta", index=block.index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
