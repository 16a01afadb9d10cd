"""Requests in OpenAI's form, as pydantic models.

Fields that are not declared are ignored, as by other OpenAI-compatible servers. Fields that are known to change
the answer and are not supported are listed in `api/requests.py` and refused. Contradictions between sampling
parameters are found in `job.py` and `decoding.py`, because they depend on the model's defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.router.jobs.parameters import (
    REPETITION_PENALTY_MIN,
    AllowedIds,
    BadWords,
    BeamWidth,
    Choices,
    Count,
    CountOrZero,
    EarlyStopping,
    Ebnf,
    GrammarChoices,
    JsonSchema,
    LengthPenalty,
    LogitBias,
    LogprobCount,
    ModulesPrompt,
    Priority,
    PromptLogprobCount,
    Prompts,
    Regex,
    ResponseFormat,
    SessionId,
    Stops,
    StructuredOutputs,
    TokenIds,
    ToolChoice,
    Tools,
    Trailing,
    Truncation,
    Whitespace,
)


def _content(value: Any) -> str:
    """Return a message's text: a string, or text parts joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content", 'parts must be objects like {"type": "text", "text": "…"}')
        if kind != "text":
            raise PydanticCustomError("content", f"parts of type {kind[:40]!r} are not supported, only 'text'")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "a text part needs a string `text`")
        texts.append(part["text"])
    return "\n".join(texts)


_CONTENT: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


MESSAGES_MAX: Final = 16_384
"""Largest number of messages of a conversation. To check, translate and render one takes 10 to 20 microseconds."""
TOOL_CALLS_MAX: Final = MESSAGES_MAX
"""Largest number of tool calls in one message."""
DETOKENIZE_IDS_MAX: Final = 1 << 20
_SLICE_IDS: Final = 1 << 16


def _token_ids(value: Any) -> list[int]:
    """Check a long list of token ids in slices. Pydantic's own check would hold Python's lock to its end."""
    if not isinstance(value, list):
        raise PydanticCustomError("tokens", "must be a list of token ids")
    if len(value) > DETOKENIZE_IDS_MAX:
        raise PydanticCustomError("tokens", f"must have at most {DETOKENIZE_IDS_MAX} token ids, not {len(value)}")
    for start in range(0, len(value), _SLICE_IDS):
        part = value[start : start + _SLICE_IDS]
        if set(map(type, part)) != {int}:
            index = start + next(i for i, item in enumerate(part) if type(item) is not int)
            raise PydanticCustomError("tokens", "must be an integer, a token id", {"param": f"tokens[{index}]"})
    return value


_DETOKENIZE_IDS: Final[dict[str, Any]] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "maxItems": DETOKENIZE_IDS_MAX,
}
DetokenizeIds = Annotated[Any, BeforeValidator(_token_ids), WithJsonSchema(_DETOKENIZE_IDS)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """The field `stream_options`: what a stream contains besides its text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(_Request):
    """The fields that chat and plain completions share. None means that the client did not give the field."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    min_tokens: CountOrZero | None = None
    stop: Stops = []
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTY_MIN, le=2)] | None = None
    logit_bias: LogitBias = {}
    bad_words: BadWords = []
    allowed_token_ids: AllowedIds | None = None
    n: Choices | None = None
    use_beam_search: bool | None = None
    beam_width: BeamWidth | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: EarlyStopping | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Regex | None = None
    guided_choice: GrammarChoices | None = None
    guided_grammar: Ebnf | None = None
    whitespace: Whitespace | None = None
    prompt_logprobs: PromptLogprobCount = None
    truncate_prompt_tokens: Count | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    session_id: SessionId | None = None
    """Id of a stored session, or any label for the conversation that the request belongs to."""
    cache_salt: SessionId | None = None
    """Salt of the request: only requests with the same salt share KV and schemas."""
    prompt_cache_key: str | None = None
    """A label for requests that begin alike."""
    pml: str | None = None
    """A prompt of a schema's modules, in PML."""
    trailing: Trailing | None = None
    """Where text after all modules goes: after the whole schema, or right after the last imported module."""
    truncation: Truncation | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def modules(self) -> str | dict[str, Any] | None:
        """The prompt if it consists of modules, in PML or as an object; else None."""
        prompt = getattr(self, "prompt", None)
        return self.pml if self.pml is not None else prompt if isinstance(prompt, dict) else None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

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


class FunctionCall(BaseModel):
    """A function that an earlier answer called."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, Field(min_length=1)]
    arguments: str
    """The call's arguments: JSON text, as the model wrote it."""


