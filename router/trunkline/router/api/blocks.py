"""Answers as a sequence of blocks, each a text or a tool call, for the APIs that are not chat completions.

Their endpoints translate requests into chat completions. The deltas of the answer become *changes* of blocks:
a block opens, grows or closes. Each endpoint writes the changes in its own format, as a stream or as a whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar

import msgspec
from pydantic_core import from_json
from starlette.requests import Request

from trunkline.router.errors import ApiError, bad_value
from trunkline.router.http.body import SESSION_HEADER, session_header, validate
from trunkline.router.jobs.generation_parameters import DialogParameters, SharedParameters
from trunkline.router.jobs.request_models import ChatRequest
from trunkline.router.stores.session_store import is_stored
from trunkline.router.streams.generation import Delta, FinishName, Generation, TokenLogprob
from trunkline.router.streams.takers import Outlet
from trunkline.router.tools.pieces import CallArguments, CallStart, Piece, TextPiece, ThoughtPiece
from trunkline.router.tools.plan import ToolPlan

_encode = msgspec.json.Encoder().encode


class Block(msgspec.Struct):
    """A part of an answer: a tool call if the block has a name, else a thought or a text."""

    index: int
    text: str = ""
    """The text, or the arguments of a call as JSON."""
    name: str = ""
    call_id: str = ""
    is_thought: bool = False
    logprobs: list[TokenLogprob] = []
    """Of a text, the log-probabilities of its tokens, if the request asks for them."""

    @property
    def is_call(self) -> bool:
        """Whether the block is a call."""
        return bool(self.name)

    @property
    def is_text(self) -> bool:
        """Whether the block is a text of the answer."""
        return not (self.name or self.is_thought)

    def arguments(self) -> dict[str, Any] | None:
        """Return a call's arguments; None if the model did not write a complete JSON object."""
        try:
            fields = from_json(self.text, allow_inf_nan=False)
        except ValueError:
            return None
        return fields if isinstance(fields, dict) else None


class BlockChange(msgspec.Struct, frozen=True):
    """A change of a block."""

    kind: Literal["open", "grow", "close"]
    block: Block
    text: str = ""
    """The text that is added to the block, if the change is that it grows."""
    logprobs: list[TokenLogprob] = []
    """The log-probabilities of the tokens of `text`. A token that belongs to two changes is with the first."""


