"""The part of a model that each rank of a tensor-parallel group holds (PagedAttention §4.6). No torch.

Projections to heads and the first MLP matrices are split by output rows, those that come after them by input
columns. KV heads fewer than ranks are replicated. The vocabulary is padded to a multiple of the ranks. Experts
are whole: each rank has a consecutive few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trunkline.worker.errors import ParallelismError
from trunkline.worker.model.architecture import Mlp, Qkv
from trunkline.worker.model.model_config import ModelConfig


class Piece(NamedTuple):
    """Consecutive output rows of a linear layer in the checkpoint."""

    name: str
    """Of the tensor, without the ending."""
    rows: slice


@dataclass(frozen=True)
class Shard:
    """One rank's part."""

    config: ModelConfig
    rank: int
    tp: int

    @property
    def heads(self) -> int:
        return self.config.heads // self.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.config.kv_heads // self.tp)

    @property
    def first_head(self) -> int:
        return self.rank * self.heads

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.config.kv_heads // self.tp  # the same for neighbours if there are too few

    @property
    def query_rows(self) -> slice:
        """Of a matrix of all queries; also the columns that attention's output matrix has of this rank's heads."""
        width = self.config.head_dim
        return slice(self.first_head * width, (self.first_head + self.heads) * width)

    @property
    def key_rows(self) -> slice:
        """Of a matrix of all keys or all values."""
        width = self.config.head_dim
        return slice(self.first_kv_head * width, (self.first_kv_head + self.kv_heads) * width)

    @property
    def mlp_rows(self) -> slice:
        width = self.config.intermediate_size // self.tp
        return slice(self.rank * width, (self.rank + 1) * width)

    @property
    def experts(self) -> range:
        """Spread as evenly as their number allows."""
        count = self.config.experts
        return range(self.rank * count // self.tp, (self.rank + 1) * count // self.tp)

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        return self.config.alibi_slopes[self.first_head : self.first_head + self.heads]

    @property
    def vocab_size(self) -> int:
        """Rows of embedding and head per rank, padding included."""
        return -(-self.config.vocab_size // self.tp)

    @property
    def vocab_start(self) -> int:
        """Token id of the first row."""
        return self.rank * self.vocab_size

    @property
    def vocab_rows(self) -> slice:
        """The rows that exist: fewer than `vocab_size` on the last ranks if the vocabulary was padded."""
        stop = min(self.config.vocab_size, self.vocab_start + self.vocab_size)
        return slice(min(self.vocab_start, stop), stop)

    def qkv_pieces(self) -> list[Piece]:
        """Where this rank's queries, keys and values are, in this order; names without the layer's prefix."""
        config, names = self.config, self.config.architecture.names
        queries, keys = self.query_rows, self.key_rows
        layout = config.architecture.qkv
        if layout is Qkv.SEPARATE:
            return [Piece(names.query, queries), Piece(names.key, keys), Piece(names.value, keys)]
        if layout is Qkv.STACKED:
            key_start = config.heads * config.head_dim
            value_start = key_start + config.kv_heads * config.head_dim
            found = [queries, _moved(keys, key_start), _moved(keys, value_start)]
        else:
            found = self._grouped_rows()
        return [Piece(names.qkv, rows) for rows in _joined(found)]

    def _grouped_rows(self) -> list[slice]:
        """Of a matrix that has for each KV head its queries, its key and its value."""
        group, width = self.config.heads // self.config.kv_heads, self.config.head_dim
        kv_heads = range(self.first_kv_head, self.first_kv_head + self.kv_heads)
        heads = range(self.first_head, self.first_head + self.heads)
        indices = [head // group * (group + 2) + head % group for head in heads]
        indices += [head * (group + 2) + group for head in kv_heads]
        indices += [head * (group + 2) + group + 1 for head in kv_heads]
        return [slice(index * width, (index + 1) * width) for index in indices]


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


def _joined(parts: list[slice]) -> list[slice]:
    """With neighbours that follow each other as one."""
    joined = parts[:1]
    for part in parts[1:]:
        if part.start == joined[-1].stop:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def check_parallelism(config: ModelConfig, tp: int) -> None:
    """Whether `tp` ranks can share the model. The vocabulary is padded, so it may have any size.

    Raises:
        ParallelismError: naming what does not divide, and what would.
    """
    if tp < 1:
        raise ParallelismError(f"tp is {tp}; it must be at least 1")
    reasons = _obstacles(config, tp)
    if not reasons:
        return
    allowed = [n for n in range(1, config.heads + 1) if not _obstacles(config, n)]
    raise ParallelismError(
        f"cannot split {' and '.join(reasons)} over {tp} ranks; "
        f"possible for this model: {', '.join(map(str, allowed))}"
    )


def _obstacles(config: ModelConfig, tp: int) -> list[str]:
    reasons = []
    if config.heads % tp:
        reasons.append(f"{config.heads} attention heads")
    if config.kv_heads % tp and tp % config.kv_heads:  # fewer KV heads than ranks: replicated
        reasons.append(f"{config.kv_heads} KV heads")
    if config.architecture.mlp is Mlp.EXPERTS:
        if config.experts < tp:
            reasons.append(f"{config.experts} experts")
    elif config.intermediate_size % tp:
        reasons.append(f"an MLP of {config.intermediate_size}")
    return reasons
