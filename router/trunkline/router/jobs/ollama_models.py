"""The parameters of Ollama's API: its endpoints' rows in the table of parameters.

A request's `options` count as if they stood beside them, so one table says what becomes of both.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.router.errors import bad_value
from trunkline.router.jobs.generation_parameters import MAX_TOKENS_SPELLINGS, DialogParameters, RequestBody
from trunkline.router.jobs.known_parameters import HINTS, KNOWN
from trunkline.router.jobs.parameter_table import Endpoint, Known, Reading, row
from trunkline.router.jobs.parameters import Count, Tools
from trunkline.router.jobs.pooling_models import Inputs, PoolingRequest

_Model = TypeVar("_Model", bound=RequestBody)
_FORMAT = WithJsonSchema({"anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}]})
_LIFETIME = WithJsonSchema({"type": ["string", "number"]})
_TURNS = WithJsonSchema({"type": "array", "items": {"type": "object"}})
_KEEP_ALIVE: Final[dict[str, Any]] = {
    "allowed": "a time",
    "default": "none",
    "meaning": "has no effect: models stay loaded; 0 without a prompt is answered as Ollama answers it",
}


class OllamaRequest(DialogParameters):
    """What `POST /api/chat` and `POST /api/generate` share."""

    stream: bool | None = row("boolean", "true", "a stream of lines, each a JSON object")
    max_tokens: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = row(
        "a number of tokens; 0, -1, -2: any number",
        "any number",
        "largest number of tokens of the answer, which ends with the context at the latest",
        also=(*MAX_TOKENS_SPELLINGS, "max_tokens"),
        alias="num_predict",
    )
    format: Annotated[Any, _FORMAT] = row(
        '`"json"`, or a JSON schema', "free text", "see [structured output](#structured-output)"
    )
    think: bool | Literal["low", "medium", "high"] | None = row(
        "boolean, `low`, `medium`, `high`", "the template's", "see [reasoning](#reasoning)"
    )
    truncate: bool | None = row(
        "boolean", "true", "whether a prompt that does not fit [is cut](#truncation); if not, it is refused"
    )
    keep_alive: Annotated[Any, _LIFETIME] = row(**_KEEP_ALIVE)
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = row(
        "-1 or more", "all tokens", "has no effect but a warning: penalties count all tokens"
    )
    penalize_newline: bool | None = row(
        "boolean", "true", "has no effect but a warning: line ends are tokens like others"
    )

    @property
    def warnings(self) -> list[str] | None:
        """As in `RequestBody`, with the options that have no effect."""
        texts = super().warnings or []
        if self.repeat_last_n not in (None, -1):
            texts.append("`repeat_last_n` has no effect: penalties count all tokens")
        if self.penalize_newline is False:
            texts.append("`penalize_newline` has no effect: line ends are tokens like others")
        return texts or None

    @property
    def limit(self) -> int | None:
        """Largest number of tokens of the answer; None: what the context leaves."""
        return self.max_tokens if self.max_tokens and self.max_tokens > 0 else None

    def translated(self) -> dict[str, Any]:
        """Return what a chat completion has under other names."""
        fields: dict[str, Any] = {}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format not in (None, ""):
            schema = {"name": "answer", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if isinstance(self.think, bool):
            fields["enable_thinking"] = self.think
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        if self.truncate is not False and self.truncate_prompt_tokens is None and self.truncation is None:
            fields["truncation"] = "auto"
        return fields

    @model_validator(mode="after")
    def _check_format(self) -> OllamaRequest:
        if self.format is not None and self.format not in ("", "json") and not isinstance(self.format, dict):
            raise PydanticCustomError("format", 'must be "json" or a JSON schema', {"param": "format"})
        return self


class OllamaChatRequest(OllamaRequest):
    """The request `POST /api/chat`."""

    messages: Annotated[list[Any], _TURNS] = row(
        "`role`: `system`, `user`, `assistant`, `tool`; `content`: a string; an assistant's `thinking` and "
        "`tool_calls`; a tool's `tool_name` or `tool_call_id`",
        "none",
        "the conversation; without messages the model is only looked up. A last message of the assistant's is "
        "continued",
        value=[],
    )
    tools: Tools | None = row("functions", "none", "see [tools](#tools)")


class OllamaGenerateRequest(OllamaRequest):
    """The request `POST /api/generate`."""

    prompt: str = row(
        "a string", "none", "what the model answers; without it the model is only looked up", value=""
    )
    system: str | None = row("a string, not with `raw`", "none", "the system message")
    raw: bool | None = row("boolean", "false", "continues the prompt as it is, without the chat template")

    @model_validator(mode="after")
    def _check_raw(self) -> OllamaGenerateRequest:
        for name in ("system", "think"):
            if self.raw and getattr(self, name):
                raise PydanticCustomError(
                    "raw", "is a matter of the chat template, which `raw` leaves out", {"param": name}
                )
        return self


class OllamaEmbedRequest(PoolingRequest):
    """The request `POST /api/embed`."""

    _required = ("input",)
    input: Inputs = row(
        "a string or a list of at most 2,048, none empty", "required", "what gets an embedding", value=[]
    )
    dimensions: Count | None = row(
        "1 to the model's own number", "the model's own number", "only so many first numbers, of length 1 again"
    )
    truncate: bool | None = row(
        "boolean", "true", "whether an input that does not fit loses its end; if not, it is refused"
    )
    keep_alive: Annotated[Any, _LIFETIME] = row(**_KEEP_ALIVE)


class OllamaEmbeddingRequest(PoolingRequest):
    """The request `POST /api/embeddings`, the older form."""

    _required = ("prompt",)
    prompt: str = row("a string, not empty", "required", "what gets an embedding", value="")
    keep_alive: Annotated[Any, _LIFETIME] = row(**_KEEP_ALIVE)


class OllamaShowRequest(RequestBody):
    """The request `POST /api/show`."""

    model: str | None = row("a served name", "the served model", "another name: 404", also=("name",))
    verbose: bool | None = row("boolean", "false", "has no effect")


class _WithOptions(Endpoint[_Model]):
    """An endpoint whose parameters may also stand in `options`."""

    def read(self, fields: dict[str, Any]) -> Reading:
        """As `Endpoint.read`.

        Raises:
            ApiError: 400, also if an option stands beside `options`, too.
        """
        options = fields.pop("options", None) or {}
        if not isinstance(options, dict):
            raise bad_value("options", "`options` must be an object")
        for name, value in options.items():
            if fields.get(name) is not None and value is not None:
                raise bad_value(name, f"`{name}` stands in `options` and beside it")
            if value is not None:
                fields[name] = value
        if fields.get("seed") == -1:  # which asks for another answer each time
            del fields["seed"]
        return super().read(fields)


_AT: Final = frozenset({"ollama"})
_LOADING: Final = Known(
    tuple(
        "num_ctx num_keep num_batch num_gpu main_gpu low_vram vocab_only use_mmap use_mlock num_thread numa "
        "f16_kv logits_all shift".split()
    ),
    None,
    "how a model is loaded and run; the context is always the model's whole one",
    _AT,
)
_ONLY_HERE: Final = (
    _LOADING,
    Known(("images",), (), "the served models read text only, so `images` are not supported", _AT),
    Known(("context",), (), "`context` is not supported; send the conversation to /api/chat", _AT),
    Known(("template",), ("",), "`template` is not supported; `raw` takes a prompt as it is", _AT),
    Known(("response_format",), ({"type": "text"},), "send `format`", _AT),
    Known(("thinking", "reasoning", "reasoning_effort"), (), "send `think`", _AT),
    Known(("tool_choice",), ("auto",), "`tool_choice` is not supported; the model chooses", _AT),
    Known(("system",), ("",), "send a message with the role system", _AT),
    Known(("logprobs", "top_logprobs"), (False, 0), "log-probabilities belong to /v1/chat/completions", _AT),
)
_OWN: Final = {name for known in _ONLY_HERE for name in known.names}
_SHARED: Final = tuple(
    known._replace(names=tuple(name for name in known.names if name not in _OWN), at=frozenset())
    for known in KNOWN
    if not known.at or {"chat", "messages"} <= known.at
)
"""What is known and not applied at chat completions and in Anthropic's form of them, here, too."""
_KNOWN: Final = (*_SHARED, *_ONLY_HERE)
_NAMES: Final = {
    "response_format.json_schema.schema": "format",
    "response_format.json_schema": "format",
    "response_format": "format",
    "continue_final_message": "messages",
}
OLLAMA_CHAT: Final = _WithOptions("ollama", OllamaChatRequest, _KNOWN, _NAMES)
OLLAMA_GENERATE: Final = _WithOptions("ollama", OllamaGenerateRequest, _KNOWN, {**_NAMES, "messages[0]": "system"})
OLLAMA_EMBED: Final = _WithOptions("ollama", OllamaEmbedRequest, (*HINTS, _LOADING), {})
OLLAMA_EMBEDDING: Final = _WithOptions("ollama", OllamaEmbeddingRequest, (*HINTS, _LOADING), {"input": "prompt"})
OLLAMA_SHOW: Final = Endpoint("ollama", OllamaShowRequest, HINTS)
