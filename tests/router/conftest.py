"""Fixtures of the router's tests: one router with one scripted controller for all of them, and its clients."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import structlog
from router import api_calls
from router.api_calls import Say
from router.conformance import Server
from router.fake_controller import Behaviour, FakeController
from router.harness import DEMO_MODEL, RunningRouter, make_answer, running, wait_until

from trunkline.router.streams import health, link
from trunkline.router.text.tokenizer import Tokenizer

_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def no_proxy() -> Iterator[None]:
    """Clients must reach this machine itself, whatever proxy its environment names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        yield


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Only errors are logged while these tests run; those of other folders look for warnings."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session", autouse=True)
def quick_pings() -> Iterator[None]:
    """Routers ask their controllers how they are, and connect again, ten times a second instead of once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "PING_SECONDS", 0.1)
        yield


@pytest.fixture(scope="session", autouse=True)
def lasting_health() -> Iterator[None]:
    """A token is proof for `/health` for as long as a test runs: how many probes a controller gets, which count as
    requests there, must not depend on how long ago the last token was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "_FRESH_SECONDS", 3600.0)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[Tokenizer]:
    """The demo model's."""
    loaded = Tokenizer(DEMO_MODEL)
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For sockets; their paths must stay short."""
    return tmp_path_factory.mktemp("r")


@pytest.fixture(scope="session")
def cluster(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[RunningRouter, FakeController]]:
    """A router with one controller, for every test that needs no other shape."""
    with running(_new_place(folder), tokenizer) as (router, [fake]):
        yield router, fake


@pytest.fixture
def router(cluster: tuple[RunningRouter, FakeController]) -> RunningRouter:
    """The shared router. Tests must not change its configuration, nor count what others did with it."""
    return cluster[0]


@pytest.fixture
def fake(cluster: tuple[RunningRouter, FakeController], tokenizer: Tokenizer) -> Iterator[FakeController]:
    """The shared controller, with fresh behaviour, and no records in the router's store; a test must leave nothing
    running there."""
    router, controller = cluster
    controller.behaviour = Behaviour(make_answer(tokenizer))
    router.forgive()
    router.forget_records()
    wait_until(lambda: router.ready == 1)
    yield controller
    controller.behaviour.hold = controller.behaviour.mute = controller.behaviour.queue = False
    wait_until(lambda: router.inflight == 0 and controller.live == 0)
    left = list(router.service.live)
    for generation in left:  # only the test that has left them fails
        router.service.live.end(generation)
    assert not left


@pytest.fixture
def http(router: RunningRouter, fake: FakeController) -> Iterator[httpx.Client]:
    """A client whose requests reach the application without a socket; `router.url` has one."""
    with router.client() as client:
        yield client


@pytest.fixture
def client(router: RunningRouter, fake: FakeController) -> Iterator[openai.OpenAI]:
    """OpenAI's client, without retries."""
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def _new_place(folder: Path) -> Path:
    path = folder / str(next(_numbers))
    path.mkdir()
    return path


@pytest.fixture
def place(folder: Path) -> Path:
    """A folder for one test's sockets."""
    return _new_place(folder)


@pytest.fixture(scope="module")
def module_place(folder: Path) -> Path:
    """One for the sockets of a file's tests. A worker may begin a file twice: those of its tests that start
    processes are given away apart."""
    return _new_place(folder)


@pytest.fixture
def claude(router: RunningRouter, fake: FakeController) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client, without retries."""
    with anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def say(fake: FakeController, tokenizer: Tokenizer) -> Say:
    """Sets what the model answers next."""
    return partial(api_calls.say, fake, tokenizer)


@pytest.fixture
def server(
    client: openai.OpenAI,
    http: httpx.Client,
    fake: FakeController,
    tokenizer: Tokenizer,
    router: RunningRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> Server:
    """The shared router, for cases of other servers' suites."""
    return Server(client, http, fake, tokenizer, router.service, monkeypatch)
