"""The tenants of a running router, and what the request at hand is charged to.

`admission.py` lets a request in and makes its `Meter` the current one; whoever works for the request, in its task
or in one that it started, finds it with `current_meter`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from trunkline.router.config import RouterConfig
from trunkline.router.errors import ApiError
from trunkline.router.tenancy.auth import Access, is_loopback
from trunkline.router.tenancy.identity import Authenticator, Identity
from trunkline.router.tenancy.tenant_file import TenantFile
from trunkline.router.tenancy.tenants import ANONYMOUS, Admission, TenantBook, TenantRules


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
        """What a request gets that wants this one; None: any."""
        return self._admission.priority(wanted)

    def charge_prompt(self, tokens: int) -> None:
        """To be called before a prompt is given to an engine, once.

        Raises:
            ApiError: 429, it must not be.
        """
        self._admission.charge_prompt(tokens, self._clock())

    def charge_output(self, tokens: int) -> None:
        """To be called when a generation is over, or for each part of its output."""
        self._admission.charge_output(tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """What an answer says of the tenant's limits."""
        return self._admission.headers(self._clock())

    def close(self) -> None:
        """The request is over. May be called again."""
        self._admission.close()


class Tenants:
    """Who asks, and how much they may ask for."""

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
        """Who sends a request that needs `access`.

        Raises:
            ApiError: 400, 401 or 403; see `Authenticator.admit`.
        """
        return self._authenticator.admit(headers, access, self._rules(), self._wall_clock())

    def acting_for(self, identity: Identity, tenant: str) -> Identity:
        """An admin, as a tenant; see `Authenticator.acting_for`."""
        return self._authenticator.acting_for(identity, tenant, self._rules())

    def owners(self) -> list[str]:
        """All that may have sessions and are named by the file; "": what nobody else owns."""
        return ["", *self._book.rules.tenants]

    def enter(self, name: str) -> Meter:
        """Let a request of a tenant in.

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
        """As the file has them now."""
        if self._file is not None:
            self._book.rules = self._file.poll(self._clock())
        return self._book.rules

    def running(self, name: str) -> int:
        """Requests of a tenant that were let in and are not over."""
        return self._book.running(name)

    def reload(self) -> None:
        """Read the file of tenants now, if there is one."""
        if self._file is not None:
            self._file.reload()


def anonymous_problem(host: str) -> str:
    """Why a server without keys does not listen on an address that others reach."""
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
        """With `Retry-After`."""
        return {**self._headers, **super().headers()}


_FREE: Final = Meter(TenantBook(TenantRules()).admit(ANONYMOUS, 0.0), lambda: 0.0)
"""Of what no tenant has asked for."""
_current: ContextVar[Meter] = ContextVar("meter", default=_FREE)


def current_meter() -> Meter:
    """What the request at hand is charged to."""
    return _current.get()


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Charge what is done within, and in tasks that are started within, to `meter`, and close it."""
    token = _current.set(meter)
    try:
        yield
    finally:
        _current.reset(token)
        meter.close()
