"""`POST /v1/responses`, and what belongs to it: counting a prompt's tokens, and compaction.

A request is translated into a chat completion and runs as one (`blocks.py`).

The response is stored (`response_turn.py`) before the client is told that it is complete.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.answer_fields import cache_use, truncation_result
from trunkline.router.api.background_responses import begin_background
from trunkline.router.api.blocks import AnswerBlocks, as_chat, session_label
from trunkline.router.api.document_prompts import marks_of, modular_job, unmarked
from trunkline.router.api.edited_prompts import edited_prompt
from trunkline.router.api.left_out import dropped_messages
from trunkline.router.api.openai_items import HISTORY, RESPONSES, HistoryRequest, Object, ResponsesRequest
from trunkline.router.api.prompt_batch import start
from trunkline.router.api.prompting import Rendering, chat_job, encode_text
from trunkline.router.api.requests import check_length, check_model, read_parameters, service_of
from trunkline.router.api.response_compaction import Compaction, begin_compaction, usage_of
from trunkline.router.api.response_input import (
    NO_SEAL,
    check_shown,
    has_sealed,
    is_compactable,
    is_lasting,
    resolved,
    to_items,
    to_messages,
    without_trigger,
)
from trunkline.router.api.response_streams import stream_response
from trunkline.router.api.response_turn import ResponseTurn, open_reading_turn, open_response_turn
from trunkline.router.api.response_writer import Asked, ResponseWriter
from trunkline.router.api.turn import MESSAGES_OFF_LOOP
from trunkline.router.errors import ApiError, unsupported
from trunkline.router.http.answers import BODY_OUTLET, EventStream, JsonResponse, while_connected
from trunkline.router.http.body import beside_loop
from trunkline.router.jobs.job import Job
from trunkline.router.jobs.request_models import ChatRequest
from trunkline.router.pml import ErrorCode
from trunkline.router.request_context import created_at, current, draw_hex
from trunkline.router.service import RouterService
from trunkline.router.streams.generation import Generation
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.document_marks import DocumentMarks
from trunkline.router.tools.plan import plan_tools
from trunkline.router.tools.response_tools import read_response_choice, read_response_tools

routes = APIRouter()

_TOO_LONG: Final = ("context_length_exceeded", ErrorCode.CONTEXT_LENGTH.value)
"""Codes of the errors that say that a prompt, or one of modules, does not fit."""


@routes.post("/v1/responses")
async def responses(request: Request) -> Response:
    """Answer an input, streamed or not."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, RESPONSES)
    service = check_model(service, body.model)
    _, is_compaction = without_trigger(body.input)
    if body.background and not current().in_task:
        read_response_choice(body.tool_choice, read_response_tools(body.tools))
        queued = await begin_background(service, body)
        return await stream_response(service, queued["id"]) if body.stream else JsonResponse(queued)
    with ExitStack() as work:
        turn = await while_connected(request, open_response_turn(service, body))
        if turn is not None:
            work.callback(turn.close)
            service = turn.service
        asked = await _read(service, body, turn)
        conversation = _Conversation(request, service, turn, asked)
        work.callback(conversation.close)
        if is_compaction:
            writer = ResponseWriter(asked, service, turn, await while_connected(request, conversation.compacted()))
        else:
            begun = await while_connected(request, conversation.begun())
            writer = ResponseWriter(asked, service, turn, begun, conversation.go_on)
        if not body.stream:
            return JsonResponse(await while_connected(request, writer.whole()))
        return EventStream(work.pop_all(), writer.events(request.scope.get(BODY_OUTLET)), writer.failed)


