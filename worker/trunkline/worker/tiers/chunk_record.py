"""The record beside a chunk's bytes in a tier: which rank wrote them, under which name, and a checksum over all
(CachedAttention §3.3).

A record is read back only whole, under the name, generation, rank and fingerprint that it was written with. A
crash in the middle of a write, a flipped bit, a slab of another model: all of these are misses.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from trunkline.kvstore.names import NAME_BYTES

_MAGIC: Final = b"TLCHUNK1"
_HEAD: Final = struct.Struct(f"<8sII{NAME_BYTES}sqQ")
"""Magic, rank, ranks, name, generation, length of the payload; behind it the checksum."""
_CHECKSUM_BYTES: Final = 16
RECORD_BYTES: Final = _HEAD.size + _CHECKSUM_BYTES


class RecordKeeper(NamedTuple):
    """Makes and checks the records of one rank."""

    fingerprint: bytes
    """What KV depends on besides the tokens; it enters the checksum."""
    rank: int
    tp: int

    def record(self, name: bytes, generation: int, payload: memoryview) -> bytes:
        """Of `RECORD_BYTES` bytes, to be kept with the payload."""
        head = _HEAD.pack(_MAGIC, self.rank, self.tp, name, generation, len(payload))
        return head + self._checksum(head, payload)

    def holds(self, record: bytes, name: bytes, generation: int, payload: memoryview) -> bool:
        """Whether payload and record are what was written under this name and generation."""
        head = _HEAD.pack(_MAGIC, self.rank, self.tp, name, generation, len(payload))
        if record[: _HEAD.size] != head:
            return False
        return record[_HEAD.size :] == self._checksum(head, payload)

    def _checksum(self, head: bytes, payload: memoryview) -> bytes:
        """Streaming, for which xxhash lets other threads run: the step thread is one."""
        state = xxhash.xxh3_128(self.fingerprint)
        state.update(head)
        state.update(payload)
        return state.digest()
