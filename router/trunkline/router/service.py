"""The state of a router behind its endpoints; `RouterService.generate` sends a job to a controller.

app.py ─► api/… ─► RouterService.generate ─► Dispatcher ─► RoutingCore, ControllerLink ─► Generation
"""

from __future__ import annotations

import asyncio
import copy
import importlib.metadata
import os
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import msgspec

from trunkline.controller.messages import Forget, Prefetch
from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.records import open_records
from trunkline.router.config import RouterConfig
from trunkline.router.errors import draining, overloaded, unavailable
from trunkline.router.http.body import LargeRequests
from trunkline.router.jobs.job import Job, ModelLimits, Modules
from trunkline.router.messages import Prefetched
from trunkline.router.routing.core import RouteRequest, RoutingCore
from trunkline.router.routing.request import Origin
from trunkline.router.stores.background_store import BackgroundStore
from trunkline.router.stores.batch_store import BatchStore
from trunkline.router.stores.file_store import FileStore
from trunkline.router.stores.homes import CALL_SECONDS, Homes, call_persistently
from trunkline.router.stores.metered_records import MeteredRecords
from trunkline.router.stores.record_tender import RecordTender
from trunkline.router.stores.schema_store import SchemaStore
from trunkline.router.stores.session_store import Histories, SessionStore
from trunkline.router.stores.task_store import TaskStore
from trunkline.router.stores.task_stores import TaskStores
from trunkline.router.streams.dispatch import Dispatcher
from trunkline.router.streams.generation import Choices, Generation
from trunkline.router.streams.group_connections import GroupConnections
from trunkline.router.streams.health import Health, describe
from trunkline.router.streams.link import ControllerLink
from trunkline.router.streams.links import Links
from trunkline.router.streams.live import LiveGenerations, LiveRequest
from trunkline.router.streams.served_models import ServedModels
from trunkline.router.telemetry.metrics import LiveGauges, Metrics
from trunkline.router.telemetry.request_record import RequestRecord, arrival, current_record
from trunkline.router.tenancy.tenants import Meter, Tenants, current_meter
from trunkline.router.text.tokenizer import Tokenizer

RECORDS_PATIENCE_S: Final = 10.0
"""Time in seconds for which an operation of the record store is tried before the store counts as away."""
_CREATED: Final = int(time.time())


