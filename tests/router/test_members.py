"""Groups that come and go while a router runs: a file of members, fake controllers, and requests meanwhile."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from router.fake_controller import FakeController
from router.harness import ADMIN, ADMIN_KEY, DEMO_MODEL, MESSAGES, RunningRouter, make_answer, wait_until

from trunkline.router.config import RouterConfig
from trunkline.router.http import middleware
from trunkline.router.membership import open_source
from trunkline.router.membership.member import Member
from trunkline.router.membership.static_source import StaticSource, write_members
from trunkline.router.tenancy.auth import hash_key
from trunkline.router.text.tokenizer import Tokenizer

WRONG = f"ipc:///{'x' * 200}"
"""An address that no socket can have."""
CHAT: dict[str, Any] = {"messages": MESSAGES}


class Cluster:
    """Fake controllers, and the file that lists them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.file = folder / "members.json"
        self.fakes: dict[str, FakeController] = {}
        self._folder = folder
        self._script = make_answer(tokenizer)
        self._started = 0
        self._members: dict[str, Member] = {}
        write_members(self.file, [])

    def join(self, name: str) -> FakeController:
        """Start a controller; the file lists it."""
        self._started += 1
        fake = FakeController(f"ipc://{self._folder}/{self._started}", self._script).start()
        self.fakes[name] = fake
        self._members[name] = Member(name, fake.endpoint)
        write_members(self.file, self._members.values())
        return fake

    def leave(self, name: str) -> FakeController:
        """Take a controller off the file. It goes on working."""
        del self._members[name]
        write_members(self.file, self._members.values())
        return self.fakes.pop(name)


def names(router: RunningRouter) -> list[str]:
    """The groups that are ready."""
    return [link.name for link in router.service.links if link.ready]


@contextmanager
def running(folder: Path, tokenizer: Tokenizer, **options: Any) -> Iterator[tuple[RunningRouter, Cluster]]:
    cluster = Cluster(folder, tokenizer)
    config = RouterConfig(
        model_path=str(DEMO_MODEL),
        controllers=[],
        members=f"static:{cluster.file}",
        port=0,
        admin_key_digest=hash_key(ADMIN_KEY),
        **options,
    )
    router = RunningRouter(config, Tokenizer(DEMO_MODEL))
    try:
        router.start()
        yield router, cluster
    finally:
        router.stop()
        for fake in cluster.fakes.values():
            fake.stop()


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_source, "StaticSource", functools.partial(StaticSource, check_seconds=0.01))


