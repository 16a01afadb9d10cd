"""`/v1/schemas`: prompt modules that are computed once and serve every prompt that imports them (Prompt Cache).

A schema's id is its name. Posting a name again makes a new version, which later requests use; running requests are
not affected. Names belong to a `cache_salt` (`schema_store.py`): requests about a schema that was made with a salt
give the salt in the body or, without a body, as `?cache_salt=`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request

from trunkline.kvstore.chunks import unpack_int32
from trunkline.kvstore.records import Record
from trunkline.kvstore.tier import TierKind
from trunkline.router import pml
from trunkline.router.api.paging import (
    answer_of,
    choice_of,
    components_of,
    expiry_of,
    make_page,
    page_of,
    page_parameters,
)
from trunkline.router.api.requests import check_model, service_of
from trunkline.router.api.schema_types import (
    ModuleObject,
    ParamObject,
    SchemaDeleted,
    SchemaList,
    SchemaObject,
    SchemaRequest,
    SchemaStatus,
    SchemaSummary,
    SchemaUpdate,
    SchemaUsage,
)
from trunkline.router.http.answers import JsonResponse, while_connected
from trunkline.router.http.body import is_heavier, read_request
from trunkline.router.jobs.parameters import SESSION_ID_CHARACTERS_MAX
from trunkline.router.messages import ModulesReply
from trunkline.router.service import RouterService
from trunkline.router.stores.schema_records import Definition
from trunkline.router.stores.stored_schema import StoredSchema
from trunkline.router.tenancy.auth import cache_salt

routes = APIRouter()

SCHEMAS: Final[dict[str, Any]] = components_of(SchemaObject, SchemaList, SchemaDeleted)
"""JSON schemas of the answers, for the OpenAPI document."""
_OFF_LOOP_WEIGHT: Final = 64 << 10
_SALT: Final = {
    "name": "cache_salt",
    "in": "query",
    "schema": {"type": "string", "minLength": 1, "maxLength": SESSION_ID_CHARACTERS_MAX},
}
_INCLUDE: Final = {"name": "include", "in": "query", "schema": {"type": "string", "enum": ["pml"]}}


@routes.post("/v1/schemas", status_code=201, responses=answer_of(SchemaObject, 201))
async def create_schema(request: Request) -> JsonResponse:
    """Store a schema, or a new version of it, and have its modules computed."""
    service = service_of(request)
    service.check_admission()
    body = await read_request(request, SchemaRequest, service.config.max_body_bytes)
    service = check_model(service, body.model)
    scope = body.encode_scope or "ancestors"
    definition = Definition(
        model=body.model or service.model_name,
        source=await _source(body),
        form="json" if body.pml is None else "xml",
        scope=scope,
        relocate=scope == "self" if body.relocate is None else body.relocate,
        pin=bool(body.pin),
        ttl=float(body.ttl or 0),
    )
    with service.schemas.errors_of("pml" if body.json_ is None else "json"):
        ready = await while_connected(request, service.schemas.compile(definition))
        if body.warm is not False:
            pml.check_encoding(ready.schema)
    schema = await service.schemas.put(ready.schema.name, cache_salt(body.cache_salt), definition, ready)
    if body.warm is False:
        return await _answer(service, schema, await service.schemas.look(schema), status=201)
    return await _answer(service, *await _encode(request, service, schema), status=201)


@routes.get(
    "/v1/schemas", responses=answer_of(SchemaList), openapi_extra={"parameters": [*page_parameters("asc"), _SALT]}
)
async def list_schemas(request: Request) -> JsonResponse:
    """List the schemas with a salt (or without one), page by page, in the order of their names."""
    page = page_of(request, "asc")
    store = service_of(request).schemas
    found = await store.page(_salt_asked(request), page.after, page.limit + 1)
    return JsonResponse(make_page(SchemaList, [_summary(record) for record in found], page.limit))


@routes.get(
    "/v1/schemas/{schema_id}",
    responses=answer_of(SchemaObject),
    openapi_extra={"parameters": [_SALT, _INCLUDE]},
)
async def get_schema(request: Request, schema_id: str) -> JsonResponse:
    """Return a schema and the tiers of its modules; with `include=pml` also its source."""
    service = service_of(request)
    include = choice_of(request, "include", "", ("pml",))
    with service.schemas.errors_of("schema"):
        schema = await service.schemas.get(schema_id, _salt_asked(request))
    return await _answer(service, schema, await service.schemas.look(schema), source=bool(include))


@routes.patch("/v1/schemas/{schema_id}", responses=answer_of(SchemaObject))
async def update_schema(request: Request, schema_id: str) -> JsonResponse:
    """Change how long a schema is kept, and whether its modules are pinned."""
    service = service_of(request)
    body = await read_request(request, SchemaUpdate, service.config.max_body_bytes)

    def change(definition: Definition) -> None:
        if body.ttl is not None:
            definition.ttl = float(body.ttl)
        if body.pin is not None:
            definition.pin = body.pin

    salt = cache_salt(body.cache_salt) if body.cache_salt else _salt_asked(request)
    with service.schemas.errors_of("schema"):
        if body.pin:
            pml.check_encoding((await service.schemas.get(schema_id, salt)).compiled)
        schema = await service.schemas.change(schema_id, salt, change)
    if body.pin is False:
        service.schemas.unpin(schema.record.key)
    # The engine keeps pinned texts for the schema's time to live, so it must know a new one.
    if schema.definition.pin:
        return await _answer(service, *await _encode(request, service, schema))
    return await _answer(service, schema, await service.schemas.look(schema))


@routes.delete(
    "/v1/schemas/{schema_id}", responses=answer_of(SchemaDeleted), openapi_extra={"parameters": [_SALT]}
)
async def delete_schema(request: Request, schema_id: str) -> JsonResponse:
    """Delete a schema, and the KV of its modules that nothing else uses. Running requests continue."""
    store = service_of(request).schemas
    with store.errors_of("schema"):
        await store.delete(schema_id, _salt_asked(request))
    return JsonResponse(SchemaDeleted(id=schema_id))


async def _source(body: SchemaRequest) -> str:
    """Return the source of a schema as text."""
    if body.pml is not None:
        return body.pml
    if is_heavier(body.json_, _OFF_LOOP_WEIGHT):
        return (await asyncio.to_thread(to_json, body.json_)).decode()
    return to_json(body.json_).decode()


async def _encode(
    request: Request, service: RouterService, schema: StoredSchema
) -> tuple[StoredSchema, ModulesReply]:
    """Have a schema's modules computed. If they cannot be pinned, the schema's `pin` becomes false."""
    seconds = service.config.request_timeout_seconds or None
    reply = await while_connected(request, service.schemas.encode(schema, seconds))
    if reply.status == "quota":
        with service.schemas.errors_of("schema"):
            schema = await service.schemas.change(schema.name, schema.salt, _unpin)
    return schema, reply


def _unpin(definition: Definition) -> None:
    definition.pin = False


def _salt_asked(request: Request) -> bytes:
    return cache_salt(request.query_params.get("cache_salt", "")[:SESSION_ID_CHARACTERS_MAX])


def _summary(record: Record) -> SchemaSummary:
    return SchemaSummary(
        id=record.key.id,
        name=record.key.id,
        created_at=int(record.created),
        last_used_at=int(record.used),
        expires_at=expiry_of(record),
    )


async def _answer(
    service: RouterService, schema: StoredSchema, reply: ModulesReply, *, status: int = 200, source: bool = False
) -> JsonResponse:
    """Return a schema as an answer. `reply`: the engine's reply about its texts."""
    encoding = service.schemas.is_encoding(schema)

    def write() -> JsonResponse:
        answer = _object(schema, reply)
        if encoding:
            answer.status = "encoding"
        if source:
            document = schema.definition.parse()
            with suppress(pml.PmlError):  # JSON has characters that XML has not
                answer.pml = pml.schema_to_xml(document)
            if schema.definition.form == "json":
                answer.json_ = pml.schema_to_json(document)
        return JsonResponse(answer, status)

    return await asyncio.to_thread(write) if schema.is_large else write()


