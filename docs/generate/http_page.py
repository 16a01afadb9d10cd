"""The HTTP endpoints, from the OpenAPI document that a router serves."""

from __future__ import annotations

import re
from typing import Any, Final

from generate.tables import code, table

from trunkline.deploy.config import models
from trunkline.router.app import create_app
from trunkline.router.config import RouterConfig
from trunkline.router.service import RouterService
from trunkline.router.text.tokenizer import Tokenizer

_INTRODUCTION: Final = """# HTTP endpoints

Made from `GET /openapi.json` of a router. What the parameters mean, and what is refused, is told in
[the API](../api.md)."""


def page() -> str:
    """Markdown."""
    schema = document()
    parts = [_INTRODUCTION]
    for path, operations in sorted(schema["paths"].items()):
        for method, operation in sorted(operations.items()):
            parts += _operation(method, path, operation)
    parts.append("## Objects")
    for name, found in sorted(schema["components"]["schemas"].items()):
        parts += _object(name, found)
    return "\n\n".join(parts) + "\n"


def document() -> dict[str, Any]:
    """OpenAPI, as a router of the demo model says it."""
    folder = str(models.resolve("demo"))
    config = RouterConfig(model_path=folder, controllers=["inproc://nobody"])
    schema: dict[str, Any] = create_app(RouterService(config, Tokenizer(folder))).openapi()
    return schema


def _operation(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    parts = [f"## {method.upper()} {path}", operation.get("description") or operation.get("summary", "")]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        parts.append(f"Body: {_type(body)}")
    rows = [
        (code(given["name"]), given["in"], _type(given.get("schema", {})), given.get("description", ""))
        for given in operation.get("parameters", [])
    ]
    return [part for part in (*parts, table(("parameter", "in", "type", ""), rows)) if part]


def _told(found: dict[str, Any]) -> str:
    """What a field means. Its links are those of docs/api.md."""
    return re.sub(
        r"\]\((?!https?:)([\w-]+\.md)?#",
        lambda match: f"](../{match[1] or 'api.md'}#",
        found.get("description", ""),
    )


def _object(name: str, found: dict[str, Any]) -> list[str]:
    needed = found.get("required", [])
    rows = [
        (
            code(field),
            _type(value),
            "required" if field in needed else _default(value),
            _told(value),
        )
        for field, value in found.get("properties", {}).items()
    ]
    fields = table(("field", "type", "default", ""), rows) or f"Type: {_type(found)}"
    return [part for part in (f"### {name}", found.get("description", ""), fields) if part]


def _default(found: dict[str, Any]) -> str:
    return code(str(found["default"])) if found.get("default") is not None else ""


def _type(found: dict[str, Any]) -> str:
    if "$ref" in found:
        name = found["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in found:
            return " or ".join(_type(choice) for choice in found[key])
    if "enum" in found:
        return ", ".join(code(str(value)) for value in found["enum"])
    if "const" in found:
        return code(str(found["const"]))
    if found.get("type") == "array":
        return f"list of {_type(found.get('items', {}))}"
    return str(found.get("type", "any"))
