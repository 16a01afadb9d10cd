"""What the dashboard says of a real cluster, against what the cluster says of itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster.chaos import frozen
from cluster.harness import Cluster, wait_for

from trunkline.kvstore.tier import TierKind
from trunkline.router.tenancy.auth import hash_key

pytestmark = pytest.mark.processes

OPTIONS = ("--groups", "2", "--tp", "1", "--threads", "1", "--kv-memory", "32MiB", "--host-tier", "16MiB")
DEVICE, HOST, DISK = 1, 2, 4
WORDS = "harbour village river bridge market tower garden station museum castle".split()
SETTLE_SECONDS = 20.0


KEY = "tl-a-key-of-a-tenant"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("tenants") / "tenants.json"
    path.write_text(json.dumps({"tenants": {"acme": {"keys": [hash_key(KEY)]}}}))
    path.chmod(0o600)
    with Cluster(*OPTIONS, "--tenants", str(path)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(served: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers=served.admin_headers, timeout=60.0) as client:
        yield client


def get(admin: httpx.Client, path: str) -> Any:
    answer = admin.get(f"/ui/api/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(admin: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = admin.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def check_tree(tree: dict[str, Any]) -> None:
    """What holds of any tree, whatever runs meanwhile."""
    size = tree["chunk_size"]
    for index, node in enumerate(tree["nodes"]):
        assert -1 <= node["parent"] < index, "preorder"
        assert 0 < node["tokens"] <= node["chunks"] * size
        assert 0 < node["tiers"] < 1 << len(TierKind)
        assert node["age_s"] >= 0
        if node["parent"] >= 0:
            above = tree["nodes"][node["parent"]]
            assert above["tokens"] == above["chunks"] * size, "only leaves end within a chunk"
    assert sum(node["chunks"] for node in tree["nodes"]) == tree["chunks_shown"] <= tree["chunks"]


def check_quiet(admin: httpx.Client, group: int) -> bool:
    """Whether a group's tree says what its `State` says, now that nothing runs."""
    tree = get(admin, f"tree?group={group}&nodes=10000")
    check_tree(tree)
    for node in tree["nodes"]:
        if node["parent"] >= 0 and node["tiers"] & DEVICE:
            assert tree["nodes"][node["parent"]]["tiers"] & DEVICE, "what is above it is there, too"
    [state] = [each for each in get(admin, "overview")["groups"] if each["group"] == group]
    used = {tier["name"]: tier["used"] for tier in state["tiers"]}
    counted = {
        name: sum(node["chunks"] for node in tree["nodes"] if node["tiers"] & bit)
        for name, bit in (("device", DEVICE), ("host", HOST), ("disk", DISK))
    }
    return (
        not tree["truncated"]
        and tree["chunks_shown"] == tree["chunks"]
        and counted["device"] == state["blocks"]["cached"] == used["device"]
        and counted["host"] == used["host"]
        and counted["disk"] == used["disk"]
        and all(node["users"] == 0 for node in tree["nodes"])
    )


def test_trees_say_what_groups_say(admin: httpx.Client) -> None:
    """Random conversations, more than the device holds; the tree is looked at all the while."""
    rng = random.Random(7)
    begins = [text(rng, 60) for _ in range(4)]
    prompts = [f"{rng.choice(begins)} {text(rng, rng.randrange(5, 120))}" for _ in range(60)]
    bodies = [{"prompt": prompt, "max_tokens": rng.randrange(1, 12), "ignore_eos": True} for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(post, admin, "/v1/completions", body) for body in bodies]
        shared = 0
        while not all(answer.done() for answer in answers):
            for group in range(2):
                tree = get(admin, f"tree?group={group}&nodes=200")
                check_tree(tree)
                shared = max(shared, *(node["users"] for node in tree["nodes"]), 0)
        for answer in answers:
            answer.result()
    assert shared >= 1
    wait_for(lambda: all(check_quiet(admin, group) for group in range(2)), SETTLE_SECONDS)
    groups = get(admin, "overview")["groups"]
    assert sum(tier["evictions"] for group in groups for tier in group["tiers"]) > 0, "it was more than fits"
    short = get(admin, "tree?group=0&nodes=2")
    assert len(short["nodes"]) == 2
    assert short["truncated"]


