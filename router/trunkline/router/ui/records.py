"""The store of records for the dashboard and for `trunkline doctor`: where records are, how many, what endangers
them."""

from __future__ import annotations

from typing import Any

from trunkline.kvstore.records import StoreAwayError
from trunkline.router.service import RouterService


async def records(service: RouterService) -> dict[str, Any]:
    """Return the state of the store of sessions, schemas and kept answers."""
    config = service.config
    found: dict[str, Any] = {
        "store": config.records.partition(":")[0],
        "bytes_max": config.records_bytes_max,
        "away": "",
        "problem": "",
        "records": None,
        "bytes": None,
    }
    try:
        usage = await service.records.usage()
        problem = await service.records.check()
    except StoreAwayError as error:
        return found | {"away": str(error) or "it does not answer"}
    return found | {"problem": problem, "records": usage.records, "bytes": usage.bytes}
