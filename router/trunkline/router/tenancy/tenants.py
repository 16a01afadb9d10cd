"""The tenants of a router, and how much each may ask for: token buckets per tenant.

    headers ─► Authenticator ─► tenant ─► TenantBook.admit ─► Admission ─► charge_prompt, charge_output, close
               (identity.py)                       └─ 429: which limit, and after how many seconds it would pass

`Tenants` is what the router asks; it has the clock. All else is pure: time is an argument, in seconds that only go
forward. `admission.py` lets a request in and makes its `Meter` the current one.

A request needs a place among the tenant's running ones, one from the bucket of requests, and a bucket of tokens
that is not empty. Its prompt is charged once its tokens are known, its output when it ends. So a bucket of tokens
may be overdrawn, by what is running; then nothing is admitted until it has filled again. That way no work is
thrown away because its length was not known, and over minutes the rate holds exactly.

Routers share nothing. Of several each grants an equal part of every limit.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from trunkline.router.config import NO_LIMITS, RouterConfig
from trunkline.router.errors import RETRY_AFTER_SECONDS, ApiError
from trunkline.router.request_context import current, known
from trunkline.router.tenancy.auth import ANONYMOUS, Access, Authenticator, Identity, TenantRules, is_loopback
from trunkline.router.tenancy.tenant_file import TenantFile

TENANTS_MAX: Final = 10_000
"""Kept in memory; of more tenants, those that have been idle for longest are forgotten."""
MINUTE_S: Final = 60.0
_ROUNDING: Final = 1e-6
"""Of a token: who waited as long as they were told must not be turned away by the last bit."""


# -- how much


class Bucket:
    """A token bucket that fills at a steady rate. It may be overdrawn."""

    __slots__ = ("_at", "_capacity", "_level", "_per_second")

    def __init__(self, per_minute: float, now: float) -> None:
        """Begin full. The bucket holds what a minute brings, but one at least."""
        self._per_second = per_minute / MINUTE_S
        self._capacity = max(per_minute, 1.0)
        self._level = self._capacity
        self._at = now

    @property
    def capacity(self) -> float:
        """The most that the bucket holds."""
        return self._capacity

    def level(self, now: float) -> float:
        """Return what is in the bucket; below zero: it is overdrawn."""
        if now > self._at:
            self._level = min(self._capacity, self._level + (now - self._at) * self._per_second)
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, even if the bucket holds less."""
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount`, which is not more than the capacity, is in the bucket."""
        missing = amount - self.level(now)
        return 0.0 if missing <= _ROUNDING else missing / self._per_second

    def resize(self, per_minute: float, now: float) -> None:
        """Change the rate; what was taken at the old one stays taken."""
        taken = self._capacity - self.level(now)
        self._per_second = per_minute / MINUTE_S
        self._capacity = max(per_minute, 1.0)
        self._level = self._capacity - taken


class _Tenant:
    """One tenant's running requests and buckets."""

    __slots__ = ("limits", "minute_requests", "minute_tokens", "name", "rules", "running")

    def __init__(self, name: str) -> None:
        self.name = name
        self.limits = NO_LIMITS
        self.rules: TenantRules | None = None
        """Those that `limits` is from."""
        self.running = 0
        self.minute_requests: Bucket | None = None
        self.minute_tokens: Bucket | None = None

    def obey(self, rules: TenantRules, routers: int, now: float) -> None:
        limits = self.limits = rules.limits_of(self.name)
        self.rules = rules
        self.minute_requests = _resized(self.minute_requests, limits.requests_per_minute, routers, now)
        self.minute_tokens = _resized(self.minute_tokens, limits.tokens_per_minute, routers, now)


def _resized(bucket: Bucket | None, per_minute: int | None, routers: int, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute / routers, now)
    bucket.resize(per_minute / routers, now)
    return bucket


class Admission:
    """A request that was let in. Call `close` in the end, whatever happened."""

    def __init__(self, book: TenantBook, tenant: _Tenant) -> None:
        self._book = book
        self._tenant = tenant
        self._charged = False
        self._open = True

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return self._tenant.name

    def priority(self, wanted: int | None) -> int:
        """Return the priority of a request that wants this one; None: it wants none."""
        own = self._tenant.limits.priority
        if own is None:
            return wanted or 0
        return own if wanted is None else max(wanted, own)

    def charge_prompt(self, tokens: int, now: float) -> None:
        """Charge a prompt before an engine gets it. Of several in one request the first one decides.

        Raises:
            ApiError: 429, others have emptied the bucket since the request was let in.
        """
        bucket = self._tenant.minute_tokens
        if bucket is not None:
            if not self._charged:
                _check_bucket(bucket, "tokens_per_minute", self._tenant.limits.tokens_per_minute, now)
            bucket.take(tokens, now)
        self._charged = True

    def charge_output(self, tokens: int, now: float) -> None:
        """Charge an answer, or a part of one. May be called after `close`."""
        if self._tenant.minute_tokens is not None:
            self._tenant.minute_tokens.take(tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """See `TenantBook.headers`."""
        return _headers(self._tenant, now)

    def close(self) -> None:
        """Free the request's place. May be called again."""
        if self._open:
            self._open = False
            self._book.leave(self._tenant)


class TenantBook:
    """All tenants that have asked for something lately."""

    def __init__(self, rules: TenantRules, routers: int = 1, tenants_max: int = TENANTS_MAX) -> None:
        """
        Args:
            routers: processes that share the limits, each by itself.
            tenants_max: kept in memory, but for those with running requests and those that the rules name.
        """
        self.rules = rules
        """May be replaced at any time; what was used of the old limits counts in the new ones."""
        self._routers = routers
        self._tenants_max = tenants_max
        self._tenants: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, _Tenant] = OrderedDict()
        """Those without running requests, the longest idle first."""

    def __len__(self) -> int:
        return len(self._tenants)

    def running(self, name: str) -> int:
        """Return how many requests of a tenant were let in and are not over."""
        tenant = self._tenants.get(name)
        return 0 if tenant is None else tenant.running

    def admit(self, name: str, now: float) -> Admission:
        """Let a request of a tenant in, and return its place.

        Raises:
            ApiError: 429, saying which limit it is over; nothing was taken from any.
        """
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = self._idle[name] = _Tenant(name)
        if tenant.rules is not self.rules:
            tenant.obey(self.rules, self._routers, now)
        try:
            self._check(tenant, now)
        except ApiError:
            self._forget_idle()
            raise
        if tenant.minute_requests is not None:
            tenant.minute_requests.take(1, now)
        tenant.running += 1
        self._idle.pop(name, None)
        self._forget_idle()
        return Admission(self, tenant)

    def headers(self, name: str, now: float) -> dict[str, str]:
        """Return OpenAI's headers about how much is left to a tenant of each limit."""
        tenant = self._tenants.get(name)
        return {} if tenant is None else _headers(tenant, now)

    def leave(self, tenant: _Tenant) -> None:
        """Free a place; an `Admission` calls it once."""
        tenant.running -= 1
        if not tenant.running:
            self._idle[tenant.name] = tenant
            self._forget_idle()

    def _check(self, tenant: _Tenant, now: float) -> None:
        limits = tenant.limits
        if limits.requests is not None and tenant.running >= math.ceil(limits.requests / self._routers):
            raise _over("requests", f"{limits.requests} requests at once", RETRY_AFTER_SECONDS)
        if tenant.minute_requests is not None:
            _check_bucket(tenant.minute_requests, "requests_per_minute", limits.requests_per_minute, now)
        if tenant.minute_tokens is not None:
            _check_bucket(tenant.minute_tokens, "tokens_per_minute", limits.tokens_per_minute, now)

    def _forget_idle(self) -> None:
        named = self.rules.tenants  # their number is bounded: what they have used is not forgotten
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
            fields[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now) + _ROUNDING)))
            fields[f"x-ratelimit-reset-{name}"] = duration(bucket.wait_s(bucket.capacity, now))
    return fields


def _check_bucket(bucket: Bucket, limit: str, per_minute: int | None, now: float) -> None:
    wait_s = bucket.wait_s(1, now)
    if wait_s:
        unit = limit.removesuffix("_per_minute")
        raise _over(limit, f"{per_minute} {unit} per minute", wait_s)


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


class Meter:
    """An `Admission` with a clock. Call `close` in the end, whatever happened."""

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return self._admission.tenant

    def priority(self, wanted: int | None) -> int:
        """Return the priority of a request that wants this one; None: it wants none."""
        return self._admission.priority(wanted)

    def charge_prompt(self, tokens: int) -> None:
        """Charge a prompt before an engine gets it; call it once.

        Raises:
            ApiError: 429, the tenant's tokens are used up.
        """
        self._admission.charge_prompt(tokens, self._clock())

    def charge_output(self, tokens: int) -> None:
        """Charge output when a generation is over, or for each part of it."""
        self._admission.charge_output(tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """Return the headers about the tenant's limits."""
        return self._admission.headers(self._clock())

    def close(self) -> None:
        """Free the request's place. May be called again."""
        self._admission.close()


class Tenants:
    """The tenants of a running router: who sends a request, and how much the sender may use."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            wall_clock: Unix time in seconds, by which keys expire.

        Raises:
            ValueError: the file of tenants cannot be read, or is wrong; or others could use the server without
                keys.
        """
        self._file = (
            TenantFile(config.tenants, config.tenant_limits, config.tenants_kept) if config.tenants else None
        )
        rules = TenantRules(config.tenant_limits) if self._file is None else self._file.rules
        self._book = TenantBook(rules, config.routers)
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
    def needs_keys(self) -> bool:
        """Whether requests need keys; else all that reach the server may use it."""
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
        """Return the owners of sessions that the file names; "": what has no other owner."""
        return ["", *self._book.rules.tenants]

    def enter(self, name: str) -> Meter:
        """Let a request of a tenant in, and return its place.

        Raises:
            OverLimitError: 429, a limit is reached.
        """
        now = self._clock()
        self._rules()
        try:
            return Meter(self._book.admit(name, now), self._clock)
        except ApiError as error:
            raise OverLimitError(error, self._book.headers(name, now)) from None

    def _rules(self) -> TenantRules:
        """Return the rules as the file has them now."""
        if self._file is not None:
            self._book.rules = self._file.poll(self._clock())
        return self._book.rules

    def running(self, name: str) -> int:
        """Return how many requests of a tenant were let in and are not over."""
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
    """429, with what the tenant has left."""

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
        """Return what is left to the tenant, and `Retry-After`."""
        return {**self._headers, **super().headers()}


_FREE: Final = Meter(TenantBook(TenantRules()).admit(ANONYMOUS, 0.0), lambda: 0.0)
"""For requests that no tenant has made."""


def current_meter() -> Meter:
    """Return what the request at hand is charged to."""
    return current().meter or _FREE


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Charge what is done within, and in tasks that are started within, to `meter`, and close it."""
    try:
        with known(meter=meter):
            yield
    finally:
        meter.close()