class Blocks:
    """Turns the pieces of one answer into blocks."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def calls(self) -> list[Block]:
        """The blocks that are calls."""
        return [block for block in self.all if block.is_call]

    def feed(self, pieces: list[Piece]) -> Iterator[BlockChange]:
        """Add pieces of the answer; yield the changes."""
        for piece in pieces:
            if isinstance(piece, CallStart):
                yield from self._begin(Block(len(self.all), "", piece.name, piece.id))
                continue
            thinks = isinstance(piece, ThoughtPiece)
            mine = self._open is not None and not self._open.is_call and self._open.is_thought == thinks
            if not isinstance(piece, CallArguments) and not mine:
                yield from self._begin(Block(len(self.all), is_thought=thinks))
            assert self._open is not None
            self._open.text += piece.text
            yield BlockChange("grow", self._open, piece.text)

    def finish(self, *, at_least_one: bool) -> Iterator[BlockChange]:
        """Close the open block; yield the changes. `at_least_one`: an empty answer gets a block with an empty
        text."""
        if at_least_one and not self.all:
            yield from self._begin(Block(0))
        if self._open is not None:
            closed, self._open = self._open, None
            yield BlockChange("close", closed)

    def _begin(self, block: Block) -> Iterator[BlockChange]:
        yield from self.finish(at_least_one=False)
        self.all.append(block)
        self._open = block
        yield BlockChange("open", block)


class AnswerBlocks:
    """A running answer, read as blocks."""

    def __init__(self, generation: Generation, plan: ToolPlan, *, at_least_one: bool, id_prefix: str) -> None:
        """
        Args:
            at_least_one: Whether an empty answer has a block with an empty text.
            id_prefix: Prefix of the ids of calls.
        """
        self.generation = generation
        self.blocks = Blocks()
        self.finish: FinishName = "length"
        self.stop: str | None = None
        """The stop string that ended the answer."""
        self.tokens: list[int] = []
        """The tokens of the answer so far."""
        self._at_least_one = at_least_one
        self._unplaced: list[TokenLogprob] = []
        job = generation.job
        self._parser = plan.make_parser(lambda: plan.draw_id(id_prefix), job.thought, formed=job.formed)

    async def changes(self) -> AsyncIterator[list[BlockChange]]:
        """Yield the changes of the blocks as they come, at least one at a time.

        Raises:
            ApiError: The generation failed.
        """
        async for delta in self.generation.deltas():
            if changes := self._of(delta):
                yield changes

    async def encoded(
        self, encode: Callable[[list[BlockChange]], bytes], outlet: Outlet | None
    ) -> AsyncIterator[bytes]:
        """Yield the changes of the blocks as `encode` writes them, but for those that go straight to `outlet`.

        Raises:
            ApiError: The generation failed.
        """

        def part(delta: Delta) -> bytes:
            changes = self._of(delta)
            return encode(changes) if changes else b""

        if outlet is not None:
            self.generation.write_to(outlet, part)
        async for delta in self.generation.deltas():
            if written := part(delta):
                yield written

    def _of(self, delta: Delta) -> list[BlockChange]:
        """Return the changes that a delta makes."""
        self.tokens += delta.tokens
        changes = self._scored(list(self.blocks.feed(self._pieces(delta.text, delta.finish))), delta.logprobs)
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop
            changes += self._with_the_rest(list(self.blocks.finish(at_least_one=self._at_least_one)))
        return changes

    def _scored(self, changes: list[BlockChange], logprobs: list[TokenLogprob]) -> list[BlockChange]:
        """Return the changes with the log-probabilities of texts. Those of thoughts and calls are left out."""
        self._unplaced += logprobs
        grown = [index for index, change in enumerate(changes) if change.kind == "grow"]
        if not self._unplaced or not grown:
            return changes
        place = next((index for index in grown if changes[index].block.is_text), None)
        if place is not None:
            changes[place] = msgspec.structs.replace(changes[place], logprobs=self._unplaced)
            changes[place].block.logprobs += self._unplaced
        self._unplaced = []
        return changes

    def _with_the_rest(self, closing: list[BlockChange]) -> list[BlockChange]:
        """Return the last changes of an answer with the log-probabilities that came without text: those of the
        token that ends it, if the text before had come already."""
        if self._unplaced and closing and closing[-1].block.is_text:
            block = closing[-1].block
            block.logprobs += self._unplaced
            closing.insert(-1, BlockChange("grow", block, logprobs=self._unplaced))
        return closing

    @property
    def thought(self) -> str:
        """The text of the model's thoughts so far."""
        return "".join([block.text for block in self.blocks.all if block.is_thought])

    def _pieces(self, text: str, finish: FinishName | None) -> list[Piece]:
        if self._parser is None:
            return [TextPiece(text)] if text else []
        pieces = self._parser.feed(text) + (self._parser.finish(cut=finish == "length") if finish else [])
        self.generation.heard(pieces, is_end=finish is not None)
        return pieces

    async def whole(self) -> list[Block]:
        """Return all blocks of the finished answer.

        Raises:
            ApiError: The generation failed.
        """
        async for _ in self.changes():
            pass
        return self.blocks.all


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename parameters in errors raised within the block, from those of chat completions to the endpoint's own.

    Args:
        names: The endpoint's parameters by those of chat completions. What follows a name is kept (`messages[0]`).
    """
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from None


def session_label(request: Request, body: SharedParameters) -> str | None:
    """Return the label of the conversation that a request belongs to. Requests with one label go to one
    controller.

    Raises:
        ApiError: 400, it is the id of a stored session.
    """
    label = body.session_id
    if label is not None and is_stored(label):
        told = f"header {SESSION_HEADER}" if session_header(request) == label else "`session_id`"
        raise bad_value(
            "session_id" if told.startswith("`") else SESSION_HEADER,
            f"{told}: stored sessions are for /v1/chat/completions and /v1/completions; another name groups "
            "requests and nothing more",
        )
    return label


_SHARED: Final = frozenset(DialogParameters.model_fields)
_Request = TypeVar("_Request", bound=SharedParameters)


def as_chat(body: DialogParameters, fields: dict[str, Any]) -> ChatRequest:
    """Return a request as one of a chat completion, with all parameters that both have.

    Args:
        body: The checked request.
        fields: Further fields of the chat completion, translated. Those that are None are left out.

    Raises:
        ApiError: 400, naming the parameter of the chat completion that is wrong.
    """
    return as_request(ChatRequest, body, fields)


def as_request(model: type[_Request], body: DialogParameters, fields: dict[str, Any]) -> _Request:
    """Return a request as one of another endpoint; `model` is that of its body. Otherwise as `as_chat`."""
    given = {name: value for name, value in fields.items() if value is not None}
    if body.cache_salt is not None:
        given.setdefault("cache_salt", body.cache_salt)
    request = validate(model, given)
    for name in body.model_fields_set:
        if name in _SHARED and name in model.model_fields and name not in given:
            setattr(request, name, getattr(body, name))
    return request


def named_event(name: str, content: Any) -> bytes:
    """Return a server-sent event with a name and a JSON payload."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(content) + b"\n\n"
