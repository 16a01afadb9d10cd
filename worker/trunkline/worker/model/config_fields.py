"""Helpers that the readers of all families share: fields of a config.json, rotary positions, slopes of ALiBi. No
torch.

A family gives fields names of its own; they are checked where they are read. Mistakes of the file's author are
`ValueError` or `KeyError`, which `families` reports with the path; what is right but not implemented is
`UnsupportedModelError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, floor, log, log2, sqrt
from typing import Any, Final, TypeVar

from trunkline.worker.errors import UnsupportedModelError
from trunkline.worker.model.model_config import RopeConfig

Number = TypeVar("Number", int, float)

ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""The name of each activation in `ModelConfig`, by its name in config.json."""


class Fields:
    """Typed access by the names that most families use."""

    def __init__(self, raw: Mapping[str, Any], **spelling: str) -> None:
        """
        Args:
            raw: the parsed file.
            spelling: the family's own name of a field, by the usual name.
        """
        self._raw = raw
        self._spelling = spelling

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field as it is; absent and null are the same."""
        value = self._raw.get(self._spelling.get(name, name))
        if value is None:
            value = self._raw.get(name)
        return default if value is None else value

    def spelled(self, name: str) -> str:
        """Return the family's own name of a field, for messages."""
        return self._spelling.get(name, name)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise KeyError(self.spelled(name))
        return self._read(int, name, value, "a whole number")

    def number(self, name: str, default: float) -> float:
        return self._read(float, name, self.get(name, default), "a number")

    def _read(self, read: Callable[[Any], Number], name: str, value: object, what: str) -> Number:
        try:
            return read(value)
        except (TypeError, ValueError):
            raise ValueError(f"{self.spelled(name)} is {value!r}; it should be {what}") from None

    def nullable(self, name: str, default: float) -> float:
        """Return a field that is a number; 0 if it is null."""
        return float(self._raw.get(name, default) or 0.0)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.get(name, default))

    def refuse(self, name: str, *allowed: object) -> None:
        """
        Raises:
            UnsupportedModelError: the field has a value other than those, absence or null.
        """
        value = self.get(name)
        if value is not None and value not in allowed:
            only = " or ".join(repr(x) for x in allowed) or "nothing"
            raise UnsupportedModelError(f"{name} is {value!r}; supported for this architecture: {only}")

    def activation(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        """Return the activation in `ModelConfig`'s words."""
        given = str(self.get(name, default))
        found = ACTIVATIONS.get(given)
        if found not in allowed:
            names = ", ".join(key for key, value in ACTIVATIONS.items() if value in allowed)
            raise UnsupportedModelError(
                f"{self._spelling.get(name, name)} {given!r} is not supported; supported: {names}"
            )
        return found


def read_rope(fields: Fields, head_dim: int, theta: float = 10000.0, fraction: float = 1.0) -> RopeConfig:
    """Return the rotary positions, from either form: `rope_parameters` (with the theta inside) and `rope_theta`
    beside `rope_scaling`.

    Args:
        theta: the value where the file has none.
        fraction: share of a head that is rotated, where the file does not say.
    """
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    outside = fields.get("original_max_position_embeddings")  # Phi-3's, which counts more than one inside
    if outside is not None:
        given = {**given, "original_max_position_embeddings": outside}
    own = given.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    rotary_dim = int(head_dim * float(fraction if own is None else own))
    base = float(given.get("rope_theta") or fields.get("rope_theta") or theta)
    return make_rope(given, rotary_dim, base, fields.whole("max_position_embeddings", 2048))


def make_rope(given: Mapping[str, Any], rotary_dim: int, theta: float, max_positions: int) -> RopeConfig:
    """Return the rotary positions with these parameters, whose own theta does not count."""
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if rotary_dim % 2 or rotary_dim < 2:
        raise ValueError(f"{rotary_dim} dimensions of a head are rotated; it must be an even number")
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    original = int(given.get("original_max_position_embeddings") or max_positions)
    if kind == "longrope":
        return _longrope(given, RopeConfig(theta, rotary_dim, kind, 1.0, original), max_positions)
    factor = float(given["factor"])
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, kind, factor)
    if kind == "llama3":
        return RopeConfig(
            theta,
            rotary_dim,
            kind,
            factor,
            original,
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
        )
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        scale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = yarn_scale(factor)
        if scale and all_dim:
            attention_factor = yarn_scale(factor, float(scale)) / yarn_scale(factor, float(all_dim))
    return RopeConfig(
        theta,
        rotary_dim,
        "yarn",
        factor,
        original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
        truncate=bool(given.get("truncate", True)),
    )


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's temperature for a context that is `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0


def _longrope(given: Mapping[str, Any], rope: RopeConfig, max_positions: int) -> RopeConfig:
    """Read the rest of LongRoPE's parameters. The model's own context chooses the factors; a shorter one that is
    served may choose others (`ModelConfig.serving`)."""
    factors = {name: tuple(map(float, given[name])) for name in ("short_factor", "long_factor")}
    for name, values in factors.items():
        if len(values) != rope.rotary_dim // 2 or min(values) <= 0:
            raise ValueError(
                f"{name} has {len(values)} entries; {rope.rotary_dim // 2} positive ones are expected"
            )
    ratio = float(given.get("factor") or max_positions / rope.original_max_positions)
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if ratio <= 1 else sqrt(1 + log(ratio) / log(rope.original_max_positions))
    return replace(
        rope,
        factor=ratio,
        attention_factor=float(attention_factor),
        short_factors=factors["short_factor"],
        long_factors=factors["long_factor"],
        is_long=max_positions > rope.original_max_positions,
    )


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of Bloom and Falcon: the largest power of two below, then every other slope of the next.

    Slopes are rounded to bfloat16, as Falcon does. It also rounds their products with positions, an error that
    depends on absolute positions and is not imitated; there is none below position 256 with 1, 2, 4 or 8 heads.
    """
    whole = 2 ** floor(log2(heads))
    base, between = 2.0 ** -(8 / whole), 2.0 ** -(4 / whole)
    slopes = [base**power for power in range(1, whole + 1)]
    slopes += [between**power for power in range(1, 2 * (heads - whole), 2)]
    return tuple(map(_bfloat16, slopes))


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of MPT: those of the power of two above, every other slope first, cut off."""
    whole = 2 ** ceil(log2(heads))
    slopes = [2.0 ** -(8 * power / whole) for power in range(1, whole + 1)]
    if whole != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    return tuple(slopes)


def _bfloat16(value: float) -> float:
    """Round to bfloat16: to nearest, ties to even; `value` is finite."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)
