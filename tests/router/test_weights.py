"""Which weights serve a model whose groups have different ones: the rule, and routers that follow it."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from router.fake_controller import FakeController
from router.harness import DEMO_MODEL, MESSAGES, RunningRouter, make_answer, wait_until
from seeds import seeds

from trunkline.router.config import RouterConfig
from trunkline.router.membership.member import Member
from trunkline.router.membership.static_source import write_members
from trunkline.router.messages import FinishReason, GroupIdentity
from trunkline.router.streams.weights_in_force import HOLD_SECONDS, SETTLE_SECONDS, Said, WeightsInForce
from trunkline.router.text.tokenizer import Tokenizer

OLD, NEW = "old weights", "new weights"


def used(rule: WeightsInForce[str], said: dict[str, Said]) -> set[str]:
    """The weights of all groups that requests may go to."""
    return {each.weights for group, each in said.items() if each.serves and not rule.refuses(group)}


def test_the_first_that_serve_stay_until_the_last_of_them_has_left() -> None:
    rule = WeightsInForce[str]()
    rule.note("a", Said(OLD, serves=False), 0.0)
    rule.note("n", Said(NEW, serves=False, epoch=5), 0.0)
    assert not rule.refuses("n"), "nothing serves yet"
    rule.note("a", Said(OLD, serves=True, epoch=1), 1.0)
    rule.note("b", Said(OLD, serves=True, epoch=2), 1.0)
    rule.note("n", Said(NEW, serves=True, epoch=5), 10.0)
    assert (rule.refuses("n"), rule.refuses("a"), rule.refuses("b")) == (OLD, "", "")
    rule.forget("a", 20.0)
    rule.note("n", Said(NEW, serves=True, epoch=5), 20.0)
    assert rule.refuses("n") == OLD
    rule.note("b", Said(OLD, serves=False, leaves=True, epoch=2), 30.0)
    assert (rule.current, rule.refuses("n"), rule.refuses("b")) == (NEW, "", "")
    rule.note("b", Said(OLD, serves=True, epoch=2), 40.0)
    assert (rule.current, rule.refuses("b")) == (NEW, NEW), "it was drained, and came back too late"


def test_weights_that_were_lost_have_some_time_to_come_back() -> None:
    rule = WeightsInForce[str]()
    rule.note("a", Said(OLD, serves=True, epoch=1), 0.0)
    rule.note("n", Said(NEW, serves=True, epoch=5), 5.0)
    rule.note("a", Said(OLD, serves=True, epoch=1), 50.0)
    rule.lost("a", 50.0)
    for now in (51.0, 50.0 + HOLD_SECONDS - 0.5):
        rule.note("n", Said(NEW, serves=True, epoch=5), now)
        assert rule.refuses("n") == OLD
    rule.note("n", Said(NEW, serves=True, epoch=5), 50.0 + HOLD_SECONDS)
    assert (rule.current, rule.refuses("a")) == (NEW, NEW)


def test_a_group_that_drained_before_it_was_lost_is_not_waited_for() -> None:
    rule = WeightsInForce[str]()
    rule.note("a", Said(OLD, serves=True), 0.0)
    rule.note("a", Said(OLD, serves=False, leaves=True), 9.0)
    rule.lost("a", 9.1)
    rule.note("n", Said(NEW, serves=True), 9.2)
    assert rule.current == NEW


def test_a_group_that_is_started_with_other_weights_belongs_to_them() -> None:
    rule = WeightsInForce[str]()
    for name in "ab":
        rule.note(name, Said(OLD, serves=True, epoch=1), 0.0)
    rule.note("a", Said(NEW, serves=True, epoch=7), 10.0)
    assert (rule.refuses("a"), rule.refuses("b")) == (OLD, "")
    rule.note("b", Said(NEW, serves=False, epoch=8), 20.0)
    assert (rule.current, rule.refuses("a"), rule.refuses("b")) == (NEW, "", "")


@pytest.mark.parametrize("seed", seeds(3))
def test_routers_that_start_while_two_serve_choose_alike(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        said = {
            f"{index}": Said(rng.choice((OLD, NEW, "third")), rng.random() < 0.8, epoch=rng.randrange(5))
            for index in range(rng.randint(1, 9))
        }
        chosen = set()
        for _ in range(4):
            rule, now = WeightsInForce[str](), 100.0
            for name in rng.sample(list(said), len(said)):
                rule.note(name, said[name], now)
                now += rng.random() * SETTLE_SECONDS / len(said)
            chosen.add(rule.current)
        assert len(chosen) == 1, said


@pytest.mark.parametrize("seed", seeds(3))
def test_random_steps(seed: int) -> None:
    """At no time two sets are used; one set is used within `HOLD_SECONDS` of the loss of the other; and while a
    group of the set in force serves, nothing takes its place."""
    rng = random.Random(seed)
    for _ in range(20):
        rule, said, now = WeightsInForce[str](), dict[str, Said](), 0.0
        unused_since: float | None = None
        was, since, served = "", now, set[str]()
        for _ in range(400):
            now += rng.expovariate(1.0)
            name = str(rng.randrange(6))
            known = said.get(name)
            match rng.randrange(8):
                case 0 if known:
                    rule.forget(name, now)
                    del said[name]
                case 1 if known:
                    rule.lost(name, now)
                    said[name] = known._replace(serves=False)
                case 2 | 3:
                    said[name] = Said(
                        rng.choice((OLD, NEW, "third")),
                        serves := rng.random() < 0.7,
                        not serves and rng.random() < 0.5,
                        int(now),
                    )
                    rule.note(name, said[name], now)
            for each, what in said.items():  # a ping
                if what.serves or rng.random() < 0.5:
                    rule.note(each, what, now)
            serving = {each.weights for each in said.values() if each.serves}
            assert len(rule) == len(said)
            assert len(used(rule, said)) <= 1
            assert used(rule, said) <= {rule.current}
            unused_since = None if used(rule, said) or not serving else unused_since or now
            assert unused_since is None or now - unused_since <= HOLD_SECONDS
            if rule.current != was:
                if was in serving & served:
                    assert now - since < SETTLE_SECONDS, "older groups come first in the beginning only"
                was, since = rule.current, now
            served = serving


def test_a_thousand_groups_are_counted() -> None:
    rule = WeightsInForce[int]()
    for turn in range(3):
        for group in range(1000):
            rule.note(group, Said((OLD, NEW)[group % 2], serves=True, epoch=1 + group % 2), float(turn))
    assert rule.current == OLD
    assert sum(bool(rule.refuses(group)) for group in range(1000)) == 500
    for group in range(0, 1000, 2):
        rule.forget(group, 10.0)
    assert (rule.current, len(rule)) == (NEW, 500)
    for group in range(1, 1000, 2):
        rule.forget(group, 20.0)
    assert (rule.current, len(rule), list(rule)) == ("", 0, [])


class Cluster:
    """Fake groups with weights, and a router that follows a list of members."""

    def __init__(self, place: Path, tokenizer: Tokenizer, stack: ExitStack, *, named: bool = False) -> None:
        self._place = place
        self._tokenizer = tokenizer
        self._stack = stack
        self.fakes: dict[str, FakeController] = {}
        self.list_members()
        config = RouterConfig(
            model_path=str(DEMO_MODEL),
            served_model_name="m",
            model_is_named=named,
            controllers=[],
            members=f"static:{place / 'members.json'}",
            port=0,
            resume_seconds=20.0,
        )
        self.router = RunningRouter(config, Tokenizer(DEMO_MODEL))
        self.router.start()
        stack.callback(self.router.stop)

    def add(self, name: str, weights: str, model: str = "m", *, named: bool = False) -> FakeController:
        """Start a group that is a member."""
        fake = FakeController(f"ipc://{self._place}/{name}", make_answer(self._tokenizer))
        fake.behaviour.group = GroupIdentity(name, model, self._tokenizer.fingerprint, weights, named)
        fake.start()
        self._stack.callback(lambda: fake.stop() if fake.running else None)
        self.fakes[name] = fake
        self.list_members()
        return fake

    def remove(self, name: str) -> None:
        """A group is no member any more; it runs on."""
        self.fakes[name + " that left"] = self.fakes.pop(name)
        self.list_members()

    def list_members(self) -> None:
        members = [Member(name, fake.endpoint) for name, fake in self.fakes.items() if " " not in name]
        write_members(self._place / "members.json", members)

    def problems(self) -> dict[str, str]:
        """Why each group is not used; "": it is."""
        with self.router.client() as http:
            found = http.get("/health").json()["controllers"]
        return {each["name"]: each["problem"] or ("" if each["ready"] else each["status"]) for each in found}

    def ask(self, count: int = 6) -> None:
        with self.router.client() as http:
            for number in range(count):
                body = {"messages": [{"role": "user", "content": f"{number} {MESSAGES[0]['content']}"}]}
                assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_other_weights_stand_by_until_the_first_have_left(place: Path, tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        cluster = Cluster(place, tokenizer, stack)
        cluster.add("a", "11" * 16)
        wait_until(lambda: cluster.problems() == {"a": ""})
        cluster.add("b", "11" * 16)
        new = cluster.add("n", "22" * 16)
        cluster.add("unknown", "")
        wait_until(lambda: len(found := cluster.problems()) == 4 and not any(found[each] for each in "ab"))
        wait_until(lambda: "its weights (222222222222) are others" in cluster.problems()["n"])
        assert "serve model 'm' now (111111111111)" in cluster.problems()["n"]
        cluster.ask()
        cluster.remove("a")
        wait_until(lambda: len(cluster.problems()) == 3)
        cluster.ask()
        assert not new.behaviour.submits
        assert cluster.problems()["unknown"] == "", "an older version does not tell its weights"
        cluster.remove("b")
        wait_until(lambda: cluster.problems() == {"n": "", "unknown": ""})
        cluster.ask(12)
        assert new.behaviour.submits
        cluster.add("late", "33" * 16)
        wait_until(lambda: "(222222222222)" in cluster.problems().get("late", ""))
        late = cluster.fakes["late"].behaviour
        late.group = msgspec.structs.replace(late.group, weights="22" * 16)
        wait_until(lambda: cluster.problems()["late"] == "")


@pytest.mark.parametrize("weights", ["11" * 16, "22" * 16])
def test_an_answer_does_not_go_on_with_other_weights(place: Path, tokenizer: Tokenizer, weights: str) -> None:
    """Its group drains and dies. A group with the same weights goes on, one with others must not."""
    with ExitStack() as stack:
        cluster = Cluster(place, tokenizer, stack)
        first = cluster.add("a", "11" * 16)
        first.behaviour.pause_after = 6
        wait_until(lambda: cluster.problems() == {"a": ""})
        cluster.add("n", weights)
        wait_until(lambda: len(cluster.problems()) == 2)
        if weights == "11" * 16:
            wait_until(lambda: not any(cluster.problems().values()))
        http = stack.enter_context(cluster.router.client())
        body = {"messages": MESSAGES, "stream": True}
        second = cluster.fakes["n"].behaviour
        second.refuse = FinishReason.QUEUE_FULL  # so that the request goes to the first group
        lines = []
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                if first.running and '"content"' in line:
                    wait_until(lambda: first.paused == 1)  # in the middle of the answer
                    first.behaviour.status, second.refuse = "draining", None
                    wait_until(lambda: cluster.problems()["n"] == "")
                    first.stop()
        text = "\n".join(lines)
        if weights == "11" * 16:
            assert '"finish_reason":"stop"' in text
            assert len(second.submits) >= 1
        else:
            assert "the model's weights were changed while the answer was generated" in text
            assert '"finish_reason":"stop"' not in text
        cluster.ask()


@pytest.mark.parametrize(
    ("router_named", "group_named", "is_used"),
    [(True, True, False), (True, False, True), (False, True, True), (False, False, True)],
)
def test_names_that_both_were_given_must_agree(
    place: Path, tokenizer: Tokenizer, *, router_named: bool, group_named: bool, is_used: bool
) -> None:
    with ExitStack() as stack:
        cluster = Cluster(place, tokenizer, stack, named=router_named)
        cluster.add("a", "11" * 16, "another", named=group_named)
        wait_until(lambda: len(cluster.problems()) == 1)
        expected = "" if is_used else "it serves model 'another'; this router has 'm'"
        wait_until(lambda: cluster.problems()["a"].partition(". ")[0] == expected)
        cluster.add("b", "11" * 16, "m", named=True)
        wait_until(lambda: cluster.problems().get("b") == "")
