"""Does batches: checks the input, has its requests answered, and makes the result files.

    validating ─► in_progress ─► finalizing ─► completed, cancelled or expired
        └─► failed

Several requests run at once, behind all that clients wait for. Their answers are stored in portions. A router that
takes over a batch reads the input again and goes on with the requests whose answers are not stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from trunkline.kvstore.records import ExistsError, MissingError
from trunkline.router.api.batch_routes import ENDPOINTS
from trunkline.router.errors import ApiError, bad_value
from trunkline.router.http.answers import error_response
from trunkline.router.request_context import RequestRandom
from trunkline.router.service import RouterService
from trunkline.router.stores.batch_store import (
    KIND,
    BatchState,
    Portion,
    Problem,
    ResultFile,
    Status,
    change_of,
    joined,
    state_of,
)
from trunkline.router.stores.file_store import PART_BYTES, FileInfo
from trunkline.router.stores.task_store import Task
from trunkline.router.tasks.batch_input import BatchInput, BatchLine, Line
from trunkline.router.tasks.inner_call import InnerAnswer, InnerRequest, make_request
from trunkline.router.tasks.task_lease import TaskLease

COMMIT_SECONDS: Final = 1.0
"""Time in seconds for which answers are collected before they are stored."""
_PORTION_BYTES: Final = 1 << 20
"""Size in bytes of collected answers that are stored at once."""
_ROWS_FACTOR: Final = 2
"""Requests that run at once, in rows of all engines: the engines always find the next ones waiting."""
_BATCHES_AT_ONCE: Final = 4
_ENDINGS: Final = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "expired": ("batch_expired", "the batch's completion window ended before this request was answered"),
}
_log = structlog.get_logger("trunkline.router.tasks.batches")


class _Settled(NamedTuple):
    """A request that has its answer."""

    line: Line
    content: bytes
    """The answer's line of a result file."""
    is_error: bool
    is_unanswered: bool


