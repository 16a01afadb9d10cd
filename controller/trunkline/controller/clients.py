"""The controller's side of its routers: requests in, one packed message per step and router out.

A router's 32-bit request numbers become engine ids by putting the router's index above them, so the
service keeps no table of requests. Each router has its own sequence of messages, numbered from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import structlog
import zmq

from trunkline.controller.engine import EngineOutputs
from trunkline.controller.messages import RouterRequest, TopLogprobs
from trunkline.controller.rows import Int64Array
from trunkline.controller.submissions import NUMBER_BITS
from trunkline.kvstore.layout import Int32Array, pack_int32
from trunkline.router.messages import Finished, Outputs, RouterMessage, Started

CLIENT_SHIFT: Final = NUMBER_BITS
NUMBER_MASK: Final = (1 << CLIENT_SHIFT) - 1
MESSAGES_PER_TURN_MAX: Final = 1024
"""So that a router that floods us cannot keep the workers waiting for their next plan."""

log = structlog.get_logger()


@dataclass(slots=True)
class Client:
    """A connected router."""

    index: int
    identity: bytes
    last_heard: float
    seq: int = 0
    """Number of the last message sent."""

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq


class Clients:
    """The ROUTER socket and who is behind it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Outputs must not be dropped. A router that hangs stops pinging as well: what can pile up for it
        # is bounded by the silence limit, after which its requests are aborted.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.bind(endpoint)
        self._by_identity: dict[bytes, Client] = {}
        self._by_index: dict[int, Client] = {}
        self._next_index = 1
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RouterRequest] = msgspec.msgpack.Decoder(RouterRequest)

    def receive(self, now: float) -> Iterator[tuple[Client, RouterRequest]]:
        """Waiting requests, `MESSAGES_PER_TURN_MAX` at most: the next poll returns at once if there are more.

        A message that cannot be decoded is reported and skipped.
        """
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                identity, payload = self.socket.recv_multipart(zmq.NOBLOCK)[:2]
            except zmq.Again:
                return
            except ValueError:
                log.warning("router sent a message of one frame; ignored")
                continue
            try:
                message = self._decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.warning("router message cannot be decoded; ignored", error=str(error))
                continue
            yield self._client(identity, now), message

    def _client(self, identity: bytes, now: float) -> Client:
        client = self._by_identity.get(identity)
        if client is None:
            client = Client(self._next_index, identity, now)
            self._next_index += 1
            self._by_identity[identity] = client
            self._by_index[client.index] = client
        client.last_heard = now
        return client

    def send(self, client: Client, message: RouterMessage) -> None:
        """Send, or forget a router that is no longer connected: `silent` reports it next."""
        try:
            self.socket.send_multipart([client.identity, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            client.last_heard = float("-inf")

    def all(self) -> list[Client]:
        return list(self._by_index.values())

    def silent(self, now: float, seconds_max: float) -> list[Client]:
        """Forget and return the routers that were not heard of for too long."""
        gone = [client for client in self._by_index.values() if now - client.last_heard > seconds_max]
        for client in gone:
            del self._by_index[client.index]
            del self._by_identity[client.identity]
        return gone

    def publish(self, outputs: EngineOutputs) -> None:
        """Send each router its part of what happened."""
        parts: dict[int, tuple[list[Started], list[Finished]]] = {}
        for started in outputs.started:
            part = parts.setdefault(started.request >> CLIENT_SHIFT, ([], []))
            part[0].append(Started(started.request & NUMBER_MASK, started.cached_tokens))
        for finished in outputs.finished:
            part = parts.setdefault(finished.request >> CLIENT_SHIFT, ([], []))
            part[1].append(Finished(finished.request & NUMBER_MASK, finished.reason, finished.detail))
        # Tokens of older results go first, in messages of their own; starts go before, ends after all.
        for index, (started_part, _) in parts.items():
            if started_part and len(outputs.tokens) > 1:
                self._send_outputs(index, started=started_part)
                parts[index] = ([], parts[index][1])
        last = len(outputs.tokens) - 1
        for at, (requests, tokens) in enumerate(zip(outputs.requests, outputs.tokens, strict=True)):
            ends = parts if at == last else {}
            self._send_tokens(requests, tokens, outputs.logprobs[at], ends)
        for index, (started_part, finished_part) in parts.items():
            self._send_outputs(index, started=started_part, finished=finished_part)

    def _send_tokens(
        self,
        requests: Int64Array,
        tokens: Int32Array,
        logprobs: dict[int, TopLogprobs] | None,
        parts: dict[int, tuple[list[Started], list[Finished]]],
    ) -> None:
        """One result's tokens to their routers; what is in `parts` travels along and is taken out."""
        owners = requests >> CLIENT_SHIFT
        for index in np.unique(owners).tolist():
            mine = owners == index
            started, finished = parts.pop(index, ([], []))
            own_logprobs = None
            if logprobs:
                position = np.cumsum(mine) - 1
                own_logprobs = {int(position[i]): value for i, value in logprobs.items() if mine[i]}
            self._send_outputs(
                index,
                requests=(requests[mine] & NUMBER_MASK).astype("<u4").tobytes(),
                tokens=pack_int32(tokens[mine]),
                started=started,
                finished=finished,
                logprobs=own_logprobs or None,
            )

    def _send_outputs(
        self,
        index: int,
        *,
        requests: bytes = b"",
        tokens: bytes = b"",
        started: list[Started] | None = None,
        finished: list[Finished] | None = None,
        logprobs: dict[int, TopLogprobs] | None = None,
    ) -> None:
        client = self._by_index.get(index)
        if client is not None:
            message = Outputs(client.next_seq(), requests, tokens, started or [], finished or [], logprobs)
            self.send(client, message)

    def close(self) -> None:
        self.socket.close()
