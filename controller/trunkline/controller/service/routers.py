"""The controller's side of its routers: requests in, one packed message per step and router out.

A router's 32-bit request numbers become engine ids by putting the router's index above them, so the
service keeps no table of requests. Each router has its own sequence of messages, numbered from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace

from trunkline.controller.engine.events import EngineOutputs
from trunkline.controller.engine.validation import NUMBER_BITS
from trunkline.controller.messages import RouterRequest, TopLogprobs
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.messages import BeamsFound, Finished, Outputs, PromptScored, RouterMessage, Started
from trunkline.runtime.process import RareLog
from trunkline.runtime.wire_keys import Role
from trunkline.runtime.wire_sockets import MESSAGE_BYTES_MAX, Gate

CLIENT_SHIFT: Final = NUMBER_BITS
NUMBER_MASK: Final = (1 << CLIENT_SHIFT) - 1
MESSAGES_PER_TURN_MAX: Final = 1024
"""Most messages read in one turn, so that a router that sends too many cannot delay the workers' next plan."""


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


@dataclass(slots=True)
class _Part:
    """One router's part of the engine's outputs. Fields as in `Outputs`; requests have the router's numbers."""

    requests: bytes = b""
    tokens: bytes = b""
    samples: bytes = b""
    logprobs: dict[int, TopLogprobs] | None = None
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    beams: list[BeamsFound] = field(default_factory=list)
    prompt_logprobs: list[PromptScored] = field(default_factory=list)

    def message(self, seq: int) -> Outputs:
        return Outputs(
            seq=seq,
            requests=self.requests,
            tokens=self.tokens,
            started=self.started,
            finished=self.finished,
            logprobs=self.logprobs,
            samples=self.samples,
            beams=self.beams,
            prompt_logprobs=self.prompt_logprobs,
        )


def _split(outputs: EngineOutputs) -> dict[int, _Part]:
    """Return the routers' parts of the outputs, by router, still without tokens."""
    parts: dict[int, _Part] = {}

    def part(request: int) -> _Part:
        return parts.setdefault(request >> CLIENT_SHIFT, _Part())

    for started in outputs.started:
        part(started.request).started.append(replace(started, request=started.request & NUMBER_MASK))
    for finished in outputs.finished:
        part(finished.request).finished.append(replace(finished, request=finished.request & NUMBER_MASK))
    for beams in outputs.beams:
        part(beams.request).beams.append(replace(beams, request=beams.request & NUMBER_MASK))
    for scored in outputs.prompt_logprobs:
        part(scored.request).prompt_logprobs.append(replace(scored, request=scored.request & NUMBER_MASK))
    return parts


class Clients:
    """The ROUTER socket and the routers that are connected to it."""

    def __init__(self, gate: Gate, endpoint: str, local_endpoint: str = "") -> None:
        """
        Args:
            local_endpoint: Address for processes of this host, which need no keys; "" for none.
        """
        self.socket = gate.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Outputs must not be dropped. A router that hangs stops pinging as well: what can pile up for it
        # is bounded by the silence limit, after which its requests are aborted.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 1000)
        if local_endpoint:
            self.socket.bind(local_endpoint)  # first: what guards the other one does not hold for it
        gate.bind(self.socket, endpoint, Role.ROUTER, MESSAGE_BYTES_MAX)
        self.rare = RareLog("trunkline.controller.service.routers")
        self._by_identity: dict[bytes, Client] = {}
        self._by_index: dict[int, Client] = {}
        self._next_index = 1
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RouterRequest] = msgspec.msgpack.Decoder(RouterRequest)

    def receive(self, now: float) -> Iterator[tuple[Client, RouterRequest]]:
        """Return up to `MESSAGES_PER_TURN_MAX` waiting messages: if there are more, the next poll returns at once.

        A message that cannot be decoded is reported and skipped.
        """
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                identity, payload = self.socket.recv_multipart(zmq.NOBLOCK)[:2]
            except zmq.Again:
                return
            except ValueError:
                self.rare.warning("router sent a message of one frame; ignored", now)
                continue
            try:
                message = self._decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.rare.warning("router message cannot be decoded; ignored", now, error=str(error))
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

    def answer(self, index: int, make: Callable[[int], RouterMessage]) -> None:
        """Send the answer that `make` makes from the next number to the router with this index, if it is known."""
        client = self.find(index)
        if client is not None:
            self.send(client, make(client.next_seq()))

    def find(self, index: int) -> Client | None:
        """Return the router with this index; None if it is no longer known."""
        return self._by_index.get(index)

    def all(self) -> list[Client]:
        return list(self._by_index.values())

    def silent(self, now: float, seconds_max: float) -> list[Client]:
        """Forget and return the routers that have sent nothing for too long."""
        gone = [client for client in self._by_index.values() if now - client.last_heard > seconds_max]
        for client in gone:
            del self._by_index[client.index]
            del self._by_identity[client.identity]
        return gone

    def publish(self, outputs: EngineOutputs) -> None:
        """Send each router its part of the engine's outputs."""
        parts = _split(outputs)
        # Tokens of older results are sent first, in messages of their own. Starts precede all tokens, ends follow.
        for index, part in parts.items():
            if part.started and len(outputs.tokens) > 1:
                self._send_outputs(index, _Part(started=part.started))
                part.started = []
        last = len(outputs.tokens) - 1
        for at in range(len(outputs.tokens)):
            self._send_tokens(outputs, at, parts if at == last else {})
        for index, part in parts.items():
            self._send_outputs(index, part)

    def _send_tokens(self, outputs: EngineOutputs, at: int, parts: dict[int, _Part]) -> None:
        """Send one result's tokens to their routers, together with the routers' `parts`, which are removed."""
        requests, samples, tokens = outputs.requests[at], outputs.samples[at], outputs.tokens[at]
        logprobs = outputs.logprobs[at]
        owners = requests >> CLIENT_SHIFT
        for index in np.unique(owners).tolist():
            mine = owners == index
            part = parts.pop(index, None) or _Part()
            part.requests = (requests[mine] & NUMBER_MASK).astype("<u4").tobytes()
            part.tokens = pack_int32(tokens[mine])
            if samples[mine].any():
                part.samples = samples[mine].astype("<u2").tobytes()
            if logprobs:
                position = np.cumsum(mine) - 1
                part.logprobs = {int(position[i]): value for i, value in logprobs.items() if mine[i]} or None
            self._send_outputs(index, part)

    def _send_outputs(self, index: int, part: _Part) -> None:
        client = self._by_index.get(index)
        if client is not None:
            self.send(client, part.message(client.next_seq()))

    def close(self) -> None:
        self.socket.close()
