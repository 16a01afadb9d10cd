"""The adapters of a rank: read beside the steps, and given to the program between two of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import structlog
import torch

from trunkline.controller.reports import TEXT_CHARACTERS_MAX, AdapterReady
from trunkline.kernels.adapters import AdapterLayers
from trunkline.kernels.ops import Kernels
from trunkline.worker.errors import AdapterError
from trunkline.worker.messages import LoadAdapter
from trunkline.worker.model.adapter_weights import load_adapter
from trunkline.worker.model.adapters import read_adapter
from trunkline.worker.model.shard import Shard

log = structlog.get_logger()


class AdapterStore:
    """Reads adapters, one after the other. Not thread-safe."""

    def __init__(
        self,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        make_kernels: Callable[[], Kernels],
        take: Callable[[bytes, AdapterLayers | None], None],
    ) -> None:
        """
        Args:
            make_kernels: Makes kernels for the thread that reads, of the kind of the program's.
            take: Gives the program an adapter, or takes one away (None).
        """
        self._shard, self._dtype, self._device = shard, dtype, device
        self._make_kernels = make_kernels
        self._take = take
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[tuple[LoadAdapter, Future[tuple[bytes, AdapterLayers]]]] = []
        self.keys: set[bytes] = set()
        """The adapters that sequences may use."""

    @property
    def is_loading(self) -> bool:
        """Whether `poll` will have a report soon."""
        return bool(self._pending)

    def load(self, order: LoadAdapter) -> None:
        """Begin to read an adapter."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "adapters")
        self._pending.append((order, self._pool.submit(self._read, order)))

    def unload(self, key: bytes) -> None:
        """Forget an adapter; no sequence uses it."""
        if key in self.keys:
            self.keys.remove(key)
            self._take(key, None)

    def poll(self) -> list[AdapterReady]:
        """Return which adapters can be used or were refused since the last call, in their order. Does not wait."""
        reports = []
        while self._pending and self._pending[0][1].done():
            reports.append(self._report(*self._pending.pop(0)))
        return reports

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _read(self, order: LoadAdapter) -> tuple[bytes, AdapterLayers]:
        adapter = read_adapter(order.name, Path(order.path), self._shard.config, order.rank_max)
        layers = load_adapter(adapter, self._shard, self._dtype, self._device, self._make_kernels())
        return adapter.key, layers

    def _report(self, order: LoadAdapter, done: Future[tuple[bytes, AdapterLayers]]) -> AdapterReady:
        rank, ticket, name = self._shard.rank, order.ticket, order.name
        try:
            key, layers = done.result()
        except AdapterError as error:
            return AdapterReady(rank, ticket, problem=str(error)[:TEXT_CHARACTERS_MAX])
        except Exception as error:  # whatever its files make of torch or of us: the rank goes on without it
            log.error("an adapter could not be loaded", name=name, error=str(error), exc_info=True)
            problem = f"adapter {name!r} cannot be loaded: {type(error).__name__}: {error}"
            return AdapterReady(rank, ticket, problem=problem[:TEXT_CHARACTERS_MAX])
        self._take(key, layers)
        self.keys.add(key)
        log.info("adapter loaded", name=name, layers=len(layers))
        return AdapterReady(rank, ticket, key)