@routes.post("/v1/responses/input_tokens")
async def input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a request for a response would have."""
    conversation = await _reading(request, await read_parameters(request, HISTORY))
    return JsonResponse({"object": "response.input_tokens", "input_tokens": await conversation.tokens()})


@routes.post("/v1/responses/compact")
async def compact_conversation(request: Request) -> Response:
    """Sum a conversation up: return the items that stand for it. Nothing is stored."""
    service_of(request).check_admission()
    body = await read_parameters(request, HISTORY)
    for name in ("stream", "background", "conversation"):
        if getattr(body, name):
            raise unsupported(name, "a compaction is answered whole, and changes nothing that is stored")
    conversation = await _reading(request, body, compacts=True)
    try:
        compaction = await while_connected(request, conversation.compacted())
        await while_connected(request, compaction.complete())
    finally:
        conversation.close()
    generation = compaction.answer.generation
    fields = {
        "id": f"resp_{draw_hex('id', 24)}",
        "object": "response.compaction",
        "created_at": created_at(),
        "output": [*filter(is_lasting, conversation.items()), compaction.item],
        "usage": usage_of(compaction.answer, conversation.service.tokenizer),
        "cache": cache_use(generation),
        "truncation_details": truncation_result(generation),
        "warnings": conversation.asked.warnings or UNSET,
    }
    return JsonResponse({name: value for name, value in fields.items() if value is not UNSET})


async def _reading(request: Request, body: HistoryRequest, *, compacts: bool = False) -> _Conversation:
    """Return the conversation of a request that stores nothing.

    Raises:
        ApiError: as for a response.
    """
    service = check_model(service_of(request), body.model)
    turn = await while_connected(request, open_reading_turn(service, body))
    service = turn.service
    asked = await _read(service, body, turn, compacts=compacts)
    return _Conversation(request, service, turn, asked)


async def _read(
    service: RouterService, body: ResponsesRequest, turn: ResponseTurn | None, *, compacts: bool = False
) -> Asked:
    """Return what a request asks for. `compacts`: whether it is for a compaction, whatever is in its body.

    Raises:
        ApiError: 400, tools or `input` are wrong; 503, the store of records does not answer, and the request needs
            the key in it.
    """
    tools = read_response_tools(body.tools)
    choice = read_response_choice(body.tool_choice, tools)
    style, reasoning = service.tokenizer.tool_style, service.tokenizer.reasoning
    plan = plan_tools(tools.functions, choice, style, reasoning, parallel=body.parallel_tool_calls)
    given, is_compaction = without_trigger(body.input)
    required = compacts or is_compaction or bool(body.context_management) or has_sealed(given)
    required = required or (turn is not None and has_sealed(turn.items))
    asked = Asked(body, given, tools, plan, NO_SEAL)
    if required or (asked.seals and not service.records.away):
        return asked._replace(seal=await service.histories.seals.current(required=required))
    return asked


class _Conversation:
    """The conversation that a request is about: what is stored of it, and what the request adds."""

    def __init__(
        self,
        request: Request,
        service: RouterService,
        turn: ResponseTurn | None,
        asked: Asked,
    ) -> None:
        self.service = service
        self.asked = asked
        self._request = request
        self._turn = turn
        self._history: list[Object] = [] if turn is None else turn.items
        self._generations: list[Generation] = []
        self._marks: DocumentMarks | None = None
        """The marks in what was translated last."""

    def items(self) -> list[Object]:
        """Return all items as they are stored. Call it after the request was translated, which checks them."""
        given = resolved(self.asked.given, self._history)
        taken = [item["id"] for item in self._history]
        return [*self._history, *to_items(given, taken, lambda: draw_hex("input", 24), self.asked.seal)]

    async def begun(self) -> AnswerBlocks | Compaction:
        """Begin the answer or, if the conversation is to be compacted before, the compaction.

        Raises:
            ApiError: 400, naming what is wrong; no engine accepted it.
        """
        chat = await self._translated()
        above = self.asked.body.compact_above(self.service.limits.max_context)
        job: Job | None = None
        try:
            job = await self._job_of(chat)
        except ApiError as error:
            if above is None or error.code not in _TOO_LONG or not self._is_compactable():
                raise
        if job is not None:
            length = len(job.prompt) + job.module_tokens
            if above is None or length <= above or not self._is_compactable():
                return await self._started(job)
        return await self._compaction(chat)

    async def go_on(self, compaction: Object) -> AnswerBlocks:
        """Begin the answer behind a compaction item. Errors are those of `begun`."""
        return await self._started(await self._job_of(await self._translated(compaction)))

    async def _started(self, job: Job) -> AnswerBlocks:
        generation = await start(self.service, job)
        self._generations.append(generation)
        return AnswerBlocks(generation, self.asked.plan, at_least_one=True, id_prefix="call_")

    def close(self) -> None:
        """Close all generations."""
        for generation in self._generations:
            generation.close()

    async def _job_of(self, chat: ChatRequest) -> Job:
        service, plan, marks, turn = self.service, self.asked.plan, self._marks, self._turn
        edited = await edited_prompt(service, chat, plan, turn=turn)
        job = await modular_job(service, chat, plan, marks, turn, edited)
        if job is not None:
            return job
        return await chat_job(service, unmarked(chat, marks), plan, turn, edited)

    async def compacted(self) -> Compaction:
        """Begin a compaction because the client asks for it. Errors are those of `begun`."""
        return await self._compaction(await self._translated(), self.asked.body.max_output_tokens)

    async def tokens(self) -> int:
        """Return the number of tokens that the model would see, even if the context holds fewer.

        Raises:
            ApiError: 400, naming what is wrong.
        """
        chat = await self._translated()
        try:
            return (await self._job_of(chat)).seen_tokens
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
        chat = unmarked(chat, self._marks)
        text = await Rendering.of(chat, self.asked.plan).text(self.service, chat.messages)
        check_length(len(text), "input")
        tokenizer = self.service.tokenizer
        return len(await encode_text(tokenizer, text, None, add_special_tokens=False, param="input"))

    def _is_compactable(self) -> bool:
        given: list[Any] = [] if isinstance(self.asked.given, str) else self.asked.given
        return is_compactable([*self._history, *given], self.asked.seal)

    async def _compaction(self, chat: ChatRequest, tokens_max: int | None = None) -> Compaction:
        asked = self.asked
        begun = await begin_compaction(
            self.service,
            chat,
            asked.plan,
            self._turn,
            seal=asked.seal,
            marks=self._marks,
            tokens_max=tokens_max,
        )
        self._generations.append(begun.answer.generation)
        return begun

    async def _translated(self, compaction: Object | None = None) -> ChatRequest:
        """Return the request as a chat completion, and add its items to its turn. `compaction`: stands behind
        them.

        Raises:
            ApiError: 400, naming what is wrong.
        """
        body, seal, turn = self.asked.body, self.asked.seal, self._turn
        label = session_label(self._request, body) or (None if turn is None else turn.conversation)
        marks = self._marks = marks_of(body)
        known = None if (memory := current().conversations) is None else memory.turns

        def translate() -> ChatRequest:
            given = resolved(self.asked.given, self._history)
            items = given
            if compaction is not None:
                items = [*([{"role": "user", "content": given}] if isinstance(given, str) else given), compaction]
            borders: list[int | None] = []
            messages = to_messages(
                items, body.instructions, self._history, seal, marks, borders, known, cache_salt(body.cache_salt)
            )
            check_shown(messages, given, seal)
            chat = as_chat(
                body,
                {
                    "messages": messages,
                    "drop": dropped_messages(body.drop, [*borders, len(messages)], "item") or None,
                    "max_completion_tokens": body.max_output_tokens,
                    "response_format": body.response_format(),
                    "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
                    "thinking_budget": None if body.reasoning is None else body.reasoning.max_tokens,
                    "session_id": label,
                    "pml": body.pml,
                    "trailing": body.trailing,
                    "logprobs": body.wants_logprobs or None,
                    "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
                },
            )
            if turn is not None:
                taken = [item["id"] for item in self._history]
                turn.add(to_items(given, taken, lambda: draw_hex("input", 24), seal))
            return chat

        if len(self._history) > MESSAGES_OFF_LOOP:
            return await self.service.large_requests.run(translate)
        return await beside_loop(self._request, translate)
