"""Make the job of a request (render, encode and cut its prompt), and start it.

A stored session's history comes before the request's messages. A prompt that does not fit the context is cut
(CachedAttention §3.4).

The engine gets the whole prompt, together with the ranges that the model does not see. It needs the whole prompt
to find the KV of earlier turns in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from trunkline.kvstore.cuts import DROPS_MAX
from trunkline.router.api.instructions import instruction_tokens as instruction_tokens
from trunkline.router.api.left_out import EditedPrompt, check_left_out, dropped_tokens
from trunkline.router.api.requests import check_length
from trunkline.router.api.turn import SessionTurn
from trunkline.router.errors import PromptError, bad_value
from trunkline.router.jobs.decoding import owned
from trunkline.router.jobs.job import Job, ModelLimits, Prompt, bad_word_ids, make_job, wanted_tokens
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest, Message
from trunkline.router.request_context import current, draw_seed
from trunkline.router.service import RouterService
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.tenancy.tenants import current_meter
from trunkline.router.text.chat_template import RenderedChat
from trunkline.router.text.conversation_memory import LEAST, beginning
from trunkline.router.text.reasoning_styles import ThoughtState
from trunkline.router.text.remembered_prompts import RememberedPrompt
from trunkline.router.text.token_ids import TokenIds
from trunkline.router.text.tokenizer import OFF_LOOP_CHARACTERS, Tokenizer
from trunkline.router.text.truncation import (
    NO_CUT,
    CutError,
    RetentionPolicy,
    TokenSpan,
    clip_spans,
    plan_cut,
    room_for,
    span_tokens,
)
from trunkline.router.tools.plan import ToolPlan
from trunkline.router.tools.readings import reads_same

RENDER_CHARACTERS_MAX: Final = 8 << 20
"""Largest number of characters of a conversation. It is limited because no other thread runs during a call that
joins a template's texts."""
LOGPROBS_OF_PROMPTS_MAX: Final = 1 << 18
"""Largest number of log-probabilities of prompt tokens in a request. Each takes about 100 bytes until the answer
is written."""
LAST_PRIORITY: Final = 2**31 - 1
"""Priority of requests that stand behind all others."""
_GOES_ON_CHARACTERS_MAX: Final = 1 << 20
"""Largest number of characters of a conversation that is rendered in the event loop, because it continues another
one. If all of it must be rendered anew, that takes 10 ms."""
_TURN_BYTES: Final = 500
"""Memory that a rendered message takes besides its text, about."""
_END_MARK: Final = "\ue000the answer goes on here\ue000"
"""Marks the end of a message that the answer continues, in what the template writes."""


@contextmanager
def prompt_errors(param: str) -> Iterator[None]:
    """Turn each `PromptError` that is raised in the block into the client's error, which names `param`.

    Raises:
        ApiError: 400.
    """
    try:
        yield
    except CutError as error:
        message = f"`{param}` cannot be truncated: {error}"
        raise bad_value(param, message, code="context_length_exceeded") from None
    except PromptError as error:
        raise bad_value(param, str(error)[:1000]) from None


def has_modules(body: ChatRequest | CompletionRequest, turn: SessionTurn | None) -> bool:
    """Return whether a prompt has modules, given by the request or by its stored session."""
    return body.modules is not None or (turn is not None and turn.session.modules is not None)


