"""The tools of a request: read and check `tools` and `tool_choice`, and plan what follows from them.

tools, tool_choice ─► prepare_tools ─► ToolPlan ─┬─ template_tools ─► chat template
                                                 ├─ grammar ────────► Submit
                                                 └─ make_parser ────► text and calls

The grammar of an answer with calls is a structural tag (xgrammar's language). If a call is required, it is the
whole answer. If the model may choose, a grammar is needed only for strict functions: text is free until a call
begins, and then only a valid call can be completed. Markers that are special tokens are written as tokens in the
grammar, because the model never writes them letter by letter.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from trunkline.controller.messages import Grammar
from trunkline.router.errors import bad_value, unsupported
from trunkline.router.request_context import draw_bytes, draw_hex
from trunkline.router.text.reasoning_styles import ReasoningStyle, ThoughtState
from trunkline.router.text.tool_styles import ToolStyle
from trunkline.router.tools.call_or_text import CallsOnly, CallsOrText
from trunkline.router.tools.functions import FunctionTool
from trunkline.router.tools.grammar import Format, as_answer, as_tag, behind_thought, call_grammar, calls_or
from trunkline.router.tools.parsers import make_parser
from trunkline.router.tools.pieces import AnswerParser
from trunkline.router.tools.thoughts import ThoughtParser

TOOLS_MAX: Final = 128
"""Largest number of tools of a request, which is OpenAI's limit, too."""
TOOLS_BYTES_MAX: Final = 512 << 10
"""Largest size of all definitions of tools, as JSON. They are part of the prompt, and their schemas are
compiled."""
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Choice(msgspec.Struct, frozen=True):
    """The choice of a client: which calls the model may or must make."""

    kind: Literal["none", "auto", "required", "function"]
    name: str = ""
    """Name of the function that must be called, if `kind` is "function"; else ""."""
    allowed: tuple[str, ...] | None = None
    """Names of the functions that may be called, though the model is shown all; None: all of them."""

    def allows(self, name: str) -> bool:
        """Return whether the model may call a function."""
        return name == self.name if self.name else self.allowed is None or name in self.allowed


def read_function(fields: Any, path: str, *, schema_field: str = "parameters") -> FunctionTool:
    """Read the definition of a function. `path`: path of `fields` in the request, for errors.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    if not isinstance(fields, dict):
        raise bad_value(path, f"`{path}` must be an object")
    name = fields.get("name")
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        code = "missing_required_parameter" if name is None else None
        raise bad_value(f"{path}.name", f"`{path}.name` must be 1 to 64 of A-Z a-z 0-9 _ -", code=code)
    description = fields.get("description")
    if description is not None and not isinstance(description, str):
        raise bad_value(f"{path}.description", f"`{path}.description` must be a string")
    strict = fields.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_value(f"{path}.strict", f"`{path}.strict` must be true or false")
    parameters = fields.get(schema_field)
    if parameters is not None:
        _check_schema(parameters, f"{path}.{schema_field}")
    return FunctionTool(name=name, description=description, parameters=parameters, strict=bool(strict))


def _check_schema(schema: Any, path: str) -> None:
    if not isinstance(schema, dict):
        raise bad_value(path, f"`{path}` must be a JSON schema, an object")
    if schema.get("type", "object") != "object":
        raise bad_value(f"{path}.type", f'`{path}.type` must be "object": arguments have names')
    if not isinstance(schema.get("properties", {}), dict):
        raise bad_value(f"{path}.properties", f"`{path}.properties` must be an object from names to schemas")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_value(f"{path}.required", f"`{path}.required` must be a list of names")


def check_functions(functions: list[FunctionTool], param: str = "tools") -> None:
    """Refuse lists of functions that are too long or too large, or have a name twice.

    Raises:
        ApiError: 400.
    """
    if len(functions) > TOOLS_MAX:
        raise bad_value(param, f"`{param}` has {len(functions)} entries; at most {TOOLS_MAX} are allowed")
    names: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in names:
            raise bad_value(
                f"{param}[{index}]", f"`{param}[{index}]` is the second function named {function.name!r}"
            )
        names.add(function.name)
    size = len(msgspec.json.encode(functions))
    if size > TOOLS_BYTES_MAX:
        raise bad_value(param, f"`{param}` comes to {size} bytes; at most {TOOLS_BYTES_MAX} are allowed")


def read_chat_tools(tools: Any) -> list[FunctionTool]:
    """Read the `tools` of a chat completion.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    functions = []
    for index, tool in enumerate(_entries(tools)):
        path = f"tools[{index}]"
        check_function_type(tool, path)
        functions.append(read_function(tool.get("function"), f"{path}.function"))
    check_functions(functions)
    return functions


