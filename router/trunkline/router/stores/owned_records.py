"""Common parts of files, batches and tasks as records: ids that sort by time, and errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from trunkline.kvstore.records import MissingError, QuotaError, StoreAwayError
from trunkline.router.errors import not_found, records_away, records_full
from trunkline.router.request_context import draw_hex

KEPT_S: Final = 30 * 24 * 3600.0
"""Time in seconds for which files and batches are kept after their last use."""
_LAST_MS: Final = 1 << 44
"""A time in Unix milliseconds that will not come for some hundred years."""
_ID_CHARACTERS_MAX: Final = 64
QuotaOf = Callable[[str], int]
"""Returns the quota of an owner: the size in bytes of the owner's records from which on it can make no more; 0: it
has none."""


def no_quota(owner: str) -> int:
    """Return that an owner has no quota."""
    return 0


def draw_id(prefix: str) -> str:
    """Return a new id. Pages of records are in the order of ids, so ids of later records sort before earlier
    ones: lists begin with the newest."""
    return f"{prefix}{_LAST_MS - int(time.time() * 1000):011x}{draw_hex('record', 8)}"


@contextmanager
def store_errors(what: str, given: str) -> Iterator[None]:
    """Turn the record store's errors into answers. `what`: the kind of thing, such as "file"; `given`: its id.

    Raises:
        ApiError: 404, there is no such thing; 429, the owner's quota is reached; 503, the store is away.
    """
    try:
        yield
    except MissingError:
        raise not_found(f"{what}_id", f"No such {what}: {given[:80]!r}", code=f"{what}_not_found") from None
    except QuotaError as error:
        raise records_full(error.used, error.limit) from None
    except StoreAwayError as error:
        raise records_away(error) from None


def check_id(given: str, prefix: str) -> str:
    """Return `given` if it may be the id of a record.

    Raises:
        MissingError: no record has such an id.
    """
    if not given.startswith(prefix) or not given.isascii() or len(given) > _ID_CHARACTERS_MAX:
        raise MissingError(given[:_ID_CHARACTERS_MAX])
    return given
