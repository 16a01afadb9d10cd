"""The grammar of answers with calls, from the table of forms: a structural tag (xgrammar's language). Pure.

Markers that are special tokens are written as tokens in the grammar, because the model never writes them letter by
letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from trunkline.controller.messages import Grammar
from trunkline.router.text.reasoning_styles import ReasoningStyle, ThoughtState
from trunkline.router.text.tool_styles import CHANNEL, END, MESSAGE, START, ToolForm, ToolStyle
from trunkline.router.tools.functions import FunctionTool

Format = dict[str, Any]
_FREE: Final[dict[str, Any]] = {"type": "object"}
_NUMBER: Final[dict[str, Any]] = {"type": "regex", "pattern": ":(0|[1-9][0-9]{0,3})"}
_LINES: Final[dict[str, Any]] = {"type": "regex", "pattern": "\\n{0,2}"}


def call_grammar(functions: Sequence[FunctionTool], style: ToolStyle, *, demanded: bool, several: bool) -> Format:
    """Return the format of an answer.

    Args:
        demanded: Whether the answer consists of calls. Otherwise text is free until a call begins, and then only a
            valid call can be completed; the arguments of functions that are not strict are free.
        several: Whether it may have several calls. A form may end with its first call all the same.
    """
    if demanded:
        return _calls(functions, style, several=several, free=False)
    return _triggered(functions, style, several=several and not style.form.single)


def calls_or(functions: Sequence[FunctionTool], style: ToolStyle, grammar: Grammar, *, several: bool) -> Format:
    """Return the format of an answer that consists of calls or follows a grammar. The arguments of functions that
    are not strict are free."""
    return one_of([_calls(functions, style, several=several, free=True), as_answer(grammar, style)])


def sequence(*elements: Format) -> Format:
    """Return a format of elements in a row."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def one_of(elements: list[Format]) -> Format:
    """Return a format of alternatives."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def optional(content: Format) -> Format:
    """Return a format of something that may be left out."""
    return {"type": "optional", "content": content}


def written(text: str, special: Iterable[str]) -> list[Format]:
    """Return the formats of a text with markers. `special`: the markers that are special tokens."""
    pattern = "|".join(map(re.escape, special))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    return [_token(part) if index % 2 else _const(part) for index, part in enumerate(parts) if part]


def _token(text: str) -> Format:
    return {"type": "token", "token": text}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _json(schema: dict[str, Any], **more: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema, **more}


def _repeated(one: Format, separator: list[Format], *, several: bool) -> Format:
    if not several:
        return one
    return sequence(one, {"type": "star", "content": sequence(*separator, one)})


def _calls(functions: Sequence[FunctionTool], style: ToolStyle, *, several: bool, free: bool) -> Format:
    form = style.form
    several = several and not form.single
    begin, opener = written(style.written_begin, style.special), written(form.opener, style.special)
    end = [] if form.single else written(form.end, style.special)  # a form's single call ends with an end token
    separator = written(form.separator, style.special)
    calls = _one_call(functions, style, free=free)
    if form.each:
        return _repeated(sequence(*begin, calls, *end), separator, several=several)
    return sequence(*begin, *opener, _repeated(calls, separator, several=several), *end)


def _triggered(functions: Sequence[FunctionTool], style: ToolStyle, *, several: bool) -> Format:
    form = style.form
    content = _one_call(functions, style, free=True)
    separator, end = written(form.separator, style.special), written(form.end, style.special)
    if form.single:  # its marker begins other messages, too
        trigger = form.head.split()[-1]
        return _dispatch([[trigger, _one_call(functions, style, free=True, skipped=form.head)]], loop=False)
    if form.unmarked and form.body == "object":
        trigger = '{"name": "'
        return _dispatch([[trigger, _one_call(functions, style, free=True, skipped=trigger)]], loop=several)
    if form.unmarked:
        more = {"type": "star", "content": sequence(*separator, content)} if several else None
        rules: list[list[Any]] = []
        for one in functions:
            begin = f"{form.opener}{one.name}{form.name_end}"
            call = _one_call([one], style, free=True, skipped=begin.removeprefix(form.opener))
            rules.append([begin, sequence(call, *([more] if more else []), *end)])
        return _dispatch(rules, loop=False)
    if not form.each:
        opener = written(form.opener, style.special)
        content = sequence(*opener, _repeated(content, separator, several=several))
    # Where one marker stands before all calls, a second list would be text.
    rule = [[style.written_begin, sequence(content, *end)]]
    return _dispatch(rule, loop=several and form.each, tokens=style.written_begin in style.special)


def _dispatch(rules: list[list[Any]], *, loop: bool, tokens: bool = False) -> Format:
    return {"type": "token_dispatch" if tokens else "dispatch", "rules": rules, "loop": loop}


def _one_call(functions: Sequence[FunctionTool], style: ToolStyle, *, free: bool, skipped: str = "") -> Format:
    """Return the format of a call of one of some functions.

    Args:
        free: Whether the arguments of functions that are not strict are free.
        skipped: The beginning that is left out.
    """
    loose = [function.name for function in functions if free and not function.strict]
    held = [function for function in functions if function.name not in loose]
    calls = [_call([function.name], function.schema, style, skipped) for function in held]
    return one_of([*calls, *([_call(loose, _FREE, style, skipped)] if loose else [])])


def _call(names: list[str], schema: dict[str, Any], style: ToolStyle, skipped: str) -> Format:
    form, special = style.form, style.special
    if form.body == "object":
        before, behind = f'{form.head}{{"name": "', f'", "{form.arguments_field}": '
        body, tail = [_json(schema)], "}" + form.tail
    else:
        before, behind = form.head, form.name_end
        body, tail = _body(schema, form), form.tail
    number = [_NUMBER] if form.numbered else []
    if len(names) == 1 and not number:
        head = written((before + names[0] + behind).removeprefix(skipped), special)
    else:
        name = one_of([_const(name) for name in names])
        head = [*written(before.removeprefix(skipped), special), name, *number, *written(behind, special)]
    return sequence(*head, *body, *written(tail, special))


def _body(schema: dict[str, Any], form: ToolForm) -> list[Format]:
    if form.body == "json":
        return [_json(schema)]
    if form.tags is not None:
        return [_json(schema, style=form.tags.grammar), _const(form.tags.ends[0])]
    return [_keywords(schema), _const(")")]


def _keywords(schema: dict[str, Any]) -> Format:
    """Return the format of keyword arguments: the required ones first, each part of them in the schema's order.
    Values are written as JSON, which differs from Python in `true`, `false` and `null` only."""
    if schema is _FREE:
        some = sequence({"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]*"}, _const("="), _json({}))
        return optional(_repeated(some, [_const(", ")], several=True))
    properties = schema.get("properties") or {}
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = [name for name in properties if name in schema.get("required", ())]
    others = [name for name in properties if name not in required]

    def keyword(name: str, before: str) -> Format:
        value = properties[name]
        whole = {**value, **shared} if isinstance(value, dict) else value
        return sequence(_const(f"{before}{name}="), _json(whole))

    def behind(names: list[str]) -> list[Format]:
        return [optional(keyword(name, ", ")) for name in names]

    if required:
        fixed = [keyword(name, ", " if index else "") for index, name in enumerate(required)]
        return sequence(*fixed, *behind(others))
    if not others:
        return _const("")
    return optional(
        one_of([sequence(keyword(name, ""), *behind(others[i + 1 :])) for i, name in enumerate(others)])
    )


def as_answer(grammar: Grammar, style: ToolStyle) -> Format:
    """Return a grammar as the format of an answer without its thought, and without calls."""
    if style.name == "harmony":  # calls have a header of their own
        return sequence(*written(f"{CHANNEL}final{MESSAGE}", style.special), _format(grammar))
    return _format(grammar)


def behind_thought(
    answer: Format | None,
    reasoning: ReasoningStyle | None,
    style: ToolStyle,
    state: ThoughtState,
    budget: int | None = None,
) -> Format | None:
    """Return the format of an answer with the thought before it; None: it begins with no thought.

    Args:
        answer: The format of what follows the thought; None: any text.
        reasoning: How the model marks its thoughts; None: it has none.
        style: How it writes calls.
        state: Where the answer begins.
        budget: Largest number of tokens of the thought; None: any number.
    """
    answer = {"type": "any_text"} if answer is None else answer
    is_free = answer["type"] in ("any_text", "dispatch", "token_dispatch")
    limit = {} if budget is None else {"max_tokens": budget}
    if style.name == "harmony":
        begin, special = f"{CHANNEL}analysis", style.special
        text: Format = {"type": "any_text", "excludes": [END], **limit}
        # The grammar library loses one of two ways that begin alike, one with a token and one with text.
        opening = written(f"{begin}{MESSAGE}", () if is_free else special)
        thought = [*opening, text, *written(f"{END}{START}assistant", special)]
        return sequence(optional(sequence(*thought)), _without(begin, answer) if is_free else answer)
    if reasoning is None or not reasoning.begin or state == "closed":
        return None
    begin, special = reasoning.begin, reasoning.special
    text = {"type": "any_text", "excludes": [reasoning.end], **limit}
    thought = [text, *written(reasoning.end, special), _LINES]
    if state == "inside":
        return sequence(*thought, answer)
    thought = [_LINES, *written(begin, special), *thought]
    return sequence(optional(sequence(*thought)), _without(begin, answer) if is_free else answer)


def _without(mark: str, answer: Format) -> Format:
    """Return the format of a free answer in which a mark does not stand: a thought must not pass for text."""
    kind = "dispatch" if answer["type"] == "token_dispatch" else answer["type"]  # that can exclude tokens only
    return {**answer, "type": kind, "excludes": [mark]}


def as_tag(form: Format) -> str:
    """Return a format as a whole structural tag, in JSON."""
    return msgspec.json.encode({"type": "structural_tag", "format": form}).decode()


def _format(grammar: Grammar) -> Format:
    """Return a grammar as a part of a structural tag."""
    text = grammar.text
    match grammar.kind:
        case "json_object":
            return _json(_FREE)
        case "json_schema":
            return _json(msgspec.json.decode(text))
        case "regex":
            return {"type": "regex", "pattern": text}
        case "choice":
            return one_of([_const(choice) for choice in dict.fromkeys(msgspec.json.decode(text))])
        case "ebnf":
            return {"type": "grammar", "grammar": text}
    form: Format = msgspec.json.decode(text)
    inner: Format = form.get("format", form)
    return inner