class Rendering(NamedTuple):
    """The way in which a conversation is written for the model: the options of the model's chat template."""

    add_generation_prompt: bool = False
    add_special_tokens: bool = False
    extra: dict[str, Any] | None = None
    """Extra variables of the template (`chat_template_kwargs`)."""
    tools: list[dict[str, Any]] | None = None
    """Functions to show (`ToolPlan.template_tools`)."""
    continues: bool = False
    """Whether the text ends with the content of the last message, which the answer continues."""

    documents: Sequence[dict[str, str]] = ()
    """Documents to show."""
    salt: str | None = None
    """The request's `cache_salt`."""

    @classmethod
    def of(cls, body: ChatRequest, plan: ToolPlan) -> Rendering:
        """Return the rendering that a chat completion asks for."""
        continues = bool(body.continue_final_message)
        begins = body.add_generation_prompt and not continues
        extra = body.template_variables
        documents, tools = body.documents or [], plan.template_tools
        return cls(begins, body.add_special_tokens, extra, tools, continues, documents, body.cache_salt)

    @property
    def variables(self) -> dict[str, Any] | None:
        """Extra variables of the template, documents among them."""
        return {**(self.extra or {}), "documents": self.documents} if self.documents else self.extra

    async def text(self, service: RouterService, messages: list[Message]) -> str:
        """Return the text of a conversation, in the model's chat template.

        Raises:
            ApiError: 400, the template refuses the messages or they are too long.
        """
        memory, known = current().conversations, None
        if len(messages) < LEAST or self.continues or not service.tokenizer.goes_on:
            memory = None
        if memory is not None:
            scope = cache_salt(self.salt)
            begins = (service.model_name, bool(self.tools), beginning(message.content for message in messages))
            known = memory.rendered.find(scope, begins, messages)
        agreed = 0 if known is None else known.agreed
        before = None if known is None else known.value

        def render() -> RenderedChat:
            turns = [message.for_template() for message in messages[agreed:]]
            if before is not None:
                turns[:0] = before.messages[:agreed]
            if self.continues:
                turns[-1]["content"] += _END_MARK
            return service.tokenizer.rendered_chat(
                turns,
                add_generation_prompt=self.add_generation_prompt,
                extra=self.variables,
                tools=self.tools,
                before=before,
            )

        goes_on = known is not None and agreed == len(known.items)
        characters = before.characters if before is not None and goes_on else 0
        characters += sum([len(message.content) for message in (messages[agreed:] if goes_on else messages)])
        size = characters + 64 * len(messages)
        size += sum(len(text) + 64 for document in self.documents for text in document.values())
        if size > RENDER_CHARACTERS_MAX:
            raise bad_value(
                "messages",
                f"`messages` have {size} characters; at most {RENDER_CHARACTERS_MAX} are allowed.",
                code="string_above_max_length",
            )
        # What goes on from a conversation is short work, whose length does not follow from the whole text.
        is_long = size > OFF_LOOP_CHARACTERS and (size > _GOES_ON_CHARACTERS_MAX or len(messages) > 2 * agreed)
        with prompt_errors("messages"):
            made = await service.large_requests.run(render) if is_long else render()
            if memory is not None:
                size = len(made.text) + _TURN_BYTES * len(messages)
                memory.rendered.put(scope, begins, messages, made._replace(characters=characters), size)
            return _before_mark(made.text) if self.continues else made.text


def _before_mark(text: str) -> str:
    """Return what a template has written before the mark at the end of the last message.

    Raises:
        PromptError: It has left the message out.
    """
    before, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise PromptError("the model's chat template leaves the last message out, so it cannot be continued")
    return before


async def encode_text(
    tokenizer: Tokenizer,
    text: str,
    limits: ModelLimits | None,
    *,
    add_special_tokens: bool,
    param: str,
    keep: slice | None = None,
) -> list[int]:
    """Return the token ids of a text; with `keep`, only that part of them.

    Raises:
        ApiError: 400, the text is so long that it certainly does not fit `limits`; it was not tokenised.
    """
    if keep is not None:
        check_length(len(text), param)
        ids = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
        return ids[keep]
    if limits is not None:
        check_fits(tokenizer, text, limits, param)
    return await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)


def check_fits(tokenizer: Tokenizer, text: str, limits: ModelLimits, param: str) -> None:
    """Refuse a text that is so long that it certainly does not fit `limits`.

    Raises:
        ApiError: 400.
    """
    fewest = tokenizer.fewest_tokens(text)
    if fewest >= limits.max_context:
        raise bad_value(
            param,
            f"this model's context is {limits.max_context} tokens, prompt and output together; "
            f"`{param}` has {len(text)} characters, more than {fewest} tokens. Please shorten it.",
            code="context_length_exceeded",
        )


def policy_of(body: ChatRequest | CompletionRequest, turn: SessionTurn | None) -> RetentionPolicy | None:
    """Return how to cut a prompt that does not fit; None: refuse it. A request without a policy has its session's.

    Raises:
        ApiError: 400, another parameter contradicts truncation.
    """
    policy = None if turn is None else turn.session.truncation
    if body.truncation is not None:
        policy = body.truncation.policy()
    if policy is not None and body.use_beam_search:
        raise bad_value("truncation", "`truncation` is not available in a beam search (`use_beam_search: true`)")
    if policy is not None and body.truncate_prompt_tokens is not None:
        raise bad_value(
            "truncate_prompt_tokens", "`truncate_prompt_tokens` contradicts `truncation`; please give one of them"
        )
    return policy


