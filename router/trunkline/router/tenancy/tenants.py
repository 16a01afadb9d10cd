"""The limits of tenants: how many requests and tokens each may use, counted in token buckets.

    headers ─► Authenticator ─► tenant ─► TenantBook.admit ─► Meter ─► charge_prompt, charge, close
               (auth.py)                       └─ 429, with the limit, and the seconds until a request would pass

The router uses `Tenants`, which follows the file of rules. All else does no I/O; it gets the clock from outside.
`AccessMiddleware` admits a request and makes its `Meter` the current one.

To be admitted, a request needs a place among the tenant's running requests, a unit of its bucket of requests, and
a bucket of tokens that is not empty. Its prompt is charged when it is sent to a controller (and given back if the
answer is an error of the controllers' without a token), its output when it ends. So running requests may overdraw
a bucket of tokens; then no request is admitted until it has filled again. That way no work is thrown away because
its length was not known before, and over minutes the rate holds exactly.

The limits hold for all routers together: what a router grants, it has reserved in the tenant's ledger in the
record store (`shared_limits.py`). A router that has a store of its own counts in its memory.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from msgspec.structs import replace

from trunkline.kvstore.records import RecordStore
from trunkline.router.config import NO_LIMITS, RouterConfig, TenantLimits
from trunkline.router.errors import RETRY_AFTER_SECONDS, ApiError
from trunkline.router.request_context import current, known
from trunkline.router.tenancy.account import Account
from trunkline.router.tenancy.auth import (
    ANONYMOUS,
    DEFAULT,
    Access,
    Authenticator,
    Identity,
    TenantRules,
    is_loopback,
    salt_of,
)
from trunkline.router.tenancy.buckets import ROUNDING, Bucket, ReservedBucket
from trunkline.router.tenancy.shared_limits import SharedLimits
from trunkline.router.tenancy.tenant_file import TenantFile

TENANTS_MAX: Final = 10_000
"""Largest number of tenants in memory. If there are more, those that have been idle for longest are forgotten."""


# -- books


class _Tenant:
    """The running requests and the buckets of one tenant."""

    __slots__ = ("account", "limits", "minute_requests", "minute_tokens", "name", "rules", "running")

    def __init__(self, name: str, account: Account | None) -> None:
        self.name = name
        self.account = account
        """The account with the ledger of all routers; None: this router counts by itself."""
        self.limits = NO_LIMITS
        self.rules: TenantRules | None = None
        """The rules from which `limits` was taken."""
        self.running = 0
        self.minute_requests: Bucket | ReservedBucket | None = None
        self.minute_tokens: Bucket | ReservedBucket | None = None

    def obey(self, rules: TenantRules, routers: int, now: float) -> None:
        limits = self.limits = rules.limits_of(self.name)
        self.rules = rules
        if self.account is not None:
            self.account.obey(limits, now)
            self.minute_requests, self.minute_tokens = self.account.requests, self.account.tokens
            return
        self.minute_requests = _resized(self.minute_requests, limits.requests_per_minute, routers, now)
        self.minute_tokens = _resized(self.minute_tokens, limits.tokens_per_minute, routers, now)

    def places(self, routers: int) -> float:
        """Return how many requests may run at once."""
        if self.limits.requests is None:
            return math.inf
        return math.ceil(self.limits.requests / routers) if self.account is None else self.account.places


def _resized(
    bucket: Bucket | ReservedBucket | None, per_minute: int | None, routers: int, now: float
) -> Bucket | ReservedBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute / routers, now)
    bucket.resize(per_minute / routers, now)
    return bucket


class Meter:
    """The account of an admitted request. Always call `close` in the end."""

    def __init__(self, book: TenantBook, tenant: _Tenant) -> None:
        self._book = book
        self._tenant = tenant
        self._charged = False
        self._open = True

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return self._tenant.name

    @property
    def kv_share(self) -> tuple[float, float]:
        """Floor and ceiling of the tenant's part of each KV tier."""
        return self._tenant.limits.kv_share

    def priority(self, wanted: int | None) -> int:
        """Return the priority that a request gets. `wanted`: the one that it asks for; None: it asks for none."""
        own = self._tenant.limits.priority
        if own is None:
            return wanted or 0
        return own if wanted is None else max(wanted, own)

    def check_prompt(self) -> None:
        """Check whether there is anything to charge a prompt to, before it is sent to a controller. Only the
        first of several prompts can be refused.

        Raises:
            ApiError: 429, other requests have emptied the bucket since this one was admitted.
        """
        bucket = self._tenant.minute_tokens
        if bucket is not None and not self._charged and (wait_s := bucket.wait_s(1, self._book.clock())):
            raise _over_rate("tokens", self._tenant.limits.tokens_per_minute, wait_s)

    def charge_prompt(self, tokens: int) -> None:
        """Charge a prompt that was sent to a controller."""
        self._charged = True
        self.charge(tokens)

    def charge(self, tokens: int) -> None:
        """Charge the tokens of an answer or of a part of it; less than 0: give tokens back. May be called after
        `close`."""
        if self._tenant.minute_tokens is not None:
            self._tenant.minute_tokens.take(tokens, self._book.clock())
            self._book.touch(self._tenant)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's headers that say how much is left of each limit of the tenant."""
        return _headers(self._tenant, self._book.clock())

    def close(self) -> None:
        """Free the request's place among the tenant's running requests. Calling it again changes nothing."""
        if self._open:
            self._open = False
            self._book.leave(self._tenant)


