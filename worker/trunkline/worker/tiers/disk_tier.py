"""The disk tier of one rank: a bounded slab file of fixed slots (CachedAttention §3.3).

      page 0           header: format, fingerprint, rank, size of a slot, number of slots, checksum
      slot i           payload, padded to whole pages │ page with the chunk's record (`RecordKeeper`)

Everything is aligned to pages, so that the file system's cache can be passed by (O_DIRECT): what goes to disk
was just in the host pool and will come back there. Payloads go straight from and to the host pool where their size
is whole pages, else by way of a buffer per thread.

Nothing is flushed: after a crash the checksum decides slot by slot. The file grows as slots are first written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import structlog
import xxhash

from trunkline.kvstore.asides import unused_name
from trunkline.kvstore.chunks import NAME_BYTES
from trunkline.kvstore.tier import SlotKey, TierKind

PAGE_BYTES: Final = 4096
_MAGIC: Final = b"TLSLAB01"
_HEADER: Final = struct.Struct("<8sIIQQ64s")
"""Header of the slab: magic, rank, ranks, bytes of a slot, slots, fingerprint; behind it a checksum of 8 bytes."""
_LOCK_WITHIN_S: Final = 3.0
"""Seconds to wait until the file's last user, which may be about to leave, has closed it."""
_LOCK_EVERY_S: Final = 0.05

log = structlog.get_logger()


class DiskTier:
    """A `Tier` over one file. Thread-safe for different slots."""

    kind = TierKind.DISK

    def __init__(self, path: Path, size_bytes: int, slot_bytes: int, keeper: RecordKeeper) -> None:
        """Open the slab, or make it. A file of another model, format or size of slot is emptied, one that is no
        slab at all is moved aside (to `….foreign`), each with a warning.

        Args:
            size_bytes: largest size of the file.
            slot_bytes: bytes of a chunk's payload.

        Raises:
            OSError: no room for a single slot, the file is in use by another process, or the file system does not
                let it be made.
        """
        self.slot_bytes = slot_bytes
        self._padded = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self._stride = self._padded + PAGE_BYTES
        self.capacity_slots = max(0, (size_bytes - PAGE_BYTES) // self._stride)
        if not self.capacity_slots:
            raise OSError(errno.ENOSPC, f"{size_bytes} bytes have no room for a slot of {self._stride}", str(path))
        self._path = path
        self._keeper = keeper
        self._buffers = threading.local()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = _open_locked(path)
        try:
            self._adopt()
            self.is_direct = self._try_direct()
        except BaseException:
            os.close(self._file)
            raise

    # --- Tier

    def write(self, key: SlotKey, data: memoryview) -> None:
        """Store a chunk's bytes (see `Tier.write`); a crash of the machine may still lose them."""
        if len(data) != self.slot_bytes:
            raise OSError(errno.EINVAL, f"{len(data)} bytes for a slot of {self.slot_bytes}")
        offset = self._offset(key.slot)
        buffer = self._buffer()
        record = self._keeper.record(key.name, key.generation, data)
        page = buffer[self._padded :]
        page[:RECORD_BYTES] = record
        if self._goes_straight(data):
            parts = [data, page]
        else:
            buffer[: self.slot_bytes] = data
            parts = [buffer]
        written = os.pwritev(self._file, parts, offset)
        if written != self._stride:
            # Usually the last bytes that there was room for; the checksum does not fit them.
            raise OSError(errno.ENOSPC, f"only {written} of {self._stride} bytes were written", str(self._path))
        self._drop_cache(offset)

    def read(self, key: SlotKey, into: memoryview) -> bool:
        """Fill `into` with a chunk's bytes (see `Tier.read`)."""
        if len(into) != self.slot_bytes:
            raise OSError(errno.EINVAL, f"{len(into)} bytes for a slot of {self.slot_bytes}")
        offset = self._offset(key.slot)
        buffer = self._buffer()
        is_straight = self._goes_straight(into)
        parts = [into, buffer[self._padded :]] if is_straight else [buffer]
        got = os.preadv(self._file, parts, offset)
        self._drop_cache(offset)
        if got != self._stride:
            return False
        payload = into if is_straight else buffer[: self.slot_bytes]
        record = bytes(buffer[self._padded : self._padded + RECORD_BYTES])
        if not self._keeper.holds(record, key.name, key.generation, payload):
            return False
        if not is_straight:
            into[:] = payload
        return True

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _offset(self, slot: int) -> int:
        if not 0 <= slot < self.capacity_slots:
            raise OSError(errno.EINVAL, f"slot {slot}; there are {self.capacity_slots}", str(self._path))
        return PAGE_BYTES + slot * self._stride

    def _buffer(self) -> memoryview:
        """The page-aligned buffer of the calling thread, `_stride` bytes."""
        try:
            made: memoryview = self._buffers.memory
        except AttributeError:
            made = self._buffers.memory = memoryview(mmap.mmap(-1, self._stride))
        return made

    def _goes_straight(self, data: memoryview) -> bool:
        if self._padded != self.slot_bytes:
            return False
        return not self.is_direct or int(np.frombuffer(data, dtype=np.uint8).ctypes.data) % PAGE_BYTES == 0

    def _drop_cache(self, offset: int) -> None:
        """Drop the slot from the system's cache, unless the cache is bypassed: the host pool has the bytes."""
        if not self.is_direct:
            os.posix_fadvise(self._file, offset, self._stride, os.POSIX_FADV_DONTNEED)

    # --- opening

    def _adopt(self) -> None:
        """Go on with what the file holds, or begin anew."""
        size = os.fstat(self._file).st_size
        header = os.pread(self._file, PAGE_BYTES, 0)
        problem = self._problem_of(header) if size else ""
        if problem:
            log.warning("disk tier begins anew", path=str(self._path), reason=problem)
            if header[: len(_MAGIC)] != _MAGIC:
                self._path.rename(unused_name(self._path, "foreign"))
                replacement = _open_locked(self._path)
                os.close(self._file)
                self._file = replacement
            os.ftruncate(self._file, 0)
        elif size > PAGE_BYTES + self.capacity_slots * self._stride:
            os.ftruncate(self._file, PAGE_BYTES + self.capacity_slots * self._stride)
        wanted = self._header()
        if problem or header[: len(wanted)] != wanted:
            page = wanted.ljust(PAGE_BYTES, b"\0")
            if os.pwrite(self._file, page, 0) != PAGE_BYTES:
                raise OSError(errno.ENOSPC, "no room for the slab's header", str(self._path))
            os.fsync(self._file)

    def _header(self) -> bytes:
        keeper = self._keeper
        head = _HEADER.pack(
            _MAGIC, keeper.rank, keeper.tp, self.slot_bytes, self.capacity_slots, keeper.fingerprint
        )
        return head + xxhash.xxh3_64_digest(head)

    def _problem_of(self, header: bytes) -> str:
        """Return why the file's slots are not this rank's; "": they are. The number of slots may differ."""
        end = _HEADER.size
        if len(header) < PAGE_BYTES:
            return "its header is cut off"
        if header[: len(_MAGIC)] != _MAGIC:
            return "it is no slab"
        if header[end : end + 8] != xxhash.xxh3_64_digest(header[:end]):
            return "its header is damaged"
        _, rank, tp, slot_bytes, _, fingerprint = _HEADER.unpack(header[:end])
        if (rank, tp) != (self._keeper.rank, self._keeper.tp):
            return f"it is of rank {rank} of {tp}"
        if slot_bytes != self.slot_bytes:
            return f"its slots have {slot_bytes} bytes, not {self.slot_bytes}"
        if fingerprint.rstrip(b"\0") != self._keeper.fingerprint.rstrip(b"\0"):
            return "it is of another model or configuration"
        return ""

    def _try_direct(self) -> bool:
        """Bypass the file system's cache, if that is possible; return whether it is."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._file, [memoryview(mmap.mmap(-1, PAGE_BYTES))], 0)
        except OSError:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
            return False
        return True


def _open_locked(path: Path) -> int:
    """Open a file that no other process uses until this one closes it or dies.

    Raises:
        OSError: it is in use, or cannot be made.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        deadline = time.monotonic() + _LOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "in use by another process", str(path)) from None
                time.sleep(_LOCK_EVERY_S)
            else:
                return file
    except BaseException:
        os.close(file)
        raise