async def chat_job(
    service: RouterService,
    body: ChatRequest,
    plan: ToolPlan,
    turn: SessionTurn | None = None,
    edited: EditedPrompt | None = None,
) -> Job:
    """Make the job of a chat completion.

    Args:
        turn: Turn of the stored session whose history precedes the messages.
        edited: The prompt, if parts of it are left out (`edited_prompts.py`).

    Raises:
        ApiError: 400, naming the parameter that is wrong.
    """
    policy = policy_of(body, turn)
    if body.documents and not service.tokenizer.uses_documents:
        raise bad_value("documents", "this model's chat template has no use for `documents`")
    rendering = Rendering.of(body, plan)
    messages = body.messages
    if turn is not None:
        messages = await turn.messages(messages, continues=rendering.continues)
    discards: tuple[TokenSpan, ...] = ()
    if edited is not None:
        text, tokens, remembered, discards = edited.text, edited.tokens, edited.remembered, edited.drops
    elif turn is not None:
        text = await rendering.text(service, messages)
        tokens, remembered = await turn.tokens_of(
            text,
            "messages",
            add_special_tokens=body.add_special_tokens,
            salt=cache_salt(body.cache_salt),
            same=reads_same(plan),
        )
        discards = _discards(body, turn)
    else:
        text = await rendering.text(service, messages)
        remembered = await remembered_prompt(service, body, text, plan, fits=policy is None)
        tokens = await _tokens(service, body, text, policy, "messages") if remembered is None else remembered.ids
    head = 0
    if policy is not None and policy.keep_instructions:
        context = service.limits.max_context
        seen = len(tokens) - span_tokens(discards)
        if seen + room_for(wanted_tokens(body)[1], context) > context:
            head = await instruction_tokens(service, rendering, messages, text, tokens)
    thought: ThoughtState = "closed" if rendering.continues else plan.thought_behind(text)
    return _job(service, body, _Encoded(tokens, discards, head, thought, remembered), policy, turn, plan)


async def completion_job(
    service: RouterService, body: CompletionRequest, given: str | Sequence[int], turn: SessionTurn | None = None
) -> Job:
    """Make the job of a plain completion with a single prompt. `turn`: as in `chat_job`.

    Raises:
        ApiError: 400, naming the parameter that is wrong.
    """
    policy = policy_of(body, turn)
    tokens: Sequence[int]
    if turn is not None:
        tokens = await turn.continued(given, add_special_tokens=body.add_special_tokens)
    elif isinstance(given, str):
        tokens = await _tokens(service, body, given, policy, "prompt")
    else:
        tokens = given if body.prompt_slice is None else given[body.prompt_slice]
    discards = () if turn is None else _discards(body, turn)
    if body.drop:
        check_left_out(body)
        discards = dropped_tokens(body.drop, len(tokens))
    return _job(service, body, _Encoded(tokens, discards), policy, turn)


def _discards(body: ChatRequest | CompletionRequest, turn: SessionTurn) -> tuple[TokenSpan, ...]:
    """Return what a stored session leaves out of its history.

    Raises:
        ApiError: 400, the request leaves parts of it out itself.
    """
    if body.drop:
        raise bad_value("drop", "`drop` is not available in a stored session; use `POST /v1/sessions/ID/discard`")
    return turn.discards


class _Encoded(NamedTuple):
    """An encoded prompt."""

    tokens: Sequence[int]
    discards: tuple[TokenSpan, ...] = ()
    """Tokens that are left out in any case, merged."""
    head: int = 0
    """Number of first tokens that a cut keeps."""
    thought: ThoughtState = "possible"
    """Where the answer begins."""
    remembered: RememberedPrompt | None = None
    """As in `Job`."""


async def remembered_prompt(
    service: RouterService, body: ChatRequest, text: str, plan: ToolPlan, *, fits: bool
) -> RememberedPrompt | None:
    """Return a conversation's prompt, encoded as far as it is new; None: such prompts are not remembered.

    Args:
        fits: Whether all of the prompt must fit the context.

    Raises:
        ApiError: 400, it is too long.
    """
    prompts = service.model.remembered
    if not prompts.is_on or body.add_special_tokens or body.prompt_slice is not None:
        return None
    if fits:
        check_fits(service.tokenizer, text, service.limits, "messages")
    else:
        check_length(len(text), "messages")
    salt = cache_salt(body.cache_salt)
    return await prompts.encoded(text, salt, prompts.known(text, salt, reads_same(plan)))


