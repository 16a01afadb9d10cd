"""The controller's socket to its routers: requests come in, one message per step and router goes out.

The id of a request in the engine is the router's index, followed by the 32 bits of the number that the router gave
the request. So the service needs no table of requests. The messages to each router are numbered from 1: they are
made with the number 0, and `Routers.send` puts in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace
from numpy.typing import NDArray

from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.engine.validation import NUMBER_BITS
from trunkline.controller.messages import RouterRequest
from trunkline.controller.sequences.decode_rows import Int64Array
from trunkline.kvstore.chunks import any_of, pack_int32
from trunkline.router.messages import Outputs, RouterMessage
from trunkline.runtime.looks import Looks
from trunkline.runtime.process import RareLog
from trunkline.runtime.wire_flags import MORE, NOBLOCK, has_message
from trunkline.runtime.wire_gate import MESSAGE_BYTES_MAX, Gate
from trunkline.runtime.wire_keys import Role

ROUTER_SHIFT: Final = NUMBER_BITS
"""Number of bits of an engine's id below the router's index."""
NUMBER_MASK: Final = (1 << ROUTER_SHIFT) - 1
MESSAGES_PER_TURN_MAX: Final = 1024
"""Largest number of messages read in one turn, so that a router that sends too many cannot delay the workers' next
plan."""
LOOKS_WITHIN_S: Final = 2.0
"""`Looks.within_s`; the service looks once a second."""


@dataclass(slots=True)
class _Router:
    """A router that is connected to this controller, or was a moment ago."""

    index: int
    identity: bytes
    last_heard: float
    seq: int = 0
    """Number of the last message sent to the router."""
    last_outputs: int = 0
    """Number of the last message with outputs; 0: there was none."""
    last_read: int = 0
    """Number of the last message that the router says it has read; 0: it has not said so yet."""


def _split(outputs: EngineOutputs) -> dict[int, Outputs]:
    """Return the parts of the outputs that are for each router, by its index, still without tokens."""
    parts: dict[int, Outputs] = {}
    rest = outputs.started or outputs.finished or outputs.beams or outputs.drafts or outputs.prompt_logprobs
    if not rest:
        return parts

    def part(request: int) -> Outputs:
        return parts.setdefault(request >> ROUTER_SHIFT, Outputs(0))

    for started in outputs.started:
        part(started.request).started.append(replace(started, request=started.request & NUMBER_MASK))
    for finished in outputs.finished:
        part(finished.request).finished.append(replace(finished, request=finished.request & NUMBER_MASK))
    for beams in outputs.beams:
        part(beams.request).beams.append(replace(beams, request=beams.request & NUMBER_MASK))
    for drafts in outputs.drafts:
        part(drafts.request).drafts.append(replace(drafts, request=drafts.request & NUMBER_MASK))
    for scored in outputs.prompt_logprobs:
        part(scored.request).prompt_logprobs.append(replace(scored, request=scored.request & NUMBER_MASK))
    return parts


class _Share(msgspec.Struct, frozen=True):
    """The rows of a step that are one router's."""

    router: int
    rows: NDArray[np.bool_] | None
    """Which of the step's rows they are; None: all."""
    numbers: bytes
    """`Outputs.requests`."""
    samples: bytes
    """`Outputs.samples`."""


class _Shares(msgspec.Struct, frozen=True):
    """The rows of a step by their routers. Nothing changes the arrays once they are made."""

    requests: Int64Array
    samples: Int64Array
    of_routers: list[_Share]

    @classmethod
    def of(cls, requests: Int64Array, samples: Int64Array) -> _Shares:
        """Divide rows with these requests, by the engine's ids, and samples, both `[rows]`."""
        owners = requests >> ROUTER_SHIFT
        # Not by `np.unique`, whose first call imports much of NumPy: the first token after a start would wait.
        routers, shares = sorted(set(owners.tolist())), []
        for router in routers:
            mine = owners == router
            drawn_for = samples[mine]
            numbers = (requests[mine] & NUMBER_MASK).astype("<u4").tobytes()
            drawn = drawn_for.astype("<u2").tobytes() if any_of(drawn_for) else b""
            shares.append(_Share(router, mine if len(routers) > 1 else None, numbers, drawn))
        return cls(requests, samples, shares)


_NONE: Final = np.empty(0, np.int64)


