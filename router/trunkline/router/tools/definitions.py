"""Read and check `tools` and `tool_choice` of a request: the functions that the model may or must call."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from trunkline.router.errors import bad_value, unsupported

TOOLS_MAX: Final = 128
"""OpenAI's limit."""
TOOLS_BYTES_MAX: Final = 512 << 10
"""Size of all definitions as JSON. They are part of the prompt, and their schemas are compiled."""
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None: the client gave none."""
    strict: bool = False
    """Whether arguments must follow the schema even if the model decides by itself to call."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema that the arguments must follow."""
        if self.parameters is None:
            return NO_PARAMETERS
        return {"type": "object", **self.parameters}

    def for_template(self) -> dict[str, Any]:
        """Return the function in OpenAI's form, which chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = {"type": "object", "properties": {}, **(self.parameters or {})}
        return {"type": "function", "function": function}


class Choice(msgspec.Struct, frozen=True):
    """The choice of a client: which calls the model may or must make."""

    kind: Literal["none", "auto", "required", "function"]
    name: str = ""
    """Name of the function, for the kind "function"."""


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


def read_flat_tools(tools: Any) -> list[FunctionTool]:
    """Read the `tools` of `/v1/responses`, which have no inner `function`.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    functions = []
    for index, tool in enumerate(_entries(tools)):
        check_function_type(tool, f"tools[{index}]")
        functions.append(read_function(tool, f"tools[{index}]"))
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
        if isinstance(kind, str) and kind != "function":
            raise unsupported("tool_choice", f"a choice of type {kind[:40]!r} is not supported, only 'function'")
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
