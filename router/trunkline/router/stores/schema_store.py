"""The store of schemas (Prompt Cache §3.2), with a cache of compiled ones.

    POST /v1/schemas ─► compiled ─► record: source, version ─► its home controller computes and pins its texts
    a request ─────────► current version? ─► compiled schema from the cache ─► layout of the prompt

A schema is a record (`record_homes.py`) whose id is its name. Every request reads the record, so that changes by
other routers are seen at once. If this router has compiled that version already, the record comes without its
source.

Names belong to a tenant and a `cache_salt`, like KV: the same name with another salt is another schema, and a
request without the salt cannot find it.

Controllers hold pins in memory. The first use of a pinned schema over a new connection sets the pin again, because
the controller may have been restarted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from trunkline.controller.messages import ModulesCall, ModuleText, PromptLayout
from trunkline.router import pml
from trunkline.router.errors import ApiError, bad_value, in_conflict, not_found, unavailable
from trunkline.router.messages import ModulesReply, Record, RecordReply
from trunkline.router.pml.tree import NAME_CHARACTERS_MAX
from trunkline.router.request_context import request_name
from trunkline.router.stores.model_text import ModelText
from trunkline.router.stores.record_homes import (
    CALL_SECONDS,
    VALUE_BYTES_MAX,
    RecordHomes,
    ask,
    call_persistently,
    record_call,
)
from trunkline.router.streams.link import Answer, ControllerLink
from trunkline.router.tenancy.auth import current_identity
from trunkline.router.text.tokenizer import Tokenizer

_KIND: Final = "schema"
Scope = Literal["ancestors", "self"]
UNKNOWN: Final = "E_SCHEMA_UNKNOWN"
CACHED_MAX: Final = 1024
CACHED_BYTES_MAX: Final = 256 << 20
"""Largest approximate size in bytes of all cached sources and compiled schemas together."""
_PART_BYTES: Final = 600
"""Approximate size in bytes of a compiled module, text or parameter: up to 25 times the size of its source."""
_TRIES: Final = 8
"""Largest number of attempts to change a schema that other requests change at the same time."""
_OFF_LOOP_CHARACTERS: Final = 16 << 10
"""Length in characters above which a source is compiled in a thread. The thread compiles one source at a time."""
_MANY_TEXTS: Final = 512
_HINT_SECONDS: Final = 1.0
_HINT_TEXTS_MAX: Final = 16
_USES_MAX: Final = 4096


class Definition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A schema as its record stores it, in MessagePack. New fields need a default: old records lack them."""

    model: str
    source: str
    """The source as the client sent it."""
    form: Literal["xml", "json"] = "xml"
    """The format of the source."""
    scope: Scope = "ancestors"
    relocate: bool = True
    version: int = 1
    """Counts the sources stored under this name."""
    pin: bool = False
    ttl: float = 0.0
    """Seconds without use after which the schema is deleted; 0: never."""
    request: bytes = b""
    """Name of the request that made this version (`request_context.py`); sent again, it makes no new version."""

    def parse(self) -> pml.SchemaDocument:
        """Parse the source.

        Raises:
            PmlError: The source is wrong.
        """
        if self.form == "xml":
            return pml.parse_schema(self.source)
        return pml.schema_from_json(msgspec.json.decode(self.source))

    def compiles_like(self, other: Definition) -> bool:
        """Return whether both definitions compile to the same schema."""
        return (self.source, self.form, self.scope) == (other.source, other.form, other.scope)


class Compiled(NamedTuple):
    """A compiled source, with what is sent to controllers and told to clients."""

    schema: pml.CompiledSchema
    texts: list[ModuleText]
    """All texts of the schema, as messages to a controller."""
    warnings: list[str]
    """Warnings for the schema's author."""


