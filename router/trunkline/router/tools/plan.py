"""A request's tools made ready: what the template shows, the grammar that holds the model to it, the parser.

tools, tool_choice ─► prepare_tools ─► ToolPlan ─┬─ template_tools ─► chat template
                                                 ├─ grammar ────────► Submit
                                                 └─ make_parser ────► text and calls
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any, Final

import msgspec

from trunkline.controller.messages import Grammar
from trunkline.router.request_context import draw_bytes, draw_hex
from trunkline.router.text.tool_styles import ToolStyle
from trunkline.router.tools.definitions import Choice, FunctionTool, read_chat_tools, read_choice
from trunkline.router.tools.grammar import make_grammar
from trunkline.router.tools.parsers import make_parser
from trunkline.router.tools.pieces import ToolParser

_MISTRAL_ID_CHARACTERS: Final = string.ascii_letters + string.digits


class ToolPlan(msgspec.Struct, frozen=True):
    """Everything about tools that a request needs on its way."""

    style: ToolStyle
    names: frozenset[str] = frozenset()
    """Functions that the answer may call; empty: the answer is text and needs no parser."""
    template_tools: list[dict[str, Any]] | None = None
    """For the chat template (`Tokenizer.render_chat`); None: no tools are shown."""
    grammar: Grammar | None = None
    """What the answer must follow besides; it excludes any other grammar."""
    parallel: bool = True
    """Whether the answer may consist of several calls."""
    demanded: bool = False
    """Whether the answer consists of calls and nothing else."""

    @property
    def active(self) -> bool:
        """Whether there may be calls."""
        return bool(self.names)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must come with its special tokens (`skip_special_tokens` off): calls begin with one."""
        return self.active and bool(self.style.special)

    def make_parser(self, draw_id: Callable[[], str] | None = None) -> ToolParser | None:
        """A parser for one answer; None if it cannot have calls. `draw_id`: makes the ids of calls."""
        if not self.active:
            return None
        return make_parser(self.style.name, self.names, draw_id or self.draw_id, demanded=self.demanded)

    def draw_id(self, prefix: str = "call_") -> str:
        """An id for a call. Mistral's templates take only nine letters and digits, so there is no prefix."""
        if self.style.name == "mistral":
            count = len(_MISTRAL_ID_CHARACTERS)
            numbers = (number % count for number in draw_bytes("call", 9))
            return "".join(_MISTRAL_ID_CHARACTERS[number] for number in numbers)
        return prefix + draw_hex("call", 12)


def prepare_tools(tools: Any, tool_choice: Any, parallel_tool_calls: Any, style: ToolStyle) -> ToolPlan:
    """The tools of a chat completion, as they came in its JSON (None: not given).

    Raises:
        ApiError: 400 naming the field.
    """
    functions = read_chat_tools(tools)
    choice = read_choice(tool_choice, functions)
    return plan_tools(functions, choice, style, parallel=parallel_tool_calls)


def plan_tools(
    functions: list[FunctionTool], choice: Choice, style: ToolStyle, *, parallel: bool | None = None
) -> ToolPlan:
    """A plan for checked functions. With `choice` "none" the model is not even shown what it must not call.

    `parallel`: whether several calls may be made; None: the client did not say. Then a demand for a call is one
    for a single call (a weak model would call on and on), and where the model is free it may make several.
    """
    several = choice.kind in ("none", "auto") if parallel is None else parallel
    if choice.kind == "none" or not functions:
        return ToolPlan(style, parallel=several)
    return ToolPlan(
        style,
        names=frozenset(function.name for function in functions),
        template_tools=[function.for_template() for function in functions],
        grammar=make_grammar(functions, choice, style, parallel=several),
        parallel=several,
        demanded=choice.kind in ("required", "function"),
    )
