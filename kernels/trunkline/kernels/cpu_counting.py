"""Counts what native ranges of a program's ops call and read (`KernelCounters`)."""

from __future__ import annotations

from trunkline.kernels.experts import Experts
from trunkline.kernels.ops import KernelCounters
from trunkline.kernels.program import Attend, Linear, Op, RmsNorm, StoreKv


class _Calls:
    """How often a range of ops calls what `KernelCounters` counts."""

    def __init__(self, ops: tuple[Op, ...]) -> None:
        self.by_name: dict[str, int] = {}
        for op in ops:
            if name := _counted(op):
                self.by_name[name] = self.by_name.get(name, 0) + 1
        self.attends = sum(isinstance(op, Attend) for op in ops)


class Counting:
    """Counts what native ranges of ops call and read."""

    def __init__(self, ops: tuple[Op, ...], counters: KernelCounters, token_bytes: int) -> None:
        """
        Args:
            token_bytes: bytes of a token's KV in a layer.
        """
        self._ops, self._counters, self._token_bytes = ops, counters, token_bytes
        self._calls: dict[tuple[int, int], _Calls] = {}
        self._decode_tokens: int | None = None
        self._prefill_tokens: int | None = None

    def take(self, decode_tokens: int | None, prefill_tokens: int | None) -> None:
        """Take the tokens that a layer of a step reads; None: nothing is decoded, or prefilled."""
        self._decode_tokens, self._prefill_tokens = decode_tokens, prefill_tokens

    def ran(self, start: int, stop: int) -> None:
        """Count ops `[start, stop)`."""
        found = self._calls.get((start, stop))
        if found is None:
            found = self._calls[start, stop] = _Calls(self._ops[start:stop])
        counters, attends = self._counters, found.attends
        calls = counters.calls
        for name, number in found.by_name.items():
            calls[name] = calls.get(name, 0) + number
        if attends and self._decode_tokens is not None:
            calls["decode_attention"] = calls.get("decode_attention", 0) + attends
            counters.decode_tokens_read += attends * self._decode_tokens
            counters.decode_bytes_read += attends * self._decode_tokens * self._token_bytes
        if attends and self._prefill_tokens is not None:
            calls["prefill_attention"] = calls.get("prefill_attention", 0) + attends
            counters.prefill_tokens_read += attends * self._prefill_tokens


def _counted(op: Op) -> str:
    match op:
        case RmsNorm():
            return "rms_norm" if op.residual is None else "add_rms_norm"
        case Linear():
            return "gated_linear" if op.gated else "linear"
        case StoreKv():
            return "write_kv"
        case Experts():
            return "experts"
    return ""
