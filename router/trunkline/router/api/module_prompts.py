"""Make the job of a request whose prompt consists of modules (Prompt Cache §3.4).

    pml / prompt ─► document ─┐
    schema's record ─► compiled schema ─┴─► layout: cached texts, and the request's own tokens between them
    messages ─► further roles behind everything ─┘

Only the request's own tokens are tokenised, and only those are computed that the engine does not find in its
cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from msgspec.structs import replace

from trunkline.controller.messages import PromptLayout
from trunkline.kvstore.chunks import pack_int32
from trunkline.router import pml
from trunkline.router.api.left_out import EditedPrompt
from trunkline.router.api.prompting import job_for, policy_of, prompt_errors
from trunkline.router.api.turn import SessionTurn
from trunkline.router.errors import bad_value
from trunkline.router.http.body import is_heavier
from trunkline.router.jobs.job import Job, Modules, Prompt, wanted_tokens
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest, Message
from trunkline.router.service import RouterService
from trunkline.router.stores.model_text import ModelText
from trunkline.router.stores.session_history import PromptPart
from trunkline.router.stores.session_state import SessionModules
from trunkline.router.stores.stored_schema import StoredSchema
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.chat_template import has_calls
from trunkline.router.text.reasoning_styles import ThoughtState
from trunkline.router.text.tokenizer import OFF_LOOP_CHARACTERS, Tokenizer
from trunkline.router.text.tool_turns import PlainTurns, ToolTurns
from trunkline.router.text.truncation import (
    PromptCut,
    RetentionPolicy,
    TokenSpan,
    clip_spans,
    plan_cut,
    room_for,
    span_tokens,
)
from trunkline.router.tools.plan import ToolPlan

_T = TypeVar("_T")

_NOT_WITH_MODULES: Final[dict[str, str]] = {
    "prompt_logprobs": "is not available for a prompt of modules: most of its tokens are not computed",
    "echo": "is not available for a prompt of modules: its text does not stand in one piece",
    "truncate_prompt_tokens": "is not available for a prompt of modules: they stand at fixed places",
    "exact": "is not available for a prompt of modules: they do not see each other",
    "continue_final_message": "is not available for a prompt of modules",
}


_ANY_LENGTH: Final = 1 << 30
"""More positions than any context has."""


class Placed(NamedTuple):
    """A compiled prompt of modules, with its schemas."""

    schemas: Sequence[StoredSchema]
    """In the order in which they lie behind each other."""
    prompt: pml.CompiledPrompt

    @property
    def key(self) -> str:
        """Key of the schema's record (`StoredSchema.key`); "": the modules are of several schemas."""
        return self.schemas[0].key if len(self.schemas) == 1 else ""

    def layout(self, own_tokens: int | None = None) -> PromptLayout:
        """Return the layout for the engine. `own_tokens`: number of own tokens, if a session's history changed
        it."""
        definitions = [schema.definition for schema in self.schemas]
        ttl, relocate = max(each.ttl for each in definitions), all(each.relocate for each in definitions)
        layout: PromptLayout = replace(pml.to_layout(self.prompt, ttl), relocate=relocate)
        if own_tokens is None or own_tokens == len(self.prompt.own):
            return layout
        *runs, (position, count) = self.prompt.runs
        count += own_tokens - len(self.prompt.own)
        if count:
            runs.append((position, count))
        return replace(layout, runs=pack_int32([number for run in runs for number in run]))

    def message_parts(self) -> list[PromptPart]:
        """Return the own tokens of the messages, as parts of the prompt."""
        prompt = self.prompt
        missing = len(prompt.own) - prompt.messages_from
        parts: list[PromptPart] = []
        for piece in reversed(prompt.pieces):
            if missing <= 0:
                break
            start = prompt.messages_from + missing - piece.count
            parts.append(
                PromptPart(piece.text, prompt.own[start : start + piece.count].tolist(), piece.kind != "role")
            )
            missing -= piece.count
        assert missing == 0, "messages begin within a piece"
        return parts[::-1]


