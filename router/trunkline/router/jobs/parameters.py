"""Types of request parameters, for the models of requests, with the checks that need no other parameter.

Types are strict (`"temperature": "0.5"` is an error). Each limit bounds a cost: the text that a stream holds back,
the work for each token, or the size of a message to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import countOf
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.router.jobs.late_model import LateModel
from trunkline.router.text.stop_expressions import (
    EXPRESSION_CHARACTERS_MAX,
    check_edges,
    compile_expression,
)
from trunkline.router.text.token_ids import TokenIds
from trunkline.router.text.truncation import RetentionPolicy

STOPS_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 1024
"""Largest length of a stop string. It bounds the text that a stream holds back, and the work for each token."""
LOGPROBS_MAX: Final = 20
STOP_IDS_MAX: Final = 256
LOGIT_BIAS_MAX: Final = 4096
ALLOWED_IDS_MAX: Final = 1 << 18
BAD_WORDS_MAX: Final = 128
BAD_WORD_CHARACTERS_MAX: Final = 256
"""Largest length of one of `bad_words`. Each is tokenised twice, and each step looks for its tokens."""
CHOICES_MAX: Final = 1024
"""Largest number of sequences that one HTTP request may start, over all its prompts."""
BEAM_WIDTH_MAX: Final = 64
REPETITION_PENALTY_MIN: Final = 0.01
"""Smallest repetition penalty. Logits are divided by it, and a much smaller one would take them out of float32's
range."""
LENGTH_PENALTY_MAX: Final = 10.0
GRAMMAR_CHARACTERS_MAX: Final = 256 << 10
REGEX_CHARACTERS_MAX: Final = 64 << 10
GRAMMAR_CHOICES_MAX: Final = 1024
SINK_TOKENS_MAX: Final = 4096
SESSION_ID_CHARACTERS_MAX: Final = 128
TTL_MAX_S: Final = 366 * 24 * 3600
METADATA_MAX: Final = 16
"""Largest number of entries of `metadata`, as in OpenAI's API."""
METADATA_KEY_CHARACTERS_MAX: Final = 64
"""Largest length of a key of `metadata`, as in OpenAI's API."""
METADATA_VALUE_CHARACTERS_MAX: Final = 512
"""Largest length of a value of `metadata`, as in OpenAI's API."""


def _texts(value: Any, what: str, *, count_max: int, characters_max: int) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PydanticCustomError(what, "must be a list of strings")
    if len(value) > count_max:
        raise PydanticCustomError(what, f"must have at most {count_max} strings, not {len(value)}")
    for item in value:
        if not item:
            raise PydanticCustomError(what, "must not contain an empty string")
        if len(item) > characters_max:
            raise PydanticCustomError(what, f"strings may have {characters_max} characters at most")
    return value


def _stops(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, str | list):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    texts = [value] if isinstance(value, str) else value
    return _texts(texts, "stop", count_max=STOPS_MAX, characters_max=STOP_CHARACTERS_MAX)


def _stop_expressions(value: Any) -> list[str]:
    if value in (None, ""):
        return []
    if not isinstance(value, str | list):
        raise PydanticCustomError("stop_regex", "must be an expression or a list of expressions")
    texts = [value] if isinstance(value, str) else value
    texts = _texts(texts, "stop_regex", count_max=STOPS_MAX, characters_max=EXPRESSION_CHARACTERS_MAX)
    try:
        check_edges(compile_expression(text) for text in texts)
    except ValueError as error:
        raise PydanticCustomError("stop_regex", "{reason}", {"reason": str(error)}) from None
    return texts


def _bad_words(value: Any) -> list[str]:
    if value is None:
        return []
    texts = _texts(value, "bad_words", count_max=BAD_WORDS_MAX, characters_max=BAD_WORD_CHARACTERS_MAX)
    if not all(text.strip() for text in texts):
        raise PydanticCustomError("bad_words", "must not contain a string of spaces only")
    return texts


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


