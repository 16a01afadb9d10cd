"""Peers that have the keys and never cease to ask or to answer: none else waits for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from worker.peer_driver import PeerRank

from trunkline.worker.tiers import questions
from trunkline.worker.tiers.exchange import Found, Told

DONE, FAILED = 0, 2


@pytest.fixture
def own() -> Iterator[PeerRank]:
    """One that pulls."""
    rank = PeerRank()
    yield rank
    rank.close()


class Flood:
    """Sends the same message again and again, as fast as it is taken."""

    def __init__(self, kind: int, endpoint: str, message: Callable[[list[bytes]], list[bytes]]) -> None:
        """
        Args:
            kind: of the socket; a ROUTER listens and waits for a question first.
            message: makes it of that question's frames.
        """
        self._kind, self._endpoint, self._message = kind, endpoint, message
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(self._kind)
        socket.set(zmq.LINGER, 0)
        asked: list[bytes] = []
        if self._kind == zmq.ROUTER:
            socket.bind(self._endpoint)
            while not self._is_over.is_set() and not asked:
                asked = socket.recv_multipart() if socket.poll(50) else []
        else:
            socket.connect(self._endpoint)
        message = self._message(asked)
        while not self._is_over.is_set():
            try:
                socket.send_multipart(message, zmq.NOBLOCK)
            except zmq.Again:
                self._is_over.wait(0.0001)
            if socket.poll(0):
                socket.recv_multipart()
        context.destroy(linger=0)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_a_peer_that_never_ceases_to_ask_delays_neither_others_nor_the_end(
    own: PeerRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "SILENT_S", 60.0)  # all of these threads share a lock, and perhaps a processor
    monkeypatch.setattr(questions, "QUESTION_S", 60.0)
    peer = PeerRank(export=f"ipc://{tmp_path}/x")
    peer.save([1], [1])
    floods = [Flood(zmq.DEALER, peer.tiers.exports, lambda asked: [b"nonsense"]) for _ in range(2)]
    try:
        own.meet(1, peer.tiers.exports)
        assert own.statuses(1, {1: 1}) == [DONE]
        closing = threading.Thread(target=peer.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        for flood in floods:
            flood.close()


def test_a_peer_that_never_ceases_to_answer_is_given_up(own: PeerRank, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/liar"
    nonsense = msgspec.msgpack.encode(Told(77, [Found(0)]))
    flood = Flood(zmq.ROUTER, endpoint, lambda asked: [asked[0], nonsense])
    try:
        own.meet(1, endpoint)
        assert own.statuses(1, {0: 1}) == [FAILED]
    finally:
        flood.close()


def test_a_busy_thread_that_ends_before_it_is_woken_keeps_nobody_waiting(own: PeerRank, tmp_path: Path) -> None:
    own.meet(1, f"ipc://{tmp_path}/nobody")
    assert own.tiers._peers is not None
    link = own.tiers._peers._links[1]

    class Seen(queue.SimpleQueue[Any]):
        """Ends the thread before the one that put in the order goes on, as a flood may."""

        def put(self, item: Any, *args: Any) -> None:
            super().put(item)
            link._wake.send(b"")
            link.join(10)
            assert not link.is_running
            while link._wake.poll(0, zmq.POLLOUT):  # its end of the pipe is closed a moment later
                time.sleep(0.001)

    link._arrivals = Seen()
    leaving = threading.Thread(target=own.meet, args=(1,), daemon=True)
    leaving.start()
    leaving.join(10)
    assert not leaving.is_alive()
