"""What `--tenant-limits`, `--tenants` and the options of keys say, checked before anything starts."""

from __future__ import annotations

from typing import Final

from trunkline.deploy.config.credentials import server_key
from trunkline.deploy.errors import UserError
from trunkline.router.config import NO_LIMITS, TenantLimits
from trunkline.router.tenancy.auth import is_loopback
from trunkline.router.tenancy.tenant_file import read_rules

_NAMES: Final = TenantLimits.__struct_fields__


def parse_tenant_limits(text: str) -> TenantLimits:
    """The value of `--tenant-limits`: `NAME=NUMBER` pairs with commas between them.

    Raises:
        UserError: it is something else.
    """
    given: dict[str, int] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (part.strip() for part in pair.partition("="))
        if name not in _NAMES or name in given:
            raise UserError(
                f"--tenant-limits is {text!r}; it is made of NAME=NUMBER, with commas between them, and each of "
                f"these names once at most: {', '.join(_NAMES)}"
            )
        try:
            given[name] = int(number)
        except ValueError:
            raise UserError(f"--tenant-limits is {text!r}; {name} is a whole number, not {number!r}") from None
    limits = TenantLimits(**given)
    if problem := limits.problem():
        raise UserError(f"--tenant-limits: {problem}".replace("or null for", "or left out for"))
    return limits


def check_tenants(path: str, limits: TenantLimits) -> None:
    """Check the file of `--tenants`; "": there is none.

    Raises:
        UserError: it cannot be read, or is wrong.
    """
    if path:
        try:
            read_rules(path, limits)
        except ValueError as error:
            raise UserError(f"--tenants: {error}") from None


def parse_names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def keys_needed(tenants: str, api_key_file: str) -> bool:
    """Whether clients need keys: there is one, or the file of tenants speaks of some.

    Raises:
        UserError: a file cannot be read, or is wrong.
    """
    if server_key(api_key_file):
        return True
    check_tenants(tenants, NO_LIMITS)
    return bool(tenants) and read_rules(tenants, NO_LIMITS).has_keys


def check_exposure(host: str, tenants: str, api_key_file: str, *, allow_anonymous: bool) -> None:
    """Check that nobody but this machine reaches a server without keys.

    Raises:
        UserError: others would.
    """
    if not (keys_needed(tenants, api_key_file) or allow_anonymous or is_loopback(host)):
        raise UserError(
            f"--host is {host}, which others reach, and there are no API keys; make one with `trunkline key new "
            "--tenant NAME --file FILE` and give --tenants FILE, or set TRUNKLINE_API_KEY, or stay on 127.0.0.1; "
            "--allow-anonymous lets everybody in"
        )
