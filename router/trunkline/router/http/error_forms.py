"""Errors in the form that a path's clients understand: OpenAI's everywhere but under `/v1/messages`."""

from __future__ import annotations

from typing import Any, Final

from trunkline.router.errors import ApiError

_ANTHROPIC_PATH: Final = "/v1/messages"
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NULLABLE_STRING: Final = {"type": ["string", "null"]}
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": _NULLABLE_STRING,
                    "code": _NULLABLE_STRING,
                    "line": {"type": ["integer", "null"], "description": "Of PML, where the error is; from 1."},
                    "column": {"type": ["integer", "null"]},
                    "path": {"type": "string", "description": "Of the module that the error is in."},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    "AnthropicError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                "required": ["type", "message"],
            },
        },
        "required": ["type", "error"],
    },
}
"""The two forms, for the OpenAPI document."""


def schema_of(path: str) -> str:
    """Return which of `SCHEMAS` the errors of a path have."""
    return "AnthropicError" if _is_anthropic(path) else "Error"


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error's body in Anthropic's form; also the payload of an error event within a stream."""
    kind, message = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error"), error.message
    if error.param is not None and f"`{error.param}`" not in message:  # the form has no field for it
        message += f" (parameter `{error.param}`)"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Return an error's body for a request to `path`."""
    return anthropic_error(error) if _is_anthropic(path) else error.body()


def _is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
