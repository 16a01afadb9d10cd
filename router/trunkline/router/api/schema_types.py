"""`/v1/schemas`: its requests as pydantic models, its answers as structs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from trunkline.router.jobs.parameters import SchemaTtl, SessionId


class SchemaRequest(BaseModel):
    """`POST /v1/schemas`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    pml: Annotated[str, Field(min_length=1)] | None = None
    """The schema in PML; or …"""
    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    """… the same as JSON."""
    ttl: SchemaTtl | None = None
    """Seconds without use after which it is forgotten; 0: never."""
    pin: bool | None = None
    """Whether its modules stay in some tier whatever else needs room."""
    warm: bool | None = None
    """Whether its modules are computed before the answer (the default), or when requests need them."""
    encode_scope: Literal["ancestors", "self"] | None = None
    relocate: bool | None = None
    """Whether KV serves that was computed for the same text below the same ancestors, but at another distance from
    them (the default); else it is computed again for each distance."""
    cache_salt: SessionId | None = None
    """Whose schema it is: only requests with the same salt find it."""

    @model_validator(mode="after")
    def _check(self) -> SchemaRequest:
        if (self.pml is None) == (self.json_ is None):
            raise PydanticCustomError("pml", "give either `pml` or `json`", {"param": "pml"})
        if self.pin and self.warm is False:
            raise PydanticCustomError("warm", "is false, but `pin` needs the modules computed", {"param": "warm"})
        return self


class SchemaUpdate(BaseModel):
    """`PATCH /v1/schemas/{id}`: what is left out, or null, stays as it is."""

    model_config = ConfigDict(strict=True, extra="ignore")

    ttl: SchemaTtl | None = None
    pin: bool | None = None
    """true: modules that are not there are computed first."""
    cache_salt: SessionId | None = None
    """As it was made with."""


class ParamObject(msgspec.Struct, kw_only=True):
    """A parameter of a module."""

    name: str
    length: int
    """Tokens that an argument may have."""
    required: bool
    default: str | None


class ModuleObject(msgspec.Struct, kw_only=True):
    """A module of a schema. Its texts are what stands in itself, not in modules within it."""

    path: str
    """"" for what stands in the schema itself."""
    start: int
    """Position of its first token …"""
    length: int
    """… and how many it spans, modules within it included."""
    params: list[ParamObject]
    cached: bool
    """False: it is computed for each request."""
    tokens: int
    """Of its texts, parameters included."""
    bytes: int
    """Of KV that is kept for its texts."""
    tier: str | None
    """The slowest one from which a part of it has to come; null: not all of it is there."""


class SchemaUsage(msgspec.Struct):
    """What a schema takes."""

    tokens: int
    """Of all its texts: those of scaffolds, too."""
    computed_tokens: int
    """For this answer."""
    bytes: int
    """Of KV that is kept, the same texts of other schemas included."""


SchemaStatus = Literal["ready", "partial", "encoding", "cold"]


class SchemaObject(msgspec.Struct, kw_only=True):
    """A schema, as a client sees it. Times are Unix time in seconds."""

    id: str
    object: Literal["schema"] = "schema"
    name: str
    """The same as `id`."""
    version: int
    """1, and one more each time that a schema of this name is posted."""
    model: str
    status: SchemaStatus
    """ready: all modules are computed; cold: none; requests have what is missing computed."""
    extent: int
    """Positions that it spans."""
    encode_scope: str
    relocate: bool
    pin: bool
    ttl: int
    created_at: int
    last_used_at: int
    expires_at: int | None
    """If nobody uses it until then; null: never."""
    modules: list[ModuleObject]
    usage: SchemaUsage
    warnings: list[str]
    pml: str | UnsetType = UNSET
    """With `?include=pml`, unless a text has characters that XML cannot write."""
    json_: dict[str, Any] | UnsetType = msgspec.field(name="json", default=UNSET)
    """With `?include=pml`: the JSON form, of a schema that was sent so."""


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
    """To be given as `after` for what follows."""
    has_more: bool


class SchemaDeleted(msgspec.Struct, kw_only=True):
    """`DELETE /v1/schemas/{id}`."""

    id: str
    object: Literal["schema.deleted"] = "schema.deleted"
    deleted: bool = True