def _entries(tools: Any) -> list[Any]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_value("tools", "`tools` must be a list")
    if len(tools) > TOOLS_MAX:
        raise bad_value("tools", f"`tools` has {len(tools)} entries; at most {TOOLS_MAX} are allowed")
    return tools


def check_function_type(tool: Any, path: str) -> None:
    """Refuse tools other than functions.

    Raises:
        ApiError: 400.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise bad_value(path, f'`{path}` must be an object with `"type": "function"`')
    if kind != "function":
        raise unsupported(f"{path}.type", f"tools of type {kind[:40]!r} are not supported, only functions")


def read_choice(choice: Any, functions: list[FunctionTool]) -> Choice:
    """Read `tool_choice` in OpenAI's forms: a word, or a function with its name inside `function` or beside
    `type`.

    Raises:
        ApiError: 400, its form is unknown, there is no such function, or there are no functions to call.
    """
    if choice is None:
        return Choice("auto" if functions else "none")
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            return _read_allowed(choice.get("allowed_tools", choice), functions)
        if isinstance(kind, str) and kind != "function":
            supported = "only 'function' and 'allowed_tools'"
            raise unsupported("tool_choice", f"a choice of type {kind[:40]!r} is not supported, {supported}")
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, dict) else None
        if kind != "function" or not isinstance(name, str):
            raise bad_value("tool_choice", '`tool_choice` objects are {"type": "function", …} with a name')
        return named(name, functions)
    if choice == "none":
        return Choice("none")
    if choice == "auto":
        return Choice("auto" if functions else "none")
    if choice == "required":
        return required(functions)
    raise bad_value("tool_choice", '`tool_choice` must be "none", "auto", "required" or a function')


def _read_allowed(fields: Any, functions: list[FunctionTool]) -> Choice:
    """Read a choice of type "allowed_tools": of the tools that are no functions, none can be called anyway."""
    mode = fields.get("mode", "auto") if isinstance(fields, dict) else None
    tools = fields.get("tools") if isinstance(fields, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise bad_value(
            "tool_choice", "`tool_choice` of type allowed_tools needs a `mode`, auto or required, and `tools`"
        )
    names = []
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        name = inner.get("name") if isinstance(inner, dict) else None
        if isinstance(name, str) and tool.get("type", "function") == "function":
            names.append(named(name, functions).name)
    if not names and mode == "required":
        raise bad_value("tool_choice", "`tool_choice` demands a call, but allows no function")
    return Choice(mode, allowed=tuple(names))


def required(functions: list[FunctionTool]) -> Choice:
    """Return the choice that some function must be called.

    Raises:
        ApiError: 400, there are no functions.
    """
    if not functions:
        raise bad_value("tool_choice", "`tool_choice` demands a call, but there are no `tools`")
    return Choice("required")


def named(name: str, functions: list[FunctionTool]) -> Choice:
    """Return the choice that the function `name` must be called.

    Raises:
        ApiError: 400, there is no such function.
    """
    if all(function.name != name for function in functions):
        raise bad_value("tool_choice", f"`tool_choice` names {name[:64]!r}, which is not among the `tools`")
    return Choice("function", name)


_MISTRAL_ID_CHARACTERS: Final = string.ascii_letters + string.digits


_TAIL_CHARACTERS: Final = 256
"""Number of last characters of a prompt that tell whether it ends within a thought."""


class ToolPlan(msgspec.Struct, frozen=True):
    """Everything that a request needs for its tools."""

    style: ToolStyle
    functions: tuple[FunctionTool, ...] = ()
    """The functions that the answer may call."""
    template_tools: list[dict[str, Any]] | None = None
    """Tools that the chat template shows (`Tokenizer.render_chat`); None: it shows none."""
    choice: Choice = Choice("none")
    parallel: bool = True
    """Whether the answer may have several calls."""
    reasoning: ReasoningStyle | None = None
    """How the model marks its thoughts; None: it has none."""
    separate: bool = True
    """Whether thoughts are told apart from the answer; if not, they are part of its text."""

    @property
    def active(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.functions)

    @property
    def demanded(self) -> bool:
        """Whether the answer must consist of calls only, behind its thought."""
        return self.choice.kind in ("required", "function")

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must keep its special tokens, because calls or thoughts begin with one."""
        thinks = self.reasoning is not None and bool(self.reasoning.special)
        return thinks or (bool(self.style.special) and (self.active or self.has_channels))

    @property
    def has_channels(self) -> bool:
        """Whether all answers of the model consist of messages on channels."""
        return self.style.name == "harmony"

    def make_parser(
        self,
        draw_id: Callable[[], str] | None = None,
        state: ThoughtState = "possible",
        *,
        formed: bool = False,
    ) -> AnswerParser | None:
        """Make the parser for one answer; None if it can be only text.

        Args:
            draw_id: Makes the id of a call.
            state: Where the answer begins (`Job.thought`).
            formed: Whether the answer is either calls or a text that follows a grammar (`Job.formed`).
        """
        calls: AnswerParser | None = None
        if self.active or self.has_channels:
            schemas = {function.name: function.schema for function in self.functions}
            calls = make_parser(self.style.name, schemas, draw_id or self.draw_id)
            if self.demanded:
                calls = CallsOnly(calls)
            elif formed and self.separate and not self.has_channels:  # channels tell calls from text anywhere
                calls = CallsOrText(calls)
        if self.reasoning is None or not self.reasoning.begin or state == "closed" or not self.separate:
            return calls
        return ThoughtParser(self.reasoning, state, calls)

    def thought_behind(self, prompt: str) -> ThoughtState:
        """Return where the answer to a prompt begins. `prompt`: its text, or the end of it."""
        return "possible" if self.reasoning is None else self.reasoning.state(prompt[-_TAIL_CHARACTERS:])

    def has_either(self, wanted: Grammar | None) -> bool:
        """Return whether an answer consists either of calls or of a text that follows a wanted grammar. Structural
        tags say themselves where in a text calls may stand."""
        return self.active and not self.demanded and wanted is not None and wanted.kind != "structural_tag"

    def grammar(
        self, wanted: Grammar | None, state: ThoughtState = "possible", budget: int | None = None
    ) -> Grammar | None:
        """Return the grammar of a whole answer, its thought included; None: any text is allowed.

        Args:
            wanted: The grammar that the request asks for; None: it asks for none. It says nothing about calls, and
                where a call is demanded there is no other text.
            state: Where the answer begins.
            budget: Largest number of tokens of its thought; None: any number.

        Raises:
            ApiError: 400, the wanted grammar says itself where calls stand, and calls follow another one.
        """
        answer, param = self._calls(), "tools"
        plain = answer is None
        if wanted is not None and not self.demanded:
            param = wanted.param
            if self.has_either(wanted):
                answer, plain = calls_or(self.functions, self.style, wanted, several=self.parallel), False
            elif plain:
                answer = as_answer(wanted, self.style)
            else:
                raise bad_value(param, f"`{param}` of this kind contradicts strict `tools` and `allowed_tools`")
        if answer is None and budget is None:
            return None
        whole = behind_thought(answer, self.reasoning, self.style, state, budget)
        if whole is None and (plain or answer is None):
            return wanted
        param = "thinking_budget" if answer is None else param
        return Grammar("structural_tag", as_tag(whole or answer or {}), param)

    def _calls(self) -> Format | None:
        """Return the format of an answer as far as calls decide it; None: they do not."""
        several = self.parallel and self.choice.kind != "function"
        if self.demanded:
            return call_grammar(self.functions, self.style, demanded=True, several=several)
        is_held = self.choice.allowed is not None or any(function.strict for function in self.functions)
        if not (self.active and is_held):
            return None
        return call_grammar(self.functions, self.style, demanded=False, several=several)

    def draw_id(self, prefix: str = "call_") -> str:
        """Draw the id of a call. Ids for Mistral have no prefix: its templates take nine letters and digits
        only."""
        if self.style.name == "mistral":
            count = len(_MISTRAL_ID_CHARACTERS)
            numbers = (number % count for number in draw_bytes("call", 9))
            return "".join(_MISTRAL_ID_CHARACTERS[number] for number in numbers)
        return prefix + draw_hex("call", 12)


