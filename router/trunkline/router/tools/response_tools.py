"""The tools of `/v1/responses`, as functions for the model and as the client knows them. Pure.

The model knows functions only. A custom tool is a function with one text, `input`. A namespace's tools are
functions whose names begin with the namespace. Tools that OpenAI's servers carry out (web_search, file_search,
mcp, …) do not exist here: the model is not shown them, and the response lists them as unavailable.

    tools ─► read_response_tools ─► functions ─► plan, template, grammar
                                └─► own ──────► a call's item: type, name, namespace
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from pydantic_core import from_json

from trunkline.router.errors import bad_value, unsupported
from trunkline.router.tools.functions import FunctionTool
from trunkline.router.tools.plan import (
    NAME_PATTERN,
    TOOLS_MAX,
    Choice,
    check_functions,
    read_choice,
    read_function,
)

INPUT: Final = "input"
"""The only argument of a custom tool's function."""
_FOREIGN_CHARACTER: Final = re.compile(r"[^A-Za-z0-9_-]")
_KIND_CHARACTERS_MAX: Final = 64


class OwnTool(msgspec.Struct, frozen=True):
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    is_custom: bool = False


class ResponseTools(msgspec.Struct, frozen=True):
    """The tools of a request."""

    functions: list[FunctionTool] = []
    """What the model is shown."""
    own: Mapping[str, OwnTool] = {}
    """The client's tools, by the names of their functions."""
    unavailable: tuple[str, ...] = ()
    """Types of tools that the model cannot use here, each once."""

    def of_call(self, function: str) -> OwnTool:
        """Return the tool that a call of a function means."""
        return self.own.get(function, OwnTool(function))


def function_name(name: str, namespace: str = "") -> str:
    """Return the name of a tool's function: with its namespace, if that is short enough."""
    name, namespace = (_FOREIGN_CHARACTER.sub("_", part) for part in (name, namespace))
    whole = f"{namespace}__{name}" if namespace else name
    return whole if NAME_PATTERN.fullmatch(whole) else name


def custom_arguments(text: str) -> str:
    """Return a custom tool's input as the arguments of its function: a JSON text, with the spaces that models
    write."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input in the arguments of a custom tool's function. Arguments of another form, which a model may
    write if no grammar holds it, are the input as they are."""
    try:
        fields = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments
    found = fields.get(INPUT) if isinstance(fields, dict) else None
    return found if isinstance(found, str) else arguments


def read_response_tools(tools: Any) -> ResponseTools:
    """Read the field `tools` of `/v1/responses`.

    Raises:
        ApiError: 400, naming the field that is wrong. A tool of an unknown type is not wrong.
    """
    if tools is None:
        return ResponseTools()
    if not isinstance(tools, list):
        raise bad_value("tools", "`tools` must be a list")
    functions: list[FunctionTool] = []
    own: dict[str, OwnTool] = {}
    unavailable: dict[str, None] = {}
    for path, tool, namespace in _flat(tools):
        kind = tool["type"]
        if kind not in ("function", "custom"):
            unavailable[kind[:_KIND_CHARACTERS_MAX]] = None
            continue
        is_custom = kind == "custom"
        name = tool.get("name")
        known = {**tool, "name": function_name(name, namespace)} if isinstance(name, str) and name else tool
        function = read_function(_as_function(known, path) if is_custom else known, path)
        functions.append(function)
        own[function.name] = OwnTool(str(name), namespace, is_custom)
    check_functions(functions)
    return ResponseTools(functions, own, tuple(unavailable))


def _flat(tools: list[Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each tool with its path and its namespace; those of a namespace one by one."""
    if len(tools) > TOOLS_MAX:
        raise bad_value("tools", f"`tools` has {len(tools)} entries; at most {TOOLS_MAX} are allowed")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise bad_value(path, f'`{path}` must be an object like {{"type": "function", …}}')
        if tool["type"] != "namespace":
            yield path, tool, ""
            continue
        inner, name = tool.get("tools"), tool.get("name")
        if not isinstance(name, str) or not name:
            raise bad_value(f"{path}.name", f"`{path}.name` is required", code="missing_required_parameter")
        if not isinstance(inner, list) or len(inner) > TOOLS_MAX:
            raise bad_value(f"{path}.tools", f"`{path}.tools` must be a list of at most {TOOLS_MAX} tools")
        for number, each in enumerate(inner):
            place = f"{path}.tools[{number}]"
            if not isinstance(each, dict) or not isinstance(each.get("type"), str):
                raise bad_value(place, f'`{place}` must be an object like {{"type": "function", …}}')
            yield place, each, name


def _as_function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a custom tool as a function with one text. A regular expression holds; a grammar in Lark, which the
    grammar compiler does not read, is shown to the model."""
    form = tool.get("format")
    text: dict[str, Any] = {"type": "string"}
    description = tool.get("description")
    strict = False
    if isinstance(form, dict) and form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            place = f"{path}.format"
            raise bad_value(place, f'`{place}` needs a `definition`, and "lark" or "regex" as `syntax`')
        if syntax == "regex":
            text["pattern"], strict = f"^(?:{definition})$", True
        else:
            told = f"The input follows this grammar (Lark):\n{definition}"
            description = f"{description}\n{told}" if isinstance(description, str) and description else told
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {"name": tool.get("name"), "description": description, "parameters": parameters, "strict": strict}


def read_response_choice(choice: Any, tools: ResponseTools) -> Choice:
    """Read the field `tool_choice` of `/v1/responses`.

    Raises:
        ApiError: 400, its form is unknown, or it demands a tool that does not exist here.
    """
    if not isinstance(choice, dict):
        return read_choice(choice, tools.functions)
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        # Only functions count: none of the others can be called anyway.
        allowed = [_flat_choice(tool) for tool in choice["tools"]]
        return read_choice({**choice, "tools": allowed}, tools.functions)
    kind = choice.get("type")
    if isinstance(kind, str) and kind in tools.unavailable:
        raise unsupported("tool_choice", f"`tool_choice` demands {kind[:40]!r}, which is not available here")
    return read_choice(_flat_choice(choice), tools.functions)


def _flat_choice(choice: Any) -> Any:
    """Return the choice of a custom tool, or of one in a namespace, as that of its function."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    name, namespace = choice.get("name"), choice.get("namespace")
    if not isinstance(name, str):
        return choice
    return {"type": "function", "name": function_name(name, namespace if isinstance(namespace, str) else "")}
