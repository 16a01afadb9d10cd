"""What the bytes of a chunk are: the one description that tiers, travel, kernels and fingerprints read.

A chunk in plain order is `[layers, bands, heads, tokens, row]`. A *row* is what one head keeps of one token in a
band: numbers of one or several types behind each other. So every *head* of a band is one stretch of bytes, and so
is every layer:

      layer 0                                             layer 1
      keys                      values                    keys
      head 0       head 1       head 0       head 1       ...
      row row row  row row row  row row row  row row row         row: 64 bfloat16, or 64 int8 or fp8, a scale

Ranks divide the heads and nothing else (`trunkline.kvstore.shards`); a chunk of one head is whole on every rank.
Latent attention has one band and one head: what is kept of a token is at once the key and the value of all heads.
docs/decisions/0018 says what else fits: pools per window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

KEYS_AND_VALUES: Final = ("keys", "values")
"""The bands of attention with keys and values of its own."""
LATENTS: Final = ("latents",)
"""The only band of latent attention."""
NUMBER_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "fp8": 1}
"""Bytes of a number, by the name of its type. fp8 is e4m3: a sign, four bits of exponent, three of fraction."""
KV_DTYPES: Final = ("auto", "int8", "fp8")
"""In which types KV can be kept: that in which it is computed, or 8 bits with a scale for each head and token
(of a latent two: its rotary part, which is kept as pairs of int8, has one of its own)."""
INT8_MOST: Final = 512
"""Most int8 of a row with one scale: sums of their products fit 32 bits."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of one type behind each other in a row."""

    name: str
    """What they are: "vector", "scale"; "rotary", "latent"; "rotary_high", "rotary_low", "scales"."""
    dtype: str
    """One of `NUMBER_BYTES`."""
    count: int

    @property
    def size(self) -> int:
        """Their bytes."""
        return self.count * NUMBER_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """The form of a chunk's KV, or of one rank's part of it."""

    layers: int
    heads: int
    """KV heads: the model's for the whole chunk, the rank's for its part."""
    chunk_size: int
    """Tokens of a chunk."""
    row: tuple[Numbers, ...]
    """What a head keeps of a token in a band, behind each other. The first are the vector's numbers."""
    computed: str
    """Type in which KV is computed, before it is rounded to the types of the row: also that of what reads it."""
    bands: tuple[str, ...] = KEYS_AND_VALUES
    """What is kept of a token in each layer."""
    positions: str = ""
    """How positions enter, with all parameters, in any unambiguous form. The model's configuration says this as
    well, but here the program's reading of it counts. "": it is not said here, as it is the same for everyone
    concerned."""
    shifts: bool = True
    """Whether a chunk may act at other positions than those it was computed at, by turning what reads it: its
    bytes stay as they are."""

    @property
    def row_bytes(self) -> int:
        total = 0
        for numbers in self.row:
            total += numbers.count * NUMBER_BYTES[numbers.dtype]
        return total

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one band of a layer: what lies together whatever ranks divide."""
        return self.chunk_size * self.row_bytes

    @property
    def stretches(self) -> int:
        """Number of stretches in which all heads lie side by side: the bands of all layers."""
        return self.layers * len(self.bands)

    @property
    def layer_bytes(self) -> int:
        return len(self.bands) * self.heads * self.head_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunk, or of the rank's part of it, in every tier and on the wire."""
        return self.layers * self.layer_bytes

    @property
    def layer_token_bytes(self) -> int:
        """Bytes that a layer's attention reads of one token."""
        return len(self.bands) * self.heads * self.row_bytes

    @property
    def element(self) -> str:
        """Type of the tensors that hold chunks: that of the rows' numbers; of those in 8 bits with a scale, bytes:
        int8, or uint8 if they are floats."""
        types = {numbers.dtype for numbers in self.row}
        if len(types) == 1:
            return types.pop()
        return "int8" if self.row[0].dtype == "int8" else "uint8"

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a chunk as a tensor of `element`: `[layers, bands, heads, chunk_size, row]`."""
        row = self.row_bytes // NUMBER_BYTES[self.element]
        return self.layers, len(self.bands), self.heads, self.chunk_size, row

    @property
    def is_quantised(self) -> bool:
        """Whether a row's numbers are rounded, with their scale behind them."""
        return self.row[0].dtype != self.computed

    @property
    def latent(self) -> int:
        """Numbers of a latent; 0: there is none."""
        return sum(numbers.count for numbers in self.row if numbers.name == "latent")

    @property
    def name(self) -> str:
        """The types of computation and KV in few words. It is a part of chunks' names, so KV of another format is
        never found under them."""
        return type_name(self.computed, self.row[0].dtype if self.is_quantised else "auto")

    @property
    def text(self) -> str:
        """Everything that the bytes depend on, unambiguously."""
        row = "+".join(f"{numbers.name}:{numbers.dtype}x{numbers.count}" for numbers in self.row)
        sizes = f"{self.layers}x{','.join(self.bands)}x{self.heads}x{self.chunk_size}"
        return f"{sizes} {row} of {self.computed} at {self.positions}"

    def of_rank(self, tp: int) -> ChunkFormat:
        """Return the format of the part that each of `tp` ranks has. With more ranks than heads each has one."""
        return self.with_heads(max(1, self.heads // tp))

    def with_heads(self, heads: int) -> ChunkFormat:
        """Return the format of a part with so many heads."""
        return replace(self, heads=heads)


def type_name(dtype: str, kv_dtype: str) -> str:
    """Return `ChunkFormat.name` of KV that is computed in one type and kept in another ("auto": the same)."""
    return dtype if kv_dtype == "auto" else f"{dtype} with {kv_dtype} KV"


def kv_format(
    sizes: tuple[int, int, int, int],
    dtype: str,
    kv_dtype: str = "auto",
    *,
    positions: str = "",
    shifts: bool = True,
) -> ChunkFormat:
    """Return the format of chunks with keys and values.

    Args:
        sizes: Layers, KV heads, tokens of a chunk, numbers of a head's key or value.
        dtype: The type that KV is computed in.
        kv_dtype: One of `KV_DTYPES`.
    """
    layers, heads, chunk_size, head_dim = sizes
    row: tuple[Numbers, ...] = (Numbers("vector", dtype, head_dim),)
    if kv_dtype != "auto":
        row = (Numbers("vector", kv_dtype, head_dim), Numbers("scale", "float32", 1))
    return ChunkFormat(layers, heads, chunk_size, row, dtype, positions=positions, shifts=shifts)


def latent_format(
    sizes: tuple[int, int, int, int],
    dtype: str,
    kv_dtype: str = "auto",
    *,
    positions: str = "",
    shifts: bool = True,
) -> ChunkFormat:
    """Return the format of chunks of latent attention (DeepSeek-V2, §2.1): a row has the rotary part of a key,
    which all heads share, and the latent, of which the rest of each head's key and its value are made.

    Args:
        sizes: Layers, tokens of a chunk, numbers of the rotary part, numbers of the latent.
        dtype: The type that KV is computed in.
        kv_dtype: One of `KV_DTYPES`. In int8 each number of the rotary part has two
            (`trunkline.kernels.quantised_kv`).
    """
    layers, chunk_size, rotary, latent = sizes
    row: tuple[Numbers, ...] = (Numbers("rotary", dtype, rotary), Numbers("latent", dtype, latent))
    if kv_dtype == "int8":
        row = (
            Numbers("rotary_high", "int8", rotary),
            Numbers("rotary_low", "int8", rotary),
            Numbers("latent", "int8", latent),
            Numbers("scales", "float32", 2),
        )
    return ChunkFormat(layers, 1, chunk_size, row, dtype, LATENTS, positions=positions, shifts=shifts)
