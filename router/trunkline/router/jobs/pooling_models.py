"""The parameters of embeddings, scores and rankings: their endpoints' rows in the table of parameters.

A query is scored with each of its documents in one of two ways: by how likely the model answers "yes" to whether
the document is relevant ("yes_no"), or by the cosine of the angle between their embeddings ("cosine").
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.router.jobs.generation_parameters import RequestBody
from trunkline.router.jobs.known_parameters import HINTS
from trunkline.router.jobs.parameter_table import Endpoint, Known, row
from trunkline.router.jobs.parameters import Count, Priority, SessionId

INPUTS_MAX: Final = 2048
"""Largest number of inputs or documents of a request, as in OpenAI's API."""
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction with which Qwen3's rerankers were evaluated; it says nothing of the texts' subject."""
_INSTRUCTION_CHARACTERS_MAX: Final = 16 << 10

Scoring = Literal["yes_no", "cosine"]


def _inputs(value: Any) -> list[str] | list[list[int]]:
    """Return the inputs as a list of texts or of lists of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return [_input(value, "")]  # type: ignore[return-value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("input", "must be a text, a list of token ids, or a list of one of these")
    _check_count(value, "inputs")
    if len({type(item) for item in value}) > 1:
        raise PydanticCustomError("input", "must be all strings or all lists of token ids")
    return [_input(item, f"input[{index}]") for index, item in enumerate(value)]  # type: ignore[return-value]


def _input(value: Any, param: str) -> str | list[int]:
    context = {"param": param} if param else None
    if not isinstance(value, str) and not (isinstance(value, list) and all(type(item) is int for item in value)):
        raise PydanticCustomError("input", "must be a string or a list of token ids", context)
    if not value:
        raise PydanticCustomError("empty", "must not be empty", context)
    return value


def _check_count(items: list[Any], what: str) -> None:
    if len(items) > INPUTS_MAX:
        raise PydanticCustomError("too_many", f"must have at most {INPUTS_MAX} {what}, not {len(items)}")


def _texts(value: Any) -> list[str]:
    """Return texts as a list. Each is a string or an object with `text`."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise PydanticCustomError("empty", "must not be empty")
    _check_count(items, "texts")
    texts = []
    for index, item in enumerate(items):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str) or not text:
            what = "must be a text, or an object with a text in `text`; neither may be empty"
            where = {"index": index} if isinstance(value, list) else {}
            raise PydanticCustomError("text", what, where)
        texts.append(text)
    return texts


def _listed(param: str) -> BeforeValidator:
    """Return the check of texts in the parameter `param`, which names the text that is wrong."""

    def check(value: Any) -> list[str]:
        try:
            return _texts(value)
        except PydanticCustomError as error:
            index = (error.context or {}).get("index")
            where = param if index is None else f"{param}[{index}]"
            raise PydanticCustomError(error.type, error.message_template, {"param": where}) from None

    return BeforeValidator(check)


_TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
_IDS: Final[dict[str, Any]] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUTS: Final[dict[str, Any]] = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": INPUTS_MAX},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": INPUTS_MAX},
    ]
}
_DOCUMENT: Final[dict[str, Any]] = {
    "anyOf": [_TEXT, {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}]
}
_DOCUMENTS: Final[dict[str, Any]] = {
    "anyOf": [_DOCUMENT, {"type": "array", "items": _DOCUMENT, "minItems": 1, "maxItems": INPUTS_MAX}]
}
Inputs = Annotated[Any, BeforeValidator(_inputs), WithJsonSchema(_INPUTS)]
Instruction = Annotated[str, Field(min_length=1, max_length=_INSTRUCTION_CHARACTERS_MAX)]
Query = Annotated[str, Field(min_length=1)]


class PoolingRequest(RequestBody):
    """What the endpoints for embeddings, scores and rankings share."""

    pooling: Literal["last", "mean"] | None = row(
        '`"last"`, `"mean"`',
        "the checkpoint's (`1_Pooling/config.json`), else `last`",
        "which hidden states make an embedding: that of the last token, or the mean over all",
    )
    priority: Priority | None = row(
        "32-bit integer", "0, or the [tenant's](#tenants)", "smaller goes first while requests wait"
    )
    cache_salt: SessionId | None = row(
        "1 to 128 characters", "none", "KV is shared only with requests of the same salt"
    )
    _required: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that must be given."""

    @model_validator(mode="after")
    def _check_given(self) -> Self:
        for name in self._required:
            if not getattr(self, name):
                raise PydanticCustomError("missing", "is required", {"param": name})
        return self