def _one_prompt(value: Any) -> str | Sequence[int]:
    if type(value) is TokenIds:  # some, all whole numbers
        return value
    if isinstance(value, str):
        if not value:
            raise PydanticCustomError("empty", "must not be empty")
        return value
    if not isinstance(value, list) or countOf(map(type, value), int) != len(value):  # a pass in C
        raise PydanticCustomError("prompt", "must be a string or a list of token ids")
    if not value:
        raise PydanticCustomError("empty", "must not be empty")
    return value


def _prompts(value: Any) -> list[str] | list[Sequence[int]] | dict[str, Any]:
    """Return the prompts of `prompt` as a list; a prompt of modules, an object, is returned as it is.

    A prompt is a text or a list of token ids. Several prompts of one kind are given as a list. The result is empty
    if the field is missing.
    """
    if value is None:
        return []
    if isinstance(value, dict):
        modules: dict[str, Any] = _modules(value)
        return modules
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return [_one_prompt(value)]  # type: ignore[return-value]
    if len(value) > CHOICES_MAX:
        raise PydanticCustomError("prompt", f"must have at most {CHOICES_MAX} prompts, not {len(value)}")
    if len({type(item) for item in value}) > 1:
        raise PydanticCustomError("prompt", "must be all strings or all lists of token ids")
    prompts: list[Any] = []
    for index, item in enumerate(value):
        try:
            prompts.append(_one_prompt(item))
        except PydanticCustomError as error:
            param = "prompt" if len(value) == 1 else f"prompt[{index}]"
            raise PydanticCustomError(error.type, error.message_template, {"param": param}) from None
    return prompts


def _modules(value: Any) -> Any:
    """Check the form of a prompt of modules. The compiler of prompts checks everything else."""
    if not isinstance(value, dict):
        raise PydanticCustomError("prompt", "must be an object with a `schema` and, mostly, `modules`")
    if not isinstance(value.get("schema"), str) or not value["schema"]:
        raise PydanticCustomError("prompt", "needs the name of a schema in `schema`")
    return value


def _false_is_none(value: Any) -> Any:
    return None if value is False else value


