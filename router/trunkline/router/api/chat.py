"""`POST /v1/chat/completions`: answer a conversation, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from fastapi import APIRouter
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.answer_fields import (
    LOGPROBS_OFF_LOOP,
    Collected,
    cache_use,
    chat_logprobs,
    collect_choices,
    logprobs_of,
    make_head,
    matched_stop,
    optional,
    prompt_logprob_list,
    prompt_scores_of,
    stop_reason,
    timings_of,
    token_names,
    truncation_result,
    usage_of,
)
from trunkline.router.api.document_prompts import mark_documents, marks_of, modular_job
from trunkline.router.api.edited_prompts import edited_prompt
from trunkline.router.api.module_prompts import modules_job
from trunkline.router.api.prompting import chat_job, has_modules
from trunkline.router.api.requests import check_model, read_parameters, service_of
from trunkline.router.api.responses import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishName,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobList,
    ToolCallPart,
    Usage,
)
from trunkline.router.api.turn import SessionTurn, open_turn
from trunkline.router.errors import bad_value
from trunkline.router.http.answers import (
    BODY_OUTLET,
    DONE_EVENT,
    EventStream,
    JsonResponse,
    TextEvents,
    encoded,
    event,
    while_connected,
)
from trunkline.router.jobs.request_models import CHAT, ChatRequest
from trunkline.router.service import RouterService
from trunkline.router.stores.session_store import is_stored
from trunkline.router.streams.generation import Delta, FinishName, Generation
from trunkline.router.streams.takers import Outlet
from trunkline.router.tools.pieces import AnswerParser, CallArguments, CallStart, Piece, TextPiece, ThoughtPiece
from trunkline.router.tools.plan import ToolPlan, prepare_tools

routes = APIRouter()


@routes.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, CHAT)
    service = check_model(service, body.model)
    with ExitStack() as work:
        turn = None
        if body.session_id is not None and is_stored(body.session_id):
            turn = await while_connected(request, open_turn(service, body, body.session_id, "chat"))
            work.callback(turn.close)
            service = turn.service
        plan = _plan(service, body)
        if plan.active and body.use_beam_search:
            raise bad_value("tools", "`tools` are not available in a beam search (`use_beam_search: true`)")
        marks = marks_of(body)
        edited = None if turn is not None else await edited_prompt(service, body, plan)
        if has_modules(body, turn):
            job = await modules_job(service, body, plan, turn, edited)
        elif (made := await modular_job(service, mark_documents(body, marks), plan, marks, turn)) is not None:
            job = made
        else:
            job = await chat_job(service, body, plan, turn, edited)
        generation = service.generate(job)
        work.callback(generation.close)
        if not body.stream:
            return await while_connected(request, _WholeChat(service, body, plan, generation, turn).answer())
        stream = _StreamedChat(service, body, plan, generation, turn)
        events = stream.events(request.scope.get(BODY_OUTLET))
        return EventStream(work.pop_all(), events, begin=generation.begin)


def _plan(service: RouterService, body: ChatRequest) -> ToolPlan:
    tokenizer = service.tokenizer
    choice, parallel = body.tool_choice, body.parallel_tool_calls
    plan = prepare_tools(body.tools, choice, parallel, tokenizer.tool_style, tokenizer.reasoning)
    return replace(plan, separate=False) if body.separate_reasoning is False else plan


@dataclass(eq=False)
class _ChatAnswer:
    """An answer to one chat completion that is being written: what whole and streamed ones have in common."""

    _service: RouterService
    _body: ChatRequest
    _plan: ToolPlan
    _generation: Generation
    _turn: SessionTurn | None

    def __post_init__(self) -> None:
        self._head = make_head("chatcmpl", self._service, self._body.model)
        self._count = self._body.alternatives
        self._names = token_names(self._service.tokenizer.vocabulary, self._body)
        self._thinks = self._plan.reasoning is not None and self._plan.separate
        self._thoughts: int | None = 0 if self._thinks else None
        """Tokens of thoughts so far; None: the model has none."""

    def _logprobs(self, answer: Collected | Delta) -> ChatLogprobs | None:
        return chat_logprobs(answer.logprobs, self._count, self._names)

    def _make_parser(self) -> AnswerParser | None:
        job = self._generation.job
        return self._plan.make_parser(state=job.thought, formed=job.formed)

    def _shown(self, pieces: list[Piece], tokens: list[int]) -> list[Piece]:
        """Count the tokens of an answer's thoughts; return the pieces that the client gets."""
        if self._thoughts is None:
            return pieces
        thought = "".join([piece.text for piece in pieces if isinstance(piece, ThoughtPiece)])
        self._thoughts += self._service.tokenizer.count_thoughts(thought, tokens)
        return self._without_thoughts(pieces)

    def _without_thoughts(self, pieces: list[Piece]) -> list[Piece]:
        if self._body.shows_thoughts:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, ThoughtPiece)]


