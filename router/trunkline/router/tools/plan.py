"""`ToolPlan`: what a request with tools needs, which is the template's tools, the grammar and the parser.

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
    """Everything that a request needs for its tools."""

    style: ToolStyle
    names: frozenset[str] = frozenset()
    """Functions that the answer may call. Without any, the answer is text and needs no parser."""
    template_tools: list[dict[str, Any]] | None = None
    """Tools for the chat template (`Tokenizer.render_chat`); None: it shows no tools."""
    grammar: Grammar | None = None
    """Grammar of the answer, which excludes any other grammar."""
    parallel: bool = True
    """Whether the answer may have several calls."""
    demanded: bool = False
    """Whether the answer must consist of calls only."""

    @property
    def active(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.names)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must keep its special tokens, because calls begin with one."""
        return self.active and bool(self.style.special)

    def make_parser(self, draw_id: Callable[[], str] | None = None) -> ToolParser | None:
        """Make the parser for one answer; None if it cannot have calls. `draw_id`: makes the id of a call."""
        if not self.active:
            return None
        return make_parser(self.style.name, self.names, draw_id or self.draw_id, demanded=self.demanded)

    def draw_id(self, prefix: str = "call_") -> str:
        """Draw the id of a call. Ids for Mistral have no prefix: its templates take nine letters and digits
        only."""
        if self.style.name == "mistral":
            count = len(_MISTRAL_ID_CHARACTERS)
            numbers = (number % count for number in draw_bytes("call", 9))
            return "".join(_MISTRAL_ID_CHARACTERS[number] for number in numbers)
        return prefix + draw_hex("call", 12)


def prepare_tools(tools: Any, tool_choice: Any, parallel_tool_calls: Any, style: ToolStyle) -> ToolPlan:
    """Make the plan of a chat completion from the fields of its JSON; None: the field was not given.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    functions = read_chat_tools(tools)
    choice = read_choice(tool_choice, functions)
    return plan_tools(functions, choice, style, parallel=parallel_tool_calls)


def plan_tools(
    functions: list[FunctionTool], choice: Choice, style: ToolStyle, *, parallel: bool | None = None
) -> ToolPlan:
    """Make the plan for checked functions. With `choice` "none" the template does not show them.

    Args:
        parallel: Whether the answer may have several calls. None, the client did not say: one call if a call is
            required, because a weak model would go on calling, and any number if the model may choose.
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
