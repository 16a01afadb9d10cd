"""`client.schemas`: the schemas that a server stores. A schema's id is its name, within its `cache_salt`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote

import msgspec

from trunkline.prompts.errors import UnreachableError
from trunkline.prompts.program import PromptProgram
from trunkline.prompts.transport import HttpConnection

_PATH: Final = "/v1/schemas"
T = TypeVar("T")


class SchemaParam(msgspec.Struct, frozen=True):
    """A parameter of a module."""

    name: str
    length: int
    """Largest number of tokens of an argument."""
    required: bool = False
    default: str | None = None


class SchemaModule(msgspec.Struct, frozen=True):
    """A module of a schema as the server has laid it out."""

    path: str
    """Path of the module; "" for text of the schema itself."""
    start: int
    """Position of the first token."""
    length: int
    """Number of positions, including parameters and nested modules."""
    params: tuple[SchemaParam, ...] = ()
    cached: bool = True
    """Whether the module's KV is kept. If not, the module is computed for each request."""
    tokens: int = 0
    """Number of tokens in its own text, including placeholders."""
    bytes: int = 0
    """Size of the KV that is kept for its text."""
    tier: str | None = None
    """The slowest tier that holds a part of the module; None: some of it is not computed."""


class Schema(msgspec.Struct, frozen=True):
    """A schema as the server stores it."""

    id: str
    name: str
    version: int
    status: str
    """"ready": all modules are computed; "partial"; "encoding"; "cold": none is. Requests compute missing
    modules."""
    extent: int
    """Number of positions."""
    pin: bool = False
    modules: tuple[SchemaModule, ...] = ()
    expires_at: int | None = None
    """Unix time in seconds at which the schema is deleted if it is not used before; None: never."""
    usage: dict[str, int] = {}
    """`tokens`, `computed_tokens`, `bytes`."""
    warnings: tuple[str, ...] = ()


class SchemaEntry(msgspec.Struct, frozen=True):
    """A schema in a list."""

    id: str
    """Name of the schema."""
    expires_at: int | None = None


class Schemas:
    """Requests about schemas. All methods may raise `RequestError`, `PmlRequestError` or `UnreachableError`."""

    def __init__(self, connection: HttpConnection, model: str | None) -> None:
        self._connection = connection
        self._model = model

    def create(
        self,
        source: PromptProgram[Any] | str | Mapping[str, Any],
        *,
        ttl: int | None = None,
        pin: bool | None = None,
        warm: bool | None = None,
        encode_scope: Literal["ancestors", "self"] | None = None,
        relocate: bool | None = None,
        cache_salt: str | None = None,
    ) -> Schema:
        """Store a schema, replacing the one of this name. None: the server's default.

        Args:
            source: A prompt program, PML, or the JSON form of PML.
            ttl: Seconds without use after which the server deletes the schema; 0: never.
            pin: Whether the KV of its modules stays in some tier as long as the schema exists.
            warm: Whether the KV is computed now, before the server answers.
            encode_scope: What a module sees while its KV is computed: the text before it in its ancestors too, or
                only itself.
            relocate: Whether KV of the same text at another distance from its ancestors is reused; the default is
                true with the scope "self" only.
            cache_salt: Only requests with this salt find the schema.
        """
        body = {
            **source_fields(source),
            "model": self._model,
            "ttl": ttl,
            "pin": pin,
            "warm": warm,
            "encode_scope": encode_scope,
            "relocate": relocate,
            "cache_salt": cache_salt,
        }
        given = {name: value for name, value in body.items() if value is not None}
        return _typed(self._connection.call("POST", _PATH, given), Schema)

    def get(self, schema_id: str, *, cache_salt: str | None = None) -> Schema:
        """Return a schema."""
        return _typed(self._connection.call("GET", _path(schema_id), query={"cache_salt": cache_salt}), Schema)

    def list(self, *, cache_salt: str | None = None) -> Iterator[SchemaEntry]:
        """Yield all schemas, requested page by page."""
        after: str | None = None
        while True:
            page = self._connection.call("GET", _PATH, query={"after": after, "cache_salt": cache_salt})
            entries = [_typed(entry, SchemaEntry) for entry in page.get("data", [])]
            yield from entries
            if not entries or not page.get("has_more"):
                return
            after = entries[-1].id

    def update(
        self,
        schema_id: str,
        *,
        ttl: int | None = None,
        pin: bool | None = None,
        cache_salt: str | None = None,
    ) -> Schema:
        """Change a schema's time to live or pin. None leaves a setting as it is."""
        body = {name: value for name, value in {"ttl": ttl, "pin": pin}.items() if value is not None}
        answer = self._connection.call("PATCH", _path(schema_id), body, {"cache_salt": cache_salt})
        return _typed(answer, Schema)

    def delete(self, schema_id: str, *, cache_salt: str | None = None) -> None:
        """Delete a schema. Running requests are not disturbed."""
        self._connection.call("DELETE", _path(schema_id), query={"cache_salt": cache_salt})


def source_fields(source: PromptProgram[Any] | str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema's source as the server takes it."""
    if isinstance(source, PromptProgram):
        return {"pml": source.to_pml()}
    if isinstance(source, str):
        return {"pml": source}
    return {"json": dict(source)}


def _path(schema_id: str) -> str:
    return f"{_PATH}/{quote(schema_id, safe='')}"


def _typed(value: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnreachableError(f"the server does not speak the expected protocol: {error}") from error
