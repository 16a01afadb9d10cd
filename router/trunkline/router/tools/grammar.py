"""The grammar that an answer with calls must follow, as a structural tag (xgrammar's language).

A call that is demanded is the whole answer. Where the model is free to call, a grammar is needed only if some
function is strict: text is free until a call begins, and from there on only a valid one can be completed.
Markers that are special tokens stand as tokens, because the model writes them as such and never letter by letter.
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
    """The grammar for a request; None if everything may be written.

    `parallel`: whether several calls may be made.
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
    """`{"name": …, "arguments": …}` without the text in front that was `skipped`."""
    head = f'{{"name": "{function.name}", "{style.arguments_field}": '.removeprefix(skipped)
    schema = _FREE if free and not function.strict else function.schema
    return _sequence(_const(head), _json(schema), _const("}"))


def _call(functions: list[FunctionTool], style: ToolStyle, *, free: bool, several: bool) -> _Format:
    """What follows the marker; in the old form of `mistral` that is the list of all calls."""
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
    # The list of the old Mistral form has all calls in it: a second list would be text.
    loop = several and not (style.name == "mistral" and not style.newer)
    return {"type": kind, "rules": [[marker, call]], "loop": loop}