class ToolCall(BaseModel):
    """One of the calls of an assistant's message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: Annotated[Any, BeforeValidator(_content), WithJsonSchema(_CONTENT)]
    """Text of the message; null is allowed only with `tool_calls`."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=TOOL_CALLS_MAX, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    """Id of the call that a message with role "tool" answers."""
    reasoning_content: str | None = None
    """An assistant's thought before its answer, which templates may show or leave out."""

    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for field in ("function_call", "audio"):
            if value.get(field):
                raise PydanticCustomError("unsupported", f"`{field}` in messages is not supported")
        role = value.get("role")
        if role == "function":
            raise PydanticCustomError("unsupported", "role 'function' is not supported; use 'tool'")
        if role == "tool" and not isinstance(value.get("tool_call_id"), str):
            raise PydanticCustomError("tool_call_id", "a message with role 'tool' needs a string `tool_call_id`")
        if value.get("reasoning") is not None and value.get("reasoning_content") is None:
            value = {**value, "reasoning_content": value["reasoning"]}
        if value.get("tool_calls"):
            if role != "assistant":
                raise PydanticCustomError("tool_calls", "only a message with role 'assistant' has `tool_calls`")
            if value.get("content") is None:
                return {**value, "content": ""}
        return value

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it: "developer" is OpenAI's newer word for "system"."""
        fields: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_calls:
            fields["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            fields["reasoning_content"] = fields["thinking"] = self.reasoning_content
        return fields


Messages = Annotated[list[Message], Field(max_length=MESSAGES_MAX, fail_fast=True)]


class ChatRequest(GenerationRequest):
    """The request `POST /v1/chat/completions`."""

    messages: Messages = []
    """The conversation. In a prompt of modules the messages follow the modules, and there may be none."""
    prompt: ModulesPrompt | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens. Chat templates write them themselves, so the default is
    False."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    """Whether the answer shows the model's thoughts; None: it does."""
    separate_reasoning: bool | None = None
    """Whether thoughts have a field of their own; None: they do. False: they are part of the text, as written."""

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """Extra variables of the chat template: `chat_template_kwargs`, and what `reasoning_effort` means in
        templates."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        thinks = self.reasoning_effort != "none"
        effort = {"reasoning_effort": self.reasoning_effort} if thinks else {}
        return {"enable_thinking": thinks, "thinking": thinks, **effort, **(self.chat_template_kwargs or {})}

    @property
    def alternatives(self) -> int:
        """As in `GenerationRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @model_validator(mode="after")
    def _check_prompt(self) -> ChatRequest:
        _check_one_of(self)
        if not self.messages and self.modules is None:
            given = "messages" in self.model_fields_set
            raise PydanticCustomError(
                "empty" if given else "missing", "must have at least one message", {"param": "messages"}
            )
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "is only allowed with `logprobs: true`", {"param": "top_logprobs"}
            )
        return self


class CompletionRequest(GenerationRequest):
    """The request `POST /v1/completions`."""

    prompt: Prompts = []
    """The prompts: a list of texts or of lists of token ids; or an object, which is a prompt of modules."""
    max_tokens: CountOrZero | None = None
    """Largest number of output tokens. 0 is allowed only with `echo`: the answer repeats the prompt and adds
    nothing."""
    logprobs: LogprobCount | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    add_special_tokens: bool = True

    @property
    def alternatives(self) -> int:
        """As in `GenerationRequest`."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts; empty for a prompt of modules."""
        return [] if isinstance(self.prompt, dict) else self.prompt

    @model_validator(mode="after")
    def _check_prompt(self) -> CompletionRequest:
        _check_one_of(self)
        if not self.prompt and self.pml is None:
            raise PydanticCustomError("missing", "is required", {"param": "prompt"})
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "must be at least 1 without `echo`", {"param": "max_tokens"})
        return self


def _check_one_of(request: ChatRequest | CompletionRequest) -> None:
    if request.pml is not None and request.prompt:
        raise PydanticCustomError("pml", "says the same as `prompt`; give one of them", {"param": "pml"})
    if request.trailing is not None and request.modules is None:
        raise PydanticCustomError(
            "trailing", "is about prompts of modules (`pml`, or `prompt` with a `schema`)", {"param": "trailing"}
        )


class TokenizeRequest(_Request):
    """The request `POST /tokenize`, with either `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[Messages, Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give either `prompt` or `messages`", {"param": "prompt"})
        return self


class DetokenizeRequest(_Request):
    """The request `POST /detokenize`."""

    tokens: DetokenizeIds
