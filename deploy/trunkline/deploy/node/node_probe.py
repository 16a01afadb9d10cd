"""Find whether a group on this host generates tokens, by asking its controller over a socket in the run folder."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import msgspec
import numpy as np
import zmq

from trunkline.controller.messages import Abort, Ping, RouterRequest, Submit
from trunkline.router.messages import Outputs, RouterMessage, State
from trunkline.worker.messages import Sampling

FRESH_S: Final = 10.0
"""A token generated in this time proves that the group works."""
_STATE_S_MAX: Final = 2.0
_TOKEN_S_MAX: Final = 5.0
_PROMPT: Final = np.array([1], "<i4").tobytes()
"""A prompt of one token that every vocabulary has."""


class Verdict(NamedTuple):
    """The answer to a question about health."""

    ok: bool
    reason: str
    """For people."""


class TokenProbe:
    """Asks for a token, unless the group has just generated some for clients. For one caller at a time."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RouterMessage)
        self._tokens = 0
        """The controller's count of tokens, when it was last read."""
        self._seen_at = float("-inf")
        self._token_at = float("-inf")
        """The last token was generated after this time."""

    def check(self) -> Verdict:
        """Return whether a token was generated in the last seconds or now; take a few seconds at most."""
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)
        try:
            socket.connect(self._endpoint)
            return self._check(socket)
        except zmq.Again:
            return Verdict(False, "the controller does not answer")
        except (zmq.ZMQError, msgspec.MsgspecError) as error:
            return Verdict(False, f"the controller's answer cannot be read: {error}")
        finally:
            socket.close()

    def close(self) -> None:
        """Close its sockets."""
        self._context.term()

    def _check(self, socket: zmq.Socket[bytes]) -> Verdict:
        socket.set(zmq.SNDTIMEO, int(_STATE_S_MAX * 1000))
        self._send(socket, Ping(1))
        deadline = time.monotonic() + _STATE_S_MAX
        while not isinstance(state := self._receive(socket, deadline), State):
            pass
        if state.status != "ready":
            self._token_at = float("-inf")
            return Verdict(
                False, f"the controller is {state.status}" + (f": {state.detail}" if state.detail else "")
            )
        now = time.monotonic()
        if state.output_tokens > self._tokens:
            self._token_at = max(self._token_at, self._seen_at)
        elif state.output_tokens < self._tokens:  # another controller
            self._token_at = float("-inf")
        self._tokens, self._seen_at = state.output_tokens, now
        if now - self._token_at < FRESH_S:
            return Verdict(True, "a token was generated lately")
        return self._generate(socket)

    def _generate(self, socket: zmq.Socket[bytes]) -> Verdict:
        job = Submit(1, _PROMPT, prompt_len=1, max_tokens=1, sampling=Sampling(temperature=0.0))
        self._send(socket, job)
        deadline = time.monotonic() + _TOKEN_S_MAX
        try:
            while True:
                message = self._receive(socket, deadline)
                if not isinstance(message, Outputs):
                    continue
                if message.tokens:
                    self._token_at = time.monotonic()
                    self._tokens += 1  # this one
                    return Verdict(True, "a token was generated")
                if message.finished:
                    return Verdict(False, f"no token was generated: {message.finished[0].detail}")
        except zmq.Again:
            self._send(socket, Abort(1))
            return Verdict(False, f"no token within {_TOKEN_S_MAX:.0f} s")

    def _send(self, socket: zmq.Socket[bytes], message: RouterRequest) -> None:
        socket.send(self._encoder.encode(message))

    def _receive(self, socket: zmq.Socket[bytes], deadline: float) -> RouterMessage:
        """Return the next message.

        Raises:
            zmq.Again: None came in time.
        """
        if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise zmq.Again
        message: RouterMessage = self._decoder.decode(socket.recv_multipart()[-1])
        return message