def _json_text(value: Any) -> Any:
    """Return a JSON value that may also be given as a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise PydanticCustomError("json", "is a string, but not one with JSON in it") from None


def _schema(value: Any) -> Any:
    value = _json_text(value)
    if not isinstance(value, dict | bool):
        raise PydanticCustomError("json_schema", "must be a JSON schema: an object or a boolean")
    return value


def _object(value: Any) -> Any:
    value = _json_text(value)
    if not isinstance(value, dict):
        raise PydanticCustomError("structural_tag", "must be an object")
    return value


def _grammar_choices(value: Any) -> list[str]:
    if isinstance(value, list) and not value:
        raise PydanticCustomError("choice", "must not be empty")
    return _texts(value, "choice", count_max=GRAMMAR_CHOICES_MAX, characters_max=STOP_CHARACTERS_MAX)


def _policy(value: Any) -> Any:
    if isinstance(value, str):
        return {"type": value}
    if not isinstance(value, dict | BaseModel):
        raise PydanticCustomError("truncation", 'must be "disabled", "auto" or an object with a `type`')
    return value


def _metadata(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise PydanticCustomError("metadata", "must be an object of strings")
    if len(value) > METADATA_MAX:
        raise PydanticCustomError("metadata", f"must have at most {METADATA_MAX} entries, not {len(value)}")
    for key, item in value.items():
        if not 1 <= len(key) <= METADATA_KEY_CHARACTERS_MAX:
            raise PydanticCustomError("metadata", f"keys must have 1 to {METADATA_KEY_CHARACTERS_MAX} characters")
        if len(item) > METADATA_VALUE_CHARACTERS_MAX:
            raise PydanticCustomError(
                "metadata", f"values may have {METADATA_VALUE_CHARACTERS_MAX} characters at most"
            )
    return value


_INT32_MAX: Final = 2**31 - 1
_TEXTS: Final[dict[str, Any]] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS_MAX},
    "minItems": 1,
    "maxItems": GRAMMAR_CHOICES_MAX,
}
_TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
_IDS: Final[dict[str, Any]] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": _INT32_MAX},
    "minItems": 1,
}
_MODULE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "path": _TEXT,
        "args": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["path"],
}
_MODULES: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "schema": _TEXT,
        "modules": {"type": "array", "items": _MODULE},
        "text": {"type": "string"},
    },
    "required": ["schema"],
}
_PROMPTS: Final[dict[str, Any]] = {
    "anyOf": [
        _MODULES,
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": CHOICES_MAX},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": CHOICES_MAX},
    ]
}
_STOPS: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS_MAX},
        {**_TEXTS, "minItems": 0, "maxItems": STOPS_MAX},
        {"type": "null"},
    ]
}
_BAD_WORDS: Final[dict[str, Any]] = {
    "anyOf": [
        {
            "type": "array",
            "items": {"type": "string", "pattern": r"\S", "maxLength": BAD_WORD_CHARACTERS_MAX},
            "maxItems": BAD_WORDS_MAX,
        },
        {"type": "null"},
    ]
}
_LOGIT_BIAS: Final[dict[str, Any]] = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": LOGIT_BIAS_MAX,
        },
        {"type": "null"},
    ]
}
_OBJECT_OR_JSON: Final[dict[str, Any]] = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_SCHEMA_OR_JSON: Final[dict[str, Any]] = {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}
_FUNCTION: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["name"],
}
_TOOLS: Final[dict[str, Any]] = {
    "type": "array",
    "maxItems": 128,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        "required": ["type", "function"],
    },
}
_TOOL_CHOICE: Final[dict[str, Any]] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}

_RATIO: Final[dict[str, Any]] = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
_KEEP: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "instructions": {"type": "boolean"},
        "sink_tokens": {"type": "integer", "minimum": 0, "maximum": SINK_TOKENS_MAX},
    },
}
_TRUNCATION: Final[dict[str, Any]] = {
    "anyOf": [
        {"enum": ["disabled", "auto"]},
        {
            "type": "object",
            "properties": {"type": {"const": "retention_ratio"}, "retention_ratio": _RATIO, "keep": _KEEP},
            "required": ["type"],
        },
    ]
}
_METADATA: Final[dict[str, Any]] = {
    "type": "object",
    "propertyNames": {"minLength": 1, "maxLength": METADATA_KEY_CHARACTERS_MAX},
    "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE_CHARACTERS_MAX},
    "maxProperties": METADATA_MAX,
}


def _early_stopping(value: Any) -> Any:
    if value is not None and not isinstance(value, bool) and value != "never":
        raise PydanticCustomError("early_stopping", 'must be true, false or "never"')
    return value


Count = Annotated[StrictInt, Field(ge=1, le=_INT32_MAX)]
Budget = Annotated[
    Annotated[StrictInt, Field(ge=0, le=_INT32_MAX)] | None,
    BeforeValidator(lambda value: None if value == -1 else value),
]
"""Tokens of a thought; -1, vLLM's way to say that any number is allowed, becomes None."""
CountOrZero = Annotated[StrictInt, Field(ge=0, le=_INT32_MAX)]
Choices = Annotated[StrictInt, Field(ge=1, le=CHOICES_MAX)]
BeamWidth = Annotated[StrictInt, Field(ge=1, le=BEAM_WIDTH_MAX)]
Priority = Annotated[StrictInt, Field(ge=-_INT32_MAX - 1, le=_INT32_MAX)]
LogprobCount = Annotated[StrictInt, Field(ge=0, le=LOGPROBS_MAX)]
PromptLogprobCount = Annotated[
    Annotated[StrictInt, Field(ge=0, le=LOGPROBS_MAX)] | None, BeforeValidator(_false_is_none)
]
LengthPenalty = Annotated[float, Field(ge=-LENGTH_PENALTY_MAX, le=LENGTH_PENALTY_MAX)]
EarlyStopping = Annotated[bool | Literal["never"], BeforeValidator(_early_stopping)]
_TokenId = Annotated[StrictInt, Field(ge=0, le=_INT32_MAX)]
StopIds = Annotated[list[_TokenId], Field(max_length=STOP_IDS_MAX)]
AllowedIds = Annotated[list[_TokenId], Field(min_length=1, max_length=ALLOWED_IDS_MAX, fail_fast=True)]
Stops = Annotated[Any, BeforeValidator(_stops), WithJsonSchema(_STOPS)]
StopExpressions = Annotated[Any, BeforeValidator(_stop_expressions), WithJsonSchema(_STOPS)]
BadWords = Annotated[Any, BeforeValidator(_bad_words), WithJsonSchema(_BAD_WORDS)]
LogitBias = Annotated[Any, BeforeValidator(_logit_bias), WithJsonSchema(_LOGIT_BIAS)]
Prompts = Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_PROMPTS)]
ModulesPrompt = Annotated[Any, BeforeValidator(_modules), WithJsonSchema(_MODULES)]
Trailing = Literal["fixed", "compact"]
JsonSchema = Annotated[Any, BeforeValidator(_schema), WithJsonSchema(_SCHEMA_OR_JSON)]
StructuralTag = Annotated[Any, BeforeValidator(_object), WithJsonSchema(_OBJECT_OR_JSON)]
GrammarChoices = Annotated[Any, BeforeValidator(_grammar_choices), WithJsonSchema(_TEXTS)]
Regex = Annotated[str, Field(min_length=1, max_length=REGEX_CHARACTERS_MAX)]
Tools = Annotated[Any, WithJsonSchema(_TOOLS)]
"""Type of the field `tools`, which takes any JSON value: `trunkline.router.tools.plan` checks it later."""
ToolChoice = Annotated[Any, WithJsonSchema(_TOOL_CHOICE)]
"""Type of the field `tool_choice`, which takes any JSON value: `trunkline.router.tools.plan` checks it later."""
Ebnf = Annotated[str, Field(min_length=1, max_length=GRAMMAR_CHARACTERS_MAX)]
Whitespace = Literal["compact", "any"]
"""Type of the field that says which white space a grammar allows between the parts of JSON: none, or any."""


