"""What `--tenant-limits` and `--tenants` say, checked before anything starts."""

from __future__ import annotations

from typing import Final

from trunkline.deploy.errors import UserError
from trunkline.router.tenant_file import read_rules
from trunkline.router.tenants import TenantLimits

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