_RECORD_MAGIC: Final = b"TLCHUNK1"
_RECORD_HEAD: Final = struct.Struct(f"<8sII{NAME_BYTES}sqQ")
"""Head of a chunk's record: magic, rank, ranks, name, generation, length of the payload; behind it the
checksum."""
_CHECKSUM_BYTES: Final = 16
RECORD_BYTES: Final = _RECORD_HEAD.size + _CHECKSUM_BYTES


class RecordKeeper(NamedTuple):
    """Makes and checks the records of one rank."""

    fingerprint: bytes
    """Digest of everything that KV depends on besides the tokens; it enters the checksum."""
    rank: int
    tp: int

    def record(self, name: bytes, generation: int, payload: memoryview) -> bytes:
        """Return the record of a payload, `RECORD_BYTES` bytes, which is kept with the payload."""
        head = _RECORD_HEAD.pack(_RECORD_MAGIC, self.rank, self.tp, name, generation, len(payload))
        return head + self._checksum(head, payload)

    def holds(self, record: bytes, name: bytes, generation: int, payload: memoryview) -> bool:
        """Return whether payload and record are what was written under this name and generation."""
        head = _RECORD_HEAD.pack(_RECORD_MAGIC, self.rank, self.tp, name, generation, len(payload))
        if record[: _RECORD_HEAD.size] != head:
            return False
        return record[_RECORD_HEAD.size :] == self._checksum(head, payload)

    def _checksum(self, head: bytes, payload: memoryview) -> bytes:
        """Return the checksum of a record: xxHash over fingerprint, head and payload. It is computed by updates of
        a state, because xxhash lets other threads run only during an update."""
        state = xxhash.xxh3_128(self.fingerprint)
        state.update(head)
        state.update(payload)
        return state.digest()
