"""The part of a model that each rank holds (PagedAttention §4.6). No torch.

Projections to heads and the first MLP matrices are split by output rows, those that come after them by input
columns. KV heads fewer than ranks are replicated. The vocabulary is padded to a multiple of the ranks. Experts are
whole, each rank has some consecutive ones, or are split like an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trunkline.worker.model.architecture import Qkv
from trunkline.worker.model.model_config import ModelConfig


class Piece(NamedTuple):
    """Consecutive output rows of a linear layer in the checkpoint."""

    name: str
    """Name of the tensor, without the ending `.weight` or `.bias`."""
    rows: slice


@dataclass(frozen=True)
class Shard:
    """The part of a model that one rank holds."""

    config: ModelConfig
    rank: int
    tp: int

    @property
    def heads(self) -> int:
        """Number of this rank's query heads."""
        return self.config.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Number of this rank's KV heads; ranks share a head if there are fewer than ranks."""
        return max(1, self.config.kv_heads // self.tp)

    @property
    def first_head(self) -> int:
        """Number in the model of this rank's first query head."""
        return self.rank * self.heads

    @property
    def first_kv_head(self) -> int:
        """Number in the model of this rank's first KV head."""
        return self.rank * self.config.kv_heads // self.tp  # the same for neighbours if there are too few

    @property
    def query_rows(self) -> slice:
        """This rank's rows in a matrix of all queries."""
        latent = self.config.latent
        return self.head_rows(latent.query if latent else self.config.head_dim)

    @property
    def out_columns(self) -> slice:
        """This rank's columns in attention's output matrix."""
        latent = self.config.latent
        return self.head_rows(latent.value if latent else self.config.head_dim)

    def head_rows(self, width: int) -> slice:
        """This rank's rows in a matrix that has `width` for each query head."""
        return slice(self.first_head * width, (self.first_head + self.heads) * width)

    @property
    def key_rows(self) -> slice:
        """This rank's rows in a matrix of all keys or all values."""
        width = self.config.head_dim
        return slice(self.first_kv_head * width, (self.first_kv_head + self.kv_heads) * width)

    def mlp_rows(self, width: int) -> slice:
        """This rank's rows in the first matrix of an MLP of that width."""
        return slice(self.rank * width // self.tp, (self.rank + 1) * width // self.tp)

    @property
    def experts(self) -> range:
        """The experts of this rank: all if they are split, else spread as evenly as their number allows."""
        mixture = self.config.mixture
        count = mixture.experts if mixture else 0
        if mixture and mixture.is_split:
            return range(count)
        return range(self.rank * count // self.tp, (self.rank + 1) * count // self.tp)

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """Slopes of ALiBi of this rank's query heads."""
        return self.config.alibi_slopes[self.first_head : self.first_head + self.heads]

    @property
    def vocab_size(self) -> int:
        """Number of rows of embedding and head per rank, padding included."""
        return -(-self.config.vocab_size // self.tp)

    @property
    def vocab_start(self) -> int:
        """Token id of the first row of embedding and head on this rank."""
        return self.rank * self.vocab_size

    @property
    def vocab_rows(self) -> slice:
        """The rows of embedding and head that exist: fewer than `vocab_size` on the last ranks if the vocabulary
        was padded."""
        stop = min(self.config.vocab_size, self.vocab_start + self.vocab_size)
        return slice(min(self.vocab_start, stop), stop)

    def qkv_pieces(self) -> list[Piece]:
        """The places of this rank's queries, keys and values, in this order; names without the layer's prefix."""
        config, names = self.config, self.config.architecture.names
        queries, keys = self.query_rows, self.key_rows
        layout = config.architecture.qkv
        if layout is Qkv.SEPARATE:
            pieces = [Piece(names.query, queries), Piece(names.key, keys), Piece(names.value, keys)]
            return [piece for piece in pieces if piece.name]
        if layout is Qkv.STACKED:
            key_start = config.heads * config.head_dim
            value_start = key_start + config.kv_heads * config.head_dim
            found = [queries, _moved(keys, key_start), _moved(keys, value_start)]
        else:
            found = self._grouped_rows()
        return [Piece(names.qkv, rows) for rows in _joined(found)]

    def parted_rows(self) -> list[int]:
        """Return the rows of queries, keys and values in the order in which the pairs that rotary positions turn
        are half of the rotated part apart, where the checkpoint has them side by side. Scores do not change:
        queries and keys are reordered alike."""
        config = self.config
        rope = next((own.rope for own in config.attention if own.rope), None)
        turned, width = rope.rotary_dim if rope else 0, config.head_dim
        head = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]
        turning = self.heads + self.kv_heads
        values = range(turning * width, (turning + self.kv_heads) * width)
        return [*(start * width + row for start in range(turning) for row in head), *values]

    def of_layer(self, layer: int) -> Shard:
        """Return the part that this rank holds of a layer's own heads."""
        return Shard(self.config.of_layer(layer), self.rank, self.tp)

    def latent_query_rows(self) -> list[int]:
        """Return the rows of `query_rows` in the order that kernels take: of each head the rotary part first."""
        sizes = self.config.latent
        assert sizes is not None
        order = sizes.query_order(self.config.architecture.interleaved)
        return [head * sizes.query + row for head in range(self.heads) for row in order]

    def filled_rows(self, layer: int) -> list[int] | None:
        """Return which rows of `qkv_pieces` of a layer's own heads the pool's heads have, -1 where they have
        zeros; None: they are the same."""
        given = self.config.attention[layer].heads
        if given is None:
            return None
        own, width = self.of_layer(layer), self.config.head_dim
        copies = self.kv_heads // own.kv_heads
        stored = self.kv_heads if layer < self.config.kv_layers else 0
        keys = [self.heads + head // copies for head in range(stored)]
        values = keys if given.keys_are_values else [own.kv_heads + head for head in keys]
        found: list[int] = []
        for head in (*range(self.heads), *keys, *values):
            start = head * given.head_dim
            found += [*range(start, start + given.head_dim), *([-1] * (width - given.head_dim))]
        return found

    def filled_columns(self, layer: int) -> list[int] | None:
        """Return the same of the columns of attention's output matrix."""
        given = self.config.attention[layer].heads
        if given is None:
            return None
        zeros = [-1] * (self.config.head_dim - given.head_dim)
        own = range(given.head_dim)
        return [x for head in range(self.heads) for x in (*(head * len(own) + i for i in own), *zeros)]

    def _grouped_rows(self) -> list[slice]:
        """Return this rank's rows in a matrix that has, for each KV head, its queries, its key and its value."""
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
    """Return the slices; those that follow each other are joined into one."""
    joined = parts[:1]
    for part in parts[1:]:
        if part.start == joined[-1].stop:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
