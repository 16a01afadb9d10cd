"""Parse and check the options about tenants and API keys before anything starts."""

from __future__ import annotations

from typing import Final

from trunkline.deploy.config.credentials import server_key
from trunkline.deploy.errors import UserError
from trunkline.router.config import NO_LIMITS, TenantLimits
from trunkline.router.tenancy.auth import is_loopback
from trunkline.router.tenancy.tenant_file import read_rules

_NAMES: Final = TenantLimits.__struct_fields__


def parse_tenant_limits(text: str) -> TenantLimits:
    """Return the value of `--tenant-limits`: pairs of the form `NAME=NUMBER` with commas between them.

    Raises:
        UserError: The text has another form.
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
    """Check the file of `--tenants`, if there is one.

    Raises:
        UserError: It cannot be read, or is wrong.
    """
    if path:
        try:
            read_rules(path, limits)
        except ValueError as error:
            raise UserError(f"--tenants: {error}") from None


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a text with commas between them."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def keys_needed(tenants: str, api_key_file: str) -> bool:
    """Return whether clients need keys: because a key is given, or because the file of tenants has some.

    Raises:
        UserError: A file cannot be read, or is wrong.
    """
    if server_key(api_key_file):
        return True
    check_tenants(tenants, NO_LIMITS)
    return bool(tenants) and read_rules(tenants, NO_LIMITS).has_keys


def check_exposure(host: str, tenants: str, api_key_file: str, *, allow_anonymous: bool) -> None:
    """Check that only this machine can connect to a server without keys.

    Raises:
        UserError: Other machines could connect.
    """
    if not (keys_needed(tenants, api_key_file) or allow_anonymous or is_loopback(host)):
        raise UserError(
            f"--host is {host}, where other machines can connect, and there are no API keys; make one with "
            "`trunkline key new --tenant NAME --file FILE` and give --tenants FILE, or set TRUNKLINE_API_KEY, "
            "or stay on 127.0.0.1; --allow-anonymous answers requests without a key"
        )
