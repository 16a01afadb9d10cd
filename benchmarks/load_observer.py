"""A running cluster's KV memory and batch, many times a second.

The router's /metrics repeats what the controller last told the router, once a second: too rarely for a peak.
So the observer does what a router does, on the controller's own socket (docs/protocol.md): it sends `Ping`s and
collects the `State`s that answer them. It submits nothing, so that no output is ever sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import zmq
import zmq.asyncio

from trunkline.controller.messages import Ping
from trunkline.deploy.supervisor.run_folder import base_folder
from trunkline.router.messages import RouterMessage, State
from trunkline.worker.model.families import read_model_config

SAMPLE_SECONDS: Final = 0.05
ANSWER_SECONDS_MAX: Final = 10.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the supervisor's run folder says of the cluster it started."""

    endpoint: str
    """Where its controller listens for routers."""
    chunk_size: int
    block_bytes: int
    """One block on all ranks together."""


def find_cluster(supervisor_pid: int) -> Cluster:
    """The cluster that `trunkline serve` with this process id has started.

    Raises:
        SystemExit: there is none, or it has several groups.
    """
    configs: dict[str, list[dict[str, Any]]] = {"controller": [], "worker": []}
    for path in base_folder().glob("trunkline-????????/*.json"):
        role = path.stem.split("-")[0]
        with contextlib.suppress(FileNotFoundError):  # of another cluster, which has just ended
            if role in configs and (config := json.loads(path.read_bytes()))["parent_pid"] == supervisor_pid:
                configs[role].append(config)
    if len(configs["controller"]) != 1 or not configs["worker"]:
        raise SystemExit(f"process {supervisor_pid} has {len(configs['controller'])} controllers; 1 is needed")
    worker, tp = configs["worker"][0], len(configs["worker"])
    model = read_model_config(Path(worker["model"]))
    block_bytes = tp * model.chunk_format(worker["chunk_size"], worker["dtype"]).of_rank(tp).chunk_bytes
    return Cluster(configs["controller"][0]["router_endpoint"], worker["chunk_size"], block_bytes)


@dataclass(frozen=True, slots=True)
class Sample:
    """A controller's state and when it came, on the clock of `time.perf_counter`."""

    at: float
    state: State

    @property
    def blocks(self) -> int:
        """Blocks that running requests hold; those that are only cached could be given up at any time."""
        return self.state.blocks_total - self.state.blocks_free - self.state.blocks_cached


class Observer:
    """Samples a controller's state for the time of an `async with` block."""

    def __init__(self, cluster: Cluster) -> None:
        self.samples: list[Sample] = []
        self._endpoint = cluster.endpoint

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(self._endpoint)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._socket.close(0)
        self._context.term()
        if not self._task.cancelled() and (failure := self._task.exception()) is not None:
            raise failure

    async def next_sample(self) -> Sample:
        """A sample that was asked for after this call.

        Raises:
            SystemExit: the controller does not answer.
        """
        seen, deadline = len(self.samples), time.perf_counter() + ANSWER_SECONDS_MAX
        while len(self.samples) < seen + 2:  # the next may have been on its way
            if self._task.done() or time.perf_counter() > deadline:
                raise SystemExit(f"the controller at {self._endpoint} does not answer the observer")
            await asyncio.sleep(SAMPLE_SECONDS / 5)
        return self.samples[-1]

    async def _watch(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        decoder: msgspec.msgpack.Decoder[RouterMessage] = msgspec.msgpack.Decoder(RouterMessage)
        number = 0
        while True:
            number += 1
            await self._socket.send(encoder.encode(Ping(number)))
            frames = await self._socket.recv_multipart()
            message = decoder.decode(frames[-1])
            if isinstance(message, State):
                self.samples.append(Sample(time.perf_counter(), message))
            await asyncio.sleep(SAMPLE_SECONDS)
