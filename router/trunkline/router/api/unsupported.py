"""Parameters that are known, would change the answer, and are not supported: refused rather than ignored.

For each, the values that ask for nothing and may therefore be sent. Everything else that is not declared
in `models.py` is ignored (`user`, `metadata`, `store`, `service_tier`, `parallel_tool_calls`, …).
"""

from __future__ import annotations

from typing import Any, Final

from trunkline.router.errors import ApiError, unsupported

_COMMON: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "beam_width": (1,),
    "length_penalty": (1, 0),
    "min_tokens": (0,),
    "bad_words": ([],),
    "prompt_logprobs": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "echo": (False,),
}
_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    **_COMMON,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
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

_TOKENIZE: Final = {
    name: _CHAT[name] for name in ("tools", "documents", "chat_template", "continue_final_message")
}

_REASONS: Final = {
    "n": "only one choice per request is supported",
    "best_of": "only one choice per request is supported",
    "tools": "tool calls are not supported",
    "functions": "tool calls are not supported",
    "response_format": 'only {"type": "text"} is supported',
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


def _check(fields: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> None:
    for name, neutral in table.items():
        value = fields.get(name)
        if value is None or any(_same(value, allowed) for allowed in neutral):
            continue
        raise _refusal(name)


def _refusal(name: str) -> ApiError:
    return unsupported(name, _REASONS.get(name, f"`{name}` is not supported"))
