"""Texts that clients keep for the server: `encrypted_content` of reasoning and compaction items, signed.

    text ─► Seal.seal ─► "tl1.TEXT.SIGNATURE" ─► client ─► Seal.unseal ─► text; None: another server's, or changed

A sealed text is no secret: it is base64 of what the client's own model has written. The signature tells texts that
this cluster has written for this tenant from all others. Its key is a record which all routers share; the first
router that needs a key draws it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from trunkline.kvstore.records import Change, ExistsError, MissingError, RecordKey, RecordStore, StoreAwayError
from trunkline.router.errors import records_away
from trunkline.router.tenancy.auth import current_identity

SealKind = Literal["reasoning", "compaction"]
_PREFIX: Final = "tl1."
_KEY: Final = RecordKey("seal", "", "key")
_KEY_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 16
_KEPT_S: Final = 3600.0
"""Time in seconds after which a router reads the key again: the store must not take its record for forgotten."""
_AGAIN_S: Final = 60.0
"""Time in seconds after which it tries again, if the store did not answer."""
_PATIENCE_S: Final = 1.0
"""Time in seconds for which a request waits for a key that it can do without."""


class Seal(NamedTuple):
    """Seals texts for a tenant, and reads them again."""

    keys: tuple[bytes, ...] = ()
    """The key by which texts are signed, and older ones; empty: nothing can be sealed."""
    owner: str = ""
    """The tenant's name in records."""

    def seal(self, kind: SealKind, text: str) -> str | None:
        """Return a text in the form of `encrypted_content`; None: there is no key."""
        if not self.keys:
            return None
        content = text.encode("utf-8", "replace")
        return f"{_PREFIX}{_packed(content)}.{_packed(self._signature(self.keys[0], kind, content))}"

    def unseal(self, kind: SealKind, sealed: Any) -> str | None:
        """Return the text that `seal` was given; None: this cluster did not seal it for this tenant and as this
        kind."""
        if not is_sealed(sealed):
            return None
        packed, _, signed = sealed.removeprefix(_PREFIX).partition(".")
        try:
            content, signature = urlsafe_b64decode(packed), urlsafe_b64decode(signed)
        except ValueError:
            return None
        if not any(hmac.compare_digest(self._signature(key, kind, content), signature) for key in self.keys):
            return None
        return content.decode()

    def _signature(self, key: bytes, kind: SealKind, content: bytes) -> bytes:
        signed = b"\0".join((kind.encode(), self.owner.encode(), content))  # an owner has no zero bytes
        return hmac.digest(key, signed, "sha256")[:_SIGNATURE_BYTES]


def is_sealed(content: Any) -> bool:
    """Return whether an `encrypted_content` looks as if a server of this kind had written it."""
    return isinstance(content, str) and content.isascii() and content.startswith(_PREFIX)


def _packed(content: bytes) -> str:
    return urlsafe_b64encode(content).decode()


class SealKeys:
    """The keys of a cluster's seals, as far as this router has read them."""

    def __init__(self, records: RecordStore, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns the time in seconds."""
        self._records = records
        self._clock = clock
        self._keys: tuple[bytes, ...] = ()
        self._read_next = 0.0
        """When the key is to be read again, by the clock."""

    async def current(self, *, required: bool) -> Seal:
        """Return the current tenant's seal.

        Args:
            required: Whether the request cannot do without a key. If not, the seal may have none.

        Raises:
            ApiError: 503, the store of records does not answer, and no key is known.
        """
        if not self._keys or self._clock() >= self._read_next:
            self._read_next = self._clock() + _AGAIN_S
            try:
                async with asyncio.timeout(None if required and not self._keys else _PATIENCE_S):
                    key = await self._read()
            except TimeoutError:
                pass
            except StoreAwayError as error:
                if required and not self._keys:
                    raise records_away(error) from None
            else:
                self._keys = tuple(dict.fromkeys((key, *self._keys)))
                self._read_next = self._clock() + _KEPT_S
        return Seal(self._keys, current_identity().owner)

    async def _read(self) -> bytes:
        """Return the cluster's key; draw it if there is none."""
        while True:
            try:
                return (await self._records.get(_KEY)).record.header
            except MissingError:
                pass
            try:
                return (await self._records.create(_KEY, Change(secrets.token_bytes(_KEY_BYTES)))).header
            except ExistsError:  # another router was first
                continue
