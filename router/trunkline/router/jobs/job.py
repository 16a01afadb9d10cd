"""From a checked request to what the engine is asked: sampling, limits, end tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from trunkline.controller.messages import Grammar, PromptLayout
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.errors import bad_value
from trunkline.router.jobs.decoding import Decoding, check_candidates, decoding_of, grammar_of, spaced
from trunkline.router.jobs.parameters import SESSION_ID_CHARACTERS_MAX
from trunkline.router.jobs.request_models import ChatRequest, CompletionRequest, GenerationRequest
from trunkline.router.text.tokenizer import SamplingDefaults
from trunkline.router.text.truncation import PromptCut
from trunkline.router.tools.plan import ToolPlan
from trunkline.worker.messages import Sampling

_Value = TypeVar("_Value", int, float)

GREEDY_BELOW = 1e-5
"""Lower temperatures mean "always the likeliest token": divided by them, logits would leave float32."""
COMPLETION_TOKENS_DEFAULT = 16
"""`max_tokens` of `/v1/completions` where none is given: OpenAI's and vLLM's."""


REPEATED_BYTES_MAX = 16 << 20
"""What a request's many prompts may repeat of its other parameters on their way to the engine."""
_SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF


class Modules(msgspec.Struct, frozen=True):
    """What of a prompt is taken from a schema."""

    layout: PromptLayout
    """Of the whole prompt."""
    tokens: int
    """Of modules, that the model sees."""
    end: int
    """Positions that the prompt spans."""
    schema: str
    """Key of the schema's record (`Schema.key`)."""
    hint: PromptLayout | None = None
    """Texts that other requests of the schema will likely want soon."""


class Prompt(msgspec.Struct, frozen=True):
    """A request's prompt, ready for the engine."""

    tokens: list[int]
    """Of one with modules: the request's own."""
    param: str = ""
    """Where it comes from; "": `messages` or `prompt`."""
    cut: PromptCut = PromptCut()
    """What of it is not to be seen."""
    modules: Modules | None = None

    @property
    def span(self) -> int:
        """How many tokens of the context the prompt takes."""
        return len(self.tokens) - self.cut.dropped_tokens if self.modules is None else self.modules.end


class Job(msgspec.Struct, frozen=True):
    """Everything about one generation that does not depend on where it runs."""

    prompt: list[int]
    """Of one with modules: the request's own tokens."""
    max_tokens: int
    sampling: Sampling
    eos_ids: frozenset[int]
    """Sampling one of these ends the text."""
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    at_start: bool = True
    """Whether the output is a text of its own (an answer), not the continuation of one."""
    salt: bytes = b""
    decoding: Decoding = Decoding()
    grammar: Grammar | None = None
    priority: int = 0
    cut: PromptCut = PromptCut()
    """What of `prompt` is not to be seen."""
    session: str = ""
    """The client's id for the conversation that it belongs to."""
    session_tokens: int = 0
    """First tokens of `prompt` that are a stored session's."""
    ttl: float = 0.0
    """Seconds for which its KV is kept; 0: as the engine is set."""
    modules: Modules | None = None

    @property
    def module_tokens(self) -> int:
        """How many prompt tokens belong to modules."""
        return 0 if self.modules is None else self.modules.tokens

    @property
    def seen_tokens(self) -> int:
        """How many prompt tokens the model sees."""
        return len(self.prompt) - self.cut.dropped_tokens + self.module_tokens

    def packed_prompt(self) -> bytes:
        """Return the prompt as it is sent to a controller."""
        return pack_int32(self.prompt)

    def packed_drops(self) -> bytes:
        """Return the dropped ranges of the prompt as they are sent."""
        return pack_int32([end for span in self.cut.drops for end in span])


class Limits(msgspec.Struct, frozen=True):
    """What the model and the cluster allow."""

    max_context: int
    vocab_size: int
    eos_ids: frozenset[int]
    defaults: SamplingDefaults
    max_rows: int = 0
    """Sequences that an engine decodes at once; 0: not known."""


