"""Bytes at the socket that no proper client sends: refused or answered, and whoever comes next is served."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from router.harness import RunningRouter, running, wait_until
from seeds import seeds

from trunkline.router.http.connections import BoundedProtocol
from trunkline.router.server import connections_max
from trunkline.router.text.tokenizer import Tokenizer

BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LAST = WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
LIMITS: dict[str, Any] = {
    "header_seconds": 1.0,
    "body_seconds": 1.0,
    "max_headers": 40,
    "max_header_bytes": 8192,
    "max_url_bytes": 1024,
    "max_body_bytes": 65536,
    "max_connections": 60,
}


@pytest.fixture(scope="module")
def tight(module_place: Path, tokenizer: Tokenizer) -> Iterator[RunningRouter]:
    """A router with small limits."""
    with running(module_place, tokenizer, **LIMITS) as (router, _):
        yield router


def connect(router: RunningRouter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[1])), timeout=60)


def said(router: RunningRouter, raw: bytes, *, half_close: bool = False, quiet_s: float = 0.3) -> bytes:
    """All that comes back, until the router hangs up or has said nothing for a moment behind the first of it."""
    with connect(router) as connection:
        answer = b""
        try:
            connection.sendall(raw)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
                connection.settimeout(quiet_s)
        except (TimeoutError, ConnectionError):
            pass
        return answer


def status_of(answer: bytes) -> int:
    """0: none."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def serves(router: RunningRouter) -> bool:
    return status_of(said(router, LAST)) == 200


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /version HTTP/1.1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        HEAD + b"Content-Length: 5, 5\r\n\r\nabcde",
        HEAD + b"Content-Length: +5\r\n\r\nabcde",
        HEAD + b"Content-Length: 0x5\r\n\r\nabcde",
        HEAD + b"Content-Length : 5\r\n\r\nabcde",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5;a=\x00\r\nabcde\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"GET /version HTTP/1.1\nHost: localhost\n\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n",
        b"GET /version\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"\r\n\r\n\x00\x00\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: a\r\nx-api-key: b\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a\r\nauthorization: x\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(tight: RunningRouter, raw: bytes) -> None:
    answer = said(tight, raw)
    assert 400 <= status_of(answer) < 500, answer
    assert answer.count(b"HTTP/1.1 ") == 1, "one answer: nothing was smuggled"
    assert serves(tight)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 60 + b"\r\n", 431),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000, 431),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 431),  # in one piece
        (HEAD + b"Content-Length: 99999999\r\n\r\n", 413),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", 408),
        (HEAD + b"Content-Length: 50\r\n\r\n{", 408),
        (HEAD.replace(b"application/json", b"text/plain") + b"Content-Length: 2\r\n\r\n{}", 415),
    ],
)
def test_limits_have_their_status(tight: RunningRouter, raw: bytes, status: int) -> None:
    answer = said(tight, raw)
    assert status_of(answer) == status, answer
    assert b'"message":' in answer
    assert serves(tight)


def trickle(connection: socket.socket) -> None:
    """Send a byte now and then."""
    for _ in range(400):
        connection.sendall(b" ")
        time.sleep(0.05)


@pytest.mark.processes
def test_who_sends_nothing_more_is_disconnected(tight: RunningRouter) -> None:
    """A body that trickles in although its request was refused long ago."""
    with connect(tight) as connection:
        connection.sendall(HEAD.replace(b"/v1/completions", b"/nowhere") + b"Content-Length: 50000\r\n\r\n")
        assert status_of(connection.recv(65536)) == 404
        with pytest.raises(ConnectionError):
            trickle(connection)


def test_connections_are_bounded(tight: RunningRouter) -> None:
    before = psutil.Process().num_fds()
    held = [connect(tight) for _ in range(LIMITS["max_connections"])]
    try:
        wait_until(lambda: len(tight._server.server_state.connections) >= LIMITS["max_connections"])
        answer = said(tight, WHOLE)
        assert status_of(answer) == 503, answer
        assert b"retry-after: 1" in answer
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: not tight._server.server_state.connections)
    assert serves(tight)
    wait_until(lambda: psutil.Process().num_fds() <= before + 2)


def test_a_process_has_no_more_connections_than_files() -> None:
    assert connections_max(10) == 10
    assert 1 <= connections_max(10**9) < 10**9


def test_pipelined_requests_are_answered_in_turn(tight: RunningRouter) -> None:
    answer = said(tight, WHOLE + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + LAST, quiet_s=60.0)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b"text_completion") < answer.index(b'"version"') < answer.rindex(b"text_completion")


def test_connections_keep_no_requests_that_are_answered(tight: RunningRouter) -> None:
    """Each of these rounds has one request that another one is behind."""
    with connect(tight) as connection:
        connection.settimeout(60.0)
        port, answer = connection.getsockname()[1], b""
        for round_ in range(1, 5):
            connection.sendall(2 * WHOLE)
            while answer.count(b"text_completion") < 2 * round_:
                answer += connection.recv(65536)
            connections = tuple(tight._server.server_state.connections)
            (protocol,) = (one for one in connections if one.transport.get_extra_info("peername")[1] == port)
            assert isinstance(protocol, BoundedProtocol)
            assert len(protocol._earlier or ()) == 1