class Routers:
    """The ROUTER socket and the routers that are connected to it."""

    def __init__(self, gate: Gate, endpoint: str, local_endpoint: str = "") -> None:
        """
        Args:
            local_endpoint: Address for processes of this host, which need no keys; "" for none.
        """
        self.socket = gate.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Outputs must not be dropped. A router that hangs stops pinging as well; after the silence limit its
        # requests are aborted, which bounds what piles up for it.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 1000)
        if local_endpoint:
            self.socket.bind(local_endpoint)  # before `gate.bind`, whose checks hold for later addresses only
        gate.bind(self.socket, endpoint, Role.ROUTER, MESSAGE_BYTES_MAX)
        self.rare = RareLog("trunkline.controller.service.routers")
        self._by_identity: dict[bytes, _Router] = {}
        self._by_index: dict[int, _Router] = {}
        self._next_index = 1
        self._looks = Looks(LOOKS_WITHIN_S)
        self._shares = _Shares(_NONE, _NONE, [])
        """How the rows of the last step are divided between routers."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RouterRequest] = msgspec.msgpack.Decoder(RouterRequest)

    def receive(self, now: float) -> Iterator[tuple[int, RouterRequest]]:
        """Read up to `MESSAGES_PER_TURN_MAX` waiting messages; if there are more, the next poll returns at once.

        A message that cannot be decoded is logged and skipped.

        Returns:
            the index of each message's router, and the message.
        """
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                identity = self.socket.recv(NOBLOCK)
            except zmq.Again:
                return
            payload = further = self.socket.recv(NOBLOCK, copy=False)  # a message comes with all of its frames
            while further.more:
                further = self.socket.recv(NOBLOCK, copy=False)
            try:
                message = self._decoder.decode(payload.buffer)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.rare.warning("router message cannot be decoded; ignored", now, error=str(error))
            else:
                yield self._heard(identity, now), message
            if not has_message(self.socket):
                return

    def _heard(self, identity: bytes, now: float) -> int:
        """Note that the router with this ZeroMQ identity is alive; return its index, the next one if it is new."""
        router = self._by_identity.get(identity)
        if router is None:
            router = _Router(self._next_index, identity, now)
            self._next_index += 1
            self._by_identity[identity] = self._by_index[router.index] = router
        router.last_heard = now
        return router.index

    def send(self, index: int, message: RouterMessage) -> None:
        """Send a message to the router with this index, under that router's next number.

        Nothing is sent to a router that is no longer known. A router that is no longer connected counts as silent.
        """
        router = self._by_index.get(index)
        if router is not None:
            self._send(router, replace(message, seq=router.seq + 1))

    def _send(self, router: _Router, message: RouterMessage) -> None:
        """Send a router its next message, which has its number."""
        router.seq = message.seq
        if isinstance(message, Outputs):
            router.last_outputs = router.seq
        payload = self._encoder.encode(message)
        try:
            self.socket.send(router.identity, MORE)
            self.socket.send(payload, NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            router.last_heard = -inf

    def indices(self) -> list[int]:
        """Return the indices of all routers that are known."""
        return list(self._by_index)

    def look(self, now: float) -> None:
        """Note that messages were read at this time."""
        if late := self._looks.late(now):
            for router in self._by_index.values():
                router.last_heard = min(now, router.last_heard + late)

    def silent(self, now: float, seconds_max: float) -> list[int]:
        """Return the indices of the routers that have sent nothing for longer than this."""
        return [index for index, router in self._by_index.items() if now - router.last_heard > seconds_max]

    def note_read(self, index: int, number: int) -> None:
        """Note that a router has read the messages up to this number."""
        self._by_index[index].last_read = number

    def behind(self, now: float, seconds_max: float) -> list[int]:
        """Return the indices of the routers that have not read all outputs yet, without those that are silent and
        those that never say what they have read."""
        silent = self.silent(now, seconds_max)
        return [
            index
            for index, router in self._by_index.items()
            if 0 < router.last_read < router.last_outputs and index not in silent
        ]

    def forget(self, index: int) -> None:
        """Forget a router; if it sends again, it is a new one."""
        router = self._by_index.pop(index)
        del self._by_identity[router.identity]

    def publish(self, outputs: EngineOutputs) -> None:
        """Send each router its part of the engine's outputs, one message per result of a step."""
        parts = _split(outputs)
        # A router must hear of starts before tokens, and of tokens before ends. If there are several results,
        # starts go out before them. The rest of a router's part goes out with the last result.
        for index, part in parts.items():
            if part.started and len(outputs.tokens) > 1:
                self.send(index, Outputs(0, started=part.started.copy()))
                part.started.clear()
        last = len(outputs.tokens) - 1
        for at in range(len(outputs.tokens)):
            self._send_tokens(outputs, at, parts if at == last else {})
        for index, part in parts.items():
            self.send(index, part)

    def answer(self, outputs: EngineOutputs, block_bytes: int) -> None:
        """Send the answers to routers' calls. `block_bytes`: size of a block on all ranks together."""
        for done in outputs.modules:
            answer = replace(done, ticket=done.ticket & NUMBER_MASK, block_bytes=block_bytes)
            self.send(done.ticket >> ROUTER_SHIFT, answer)
        for router, reply in outputs.replies:
            self.send(router, reply)

    def _send_tokens(self, outputs: EngineOutputs, at: int, parts: dict[int, Outputs]) -> None:
        """Send one result's tokens to their routers, together with the routers' `parts`, which are removed."""
        requests, samples, tokens = outputs.requests[at], outputs.samples[at], outputs.tokens[at]
        logprobs = outputs.logprobs[at]
        if self._shares.requests is not requests or self._shares.samples is not samples:
            self._shares = _Shares.of(requests, samples)  # most steps have the rows of the step before
        for share in self._shares.of_routers:
            part, router = parts.pop(share.router, None), self._by_index.get(share.router)
            if router is None:
                continue
            own, mine = logprobs or None, share.rows
            if logprobs and mine is not None:
                position = np.cumsum(mine) - 1
                own = {int(position[i]): value for i, value in logprobs.items() if mine[i]} or None
            number, packed = router.seq + 1, pack_int32(tokens if mine is None else tokens[mine])
            if part is None:
                message = Outputs(number, share.numbers, packed, logprobs=own, samples=share.samples)
            else:
                fields = {"requests": share.numbers, "tokens": packed, "samples": share.samples, "logprobs": own}
                message = replace(part, seq=number, **fields)
            self._send(router, message)

    def close(self) -> None:
        self.socket.close()