class RouterService:
    """Everything behind the HTTP endpoints. Make it before the event loop runs; call `open` and `close` in the
    loop.

    With several models, `of_model` returns for each a service that differs from this one in the model, and shares
    all else with it. A request uses the one of the model that it asks for.
    """

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.models = ServedModels(config, tokenizer)
        """All models of this router."""
        self.model = self.models.first
        """The model of the requests that use this service."""
        self._is_chosen = False
        """Whether requests have asked for this very model. Until a request's body is read, any model will do."""
        self.metrics = Metrics(
            lambda: self.links,
            LiveGauges(
                lambda: len(self.schemas),
                lambda: len(self.live),
                lambda: self.dispatcher.waiting_count,
                lambda: self.models.memory,
            ),
            version=self.version,
            models=[model.name for model in self.models],
        )
        store = open_records(config.records, bytes_max=config.records_bytes_max, patience_s=RECORDS_PATIENCE_S)
        self.metrics.records.bytes_max = config.records_bytes_max
        self.records = MeteredRecords(store, self.metrics.records.measured)
        """Sessions, schemas and kept answers, which all routers share. Connects when it is used."""
        self.tenants = Tenants(config, records=self.records)
        self.histories = Histories(self.records, self.tenants.quota_of)
        """Sessions, stored responses and conversations."""
        self.schemas = SchemaStore(
            self.records,
            Homes(self.links),
            self.of_model,
            lambda code: self.metrics.modules.errors.labels(code).inc(),
            quota_of=self.tenants.quota_of,
            pins_of=self.tenants.pins_of,
            texts_for=lambda *of: self.dispatcher.with_holders(*of),
        )
        self._task_stores = TaskStores(self.records, self.tenants.quota_of)
        self.large_requests = LargeRequests(config.max_body_bytes)
        self.dispatcher = Dispatcher(
            self.links,
            RoutingCore((), config.policy, replica_seed=os.getpid()),
            resume_seconds=config.resume_seconds,
            max_context=lambda model: self.of_model(model).limits.max_context,
            learns=not any(config.events) and not config.members,
            on_event=lambda kind: self.metrics.routing.events.labels(kind).inc(),
            on_route=lambda decision: self.metrics.routing.chose(decision),
            on_planned=lambda outcome: self.metrics.routing.planned.labels(outcome).inc(),
        )
        self.groups = GroupConnections(config, self.models, self.dispatcher, self.records, self.metrics.routing)
        self.live = LiveGenerations()
        self._tender = RecordTender(
            self.records, self.schemas.gone, self.metrics.records.noted, phase=config.number / config.routers
        )

    def of_model(self, name: str) -> RouterService:
        """Return the service of the model with a name; if there is none, that of the first model."""
        if len(self.models) == 1:
            return self
        other = copy.copy(self)
        other.model, other._is_chosen = self.models.find(name) or self.models.first, True
        return other

    @property
    def links(self) -> Links:
        """The connections to the groups that are members of the cluster."""
        return self.models.links

    @property
    def sessions(self) -> SessionStore:
        """The stored sessions."""
        return self.histories.sessions

    @property
    def files(self) -> FileStore:
        """The files of tenants."""
        return self._task_stores.files

    @property
    def batches(self) -> BatchStore:
        """The batches of tenants."""
        return self._task_stores.batches

    @property
    def background(self) -> BackgroundStore:
        """The responses that are made in the background."""
        return self._task_stores.background

    @property
    def tasks(self) -> TaskStore:
        """The batches and background responses that are not over."""
        return self._task_stores.tasks

    @property
    def created(self) -> int:
        """Unix time in seconds at which this process was started."""
        return _CREATED

    @cached_property
    def version(self) -> str:
        """This program's version."""
        return importlib.metadata.version("trunkline")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def model_name(self) -> str:
        """The model's main name."""
        return self.model.name

    @property
    def fingerprint(self) -> str:
        """A digest that changes with the model and the program's version."""
        return self.model.fingerprint

    def open(self) -> None:
        """Begin to connect to the controllers."""
        self._tender.open()
        self.tenants.open()
        self.groups.open()

    async def close(self) -> None:
        """Disconnect from the controllers and the store of records; generations that still run fail."""
        await self._tender.close()
        await self.groups.close()
        self.models.close()
        self.large_requests.close()
        await self.tenants.close()
        await self.records.close()

    @property
    def limits(self) -> ModelLimits:
        """The limits of what a request may ask for at this moment."""
        return self.model.limits(self.links_of(self.model_name))

    def links_of(self, model: str) -> list[ControllerLink]:
        """Return the connections to the groups that serve a model, as far as is known.

        Args:
            model: its main name; "": any.
        """
        return [link for link in self.links if link.standing.may_serve(model)]

    @property
    def _wanted(self) -> str:
        """The model whose groups can take the requests; "": all groups can."""
        return self.model_name if len(self.models) > 1 else ""

    def check_admission(self, count: int = 1) -> None:
        """Refuse a request before any work is done for it. `count`: number of generations that it needs.

        Raises:
            ApiError: 503, the router is draining, or no controller is ready; 429, too many requests run.
        """
        if self.live.draining:
            raise draining()
        if len(self.live) + count > self.config.max_inflight:
            raise overloaded(f"this router already works on {self.config.max_inflight} requests")
        wanted = self._wanted if self._is_chosen else ""
        is_ready = any(link.ready and link.standing.may_serve(wanted) for link in self.links)
        if not is_ready and not self.dispatcher.can_wait(wanted):
            raise unavailable(f"no engine is ready: {describe(self.links_of(wanted))}")

    def generate(self, job: Job) -> Generation:
        """Send a job to a controller.

        Raises:
            ApiError: as `check_admission`; 429, the tenant's tokens are used up; 503, the connection has just
                broken.
        """
        self.check_admission()
        meter, record = current_meter(), current_record()
        if record is not None:
            record.model = self.model_name
        meter.check_prompt()
        route = self._route_of(job)
        stream = self.dispatcher.submit(job, route)
        meter.charge_prompt(job.seen_tokens)
        if job.modules is not None:
            self._count_modules(job, job.modules, self.dispatcher.link_of(stream))
        generation = Generation(
            job,
            stream,
            Choices(job, self.tokenizer.vocabulary),
            self.metrics,
            arrived_at := arrival(),
            lambda it: self._forget(it, meter, record),
        )
        self.live.begin(generation, LiveRequest(route.origin, stream, arrived_at))
        self.metrics.generations.labels(job.method, "" if job.grammar is None else job.grammar.kind).inc()
        if self.config.request_timeout_seconds:
            generation.limit(self.config.request_timeout_seconds)
        return generation

    def _route_of(self, job: Job) -> RouteRequest:
        """Return the job as routing sees it."""
        return RouteRequest(
            tokens=job.packed_prompt(),
            salt=job.salt,
            session=scoped_session(job.session or job.opening, job.salt),
            model=self._wanted,
            home=self.schemas.home_of(key, self.model_name).index if (key := job.schema_key) else -1,
            drops=job.cut.drops,
            layout=None if job.modules is None else job.modules.layout,
            origin=_origin_of(job),
            begun=None if job.remembered is None else job.remembered.names,
            output_tokens=job.hints.output_tokens,
        )

    async def prefetch(self, route: RouteRequest) -> Prefetched:
        """Have the controller that a request would go to fetch the request's KV from slow tiers and from peers.
        Peers bring what they have on disk only to their host memory, so that the request can have it from there.

        Raises:
            ApiError: 503, no controller is ready, or it does not answer.
        """
        drops = pack_int32([end for span in route.drops for end in span])
        link, decision = self.dispatcher.choose(msgspec.structs.replace(route, model=self._wanted))
        wanted = Prefetch(0, route.tokens, route.salt, drops, route.layout)
        if decision.sleeping is not None and (peer := self.links.get(decision.sleeping.controller)) is not None:
            peer.tell(lambda ticket: msgspec.structs.replace(wanted, ticket=ticket))
        layout = decision.laid_out(route.layout)
        pulled = msgspec.structs.replace(wanted, holders=decision.holders, layout=layout)
        answer = await call_persistently(
            link, lambda ticket: msgspec.structs.replace(pulled, ticket=ticket), CALL_SECONDS
        )
        if not isinstance(answer, Prefetched):
            raise unavailable("the engine gave another answer than the one to the question")
        return answer

    def forget(self, route: RouteRequest) -> None:
        """Have all controllers drop the KV that nothing but this prompt uses, as far as they are connected."""
        if route.drops:
            # What was cut off is found as a part of the whole history, once nothing hangs from it any more.
            drops = pack_int32([end for span in route.drops for end in span])
            self._tell_all(Forget(route.tokens, route.salt, drops))
        self._tell_all(Forget(route.tokens, route.salt, layout=route.layout))

    def _tell_all(self, message: Forget) -> None:
        for link in self.links:
            if link.state is not None:
                link.tell(lambda _: message)

    def _count_modules(self, job: Job, modules: Modules, link: ControllerLink | None) -> None:
        self.metrics.modules.requests.inc()
        hint = modules.hint
        if hint is not None and link is not None:
            link.tell(lambda ticket: Prefetch(ticket, b"", job.salt, layout=hint))

    def _forget(self, generation: Generation, meter: Meter, record: RequestRecord | None) -> None:
        meter.charge(-generation.job.seen_tokens if generation.failed_early else generation.output_tokens)
        self.metrics.phases.ended(generation, meter.tenant)
        if record is not None:
            record.add(generation)
        self.live.end(generation)

    async def health(self) -> Health:
        """Return whether tokens can be generated and new requests are accepted."""
        return Health(False, "shutting down") if self.live.draining else await self.groups.health()

    async def flush_cache(self) -> int:
        """Drop the cached blocks of all controllers that no request uses; return their number.

        Raises:
            ApiError: 503, no controller is connected, or one does not answer.
        """
        connected: Sequence[ControllerLink] = [link for link in self.links if link.state is not None]
        if not connected:
            raise unavailable(f"no engine is connected: {describe(self.links)}")
        return sum(await asyncio.gather(*(link.flush_cache(timeout_seconds=10.0) for link in connected)))

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests and wait for the running ones. Return False if some of them had to be cut off."""
        self.live.draining = True
        self.tasks.changed.set()
        return await self.live.drain(timeout_seconds)


def scoped_session(session: str, salt: bytes) -> str:
    """Return `RouteRequest.session` of a session's name. Clients choose names, so two tenants may choose the same.

    Args:
        session: the session's id or label; "": the request belongs to none.
        salt: the request's salt.
    """
    return f"{current_meter().tenant}/{salt.hex()}/{session}" if session else ""


def _origin_of(job: Job) -> Origin:
    record = current_record()
    return Origin("" if record is None else record.id, current_meter().tenant, job.session)
