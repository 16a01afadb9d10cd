"""A function that a client offers to the model. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

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