class _WholeChat(_ChatAnswer):
    """Writes the answer to one chat completion as a whole."""

    async def answer(self) -> Response:
        """Return the whole answer."""
        answers = await collect_choices(self._generation)
        if self._turn is not None:
            [choice] = [self._choice(index, answer) for index, answer in enumerate(answers)]
            await self._turn.store_chat(choice.message, answers[0].tokens)
            return self._write([choice])
        choices = (self._choice(index, answer) for index, answer in enumerate(answers))
        if logprobs_of(answers, self._count) > LOGPROBS_OFF_LOOP:
            return await self._service.large_requests.run(lambda: self._write(choices))
        return self._write(choices)

    def _write(self, choices: Iterable[ChatChoice]) -> Response:
        prompt = self._generation.job.prompt
        return JsonResponse(
            ChatCompletion(
                **self._head,
                choices=[encoded(choice) for choice in choices],
                usage=usage_of(self._generation, thoughts=self._thoughts),
                prompt_logprobs=self._prompt_logprobs(),
                prompt_token_ids=list(prompt) if self._body.return_token_ids else UNSET,
                cache=cache_use(self._generation),
                truncation=truncation_result(self._generation),
                timings=timings_of(self._generation) if self._body.return_timings else UNSET,
                warnings=optional(self._body.warnings),
            )
        )

    def _choice(self, index: int, answer: Collected) -> ChatChoice:
        parser = self._make_parser()
        pieces: list[Piece] = (
            [TextPiece(answer.text)]
            if parser is None
            else [*parser.feed(answer.text), *parser.finish(cut=answer.finish == "length")]
        )
        self._generation.heard(pieces, is_end=True)
        pieces = self._shown(pieces, answer.tokens)
        if self._body.echoed:
            pieces.insert(0, TextPiece(self._body.echoed))
        return ChatChoice(
            index=index,
            message=_message(pieces),
            logprobs=None if self._count < 0 else self._logprobs(answer),
            finish_reason=_finish(answer.finish, parser),
            stop_reason=stop_reason(answer, self._body),
            matched_stop=matched_stop(answer, self._generation.job),
            token_ids=answer.tokens if self._body.return_token_ids else UNSET,
            score=optional(answer.score),
            cumulative_logprob=optional(answer.cumulative_logprob),
        )

    def _prompt_logprobs(self) -> PromptLogprobList | None:
        scores = prompt_scores_of(self._generation)
        if scores is None or self._body.prompt_logprobs is None:
            return None
        prompt, vocabulary = self._generation.job.prompt, self._service.tokenizer.vocabulary
        return prompt_logprob_list(scores, prompt, self._body.prompt_logprobs, vocabulary)