async def modules_job(
    service: RouterService,
    body: ChatRequest | CompletionRequest,
    plan: ToolPlan | None = None,
    turn: SessionTurn | None = None,
    edited: EditedPrompt | None = None,
) -> Job:
    """Make the job of a prompt of modules; the messages of a chat follow the modules.

    Args:
        edited: The text of the messages, if parts of it are left out (`edited_prompts.py`). What is left is
            computed behind the modules as if it had never been longer.

    Raises:
        ApiError: 400, naming the parameter, with the code and place of a PML error; 404, there is no such schema.
    """
    if body.drop and edited is None:
        raise bad_value("drop", "`drop` leaves out messages behind modules; it is not available here")
    placed, given, param = await placed_prompt(service, body, plan, turn, fits=edited is None)
    own, reused, cut = placed.prompt.own.tolist(), 0, PromptCut()
    first = placed.prompt.messages_from
    if edited is not None:
        left, cut = PromptCut(edited.drops).without_dropped(edited.tokens)
        own = own[:first] + left
    elif turn is not None:
        own = own[:first] + await turn.tokens_of_parts(placed.message_parts())
    if turn is not None:
        turn.check_size("messages")
        reused = turn.reused_tokens
        if edited is not None:
            reused -= span_tokens(clip_spans(edited.drops, reused))
    if (policy := policy_of(body, turn)) is not None:
        own, drops, more = truncated(service, placed, own, policy, wanted_tokens(body)[1], param)
        cut = replace(more, removed_tokens=more.removed_tokens + cut.removed_tokens)
        reused -= span_tokens(clip_spans(drops, reused))
    end = "".join(piece.text for piece in placed.prompt.pieces[-4:])
    thought: ThoughtState = "possible" if plan is None else plan.thought_behind(end)
    prompt = Prompt(own, param, cut, _modules(placed, len(own)), thought)
    job = replace(job_for(service, body, prompt, tools=plan), salt=cache_salt(given.salt))
    if turn is None:
        return job
    return replace(job, session_tokens=reused, ttl=turn.session.ttl)


class Truncated(NamedTuple):
    """A prompt's own tokens without what does not fit."""

    own: list[int]
    drops: tuple[TokenSpan, ...]
    """What was taken out, in tokens of the messages."""
    cut: PromptCut


def truncated(
    service: RouterService, placed: Placed, own: list[int], policy: RetentionPolicy, wanted: int | None, param: str
) -> Truncated:
    """Leave the oldest part of a prompt's messages out if it does not fit. Modules, and the prompt's own texts,
    stay. What is left is computed behind the modules as if it had never been longer.

    Args:
        own: The prompt's own tokens, of which a session's history may have changed the messages.
        wanted: Largest number of tokens of the answer; None: the request does not say it.
        param: Parameter that gave the prompt, for errors.

    Raises:
        ApiError: 400, the modules leave no room.
    """
    first = placed.prompt.messages_from
    before = placed.prompt.end - (len(placed.prompt.own) - first)
    context = service.limits.max_context
    stays = replace(policy, sink_tokens=0)  # the modules are what attention sinks to
    with prompt_errors(param):
        cut = plan_cut(len(own) - first, context - before, room_for(wanted, context), stays)
    left, removed = cut.without_dropped(own[first:])
    return Truncated(own[:first] + left, cut.drops, removed)


async def placed_prompt(
    service: RouterService,
    body: ChatRequest | CompletionRequest,
    plan: ToolPlan | None = None,
    turn: SessionTurn | None = None,
    *,
    messages: list[Message] | None = None,
    fits: bool = True,
) -> tuple[Placed, SessionModules, str]:
    """Compile a request's prompt of modules; return it, its source, and the parameter that gave the source.

    Args:
        messages: The messages behind the modules; None: those of the request and of its turn.
        fits: Whether the whole prompt must fit into the context, if the request has no policy to cut it.

    Raises:
        ApiError: As in `modules_job`.
    """
    _check(body)
    if turn is not None and not turn.takes_modules:
        given, param = _given_by_session(body, turn), "session_id"
    else:
        given, param = _given(body), "prompt" if body.pml is None else "pml"
    roles = None
    if isinstance(body, ChatRequest):
        if messages is None:
            messages = body.messages if turn is None else await turn.messages(body.messages)
        roles = as_roles(service.tokenizer, messages, plan)
    placed = await place(
        service,
        given,
        param,
        roles,
        add_generation_prompt=isinstance(body, ChatRequest) and body.add_generation_prompt,
        fits=fits and policy_of(body, turn) is None,
        switches=getattr(body, "chat_template_kwargs", None),
    )
    return placed, given, param