def ask(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200, response.text


def test_groups_join_and_leave_a_running_router(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer) as (router, cluster), router.client() as http:
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert "no group has joined" in refused.json()["error"]["message"]
        cluster.join("a")
        wait_until(lambda: names(router) == ["a"])
        ask(http)
        cluster.join("b")
        wait_until(lambda: names(router) == ["a", "b"])
        cluster.leave("a").stop()
        wait_until(lambda: names(router) == ["b"])
        for _ in range(5):
            ask(http)
        assert len(cluster.fakes["b"].behaviour.submits) >= 5
        cluster.join("c")
        wait_until(lambda: names(router) == ["b", "c"])
        groups = http.get("/health").json()["controllers"]
        assert [(each["index"], each["name"]) for each in groups] == [(1, "b"), (2, "c")]
        shown = http.get("/metrics").text
        assert 'trunkline_controller_ready{controller="c"} 1.0' in shown
        assert 'trunkline_routing_decisions_total{controller="b"' in shown
        # The series of groups that are gone end, when nothing needs their connections any more.
        wait_until(lambda: 'controller="a"' not in http.get("/metrics").text)
        overview = http.get("/ui/api/overview", headers=ADMIN).json()
        assert [each["name"] for each in overview["groups"]] == ["b", "c"]


def test_the_log_names_groups(place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of routing are given to other groups in time."""
    with running(place, tokenizer) as (router, cluster), router.client() as http:
        for name in ("a", "b"):
            cluster.join(name)
        wait_until(lambda: names(router) == ["a", "b"])
        cluster.leave("a").stop()
        wait_until(lambda: names(router) == ["b"])
        log = Mock()
        monkeypatch.setattr(middleware, "_log", log)
        ask(http)
        wait_until(lambda: log.info.mock_calls)
        [request] = log.info.mock_calls
        assert (request.args, request.kwargs["group"]) == (("request",), "b")


def test_a_group_that_leaves_ends_its_requests(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer) as (router, cluster), router.client() as http:
        fake = cluster.join("a")
        wait_until(lambda: names(router) == ["a"])
        fake.behaviour.hold = True
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(http.post("/v1/chat/completions", json=CHAT)))
        asking.start()
        wait_until(lambda: fake.live == 1)
        cluster.leave("a")
        cluster.join("b")
        wait_until(lambda: names(router) == ["b"])
        for _ in range(3):
            ask(http)
        assert len(fake.behaviour.submits) == 1, "it gets no new ones"
        fake.behaviour.hold = False
        asking.join(20)
        assert answers[0].status_code == 200
        assert len(fake.behaviour.submits) == 1
        fake.stop()


def test_a_group_that_leaves_and_dies_loses_no_request(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer, resume_seconds=20.0) as (router, cluster), router.client() as http:
        fake = cluster.join("a")
        wait_until(lambda: names(router) == ["a"])
        fake.behaviour.hold = True
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(http.post("/v1/chat/completions", json=CHAT)))
        asking.start()
        wait_until(lambda: fake.live == 1)
        router.service.links[0]._silence_seconds = 0.5
        cluster.leave("a")
        cluster.join("b")
        wait_until(lambda: names(router) == ["b"])
        fake.stop()
        asking.join(20)
        assert answers[0].status_code == 200
        assert len(cluster.fakes["b"].behaviour.submits) == 1


def test_a_group_comes_back_under_another_address(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer, resume_seconds=20.0) as (router, cluster), router.client() as http:
        for name in "ab":
            cluster.join(name)
        wait_until(lambda: names(router) == ["a", "b"])
        slot = next(link.index for link in router.service.links if link.name == "a")
        old = cluster.fakes["a"]
        new = cluster.join("a")
        old.stop()
        wait_until(lambda: [link.endpoint for link in router.service.links if link.ready][slot] == new.endpoint)
        for number in range(8):  # eight conversations: the turns of one stay where it is
            content = f"{number}: tell me of it"
            told = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
            assert told.status_code == 200
        assert new.behaviour.submits
        assert [link.index for link in router.service.links] == [0, 1]


def test_a_broken_file_of_members_changes_nothing(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer) as (router, cluster), router.client() as http:
        cluster.join("a")
        wait_until(lambda: names(router) == ["a"])
        cluster.file.write_text("{")
        wait_until(lambda: "members" in http.get("/health").json())
        assert "members.json" in http.get("/health").json()["members"]
        ask(http)
        cluster.join("b")
        wait_until(lambda: names(router) == ["a", "b"])
        assert "members" not in http.get("/health").json()


def test_an_address_that_cannot_be_used_hides_no_other_group(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer) as (router, cluster), router.client() as http:
        cluster.join("a")
        wait_until(lambda: names(router) == ["a"])
        wrong = [Member("w1", WRONG), Member("w2", "ipc:///x", WRONG)]
        cluster._members.update({member.id: member for member in wrong})
        cluster.join("b")
        wait_until(lambda: names(router) == ["a", "b"])
        cluster.join("c")
        cluster._members["b"] = Member("b", WRONG)
        cluster.leave("a").stop()
        wait_until(lambda: [link.name for link in router.service.links] == ["c"])
        cluster.leave("b").stop()
        cluster.join("d")
        wait_until(lambda: set(names(router)) == {"c", "d"})
        ask(http)


def test_a_configuration_names_controllers_or_a_source() -> None:
    for controllers, members, problem in (
        ([], "", "or else `members`"),
        (["ipc:///x"], "records", "or else `members`"),
        ([], "consul://x", "must be one of static:PATH"),
    ):
        config = RouterConfig(model_path=str(DEMO_MODEL), controllers=controllers, members=members)
        with pytest.raises(ValueError, match=problem):
            config.validate()
