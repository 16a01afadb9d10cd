"""`POST /v1/completions`: continue texts or lists of token ids, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from trunkline.router.api.answer_fields import (
    LOGPROBS_OFF_LOOP,
    Collected,
    both_logprobs,
    cache_use,
    completion_logprobs,
    echo_logprobs,
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
from trunkline.router.api.loop_budget import LoopBudget
from trunkline.router.api.module_prompts import modules_job
from trunkline.router.api.prompt_batch import PromptBatch
from trunkline.router.api.prompting import check_scores, completion_job, encode_text, has_modules, job_for
from trunkline.router.api.requests import check_model, read_parameters, service_of
from trunkline.router.api.responses import (
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobList,
    TextCompletion,
    Usage,
)
from trunkline.router.api.turn import SessionTurn, open_turn
from trunkline.router.errors import ApiError, bad_value
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
from trunkline.router.http.listed_prompts import parse_body
from trunkline.router.jobs.decoding import check_choices, decoding_of
from trunkline.router.jobs.job import Job, Prompt, another_job, check_repeated
from trunkline.router.jobs.request_models import COMPLETIONS, CompletionRequest
from trunkline.router.request_context import draw_seed
from trunkline.router.service import RouterService
from trunkline.router.stores.session_store import is_stored
from trunkline.router.streams.generation import Delta, FinishName, Generation
from trunkline.router.streams.takers import Outlet
from trunkline.router.text.detokenizer import make_detokenizer

routes = APIRouter()
_ECHO_OFF_LOOP_TOKENS: Final = 20_000
"""Number of tokens of a prompt above which an answer that repeats the prompt is written in a thread."""
_ANSWERS_OFF_LOOP: Final = 32
"""Number of prompts above which the answer to all of them is written in a thread."""


@routes.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continue texts or lists of token ids, streamed or not."""
    service = service_of(request)
    service.check_admission()
    body = await read_parameters(request, COMPLETIONS, parse_body)
    service = check_model(service, body.model)
    if len(body.prompts) > 1:  # the rows of a single one are checked with all else that it asks for
        check_choices(len(body.prompts), decoding_of(body, service.limits.max_rows))
        _check_several(body)
    batch, turn, is_streamed = PromptBatch(), None, False
    try:
        if body.session_id is not None and is_stored(body.session_id):
            turn = await while_connected(request, open_turn(service, body, body.session_id, "text"))
            service = turn.service
        jobs = await _jobs(service, body, turn)
        if len(jobs) == 1:  # which is sent at once
            await batch.submit(service, jobs)
        else:
            await while_connected(request, batch.submit(service, jobs))
        answer = _CompletionAnswer(service, body, batch, make_head("cmpl", service, body.model), turn)
        if not body.stream:
            return await while_connected(request, answer.whole())
        is_streamed = True
        return EventStream(answer, answer.events(request.scope.get(BODY_OUTLET)), begin=batch.begin)
    finally:
        if not is_streamed:
            _close(batch, turn)


def _close(batch: PromptBatch, turn: SessionTurn | None) -> None:
    """End what a request holds. May be called again."""
    batch.close()
    if turn is not None:
        turn.close()


def _check_several(body: CompletionRequest) -> None:
    """Refuse several prompts where a parameter is available for a single prompt only.

    Raises:
        ApiError: 400, naming the parameter.
    """
    if body.truncation is not None and body.truncation.policy() is not None:
        raise bad_value("truncation", "`truncation` is available for a single `prompt` only")
    if body.drop:
        raise bad_value("drop", "`drop` is available for a single `prompt` only, whose tokens it names")
    if body.session_id is not None and is_stored(body.session_id):
        raise bad_value("session_id", "a stored session is available for a single `prompt` only")


async def _jobs(service: RouterService, body: CompletionRequest, turn: SessionTurn | None) -> list[Job]:
    """Return a job for each prompt. Parameters that all prompts share are checked once."""
    if has_modules(body, turn):
        return [await modules_job(service, body, turn=turn)]
    if len(body.prompts) == 1:
        return [await completion_job(service, body, body.prompts[0], turn)]
    limits = service.limits
    jobs: list[Job] = []
    budget = LoopBudget()
    for index, given in enumerate(body.prompts):
        param = f"prompt[{index}]"
        prompt = Prompt(await _encode(service, body, given, param), param)
        if jobs:
            jobs.append(another_job(jobs[0], body, prompt, limits, draw_seed))
            await budget.yield_if_spent()  # many short prompts take as long as a long one
        else:
            jobs.append(job_for(service, body, prompt))
            check_repeated(jobs[0], len(body.prompts))
    check_scores(jobs[0], sum(len(job.prompt) for job in jobs))
    return jobs


