"""Counts what native ranges of a program's ops call and read (`KernelCounters`)."""

from __future__ import annotations

from trunkline.kernels.experts import Experts
from trunkline.kernels.ops import KernelCounters
from trunkline.kernels.program import Attend, Linear, Op, RmsNorm, StoreKv


class _Calls:
    """How often a range of ops calls what `KernelCounters` counts."""

    def __init__(self, ops: tuple[Op, ...]) -> None:
        self.runs = self.decode_runs = self.prefill_runs = 0
        """How often the range has run since the calls were read; how often with rows that decode, with prompts."""
        self.by_name: dict[str, int] = {}
        for op in ops:
            if name := _counted(op):
                self.by_name[name] = self.by_name.get(name, 0) + 1
        self.attends = sum(isinstance(op, Attend) for op in ops)

    def add_to(self, calls: dict[str, int]) -> None:
        """Add the calls that were not read yet."""
        added = {name: number * self.runs for name, number in self.by_name.items()}
        added["decode_attention"] = self.attends * self.decode_runs
        added["prefill_attention"] = self.attends * self.prefill_runs
        for name, number in added.items():
            if number:
                calls[name] = calls.get(name, 0) + number
        self.runs = self.decode_runs = self.prefill_runs = 0


class Counting:
    """Counts what native ranges of ops call and read."""

    def __init__(self, ops: tuple[Op, ...], counters: KernelCounters, token_bytes: int) -> None:
        """
        Args:
            token_bytes: bytes of a token's KV in a layer.
        """
        self._ops, self._counters, self._token_bytes = ops, counters, token_bytes
        self._calls: dict[tuple[int, int], _Calls] = {}
        counters.unread.append(self._add_to)

    def ran(self, start: int, stop: int, decode_tokens: int | None, prefill_tokens: int | None) -> None:
        """Count ops `[start, stop)`. Their calls are added up when they are asked for: every step comes here.

        Args:
            decode_tokens: Number of tokens that a layer reads for rows that decode; None: there are none.
            prefill_tokens: The same for prompts.
        """
        found = self._calls.get((start, stop))
        if found is None:
            found = self._calls[start, stop] = _Calls(self._ops[start:stop])
        counters, attends = self._counters, found.attends
        found.runs += 1
        if decode_tokens is not None:
            found.decode_runs += 1
            read = attends * decode_tokens
            counters.decode_tokens_read += read
            counters.decode_bytes_read += read * self._token_bytes
        if prefill_tokens is not None:
            found.prefill_runs += 1
            counters.prefill_tokens_read += attends * prefill_tokens

    def _add_to(self, calls: dict[str, int]) -> None:
        for found in self._calls.values():
            found.add_to(calls)


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