def test_users_of_a_shared_prefix(served: Cluster, admin: httpx.Client) -> None:
    rng = random.Random(11)
    beginning = text(rng, 100)
    body = {"prompt": beginning, "max_tokens": 1}
    post(admin, "/v1/completions", body)

    def trunk() -> dict[str, Any] | None:
        nodes = [node for group in range(2) for node in get(admin, f"tree?group={group}")["nodes"]]
        found = [n for n in nodes if n["parent"] < 0 and n["text"].removeprefix("<|bos|>")[:20] == beginning[:20]]
        return found[0] if found else None

    def look() -> None:
        wait_for(lambda: (trunk() or {"users": 0})["users"] == 3, SETTLE_SECONDS)
        found = trunk()
        assert found is not None
        assert found["tiers"] & DEVICE
        [request] = get(admin, "requests")
        assert (request["session"], request["samples"], request["state"]) == ("shared", 3, "running")
        assert request["cached_tokens"] > 0
        assert request["cached_by_tier"][0] == request["cached_tokens"]

    long = body | {"max_tokens": 600, "ignore_eos": True, "n": 3, "stream": True, "session_id": "shared"}
    with admin.stream("POST", "/v1/completions", json=long) as stream:
        begun: set[int] = set()
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        while len(begun) < 3:
            begun |= {choice["index"] for choice in json.loads(next(lines)[6:])["choices"]}
        workers = [pid for name, pid in served.pids.items() if name.startswith("worker")]
        frozen(workers, look)  # else it may have ended before it is looked at
    wait_for(lambda: get(admin, "requests") == [], SETTLE_SECONDS)
    wait_for(lambda: all(check_quiet(admin, group) for group in range(2)), SETTLE_SECONDS)


def test_sessions_and_decisions(admin: httpx.Client) -> None:
    session = post(admin, "/v1/sessions", {})["id"]
    rng = random.Random(13)

    def row() -> dict[str, Any]:
        rows = [each for each in get(admin, "sessions") if each["id"] == session]
        return rows[0] if rows else {"turns": None}  # up to a second old

    def is_known(turns: int) -> bool:
        """Whether the router has heard where the KV of so many turns is: that may come after their answers."""
        return row()["turns"] == turns and row()["tier"] in ("device", "host", "disk")

    for turns in (1, 2):
        messages = [{"role": "user", "content": text(rng, 80)}]
        body = {"messages": messages, "session_id": session, "max_tokens": 5}
        post(admin, "/v1/chat/completions", body)
        wait_for(lambda turns=turns: is_known(turns), SETTLE_SECONDS)  # type: ignore[misc]
    last = [each for each in get(admin, "decisions?limit=1000")["decisions"] if each["session"] == session][-1]
    assert (last["reason"], last["group"]) == ("session", row()["group"])
    assert len(last["match"]) == 2
    assert next(m for m in last["match"] if m["group"] == last["group"])["device"] > 0
    assert 0 < row()["cached_tokens"] <= row()["tokens"]

    def tokens_in_tree() -> int:
        tree = get(admin, f"tree?group={row()['group']}")  # the last one, if it is young
        return sum(node["tokens"] for node in tree["nodes"] if session in node["sessions"])

    wait_for(lambda: tokens_in_tree() >= row()["cached_tokens"], SETTLE_SECONDS)


def test_what_a_tenant_does_is_told_to_admins(served: Cluster, admin: httpx.Client) -> None:
    """Its sessions, in the tree of its own salt."""
    rng = random.Random(17)
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60.0) as tenant:
        session = post(tenant, "/v1/sessions", {})["id"]
        body = {"messages": [{"role": "user", "content": text(rng, 120)}], "session_id": session, "max_tokens": 5}
        post(tenant, "/v1/chat/completions", body)

    def row() -> dict[str, Any]:
        rows = [each for each in get(admin, "sessions") if each["id"] == session]
        return rows[0] if rows else {"tier": None}

    wait_for(lambda: row()["tier"] in ("device", "host", "disk"), SETTLE_SECONDS)
    assert (row()["tenant"], row()["turns"]) == ("acme", 1)

    def tree() -> dict[str, Any]:
        found: dict[str, Any] = get(admin, f"tree?group={row()['group']}")  # the last one, if it is young
        return found

    def mine(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [node for node in nodes if session in node["sessions"]]

    wait_for(lambda: mine(tree()["nodes"]) != [], SETTLE_SECONDS)
    nodes = tree()["nodes"]
    assert all(node["salted"] for node in mine(nodes))
    assert any(not node["salted"] for node in nodes)
    last = [each for each in get(admin, "decisions?limit=1000")["decisions"] if each["session"] == session][-1]
    assert last["tenant"] == "acme"
    assert get(admin, "overview")["auth"] == {"required": True, "problem": ""}
