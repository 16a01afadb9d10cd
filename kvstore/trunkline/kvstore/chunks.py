"""Chunks: their ids, their names, the positions at which their KV acts, and where their copies are.

Controllers, workers and routers share this vocabulary:

      BlockId, SlotId     where KV lies in the device pool, and in a tier below
      ChunkName           the same KV has the same name everywhere: a chain of hashes from a root
      Extent              which tokens of a block table a sequence sees, and at which positions
      pack_int32          the form in which tokens, blocks and extents travel and are hashed
      TieredChunk         the controller's record of one chunk: its copies, and the requests that need it

**Names.** A root's name stands for everything that KV depends on besides the tokens. Two chunks have the same name
only if model, precision, chunk size, tenant salt and every token up to their end agree, and, for chunks behind a
cut, the cut (`trunkline.kvstore.cuts.cut_name`). So equal names in any tiers of any processes mean the same KV.
Controllers tell routers by these names which chunks they have, with one exception: a module's text serves at any
place, but the names of its chunks depend on where it was computed. So its chunks are announced under the chain
that begins with the text's place, `chain(place, tokens, chunk_size)`, whose last name may be that of a partial
chunk.

**Extents.** A sequence's *layout* is its ordered list of extents over its block table. A plain sequence has one
open extent from position 0. Truncation, token discards and prompt modules make more of them: the KV stays where it
is and only the extents change.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, NewType, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.native_names import write_names

if TYPE_CHECKING:
    from trunkline.kvstore.next_use import Turn
    from trunkline.kvstore.shares import KvAccount

BlockId = NewType("BlockId", int)
"""A block of the device pool: room for one chunk of all layers. It has the same id on every rank."""

SlotId = NewType("SlotId", int)
"""A slot of a tier below the device. The controller hands it out, and it has the same id on every rank."""

NO_BLOCK: Final = BlockId(-1)
"""The value for "no block". As a chunk's block it means "not on the device"; as a slot in `write_kv`, "do not
store this token's KV"."""

NO_SLOT: Final = SlotId(-1)
"""The value for "no slot": the chunk has none in that tier."""

NO_PEER: Final = -1
"""The value for "no peer": no other group is known to have the chunk."""

OPEN_COUNT: Final = -1
"""Token count of an extent that grows with its sequence."""


class Extent(NamedTuple):
    """A part of a sequence's context: a token range of some consecutive entries of its block table.

    A key of the extent was rotated at the position at which it was computed; `shift` says how many
    positions later it acts now, so its position in this sequence is `base_position + i + shift`.
    """

    table_start: int
    """Index of the extent's first entry in the block table."""
    first_token: int
    """Offset of the first selected token within the block of entry `table_start`, in tokens."""
    token_count: int
    """Number of selected tokens; `OPEN_COUNT` for the last extent, which grows."""
    base_position: int
    """Position at which the first selected token was computed."""
    shift: int
    """Positions by which the extent acts later than it was computed; 0 is the fast path."""


PLAIN_LAYOUT: Final = (Extent(0, 0, OPEN_COUNT, 0, 0),)
"""The layout of an ordinary sequence: one extent over all of its tokens, from position 0, unshifted."""


