"""`POST /v1/responses`. A request is translated into a chat completion and runs as one (`blocks.py`).

The response is stored (`response_turn.py`) before the client is told that it is complete.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.answer_fields import cache_use, chat_logprobs, optional, truncation_result
from trunkline.router.api.background_responses import begin_background
from trunkline.router.api.blocks import (
    AnswerBlocks,
    Block,
    BlockChange,
    as_chat,
    named_event,
    session_label,
)
from trunkline.router.api.openai_items import (
    RESPONSES,
    Object,
    ResponsesRequest,
    error_object,
    output_item,
    text_part,
    thought_part,
    usage_object,
)
from trunkline.router.api.prompting import chat_job, start
from trunkline.router.api.requests import check_model, read_parameters, service_of
from trunkline.router.api.response_input import resolved, to_items, to_messages
from trunkline.router.api.response_turn import ResponseTurn, open_response_turn
from trunkline.router.api.turn import MESSAGES_OFF_LOOP
from trunkline.router.errors import ApiError
from trunkline.router.http.answers import EventStream, JsonResponse, while_connected
from trunkline.router.http.body import beside_loop
from trunkline.router.jobs.request_models import ChatRequest
from trunkline.router.request_context import created_at, current, draw_hex
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Generation, TokenLogprob
from trunkline.router.tools.plan import Choice, ToolPlan, plan_tools
from trunkline.router.tools.response_tools import (
    ResponseTools,
    custom_input,
    read_response_choice,
    read_response_tools,
)

routes = APIRouter()


@routes.post("/v1/responses")
async def responses(request: Request) -> Response:
    """Answer an input, streamed or not."""
    service = service_of(request)
    arrived_at = asyncio.get_running_loop().time()
    service.check_admission()
    body = await read_parameters(request, RESPONSES)
    service = check_model(service, body.model)
    tools = read_response_tools(body.tools)
    choice = read_response_choice(body.tool_choice, tools)
    if body.background and not current().in_task:
        return JsonResponse(await begin_background(service, body))
    with ExitStack() as work:
        turn = await while_connected(request, open_response_turn(service, body))
        if turn is not None:
            work.callback(turn.close)
            service = turn.service
        plan = plan_of(service, body, tools, choice)
        chat = await _translate(request, body, turn)
        job = await chat_job(service, chat, plan, turn)
        generation = await while_connected(request, start(service, job, arrived_at))
        work.callback(generation.close)
        writer = _ResponseWriter(Asked(body, tools, plan), service, generation, turn)
        if not body.stream:
            return JsonResponse(await while_connected(request, writer.whole()))
        return EventStream(work.pop_all(), writer.events(), writer.failed)


class Asked(NamedTuple):
    """What a request asks for, read."""

    body: ResponsesRequest
    tools: ResponseTools
    plan: ToolPlan


def plan_of(service: RouterService, body: ResponsesRequest, tools: ResponseTools, choice: Choice) -> ToolPlan:
    """Return what follows from a request's tools."""
    tokenizer = service.tokenizer
    return plan_tools(
        tools.functions, choice, tokenizer.tool_style, tokenizer.reasoning, parallel=body.parallel_tool_calls
    )


async def _translate(request: Request, body: ResponsesRequest, turn: ResponseTurn | None) -> ChatRequest:
    """Return a request as a chat completion, and add its items to its turn.

    Raises:
        ApiError: 400, naming what is wrong.
    """
    history = [] if turn is None else turn.items
    label = session_label(request, body) or (None if turn is None else turn.conversation)

    def translate() -> ChatRequest:
        given = resolved(body.input, history)
        chat = as_chat(
            body,
            {
                "messages": to_messages(given, body.instructions, history),
                "max_completion_tokens": body.max_output_tokens,
                "response_format": body.response_format(),
                "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
                "thinking_budget": None if body.reasoning is None else body.reasoning.max_tokens,
                "session_id": label,
                "logprobs": body.wants_logprobs or None,
                "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
            },
        )
        if turn is not None:
            turn.add(to_items(given, [item["id"] for item in history], lambda: draw_hex("input", 24)))
        return chat

    if len(history) > MESSAGES_OFF_LOOP:
        return await service_of(request).large_requests.run(translate)
    return await beside_loop(request, translate)