async def _encode(
    service: RouterService, body: CompletionRequest, prompt: str | Sequence[int], param: str
) -> Sequence[int]:
    keep = body.prompt_slice
    if not isinstance(prompt, str):
        return prompt if keep is None else prompt[keep]
    return await encode_text(
        service.tokenizer,
        prompt,
        service.limits,
        add_special_tokens=body.add_special_tokens,
        param=param,
        keep=keep,
    )


class _Echo(NamedTuple):
    """The part of an answer that repeats its prompt (`echo`, `prompt_logprobs`)."""

    text: str = ""
    logprobs: CompletionLogprobs | None = None
    scores: PromptLogprobList | None = None


class _CompletionAnswer:
    """Writes the answer to one plain completion, whole or as a stream."""

    def __init__(
        self,
        service: RouterService,
        body: CompletionRequest,
        batch: PromptBatch,
        head: dict[str, Any],
        turn: SessionTurn | None = None,
    ) -> None:
        self._service = service
        self._body = body
        self._batch = batch
        self._head = head
        self._turn = turn
        self._vocabulary = service.tokenizer.vocabulary
        self._names = token_names(self._vocabulary, body)
        self._count = body.alternatives
        self._prompt_only = body.max_tokens == 0
        told = body.return_token_ids or body.counts_along or self._prompt_only
        self._is_plain = turn is None and self._count < 0 and not told

    def close(self) -> None:
        """End what the request holds. May be called again."""
        _close(self._batch, self._turn)

    # -- whole

    async def whole(self) -> Response:
        """Return the whole answer."""
        answers = await self._batch.collect()
        if self._turn is not None:
            await self._turn.store_text(answers[0][0].text, answers[0][0].tokens)
        large = any(logprobs_of(collected, self._count) > LOGPROBS_OFF_LOOP for collected in answers)
        if large or any(map(self._is_large, range(len(answers)))) or len(answers) > _ANSWERS_OFF_LOOP:
            return await self._service.large_requests.run(lambda: self._write(answers))
        return self._write(answers)

    def _is_large(self, prompt: int) -> bool:
        """Return whether repeating a prompt takes long."""
        job = self._batch.generations[prompt].job
        scores = len(job.prompt) * (job.sampling.prompt_logprobs + 1)
        return scores > LOGPROBS_OFF_LOOP or bool(self._body.echo and len(job.prompt) > _ECHO_OFF_LOOP_TOKENS)

    def _write(self, answers: list[list[Collected]]) -> Response:
        choices: list[msgspec.Raw] = []
        for prompt, collected in enumerate(answers):
            echo = self._echo(prompt)
            for one in collected:
                choices.append(encoded(self._choice(len(choices), prompt, echo, one)))
        return JsonResponse(
            TextCompletion(
                **self._head,
                choices=choices,
                usage=self._usage(),
                cache=cache_use(*self._batch.generations),
                truncation=truncation_result(self._batch.generations[0]),
                timings=timings_of(*self._batch.generations) if self._body.return_timings else UNSET,
                warnings=optional(self._body.warnings),
            )
        )

    def _choice(self, index: int, prompt: int, echo: _Echo, answer: Collected) -> CompletionChoice:
        choice = self._part(index, answer, len(echo.text))
        choice.text = echo.text + choice.text
        choice.logprobs = both_logprobs(echo.logprobs, choice.logprobs)
        self._add_prompt(choice, prompt, echo)
        choice.prompt_logprobs = echo.scores
        return choice

    # -- streamed

    def events(self, outlet: Outlet | None) -> AsyncIterator[bytes]:
        """Return the answer as server-sent events, but for those that go straight to `outlet`."""
        texts = TextEvents(lambda index, text: self._chunk(CompletionChoice(index=index, text=text)))
        if self._is_plain:
            texts.go_to(0)  # while the first token is on its way
        return self._events(outlet, texts)

    async def _events(self, outlet: Outlet | None, texts: TextEvents) -> AsyncIterator[bytes]:
        echoes: dict[int, _Echo] = {}
        opened: set[int] = set()
        running = sum(generation.job.decoding.choices for generation in self._batch.generations)
        text = ""
        tokens: list[int] = []
        starts_bare = not self._body.echo  # an answer with `return_token_ids` is not plain
        async for prompt, delta in self._batch.deltas():
            if self._is_plain and delta.finish is None and delta.text:
                index = prompt * self._batch.generations[prompt].job.decoding.choices + delta.index
                if starts_bare or index in opened:
                    if outlet is not None and len(self._batch.generations) == 1:  # else they share the connection
                        self._batch.generations[0].write_to(outlet, texts.of)
                        outlet = None
                    yield texts.event(index, delta.text)
                    continue
            if prompt not in echoes and self._is_large(prompt):
                echoes[prompt] = await self._service.large_requests.run(partial(self._echo, prompt))
            elif prompt not in echoes:
                echoes[prompt] = self._echo(prompt)
            echo = echoes[prompt]
            running -= delta.finish is not None
            if self._turn is not None:
                text += delta.text
                tokens += delta.tokens
                if not running:  # store the turn before the end is sent: the next request may follow at once
                    try:
                        await self._turn.store_text(text, tokens)
                    except ApiError:
                        if delta.text:  # send all text although the turn is not stored
                            yield self._chunk(CompletionChoice(index=0, text=delta.text))
                        raise
            index = prompt * self._batch.generations[prompt].job.decoding.choices + delta.index
            parts = b""
            if index not in opened:
                opened.add(index)
                parts = self._opening(index, prompt, echo)
            choice = self._part(index, delta, len(echo.text))
            if choice.text or choice.logprobs is not None or choice.finish_reason is not None or choice.token_ids:
                parts += self._chunk(choice, last=not running and not self._body.include_usage)
            if parts:
                yield parts
        if self._body.include_usage:
            yield self._chunk(usage=self._usage(), last=True)
        yield DONE_EVENT

    def _opening(self, index: int, prompt: int, echo: _Echo) -> bytes:
        """Return the chunk before a choice's text, which repeats the prompt; b"" if the client did not ask for
        that."""
        if not self._body.echo and not self._body.return_token_ids:
            return b""
        choice = CompletionChoice(index=index, text=echo.text, logprobs=echo.logprobs)
        self._add_prompt(choice, prompt, echo)
        return self._chunk(choice)

    def _chunk(self, *choices: CompletionChoice, usage: Usage | None = None, last: bool = False) -> bytes:
        if usage is None and self._body.counts_along:
            usage = self._usage()
        return event(
            TextCompletion(
                **self._head,
                choices=choices,
                usage=usage if self._body.include_usage else UNSET,
                cache=cache_use(*self._batch.generations) if last else UNSET,
                truncation=truncation_result(self._batch.generations[0]) if last else UNSET,
                timings=timings_of(*self._batch.generations) if last and self._body.return_timings else UNSET,
                warnings=optional(self._body.warnings) if last else UNSET,
            )
        )

    # -- both

    def _part(self, index: int, answer: Collected | Delta, offset: int) -> CompletionChoice:
        """Return a choice, or a part of it, without its prompt."""
        if self._prompt_only:
            empty: list[int] | None = [] if self._body.return_token_ids else None
            finish: FinishName | None = None if answer.finish is None else "length"
            return CompletionChoice(index=index, text="", finish_reason=finish, token_ids=optional(empty))
        job = self._batch.generations[0].job  # what ends a text is the same for all prompts
        logprobs = None
        if self._count >= 0:
            logprobs = completion_logprobs(answer.logprobs, self._count, self._names, offset=offset)
        return CompletionChoice(
            index=index,
            text=answer.text,
            logprobs=logprobs,
            finish_reason=answer.finish,
            stop_reason=UNSET if answer.finish is None else stop_reason(answer, self._body),
            matched_stop=UNSET if answer.finish is None else matched_stop(answer, job),
            token_ids=answer.tokens if self._body.return_token_ids else UNSET,
            score=optional(answer.score),
            cumulative_logprob=optional(answer.cumulative_logprob),
        )

    def _add_prompt(self, choice: CompletionChoice, prompt: int, echo: _Echo) -> None:
        if self._body.return_token_ids:
            choice.prompt_token_ids = list(self._batch.generations[prompt].job.prompt)
        choice.prompt_logprobs = optional(echo.scores)

    def _echo(self, index: int) -> _Echo:
        """Return the part of the answer that repeats a prompt. Call it once the prompt has been computed."""
        generation = self._batch.generations[index]
        scores = prompt_scores_of(generation)
        if not self._body.echo and scores is None:
            return _Echo()
        wanted = self._body.prompt_logprobs
        listed = logprobs = None
        if scores is not None and wanted is not None:
            listed = prompt_logprob_list(scores, generation.job.prompt, wanted, self._vocabulary)
        if not self._body.echo:
            return _Echo(scores=listed)
        text, offsets = self._prompt_text(generation, self._body.prompts[index])
        if scores is not None and self._count >= 0:
            logprobs = echo_logprobs(scores, generation.job.prompt, self._count, self._names, offsets)
        return _Echo(text, logprobs, listed)

    def _prompt_text(self, generation: Generation, given: str | Sequence[int]) -> tuple[str, list[int]]:
        """Return a prompt's text, as the client wrote it if it was a text, and the offset of each token in it."""
        detokenizer = make_detokenizer(
            self._vocabulary, skip_special_tokens=generation.job.skip_special_tokens, at_start=True
        )
        text, offsets = "", []
        for token in generation.job.prompt:
            offsets.append(len(text))
            text += detokenizer.feed(token)
        text += detokenizer.flush()
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            text = given
        return text, [min(offset, len(text)) for offset in offsets]

    def _usage(self) -> Usage:
        usage = usage_of(*self._batch.generations)
        if self._prompt_only:  # the engine had to draw a token, which the client does not get
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage
