"""Limits of chat templates: what a rendering may compute, and how it counts that itself.

Templates come with checkpoints and run for each request, and a thread that runs one cannot be stopped. So the
template counts its own steps: each turn of a loop, each call of a macro and each number of `range` is a step, and
operations that join, repeat or pad texts must not make longer texts than a prompt could be. The counting is
compiled into the template (`with_counting`). It stops templates that run away by mistake or because of a request's
content. It does not stop the author of a model's files, who can still keep a processor busy, for example by
comparing nested lists.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, Final

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trunkline.router.errors import RouterError
from trunkline.router.text.loop_compiler import environment_call
from trunkline.router.text.message_loops import LoopCalls

STEPS_MAX: Final = 1_000_000
"""Largest number of steps of one rendering; they take some seconds. Templates need a few steps per message."""
TEXT_MAX: Final = 64 << 20
"""Largest number of characters of one text: several times the largest request."""
LIST_MAX: Final = 1 << 20
"""Largest number of entries of one list."""
_CALL_STEPS: Final = 20
"""Number of steps that a call of a macro, or of anything else that may call itself, counts as: Jinja builds a
context for each call."""
_TEXT_PER_STEP: Final = 4096
"""Number of characters whose handling takes about as long as one step."""
_FREE: Final = 64
"""Largest number that costs no steps as an argument of a function (the width of an indent, for example)."""
_NUMBER_BITS_MAX: Final = 4096
_SCOPE_ARGUMENTS: Final = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that Jinja adds to calls, for functions that ask for the template's context."""
_WIDE_FORMAT: Final = re.compile(r"[0-9]{4,}|\*|\{[^{}]*\{")
"""Matches a format with a width of four digits, or with a width given by an argument."""


class TemplateLimitError(RouterError):
    """A template exceeds a limit, which the message names."""


class _Spent:
    """Counts the steps of one rendering."""

    def __init__(self) -> None:
        self.steps = 0


_spent: ContextVar[_Spent | None] = ContextVar("template steps", default=None)


@contextmanager
def counted() -> Iterator[None]:
    """Count the steps of one rendering, from zero."""
    token = _spent.set(_Spent())
    try:
        yield
    finally:
        _spent.reset(token)


class CountingEnvironment(LoopCalls, ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, whose templates count their steps."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["range"] = self.numbers
        del self.globals["lipsum"]  # random text of any length, useless in a prompt
        self.filters = {name: _bounded(self, function) for name, function in self.filters.items()}
        self.concat = join_checked  # type: ignore[method-assign]

    def spend(self, steps: int = 1) -> bool:
        """Count steps. Return True, so that the call can be part of a condition.

        Raises:
            TemplateLimitError: The rendering has used too many steps.
        """
        spent = _spent.get()
        if spent is not None:
            spent.steps += steps
            if spent.steps > STEPS_MAX:
                raise TemplateLimitError(
                    f"it takes more than {STEPS_MAX} steps (turns of loops, calls of macros) for these messages"
                )
        return True

    def numbers(self, *limits: int) -> range:
        """Implement `range`, counting its numbers."""
        made = range(*limits)
        self.spend(len(made))
        return made

    def joined(self, *parts: object) -> str:
        """Implement `a ~ b`, with a limit for the length."""
        return join_checked(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left + right` and other operations, if the size of the result is allowed."""
        if operator == "+" and type(left) is str and type(right) is str:  # nearly always, for speed
            length = len(left) + len(right)
            if length >= _FREE:
                self.spend(_check_length(length) // _FREE)
            return left + right
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "**" or (operator == "*" and isinstance(left, int) and isinstance(right, int)):
            _check_number(operator, left, right)
        elif operator == "*":
            many, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(times, int):
                self.spend(_check_length(_size(many) * max(times, 0), many) // _FREE)
        elif operator == "+":
            self.spend(_check_length(_size(left) + _size(right), left) // _FREE)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `text.format`, if the text asks for no wide padding."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, with limits for methods of texts."""
        bound_to = getattr(__obj, "__self__", None)
        if bound_to is self and type(__obj) is MethodType and kwargs.keys() <= _SCOPE_ARGUMENTS:
            return __obj(*args)  # it was compiled into the template, or is `range`: what the sandbox checks, holds
        if isinstance(bound_to, str):
            self._check_arguments(bound_to, getattr(__obj, "__name__", ""), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _check_arguments(self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and value > _FREE:
                self.spend(value)  # a width, a count
        if name == "format":
            _check_format(text)
        if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
            _check_length(len(text) + text.count(args[0]) * len(args[1]))
        self.spend(len(text) // _TEXT_PER_STEP)


def with_counting(syntax: nodes.Template) -> nodes.Template:
    """Add the counting of steps to a template, in place."""
    repeated: list[nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block] = [
        *syntax.find_all(nodes.For),
        *syntax.find_all(nodes.Macro),
        *syntax.find_all(nodes.CallBlock),
        *syntax.find_all(nodes.Block),
    ]
    for loop in repeated:
        steps = 1 if isinstance(loop, nodes.For) and not loop.recursive else _CALL_STEPS
        loop.body.insert(0, nodes.ExprStmt(_spend(loop, steps), lineno=loop.lineno))
        if isinstance(loop, nodes.For) and loop.test is not None:
            loop.test = nodes.And(_spend(loop), loop.test, lineno=loop.lineno)
    _replace_joins(syntax)
    return syntax


def _spend(near: nodes.Node, steps: int = 1) -> nodes.Call:
    return environment_call("spend", [nodes.Const(steps, lineno=near.lineno)], near)


def _replace_joins(node: nodes.Node) -> None:
    """Replace each `a ~ b` by a call that checks the length."""
    for name in node.fields:
        value = getattr(node, name)
        if isinstance(value, nodes.Concat):
            value = environment_call("joined", value.nodes, value)
            setattr(node, name, value)
        if isinstance(value, nodes.Node):
            _replace_joins(value)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, nodes.Concat):
                    value[i] = item = environment_call("joined", item.nodes, item)
                if isinstance(item, nodes.Node):
                    _replace_joins(item)


def _bounded(environment: CountingEnvironment, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with limits for its arguments and texts."""

    piped = int(hasattr(function, "jinja_pass_arg"))  # Jinja may pass an argument of its own first

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # The filtered value is not a width or a count, however large a number it is.
        text = args[piped] if len(args) > piped and isinstance(args[piped], str) else ""
        environment._check_arguments(text, _name(function), args[piped + 1 :], kwargs)
        return function(*args, **kwargs)

    return bounded


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "").removeprefix("do_").removeprefix("sync_do_")


def join_checked(parts: Iterable[str]) -> str:
    """Join texts, with a limit for the length.

    Raises:
        TemplateLimitError: The text would be too long.
    """
    kept, length = [], 0
    for part in parts:
        length += len(part)
        if length > TEXT_MAX:
            _check_length(length)
        kept.append(part)
    return "".join(kept)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_length(length: int, of: object = "") -> int:
    what, most = ("text", TEXT_MAX) if isinstance(of, str) else ("list", LIST_MAX)
    if length > most:
        raise TemplateLimitError(f"it makes a {what} of length {length}; at most {most} is allowed")
    return length


def _check_number(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _NUMBER_BITS_MAX:
            raise TemplateLimitError(f"it makes a number of more than {_NUMBER_BITS_MAX} bits")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError(f"it pads to a width that is too large, or not known, with {text[:40]!r}")
