"""Write the answers of `/v1/responses`: the response object, and the events of its stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from trunkline.router.api.answer_fields import cache_use, chat_logprobs, truncation_result
from trunkline.router.api.blocks import AnswerBlocks, Block, BlockChange, named_event
from trunkline.router.api.openai_items import (
    Object,
    ResponsesRequest,
    asked_fields,
    error_object,
    output_item,
    summary_part,
    text_part,
    thought_item,
    thought_part,
)
from trunkline.router.api.response_compaction import Compaction, usage_of
from trunkline.router.api.response_input import foreign_items
from trunkline.router.api.response_turn import ResponseTurn
from trunkline.router.errors import ApiError
from trunkline.router.request_context import created_at, draw_hex
from trunkline.router.service import RouterService
from trunkline.router.stores.seals import Seal
from trunkline.router.streams.generation import TokenLogprob
from trunkline.router.streams.takers import Outlet
from trunkline.router.tools.plan import ToolPlan
from trunkline.router.tools.response_tools import ResponseTools, custom_input

GoOn = Callable[[Object], Awaitable[AnswerBlocks]]
"""Begins an answer behind a compaction item."""


class Asked(NamedTuple):
    """What a request asks for, read."""

    body: ResponsesRequest
    given: str | list[Any]
    """Its `input`, without the item that asks for a compaction."""
    tools: ResponseTools
    plan: ToolPlan
    seal: Seal
    """Seals thoughts and summaries, and reads them again."""

    @property
    def seals(self) -> bool:
        """Whether thoughts are to be sealed."""
        return self.body.includes("reasoning.encrypted_content")

    def sealed(self, thought: str) -> str | None:
        """Return the `encrypted_content` of a thought; None: it has none."""
        return self.seal.seal("reasoning", thought) if self.seals else None

    @property
    def warnings(self) -> list[str]:
        """What the answer tells the client about its request."""
        found = [*(self.body.warnings or []), *foreign_items(self.given, self.seal)]
        if self.seals and not self.seal.keys:
            found.append("there is no `encrypted_content`: the store of records, which has the key, is away")
        return found


class ResponseWriter:
    """Writes the answer to one request, whole or as a stream."""

    def __init__(
        self,
        asked: Asked,
        service: RouterService,
        turn: ResponseTurn | None,
        begun: AnswerBlocks | Compaction,
        go_on: GoOn | None = None,
    ) -> None:
        """
        Args:
            turn: Stores the response; None: nothing is stored.
            begun: What the response begins with.
            go_on: Begins the answer behind a compaction; None: the compaction is all.
        """
        self._asked = asked
        self._body = body = asked.body
        self._turn = turn
        self._model = body.model or service.model_name
        self._tokenizer = service.tokenizer
        self._compaction = begun if isinstance(begun, Compaction) else None
        self._answer = begun.answer if isinstance(begun, Compaction) else begun
        self._go_on = go_on
        self._id = f"resp_{draw_hex('id', 24)}"
        self._created_at = created_at()
        self._item_ids: list[str] = []
        self._numbers = itertools.count()

    async def whole(self) -> Object:
        """Return the whole response."""
        if self._compaction is not None:
            await self._compaction.complete()
            await self._go_on_behind(self._compaction)
        if not self._is_summary:
            await self._answer.whole()
        return await self._finished()

    async def events(self, outlet: Outlet | None) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events, but for those that go straight to `outlet`."""
        begun = self._response("in_progress")
        yield self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        if self._compaction is not None:
            async for event in self._compaction_events(self._compaction):
                yield event
            await self._go_on_behind(self._compaction)
        if not self._is_summary:
            async for part in self._answer.encoded(self._encoded, outlet):
                yield part
        response = await self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a response that failed."""
        response = {**self._response("failed", self._output("incomplete")), "error": error_object(error)}
        return self._event("response.failed", response=response)

    @property
    def _is_summary(self) -> bool:
        """Whether the response consists of a compaction, and no answer has begun behind it."""
        return self._compaction is not None and self._compaction.answer is self._answer

    async def _go_on_behind(self, compaction: Compaction) -> None:
        if self._go_on is not None:
            self._answer = await self._go_on(compaction.item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, {"type": kind, "sequence_number": next(self._numbers), **fields})

    async def _compaction_events(self, compaction: Compaction) -> AsyncIterator[bytes]:
        item = compaction.item
        yield self._event("response.output_item.added", output_index=0, item=item)
        async for _ in compaction.sampled():
            yield self._event("response.compaction.compacting", output_index=0, item_id=item["id"])
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _encoded(self, changes: list[BlockChange]) -> bytes:
        return b"".join([event for change in changes for event in self._change_events(change)])

    def _change_events(self, change: BlockChange) -> list[bytes]:
        block = change.block
        place = {"item_id": self._item_id(block), "output_index": self._index(block)}
        if block.is_call:
            return self._call_events(change, place)
        if block.is_thought:
            return self._thought_events(change, place)
        place["content_index"] = 0
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
        block, text = change.block, change.text
        shown = {**place, "content_index": 0}
        summed = {**place, "summary_index": 0} if self._body.summary else None
        summary = "response.reasoning_summary"
        if change.kind == "open":
            events = [self._item_event("added", block, "in_progress")]
            if summed is not None:
                events.append(self._event(f"{summary}_part.added", **summed, part=summary_part("")))
            return [*events, self._event("response.content_part.added", **shown, part=thought_part(""))]
        if change.kind == "grow":
            deltas = [] if summed is None else [self._event(f"{summary}_text.delta", **summed, delta=text)]
            return [*deltas, self._event("response.reasoning_text.delta", **shown, delta=text)]
        ends = []
        if summed is not None:
            ends.append(self._event(f"{summary}_text.done", **summed, text=block.text))
            ends.append(self._event(f"{summary}_part.done", **summed, part=summary_part(block.text)))
        return [
            *ends,
            self._event("response.reasoning_text.done", **shown, text=block.text),
            self._event("response.content_part.done", **shown, part=thought_part(block.text)),
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
        return self._event(f"response.output_item.{kind}", output_index=self._index(block), item=item)

    def _index(self, block: Block) -> int:
        """Return a block's index in `output`."""
        return block.index + (self._compaction is not None)

    def _item(self, block: Block, status: str) -> Object:
        if block.is_thought:
            sealed = self._asked.sealed(block.text) if status != "in_progress" else None
            summed_up = self._body.summary is not None
            return thought_item(block.text, self._item_id(block), status, summed_up=summed_up, sealed=sealed)
        logprobs = self._logprobs(block.logprobs)
        tool = self._asked.tools.of_call(block.name) if block.is_call else None
        return output_item(block, self._item_id(block), status, tool, logprobs)

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
        item = None if self._compaction is None else self._compaction.item
        before = [item] if item is not None and item["encrypted_content"] else []
        if self._is_summary:
            return before
        blocks = self._answer.blocks.all
        statuses = [self._status(block) for block in blocks]
        if last_status is not None and statuses:
            statuses[-1] = last_status
        items = [self._item(block, status) for block, status in zip(blocks, statuses, strict=True)]
        return [*before, *items]

    async def _finished(self) -> Object:
        """Return the whole response, stored if it is to be.

        Raises:
            ApiError: it could not be stored.
        """
        status = "completed" if self._answer.finish == "stop" else "incomplete"
        response = self._response(status, self._output())
        return response if self._turn is None else await self._turn.store(response, self._answer.tokens)

    def _response(self, status: str, output: list[Object] | None = None) -> Object:
        sampling = self._answer.generation.job.sampling
        conversation = None if self._turn is None else self._turn.conversation
        begun = status == "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **asked_fields(self._body),
            "conversation": None if conversation is None else {"id": conversation},
            "model": self._model,
            "output": output or [],
            "parallel_tool_calls": self._asked.plan.parallel,
            "store": self._turn is not None and self._turn.stores,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None if begun else usage_of(self._answer, self._tokenizer),
            **({} if begun else self._extras()),
        }

    def _extras(self) -> Object:
        """Return the fields that OpenAI's API does not have."""
        generation, asked = self._answer.generation, self._asked
        before = None if self._is_summary else self._compaction
        fields = {
            "cache": cache_use(generation),
            "compaction": UNSET if before is None else {"usage": usage_of(before.answer, self._tokenizer)},
            "truncation_details": truncation_result(generation),
            "unavailable_tools": list(asked.tools.unavailable) or UNSET,
            "warnings": asked.warnings or UNSET,
        }
        return {name: value for name, value in fields.items() if value is not UNSET}
