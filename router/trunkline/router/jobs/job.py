"""Make a `Job` from a checked request: all that the engine needs, such as sampling and end tokens. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from trunkline.controller.messages import Grammar, PromptLayout
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.errors import bad_value
from trunkline.router.jobs.decoding import Decoding, check_candidates, decoding_of, grammar_of, spaced
from trunkline.router.jobs.generation_parameters import GenerationRequest
from trunkline.router.jobs.hints import Hints
from trunkline.router.jobs.parameters import SESSION_ID_CHARACTERS_MAX
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest
from trunkline.router.text.reasoning_styles import ThoughtState
from trunkline.router.text.remembered_prompts import RememberedPrompt
from trunkline.router.text.stop_expressions import StopExpression, compile_expression
from trunkline.router.text.token_ids import TokenIds
from trunkline.router.text.tokenizer import SamplingDefaults
from trunkline.router.text.truncation import PromptCut
from trunkline.router.tools.plan import ToolPlan
from trunkline.worker.messages import Sampling

_Value = TypeVar("_Value", int, float)

GREEDY_BELOW = 1e-5
"""Temperature below which the likeliest token is always taken: divided by a lower one, logits would leave
float32's range."""
COMPLETION_TOKENS_DEFAULT = 16
"""Value of `max_tokens` of `/v1/completions` if the request gives none, as in OpenAI's API and vLLM."""
REPEATED_BYTES_MAX = 16 << 20
"""Limit of the bytes that a request's prompts cause besides their tokens: the other parameters are sent to the
engine again for each prompt."""
_SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF
_OPENING_BYTES: Final = 16
_CHUNK_MAX: Final = 1024
"""Largest number of tokens of a chunk. Of longer prompts, controllers tell what they have."""


class Modules(msgspec.Struct, frozen=True):
    """The part of a prompt that is taken from a schema."""

    layout: PromptLayout
    """Layout of the whole prompt."""
    tokens: int
    """Number of tokens of modules that the model sees."""
    end: int
    """Number of positions that the whole prompt spans."""
    schema: str
    """Key of the schema's record (`StoredSchema.key`); "": they are of no schema."""
    hint: PromptLayout | None = None
    """Layout of the texts that other requests of the schema will probably need soon; None: there is no
    prediction."""


class Prompt(msgspec.Struct, frozen=True):
    """A request's prompt, ready for the engine."""

    tokens: Sequence[int]
    """All tokens of the prompt; in a prompt of modules only those that the request adds itself."""
    param: str = ""
    """Name of the parameter that gives the prompt, for errors; "": `messages` or `prompt`."""
    cut: PromptCut = PromptCut()
    """The tokens of the prompt that the model does not see."""
    modules: Modules | None = None
    thought: ThoughtState = "possible"
    """Where the answer begins: within a thought, where one may begin, or behind one."""
    remembered: RememberedPrompt | None = None
    """As in `Job`."""

    @property
    def span(self) -> int:
        """Number of positions of the context that the prompt takes."""
        return len(self.tokens) - self.cut.dropped_tokens if self.modules is None else self.modules.end


