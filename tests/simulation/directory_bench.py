"""A directory with its owner, clock and steps, small enough to write rules down as tests."""

from __future__ import annotations

from trunkline.kvstore.chunks import ChunkName, TieredChunk
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.tier_moves import Move, MoveStatus
from trunkline.kvstore.tier_policy import DirectoryConfig


class Chunk(TieredChunk):
    """A chunk that may be on the device, too."""

    __slots__ = ("_on_device",)

    def __init__(self, parent: TieredChunk | None, name: str) -> None:
        super().__init__(parent, ChunkName(name.encode().ljust(16)))
        self._on_device = False

    @property
    def on_device(self) -> bool:
        return self._on_device

    def place(self, on_device: bool = True) -> None:
        self._on_device = on_device

    def __repr__(self) -> str:
        return self.name.decode().strip()


class Bench:
    """A directory, its clock and its steps."""

    def __init__(self, host: int, disk: int = 0, **options: object) -> None:
        options.setdefault("write_behind", False)
        options.setdefault("host_free", 1)
        self.directory: Directory[Chunk] = Directory(
            DirectoryConfig(host_slots=host, disk_slots=disk, **options)  # type: ignore[arg-type]
        )
        self.root = Chunk(None, "root")
        self.now = 0.0
        self.step = 0

    def path(self, name: str, length: int = 1, parent: Chunk | None = None) -> list[Chunk]:
        """New chunks below the root (or `parent`), just used."""
        made: list[Chunk] = []
        for i in range(length):
            made.append(Chunk(made[-1] if made else parent or self.root, f"{name}{i}"))
        self.now += 1.0
        self.directory.used(made, self.now)
        return made

    def save(self, *chunks: Chunk, forced: bool = False) -> bool:
        """Each in a plan of its own."""
        done = []
        for chunk in chunks:
            self.step += 1
            done.append(self.directory.save(chunk, self.step, forced=forced) is not None)
        self.directory.check()
        return all(done)

    def orders(self) -> list[Move[Chunk]]:
        moves = self.directory.moves(self.now)
        self.directory.check()
        return moves

    def end(self, moves: list[Move[Chunk]], status: MoveStatus = MoveStatus.DONE) -> None:
        for move in moves:
            self.directory.done(move.id, status, self.now)
            self.directory.check()

    def settle(self) -> list[str]:
        """Carry out whatever is ordered until nothing is; what it was."""
        said = []
        while moves := self.orders():
            said += [f"{'>' if move.is_write else '<'}{move.chunk!r}" for move in moves]
            self.end(moves)
        return said

    def on_disk(self, *chunks: Chunk) -> None:
        """Put chunks on disk, nowhere else."""
        generation = self.directory.config.first_generation
        for chunk in chunks:
            slot = next(s for s in self.directory.copies.disk.free_slots())
            assert self.directory.restore(chunk, slot, generation, self.now)


def where(*chunks: Chunk) -> str:
    """ "h" host, "d" disk, "b" both, "r" remote only, "-" nowhere; one letter each."""
    return "".join(
        "b"
        if c.host_ready and c.disk_ready
        else "h"
        if c.host_ready
        else "d"
        if c.disk_ready
        else "r"
        if c.remote
        else "-"
        for c in chunks
    )