class NamedSchema(LateModel):
    """The field `response_format.json_schema`. `strict` changes nothing: answers always follow the schema."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(LateModel):
    """The field `response_format`: free text, any JSON object, JSON of a schema, or marked parts with schemas."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None

    @property
    def rest(self) -> dict[str, Any]:
        """The fields of a structural tag besides its type, as they were sent."""
        return self.model_extra or {}


class StructuredOutputs(LateModel):
    """The field `structured_outputs`, in vLLM's form: exactly one of its fields is given."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: Regex | None = None
    choice: GrammarChoices | None = None
    grammar: Ebnf | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | None = None


class Keep(LateModel):
    """The field `truncation.keep`: what a cut leaves at the beginning of the prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")

    instructions: bool = True
    sink_tokens: Annotated[StrictInt, Field(ge=0, le=SINK_TOKENS_MAX)] = 4


class TruncationChoice(LateModel):
    """The field `truncation`: what happens to a prompt that does not fit. A string stands for an object
    with that type."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["disabled", "auto", "retention_ratio"]
    retention_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    keep: Keep = Keep()

    @model_validator(mode="after")
    def _check_type(self) -> TruncationChoice:
        extra = self.model_fields_set - {"type"}
        if self.type != "retention_ratio" and extra:
            raise PydanticCustomError(
                "truncation",
                'has `retention_ratio` and `keep` with `type: "retention_ratio"` only',
                {"param": "truncation"},
            )
        return self

    def policy(self) -> RetentionPolicy | None:
        """Return how to cut a prompt that does not fit; None: refuse it."""
        if self.type == "disabled":
            return None
        return RetentionPolicy(self.retention_ratio, self.keep.instructions, self.keep.sink_tokens)


Truncation = Annotated[TruncationChoice, BeforeValidator(_policy), WithJsonSchema(_TRUNCATION)]
Metadata = Annotated[Any, BeforeValidator(_metadata), WithJsonSchema(_METADATA)]
SessionTtl = Annotated[StrictInt, Field(ge=1, le=TTL_MAX_S)]
SchemaTtl = Annotated[StrictInt, Field(ge=0, le=TTL_MAX_S)]
SessionId = Annotated[str, Field(min_length=1, max_length=SESSION_ID_CHARACTERS_MAX)]