class EmbeddingRequest(PoolingRequest):
    """The request `POST /v1/embeddings`."""

    _required = ("input",)
    input: Inputs = row(
        "a string, or a list of token ids, or a list of at most 2,048 of one of these; none empty",
        "required",
        "what gets an embedding",
        value=[],
    )
    encoding_format: Literal["float", "base64"] | None = row(
        '`"float"`, `"base64"`', "float", "base64: little-endian float32"
    )
    dimensions: Count | None = row(
        "1 to the model's own number",
        "the model's own number",
        "only so many first numbers of each embedding, brought to length 1 again",
    )
    normalize: bool = row("boolean", "true", "whether embeddings have length 1", value=True)
    add_special_tokens: bool = row("boolean", "true", "what the tokenizer adds to a text", value=True)
    truncate_prompt_tokens: Count | None = row(
        "1 or more", "all", "only so many tokens of each input are taken", also=("truncate",)
    )
    truncation_side: Literal["left", "right"] | None = row(
        '`"left"`, `"right"`', "left", "where `truncate_prompt_tokens` cuts: left keeps the last tokens"
    )

    @property
    def input_slice(self) -> slice | None:
        """The part of each input's tokens that is taken; None: all of them."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return None
        return slice(0, keep) if self.truncation_side == "right" else slice(-keep, None)


class ScoringRequest(PoolingRequest):
    """The parameters that scores and rankings share."""

    scoring: Scoring | None = row(
        '`"yes_no"`, `"cosine"`',
        "`cosine` if the checkpoint is made for embeddings, else `yes_no`",
        "how texts are compared; see [scores](#how-texts-are-scored)",
    )
    instruction: Instruction | None = row(
        "a string of 1 to 16,384 characters",
        "find passages that answer a web search",
        "`yes_no`: what makes a document relevant",
    )
    max_tokens_per_doc: Count | None = row(
        "1 or more", "all", "only so many first tokens of each document are read"
    )


class ScoreRequest(ScoringRequest):
    """The request `POST /score`."""

    _required = ("text_1", "text_2")

    text_1: Annotated[Any, _listed("text_1"), WithJsonSchema(_DOCUMENTS)] = row(
        "a text, or a list of as many texts as `text_2` has",
        "required",
        "the query, or a query for each document",
        also=("queries", "data_1"),
        value=None,
    )
    text_2: Annotated[Any, _listed("text_2"), WithJsonSchema(_DOCUMENTS)] = row(
        "a text or a list of at most 2,048, strings or objects with `text`",
        "required",
        "the documents",
        also=("documents", "items", "data_2"),
        value=None,
    )


class RerankRequest(ScoringRequest):
    """The request `POST /v1/rerank`."""

    _required = ("query", "documents")

    query: Query = row("a string, not empty", "required", "what documents are compared with", value="")
    documents: Annotated[Any, _listed("documents"), WithJsonSchema(_DOCUMENTS)] = row(
        "a list of at most 2,048 texts, strings or objects with `text`; none empty",
        "required",
        "what is put in order",
        value=None,
    )
    top_n: Count | None = row("1 or more", "all", "only so many of the best documents are listed")
    return_documents: bool = row("boolean", "false", "whether the results have the documents", value=False)


def _refused(names: str, *neutral: Any, why: str) -> Known:
    return Known(tuple(names.split()), neutral, why)


_WHOLE: Final = "texts in a template are not cut at their ends; use `max_tokens_per_doc`"
_KNOWN: Final = (
    *HINTS,
    _refused("messages", why="`messages` are not supported here; send a text"),
    _refused("embedding_types", ["float"], why="`embedding_types` is not supported; use `encoding_format`"),
    _refused("input_type task", why="no text is put before an input for its type; write it into the input"),
    _refused("chat_template chat_template_kwargs softmax activation", why=""),
)
_KNOWN_PAIRS: Final = (
    *_KNOWN,
    _refused("truncate_prompt_tokens", why=_WHOLE),
    _refused("rank_fields", ["text"], why="only the field `text` of a document is read"),
    _refused("return_embeddings raw_scores", False, why=""),
    Known(("max_chunks_per_doc",), None, "documents are read whole, not in chunks"),
)
EMBEDDINGS: Final = Endpoint("embeddings", EmbeddingRequest, _KNOWN)
SCORE: Final = Endpoint("score", ScoreRequest, _KNOWN_PAIRS)
RERANK: Final = Endpoint("rerank", RerankRequest, _KNOWN_PAIRS)
