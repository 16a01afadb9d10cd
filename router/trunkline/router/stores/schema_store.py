"""The store of schemas (Prompt Cache §3.2), with a cache of compiled ones.

    POST /v1/schemas ─► compiled ─► record: definition, source ─► its home controller computes and pins its texts
    a request ─────────► current version? ─► compiled schema from the cache ─► layout of the prompt

A schema is a record (`kvstore/records/`) whose id is its name. The header is its definition, the only segment its
source. Every request reads the record, so that changes by other routers are seen at once. If this router has the
source already, only the header is read.

Names belong to a tenant and a `cache_salt`, like KV: the same name with another salt is another schema, and a
request without the salt cannot find it.

Controllers hold pins in memory. The first use of a pinned schema over a new connection, or at a new home
(`homes.py`), sets the pin again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from trunkline.controller.messages import ModulesCall, ModuleText
from trunkline.kvstore.records import (
    BaseMissingError,
    ConflictError,
    ExistsError,
    MissingError,
    Record,
    RecordKey,
    RecordStore,
)
from trunkline.router import pml
from trunkline.router.errors import ApiError, in_conflict, not_found, unavailable
from trunkline.router.jobs.job import ModelLimits
from trunkline.router.messages import ModulesReply
from trunkline.router.request_context import request_name
from trunkline.router.stores.homes import CALL_SECONDS, Homes, call_persistently
from trunkline.router.stores.model_text import ModelText
from trunkline.router.stores.owned_records import QuotaOf, no_quota
from trunkline.router.stores.schema_records import (
    UNKNOWN,
    Definition,
    change_of,
    definition_of,
    delete_old,
    is_schema,
    key_of,
    pin_name_of,
    store_errors,
    take_over,
    unpack,
)
from trunkline.router.stores.stored_schema import OFF_LOOP_CHARACTERS, Compiled, StoredSchema
from trunkline.router.streams.link import Answer, ControllerLink
from trunkline.router.text.tokenizer import Tokenizer

CACHED_MAX: Final = 1024
CACHED_BYTES_MAX: Final = 256 << 20
"""Largest approximate size in bytes of all cached sources and compiled schemas together."""
_TRIES: Final = 8
"""Largest number of attempts to change a schema that other requests change at the same time."""


class ModelService(Protocol):
    """What schemas need of a model."""

    @property
    def model_name(self) -> str:
        """The model's main name."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def limits(self) -> ModelLimits:
        """The limits of requests to the model at this moment."""


TextsFor = Callable[[ControllerLink, list[ModuleText], bytes, bool], list[ModuleText]]