def test_who_leaves_behind_a_pipelined_request_takes_no_tokens_of_others(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Reading pauses behind two requests that wait, so that only a write shows that the client is gone."""
    ids = [6 + index % 90 for index in range(120)]
    body = json.dumps({"prompt": "x", "max_tokens": len(ids), "stream": True, "ignore_eos": True}).encode()
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with running(tmp_path, tokenizer) as (router, [fake]), connect(router) as leaving, connect(router) as staying:
        fake.behaviour.script = lambda submit: ids
        fake.behaviour.pause_after, fake.behaviour.seconds_per_token = 60, 0.004
        leaving.sendall(whole)
        staying.sendall(whole.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        leaving.recv(65536)
        leaving.sendall(2 * whole)
        answer = b""
        while part := staying.recv(65536):
            answer += part
            if leaving.fileno() >= 0:
                wait_until(lambda: fake.paused == 2)  # both are in the middle of their answers
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                leaving.close()
                fake.behaviour.pause_after = None
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == tokenizer.decode(ids)
        wait_until(lambda: not router.inflight)
        wait_until(lambda: ended(router) == {"200": 1, "499": 1})
    assert len(fake.behaviour.submits) == 2


def test_a_body_that_waits_for_its_turn_ends_no_answer_before_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(tmp_path, tokenizer, body_seconds=0.2) as (router, [fake]), connect(router) as connection:
        fake.behaviour.script = lambda submit: [6] * 60
        fake.behaviour.seconds_per_token = 0.01
        connection.sendall(HEAD + b"Content-Length: 30\r\n\r\n" + b'{"prompt":"x","max_tokens":60}')
        wait_until(lambda: fake.live == 1)
        large = json.dumps({"prompt": "x " * 300_000, "max_tokens": 1}).encode()
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(large) + large[:100_000])
        answer = b""
        while b"text_completion" not in answer:
            part = connection.recv(65536)
            assert part, "closed in the middle"
            answer += part
        assert answer.startswith(b"HTTP/1.1 200 OK")
        connection.sendall(large[100_000:])
        while b"context_length_exceeded" not in answer:
            part = connection.recv(65536)
            assert part, "closed in the middle"
            answer += part


def test_nothing_is_computed_for_who_leaves_with_requests_pipelined(tmp_path: Path, tokenizer: Tokenizer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 120, "ignore_eos": True}).encode()
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with running(tmp_path, tokenizer) as (router, [fake]):
        fake.behaviour.script = lambda submit: [6] * 120
        fake.behaviour.seconds_per_token = 0.1
        with connect(router) as leaving:
            leaving.sendall(3 * whole)
            wait_until(lambda: len(fake.behaviour.submits) == 1)
        wait_until(lambda: not router.inflight)
        wait_until(lambda: ended(router) == {"499": 1})
    assert len(fake.behaviour.aborts) == 1
    assert len(fake.behaviour.submits) == 1


def streamed(count: int) -> bytes:
    """A request for a stream of `count` tokens."""
    body = json.dumps({"prompt": "x", "max_tokens": count, "stream": True, "ignore_eos": True}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("waiting", [0, 1, 2])
@pytest.mark.parametrize("begins", [True, False], ids=["begun", "not begun"])
def test_an_error_comes_behind_the_answers_to_earlier_requests(
    tmp_path: Path, tokenizer: Tokenizer, begins: bool, waiting: int
) -> None:
    """`waiting`: requests between the one that is answered and the one that is none."""
    with running(tmp_path, tokenizer) as (router, [fake]), connect(router) as connection:
        fake.behaviour.script = lambda submit: [6] * 9
        fake.behaviour.hold, fake.behaviour.pause_after = not begins, 3
        connection.sendall(streamed(9))
        wait_until(lambda: fake.live == 1)
        answer = connection.recv(65536) if begins else b""
        connection.sendall(waiting * streamed(9) + b"no request\r\n\r\n" + streamed(9))
        connection.settimeout(0.2)
        with suppress(TimeoutError):
            while part := connection.recv(65536):
                answer += part
        assert b"invalid_request" not in answer, "the error waits"
        fake.behaviour.hold, fake.behaviour.pause_after = False, None
        connection.settimeout(60.0)
        while part := connection.recv(65536):
            answer += part
        first, *others = answer.split(b"HTTP/1.1 ")[1:]
        assert [each[:3] for each in (first, *others)] == [b"200"] * (waiting + 1) + [b"400"]
        assert all(each.endswith(b"[DONE]\n\n\r\n0\r\n\r\n") for each in (first, *others[:-1])), answer
        assert b"Invalid method" in others[-1]
        wait_until(lambda: ended(router) == {"200": waiting + 1})
    assert len(fake.behaviour.submits) == waiting + 1


def test_who_leaves_while_an_error_waits_is_noticed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(tmp_path, tokenizer) as (router, [fake]):
        fake.behaviour.hold = True
        with connect(router) as connection:
            connection.sendall(2 * streamed(9) + b"no request\r\n\r\n")
            wait_until(lambda: fake.live == 1)
        wait_until(lambda: ended(router) == {"499": 1})
    assert len(fake.behaviour.submits) == 1


@pytest.mark.parametrize("whole", [streamed(9), WHOLE, b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(tight: RunningRouter, whole: bytes) -> None:
    """RFC 9112 §6.1. Without a length, the answer ends with the connection."""
    old = whole.replace(b" HTTP/1.1", b" HTTP/1.0", 1)
    head, _, body = said(tight, old, quiet_s=60.0).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    if b"event-stream" in head:
        assert b"content-length" not in head
        *events, done, rest = body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        assert all("choices" in json.loads(event.removeprefix(b"data: ")) for event in events)
    else:
        assert b"content-length: %d\r\n" % len(body) in head
    assert serves(tight)


BROKEN_BODY = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n"


def test_a_broken_body_is_refused_in_its_turn_and_never_computed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(tmp_path, tokenizer) as (router, [fake]):
        fake.behaviour.script = lambda submit: [6] * 9
        fake.behaviour.seconds_per_token = 0.01
        answer = said(router, streamed(9) + BROKEN_BODY, quiet_s=60.0)
        assert [each[:3] for each in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]
        assert b"Invalid character in chunk size" in answer
        alone = said(router, BROKEN_BODY, quiet_s=60.0)
        assert [each[:3] for each in alone.split(b"HTTP/1.1 ")[1:]] == [b"400"]
    assert len(fake.behaviour.submits) == 1


def test_a_body_that_breaks_while_its_answer_is_written_ends_the_answer(tight: RunningRouter) -> None:
    """The answer is complete already: nothing else was asked for."""
    with connect(tight) as connection:
        connection.sendall(HEAD.replace(b"/v1/completions", b"/nowhere") + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = connection.recv(65536)
        assert status_of(answer) == 404
        connection.sendall(b"zz\r\n")
        while part := connection.recv(65536):
            answer += part
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("GET /v1/modèls HTTP/1.1\r\n\r\n".encode(), "Invalid char in url path; percent-encode what is not ASCII"),
        ("GET /v1/models?a=é HTTP/1.1\r\n\r\n".encode("latin-1"), "Invalid char in url query; percent-encode"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "Invalid method"),
        (b"GET /a b HTTP/1.1\r\n\r\n", "Expected HTTP/"),
        (b"GET /version HTTP/1.1\r\nX: a\x00b\r\n\r\n", "Invalid header value char"),
    ],
)
def test_an_error_says_what_is_wrong(tight: RunningRouter, raw: bytes, message: str) -> None:
    answer = said(tight, raw)
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert message in error["message"], error
    assert "Invalid HTTP request received" not in error["message"]


def ended(router: RunningRouter) -> dict[str, int]:
    """Completions that are over, by status."""
    samples = [sample for family in router.service.metrics.requests.collect() for sample in family.samples]
    return {
        sample.labels["status"]: int(sample.value)
        for sample in samples
        if sample.name.endswith("_total") and sample.labels["endpoint"] == "/v1/completions"
    }


SEEDS = seeds(50)
PIECES = [
    *b"GET |POST |/v1/completions|/v1/models| HTTP/1.1| HTTP/1.0|\r\n|\n|\r|\x00|Host: localhost\r\n".split(b"|"),
    *b"Content-Length: 3\r\n|Transfer-Encoding: chunked\r\n|Connection: close\r\n|0\r\n\r\n|{}|\xff".split(b"|"),
    *b"Expect: 100-continue\r\n|Upgrade: websocket\r\nConnection: upgrade\r\n|3\r\nabc\r\n".split(b"|"),
    *(b"Authorization: Bearer ", b"Content-Type: application/json\r\n", b"x" * 300, BODY),
]


def test_mutated_requests(tight: RunningRouter) -> None:
    """Whole requests with pieces cut out, put in, doubled."""
    memory = psutil.Process().memory_info().rss
    for seed in SEEDS:
        random_ = random.Random(seed)
        raw = bytearray(WHOLE * random_.choice((1, 1, 2)))
        for _ in range(random_.randint(1, 4)):
            at = random_.randrange(len(raw) + 1)
            match random_.randrange(4):
                case 0:
                    raw[at:at] = random_.choice(PIECES)
                case 1:
                    del raw[at : at + random_.randint(1, 30)]
                case 2:
                    raw[at:at] = raw[: random_.randint(1, len(raw))]
                case _:
                    raw[at : at + 1] = bytes([random_.randrange(256)])
        with connect(tight) as connection:
            connection.settimeout(0.03)
            answer = b""
            try:
                connection.sendall(raw)
                if random_.random() < 0.3:
                    connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(65536)
            except (TimeoutError, ConnectionError):
                pass  # half a request: nobody waits for the rest
        assert b"internal error" not in answer.lower(), (seed, bytes(raw))
        assert b"internal server error" not in answer.lower(), (seed, bytes(raw))
    wait_until(lambda: not tight._server.server_state.connections)
    assert serves(tight)
    assert psutil.Process().memory_info().rss - memory < 64 << 20
