"""`/v1/responses` in OpenAI's form: the request as a pydantic model, the answer as plain objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from trunkline.router.api.blocks import Block
from trunkline.router.errors import ApiError, bad_value
from trunkline.router.jobs.parameters import Count, ToolChoice, Whitespace

Object = dict[str, Any]


def _input(value: Any) -> str | list[Any]:
    if not isinstance(value, str | list):
        raise PydanticCustomError("input", "must be a string or a list of items")
    if not value:
        raise PydanticCustomError("input", "must not be empty")
    return value


class TextFormat(BaseModel):
    """The field `text.format`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(BaseModel):
    """The field `text`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: TextFormat | None = None


class ResponsesRequest(BaseModel):
    """The request `POST /v1/responses`. Undeclared fields are ignored, unless `unsupported.py` lists them."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    input: Annotated[Any, BeforeValidator(_input, json_schema_input_type=str | list[dict[str, Any]])]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    whitespace: Whitespace | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: bool | None = None
    """Accepted because it is true by default in clients. Nothing is stored, and the answer says so."""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    def response_format(self) -> Object | None:
        """Return `text.format` as the `response_format` of a chat completion.

        Raises:
            ApiError: 400, a schema is missing.
        """
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "json_object"}
        if form.schema_ is None:
            raise bad_value(
                "text.format.schema", "`text.format.schema` is required", code="missing_required_parameter"
            )
        return {"type": "json_schema", "json_schema": {"name": form.name or "answer", "schema": form.schema_}}


def text_part(text: str) -> Object:
    """Return the only part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def output_item(block: Block, item_id: str, status: str) -> Object:
    """Return a block as an item of `output`, without content if its status is "in_progress"."""
    if block.is_call:
        return {
            "type": "function_call",
            "id": item_id,
            "call_id": block.call_id,
            "name": block.name,
            "arguments": block.text,
            "status": status,
        }
    content = [] if status == "in_progress" else [text_part(block.text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def usage_object(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Object:
    """Return token counts as the field `usage`."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
    }


def error_object(error: ApiError) -> Object:
    """Return the field `error` of a failed response."""
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}