class StoredSchema:
    """The current version of a schema, compiled and ready for prompts."""

    def __init__(self, salt: bytes, record: Record, definition: Definition, ready: Compiled) -> None:
        self.salt = salt
        self.kind = kind_of(salt, current_identity().owner)
        """Kind of the schema's record."""
        self.record = record
        self.definition = definition
        self.ready = ready
        self.weight = _weight(definition, ready)
        """Bytes counted for this schema in the cache."""
        self.uses: Counter[str] = Counter()
        """Recent imports of each module, by path, as seen by this router."""
        self.pinned_on = 0
        """Number of the home controller's connection over which the pin was set."""
        self._hinted_at = float("-inf")

    @property
    def name(self) -> str:
        """Name of the schema, which is also its id."""
        return self.record.id

    @property
    def key(self) -> str:
        """Key that determines the schema's home controller and names the holder of its pins."""
        return key_of(self.kind, self.name)

    @property
    def compiled(self) -> pml.CompiledSchema:
        """The compiled schema, for `pml.compile_prompt`."""
        return self.ready.schema

    @property
    def is_large(self) -> bool:
        """Whether work on the whole schema is too long for the event loop."""
        return len(self.ready.texts) > _MANY_TEXTS or len(self.definition.source) > _OFF_LOOP_CHARACTERS

    def used(self, paths: Iterable[str]) -> None:
        """Count the modules that a prompt imports."""
        self.uses.update(paths)
        if self.uses.total() > _USES_MAX:  # recent imports count more
            self.uses = Counter({path: count // 2 for path, count in self.uses.items() if count > 1})

    def hint(self, prompt: pml.CompiledPrompt, now: float) -> PromptLayout | None:
        """Return texts that the next requests will probably need; None if a hint was given within the last second.

        Args:
            prompt: The prompt of the current request.
            now: Loop time in seconds.
        """
        if now - self._hinted_at < _HINT_SECONDS:
            return None
        self._hinted_at = now
        wanted = pml.likely_texts(self.compiled, prompt, self.uses, _HINT_TEXTS_MAX)
        if not wanted:
            return None
        return replace(pml.hint_layout(self.compiled, wanted), relocate=self.definition.relocate)


class SchemaStore:
    """The schemas of all controllers. Calls that no controller answers raise `ApiError` 503."""

    def __init__(self, homes: RecordHomes, tokenizer: Tokenizer, on_error: Callable[[str], None]) -> None:
        """`on_error(code)` is called for each wrong source or prompt."""
        self._homes = homes
        self._tokenizer = tokenizer
        self._on_error = on_error
        self._cached: OrderedDict[str, StoredSchema] = OrderedDict()
        self._bytes = 0
        self._compiling = asyncio.Lock()
        self._encoding: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._cached)

    def home_of(self, key: str) -> ControllerLink:
        """Return the controller that stores a schema and computes its modules."""
        return self._homes.home_of(key)

    def is_encoding(self, schema: StoredSchema) -> bool:
        """Return whether this router is waiting for the schema's modules to be computed."""
        return self._encoding[schema.key] > 0

    # -- records

    async def put(self, name: str, salt: bytes, definition: Definition, ready: Compiled) -> StoredSchema:
        """Store a schema, replacing the one of this name.

        Raises:
            ApiError: 409, other requests keep changing it; 503, it was not stored.
        """
        kind = kind_of(salt, current_identity().owner)
        definition.request = request_name()

        def replaced(present: Definition) -> Definition:
            again = bool(definition.request) and definition.request == present.request
            definition.version = present.version + (not again)
            return definition

        for _ in range(_TRIES):
            definition.version = 1
            reply = await self._ask(kind, name, "create", value=_pack(definition), ttl=definition.ttl)
            if reply.status != "exists":
                record = _checked(reply, name).records[0]
                return self._keep(StoredSchema(salt, record, definition, ready))
            try:
                record, before = await self._change(kind, name, replaced)
            except ApiError as error:
                if error.code != UNKNOWN:
                    raise
                continue  # another request has just deleted it
            if before.pin and not definition.pin:
                self.unpin(key_of(kind, name))
            return self._keep(StoredSchema(salt, record, definition, ready))
        raise _contended(name)

    async def get(self, name: str, salt: bytes, context: int) -> StoredSchema:
        """Return the current version of a schema.

        Args:
            context: The model's context in tokens.

        Raises:
            ApiError: 404, there is no such schema; 503, its controller is away.
            PmlError: It does not fit into the context, which may have been larger when it was stored.
        """
        kind = kind_of(salt, current_identity().owner)
        key = key_of(kind, name)
        known = self._cached.get(key)
        record = await self._record(kind, name, 0 if known is None else known.record.version)
        if known is not None and not record.value:
            if record.created == known.record.created:
                self._cached.move_to_end(key)
                known.record = record
                return known
            record = await self._record(kind, name, 0)  # deleted and created again: the version says nothing
        definition = _unpack(record)
        ready = known.ready if known is not None and definition.compiles_like(known.definition) else None
        if ready is None:
            ready = await self.compile(definition, context)
        record = msgspec.structs.replace(record, value=b"")
        schema = StoredSchema(salt, record, definition, ready)
        if known is not None:
            schema.uses = known.uses
        return self._keep(schema)

    async def change(
        self, name: str, salt: bytes, context: int, change: Callable[[Definition], None]
    ) -> StoredSchema:
        """Change the definition of a schema but for its source.

        Raises:
            ApiError: 404, there is no such schema; 409, other requests keep changing it; 503, it was not stored.
        """
        kind = kind_of(salt, current_identity().owner)

        def changed(definition: Definition) -> Definition:
            change(definition)
            return definition

        await self._change(kind, name, changed)
        return await self.get(name, salt, context)

    async def delete(self, name: str, salt: bytes) -> None:
        """Delete a schema. Running requests are not disturbed.

        Raises:
            ApiError: 404, there is no such schema.
        """
        kind = kind_of(salt, current_identity().owner)
        _checked(await self._ask(kind, name, "delete"), name)
        self._drop(key_of(kind, name))
        self.unpin(key_of(kind, name))

    async def page(self, salt: bytes, after: str, limit: int) -> list[Record]:
        """Return up to `limit` records whose names follow `after`, in the order of names, without their values."""
        return await self._homes.page(kind_of(salt, current_identity().owner), after, limit)

    async def _change(
        self, kind: str, name: str, change: Callable[[Definition], Definition]
    ) -> tuple[Record, Definition]:
        """Store a changed definition; return its record and the definition before."""
        for _ in range(_TRIES):
            record = await self._record(kind, name, 0)
            before, after = _unpack(record), change(_unpack(record))
            reply = await self._ask(kind, name, "put", value=_pack(after), version=record.version, ttl=after.ttl)
            if reply.status != "conflict":
                return _checked(reply, name).records[0], before
        raise _contended(name)

    async def _record(self, kind: str, name: str, version: int) -> Record:
        if len(name) > NAME_CHARACTERS_MAX:
            raise schema_unknown(name)
        return _checked(await self._ask(kind, name, "get", version=version), name).records[0]

    async def _ask(self, kind: str, name: str, op: str, **fields: Any) -> RecordReply:
        return await ask(self.home_of(key_of(kind, name)), record_call(op, kind, name, **fields))

    # -- compiled schemas

    async def compile(self, definition: Definition, context: int) -> Compiled:
        """Compile a source, in a thread if it is long.

        Raises:
            PmlError: The source is wrong.
        """
        text = ModelText(self._tokenizer)

        def run() -> Compiled:
            document = definition.parse()
            schema = pml.compile_schema(
                document, text, scope=definition.scope, context=context, revision=self._tokenizer.fingerprint
            )
            return Compiled(schema, pml.texts_message(schema), pml.lint(document, text))

        if len(definition.source) <= _OFF_LOOP_CHARACTERS:
            return run()
        async with self._compiling:
            return await asyncio.to_thread(run)

    def _keep(self, schema: StoredSchema) -> StoredSchema:
        self._drop(schema.key)
        self._cached[schema.key] = schema
        self._bytes += schema.weight
        while len(self._cached) > CACHED_MAX or (self._bytes > CACHED_BYTES_MAX and len(self._cached) > 1):
            self._drop(next(iter(self._cached)))
        return schema

    def _drop(self, key: str) -> None:
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
        home, make = self.home_of(schema.key), self._encode_call(schema)
        schema.pinned_on = home.connections
        self._encoding[schema.key] += 1
        try:
            answer, _ = await call_persistently(
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
        home, salt, relocate = self.home_of(schema.key), schema.salt, schema.definition.relocate
        texts = schema.ready.texts
        answer, _ = await call_persistently(
            home, lambda ticket: ModulesCall(ticket, "look", texts, salt, relocate=relocate), CALL_SECONDS
        )
        return _modules_reply(answer)

    def keep_pinned(self, schema: StoredSchema) -> None:
        """Set a schema's pin again if the controller may have been restarted. Call it with every use."""
        home = self.home_of(schema.key)
        if schema.definition.pin and home.ready and schema.pinned_on != home.connections:
            schema.pinned_on = home.connections
            home.tell(self._encode_call(schema))

    def unpin(self, key: str) -> None:
        """Remove a schema's pin, so that its modules may be evicted."""
        self.home_of(key).tell(lambda ticket: ModulesCall(ticket, "unpin", holder=key))

    @staticmethod
    def _encode_call(schema: StoredSchema) -> Callable[[int], ModulesCall]:
        definition = schema.definition
        holder, salt = schema.key if definition.pin else "", schema.salt
        return lambda ticket: ModulesCall(
            ticket, "encode", schema.ready.texts, salt, holder, definition.ttl, definition.relocate
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


def _weight(definition: Definition, ready: Compiled) -> int:
    """Return the approximate size of a schema in memory, in bytes."""
    parts = len(ready.texts)
    size = len(definition.source) + sum(len(text.tokens) for text in ready.texts)
    for module in ready.schema.modules:
        parts += 1 + len(module.params)
        size += len(module.path)
    return size + parts * _PART_BYTES


def kind_of(salt: bytes, owner: str) -> str:
    """Return the kind of an owner's schema records with a salt (`auth.py`). It holds a hash, not the salt
    itself."""
    if not (salt or owner):
        return _KIND
    # Owners are printable, so the zero byte separates owner and salt unambiguously.
    said = b"\0" + owner.encode() + b"\0" + salt if owner else salt
    return f"{_KIND}:{hashlib.blake2b(said, digest_size=16).hexdigest()}"


def key_of(kind: str, name: str) -> str:
    """Return the key of a schema (see `StoredSchema.key`)."""
    return f"{kind}/{name}"


def pml_error(error: pml.PmlError, param: str) -> ApiError:
    """Return a PML error as an answer to the client."""
    details = {"line": error.line, "column": error.column, "path": error.path, **error.extra}
    status = 404 if error.code == UNKNOWN else 400
    return ApiError(status, error.message, param=param, code=error.code, details=details)


def schema_unknown(name: str) -> ApiError:
    """Return the error 404 for a schema that does not exist."""
    return not_found(
        "schema",
        f"schema {name[:80]!r} does not exist (any more) with this `cache_salt`; see GET /v1/schemas",
        code=UNKNOWN,
    )


def _contended(name: str) -> ApiError:
    """Return the error 409 for a schema that other requests keep changing."""
    return in_conflict(
        "schema", f"other requests keep changing schema {name!r}; try again", code="schema_conflict"
    )


def _pack(definition: Definition) -> bytes:
    value = msgspec.msgpack.encode(definition)
    if len(value) > VALUE_BYTES_MAX:
        raise bad_value("json", f"the schema has {len(value)} bytes; {VALUE_BYTES_MAX} are kept at most")
    return value


def _unpack(record: Record) -> Definition:
    try:
        return msgspec.msgpack.decode(record.value, type=Definition)
    except msgspec.DecodeError as error:
        raise unavailable(f"schema {record.id!r} cannot be read: {error}", code="schema_unreadable") from None


def _checked(reply: RecordReply, name: str) -> RecordReply:
    """Return a successful answer.

    Raises:
        ApiError: The error that the answer reports.
    """
    if reply.status == "ok":
        return reply
    if reply.status == "missing":
        raise schema_unknown(name)
    raise unavailable(f"schema {name[:80]!r} could not be stored: {reply.detail}", code="schema_not_stored")


def _modules_reply(answer: Answer) -> ModulesReply:
    if not isinstance(answer, ModulesReply):
        raise unavailable("the engine gave another answer than the one to the question")
    return answer