class SchemaStore:
    """The schemas of all routers. If the record store is away, its methods raise `ApiError` 503."""

    def __init__(
        self,
        records: RecordStore,
        homes: Homes,
        of_model: Callable[[str], ModelService],
        on_error: Callable[[str], None],
        *,
        quota_of: QuotaOf = no_quota,
        pins_of: Callable[[str], float] = lambda owner: 1.0,
        texts_for: TextsFor = lambda home, texts, salt, relocate: texts,
    ) -> None:
        """
        Args:
            of_model: returns what is needed of the model with a name; if there is none, of the first one.
            on_error: called with the error's code for each wrong source or prompt.
            quota_of: as in `owned_records.py`.
            pins_of: returns the part of a group's room for pins that an owner's schemas may take.
            texts_for: returns texts with the groups from which a controller can pull those that it lacks
                (`routing/text_holders.py`).
        """
        self._records = records
        self._homes = homes
        self._of_model = of_model
        self._on_error = on_error
        self._quota_of = quota_of
        self._pins_of = pins_of
        self._texts_for = texts_for
        self._cached: OrderedDict[RecordKey, StoredSchema] = OrderedDict()
        self._bytes = 0
        self._compiling = asyncio.Lock()
        self._encoding: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._cached)

    def home_of(self, key: str, model: str) -> ControllerLink:
        """Return the controller that computes a schema's modules.

        Args:
            key: `StoredSchema.key`.
            model: Main name of its model.

        Raises:
            ApiError: 503, there is no controller.
        """
        return self._homes.home_of(key, model)

    def model_of(self, schema: StoredSchema) -> str:
        """Return the main name of the model that a schema is compiled for."""
        return self._of_model(schema.definition.model).model_name

    def _home(self, schema: StoredSchema) -> ControllerLink:
        return self.home_of(schema.key, self.model_of(schema))

    def is_encoding(self, schema: StoredSchema) -> bool:
        """Return whether this router is waiting for the schema's modules to be computed."""
        return self._encoding[schema.key] > 0

    # -- records

    async def put(self, name: str, salt: bytes, definition: Definition, ready: Compiled) -> StoredSchema:
        """Store a schema, replacing the one of this name.

        Raises:
            ApiError: 409, other requests keep changing it; 429, the tenant's quota is used up; 503, it was not
                stored.
        """
        key = key_of(name, salt)
        definition.request = request_name()

        def replaced(present: Definition) -> Definition:
            again = bool(definition.request) and definition.request == present.request
            definition.version = present.version + (not again)
            return definition

        with store_errors(name):
            for _ in range(_TRIES):
                definition.version = 1
                with suppress(ExistsError):
                    change = change_of(definition)
                    record = await self._records.create(key, change, owner_bytes_max=self._quota_of(key.owner))
                    await delete_old(self._records, key, salt)
                    return self._keep(StoredSchema(salt, record, definition, ready))
                with suppress(MissingError):  # another request has just deleted it
                    record, before = await self._change(key, replaced)
                    if before.pin and not definition.pin:
                        self.unpin(key)
                    return self._keep(StoredSchema(salt, record, definition, ready))
        raise _contended(name)

    async def get(self, name: str, salt: bytes) -> StoredSchema:
        """Return the current version of a schema.

        Raises:
            ApiError: 404, there is no such schema; 503, the record store is away.
            PmlError: It does not fit into the context, which may have been larger when it was stored.
        """
        key = key_of(name, salt)
        known = self._cached.get(key)
        with store_errors(name):
            try:
                reading = await self._records.get(key, () if known is None else (known.record.head,))
            except MissingError:
                reading = await take_over(self._records, key, salt)
        record = reading.record
        if known is not None and (record.version, record.created) == (known.record.version, known.record.created):
            self._cached.move_to_end(key)
            known.record = record
            return known
        definition = definition_of(reading, None if known is None else known.definition)
        ready = known.ready if known is not None and definition.compiles_like(known.definition) else None
        if ready is None:
            ready = await self.compile(definition)
        schema = StoredSchema(salt, record, definition, ready)
        if known is not None:
            schema.uses, schema.pinned_at = known.uses, known.pinned_at
        return self._keep(schema)

    async def change(self, name: str, salt: bytes, change: Callable[[Definition], None]) -> StoredSchema:
        """Change the definition of a schema but for its source.

        Raises:
            ApiError: 404, there is no such schema; 409, other requests keep changing it; 503, it was not stored.
        """

        def changed(definition: Definition) -> Definition:
            change(definition)
            return definition

        key = key_of(name, salt)
        with store_errors(name):
            try:
                await self._change(key, changed)
            except MissingError:
                await take_over(self._records, key, salt)
                await self._change(key, changed)
        return await self.get(name, salt)

    async def delete(self, name: str, salt: bytes) -> None:
        """Delete a schema, and the KV of its modules that nothing else uses. Running requests are not disturbed.

        KV that schemas without pins share with it is computed again when they are used.

        Raises:
            ApiError: 404, there is no such schema.
        """
        key = key_of(name, salt)
        schema = None
        with suppress(ApiError, pml.PmlError):  # what cannot be compiled any more can be deleted all the same
            schema = await self.get(name, salt)
        with store_errors(name):
            was_old = await delete_old(self._records, key, salt)
            try:
                await self._records.delete(key)
            except MissingError:
                if not was_old:
                    raise
        self.gone(key)
        if schema is not None:
            self._forget(schema)

    async def purge(self, key: RecordKey, salts: Iterable[bytes]) -> None:
        """Delete the record of a schema of the request's owner, and its KV if its salt is known.

        Args:
            salts: salts that it may have. Its record holds only a hash of its salt.

        Raises:
            MissingError: it does not exist any more.
            ApiError: 503, the store does not answer.
        """
        cached = self._cached.get(key)
        salts = [*salts, *([] if cached is None else [cached.salt])]
        salt = next((salt for salt in salts if key_of(key.id, salt) == key), None)
        if salt is None:
            await self._records.delete(key)
            self.gone(key)
        else:
            await self.delete(key.id, salt)

    def _forget(self, schema: StoredSchema) -> None:
        """Have all controllers drop the KV of a schema's modules, as far as they are connected."""
        texts, salt, relocate = schema.ready.texts, schema.salt, schema.definition.relocate
        for link in self._homes.links:
            link.tell(lambda ticket: ModulesCall(ticket, "forget", texts, salt, relocate=relocate))

    def gone(self, key: RecordKey) -> None:
        """Forget a schema whose record was deleted, and remove its pins. Records of other kinds do not matter."""
        if is_schema(key):
            self._drop(key)
            self.unpin(key)

    async def page(self, salt: bytes, after: str, limit: int) -> list[Record]:
        """Return up to `limit` records without headers whose names follow `after`, in the order of names."""
        kind, owner, _ = key_of("", salt)
        with store_errors(after):
            return await self._records.page(kind, owner, after, limit)

    async def _change(
        self, key: RecordKey, change: Callable[[Definition], Definition]
    ) -> tuple[Record, Definition]:
        """Store a changed definition; return its record and the definition before.

        Args:
            change: makes the new definition of the present one, which lacks its source. If it leaves the source
                away, the source stays.

        Raises:
            ApiError: 409, other requests keep changing the schema.
            RecordError: see `RecordStore`.
        """
        for _ in range(_TRIES):
            record = (await self._records.get(key)).record
            before, after = unpack(record), change(unpack(record))
            with suppress(ConflictError, BaseMissingError):
                return await self._records.put(key, record.version, change_of(after, record.head)), before
        raise _contended(key.id)

    # -- compiled schemas

    async def compile(self, definition: Definition) -> Compiled:
        """Compile a source, in a thread if it is long.

        Raises:
            PmlError: The source is wrong.
        """
        service = self._of_model(definition.model)
        tokenizer, context = service.tokenizer, service.limits.max_context
        text = ModelText(tokenizer)

        def run() -> Compiled:
            document = definition.parse()
            schema = pml.compile_schema(
                document, text, scope=definition.scope, context=context, revision=tokenizer.fingerprint
            )
            return Compiled(schema, pml.texts_message(schema), pml.lint(document, text))

        if len(definition.source) <= OFF_LOOP_CHARACTERS:
            return run()
        async with self._compiling:
            return await asyncio.to_thread(run)

    def _keep(self, schema: StoredSchema) -> StoredSchema:
        self._drop(schema.record.key)
        self._cached[schema.record.key] = schema
        self._bytes += schema.weight
        while len(self._cached) > CACHED_MAX or (self._bytes > CACHED_BYTES_MAX and len(self._cached) > 1):
            self._drop(next(iter(self._cached)))
        return schema

    def _drop(self, key: RecordKey) -> None:
        dropped = self._cached.pop(key, None)
        if dropped is not None:
            self._bytes -= dropped.weight

    # -- what the engine has of them

    async def encode(self, schema: StoredSchema, timeout_seconds: float | None) -> ModulesReply:
        """Have the controller compute the modules it lacks, and pin all if the schema asks for it. Cancelling the
        caller stops the computation.

        Raises:
            ApiError: 503, the controller is away.
        """
        home = self._home(schema)
        make = self._encode_call(home, schema)
        schema.pinned_at, schema.pinned_on = home, home.connections
        self._encoding[schema.key] += 1
        try:
            answer = await call_persistently(
                home, make, timeout_seconds, give_up=lambda ticket: ModulesCall(ticket, "cancel")
            )
            return _modules_reply(answer)
        except BaseException:  # cancellation included: the client left
            schema.pinned_on = 0
            raise
        finally:
            self._encoding[schema.key] -= 1
            if not self._encoding[schema.key]:
                del self._encoding[schema.key]

    async def look(self, schema: StoredSchema) -> ModulesReply:
        """Ask the controller in which tiers a schema's modules are.

        Raises:
            ApiError: 503, the controller is away.
        """
        home, salt, relocate = self._home(schema), schema.salt, schema.definition.relocate
        texts = schema.ready.texts
        answer = await call_persistently(
            home, lambda ticket: ModulesCall(ticket, "look", texts, salt, relocate=relocate), CALL_SECONDS
        )
        return _modules_reply(answer)

    def keep_pinned(self, schema: StoredSchema) -> None:
        """Set a schema's pin again if its home has changed or may have been restarted. Call it with every use."""
        home, before = self._home(schema), schema.pinned_at
        if not schema.definition.pin or not home.ready or (before, schema.pinned_on) == (home, home.connections):
            return
        schema.pinned_at, schema.pinned_on = home, home.connections
        home.tell(self._encode_call(home, schema))
        if before is not None and before is not home:
            before.tell(_unpin_call(schema.record.key))

    def unpin(self, key: RecordKey) -> None:
        """Remove a schema's pins from all controllers, so that its modules may be evicted. A controller that was
        the schema's home earlier may have some, too."""
        for link in self._homes.links:
            link.tell(_unpin_call(key))

    def _encode_call(self, home: ControllerLink, schema: StoredSchema) -> Callable[[int], ModulesCall]:
        definition, owner = schema.definition, schema.record.key.owner
        texts = self._texts_for(home, schema.ready.texts, schema.salt, definition.relocate)
        pin_name, salt, pins = schema.key if definition.pin else "", schema.salt, self._pins_of(owner)
        return lambda ticket: ModulesCall(
            *(ticket, "encode", texts, salt, pin_name, definition.ttl, definition.relocate),
            tenant=owner,
            pins=pins,
        )

    # -- errors

    @contextmanager
    def errors_of(self, param: str) -> Iterator[None]:
        """Turn PML errors raised within the block into answers that name `param`."""
        try:
            yield
        except pml.PmlError as error:
            self._on_error(error.code)
            raise pml_error(error, param) from None
        except ApiError as error:
            if error.code != UNKNOWN:
                raise
            self._on_error(UNKNOWN)
            raise not_found(param, error.message, code=UNKNOWN) from None


def pml_error(error: pml.PmlError, param: str) -> ApiError:
    """Return a PML error as an answer to the client."""
    details = {"line": error.line, "column": error.column, "path": error.path, **error.extra}
    status = 404 if error.code == UNKNOWN else 400
    return ApiError(status, error.message, param=param, code=error.code, details=details)


def _unpin_call(key: RecordKey) -> Callable[[int], ModulesCall]:
    return lambda ticket: ModulesCall(ticket, "unpin", pin_name=pin_name_of(key))


def _contended(name: str) -> ApiError:
    """Return the error 409 for a schema that other requests keep changing."""
    return in_conflict(
        "schema", f"other requests keep changing schema {name!r}; try again", code="schema_conflict"
    )


def _modules_reply(answer: Answer) -> ModulesReply:
    if not isinstance(answer, ModulesReply):
        raise unavailable("the engine gave another answer than the one to the question")
    return answer
