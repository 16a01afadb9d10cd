"""The parameters that generating endpoints share: the rows of the table of parameters that more than one applies.

`SharedParameters` act at every endpoint that generates. `DialogParameters` are about conversations,
`GenerationRequest` about answers of which one request may have several. What an endpoint has for itself is
declared in its own model.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from trunkline.router.jobs.drop_ranges import Drops
from trunkline.router.jobs.hints import NO_HINTS, Hints, hints_of
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.jobs.parameter_table import row
from trunkline.router.jobs.parameters import (
    REPETITION_PENALTY_MIN,
    AllowedIds,
    BadWords,
    BeamWidth,
    Budget,
    Choices,
    Count,
    CountOrZero,
    EarlyStopping,
    Ebnf,
    GrammarChoices,
    JsonSchema,
    LengthPenalty,
    LogitBias,
    Priority,
    PromptLogprobCount,
    Regex,
    ResponseFormat,
    SessionId,
    StopExpressions,
    StopIds,
    Stops,
    StructuredOutputs,
    Trailing,
    Truncation,
    Whitespace,
)
from trunkline.router.jobs.predictions import Prediction

MAX_TOKENS_SPELLINGS: Final = ("max_new_tokens", "max_output_tokens", "n_predict")
"""Other servers' names of the largest number of tokens of an answer."""
_SCHEMA: Final = "see [structured output](#structured-output)"
_BEAMS: Final = "see [beam search](#beam-search)"