class _StreamedChat(_ChatAnswer):
    """Writes the answer to one chat completion as server-sent events.

    first delta of a choice   its role, then its text
    deltas in the middle      text; most of them are written straight to an `Outlet`, without the coroutine
    last delta of a choice    the rest of its text, and its end; after the last choice's end comes `[DONE]`
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._samples = self._generation.job.decoding.samples
        self._parsers = [self._make_parser() for _ in range(self._samples)]
        self._unopened = set(range(self._samples))
        """Choices of which nothing has been sent."""
        self._thinking: list[tuple[list[Piece], list[int]]] = [([], []) for _ in range(self._samples)]
        """The pieces and tokens of each choice, if the model thinks: its thoughts are counted at the end."""
        self._written: list[Piece] = []
        """The pieces of the answer, if it is a session's turn: they are stored at the end."""
        self._tokens: list[int] = []
        """The tokens of `_written`."""
        body = self._body
        self._is_plain = self._turn is None and not (body.logprobs or body.return_token_ids or body.counts_along)
        """Whether the events of a choice without a parser are made of its text alone."""
        self._texts = TextEvents(
            lambda index, text: self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=text)))
        )

    async def events(self, outlet: Outlet | None) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, but for those that go straight to `outlet`."""
        body, running = self._body, self._samples
        async for delta in self._generation.deltas():
            if delta.finish is None and delta.index not in self._unopened:
                if outlet is not None:
                    self._generation.write_to(outlet, self._middle)
                    outlet = None
                if part := self._middle(delta):
                    yield part
                continue
            choices = self._read(delta)
            running -= delta.finish is not None
            parts = self._opening(delta.index) if choices and delta.index in self._unopened else b""
            if choices and not running and self._turn is not None:
                parts += b"".join([self._chunk(choice) for choice in choices[:-1]])
                if parts:  # send all text before it is known whether the turn can be stored
                    yield parts
                # Store the turn before the end is sent: the next request may follow at once.
                await self._turn.store_chat(_message(self._written), self._tokens)
                parts, choices = b"", choices[-1:]
            for choice in choices:
                is_end = not running and choice is choices[-1]
                parts += self._chunk(choice, last=is_end and not body.include_usage)
            if parts:
                yield parts
        if body.include_usage:
            for pieces, tokens in self._thinking:
                self._shown(pieces, tokens)
            yield self._chunk(usage=usage_of(self._generation, thoughts=self._thoughts), last=True)
        yield DONE_EVENT

    def _middle(self, delta: Delta) -> bytes:
        """Return the events of a delta that neither opens nor ends its choice."""
        if self._is_plain and self._parsers[delta.index] is None:
            return self._texts.of(delta)
        return b"".join([self._chunk(choice) for choice in self._read(delta)])

    def _opening(self, index: int) -> bytes:
        """Return the event with a choice's role. It goes out with the first text, not before: clients time their
        first chunk."""
        opening = ChatDelta(role="assistant", content=self._body.echoed)
        is_first = len(self._unopened) == self._samples
        self._unopened.remove(index)
        return self._chunk(ChatChunkChoice(index=index, delta=opening), first=is_first)

    def _read(self, delta: Delta) -> list[ChatChunkChoice]:
        """Return a delta as parts of its choice, and keep of it what is needed at the end."""
        parser = self._parsers[delta.index]
        pieces = _pieces(delta, parser)
        if parser is not None:
            self._generation.heard(pieces, is_end=delta.finish is not None)
        if self._thinks:
            self._thinking[delta.index][0].extend(pieces)
            self._thinking[delta.index][1].extend(delta.tokens)
            pieces = self._without_thoughts(pieces)
        if self._turn is not None:
            self._written.extend(pieces)
            self._tokens.extend(delta.tokens)
        return self._parts(delta, pieces, parser)

    def _parts(self, delta: Delta, pieces: list[Piece], parser: AnswerParser | None) -> list[ChatChunkChoice]:
        """Return a delta as parts of a choice: text or calls with their log-probabilities, the end in the last."""
        logprobs = self._logprobs(delta)
        token_ids = delta.tokens if self._body.return_token_ids and delta.tokens else UNSET
        additions = [_addition(piece) for piece in pieces]
        if not additions and (logprobs is not None or token_ids is not UNSET):
            additions = [ChatDelta(content="")]
        parts = [ChatChunkChoice(index=delta.index, delta=addition) for addition in additions]
        if parts:
            parts[0].logprobs, parts[0].token_ids = logprobs, token_ids
        if delta.finish is not None:
            if not parts or self._turn is not None:  # a turn's last text must not wait until the turn is stored
                parts.append(ChatChunkChoice(index=delta.index, delta=ChatDelta()))
            end = parts[-1]
            end.finish_reason = _finish(delta.finish, parser)
            end.stop_reason = stop_reason(delta, self._body)
            end.matched_stop = matched_stop(delta, self._generation.job)
            end.score = optional(delta.score)
            end.cumulative_logprob = optional(delta.cumulative_logprob)
        return parts

    def _chunk(
        self, *choices: ChatChunkChoice, usage: Usage | None = None, first: bool = False, last: bool = False
    ) -> bytes:
        if usage is None and self._body.counts_along:
            usage = usage_of(self._generation)
            if first:  # the role comes with the first text, but before it
                usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return event(
            ChatChunk(
                **self._head,
                choices=list(choices),
                usage=usage if self._body.include_usage else UNSET,
                prompt_token_ids=list(self._generation.job.prompt)
                if first and self._body.return_token_ids
                else UNSET,
                cache=cache_use(self._generation) if last else UNSET,
                truncation=truncation_result(self._generation) if last else UNSET,
                timings=timings_of(self._generation) if last and self._body.return_timings else UNSET,
                warnings=optional(self._body.warnings) if last else UNSET,
            )
        )


def _pieces(delta: Delta, parser: AnswerParser | None) -> list[Piece]:
    """Return the text and calls in a delta. `parser`: the choice's parser; None if it cannot have calls."""
    if parser is None:
        return [TextPiece(delta.text)] if delta.text else []
    return parser.feed(delta.text) + (
        parser.finish(cut=delta.finish == "length") if delta.finish is not None else []
    )


def _finish(finish: FinishName, parser: AnswerParser | None) -> ChatFinishName:
    return "tool_calls" if finish == "stop" and parser is not None and parser.calls else finish


def _addition(piece: Piece) -> ChatDelta:
    """Return a piece of an answer as the `delta` of a stream's chunk."""
    if isinstance(piece, TextPiece):
        return ChatDelta(content=piece.text)
    if isinstance(piece, ThoughtPiece):
        return ChatDelta(reasoning_content=piece.text, reasoning=piece.text)
    if isinstance(piece, CallStart):
        called = CalledFunction(name=piece.name, arguments="")
        part = ToolCallPart(index=piece.index, id=piece.id, type="function", function=called)
    else:
        part = ToolCallPart(index=piece.index, function=CalledFunction(arguments=piece.text))
    return ChatDelta(tool_calls=[part])


def _message(pieces: list[Piece]) -> ChatMessage:
    """Return the message of a whole answer. Its content is null if it consists of calls only."""
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    thought = optional("".join(piece.text for piece in pieces if isinstance(piece, ThoughtPiece)) or None)
    if not starts:
        return ChatMessage(content=text, reasoning_content=thought, reasoning=thought)
    arguments: dict[int, str] = {}
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] = arguments.get(piece.index, "") + piece.text
    calls = [
        ToolCallPart(
            id=start.id,
            type="function",
            function=CalledFunction(name=start.name, arguments=arguments.get(start.index, "")),
        )
        for start in starts
    ]
    return ChatMessage(content=text or None, tool_calls=calls, reasoning_content=thought, reasoning=thought)
