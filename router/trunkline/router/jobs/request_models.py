"""Requests in OpenAI's form, as pydantic models.

What becomes of fields that are not declared is said in `parameter_table.py`. Contradictions between sampling
parameters are found in `job.py` and `decoding.py`, because they depend on the model's defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.router.jobs.generation_parameters import (
    MAX_TOKENS_SPELLINGS,
    DialogParameters,
    GenerationRequest,
    RequestBody,
)
from trunkline.router.jobs.known_parameters import KNOWN
from trunkline.router.jobs.late_model import LateModel
from trunkline.router.jobs.parameter_table import Endpoint, row
from trunkline.router.jobs.parameters import (
    Choices,
    Count,
    CountOrZero,
    LogprobCount,
    ModulesPrompt,
    Prompts,
    ToolChoice,
    Tools,
)
from trunkline.router.request_context import current
from trunkline.router.tenancy.auth import cache_salt
from trunkline.router.text.conversation_memory import LEAST, beginning_of_fields, size_of


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
        if kind == "refusal":
            kind, part = "text", {"text": part.get("refusal")}
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


class FunctionCall(LateModel):
    """A function that an earlier answer called."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, Field(min_length=1)]
    arguments: str
    """The call's arguments: JSON text, as the model wrote it."""


class ToolCall(LateModel):
    """One of the calls of an assistant's message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(LateModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: Annotated[Any, BeforeValidator(_content), WithJsonSchema(_CONTENT)]
    """Text of the message; an assistant's may be null."""
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
        if value.get("tool_calls") and role != "assistant":
            raise PydanticCustomError("tool_calls", "only a message with role 'assistant' has `tool_calls`")
        if role == "assistant" and value.get("content") is None:
            return {**value, "content": value.get("refusal") or ""}
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