class BatchHandler:
    """Does the batches that this router has taken."""

    kind = KIND
    count_max = _BATCHES_AT_ONCE

    def __init__(self, app: Any) -> None:
        """`app`: the application, whose endpoints answer the requests."""
        self._app = app
        self._service: RouterService = app.state.service
        self._count = 0
        """Batches that are worked on."""

    def suits(self, task: Task) -> bool:
        """See `Handler`. Requests that name no model get the same one from each router that does the batch."""
        models = self._service.models
        return models.find(task.model) is models.first

    async def run(self, lease: TaskLease) -> bool:
        """See `Handler`."""
        self._count += 1
        try:
            return await _BatchWork(self, lease).run()
        finally:
            self._count -= 1

    @property
    def service(self) -> RouterService:
        """The router's service."""
        return self._service

    def width(self, tenant: str) -> int:
        """Return how many requests of a tenant's batch may run at once: at most half of what the tenant may have,
        so that the batch leaves room to the tenant's other requests."""
        if self._service.dispatcher.waiting_count:
            return 0
        rows = sum(link.state.max_rows for link in self._service.links if link.ready and link.state)
        config = self._service.config
        most = min(_ROWS_FACTOR * rows // config.routers, config.max_inflight // 2)
        limit = self._service.tenants.limits_of(tenant).requests
        if limit is not None:
            most = min(most, limit // 2 // config.routers)
        return max(1, most // self._count)

    async def answer(self, request: InnerRequest) -> InnerAnswer:
        """Return the answer to a request."""
        return await make_request(self._app, ENDPOINTS[request.path], request)


class _BatchWork:
    """The work on one batch."""

    def __init__(self, handler: BatchHandler, lease: TaskLease) -> None:
        self._handler = handler
        self._service = handler.service
        self._lease = lease
        self._state: BatchState = state_of(lease.record)
        self._held = joined(lease.segments)
        """The answers that are stored with the batch, not in parts of the result files."""
        self._settled: list[_Settled] = []
        """Answers that are not stored yet."""
        self._changed = asyncio.Event()
        """Set when a request has its answer."""
        self._identity = self._service.tenants.identity_of(self._state.tenant, lease.task.owner)

    async def run(self) -> bool:
        """Do what is left of the batch; return whether it is over.

        Raises:
            RecordError: the lease was lost, or the store is away.
        """
        state = self._state
        if state.is_over:
            return True
        if not state.ending:
            source = BatchInput(state.endpoint, self._service.config.max_body_bytes)
            try:
                ending = await self._answer_input(source)
                if ending is None:
                    return False
                await self._settle_rest(source, ending)
            finally:
                source.close()
            await self._conclude(ending)
        await self._make_files()
        self._enter(state.ending or "failed")
        await self._lease.put(change_of(state))
        _log.info("batch_over", batch=self._lease.task.id, status=state.status, requests=state.total)
        return True

    # -- requests

    async def _answer_input(self, source: BatchInput) -> Status | None:
        """Have the requests of the input answered. Return how the batch ends; None: this router stops before."""
        state = self._state
        if self._ending() is not None and state.status == "validating":
            return self._ending()
        try:
            file = await self._service.files.get(self._lease.task.owner, state.input_file_id)
            await source.read(self._service.files.content(self._lease.task.owner, file))
        except MissingError:
            source.problems = [Problem("input_file_missing", "the input file was deleted")]
        if source.problems:
            state.problems = source.problems
            return "failed"
        if state.status == "validating":
            state.total, state.done = len(source.lines), bytes((len(source.lines) + 7) // 8)
            self._enter("in_progress")
            await self._lease.put(change_of(state))
        todo = deque(line for line in source.lines if not _bit(state.done, line.number))
        return await self._answer_lines(source, todo)

    async def _answer_lines(self, source: BatchInput, todo: deque[Line]) -> Status | None:
        running: set[asyncio.Task[None]] = set()
        stored_at = time.monotonic()
        try:
            while todo or running:
                if self._lease.stopped.is_set() or self._ending() is not None:
                    break
                while todo and len(running) < self._handler.width(self._state.tenant):
                    task = asyncio.create_task(self._answer_line(todo[0], source.get(todo.popleft())))
                    running.add(task)
                    task.add_done_callback(running.discard)
                await self._wait()
                size = sum(len(each.content) for each in self._settled)
                if time.monotonic() - stored_at >= COMMIT_SECONDS or size >= _PORTION_BYTES:
                    await self._store_settled()
                    stored_at = time.monotonic()
        finally:
            left = list(running)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        await self._store_settled()
        ending = self._ending()
        if ending is None and (todo or left):
            return None
        return ending or "completed"

    async def _wait(self) -> None:
        """Wait until a request has its answer, or it is time to look at the clock."""
        try:
            async with asyncio.timeout(COMMIT_SECONDS / 2):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def _ending(self) -> Status | None:
        """Return how the batch ends although requests may be left; None: it goes on."""
        if self._lease.cancelled.is_set():
            return "cancelled"
        return "expired" if time.time() >= self._state.expires else None

    async def _answer_line(self, line: Line, given: BatchLine) -> None:
        """Have a request answered."""
        random = self._random(line)
        request = InnerRequest(self._state.endpoint, bytes(given.body), self._identity, random, is_behind=True)
        try:
            _check_body(given.body)
            answer = await self._handler.answer(request)
        except ApiError as error:
            answer = InnerAnswer("", error.status, bytes(error_response(request.path, error).body))
        except Exception as error:  # noqa: BLE001 (one request must not stop the others)
            _log.error("batch_request_failed", batch=self._lease.task.id, error=type(error).__name__)
            failure = ApiError(500, "internal error", kind="internal_error", code="internal_error")
            answer = InnerAnswer("", failure.status, bytes(error_response(request.path, failure).body))
        said = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
        self._settle(line, given.custom_id, is_error=not 200 <= answer.status < 300, response=said, error=None)

    def _settle(self, line: Line, custom_id: str, *, is_error: bool, **fields: Any) -> None:
        name = f"batch_req_{self._random(line).draw('batch request', 12).hex()}"
        content = msgspec.json.encode({"id": name, "custom_id": custom_id, **fields}) + b"\n"
        self._settled.append(_Settled(line, content, is_error, is_unanswered=fields["response"] is None))
        self._changed.set()

    def _random(self, line: Line) -> RequestRandom:
        """Return a request's source of random bytes, which is the same for every router."""
        name = hashlib.blake2b(f"{self._lease.task.id} {line.number}".encode(), digest_size=16).digest()
        return RequestRandom(name, int(self._lease.record.created))

    # -- results

    async def _settle_rest(self, source: BatchInput, ending: Status) -> None:
        """Write an error for each request that has no answer because the batch has ended before."""
        if ending not in _ENDINGS:
            return
        code, message = _ENDINGS[ending]
        for line in source.lines:
            if not _bit(self._state.done, line.number):
                error = {"code": code, "message": message}
                self._settle(line, source.get(line).custom_id, is_error=True, response=None, error=error)
                await asyncio.sleep(0)  # there may be thousands, and streams go on beside them

    async def _store_settled(self) -> None:
        """Store the answers that are not stored yet, with the state that counts them."""
        if self._settled:
            portion = self._count_settled()
            if len(self._held.outputs) + len(self._held.errors) < PART_BYTES:
                change = change_of(self._state, self._lease.record.head, [portion])
                await self._lease.put(change)
            else:
                await self._make_parts()
                await self._lease.put(change_of(self._state))

    def _count_settled(self) -> Portion:
        """Count the answers that are not stored yet, and return them as a portion, which is held from now on."""
        state, settled = self._state, self._settled
        self._settled = []
        done = bytearray(state.done)
        for each in settled:
            done[each.line.number // 8] |= 1 << each.line.number % 8
        state.done = bytes(done)
        state.failed += sum(each.is_error for each in settled)
        state.unanswered += sum(each.is_unanswered for each in settled)
        state.completed += sum(not each.is_error for each in settled)
        portion = Portion(
            b"".join(each.content for each in settled if not each.is_error),
            b"".join(each.content for each in settled if each.is_error),
        )
        self._held = Portion(self._held.outputs + portion.outputs, self._held.errors + portion.errors)
        return portion

    async def _make_parts(self) -> None:
        """Store the answers that are held as parts of the result files. The state is stored by the caller."""
        for file, content in ((self._state.outputs, self._held.outputs), (self._state.errors, self._held.errors)):
            file.bytes += len(content)
            for at in range(0, len(content), PART_BYTES):
                piece = content[at : at + PART_BYTES]
                owner = self._lease.task.owner
                file.parts.append(await self._service.files.add_part(owner, file.id, piece, is_bounded=False))
        self._held = Portion()

    async def _conclude(self, ending: Status) -> None:
        """Store that no more answers come, and the last ones."""
        state = self._state
        if self._settled:
            self._count_settled()
        await self._make_parts()
        state.ending = ending
        if ending != "failed":
            if ending == "cancelled":
                state.times["cancelling"] = int(time.time())
            self._enter("finalizing")
        await self._lease.put(change_of(state))

    async def _make_files(self) -> None:
        """Make the result files of their parts. They may exist: then a router has died after it made them."""
        for file, name in ((self._state.outputs, "output"), (self._state.errors, "error")):
            if file.parts:
                await self._make_file(file, f"{self._lease.task.id}_{name}.jsonl")

    async def _make_file(self, file: ResultFile, name: str) -> None:
        info = FileInfo(
            name=name, purpose="batch_output", bytes=file.bytes, parts=file.parts, ttl=self._state.result_ttl
        )
        try:
            await self._service.files.create(self._lease.task.owner, file.id, info)
        except ExistsError:
            return

    def _enter(self, status: Status) -> None:
        self._state.status = status
        self._state.times[status] = int(time.time())


def _bit(bits: bytes, index: int) -> bool:
    return bool(bits) and bool(bits[index // 8] >> index % 8 & 1)


def _check_body(body: msgspec.Raw) -> None:
    """Refuse what makes sense only for a client that waits.

    Raises:
        ApiError: 400.
    """
    fields = msgspec.json.decode(body)
    for name in ("stream", "background"):
        if fields.get(name):
            raise bad_value(name, f"`{name}` is not available in a batch")
