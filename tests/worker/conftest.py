"""What the tests of the workers share: checkpoints, a compiler of grammars, a server of the Redis protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker.checkpoints import Models
from worker.grammar_driver import Grammars, V
from worker.redis_server import RedisServer
from worker.s3_server import S3Server, credentials
from worker.tier_driver import LAYERS, never_away

from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.worker.grammar.compiler import GrammarStore


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints by name, each written once."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def folder(models: Models) -> Path:
    """A small Llama with grouped queries."""
    return models()


@pytest.fixture(scope="session")
def deep(models: Models) -> Path:
    """The same with more layers, to be loaded one by one."""
    return models(num_hidden_layers=LAYERS)


@pytest.fixture(scope="session")
def expected(deep: Path) -> list[Any]:
    """What a traveller of the `deep` model gives."""
    return never_away(deep)


@pytest.fixture(scope="session")
def grammars() -> Iterator[Grammars]:
    """Grammars over the demo model's tokens. Its trial process takes seconds to start. Trials have enough time on
    a busy machine: hostile ones are refused for the CPU time that they take."""
    store = GrammarStore(DEMO_FOLDER, V, seconds_max=60.0)
    yield Grammars(store)
    store.close()


@pytest.fixture(scope="session")
def redis_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that do not kill it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_server(redis_shared: RedisServer) -> RedisServer:
    """A server that holds nothing and takes everything."""
    redis_shared.begin_anew()
    return redis_shared


@pytest.fixture(scope="session")
def s3_shared() -> Iterator[S3Server]:
    """One server for all tests that do not kill it."""
    server = S3Server()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3_server(s3_shared: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server with an empty bucket, which this process may use."""
    credentials(monkeypatch)
    s3_shared.begin_anew()
    return s3_shared
