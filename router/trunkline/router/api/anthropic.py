"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's form of a chat completion.

A request is translated into a chat completion and runs as one (`blocks.py`). Errors also have Anthropic's form
(`http/answers.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.anthropic_content import to_choice, to_functions, to_messages
from trunkline.router.api.blocks import (
    AnswerBlocks,
    Block,
    BlockChange,
    as_chat,
    named_event,
    renamed,
    session_label,
)
from trunkline.router.api.prompting import Rendering, chat_job, encode_text, start
from trunkline.router.api.requests import MESSAGES_REFUSALS, check_length, check_model, service_of
from trunkline.router.http.answers import EventStream, JsonResponse, anthropic_error, while_connected
from trunkline.router.http.body import beside_loop, read_request
from trunkline.router.jobs.parameters import Count, Stops, Whitespace
from trunkline.router.jobs.request_models import ChatRequest, Message
from trunkline.router.request_context import draw_hex
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Generation
from trunkline.router.tools.plan import ToolPlan, plan_tools

routes = APIRouter()

_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
}
Object = dict[str, Any]
_Text = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
_ToolList = WithJsonSchema({"type": "array", "items": {"type": "object"}})
_ObjectForm = WithJsonSchema({"type": "object"})


class OutputFormat(BaseModel):
    """The field `output_config.format`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(BaseModel):
    """The field `output_config`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Thinking(BaseModel):
    """The field `thinking`. A budget is accepted and has no effect: the model ends its thought itself."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class CountTokensRequest(BaseModel):
    """The request `POST /v1/messages/count_tokens`: the fields that make up the prompt."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    messages: Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1})]
    system: Annotated[Any, _Text] = None
    tools: Annotated[Any, _ToolList] = None
    tool_choice: Annotated[Any, _ObjectForm] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def template_variables(self) -> Object | None:
        """Return what `thinking` and `output_config.effort` mean in chat templates."""
        variables: Object = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            variables["enable_thinking"] = variables["thinking"] = self.thinking.type == "enabled"
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return variables or None


class MessagesRequest(CountTokensRequest):
    """The request `POST /v1/messages`. Undeclared fields are ignored, unless `requests.py` lists them."""

    max_tokens: Count
    stop_sequences: Stops = []
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    whitespace: Whitespace | None = None
    stream: bool | None = None

    def response_format(self) -> Object | None:
        """Return `output_config.format` as the `response_format` of a chat completion."""
        form = None if self.output_config is None else self.output_config.format
        if form is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}


@routes.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    service = service_of(request)
    arrived_at = asyncio.get_running_loop().time()
    service.check_admission()
    body = await read_request(request, MessagesRequest, service.config.max_body_bytes, MESSAGES_REFUSALS.check)
    service = check_model(service, body.model)
    fields = {
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "response_format": body.response_format(),
        "whitespace": body.whitespace,
        "session_id": session_label(request),
    }
    with renamed(_NAMES):
        chat, plan = await beside_loop(request, lambda: _translated(service, body, fields))
        job = await chat_job(service, chat, plan)
        generation = await while_connected(request, start(service, job, arrived_at))
    writer = _MessageWriter(body.model or service.model_name, generation, plan)
    if body.stream:
        return EventStream(generation, writer.events(), lambda error: named_event("error", anthropic_error(error)))
    try:
        return JsonResponse(await while_connected(request, writer.whole()))
    finally:
        generation.close()


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""
    service = service_of(request)
    body = await read_request(request, CountTokensRequest, service.config.max_body_bytes, MESSAGES_REFUSALS.check)
    service = check_model(service, body.model)
    chat, plan = await beside_loop(request, lambda: _translated(service, body, {}))
    check_length(sum(map(_characters, chat.messages)), "messages")
    text = await Rendering.of(chat, plan).text(service, chat.messages)
    tokens = await encode_text(service.tokenizer, text, None, add_special_tokens=False, param="messages")
    return JsonResponse({"input_tokens": len(tokens)})


def _characters(message: Message) -> int:
    return len(message.content) + sum(len(call.function.arguments) for call in message.tool_calls or ())


def _translated(service: RouterService, body: CountTokensRequest, fields: Object) -> tuple[ChatRequest, ToolPlan]:
    functions = to_functions(body.tools)
    choice, parallel = to_choice(body.tool_choice, functions)
    tokenizer = service.tokenizer
    plan = plan_tools(functions, choice, tokenizer.tool_style, tokenizer.reasoning, parallel=parallel)
    variables = body.template_variables()
    messages = to_messages(body.system, body.messages)
    return as_chat({"messages": messages, "chat_template_kwargs": variables, **fields}), plan


class _MessageWriter:
    """Writes the answer to one request, whole or as a stream."""

    def __init__(self, model: str, generation: Generation, plan: ToolPlan) -> None:
        self._model = model
        self._generation = generation
        self._answer = AnswerBlocks(generation, plan, at_least_one=False, id_prefix="toolu_")
        self._id = f"msg_{draw_hex('id', 12)}"

    async def whole(self) -> Object:
        """Return the whole message."""
        content = [_block(block, whole=True) for block in await self._answer.whole()]
        return {**self._message(content), **self._end(), "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the message as server-sent events."""
        begun = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message=begun) + _event("ping")
        async for changes in self._answer.changes():
            yield b"".join(map(_change_event, changes))
        yield _event("message_delta", delta=self._end(), usage=self._usage()) + _event("message_stop")

    def _message(self, content: list[Object]) -> Object:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _end(self) -> Object:
        answer = self._answer
        calls = answer.blocks.calls
        if answer.finish == "length":
            reason = "max_tokens"
        elif calls and all(call.arguments() is not None for call in calls):
            reason = "tool_use"
        else:  # a client must not carry out a call whose arguments are not valid JSON
            reason = "end_turn" if answer.stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}

    def _usage(self) -> Object:
        generation = self._generation
        return {
            "input_tokens": len(generation.job.prompt) - generation.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": generation.cached_tokens,
            "output_tokens": generation.output_tokens,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _block(block: Block, *, whole: bool) -> Object:
    """Return a block as an entry of `content`; without its text or arguments if these follow in deltas."""
    if block.is_thought:
        signature = _signature(block.text) if whole else ""
        return {"type": "thinking", "thinking": block.text if whole else "", "signature": signature}
    if not block.is_call:
        return {"type": "text", "text": block.text if whole else ""}
    arguments = block.arguments() if whole else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments or {}}


def _signature(thought: str) -> str:
    """Return the signature of a thinking block: a digest, because clients send it back and expect one. It is not
    checked."""
    return hashlib.blake2b(thought.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _change_event(change: BlockChange) -> bytes:
    block = change.block
    if change.kind == "open":
        return _event("content_block_start", index=block.index, content_block=_block(block, whole=False))
    if change.kind == "close":
        end = _event("content_block_stop", index=block.index)
        if not block.is_thought:
            return end
        signed = {"type": "signature_delta", "signature": _signature(block.text)}
        return _event("content_block_delta", index=block.index, delta=signed) + end
    if block.is_thought:
        delta = {"type": "thinking_delta", "thinking": change.text}
    elif block.is_call:
        delta = {"type": "input_json_delta", "partial_json": change.text}
    else:
        delta = {"type": "text_delta", "text": change.text}
    return _event("content_block_delta", index=block.index, delta=delta)