class RequestBody(LateModel):
    """What all requests have."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = row("a served name", "the served model", "another name: 404")
    unknown: ClassVar[tuple[str, ...]] = ()
    """Names of parameters of the request that are not known."""

    def name_unknown(self, names: tuple[str, ...]) -> None:
        """Set `unknown`. (A private attribute of pydantic would take as long as all other fields together.)"""
        self.__dict__["unknown"] = names

    @property
    def warnings(self) -> list[str] | None:
        """What the answer tells the client about its request; None: nothing."""
        return [f"`{name}` is not a known parameter and was ignored" for name in self.unknown] or None


class SharedParameters(RequestBody):
    """The parameters of every endpoint that generates. None means that the client did not give the field."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = row(
        "0 to 2 (messages: to 1)", "model ¹", "0, and anything below 0.00001, takes the likeliest token"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = row("above 0, to 1", "model ¹, else 1")
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = row("-1, 0 (all) or more", "model ¹, else 0")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = row(
        "0 to 1", "model ¹, else 0", "relative to the likeliest token"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = row(
        "-2⁶³ to 2⁶³ - 1",
        "drawn",
        "the same seed gives the same answer, whatever else runs and whatever is cached (in float32; 16-bit types "
        "round)",
        also=("random_seed", "sampling_seed"),
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = row("-2 to 2", "0", "counts output tokens")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = row("-2 to 2", "0", "counts output tokens")
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTY_MIN, le=2)] | None = row(
        "0.01 to 2", "model ¹, else 1", "counts prompt and output tokens", also=("repeat_penalty",)
    )
    logit_bias: LogitBias = row(
        "object: token id → -100 to 100, 4,096 entries at most", "none", "added to the logits", value={}
    )
    bad_words: BadWords = row(
        "at most 128 strings of at most 256 characters",
        "none",
        "never completed, at the beginning of a text or after a space",
        value=[],
    )
    allowed_token_ids: AllowedIds | None = row("a list of token ids, not empty", "all", "nothing else is sampled")
    min_tokens: CountOrZero | None = row(
        "0 to `max_tokens`",
        "0",
        "before so many tokens, none that ends the answer is sampled; stop strings are looked for behind them",
        also=("min_new_tokens",),
    )
    stop: Stops = row(
        "a string or a list of at most 16, each of 1 to 1,024 characters",
        "none",
        "found across token borders",
        also=("stop_sequences", "stop_words", "stop_strings"),
        value=[],
    )
    stop_regex: StopExpressions = row(
        "an expression or a list of at most 16, each of at most 1,024 characters",
        "none",
        "see [stop expressions](#stop-expressions)",
        value=[],
    )
    stop_token_ids: StopIds | None = row("at most 256 token ids", "none", "besides the model's own end tokens")
    include_stop_str_in_output: bool | None = row(
        "boolean",
        "false",
        "whether the text ends with the stop string or match that ended it",
        also=("no_stop_trim",),
    )
    ignore_eos: bool | None = row("boolean", "false", "goes on after the model's end tokens")
    skip_special_tokens: bool | None = row("boolean", "true", "whether special tokens are left out of the text")
    structured_outputs: StructuredOutputs | None = row("an object", "free text", _SCHEMA)
    guided_json: JsonSchema | None = row("a JSON schema", "free text", _SCHEMA, also=("json_schema",))
    guided_regex: Regex | None = row("an expression", "free text", _SCHEMA, also=("regex",))
    guided_choice: GrammarChoices | None = row("a list of texts", "free text", _SCHEMA)
    guided_grammar: Ebnf | None = row("EBNF", "free text", _SCHEMA, also=("ebnf",))
    whitespace: Whitespace | None = row(
        '`"compact"`, `"any"`',
        "compact",
        "white space between the parts of JSON, in [structured output](#structured-output) and in tools' "
        "arguments",
    )
    truncate_prompt_tokens: Count | None = row(
        "1 or more", "all", "only so many tokens of the prompt are taken", also=("truncate",)
    )
    truncation_side: Literal["left", "right"] | None = row(
        '`"left"`, `"right"`', "left", "where `truncate_prompt_tokens` cuts: left keeps the prompt's last tokens"
    )
    truncation: Truncation | None = row(
        '`"disabled"`, `"auto"`, or `{"type": "retention_ratio", …}`',
        "disabled",
        "what happens to a prompt that does not fit; see [truncation](#truncation)",
    )
    exact: bool | None = row(
        "boolean",
        "false",
        "whether what is left of a prompt is computed as a prompt of its own, without KV that was computed behind "
        "what is left out; see [what is left out](#what-is-left-out)",
    )
    drop: Drops = row(
        'at most 1,024 objects `{"from": a, "to": b}`, ascending',
        "none",
        "messages (responses: items of `input`; completions: tokens of the prompt) a to b - 1, which the model "
        "does not see; see [what is left out](#what-is-left-out)",
        value=[],
    )
    priority: Priority | None = row(
        "32-bit integer",
        "0, or the [tenant's](#tenants)",
        "smaller goes first while requests wait; a smaller one than the tenant's counts as the tenant's",
    )
    cache_salt: SessionId | None = row(
        "1 to 128 characters",
        "none",
        "KV and schemas are shared only with requests of the same salt (in a stored session without modules: to "
        "be sent with each request)",
    )
    session_id: SessionId | None = row(
        "1 to 128 characters",
        "none",
        "`sess_…`: a [stored session](#sessions) (in responses and messages: 400); anything else is a label: "
        "requests with the same one tend to go [to the same group](routing.md#sessions). The header "
        "`X-Session-ID` says the same where the body says nothing",
    )
    prompt_cache_key: str | None = row(
        "a string", "none", "such a label, too, if there is no `session_id`; its first 128 characters count"
    )
    pml: str | None = row(
        "a prompt in PML", "none", "a prompt made of modules, in front of messages; see [schemas](#schemas)"
    )
    trailing: Trailing | None = row(
        '`"fixed"`, `"compact"`',
        "fixed",
        "where text after all modules goes: after the whole schema, or right after the last imported module",
    )
    nvext: Any = row("anything", "none", "hints in its `agent_hints`; see [hints](#hints)")
    agent_hints: Any = row("anything", "none", "see [hints](#hints)")
    agent_hint: Any = row("anything", "none", "see [hints](#hints)")
    prediction: Prediction | None = row(
        '`{"type": "content", "content": …}`, a string or text parts',
        "none",
        "what the answer will be like, such as a file before an edit: the answer is the same, and may come sooner "
        "(with `--speculation auto`); the first 32,768 characters count",
    )
    speculation: bool | None = row(
        "boolean", "true", "whether steps may try drafts of next tokens; the answer is the same"
    )
    stream: bool | None = row("boolean", "false", "server-sent events")

    @model_validator(mode="after")
    def _take_hints(self) -> Self:
        if self.priority is None and (said := self.hints.priority) is not None:
            self.priority = said
        return self

    @property
    def hints(self) -> Hints:
        """What the client says about its next requests."""
        if self.nvext is None and self.agent_hints is None and self.agent_hint is None:
            return NO_HINTS
        return hints_of(self.nvext, (self.agent_hints, self.agent_hint))

    @property
    def prompt_slice(self) -> slice | None:
        """The part of the prompt's tokens that is taken; None: all of them."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return None
        return slice(0, keep) if self.truncation_side == "right" else slice(-keep, None)


class DialogParameters(SharedParameters):
    """The parameters of endpoints that answer conversations."""

    chat_template_kwargs: dict[str, Any] | None = row("an object", "none", "the template's own switches")
    enable_thinking: bool | None = row("boolean", "the template's", "see [reasoning](#reasoning)")
    thinking_budget: Budget = row(
        "0 or more tokens, or -1: any number",
        "none",
        "the model's thought ends after so many tokens; see [reasoning](#reasoning)",
        also=("thinking_token_budget", "reasoning_budget"),
    )
    document_modules: bool | None = row("boolean", "false", "see [documents as modules](#documents-as-modules)")


class StreamOptions(LateModel):
    """The field `stream_options`: what a stream contains besides its text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(SharedParameters):
    """The parameters that chat and plain completions share."""

    max_tokens: Count | None = row(
        "1 to what the context leaves",
        "chat: what the context leaves; completions: 16",
        "more than is left: 400",
        also=MAX_TOKENS_SPELLINGS,
    )
    n: Choices | None = row(
        "1 to 1,024, and to what the engine decodes at once",
        "1",
        "choices; see [several choices](#several-choices)",
    )
    use_beam_search: bool | None = row("boolean", "false", _BEAMS)
    beam_width: BeamWidth | None = row("1 to 64", "", _BEAMS)
    length_penalty: LengthPenalty | None = row("-10 to 10", "1", _BEAMS)
    early_stopping: EarlyStopping | None = row('`true`, `false`, `"never"`', "false", _BEAMS)
    response_format: ResponseFormat | None = row("an object", "free text", _SCHEMA)
    prompt_logprobs: PromptLogprobCount = row(
        "0 to 20 alternatives, not with `stream`",
        "none",
        "see [log-probabilities](#log-probabilities-and-token-ids)",
    )
    return_token_ids: bool | None = row("boolean", "false", "see [token ids](#log-probabilities-and-token-ids)")
    return_tokens_as_token_ids: bool | None = row(
        "boolean", "false", "log-probabilities name tokens `token_id:ID` instead of by their texts"
    )
    return_timings: bool | None = row("boolean", "false", "see [timings](#timings)")
    stream_options: StreamOptions | None = row(
        '`{"include_usage": true, "continuous_usage_stats": true}`, only with `stream`',
        "none",
        "one more event, with the usage; `continuous_usage_stats`: also the usage so far in every event, unless "
        "`include_usage` is false",
    )

    @property
    def modules(self) -> str | dict[str, Any] | None:
        """The prompt if it consists of modules, in PML or as an object; else None."""
        prompt = getattr(self, "prompt", None)
        return self.pml if self.pml is not None else prompt if isinstance(prompt, dict) else None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.stream_options
        if options is None:
            return False
        return bool(options.continuous_usage_stats if options.include_usage is None else options.include_usage)

    @property
    def counts_along(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def alternatives(self) -> int:
        """Number of likeliest tokens in each token's log-probabilities; -1: no log-probabilities are wanted."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "is only allowed with `stream: true`", {"param": "stream_options"}
            )
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(
                "prompt_logprobs", "is not available with `stream: true`", {"param": "prompt_logprobs"}
            )
        return self