class Job(msgspec.Struct, frozen=True):
    """All properties of a generation that do not depend on the group that runs it."""

    prompt: Sequence[int]
    """All tokens of the prompt; in a prompt of modules only those that the request adds itself."""
    max_tokens: int
    sampling: Sampling
    eos_ids: frozenset[int]
    """Token ids that end the text when one of them is sampled."""
    stops: tuple[str, ...] = ()
    stop_expressions: tuple[StopExpression, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    at_start: bool = True
    """Whether the output is a text of its own (an answer) and does not continue the prompt's text."""
    salt: bytes = b""
    decoding: Decoding = Decoding()
    grammar: Grammar | None = None
    priority: int = 0
    kv_share: tuple[float, float] = (0.0, 1.0)
    """Floor and ceiling of the tenant's part of each KV tier, each from 0 to 1."""
    cut: PromptCut = PromptCut()
    """The tokens of `prompt` that the model does not see."""
    session: str = ""
    """The client's id for the conversation that the request belongs to."""
    session_tokens: int = 0
    """Number of first tokens of `prompt` that come from a stored session's history."""
    ttl: float = 0.0
    """Seconds for which the KV is kept after the request's end; 0: as the engine is configured."""
    modules: Modules | None = None
    tenant: str = ""
    """Name of the tenant that pays for the request."""
    thought: ThoughtState = "possible"
    """Where the answer begins: within a thought, where one may begin, or behind one."""
    hints: Hints = Hints()
    """What the client says about its next requests."""
    formed: bool = False
    """Whether the answer is either calls or a text that follows the grammar."""
    remembered: RememberedPrompt | None = None
    """The prompt as it is remembered, for the answer to it; None: it is not."""
    prediction: bytes | None = b""
    """int32 token ids that the answer may be like, as drafts; None: the request wants no drafts."""
    opening: str = ""
    """Digest of a short conversation's messages up to the user's first one, the same in all of its turns: its
    name for routing, if its client gives none."""

    @property
    def method(self) -> str:
        """The job's decoding method in metrics."""
        return "pooling" if self.sampling.pooling else self.decoding.name

    @property
    def module_tokens(self) -> int:
        """Number of prompt tokens that belong to modules."""
        return 0 if self.modules is None else self.modules.tokens

    @property
    def schema_key(self) -> str:
        """Key of the schema that the prompt's modules are of; "": they are of none, or there are none."""
        return "" if self.modules is None else self.modules.schema

    @property
    def seen_tokens(self) -> int:
        """Number of prompt tokens that the model sees."""
        return len(self.prompt) - self.cut.dropped_tokens + self.module_tokens

    def packed_prompt(self) -> bytes:
        """Return the prompt as it is sent to a controller."""
        return self.prompt.packed if isinstance(self.prompt, TokenIds) else pack_int32(self.prompt)

    def packed_drops(self) -> bytes:
        """Return the dropped ranges of the prompt as they are sent to a controller."""
        return pack_int32([end for span in self.cut.drops for end in span])


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits and defaults of the model and the cluster, for all requests."""

    max_context: int
    vocab_size: int
    eos_ids: frozenset[int]
    defaults: SamplingDefaults
    max_rows: int = 0
    """Number of sequences that an engine can decode at once; 0: not known yet."""


def check_prompt(prompt: Prompt, limits: ModelLimits, param: str) -> None:
    """Refuse a prompt that cannot run.

    Raises:
        ApiError: 400, the prompt is empty, has ids outside the vocabulary, or leaves no room for an output token.
    """
    if not prompt.tokens:
        raise bad_value(param, f"`{param}` comes to no tokens at all")
    if prompt.span >= limits.max_context:
        raise bad_value(
            param,
            f"this model's context is {limits.max_context} tokens, prompt and output together; "
            f"`{param}` alone has {prompt.span} tokens. Please shorten it, or use `truncation` where "
            "there is one.",
            code="context_length_exceeded",
        )
    if prompt.remembered is None or int(prompt.remembered.tokens.max()) >= limits.vocab_size:
        check_ids(prompt.tokens, limits.vocab_size, param)


def check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        ApiError: 400 with the id.
    """
    if not ids or (type(ids) is TokenIds and ids.are_below(vocab_size)):
        return
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise bad_value(param, f"`{param}`: {bad} is not a token id; they are 0 to {vocab_size - 1}")


def bad_word_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token sequences that write `words`, at the beginning of a text and, after a space, within one."""
    sequences = []
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = encode(text)
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


def make_job(
    request: ChatRequest | CompletionRequest,
    prompt: Prompt,
    limits: ModelLimits,
    draw_seed: Callable[[], int],
    *,
    bad_words: list[list[int]] | None = None,
    tools: ToolPlan | None = None,
    predicted: Sequence[int] = (),
) -> Job:
    """Return the job of a checked request.

    Args:
        bad_words: Token sequences of the request's `bad_words`.
        predicted: Tokens of the request's `prediction`.
        tools: Plan for the request's tools.

    Raises:
        ApiError: 400, naming the parameter that is wrong.
    """
    chat = isinstance(request, ChatRequest)
    max_tokens = _fit(request, prompt, limits)
    stop_ids = frozenset(request.stop_token_ids or ())
    check_ids(stop_ids, limits.vocab_size, "stop_token_ids")
    check_ids(request.logit_bias, limits.vocab_size, "logit_bias")
    check_ids(request.allowed_token_ids or (), limits.vocab_size, "allowed_token_ids")
    decoding = decoding_of(request, limits.max_rows)
    eos_ids = stop_ids if request.ignore_eos else stop_ids | limits.eos_ids
    wanted = grammar_of(request)
    grammar = _whole_grammar(request, wanted, tools, prompt.thought, max_tokens, eos_ids)
    if decoding.beam is not None:
        check_candidates(decoding.beam, len(eos_ids), limits.vocab_size)
    return Job(
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampling=_sampling(
            request,
            limits.defaults,
            draw_seed,
            decoding,
            bad_words or [],
            pack_int32(sorted(eos_ids)) if request.min_tokens or grammar is not None else b"",
        ),
        eos_ids=eos_ids,
        stops=tuple(request.stop),
        stop_expressions=tuple(map(compile_expression, request.stop_regex)),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False
        and not (tools is not None and tools.needs_special_tokens),
        at_start=chat,
        decoding=decoding,
        grammar=grammar,
        priority=request.priority or 0,
        hints=request.hints,
        cut=prompt.cut,
        modules=prompt.modules,
        thought=prompt.thought,
        remembered=prompt.remembered,
        formed=tools is not None and tools.has_either(wanted),
        prediction=None if request.speculation is False else pack_int32(predicted[: limits.max_context]),
        session=request.session_id or (request.prompt_cache_key or "")[:SESSION_ID_CHARACTERS_MAX],
        opening=_opening(request, prompt),
    )


def _opening(request: ChatRequest | CompletionRequest, prompt: Prompt) -> str:
    """Return `Job.opening`; "" if there is no message of a user. A prompt of modules has none: other schemas'
    prompts may have the same messages, and its modules are found at its schema's home."""
    if not isinstance(request, ChatRequest) or prompt.modules is not None or len(prompt.tokens) >= _CHUNK_MAX:
        return ""
    digest = hashlib.blake2b(digest_size=_OPENING_BYTES)
    for message in request.messages:
        digest.update(message.model_dump_json().encode())
        if message.role == "user":
            return digest.hexdigest()
    return ""


def another_job(
    job: Job, request: CompletionRequest, prompt: Prompt, limits: ModelLimits, draw_seed: Callable[[], int]
) -> Job:
    """Return a request's job for another of its prompts.

    Raises:
        ApiError: 400: the prompt cannot run.
    """
    sampling = job.sampling
    if request.seed is None:
        sampling = replace(sampling, seed=draw_seed() & _SEED_MASK)
    return replace(job, prompt=prompt.tokens, max_tokens=_fit(request, prompt, limits), sampling=sampling)


def check_repeated(job: Job, prompts: int) -> None:
    """Refuse parameters that are too large to be sent to the engine again with each of many prompts.

    Raises:
        ApiError: 400.
    """
    grammar = 0 if job.grammar is None else len(job.grammar.text)
    size = grammar + len(job.sampling.allowed_ids) + 14 * len(job.sampling.logit_bias) + len(job.prediction or b"")
    if size * prompts > REPEATED_BYTES_MAX:
        raise bad_value(
            "prompt",
            f"`prompt` has {prompts} prompts; with such large other parameters at most "
            f"{REPEATED_BYTES_MAX // size} fit in a request",
        )


def _fit(request: ChatRequest | CompletionRequest, prompt: Prompt, limits: ModelLimits) -> int:
    """Return how many output tokens a prompt gets, at least 1."""
    check_prompt(prompt, limits, prompt.param or ("messages" if isinstance(request, ChatRequest) else "prompt"))
    max_tokens = _max_tokens(request, prompt.span, limits.max_context)
    if request.min_tokens and request.min_tokens > max_tokens:
        raise bad_value(
            "min_tokens", f"`min_tokens` is {request.min_tokens}, but the answer has {max_tokens} tokens at most"
        )
    return max(max_tokens, 1)  # with only `echo` wanted, the engine draws a token that the client does not get


def _whole_grammar(
    request: GenerationRequest,
    wanted: Grammar | None,
    tools: ToolPlan | None,
    thought: ThoughtState,
    max_tokens: int,
    eos_ids: frozenset[int],
) -> Grammar | None:
    """Return the grammar of an answer with its thought and calls; None: any text is allowed.

    Args:
        wanted: What the request asks for besides tools.
        thought: Where the answer begins.
        max_tokens: Largest number of tokens of the answer.
        eos_ids: The tokens that end the answer.

    Raises:
        ApiError: 400, the request has parameters that are not available with a grammar.
    """
    budget = request.thought_tokens_max if isinstance(request, ChatRequest) else None
    if budget is not None and budget >= max_tokens:
        budget = None
    grammar = wanted if tools is None else tools.grammar(wanted, thought, budget)
    if grammar is None:
        return None
    if request.use_beam_search:
        raise bad_value(
            grammar.param, f"`{grammar.param}` is not available in a beam search (`use_beam_search: true`)"
        )
    if not eos_ids:
        raise bad_value("ignore_eos", "`ignore_eos` leaves structured output no token to end with")
    return spaced(grammar, request)


def wanted_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """Return the parameter that limits the answer's length, and the limit in tokens; None: there is no limit."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    if isinstance(request, CompletionRequest) and request.max_tokens is None:
        return "max_tokens", COMPLETION_TOKENS_DEFAULT
    return "max_tokens", request.max_tokens


def _max_tokens(request: GenerationRequest, prompt_len: int, max_context: int) -> int:
    param, wanted = wanted_tokens(request)
    room = max_context - prompt_len
    if wanted is None:
        return room
    if wanted > room:
        if getattr(request, param) is None:  # the default may be cut, but not what the client asks for
            return room
        raise bad_value(
            param,
            f"`{param}` is too large: {wanted}. This model's context is {max_context} tokens and the prompt "
            f"has {prompt_len}, so {room} are left.",
            code="context_length_exceeded",
        )
    return wanted


def _sampling(
    request: ChatRequest | CompletionRequest,
    defaults: SamplingDefaults,
    draw_seed: Callable[[], int],
    decoding: Decoding,
    bad_words: list[list[int]],
    stop_ids: bytes,
) -> Sampling:
    def given(value: _Value | None, default: _Value) -> _Value:
        return default if value is None else value

    seed = (draw_seed() if request.seed is None else request.seed) & _SEED_MASK
    if decoding.beam is not None:
        # The model's sampling defaults do not apply to a search, which ranks by likelihoods alone.
        return Sampling(temperature=0.0, seed=seed)
    temperature = given(request.temperature, defaults.temperature)
    top_k = given(request.top_k, defaults.top_k)
    ranked = decoding.samples > decoding.choices
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=given(request.top_p, defaults.top_p),
        top_k=max(top_k, 0),
        min_p=given(request.min_p, defaults.min_p),
        seed=seed,
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=request.logit_bias,
        logprobs=max(request.alternatives, 0) if ranked else request.alternatives,
        min_tokens=request.min_tokens or 0,
        stop_ids=stop_ids,
        bad_words=bad_words,
        allowed_ids=pack_int32(sorted(set(request.allowed_token_ids or ()))),
        prompt_logprobs=_prompt_logprobs(request),
    )


def _prompt_logprobs(request: GenerationRequest) -> int:
    """Return the number of alternatives wanted at each position of the prompt; -1: no log-probabilities."""
    count = -1 if request.prompt_logprobs is None else request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo:
        count = max(count, request.alternatives)
    return count
