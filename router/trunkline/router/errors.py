"""The router's exceptions. What a client sees of them is an `ApiError`, in OpenAI's form.

RouterError
├─ ApiError                an answer that is not 200; endpoints let it through
│  ├─ AuthError            the request has no key, or a key that may not do this   tenancy/auth.py
│  └─ OverLimitError       the tenant has used up one of its limits                tenancy/tenants.py
├─ PromptError             what a client sent cannot become a prompt; also a ValueError
│  ├─ ChatTemplateError    the model's chat template refuses the messages          text/chat_template.py
│  ├─ TurnError            a tool's result answers no call                         text/tool_turns.py
│  ├─ CutError             the parts of a context that must stay do not fit        text/truncation.py
│  └─ PmlError             a schema or a prompt in PML is wrong                    pml/pml_error.py
├─ TemplateLimitError      rendering a chat template takes too much                text/chat_template.py
├─ NoControllerError       no controller can take a request now                    routing/core.py
├─ ClientLeftError         the client has closed its connection                    http/answers.py
└─ TooManyPartsError       a body has more JSON values than the router parses      http/json_slices.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trunkline.kvstore.records import StoreAwayError

RETRY_AFTER_SECONDS: Final = 1
"""`Retry-After` of a 429 or 503 without a better estimate: queues and restarts move within seconds."""


class RouterError(Exception):
    """Base class of all exceptions that the router itself raises."""


class PromptError(RouterError, ValueError):
    """What a client sent cannot become a prompt. The API answers 400 with the exception's text."""


class ApiError(RouterError):
    """An answer that is not 200. Code anywhere below an endpoint may raise it; `app.py` makes the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
        retry_after: int | None = None,
    ) -> None:
        """
        Args:
            status: the HTTP status.
            message: what is wrong, for people.
            kind: OpenAI's `error.type`.
            param: OpenAI's `error.param`, the parameter that is wrong; None: there is none.
            code: OpenAI's `error.code`, for programs.
            details: more fields of the error, for programs (a place in a source, limits).
            retry_after: seconds after which the client should try again; None: as the status suggests.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.details = details or {}
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form: the JSON body, or the payload of an error event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
                **self.details,
            }
        }

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the error with other names of parameters.

        Args:
            names: The new names by the old ones. What follows a name is kept (`messages[0]`).
        """
        if not names:
            return self
        return ApiError(
            self.status,
            _QUOTED.sub(lambda match: f"`{_renamed(match[1], names)}`", self.message),
            kind=self.kind,
            param=None if self.param is None else _renamed(self.param, names),
            code=self.code,
            details=self.details,
            retry_after=self.retry_after,
        )

    def headers(self) -> dict[str, str]:
        """Return `Retry-After`, if the client should try again."""
        seconds = self.retry_after
        if seconds is None and self.status in (429, 503):
            seconds = RETRY_AFTER_SECONDS
        return {} if seconds is None else {"Retry-After": str(seconds)}


_QUOTED: Final = re.compile(r"`([A-Za-z_][\w.\[\]]*)`")
"""A parameter's name in a message."""


def _renamed(param: str, names: Mapping[str, str]) -> str:
    """Return a parameter with the new name of its longest known beginning."""
    end = len(param)
    while end > 0:
        if param[:end] in names:
            return names[param[:end]] + param[end:]
        end = max(param.rfind(".", 0, end), param.rfind("[", 0, end))
    return param


def bad_value(param: str, message: str, *, code: str | None = None) -> ApiError:
    """Return a 400: a parameter has a wrong value."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, what: str) -> ApiError:
    """Return a 400: a parameter that would change the answer is known but not supported here."""
    return ApiError(400, f"{what} (parameter `{param}`)", param=param, code="unsupported_parameter")


def not_found(param: str, message: str, *, code: str) -> ApiError:
    """Return a 404: what the request names does not exist."""
    return ApiError(404, message, param=param, code=code)


def in_conflict(param: str, message: str, *, code: str) -> ApiError:
    """Return a 409: what the request names is in a state that does not allow the request."""
    return ApiError(409, message, kind="conflict_error", param=param, code=code)


def unavailable(message: str, *, code: str = "engine_unavailable") -> ApiError:
    """Return a 503: no engine can generate now."""
    return ApiError(503, message, kind="service_unavailable_error", code=code)


def overloaded(message: str) -> ApiError:
    """Return a 429: too many requests wait."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full")


def draining() -> ApiError:
    """Return a 503: this process is about to exit."""
    return unavailable("the server is shutting down and takes no new requests", code="draining")


def records_away(error: StoreAwayError) -> ApiError:
    """Return a 503: the store of records, which the request needs, does not answer."""
    return unavailable(f"what is stored is not available: {error}", code="records_unavailable")


def records_full(used: int, limit: int) -> ApiError:
    """Return a 429: the tenant's records have reached their quota. `used`, `limit`: bytes."""
    message = (
        f"your stored records take {used:,} bytes and may take {limit:,} (`records_bytes`); delete some, or wait "
        "until some expire"
    )
    details = {"limit": "records_bytes", "limit_bytes": limit, "used_bytes": used}
    return ApiError(429, message, kind="rate_limit_error", code="records_quota", details=details)


def internal_error() -> ApiError:
    """500 for an error that should never happen. What it was, the log says."""
    return ApiError(500, "internal error", kind="internal_error", code="internal_error")