def _object(schema: StoredSchema, reply: ModulesReply) -> SchemaObject:
    record, definition, compiled = schema.record, schema.definition, schema.compiled
    tiers: list[int] = unpack_int32(reply.tiers).tolist()
    blocks: list[int] = unpack_int32(reply.blocks).tolist()
    count = len(compiled.texts)
    # An engine that has just started may know nothing of the texts.
    tiers, blocks = tiers if len(tiers) == count else [-1] * count, blocks if len(blocks) == count else [0] * count
    return SchemaObject(
        id=schema.name,
        name=schema.name,
        version=definition.version,
        model=definition.model,
        status=_status(tiers),
        extent=compiled.extent,
        encode_scope=definition.scope,
        relocate=definition.relocate,
        pin=definition.pin,
        ttl=int(definition.ttl),
        created_at=int(record.created),
        last_used_at=int(record.used),
        expires_at=expiry_of(record),
        modules=[_module(module, tiers, blocks, reply.block_bytes) for module in compiled.modules],
        usage=SchemaUsage(
            sum(len(text.tokens) for text in compiled.texts),
            reply.computed_tokens,
            sum(blocks) * reply.block_bytes,
        ),
        warnings=[*schema.ready.warnings, *_warnings(reply)],
    )


def _status(tiers: Sequence[int]) -> SchemaStatus:
    there = sum(tier >= 0 for tier in tiers)
    if there == len(tiers):
        return "ready"
    return "partial" if there else "cold"


def _warnings(reply: ModulesReply) -> list[str]:
    if reply.status == "quota":
        return [f"not pinned: {reply.detail or 'that would be more than the engine allows'}"]
    if reply.status != "ok":
        return [f"not all modules could be computed: {reply.detail or reply.status}"]
    return []


def _module(
    module: pml.CompiledModule,
    tiers: Sequence[int],
    blocks: Sequence[int],
    block_bytes: int,
) -> ModuleObject:
    found = [tiers[index] for index in module.texts]
    slowest = max(found, default=-1) if -1 not in found else -1
    return ModuleObject(
        path=module.path,
        start=module.start,
        length=module.length,
        params=[
            ParamObject(name=slot.name, length=slot.length, required=slot.required, default=slot.default)
            for slot in module.params
        ],
        cached=module.cached,
        tokens=module.tokens,
        bytes=sum(blocks[index] for index in module.texts) * block_bytes,
        tier=TierKind(slowest).name.lower() if slowest >= 0 else None,
    )
