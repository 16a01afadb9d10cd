"""`/v1/schemas`: its requests as pydantic models, its answers as structs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from trunkline.router.jobs.late_model import LateModel
from trunkline.router.jobs.parameters import SchemaTtl, SessionId


class SchemaRequest(LateModel):
    """The request `POST /v1/schemas`."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    pml: Annotated[str, Field(min_length=1)] | None = None
    """The schema in PML, unless `json` is given."""
    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    """The schema as JSON, unless `pml` is given."""
    ttl: SchemaTtl | None = None
    """Seconds without use after which the schema is deleted; 0: never."""
    pin: bool | None = None
    """Whether its modules always stay in some tier."""
    warm: bool | None = None
    """Whether its modules are computed before the answer (the default), or when requests need them."""
    encode_scope: Literal["ancestors", "self"] | None = None
    relocate: bool | None = None
    """Whether KV of a text is reused at another distance from its ancestors, or computed again for each distance.
    The default is true where texts see no ancestors (scope "self"): there it is exact."""
    cache_salt: SessionId | None = None
    """Only requests with the same salt find the schema."""

    @model_validator(mode="after")
    def _check(self) -> SchemaRequest:
        if (self.pml is None) == (self.json_ is None):
            raise PydanticCustomError("pml", "give either `pml` or `json`", {"param": "pml"})
        if self.pin and self.warm is False:
            raise PydanticCustomError("warm", "is false, but `pin` needs the modules computed", {"param": "warm"})
        return self


class SchemaUpdate(LateModel):
    """The request `PATCH /v1/schemas/{id}`. Fields that are missing or null stay as they are."""

    model_config = ConfigDict(strict=True, extra="forbid")

    ttl: SchemaTtl | None = None
    pin: bool | None = None
    """Whether the schema's modules always stay in some tier. If true, missing modules are computed first."""
    cache_salt: SessionId | None = None
    """The salt that the schema was made with."""


class ParamObject(msgspec.Struct, kw_only=True):
    """A parameter of a module."""

    name: str
    length: int
    """Largest number of tokens of an argument."""
    required: bool
    default: str | None


class ModuleObject(msgspec.Struct, kw_only=True):
    """A module of a schema. Its texts are its own, without those of nested modules."""

    path: str
    """Path of the module; "" for the schema's own text."""
    start: int
    """Position of the module's first token."""
    length: int
    """Number of the module's positions, including those of nested modules."""
    params: list[ParamObject]
    cached: bool
    """Whether the module's KV is kept. If not, the module is computed for each request."""
    tokens: int
    """Number of tokens in its texts, including parameters."""
    bytes: int
    """Size of the KV that is kept for its texts."""
    tier: str | None
    """The slowest tier that holds a part of the module; null: some of it is not computed."""


class SchemaUsage(msgspec.Struct):
    """Size of a schema."""

    tokens: int
    """Number of tokens in all its texts, including versions for scaffolds."""
    computed_tokens: int
    """Number of tokens computed for this answer."""
    bytes: int
    """Size of its KV, including texts that other schemas share."""


SchemaStatus = Literal["ready", "partial", "encoding", "cold"]


class SchemaObject(msgspec.Struct, kw_only=True):
    """A schema in answers to clients. Times are Unix time in seconds."""

    id: str
    object: Literal["schema"] = "schema"
    name: str
    """The same as `id`."""
    version: int
    """Version of the schema: 1 at first, one more each time that a schema of this name is posted."""
    model: str
    status: SchemaStatus
    """"ready": all modules are computed; "cold": none is. Requests compute missing modules."""
    extent: int
    """Number of positions."""
    encode_scope: str
    relocate: bool
    pin: bool
    ttl: int
    created_at: int
    last_used_at: int
    expires_at: int | None
    """Time at which the schema is deleted if it is not used before; null: never."""
    modules: list[ModuleObject]
    usage: SchemaUsage
    warnings: list[str]
    pml: str | UnsetType = UNSET
    """The schema in PML, with `?include=pml`, unless a text has characters that XML cannot write."""
    json_: dict[str, Any] | UnsetType = msgspec.field(name="json", default=UNSET)
    """The JSON form of a schema that was sent as JSON, with `?include=pml`."""


class SchemaSummary(msgspec.Struct, kw_only=True):
    """A schema in a list."""

    id: str
    object: Literal["schema"] = "schema"
    name: str
    created_at: int
    last_used_at: int
    expires_at: int | None


class SchemaList(msgspec.Struct, kw_only=True):
    """`GET /v1/schemas`."""

    object: Literal["list"] = "list"
    data: list[SchemaSummary]
    first_id: str | None
    last_id: str | None
    """The value of `after` for the next page."""
    has_more: bool


class SchemaDeleted(msgspec.Struct, kw_only=True):
    """`DELETE /v1/schemas/{id}`."""

    id: str
    object: Literal["schema.deleted"] = "schema.deleted"
    deleted: bool = True