class TenantBook:
    """All tenants that have sent requests lately."""

    def __init__(
        self,
        rules: TenantRules,
        clock: Callable[[], float],
        routers: int = 1,
        tenants_max: int = TENANTS_MAX,
        shared: SharedLimits | None = None,
    ) -> None:
        """
        Args:
            clock: returns seconds that only go forward.
            routers: number of router processes; without `shared`, each grants an equal part of every limit.
            tenants_max: largest number of tenants in memory, besides those with running requests and those that
                the rules name.
            shared: counts the limits for all routers together; None: this router counts by itself.
        """
        self.rules = rules
        """The rules that count now. They may be replaced at any time: what was used of the old limits counts in
        the new ones."""
        self.clock = clock
        self._routers = routers
        self._shared = shared
        self._tenants_max = tenants_max
        self._tenants: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, _Tenant] = OrderedDict()
        """Tenants without running requests, the longest idle first."""

    def __len__(self) -> int:
        return len(self._tenants)

    def running(self, name: str) -> int:
        """Return how many requests of a tenant were admitted and are not over."""
        tenant = self._tenants.get(name)
        return 0 if tenant is None else tenant.running

    async def prepare(self, name: str) -> None:
        """Reserve what a request of a tenant needs to be admitted, if the tenant's limits are shared and nothing
        is reserved. Call `admit` next, without waiting for anything."""
        if self._shared is not None:
            account = self._tenant(name, self.clock()).account
            assert account is not None
            await self._shared.prepare(account)

    def admit(self, name: str) -> Meter:
        """Admit a request of a tenant.

        Raises:
            OverLimitError: 429, with the limit that is reached; nothing was taken from any bucket.
        """
        now = self.clock()
        tenant = self._tenant(name, now)
        try:
            self._check(tenant, now)
        except ApiError as error:
            headers = _headers(tenant, now)
            self._forget_idle()
            raise OverLimitError(error, headers) from None
        if tenant.minute_requests is not None:
            tenant.minute_requests.take(1, now)
        tenant.running += 1
        if self._shared is not None:
            self.touch(tenant)
        self._idle.pop(name, None)
        if len(self._tenants) > self._tenants_max:
            self._forget_idle()
        return Meter(self, tenant)

    def leave(self, tenant: _Tenant) -> None:
        """Free the place of a request among the tenant's running requests. Each `Meter` calls this once."""
        tenant.running -= 1
        self.touch(tenant)
        if not tenant.running:
            self._idle[tenant.name] = tenant
            self._forget_idle()

    def touch(self, tenant: _Tenant) -> None:
        """Note that a tenant's requests have come or gone, or that they have used tokens."""
        if self._shared is not None and tenant.account is not None and tenant.account.has_limits:
            tenant.account.note_running(tenant.running)
            self._shared.touch(tenant.account)

    def _tenant(self, name: str, now: float) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            account = None if self._shared is None else self._shared.account(name)
            tenant = self._tenants[name] = self._idle[name] = _Tenant(name, account)
        if tenant.rules is not self.rules:
            tenant.obey(self.rules, self._routers, now)
        return tenant

    def _check(self, tenant: _Tenant, now: float) -> None:
        limits = tenant.limits
        if limits.requests is not None and tenant.running >= tenant.places(self._routers):
            raise _over("requests", f"{limits.requests} requests at once", RETRY_AFTER_SECONDS)
        if tenant.minute_requests is not None:
            _check_bucket(tenant.minute_requests, "requests", limits.requests_per_minute, now)
        if tenant.minute_tokens is not None:
            _check_bucket(tenant.minute_tokens, "tokens", limits.tokens_per_minute, now)

    def _forget_idle(self) -> None:
        named = self.rules.tenants  # never forgotten: their number is bounded
        skipped = 0
        while len(self._tenants) > self._tenants_max and self._idle and skipped <= len(named):
            name, tenant = self._idle.popitem(last=False)
            if name in named:
                self._idle[name] = tenant
                skipped += 1
            else:
                del self._tenants[name]


