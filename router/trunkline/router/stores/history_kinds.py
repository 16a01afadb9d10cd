"""The kinds of records that have a history: sessions, stored responses and conversations.

All are kept in the same way (`session_store.py`). A kind says how ids begin, how long a record lasts without use,
and what clients are told when something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from trunkline.kvstore.records import (
    BusyError,
    ConflictError,
    ExistsError,
    MissingError,
    QuotaError,
    RecordError,
    RecordKey,
    StoreAwayError,
)
from trunkline.router.errors import ApiError, in_conflict, not_found, records_away, records_full, unavailable
from trunkline.router.stores.session_state import SessionState
from trunkline.router.tenancy.auth import current_identity

_ID_CHARACTERS_MAX: Final = 128


class HistoryKind(NamedTuple):
    """A kind of records that have a history."""

    name: str
    """The kind of the records' keys, which is also the word for them in errors."""
    prefix: str
    """The beginning of all ids of this kind."""
    ttl: float
    """Time in seconds without use after which a record is deleted whose client gave none; 0: never."""
    busy_code: str
    """The error's code if another request works on the record."""
    busy_advice: str
    """The sentence of that error that says what the client can do."""

    @property
    def param(self) -> str:
        """The parameter that names a record of this kind in errors."""
        return f"{self.name}_id"

    def key_of(self, history_id: str) -> RecordKey:
        """Return the key of a record of the current request's tenant, who finds no other tenant's records.

        Raises:
            ApiError: 404, no record of this kind can have the id.
        """
        if not history_id.startswith(self.prefix) or len(history_id) > _ID_CHARACTERS_MAX:
            raise self.missing(history_id)
        return RecordKey(self.name, current_identity().owner, history_id)

    def ttl_of(self, session: SessionState) -> float:
        """Return the seconds without use after which a record is deleted; 0: never."""
        return session.ttl or self.ttl

    def missing(self, history_id: str) -> ApiError:
        """Return the error 404 for an id without a record."""
        message = f"{self.name} {history_id[:80]!r} does not exist (any more)"
        return not_found(self.param, message, code=f"{self.name}_not_found")

    @contextmanager
    def errors(self, history_id: str, *, not_stored: bool = False) -> Iterator[None]:
        """Turn errors of the store of records into errors for the client.

        Args:
            not_stored: whether the record was to be stored: then the client is told that it was not.

        Raises:
            ApiError: instead of `RecordError` and `ValueError`.
        """
        name = f"{self.name} {history_id[:80]!r}"
        try:
            yield
        except MissingError:
            raise self.missing(history_id) from None
        except BusyError:
            raise in_conflict(
                self.param,
                f"{name} is in use: another request of it has not ended yet. {self.busy_advice}",
                code=self.busy_code,
            ) from None
        except (ConflictError, ExistsError):
            raise in_conflict(
                self.param,
                f"{name} was changed by another request meanwhile; nothing was stored",
                code=f"{self.name}_conflict",
            ) from None
        except QuotaError as error:
            raise records_full(error.used, error.limit) from None
        except (RecordError, ValueError) as error:
            if not_stored:
                code = f"{self.name}_not_stored"
                raise unavailable(f"{name} could not be stored: {error}", code=code) from None
            if isinstance(error, StoreAwayError):
                raise records_away(error) from None
            raise unavailable(f"{name} cannot be read: {error}", code=f"{self.name}_unreadable") from None


SESSIONS: Final = HistoryKind(
    "session",
    "sess_",
    24 * 3600.0,
    "session_busy",
    'Wait for that, or fork the session with `"while_busy": "before"`. If its router has died, it is free after '
    "10 seconds at most.",
)
RESPONSES: Final = HistoryKind("response", "resp_", 30 * 24 * 3600.0, "response_busy", "Wait for that.")
CONVERSATIONS: Final = HistoryKind(
    "conversation", "conv_", 0.0, "conversation_locked", "Please retry in a few seconds."
)
