"""A whole router in this process, on a socket, and fake controllers behind it over real ZeroMQ."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvloop
from deploy.waiting import free_ports
from router.fake_controller import FakeController, prompt_of
from router.in_process import InProcess
from worker.redis_server import RedisServer

from trunkline.controller.messages import Submit
from trunkline.kvstore.records import open_records
from trunkline.router.config import RouterConfig
from trunkline.router.routing.controllers import Breaker
from trunkline.router.server import listen, make_server
from trunkline.router.service import RouterService
from trunkline.router.tenancy.auth import hash_key
from trunkline.router.text.tokenizer import Tokenizer

Result = TypeVar("Result")
STORES = ("sqlite", pytest.param("redis", marks=pytest.mark.processes))
"""Kinds of record stores that routers may share, for `pytest.mark.parametrize`."""
DEMO_MODEL = Path(__file__).resolve().parents[2] / "deploy/trunkline/deploy/demo_model"
EOS = 1
ADMIN_KEY = "tl-an-admin-of-these-tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
JSON = {"Content-Type": "application/json"}
VOCAB_SIZE: int = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
ANSWER = "Hello, wörld 😀! STOP here, or not."
MESSAGES: Any = [{"role": "user", "content": "What does os.path.join do?"}]


def make_answer(tokenizer: Tokenizer, text: str = ANSWER) -> Callable[[Submit], list[int]]:
    """A script: one text and the end token, or the prompt's last token for ever for long requests."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]

    def script(submit: Submit) -> list[int]:
        if submit.max_tokens > 1000 and EOS not in submit.stop_token_ids:
            return [prompt_of(submit)[-1]] * submit.max_tokens
        return ids

    return script


class RunningRouter:
    """A router served from a thread."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer) -> None:
        config.validate()
        self.service = RouterService(config, tokenizer)
        self._listener = listen(config.host, config.port)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = make_server(self.service)
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Serve."""
        self._thread.start()
        wait_until(lambda: self._server.started)

    def client(self, **headers: str) -> httpx.Client:
        """Return a client that reaches the application without a socket."""
        assert self._loop is not None
        return httpx.Client(
            base_url=self.url,
            timeout=60,
            headers=JSON | headers,
            transport=InProcess(self._server.config.loaded_app, self._loop),
        )

    def forgive(self) -> None:
        """Forget which controllers have failed, so that they get requests again at once."""
        core = self.service.dispatcher.core
        core._breakers = [Breaker() for _ in core._breakers]
        core._failing.clear()

    def stop(self) -> None:
        """Leave at once."""
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def forget_records(self) -> None:
        """Go on with an empty record store."""
        records = self.service.records

        async def replace() -> None:
            old, records._store = records._store, open_records("sqlite::memory:")
            await old.close()

        self.call(replace())

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something in the router's event loop and return its result, such as a call of its record store."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the router's event loop."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def inflight(self) -> int:
        """Requests its links account for."""
        return sum(link.inflight for link in self.service.links)

    @property
    def tokens(self) -> int:
        """Tokens that it has of the answers that are being made."""
        return sum(len(each) for live in [*self.service.live.values()] for each in live.stream.outputs)

    def has_begun(self) -> bool:
        """Whether the first tokens of all answers were read, so that what fails now fails on the way."""
        return all(each.first_token_at is not None for each in [*self.service.live])

    @property
    def ready(self) -> int:
        """Controllers it takes for ready."""
        return sum(link.ready for link in self.service.links)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self._listener]))


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.005)


@contextmanager
def asking(router: RunningRouter, path: str, body: Any, **headers: str) -> Iterator[None]:
    """A client that has sent a request, and leaves at the end of the context without having read an answer."""
    url, text = httpx.URL(router.url), json.dumps(body)
    fields = {"Host": url.netloc.decode(), **JSON, "Content-Length": str(len(text)), **headers}
    head = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    request = "\r\n".join([*head, "", text])
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(request.encode())
        yield


def free_port() -> int:
    """A port that was free a moment ago, and that no connection is given."""
    return free_ports()


@contextmanager
def shared_records(kind: str = "sqlite") -> Iterator[str]:
    """The URL of a record store for several routers (`running(…, records=url)`). By default each has its own.
    `kind`: "sqlite" or "redis"."""
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        if kind == "sqlite":
            yield f"sqlite:{folder}/records.sqlite"
            return
        server = RedisServer(Path(folder), "--save", "")
        try:
            server.start()
            yield server.url
        finally:
            server.kill()


@contextmanager
def running(
    folder: Path, tokenizer: Tokenizer, *, controllers: int = 1, wait: bool = True, **options: Any
) -> Iterator[tuple[RunningRouter, list[FakeController]]]:
    """A router with fake controllers, all stopped in the end."""
    fakes = [
        FakeController(f"ipc://{folder}/controller-{index}", make_answer(tokenizer))
        for index in range(controllers)
    ]
    config = RouterConfig(
        **{
            "model_path": str(DEMO_MODEL),
            "controllers": [fake.endpoint for fake in fakes],
            "port": 0,
            "resume_seconds": 0.0,
            "admin_key_digest": hash_key(ADMIN_KEY),
            "served_model_name": "demo",
            "served_model_aliases": ["org/demo-alias"],
            **options,
        }
    )
    router = RunningRouter(config, Tokenizer(config.model_path))
    started = []
    try:
        router.start()
        if wait:
            for fake in fakes:
                started.append(fake.start())
            wait_until(lambda: router.ready == controllers)
        yield router, fakes
    finally:
        router.stop()
        for fake in fakes:
            if fake.running:
                fake.stop()


@contextmanager
def two_routers(
    place: Path, tokenizer: Tokenizer, kind: str = "sqlite"
) -> Iterator[list[tuple[httpx.Client, FakeController]]]:
    """Two routers on one record store of this kind, each with a client and a controller of its own."""
    with ExitStack() as work:
        url = work.enter_context(shared_records(kind))
        routers = []
        for name in ("one", "two"):
            (place / name).mkdir()
            router, [fake] = work.enter_context(running(place / name, tokenizer, records=url))
            routers.append((work.enter_context(router.client()), fake))
        yield routers


@contextmanager
def held_request(fake: FakeController, send: Callable[[], httpx.Response]) -> Iterator[None]:
    """A request that runs at a controller during the context, and is answered then."""
    before = len(fake.behaviour.submits)
    fake.behaviour.hold = True
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(send()))
    thread.start()
    try:
        wait_until(lambda: len(fake.behaviour.submits) > before)
        yield
    finally:
        fake.behaviour.hold = False
        thread.join(60)
    assert answers[0].status_code == 200
