"""The dashboard's endpoints over real HTTP and ZeroMQ, with controllers that say what a test wants."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from router.fake_controller import FakeController
from router.harness import ADMIN, DEMO_MODEL, JSON, MESSAGES, RunningRouter, asking, running, wait_until

from trunkline.kvstore.records import Reading, RecordKey
from trunkline.router.messages import TierState, TreeDescription
from trunkline.router.routing.handover import HandoverCounts
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.ui.assets import PAGE, Assets
from trunkline.router.ui.stored import FRESH_SECONDS


@pytest.fixture
def admin(router: RunningRouter, fake: FakeController) -> Iterator[httpx.Client]:
    """An operator."""
    headers = {**ADMIN, **JSON}
    with httpx.Client(base_url=router.url, timeout=20, headers=headers, trust_env=False) as client:
        yield client


def get(client: httpx.Client, path: str) -> Any:
    answer = client.get(f"/ui/api/{path}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def tree_of(ids: list[int], name: int = 1) -> TreeDescription:
    """One node."""

    def pack(*numbers: int) -> bytes:
        return np.array(numbers, "<i4").tobytes()

    return TreeDescription(
        seq=0,
        ticket=0,
        chunk_size=64,
        total_chunks=1,
        names=bytes([name]) * 16,
        parents=pack(-1),
        tokens=pack(len(ids)),
        chunks=pack(1),
        tiers=b"\x05",
        flags=b"\0",
        users=pack(2),
        ages=np.array([3.25], "<f4").tobytes(),
        hidden=pack(0),
        heads=pack(*ids),
        head_tokens=bytes([len(ids)]),
    )


def test_the_page_and_its_files(http: httpx.Client) -> None:
    page = http.get("/ui")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["x-frame-options"] == "DENY"
    asset = Assets().find(PAGE)
    assert asset is not None
    assert page.content == asset.content
    again = http.get("/ui", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == page.headers["etag"]
    plain = http.get("/ui", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert page.headers["content-encoding"] == "gzip"
    head = http.head("/ui")
    assert (head.status_code, head.content) == (200, b"")
    with_slash = http.get("/ui/")
    assert with_slash.status_code == 308
    assert httpx.URL(f"{http.base_url}/ui/").join(with_slash.headers["location"]).path == "/ui"


@pytest.mark.parametrize("path", ["nothing.js", "..%2fassets.py"])
def test_no_other_files(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/ui/static/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("history?seconds=0", "seconds"),
        ("history?seconds=1e9", "seconds"),
        ("history?after=nan", "after"),
        ("history?after=-1", "after"),
        ("tree?nodes=0", "nodes"),
        ("tree?nodes=10001", "nodes"),
        ("tree?group=1.5", "group"),
        ("tree?group=-1", "group"),
        ("tree?group=" + "9" * 5000, "group"),
        ("sessions?limit=x", "limit"),
        ("decisions?after=", "after"),
        ("decisions?limit=0", "limit"),
    ],
)
def test_wrong_numbers(admin: httpx.Client, path: str, param: str) -> None:
    answer = admin.get(f"/ui/api/{path}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "between" in error["message"]


def test_overview(admin: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.tiers = [TierState("disk", 100, 7, 64, 3, 2, 1, 5, "it is full")]
    fake.behaviour.misses = {"new": 3}
    wait_until(lambda: bool(get(admin, "overview")["groups"][0]["tiers"]))
    found = get(admin, "overview")
    assert abs(found["now"] - time.time()) < 60
    assert found["model"] == "demo"
    assert found["auth"]["required"] is False
    assert found["router"]["routers"] == 1
    [group] = found["groups"]
    assert (group["group"], group["ready"], group["status"]) == (0, True, "ready")
    assert group["blocks"] == {"total": 100, "free": 90, "cached": 5}
    assert group["tiers"] == [
        {
            "name": "disk",
            "slots": 100,
            "used": 7,
            "hit_tokens": 64,
            "writes": 3,
            "reads": 2,
            "evictions": 1,
            "failures": 5,
            "problem": "it is full",
        }
    ]
    assert group["misses"] == {"new": 3}
    assert group["pulls"] is None


def test_what_travels_between_groups(admin: httpx.Client, fake: FakeController, router: RunningRouter) -> None:
    fake.behaviour.tiers = [TierState("peer", 0, 7, 640, 0, 20, 0, 1)]
    state = fake._state
    fake._state = lambda sequence: msgspec.structs.replace(  # type: ignore[method-assign]
        state(sequence),
        block_bytes=1000,
        exports=["ipc:///x"],
        prefill_us=600.0,
        load_us=[0.0, 1.0, 2.0, 3.0, 100.0],
        pulls_given_up={"slow": 4},
    )
    wait_until(lambda: bool(get(admin, "overview")["groups"][0]["pulls"]))
    found = get(admin, "overview")
    assert found["groups"][0]["pulls"] == {
        "exports": True,
        "tokens": 640,
        "chunks": 20,
        "bytes": 20_000,
        "saved_s": 0.32,
        "given_up": {"slow": 4},
    }
    assert found["router"]["handovers"]["drain"]["count"] == 0
    router.service.metrics.routing.handovers.ended("drain", HandoverCounts(paths=3, chunks=40, given_up=1), 1.5)
    router.service.metrics.routing.handovers.ended("drain", HandoverCounts(paths=1, chunks=2), 0.5)
    handed = get(admin, "overview")["router"]["handovers"]
    assert handed["drain"] == {"count": 2, "paths": 4, "chunks": 42, "given_up": 1, "seconds": 2.0}
    assert handed["warm_up"] == {"count": 0, "paths": 0, "chunks": 0, "given_up": 0, "seconds": 0.0}


def test_history(admin: httpx.Client) -> None:
    wait_until(lambda: len(get(admin, "history")["t"]) >= 2)
    found = get(admin, "history?seconds=900")
    assert found["t"] == sorted(found["t"])
    assert abs(found["t"][-1] - time.time()) < 60
    assert found["series"]["group.0.ready"][-1] == 1
    assert all(len(series) == len(found["t"]) for series in found["series"].values())
    later = get(admin, f"history?after={found['t'][0]}")
    assert later["t"][: len(found["t"]) - 1] == pytest.approx(found["t"][1:], abs=0.01)
    assert get(admin, "history?after=99999999999") | {"now": 0} == {"t": [], "series": {}, "now": 0}


def test_requests_that_wait(admin: httpx.Client, router: RunningRouter, fake: FakeController) -> None:
    """Their clients leave before they are admitted."""
    assert get(admin, "requests") == []
    fake.behaviour.queue = True
    body = {"messages": MESSAGES, "max_tokens": 5, "session_id": "label"}
    path = "/v1/chat/completions"
    with asking(router, path, body), asking(router, path, body):
        wait_until(lambda: len(get(admin, "requests")) == 2)
        found = get(admin, "requests")
        decisions = get(admin, "decisions")["decisions"][-2:]
    assert {each["state"] for each in found} == {"waiting"}
    assert {(each["group"], each["session"], each["max_tokens"]) for each in found} == {(0, "label", 5)}
    assert all(each["age_s"] >= 0 and each["ttft_s"] is None for each in found)
    assert len({each["id"] for each in found}) == 2
    assert {each["request"] for each in decisions} == {each["id"] for each in found}
    assert found[0]["prompt_tokens"] == decisions[0]["prompt_tokens"] > 0
    wait_until(lambda: get(admin, "requests") == [])


def test_a_running_request(admin: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.seconds_per_token = 0.02
    fake.behaviour.cached_tokens = 3
    body = {"prompt": "import os", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with admin.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as stream:
        lines = stream.iter_lines()  # closes the stream when it goes
        next(lines)
        with httpx.Client(base_url=admin.base_url, headers=ADMIN, trust_env=False) as other:
            wait_until(lambda: get(other, "requests")[0]["ttft_s"] is not None)
            [found] = get(other, "requests")
            assert (found["id"], found["state"], found["cached_tokens"]) == ("mine", "running", 3)
            assert 1 <= found["output_tokens"] <= 1500
            assert 0 < found["ttft_s"] <= found["age_s"]


def test_decisions(admin: httpx.Client, fake: FakeController) -> None:
    before = get(admin, "decisions")["next"]
    for index in range(3):
        body = {"messages": MESSAGES, "max_tokens": 1, "session_id": f"s{index}"}
        assert admin.post("/v1/chat/completions", json=body).status_code == 200
    found = get(admin, f"decisions?after={before}")
    assert found["next"] == before + 3
    assert [each["n"] for each in found["decisions"]] == [before + 1, before + 2, before + 3]
    assert [each["session"] for each in found["decisions"]] == ["s0", "s1", "s2"]
    last = found["decisions"][-1]
    assert (last["group"], last["reason"], last["retried"]) == (0, "only", False)
    [match] = last["match"]
    assert match["available"] is True
    assert match["cost"] > 0
    assert get(admin, f"decisions?after={found['next']}")["decisions"] == []
    assert [each["n"] for each in get(admin, f"decisions?after={before}&limit=1")["decisions"]] == [before + 3]
    labels = [each for each in get(admin, "sessions") if each["id"] == "s1"]
    assert [(each["stored"], each["turns"], each["group"]) for each in labels] == [(False, 1, 0)]


def test_sessions_are_looked_into(
    admin: httpx.Client, router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, bool]] = []
    real = router.service.records.get

    async def watched(key: RecordKey, known: Sequence[bytes] = (), *, use: bool = True) -> Reading:
        read.append((key.id, use))
        return await real(key, known, use=use)

    monkeypatch.setattr(router.service.records, "get", watched)
    made = [admin.post("/v1/sessions", json={}).json()["id"] for _ in range(12)]
    body = {"messages": MESSAGES, "max_tokens": 3, "session_id": made[0]}
    assert admin.post("/v1/chat/completions", json=body).status_code == 200

    def known() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = get(admin, "sessions")
        return [row for row in rows if row["id"] in made and row["turns"] is not None]

    wait_until(lambda: len(known()) == 12)
    first = next(row for row in known() if row["id"] == made[0])
    assert (first["turns"], first["stored"], first["tenant"]) == (1, True, "")
    assert first["tokens"] > 3
    assert first["created"] <= first["used"] < first["expires"]
    assert sum(row["turns"] for row in known()) == 1
    assert len(get(admin, "sessions?limit=5")) == 5
    wait_until(lambda: bool(get(admin, "sessions")) and {session for session, _ in read} >= set(made))
    assert not any(use for _, use in read), "sessions must not live on because a dashboard watches"
    assert admin.delete(f"/v1/sessions/{made[0]}").status_code == 200
    wait_until(lambda: made[0] not in [row["id"] for row in get(admin, "sessions")])
    assert len(known()) == 11


def test_tree(admin: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("import os", add_special_tokens=False)
    fake.behaviour.tree = tree_of(ids)
    found = get(admin, "tree?group=0&nodes=77")
    assert (found["group"], found["chunk_size"], found["truncated"]) == (0, 64, False)
    [node] = found["nodes"]
    assert node == {
        "id": "01" * 8,
        "parent": -1,
        "tokens": len(ids),
        "chunks": 1,
        "tiers": 5,
        "users": 2,
        "age_s": 3.2,
        "kind": "prefix",
        "children_hidden": 0,
        "text": "import os",
        "salted": False,
        "computing": False,
        "sessions": [],
    }
    assert fake.behaviour.described[-1].nodes_max == 77
    missing = admin.get("/ui/api/tree?group=5")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"].endswith("there is no group 5; there are 0")


def test_many_who_look_ask_the_controller_once(admin: httpx.Client, fake: FakeController) -> None:
    fake.behaviour.tree = tree_of([7], name=2)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: get(admin, "tree?nodes=78"), range(8)))
    assert all(answer["nodes"] == answers[0]["nodes"] for answer in answers)
    assert 1 <= sum(call.nodes_max == 78 for call in fake.behaviour.described) < 8


def test_prompt(admin: httpx.Client, fake: FakeController) -> None:
    messages = [
        {"role": "system", "content": "user"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "assistant"},
        {"role": "user", "content": " wörld 😀"},
    ]
    body = {"messages": messages, "max_tokens": 2}
    found = admin.post("/ui/api/prompt", json=body).json()
    told = [piece["text"] for piece in found["pieces"] if piece["kind"] == "message"]
    assert [text.strip() for text in told] == ["user", "a", "assistant", "wörld 😀"]
    roles = [(piece["role"], piece["message"]) for piece in found["pieces"] if piece["kind"] == "message"]
    assert roles == [("system", 0), ("user", 1), ("assistant", 2), ("user", 3)]
    assert not fake.behaviour.submits, "nothing was computed"
    answer = admin.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == found["tokens"] == sum(p["tokens"] for p in found["pieces"])
    plain = admin.post("/ui/api/prompt", json={"prompt": "import os"}).json()
    assert [(piece["kind"], piece["text"]) for piece in plain["pieces"]][-1] == ("text", "import os")


def test_prompt_of_a_session(admin: httpx.Client, fake: FakeController) -> None:
    session = admin.post("/v1/sessions", json={}).json()["id"]
    body = {"messages": MESSAGES, "session_id": session, "max_tokens": 3}
    first = admin.post("/ui/api/prompt", json=body).json()
    assert first["session_tokens"] == 0
    assert admin.get(f"/v1/sessions/{session}").json()["turns"] == 0, "looking changes nothing"
    answer = admin.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == first["tokens"]
    second = admin.post("/ui/api/prompt", json=body).json()
    answer = admin.post("/v1/chat/completions", json=body).json()
    details = answer["usage"]["prompt_tokens_details"]
    assert (second["tokens"], second["session_tokens"]) == (
        answer["usage"]["prompt_tokens"],
        details["session_tokens"],
    )
    assert sum(p["tokens"] for p in second["pieces"] if p.get("session")) == second["session_tokens"] > 0


def test_prompt_of_modules(admin: httpx.Client) -> None:
    schema = (
        '<schema name="trip"><system>You plan trips.</system><module name="miami">Miami is sunny. Stay '
        '<param name="days" len="8"/> there.</module></schema>'
    )
    assert admin.post("/v1/schemas", json={"pml": schema}).status_code == 201
    source = '<prompt schema="trip"><miami days="three days"/></prompt>'
    body = {"pml": source, "messages": MESSAGES, "max_tokens": 2}
    found = admin.post("/ui/api/prompt", json=body).json()
    kinds = [(p["kind"], p.get("module"), p["text"]) for p in found["pieces"] if p["kind"] != "template"]
    assert kinds == [
        ("module", "", "You plan trips."),
        ("module", "miami", "Miami is sunny. Stay "),
        ("argument", "miami", "three days"),
        ("module", "miami", " there."),
        ("message", None, MESSAGES[0]["content"]),
    ]
    answer = admin.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == found["tokens"] == sum(p["tokens"] for p in found["pieces"])
    cached = sum(p["tokens"] for p in found["pieces"] if p.get("cached"))
    assert cached == found["module_tokens"] == answer["usage"]["prompt_tokens_details"]["module_tokens"]
    wrong = admin.post("/ui/api/prompt", json=body | {"pml": '<prompt schema="trip"><lima/></prompt>'})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "E_MODULE_UNKNOWN")
    assert (wrong.json()["error"]["line"], wrong.json()["error"]["column"]) == (1, 23)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("[1]", 400),
        ("{", 400),
        ("{}", 400),
        ('{"messages": []}', 400),
        ('{"prompt": ["a", "b"]}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "model": "other"}', 404),
        ('{"messages": [{"role": "user", "content": "x"}], "session_id": "sess_none"}', 404),
        ('{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400),
    ],
)
def test_wrong_prompts(admin: httpx.Client, body: str, status: int) -> None:
    answer = admin.post("/ui/api/prompt", content=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_prompts_may_spell_parameters_as_other_servers_do(admin: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_new_tokens": 100_000}
    assert admin.post("/ui/api/prompt", json=body).json()["error"]["param"] == "max_new_tokens"
    assert admin.post("/ui/api/prompt", json=body | {"max_new_tokens": 5}).status_code == 200


def test_a_group_that_is_away_is_not_waited_for(place: Path) -> None:
    with (
        running(place, Tokenizer(DEMO_MODEL), controllers=2, resume_seconds=60.0) as (router, fakes),
        httpx.Client(base_url=router.url, headers={**ADMIN, **JSON}, timeout=15, trust_env=False) as client,
    ):
        made = [client.post("/v1/sessions", json={}).json()["id"] for _ in range(16)]
        fakes[1].behaviour.tree = tree_of([7])
        wait_until(lambda: len(get(client, "sessions")) == 16)
        fakes[0].stop()
        wait_until(lambda: get(client, "overview")["groups"][0]["status"] == "disconnected")
        deadline = time.monotonic() + 1.5 * FRESH_SECONDS
        while time.monotonic() < deadline:  # also when what is known is not fresh any more
            assert {row["id"] for row in get(client, "sessions")} == set(made)
        assert get(client, "tree?group=1")["group"] == 1
        body = {"messages": MESSAGES, "session_id": made[0]}
        assert client.post("/ui/api/prompt", json=body).status_code == 200


def test_without_controllers(place: Path) -> None:
    with (
        running(place, Tokenizer(DEMO_MODEL), controllers=2, wait=False) as (router, fakes),
        httpx.Client(base_url=router.url, headers=ADMIN, timeout=20, trust_env=False) as client,
    ):
        assert [group["status"] for group in get(client, "overview")["groups"]] == ["disconnected"] * 2
        assert get(client, "requests") == []
        assert get(client, "sessions") == []
        answer = client.get("/ui/api/tree?group=1")
        assert answer.status_code == 503
        assert "Retry-After" in answer.headers
        for fake in fakes:
            fake.start()
        wait_until(lambda: [group["status"] for group in get(client, "overview")["groups"]] == ["ready"] * 2)