def check_prompt(prompt: Prompt, limits: Limits, param: str) -> None:
    """Refuse prompts that cannot run.

    Raises:
        ApiError: 400: empty, ids outside the vocabulary, or no room left for a single output token.
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
    check_ids(prompt.tokens, limits.vocab_size, param)


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        ApiError: 400 with the id.
    """
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
    limits: Limits,
    draw_seed: Callable[[], int],
    *,
    bad_words: list[list[int]] | None = None,
    tools: ToolPlan | None = None,
) -> Job:
    """Return the job of a checked request.

    Args:
        bad_words: the request's, as token ids.
        tools: the request's, made ready.

    Raises:
        ApiError: 400 naming the parameter.
    """
    chat = isinstance(request, ChatRequest)
    max_tokens = _fit(request, prompt, limits)
    stop_ids = frozenset(request.stop_token_ids or ())
    check_ids(stop_ids, limits.vocab_size, "stop_token_ids")
    check_ids(request.logit_bias, limits.vocab_size, "logit_bias")
    check_ids(request.allowed_token_ids or (), limits.vocab_size, "allowed_token_ids")
    decoding = decoding_of(request, limits.max_rows)
    eos_ids = stop_ids if request.ignore_eos else stop_ids | limits.eos_ids
    grammar = _one_grammar(request, None if tools is None else tools.grammar, eos_ids)
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
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False
        and not (tools is not None and tools.needs_special_tokens),
        at_start=chat,
        decoding=decoding,
        grammar=grammar,
        priority=request.priority or 0,
        cut=prompt.cut,
        modules=prompt.modules,
        session=request.session_id or (request.prompt_cache_key or "")[:SESSION_ID_CHARACTERS_MAX],
    )


def another_job(
    job: Job, request: CompletionRequest, prompt: Prompt, limits: Limits, draw_seed: Callable[[], int]
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
    """Refuse what would be sent to the engine with each of many prompts and is too large for that.

    Raises:
        ApiError: 400.
    """
    grammar = 0 if job.grammar is None else len(job.grammar.text)
    size = grammar + len(job.sampling.allowed_ids) + 14 * len(job.sampling.logit_bias)
    if size * prompts > REPEATED_BYTES_MAX:
        raise bad_value(
            "prompt",
            f"`prompt` has {prompts} prompts; with such large other parameters at most "
            f"{REPEATED_BYTES_MAX // size} fit in a request",
        )


def _fit(request: ChatRequest | CompletionRequest, prompt: Prompt, limits: Limits) -> int:
    """Return how many output tokens a prompt gets, at least 1."""
    check_prompt(prompt, limits, prompt.param or ("messages" if isinstance(request, ChatRequest) else "prompt"))
    max_tokens = _max_tokens(request, prompt.span, limits.max_context)
    if request.min_tokens and request.min_tokens > max_tokens:
        raise bad_value(
            "min_tokens", f"`min_tokens` is {request.min_tokens}, but the answer has {max_tokens} tokens at most"
        )
    return max(max_tokens, 1)  # with `echo` alone: a token that nobody gets to see


def _one_grammar(request: GenerationRequest, of_tools: Grammar | None, eos_ids: frozenset[int]) -> Grammar | None:
    grammar = grammar_of(request)
    if grammar is not None and of_tools is not None:
        raise bad_value(
            grammar.param,
            f"`{grammar.param}` contradicts `{of_tools.param}`: an answer can follow one grammar only",
        )
    grammar = grammar or of_tools
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
    """Return how long the client wants the answer to be (None: any), and the parameter that says so."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _max_tokens(request: GenerationRequest, prompt_len: int, max_context: int) -> int:
    param, wanted = wanted_tokens(request)
    room = max_context - prompt_len
    if wanted is None:
        return room if isinstance(request, ChatRequest) else min(COMPLETION_TOKENS_DEFAULT, room)
    if wanted > room:
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
        # The model's sampling defaults say nothing about a search: it goes by the likelihoods alone.
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
    """Return how many alternatives are wanted at each position of the prompt; -1: no log-probabilities of it."""
    count = -1 if request.prompt_logprobs is None else request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo:
        count = max(count, request.alternatives)
    return count