async def place(
    service: RouterService,
    given: SessionModules,
    param: str,
    messages: list[dict[str, str]] | None,
    *,
    add_generation_prompt: bool,
    fits: bool = True,
    switches: dict[str, Any] | None = None,
) -> Placed:
    """Compile a prompt of modules.

    Args:
        param: Parameter that gave the prompt, for errors.
        messages: Further messages after the modules.
        fits: Whether the whole prompt must fit into the context.
        switches: Extra variables of the chat template.

    Raises:
        ApiError: 400, the prompt is wrong; 404, there is no such schema.
    """
    with service.schemas.errors_of(param):
        is_long = is_heavier(given.source, OFF_LOOP_CHARACTERS)
        document = await _beside_loop(is_long, lambda: _parse(given.source))
        context = service.limits.max_context if fits else _ANY_LENGTH
        schemas = [await service.schemas.get(name, cache_salt(given.salt)) for name in document.schemas]
        for schema in schemas:
            _check_model(service, schema, param)
        text = ModelText(service.tokenizer, switches)
        size = sum(len(message["content"]) for message in messages or ())
        compiled = await _beside_loop(
            is_long or any(schema.is_large for schema in schemas) or size > OFF_LOOP_CHARACTERS,
            lambda: pml.compile_prompt(
                pml.join_schemas([schema.compiled for schema in schemas]),
                document,
                text,
                context=context,
                trailing=given.trailing,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            ),
        )
    for schema in schemas:
        service.schemas.keep_pinned(schema)
    return Placed(schemas, compiled)


def _check_model(service: RouterService, schema: StoredSchema, param: str) -> None:
    """Refuse a schema of another model than the one that the request asks for."""
    if (model := service.schemas.model_of(schema)) != service.model_name:
        raise bad_value(
            param,
            f"schema {schema.name!r} belongs to model {model!r}, and this request asks for {service.model_name!r}",
        )


async def _beside_loop(is_long: bool, work: Callable[[], _T]) -> _T:
    """Return the result of `work`, which runs in a thread if `is_long`, else in the event loop."""
    return await asyncio.to_thread(work) if is_long else work()


def _parse(source: str | dict[str, Any]) -> pml.PromptDocument:
    return pml.parse_prompt(source) if isinstance(source, str) else pml.prompt_from_json(source)


def _given(body: ChatRequest | CompletionRequest) -> SessionModules:
    source = body.modules
    assert source is not None
    return SessionModules(source, body.trailing or "fixed", body.cache_salt or "")


def _given_by_session(body: ChatRequest | CompletionRequest, turn: SessionTurn) -> SessionModules:
    """Return the modules of a session.

    Raises:
        ApiError: 400, the request gives other modules or another salt.
    """
    given = turn.session.modules
    if body.modules is not None or given is None:
        raise bad_value(
            "session_id",
            "a stored session gets its modules when it is made (POST /v1/sessions); give either `session_id` or a "
            "prompt of modules",
        )
    if body.cache_salt not in (None, given.salt or None):
        raise bad_value("cache_salt", "the session was made with another `cache_salt`; it may be left out")
    return given


def _check(body: ChatRequest | CompletionRequest) -> None:
    """Refuse parameters that are not available with modules.

    Raises:
        ApiError: 400.
    """
    for name, why in _NOT_WITH_MODULES.items():
        value = getattr(body, name, None)
        if value is not None and value is not False and value != []:
            raise bad_value(name, f"`{name}` {why}")
    if isinstance(body, CompletionRequest) and not body.add_special_tokens:
        raise bad_value("add_special_tokens", "modules were computed with their special tokens already")


def as_roles(tokenizer: Tokenizer, messages: list[Message], plan: ToolPlan | None = None) -> list[dict[str, str]]:
    """Return messages as further roles of a prompt. Tools are described in the user's first message, because the
    modules before it are computed already.

    Raises:
        ApiError: 400, the result of a tool answers no call.
    """
    turns = [message.for_template() for message in messages]
    tools = None if plan is None else plan.template_tools
    if tools or has_calls(turns):
        with prompt_errors("messages"):
            called = ToolTurns(tokenizer.tool_style).extended(turns).turns
        turns = PlainTurns(tokenizer.tool_style).extended(called).described(tools, system=False)
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _modules(placed: Placed, own_tokens: int) -> Modules:
    schemas, prompt = placed
    hint = None
    if placed.key:  # what comes next is foreseen for each schema alone
        [schema] = schemas
        schema.used(schema.compiled.modules[index].path for index in prompt.modules)
        hint = schema.hint(prompt, asyncio.get_running_loop().time())
    return Modules(
        placed.layout(own_tokens),
        prompt.module_tokens,
        prompt.end + own_tokens - len(prompt.own),
        placed.key,
        hint,
    )