def blocks_for(token_count: int, chunk_size: int) -> int:
    """Return how many blocks hold `token_count` tokens."""
    return -(-token_count // chunk_size)


Int32Array = NDArray[np.int32]


any_of: Final = np.logical_or.reduce
"""`any_of`, `all_of`, `least` and `largest` are `any()`, `all()`, `min()` and `max()` of an array of one dimension
without the functions in Python by which NumPy's methods come to them, and which no cache holds behind a step."""
all_of: Final = np.logical_and.reduce
least: Final = np.minimum.reduce
largest: Final = np.maximum.reduce


def pack_int32(values: Int32Array | Sequence[int] | Sequence[tuple[int, ...]]) -> bytes:
    """Return the values as little-endian int32 bytes, row by row. Single msgpack integers would cost 60 times as
    much."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes() if len(values) else b""


def unpack_int32(data: bytes, columns: int = 0) -> Int32Array:
    """Return the array that `pack_int32` packed, as a read-only view of `data`.

    Its shape is `[n]`, or `[n, columns]` where `columns` is given.

    Raises:
        ValueError: The length of `data` does not fit.
    """
    flat = np.frombuffer(data, dtype="<i4")
    return flat.reshape(-1, columns) if columns else flat


NAME_BYTES: Final = 16

TOKEN_BYTES: Final = 4
"""Size of a token id where tokens are packed (`pack_int32`)."""

_NAME_DTYPE: Final = np.dtype(f"V{NAME_BYTES}")
_NATIVE_FROM_CHUNKS: Final = 3
"""Smallest number of chunks whose names the compiled form makes sooner than Python."""
_MARKER_BYTES_MAX: Final = 64
"""Largest marker that the compiled form takes."""

ChunkName = NewType("ChunkName", bytes)


def root_name(model_fingerprint: bytes, dtype: str, chunk_size: int, salt: bytes = b"") -> ChunkName:
    """Return the name from which a tree's chain starts. `salt` separates tenants that must not share KV."""
    digest = blake2b(digest_size=NAME_BYTES, person=b"trunkline-root")
    for part in (model_fingerprint, dtype.encode(), str(chunk_size).encode(), salt):
        digest.update(len(part).to_bytes(4, "little") + part)
    return ChunkName(digest.digest())


def chunk_name(parent: bytes, token_bytes: bytes) -> ChunkName:
    """Return the name of the chunk of these tokens (little-endian int32) below `parent`.

    A parent's name, 16 bytes, is BLAKE2b's salt, so that a chunk of 64 tokens is two blocks of the hash.
    """
    return ChunkName(blake2b(token_bytes, digest_size=NAME_BYTES, salt=parent).digest())


def chain(start: bytes, token_bytes: bytes, chunk_size: int, marker: bytes = b"") -> list[ChunkName]:
    """Return the names of the chunks of these tokens, one below the other; the last chunk may be partial.

    Args:
        start: A root's name, or the place of a text: 16 bytes.
        marker: Hashed before the tokens of each chunk.
    """
    size = 4 * chunk_size
    count = -(-len(token_bytes) // size)
    if write_names is not None and count >= _NATIVE_FROM_CHUNKS and len(marker) <= _MARKER_BYTES_MAX:
        packed = np.empty(count, _NAME_DTYPE)
        write_names(start, marker, len(marker), token_bytes, len(token_bytes), size, packed.ctypes.data)
        return cast(list[ChunkName], packed.tolist())
    names: list[ChunkName] = []
    name = start
    for at in range(0, len(token_bytes), size):
        name = chunk_name(name, marker + token_bytes[at : at + size])
        names.append(ChunkName(name))
    return names


QueueKey = tuple[float, ...]
"""A waiting job's place in the queue, smallest first. Keys are unique and all of the same length."""


class CopyLocations:
    """The places of a chunk's copies.

    A copy is *ready* when it may be read. The copy of a planned save is ready at once, because loads are planned
    after it. The copy that a background move brings is ready when every rank has verified it; until then its slot
    is reserved.
    """

    __slots__ = ("arrived", "busy", "disk", "disk_ready", "host", "host_ready", "peer", "remote")

    def __init__(self) -> None:
        self.host = NO_SLOT
        self.disk = NO_SLOT
        self.host_ready = False
        self.disk_ready = False
        self.remote = False
        self.peer = NO_PEER
        """Number of the peer that is said to have the chunk in its host memory. Known only while a waiting job
        wants the chunk and nothing nearer has it."""
        self.busy = 0
        """Number of background moves in flight that read or write a copy of the chunk."""
        self.arrived = 0
        """Serial number of the chunk's arrival in the tiers, for the FIFO policy; 0: no tier has it."""

    @property
    def is_stored(self) -> bool:
        """Whether some tier below the device has a ready copy, or a peer is said to have one."""
        return self.host_ready or self.disk_ready or self.remote or self.peer != NO_PEER


class TieredChunk(CopyLocations):
    """A chunk with its copies, the requests that need it, and its place in a path of chunks."""

    __slots__ = (
        "account",
        "claims",
        "depth",
        "expires",
        "is_forgotten",
        "last_use",
        "name",
        "parent",
        "pins",
        "stored_below",
        "turns",
        "wants",
        "whole_wants",
    )

    def __init__(self, parent: TieredChunk | None, name: ChunkName) -> None:
        super().__init__()
        self.parent = parent
        """The chunk above this one in its path; None for a root, which has no copies."""
        self.name = name
        self.account: KvAccount | None = None
        """The tenant with a share of the tiers to which the chunk belongs; None: it belongs to no such tenant."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.last_use = 0.0
        self.expires = 0.0
        """Time at which the chunk's copies are given up; 0 or infinity: never. Set by `Directory.keep`."""
        self.claims = 0
        """Number of preempted sequences that want to find the chunk in host memory."""
        self.pins = 0
        self.stored_below = 0
        """Number of children that have a copy in a tier, or a descendant with a copy. These leave before this
        chunk."""
        self.is_forgotten = False
        """Whether the chunk's owner has removed it. Moves in flight may still use its slots."""
        self.wants: list[tuple[QueueKey, int]] = []
        """The waiting jobs that will use the chunk, in the order of the queue: (key, job)."""
        self.whole_wants = 0
        """Number of these jobs that will read the chunk in layers with a window, too."""
        self.turns: tuple[Turn, ...] = ()
        """The turns that have ended with the chunk and whose sessions may come back
        (`trunkline.kvstore.next_use`)."""

    @property
    def on_device(self) -> bool:
        """Whether the device has a copy of the chunk as well. The tree's node overrides this."""
        return False

    @property
    def token_count(self) -> int:
        """Number of tokens of the chunk, for costs and statistics. The tree's node overrides this."""
        return 1


ChunkT = TypeVar("ChunkT", bound=TieredChunk)


class ChangeLog(Generic[ChunkT]):
    """Collects chunks that may have changed tiers, until `take` is called. It collects none before `start`."""

    def __init__(self) -> None:
        self._items: dict[ChunkT, None] | None = None

    def start(self) -> None:
        """Begin to collect chunks. From then on the caller calls `take` regularly, because the log grows until it
        is taken."""
        if self._items is None:
            self._items = {}

    @property
    def is_on(self) -> bool:
        return self._items is not None

    def note(self, chunk: ChunkT) -> None:
        """Note that a chunk may be in other tiers than before. A needless note does no harm."""
        if self._items is not None:
            self._items[chunk] = None

    def __contains__(self, chunk: ChunkT) -> bool:
        return self._items is not None and chunk in self._items

    @property
    def is_empty(self) -> bool:
        """Whether nothing was noted since the last call of `take`."""
        return not self._items

    def take(self) -> dict[ChunkT, None]:
        """Return the chunks noted since the last call, in the order in which they were noted first."""
        taken = self._items
        if not taken:
            return {}
        self._items = {}
        return taken
