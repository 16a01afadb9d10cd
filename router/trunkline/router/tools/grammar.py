"""Make the grammar that an answer with calls must follow, as a structural tag (xgrammar's language).

If a call is required, it is the whole answer. If the model may choose, a grammar is needed only for strict
functions: text is free until a call begins, and then only a valid call can be completed. Markers that are special
tokens are written as tokens in the grammar, because the model never writes them letter by letter.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from trunkline.controller.messages import Grammar
from trunkline.router.text.tool_styles import (
    ARGS,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    ToolStyle,
)
from trunkline.router.tools.definitions import Choice, FunctionTool

_Format = dict[str, Any]
_FREE: Final[dict[str, Any]] = {"type": "object"}


def make_grammar(
    functions: list[FunctionTool], choice: Choice, style: ToolStyle, *, parallel: bool
) -> Grammar | None:
    """Return the grammar of a request; None if any text is allowed.

    Args:
        parallel: Whether the answer may have several calls.
    """
    if choice.kind in ("required", "function"):
        chosen = [one for one in functions if choice.kind == "required" or one.name == choice.name]
        whole = _demanded(chosen, style, several=parallel and choice.kind == "required")
    elif choice.kind == "auto" and any(function.strict for function in functions):
        whole = _triggered(functions, style, several=parallel)
    else:
        return None
    text = msgspec.json.encode({"type": "structural_tag", "format": whole}).decode()
    return Grammar("structural_tag", text, param="tools")


def _const(text: str) -> _Format:
    return {"type": "const_string", "value": text}


def _marker(text: str, style: ToolStyle) -> _Format:
    return {"type": "token", "token": text} if text in style.special else _const(text)


def _sequence(*elements: _Format) -> _Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(elements: list[_Format]) -> _Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _json(schema: dict[str, Any]) -> _Format:
    return {"type": "json_schema", "json_schema": schema}


def _separated(one: _Format, separator: str, *, several: bool) -> _Format:
    if not several:
        return one
    more = _sequence(_const(separator), one) if separator else one
    return _sequence(one, {"type": "star", "content": more})


def _object(function: FunctionTool, style: ToolStyle, *, free: bool, skipped: str = "") -> _Format:
    """Return the format of `{"name": …, "arguments": …}`, without the beginning `skipped`."""
    head = f'{{"name": "{function.name}", "{style.arguments_field}": '.removeprefix(skipped)
    schema = _FREE if free and not function.strict else function.schema
    return _sequence(_const(head), _json(schema), _const("}"))


def _call(functions: list[FunctionTool], style: ToolStyle, *, free: bool, several: bool) -> _Format:
    """Return the format of what follows the marker: a call, or the list of all calls in the old form of
    `mistral`."""
    if style.name == "mistral" and style.newer:
        return _or(
            [
                _sequence(
                    _const(one.name), _marker(ARGS, style), _json(_FREE if free and not one.strict else one.schema)
                )
                for one in functions
            ]
        )
    objects = _or([_object(one, style, free=free) for one in functions])
    if style.name == "mistral":
        return _sequence(_const("["), _separated(objects, ", ", several=several), _const("]"))
    if style.name == "hermes":
        return _sequence(_const("\n"), objects, _const("\n"), _marker(TOOL_CALL_END, style))
    return objects


def _demanded(functions: list[FunctionTool], style: ToolStyle, *, several: bool) -> _Format:
    call = _call(functions, style, free=False, several=several)
    if style.name == "llama3_json":
        return _separated(call, "; ", several=several)
    if style.name == "hermes":
        return _separated(_sequence(_marker(TOOL_CALL, style), call), "\n", several=several)
    whole = _sequence(_marker(TOOL_CALLS, style), call)
    return _separated(whole, "", several=several and style.newer)


def _triggered(functions: list[FunctionTool], style: ToolStyle, *, several: bool) -> _Format:
    if style.name == "llama3_json":
        trigger = '{"name": "'
        objects = _or([_object(one, style, free=True, skipped=trigger) for one in functions])
        return {"type": "dispatch", "rules": [[trigger, objects]], "loop": several}
    marker = TOOL_CALL if style.name == "hermes" else TOOL_CALLS
    kind = "token_dispatch" if marker in style.special else "dispatch"
    call = _call(functions, style, free=True, several=several)
    # In the old form of Mistral one list has all calls; a second list would be text.
    loop = several and not (style.name == "mistral" and not style.newer)
    return {"type": kind, "rules": [[marker, call]], "loop": loop}