def prepare_tools(
    tools: Any,
    tool_choice: Any,
    parallel_tool_calls: Any,
    style: ToolStyle,
    reasoning: ReasoningStyle | None = None,
) -> ToolPlan:
    """Make the plan of a chat completion from the fields of its JSON; None: the field was not given.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    functions = read_chat_tools(tools)
    choice = read_choice(tool_choice, functions)
    return plan_tools(functions, choice, style, reasoning, parallel=parallel_tool_calls)


def plan_tools(
    functions: list[FunctionTool],
    choice: Choice,
    style: ToolStyle,
    reasoning: ReasoningStyle | None = None,
    *,
    parallel: bool | None = None,
) -> ToolPlan:
    """Make the plan for checked functions. With `choice` "none" the template does not show them.

    Args:
        parallel: Whether the answer may have several calls. None, the client did not say: one call if a call is
            required, because a weak model would go on calling, and any number if the model may choose.
    """
    several = choice.kind in ("none", "auto") if parallel is None else parallel
    if choice.kind == "none" or not functions:
        return ToolPlan(style, parallel=several, reasoning=reasoning)
    return ToolPlan(
        style,
        functions=tuple(function for function in functions if choice.allows(function.name)),
        template_tools=[function.for_template() for function in functions],
        choice=choice,
        parallel=several,
        reasoning=reasoning,
    )