def _headers(tenant: _Tenant, now: float) -> dict[str, str]:
    fields = {}
    for name, bucket in (("requests", tenant.minute_requests), ("tokens", tenant.minute_tokens)):
        if bucket is not None:
            fields[f"x-ratelimit-limit-{name}"] = str(int(bucket.capacity))
            fields[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now) + ROUNDING)))
            fields[f"x-ratelimit-reset-{name}"] = duration(bucket.wait_s(bucket.capacity, now))
    return fields


def _check_bucket(bucket: Bucket | ReservedBucket, unit: str, per_minute: int | None, now: float) -> None:
    if wait_s := bucket.admission_wait_s(now):
        raise _over_rate(unit, per_minute, wait_s)


def _over_rate(unit: str, per_minute: int | None, wait_s: float) -> ApiError:
    return _over(f"{unit}_per_minute", f"{per_minute} {unit} per minute", wait_s)


def _over(limit: str, most: str, wait_s: float) -> ApiError:
    seconds = max(RETRY_AFTER_SECONDS, math.ceil(wait_s))
    return ApiError(
        429,
        f"the limit `{limit}` of this tenant is reached: {most}. Please try again in {seconds} s.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        details={"limit": limit},
        retry_after=seconds,
    )


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: "0s", "120ms", "1.5s", "6m0s"."""
    if seconds <= 0:
        return "0s"
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 1000) / 1000, 60)
    return f"{int(minutes)}m{round(rest, 3):g}s" if minutes else f"{round(rest, 3):g}s"


# -- the running router


class Tenants:
    """The tenants of a running router: who sends a request, and how much the sender may use."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        records: RecordStore | None = None,
    ) -> None:
        """
        Args:
            records: the store in which limits are counted for all routers that share it. It is used only if there
                may be others.
            wall_clock: Unix time in seconds, by which keys expire.

        Raises:
            ValueError: the file of tenants cannot be read or is wrong; or the server has no keys, and other
                machines reach it.
        """
        limits = config.tenant_limits
        if limits.records_bytes is None and config.records_tenant_bytes:
            limits = replace(limits, records_bytes=config.records_tenant_bytes)
        self._file = TenantFile(config.tenants, limits, config.tenants_kept) if config.tenants else None
        rules = TenantRules(limits) if self._file is None else self._file.rules
        self._shared = (
            None
            if records is None or not config.shares_records
            else SharedLimits(records, config.routers, clock, wall_clock)
        )
        self._book = TenantBook(rules, clock, config.routers, shared=self._shared)
        self._authenticator = Authenticator(
            header=config.tenant_header,
            single_key=config.api_key_digest,
            admin_key=config.admin_key_digest,
            needs_keys=config.needs_keys,
        )
        self._clock = clock
        self._wall_clock = wall_clock
        if not (self.needs_keys or config.allow_anonymous or is_loopback(config.host)):
            raise ValueError(anonymous_problem(config.host))

    @property
    def file_problem(self) -> str:
        """Why an older version of the file of tenants is in force; "": the present one is, or there is none."""
        self._rules()
        return "" if self._file is None else self._file.problem

    @property
    def needs_keys(self) -> bool:
        """Whether requests need keys. If not, every client that reaches the server may use it."""
        return self._authenticator.needs_keys(self._rules())

    def identify(self, headers: Mapping[str, str], access: Access) -> Identity:
        """Return who sends a request that needs `access`.

        Raises:
            ApiError: 400, 401 or 403; see `Authenticator.admit`.
        """
        return self._authenticator.admit(headers, access, self._rules(), self._wall_clock())

    def acting_for(self, identity: Identity, tenant: str) -> Identity:
        """Return an admin's identity acting for a tenant; see `Authenticator.acting_for`."""
        return self._authenticator.acting_for(identity, tenant, self._rules())

    def owners(self) -> list[str]:
        """Return the owners of sessions: "" for sessions without a tenant, and the tenants that the file names."""
        return ["", *self._book.rules.tenants]

    def identity_of(self, tenant: str, owner: str) -> Identity:
        """Return the identity of a request that is made for a tenant, not sent by it. `owner`: whose records it
        sees."""
        return Identity(tenant, owner=owner, salt=salt_of(owner, self._rules()) if owner else b"")

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return a tenant's limits."""
        return self._rules().limits_of(tenant)

    def quota_of(self, owner: str) -> int:
        """Return the size in bytes of an owner's records from which on it can make no more; 0: there is no limit.
        What no tenant owns counts as that of the tenant `DEFAULT`."""
        return self.limits_of(owner or DEFAULT).records_bytes or 0

    def pins_of(self, owner: str) -> float:
        """Return the part of a group's room for pins, from 0 to 1, that an owner's schemas may take."""
        pins = self.limits_of(owner or DEFAULT).pins
        return 1.0 if pins is None else pins

    def open(self) -> None:
        """Begin to share limits with other routers."""
        if self._shared is not None:
            self._shared.open()

    async def close(self) -> None:
        """Give back what is reserved of the limits. No request must run any more."""
        if self._shared is not None:
            await self._shared.close()

    async def enter(self, name: str) -> Meter:
        """Admit a request of a tenant, and return its meter.

        Raises:
            OverLimitError: 429, a limit is reached.
        """
        self._rules()
        await self._book.prepare(name)
        return self._book.admit(name)

    def _rules(self) -> TenantRules:
        """Return the rules as the file has them now."""
        if self._file is not None:
            self._book.rules = self._file.poll(self._clock())
        return self._book.rules

    def running(self, name: str) -> int:
        """Return how many requests of a tenant were admitted and are not over."""
        return self._book.running(name)

    def reload(self) -> None:
        """Read the file of tenants now, if there is one."""
        if self._file is not None:
            self._file.reload()


def anonymous_problem(host: str) -> str:
    """Return why a server without keys does not listen on an address that other machines reach."""
    return (
        f"host: {host!r} is reached by others, and there are no API keys; make one with `trunkline key new`, "
        "listen on 127.0.0.1, or say --allow-anonymous"
    )


class OverLimitError(ApiError):
    """429: a limit of the tenant is reached. Its headers say how much is left of each limit."""

    def __init__(self, error: ApiError, headers: dict[str, str]) -> None:
        super().__init__(
            error.status,
            error.message,
            kind=error.kind,
            code=error.code,
            details=error.details,
            retry_after=error.retry_after,
        )
        self._headers = headers

    def headers(self) -> dict[str, str]:
        """Return the headers about the tenant's limits, and `Retry-After`."""
        return {**self._headers, **super().headers()}


_FREE: Final = TenantBook(TenantRules(), lambda: 0.0).admit(ANONYMOUS)
"""Meter without limits for the router's own requests, such as health probes."""


def current_meter() -> Meter:
    """Return the meter to which the request at hand is charged."""
    return current().meter or _FREE


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Charge everything inside of a `with` block, and in tasks that are started there, to `meter`; close it in the
    end."""
    try:
        with known(meter=meter):
            yield
    finally:
        meter.close()
