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


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """An error's body in Anthropic's form; also the payload of an error event within a stream."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """An error's body for a request to `path`."""
    anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    return anthropic_error(error) if anthropic else error.body()
