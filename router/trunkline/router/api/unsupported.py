"""Parameters that are known, would change the answer, and are not supported: refused rather than ignored.

For each, the values that ask for nothing and may therefore be sent. Everything else that is not declared
in `models.py` is ignored (`user`, `metadata`, `store`, `service_tier`, …).
"""

from __future__ import annotations

from typing import Any, Final

from trunkline.router.errors import ApiError, unsupported

_COMMON: Final[dict[str, tuple[Any, ...]]] = {
    "logits_processors": ([],),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "guided_whitespace_pattern": (),
    "guided_decoding_backend": (),
}
_CHAT: Final[dict[str, tuple[Any, ...]]] = {
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
_COMPLETIONS: Final[dict[str, tuple[Any, ...]]] = {**_COMMON, "suffix": ("",)}

_SESSION: Final[dict[str, tuple[Any, ...]]] = {"cache_salt": ()}
SESSION_MODULES: Final = ("schema", "prompt", "pml")
"""Parameters that give a session modules; then it has a salt."""
_TOKENIZE: Final = {name: _CHAT[name] for name in ("documents", "chat_template", "continue_final_message")}

_REASONS: Final = {
    "best_of": "`best_of` is a parameter of /v1/completions only",
    "functions": "`functions` is not supported; use `tools`",
    "cache_salt": "a session without modules has no salt of its own; send `cache_salt` with each of its requests",
    "guided_whitespace_pattern": "`guided_whitespace_pattern` is not supported; JSON is compact, unless "
    '`whitespace` is "any"',
    "function_call": "`function_call` is not supported; use `tool_choice`",
}


def _same(given: Any, neutral: Any) -> bool:
    # 1 == True in Python, but `"n": true` is not a request for one choice.
    if isinstance(given, bool) != isinstance(neutral, bool):
        return False
    return bool(given == neutral)


def check_supported(fields: dict[str, Any], *, chat: bool) -> None:
    """Look through a request's raw fields.

    Raises:
        ApiError: 400, naming the first parameter that asks for something unsupported.
    """
    _check(fields, _CHAT if chat else _COMPLETIONS)


def check_tokenize(fields: dict[str, Any]) -> None:
    """`check_supported` for `/tokenize`."""
    _check(fields, _TOKENIZE)


def check_session(fields: dict[str, Any]) -> None:
    """`check_supported` for a new session."""
    if not any(fields.get(name) for name in SESSION_MODULES):
        _check(fields, _SESSION)


def _check(fields: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> None:
    for name, neutral in table.items():
        value = fields.get(name)
        if value is None or any(_same(value, allowed) for allowed in neutral):
            continue
        raise _refusal(name)


def _refusal(name: str) -> ApiError:
    return unsupported(name, _REASONS.get(name, f"`{name}` is not supported"))