class _ResponseWriter:
    """Writes the answer to one request, whole or as a stream."""

    def __init__(
        self, asked: Asked, service: RouterService, generation: Generation, turn: ResponseTurn | None
    ) -> None:
        """`turn`: stores the response; None: nothing is stored."""
        self._asked = asked
        self._body = body = asked.body
        self._turn = turn
        self._model = body.model or service.model_name
        self._tokenizer = service.tokenizer
        self._generation = generation
        self._answer = AnswerBlocks(generation, asked.plan, at_least_one=True, id_prefix="call_")
        self._id = f"resp_{draw_hex('id', 24)}"
        self._created_at = created_at()
        self._item_ids: list[str] = []
        self._seals = body.includes("reasoning.encrypted_content")
        self._numbers = itertools.count()

    async def whole(self) -> Object:
        """Return the whole response."""
        await self._answer.whole()
        return await self._finished()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events."""
        begun = self._response("in_progress")
        yield self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        async for changes in self._answer.changes():
            yield b"".join(event for change in changes for event in self._change_events(change))
        response = await self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a response that failed."""
        response = {**self._response("failed", self._output("incomplete")), "error": error_object(error)}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, {"type": kind, "sequence_number": next(self._numbers), **fields})

    def _change_events(self, change: BlockChange) -> list[bytes]:
        block = change.block
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if block.is_call:
            return self._call_events(change, place)
        place["content_index"] = 0
        if block.is_thought:
            return self._thought_events(change, place)
        if change.kind == "open":
            return [
                self._item_event("added", block, "in_progress"),
                self._event("response.content_part.added", **place, part=text_part("")),
            ]
        if change.kind == "grow":
            return [
                self._event(
                    "response.output_text.delta",
                    **place,
                    delta=change.text,
                    logprobs=self._logprobs(change.logprobs),
                )
            ]
        part = text_part(block.text, self._logprobs(block.logprobs))
        return [
            self._event("response.output_text.done", **place, text=block.text, logprobs=part["logprobs"]),
            self._event("response.content_part.done", **place, part=part),
            self._item_event("done", block, self._status(block)),
        ]

    def _thought_events(self, change: BlockChange, place: Object) -> list[bytes]:
        block = change.block
        if change.kind == "open":
            return [
                self._item_event("added", block, "in_progress"),
                self._event("response.content_part.added", **place, part=thought_part("")),
            ]
        if change.kind == "grow":
            return [self._event("response.reasoning_text.delta", **place, delta=change.text)]
        return [
            self._event("response.reasoning_text.done", **place, text=block.text),
            self._event("response.content_part.done", **place, part=thought_part(block.text)),
            self._item_event("done", block, self._status(block)),
        ]

    def _call_events(self, change: BlockChange, place: Object) -> list[bytes]:
        block, tool = change.block, self._asked.tools.of_call(change.block.name)
        if change.kind == "open":
            return [self._item_event("added", block, "in_progress")]
        if tool.is_custom:
            if change.kind == "grow":
                return []  # the model writes JSON; what the client gets is the text in it
            text = custom_input(block.text)
            ends = [
                self._event("response.custom_tool_call_input.delta", **place, delta=text),
                self._event("response.custom_tool_call_input.done", **place, input=text),
            ]
        elif change.kind == "grow":
            return [self._event("response.function_call_arguments.delta", **place, delta=change.text)]
        else:
            kind = "response.function_call_arguments.done"
            ends = [self._event(kind, **place, name=tool.name, arguments=block.text)]
        return [*ends, self._item_event("done", block, self._status(block))]

    def _item_event(self, kind: str, block: Block, status: str) -> bytes:
        item = self._item(block, status)
        return self._event(f"response.output_item.{kind}", output_index=block.index, item=item)

    def _item(self, block: Block, status: str) -> Object:
        logprobs = self._logprobs(block.logprobs)
        tool = self._asked.tools.of_call(block.name) if block.is_call else None
        return output_item(block, self._item_id(block), status, tool, sealed=self._seals, logprobs=logprobs)

    def _logprobs(self, entries: list[TokenLogprob]) -> list[Any]:
        """Return log-probabilities in the form of `logprobs` of a text; there are none if none are asked for."""
        count = self._body.top_logprobs or 0
        found = chat_logprobs(entries, count, self._tokenizer.vocabulary)
        return [] if found is None else list(msgspec.to_builtins(found.content))

    def _item_id(self, block: Block) -> str:
        if block.index == len(self._item_ids):
            custom = block.is_call and self._asked.tools.of_call(block.name).is_custom
            prefix = "ctc" if custom else "fc" if block.is_call else "rs" if block.is_thought else "msg"
            self._item_ids.append(f"{prefix}_{draw_hex('item', 24)}")
        return self._item_ids[block.index]

    def _status(self, block: Block) -> str:
        """Return the status of a closed block. Only the last block can have been cut off."""
        if block.is_call:
            return "completed" if block.arguments() is not None else "incomplete"
        cut = block is self._answer.blocks.all[-1] and self._answer.finish == "length"
        return "incomplete" if cut else "completed"

    def _output(self, last_status: str | None = None) -> list[Object]:
        blocks = self._answer.blocks.all
        statuses = [self._status(block) for block in blocks]
        if last_status is not None and statuses:
            statuses[-1] = last_status
        return [self._item(block, status) for block, status in zip(blocks, statuses, strict=True)]

    async def _finished(self) -> Object:
        """Return the whole response, stored if it is to be.

        Raises:
            ApiError: it could not be stored.
        """
        status = "completed" if self._answer.finish == "stop" else "incomplete"
        response = self._response(status, self._output())
        return response if self._turn is None else await self._turn.store(response, self._answer.tokens)

    def _response(self, status: str, output: list[Object] | None = None) -> Object:
        body, generation = self._body, self._generation
        sampling = generation.job.sampling
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        form = None if body.text is None else body.text.format
        turn = self._turn
        conversation = None if turn is None else turn.conversation
        thoughts = self._tokenizer.count_thoughts(self._answer.thought, self._answer.tokens)
        usage = usage_object(
            generation.job.seen_tokens, generation.cached_tokens, generation.output_tokens, thoughts
        )
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(body.background),
            "conversation": None if conversation is None else {"id": conversation},
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output or [],
            "parallel_tool_calls": self._asked.plan.parallel,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": turn is not None and turn.stores,
            "temperature": sampling.temperature,
            "text": {
                "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled" if body.truncation is None else body.truncation.type,
            "usage": None if status == "in_progress" else usage,
            **({} if status == "in_progress" else self._extras()),
        }

    def _extras(self) -> Object:
        """Return the fields that OpenAI's API does not have."""
        fields = {
            "cache": cache_use(self._generation),
            "truncation_details": truncation_result(self._generation),
            "unavailable_tools": list(self._asked.tools.unavailable) or UNSET,
            "warnings": optional(self._body.warnings),
        }
        return {name: value for name, value in fields.items() if value is not UNSET}