async def _tokens(
    service: RouterService,
    body: ChatRequest | CompletionRequest,
    text: str,
    policy: RetentionPolicy | None,
    param: str,
) -> list[int]:
    if policy is not None:
        check_length(len(text), param)
    return await encode_text(
        service.tokenizer,
        text,
        service.limits if policy is None else None,
        add_special_tokens=body.add_special_tokens,
        param=param,
        keep=body.prompt_slice,
    )


def _job(
    service: RouterService,
    body: ChatRequest | CompletionRequest,
    encoded: _Encoded,
    policy: RetentionPolicy | None,
    turn: SessionTurn | None,
    plan: ToolPlan | None = None,
) -> Job:
    """Make the job of an encoded prompt, cut if it does not fit.

    Raises:
        ApiError: 400, naming the parameter that is wrong.
    """
    source = "prompt" if isinstance(body, CompletionRequest) else "messages"
    context = service.limits.max_context
    param, wanted = wanted_tokens(body)
    if policy is not None and wanted is not None and wanted >= context:
        raise bad_value(
            param,
            f"`{param}` is too large: {wanted}. This model's context is {context} tokens, prompt and output "
            "together, and truncation leaves the prompt at least one.",
            code="context_length_exceeded",
        )
    tokens, room = encoded.tokens, room_for(wanted, context)
    cut = NO_CUT
    if policy is not None or encoded.discards:
        with prompt_errors(source):
            cut = plan_cut(len(tokens), context, room, policy, head=encoded.head, discards=encoded.discards)
    if cut.drops:
        for name in ("prompt_logprobs", "echo"):
            value = getattr(body, name, None)
            if value is not None and value is not False:
                raise bad_value(name, f"`{name}` is not available for a prompt of which a part was left out")
    reused = 0 if turn is None else turn.reused_tokens
    if cut.drops and (body.exact or len(cut.drops) > DROPS_MAX):
        reused -= span_tokens(clip_spans(cut.drops, reused))
        tokens, cut = cut.without_dropped(tokens)
        encoded = encoded._replace(remembered=None)
    prompt = Prompt(TokenIds.given(tokens), cut=cut, thought=encoded.thought, remembered=encoded.remembered)
    job = job_for(service, body, prompt, tools=plan)
    if turn is None:
        return job
    turn.check_size(source)
    return replace(job, session_tokens=reused, ttl=turn.session.ttl)


def job_for(
    service: RouterService,
    body: ChatRequest | CompletionRequest,
    prompt: Prompt,
    *,
    tools: ToolPlan | None = None,
) -> Job:
    """Make the job for a prompt of a request (see `make_job`), with the tenant's salt, priority and grammar owner.

    Raises:
        ApiError: 400, naming the parameter that is wrong.
    """

    def encode(text: str) -> list[int]:
        return service.tokenizer.encode(text, add_special_tokens=False)

    job = make_job(
        body,
        prompt,
        service.limits,
        draw_seed,
        bad_words=bad_word_ids(body.bad_words, encode) if body.bad_words else [],
        tools=tools,
        predicted=encode(body.prediction.text) if body.prediction is not None else (),
    )
    check_scores(job, len(prompt.tokens))
    return of_tenant(job, body.cache_salt, body.priority)


def of_tenant(job: Job, salt: str | None, priority: int | None) -> Job:
    """Return a job with the tenant's salt, priority, share of the tiers and grammar owner.

    Args:
        salt: The request's `cache_salt`.
        priority: The request's `priority`.
    """
    meter = current_meter()
    return replace(
        job,
        salt=cache_salt(salt),
        priority=LAST_PRIORITY if current().is_behind else meter.priority(priority),
        grammar=owned(job.grammar, meter.tenant),
        tenant=meter.tenant,
        kv_share=meter.kv_share,
    )


def check_scores(job: Job, tokens: int) -> None:
    """Refuse a request for too many log-probabilities of prompts that have `tokens` tokens together.

    Raises:
        ApiError: 400.
    """
    count = job.sampling.prompt_logprobs + 1
    if count * tokens > LOGPROBS_OF_PROMPTS_MAX:
        raise bad_value(
            "prompt_logprobs",
            f"`prompt_logprobs` (or `logprobs` with `echo`) asks for {count * tokens} log-probabilities of prompt "
            f"tokens; {LOGPROBS_OF_PROMPTS_MAX} are possible at once. Please ask for fewer, or for fewer prompts.",
        )
