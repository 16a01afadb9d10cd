"""The first checks of requests: is the model served, is the text short enough, are all parameters supported?

A parameter that would change the answer and is not supported is refused with 400, not ignored. Each endpoint
has a table (`RefusedFields`) of such parameters, with the values that ask for nothing and may be sent. All other
undeclared parameters are ignored (`user`, `metadata`, `store`, `service_tier`, …).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from starlette.requests import Request

from trunkline.router.errors import ApiError, bad_value, unsupported
from trunkline.router.service import RouterService


def service_of(request: Request) -> RouterService:
    """Return the service of the application that received a request."""
    service = request.app.state.service
    assert isinstance(service, RouterService)
    return service


def check_model(service: RouterService, model: str | None) -> RouterService:
    """Return the service of the model that a request asks for. None stands for the first model.

    Raises:
        ApiError: 404.
    """
    if model is not None and service.models.find(model) is None:
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist here; served: {', '.join(service.models.names)}",
            param="model",
            code="model_not_found",
        )
    return service.of_model(service.models.first.name if model is None else model)


TOKENIZE_CHARACTERS_MAX: Final = 4 << 20
"""Largest number of characters of a text that is tokenised although it cannot fit the context. `TEXT_BYTES_MAX`
bounds every text."""


def check_length(characters: int, param: str) -> None:
    """Refuse a text that takes too long to tokenise.

    Raises:
        ApiError: 400, naming `param`.
    """
    if characters > TOKENIZE_CHARACTERS_MAX:
        raise bad_value(
            param,
            f"`{param}` has {characters} characters; at most {TOKENIZE_CHARACTERS_MAX} are tokenised at once. "
            "Please send it in parts.",
            code="string_above_max_length",
        )


Neutral = dict[str, tuple[Any, ...]]
"""The values of each parameter that change nothing and so may be sent, by the parameter's name."""


class RefusedFields(NamedTuple):
    """The parameters that an endpoint refuses."""

    neutral: Neutral
    reasons: dict[str, str] = {}  # noqa: RUF012 (a NamedTuple's default, never changed)
    """Messages for some parameters that help more than "is not supported", by the parameter's name."""

    def check(self, fields: dict[str, Any]) -> None:
        """Look through the raw fields of a request.

        Raises:
            ApiError: 400, naming the first parameter that asks for something unsupported.
        """
        for name, neutral in self.neutral.items():
            value = fields.get(name)
            if isinstance(value, dict):
                value = {key: inner for key, inner in value.items() if inner is not None}
            if value is not None and not any(_same(value, allowed) for allowed in neutral):
                raise unsupported(name, self.reasons.get(name, f"`{name}` is not supported"))


def _same(given: Any, neutral: Any) -> bool:
    # 1 == True in Python, but `"n": true` is not a request for one choice.
    return isinstance(given, bool) == isinstance(neutral, bool) and bool(given == neutral)


_COMMON: Final[Neutral] = {
    "logits_processors": ([],),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "guided_whitespace_pattern": (),
    "guided_decoding_backend": (),
}
_CHAT: Final[Neutral] = {
    **_COMMON,
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
}
_REASONS: Final = {
    "best_of": "`best_of` is a parameter of /v1/completions only",
    "functions": "`functions` is not supported; use `tools`",
    "cache_salt": "a session without modules has no salt of its own; send `cache_salt` with each of its requests",
    "guided_whitespace_pattern": "`guided_whitespace_pattern` is not supported; JSON is compact, unless "
    '`whitespace` is "any"',
    "function_call": "`function_call` is not supported; use `tool_choice`",
}


CHAT_REFUSALS: Final = RefusedFields(_CHAT, _REASONS)
COMPLETIONS_REFUSALS: Final = RefusedFields({**_COMMON, "suffix": ("",)}, _REASONS)
TOKENIZE_REFUSALS: Final = RefusedFields(
    {name: _CHAT[name] for name in ("documents", "chat_template", "continue_final_message")}
)
SESSIONS_REFUSALS: Final = RefusedFields({"cache_salt": ()}, _REASONS)
MESSAGES_REFUSALS: Final = RefusedFields(
    {
        "mcp_servers": ([],),
        "container": (),
        "context_management": ({},),
        "output_format": (),
        "session_id": (),
        "cache_salt": (),
        "pml": (),
        "prompt": (),
        "truncation": ("disabled",),
    },
    dict.fromkeys(
        ("pml", "prompt"), "prompts of modules belong to /v1/chat/completions and /v1/completions; send `messages`"
    ),
)
RESPONSES_REFUSALS: Final = RefusedFields(
    {
        "prompt": (),
        "pml": (),
        "session_id": (),
        "cache_salt": (),
        "top_logprobs": (0,),
        "context_management": ([],),
    },
    {
        "session_id": "stored sessions belong to /v1/chat/completions and /v1/completions",
        "prompt": "prompts of modules belong to /v1/chat/completions and /v1/completions; send `input`",
        "pml": "prompts of modules belong to /v1/chat/completions and /v1/completions; send `input`",
    },
)


def check_session(fields: dict[str, Any]) -> None:
    """Check the raw fields of a new session; one with modules may have a `cache_salt`.

    Raises:
        ApiError: 400, naming the first parameter that asks for something unsupported.
    """
    if not any(fields.get(name) for name in ("schema", "prompt", "pml")):
        SESSIONS_REFUSALS.check(fields)


def check_responses(fields: dict[str, Any]) -> None:
    """Check the raw fields of a request to `/v1/responses`.

    Raises:
        ApiError: 400, naming the first parameter that asks for something unsupported.
    """
    RESPONSES_REFUSALS.check(fields)
    included = fields.get("include")
    if isinstance(included, list) and "message.output_text.logprobs" in included:
        raise unsupported("include", "log-probabilities are not supported here; use /v1/chat/completions")
