"""Requests in OpenAI's form, as pydantic models.

Types are strict (`"temperature": "0.5"` is an error). Fields that are not declared are ignored, as other
OpenAI-compatible servers do; those that are known to change the answer and are not supported are listed
in `unsupported.py` and refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator
from pydantic_core import PydanticCustomError

STOPS_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 1024
"""Bounds the text held back, and the work per token."""
LOGPROBS_MAX: Final = 20
STOP_IDS_MAX: Final = 256
LOGIT_BIAS_MAX: Final = 4096
REPETITION_PENALTY_MIN: Final = 0.01
"""Logits are divided by it; much less would take them out of float32's range."""


def _clean_text(value: str) -> str:
    if "\x00" in value:
        raise PydanticCustomError("nul", "must not contain NUL characters")
    return value


def _stops(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(value) > STOPS_MAX:
        raise PydanticCustomError("stop", f"must have at most {STOPS_MAX} strings, not {len(value)}")
    for item in value:
        if not item:
            raise PydanticCustomError("stop", "must not contain an empty string")
        if len(item) > STOP_CHARACTERS_MAX:
            raise PydanticCustomError("stop", f"strings may have {STOP_CHARACTERS_MAX} characters at most")
        _clean_text(item)
    return value


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object from token ids to numbers")
    if len(value) > LOGIT_BIAS_MAX:
        raise PydanticCustomError("logit_bias", f"must have at most {LOGIT_BIAS_MAX} entries")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise PydanticCustomError("logit_bias", f"keys must be token ids, not {str(key)[:40]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "values must be numbers between -100 and 100")
        biases[int(key)] = float(bias)
    return biases


def _prompt(value: Any) -> str | list[int]:
    """A text or a list of token ids, also as the only element of a list."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise PydanticCustomError("batch", "lists of several prompts are not supported; send one each")
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise PydanticCustomError("empty", "must not be empty")
        return _clean_text(value)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise PydanticCustomError("prompt", "must be a string or a list of token ids")
    if not value:
        raise PydanticCustomError("empty", "must not be empty")
    return value


def _content(value: Any) -> str:
    """A message's text: a string, or text parts joined by line ends."""
    if isinstance(value, str):
        return _clean_text(value)
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
        texts.append(_clean_text(part["text"]))
    return "\n".join(texts)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "must be an integer")
    return value


Prompt = Annotated[Any, BeforeValidator(_prompt, json_schema_input_type=str | list[int])]
Count = Annotated[StrictInt, BeforeValidator(_no_bool), Field(ge=1, le=2**31 - 1)]
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]], Field(max_length=STOP_IDS_MAX)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(_Request):
    """What chat and plain completions share. None means that the client did not say."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    stop: Annotated[Any, BeforeValidator(_stops, json_schema_input_type=str | list[str] | None)] = []
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTY_MIN, le=2)] | None = None
    logit_bias: Annotated[Any, BeforeValidator(_logit_bias, json_schema_input_type=dict[str, float] | None)] = {}
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "is only allowed with `stream: true`", {"param": "stream_options"}
            )
        return self


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: Annotated[Any, BeforeValidator(_content, json_schema_input_type=str | list[dict[str, Any]])]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_tools(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for field in ("tool_calls", "function_call", "audio"):
                if value.get(field):
                    raise PydanticCustomError("unsupported", f"`{field}` in messages is not supported")
            if value.get("role") in ("tool", "function"):
                raise PydanticCustomError("unsupported", f"role {value['role']!r} is not supported")
        return value

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it. "developer" is OpenAI's newer word for "system", which few know."""
        fields = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return fields if self.name is None else {**fields, "name": self.name}


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """Templates write their special tokens themselves."""
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "is only allowed with `logprobs: true`", {"param": "top_logprobs"}
            )
        return self


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    add_special_tokens: bool = True


class TokenizeRequest(_Request):
    """`POST /tokenize`: either `prompt` or `messages`."""

    prompt: Annotated[str, BeforeValidator(lambda v: _clean_text(v) if isinstance(v, str) else v)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
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
    """`POST /detokenize`."""

    tokens: list[int]