def _known_first(value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> list[Message]:
    """Check the messages that do not stand at the beginning of a remembered conversation, too."""
    memory = current().conversations
    if memory is None or type(value) is not list or not LEAST <= len(value) <= MESSAGES_MAX:
        return check(value)  # type: ignore[no-any-return]
    begins = beginning_of_fields(value)
    scope = cache_salt((info.data or {}).get("cache_salt"))
    known = memory.checked.find(scope, begins, value)
    messages: list[Message]
    if known is None:
        messages, size, new = check(value), 0, value
    else:
        new = value[known.agreed :]
        try:
            messages = [*known.value[: known.agreed], *check(new)]
        except ValidationError:
            return check(value)  # type: ignore[no-any-return]  # which names the right message
        size = known.size - size_of(known.items[known.agreed :])
    memory.checked.put(scope, begins, value, messages, size + size_of(new))
    return messages


Messages = Annotated[list[Message], Field(max_length=MESSAGES_MAX, fail_fast=True), WrapValidator(_known_first)]


STORED_MESSAGES: Final = TypeAdapter(Annotated[list[Message], WrapValidator(_known_first)])
"""Checks the messages of a stored conversation, of which there may be any number."""
DOCUMENTS_MAX: Final = 1024
"""Largest number of documents beside a conversation."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingSwitch(LateModel):
    """The field `thinking` of chats: whether the model thinks before it answers, and how long."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["enabled", "disabled"]
    budget_tokens: CountOrZero | None = None


class ReasoningSwitch(LateModel):
    """The field `reasoning` of chats, in OpenRouter's form."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Effort | None = None
    max_tokens: CountOrZero | None = None
    enabled: bool | None = None
    exclude: bool | None = None


Documents = Annotated[list[dict[str, str]], Field(max_length=DOCUMENTS_MAX, fail_fast=True)]


class ChatRequest(GenerationRequest, DialogParameters):
    """The request `POST /v1/chat/completions`."""

    messages: Messages = row(
        'at least one `{"role", "content", "name"?}`; content is a string or a list of '
        '`{"type": "text", "text": …}`; an assistant\'s may have `tool_calls`, and null as content; one with role '
        "`tool` has a `tool_call_id`",
        "required, but beside modules",
        "the conversation; in a prompt of modules they follow the modules",
        value=[],
    )
    prompt: ModulesPrompt | None = row(
        '`{"schema", "modules", "text"}`',
        "none",
        "a prompt made of modules, in front of `messages`; see [schemas](#schemas)",
    )
    tools: Tools | None = row("functions", "none", "see [tools](#tools)")
    tool_choice: ToolChoice | None = row("", "auto", "see [tools](#tools)")
    parallel_tool_calls: bool | None = row("boolean", "", "see [tools](#tools)")
    max_completion_tokens: Count | None = row("as `max_tokens`", "`max_tokens`", "overrides `max_tokens`")
    logprobs: bool | None = row("boolean", "false", "see [log-probabilities](#log-probabilities-and-token-ids)")
    top_logprobs: LogprobCount | None = row("0 to 20, only with `logprobs`", "0", "alternatives for each token")
    add_generation_prompt: bool = row(
        "boolean", "true", "whether the prompt ends with the beginning of an answer", value=True
    )
    continue_final_message: bool | None = row(
        "boolean",
        "false",
        "the answer continues the last message, which is the assistant's, instead of following it; a session "
        "stores both as one message",
    )
    add_special_tokens: bool = row(
        "boolean",
        "false",
        "whether the tokenizer adds its special tokens; templates write them themselves",
        value=False,
    )
    echo: bool | None = row(
        "boolean, only with `continue_final_message`",
        "false",
        "the answer begins with the message that it continues",
        also=("return_full_text",),
    )
    documents: Documents | None = row(
        'at most 1,024 objects of strings, such as `{"title", "text"}`; not in a prompt of modules',
        "none",
        "the chat template gets them as `documents`; 400 where it has no use for them",
    )
    reasoning_effort: Effort | None = row(
        "`none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`",
        "the template's",
        "see [reasoning](#reasoning)",
    )
    thinking: ThinkingSwitch | None = row(
        '`{"type": "enabled", "budget_tokens"?}`, `{"type": "disabled"}`',
        "the template's",
        "see [reasoning](#reasoning)",
    )
    reasoning: ReasoningSwitch | None = row(
        "an object with `effort`, `max_tokens`, `enabled`, `exclude`",
        "none",
        "another form of `reasoning_effort`, `thinking_budget`, `enable_thinking` and, turned round, "
        "`include_reasoning`, which count where both are given",
    )
    include_reasoning: bool | None = row("boolean", "true", "whether the answer shows the model's thoughts")
    separate_reasoning: bool | None = row(
        "boolean", "true", "whether thoughts have a field of their own; if not, they are part of the text"
    )

    @property
    def thought_tokens_max(self) -> int | None:
        """Largest number of tokens of the model's thought; None: any number."""
        if self.thinking_budget is not None:
            return self.thinking_budget
        if self.thinking is not None:
            return self.thinking.budget_tokens
        return None if self.reasoning is None else self.reasoning.max_tokens

    @property
    def shows_thoughts(self) -> bool:
        """Whether the answer shows the model's thoughts."""
        if self.include_reasoning is None and self.reasoning is not None:
            return not self.reasoning.exclude
        return self.include_reasoning is not False

    @property
    def echoed(self) -> str:
        """The text with which the answer begins, besides the model's own."""
        return self.messages[-1].content if self.echo else ""

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """Extra variables of the chat template: `chat_template_kwargs`, and what the other parameters about
        thoughts mean in templates."""
        switch = self.reasoning or ReasoningSwitch()
        effort = self.reasoning_effort or switch.effort
        thinks = None if effort is None else effort != "none"
        if switch.enabled is not None and self.reasoning_effort is None:
            thinks = switch.enabled
        if self.thinking is not None:
            thinks = self.thinking.type == "enabled"
        if self.enable_thinking is not None:
            thinks = self.enable_thinking
        if thinks is None:
            return self.chat_template_kwargs
        variables: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
        if effort not in (None, "none"):
            variables["reasoning_effort"] = effort
        return {**variables, **(self.chat_template_kwargs or {})}

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
    def _check_continued(self) -> ChatRequest:
        if self.echo and not self.continue_final_message:
            raise PydanticCustomError("echo", "is only allowed with `continue_final_message`", {"param": "echo"})
        if self.documents and self.modules is not None:
            raise PydanticCustomError(
                "documents", "is not available for a prompt of modules", {"param": "documents"}
            )
        if not self.continue_final_message:
            return self
        if self.modules is not None:
            why = "is not available for a prompt of modules"
            raise PydanticCustomError("continue_final_message", why, {"param": "continue_final_message"})
        _check_continuation(self)
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

    prompt: Prompts = row(
        "a string, or a list of token ids, or a list of at most 1,024 of one of these; none empty; or "
        '`{"schema", "modules", "text"}`, a prompt made of [modules](#schemas)',
        "required, unless there is `pml`",
        "what is continued",
        value=[],
    )
    max_tokens: CountOrZero | None = row(
        "1 to what the context leaves; 0 with `echo`", "16", "more than is left: 400", also=MAX_TOKENS_SPELLINGS
    )
    logprobs: LogprobCount | None = row(
        "0 to 20 alternatives", "none", "see [log-probabilities](#log-probabilities-and-token-ids)"
    )
    best_of: Choices | None = row(
        "`n` or more; above `n` not with `stream`", "`n`", "see [several choices](#several-choices)"
    )
    echo: bool | None = row(
        "boolean", "false", "the answer begins with the prompt; `max_tokens` may be 0", also=("return_full_text",)
    )
    add_special_tokens: bool = row("boolean", "true", "what the tokenizer adds to a text", value=True)

    @property
    def alternatives(self) -> int:
        """As in `GenerationRequest`."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def prompts(self) -> list[str | Sequence[int]]:
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


def _check_continuation(request: ChatRequest | TokenizeRequest) -> None:
    """Check that the last message of a request with `continue_final_message` can be continued."""
    last = request.messages[-1] if request.messages else None
    why = ""
    if last is None or last.role != "assistant" or last.tool_calls:
        why = "needs a last message that is the assistant's, without `tool_calls`"
    elif request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set:
        why = "contradicts `add_generation_prompt: true`"
    if why:
        raise PydanticCustomError("continue_final_message", why, {"param": "continue_final_message"})


class TokenizeRequest(RequestBody):
    """The request `POST /tokenize`, with either `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[Messages, Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give either `prompt` or `messages`", {"param": "prompt"})
        if self.continue_final_message:
            _check_continuation(self)
        return self


class DetokenizeRequest(RequestBody):
    """The request `POST /detokenize`."""

    tokens: DetokenizeIds


CHAT: Final = Endpoint("chat", ChatRequest, KNOWN)
COMPLETIONS: Final = Endpoint("completions", CompletionRequest, KNOWN)
TOKENIZE: Final = Endpoint("tokenize", TokenizeRequest, KNOWN)
