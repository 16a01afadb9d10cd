"""Keys, roles and what belongs to whom, over HTTP."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController
from router.harness import ADMIN, DEMO_MODEL, MESSAGES, RunningRouter, make_answer, running, wait_until
from router.process_calls import router_process
from router.schema_calls import PLAN_OBJECT, TRIP
from router.session_calls import chat, create, error_of, get

from trunkline.router.config import RouterConfig
from trunkline.router.tenancy import tenant_file
from trunkline.router.tenancy.auth import hash_key, tenant_salt
from trunkline.router.tenancy.tenants import Tenants
from trunkline.router.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": MESSAGES}
TENANTS: dict[str, Any] = {
    "alice": {"keys": [hash_key("key-of-alice")]},
    "bob": {"keys": [{"sha256": hash_key("key-of-bob"), "name": "bobs"}]},
    "ops": {
        "keys": [
            {"sha256": hash_key("key-of-prometheus"), "role": "metrics"},
            {"sha256": hash_key("key-of-gateway"), "gateway": True},
        ]
    },
}


def bearer(who: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{who}"}


def write(path: Path, tenants: dict[str, Any], when: int = 0) -> None:
    path.write_text(json.dumps({"tenants": tenants}))
    path.chmod(0o600)
    if when:
        os.utime(path, (when, when))


@contextmanager
def guarded(
    place: Path, tokenizer: Tokenizer, tenants: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[RunningRouter, FakeController, Path]]:
    path = place / "tenants.json"
    write(path, TENANTS if tenants is None else tenants)
    with running(place, tokenizer, tenants=str(path), **options) as (router, [fake]):
        yield router, fake, path


@contextmanager
def client_of(router: RunningRouter, who: str = "", **headers: str) -> Iterator[httpx.Client]:
    headers |= bearer(who) if who else {}
    with httpx.Client(base_url=router.url, timeout=60, headers=headers, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def keyed(module_place: Path, tokenizer: Tokenizer) -> Iterator[tuple[RunningRouter, FakeController]]:
    """A router whose clients need keys."""
    with guarded(module_place, tokenizer, tenant_header="X-Tenant") as (router, fake, _):
        yield router, fake


def test_who_gets_in(keyed: tuple[RunningRouter, FakeController]) -> None:
    router, _ = keyed
    paths = ("/health", "/v1/models", "/metrics", "/ui/api/overview")
    expected = {
        "": (200, 401, 401, 401),
        "nobody": (200, 401, 401, 401),
        "alice": (200, 200, 403, 403),
        "prometheus": (200, 403, 200, 403),
    }
    for who, statuses in expected.items():
        with client_of(router, who) as client:
            assert tuple(client.get(path).status_code for path in paths) == statuses, who
            assert client.post("/flush_cache").status_code == statuses[3]
    with client_of(router, **ADMIN) as client:
        assert [client.get(path).status_code for path in paths] == [200] * 4
        assert client.post("/flush_cache").status_code == 200
        assert client.get("/nowhere").status_code == 404
    with client_of(router) as client:
        assert client.get("/nowhere").status_code == 401, "not even what there is"
        assert client.get("/").status_code == client.get("/version").status_code == 200
    assert 'trunkline_access_refused_total{status="401"}' in httpx.get(f"{router.url}/metrics", headers=ADMIN).text


def test_sessions_belong_to_a_tenant(keyed: tuple[RunningRouter, FakeController]) -> None:
    router, _ = keyed
    with client_of(router, "alice") as alice, client_of(router, "bob") as bob, client_of(router, **ADMIN) as admin:
        session = create(alice, messages=MESSAGES)["id"]
        other = create(bob)["id"]
        assert chat(alice, session).status_code == 200
        path = f"/v1/sessions/{session}"
        attempts = [
            bob.get(path),
            bob.patch(path, json={"ttl": 5}),
            bob.delete(path),
            bob.post(f"{path}/fork"),
            bob.post(f"{path}/prefetch"),
            bob.post(f"{path}/discard", json={"tokens": [[0, 1]]}),
            chat(bob, session),
        ]
        assert {error_of(answer) for answer in attempts} == {(404, "session_not_found", "session_id")}
        assert get(alice, session)["turns"] == 1, "nothing of it was done"
        assert [entry["id"] for entry in bob.get("/v1/sessions").json()["data"]] == [other]
        assert [entry["id"] for entry in alice.get("/v1/sessions").json()["data"]] == [session]
        every = {entry["id"]: entry.get("tenant") for entry in admin.get("/v1/sessions").json()["data"]}
        assert every[session] == "alice"
        assert every[other] == "bob"
        first = admin.get("/v1/sessions", params={"limit": 1}).json()
        assert first["has_more"]
        rest = admin.get("/v1/sessions", params={"after": first["last_id"]}).json()["data"]
        assert {first["data"][0]["id"], *(entry["id"] for entry in rest)} == set(every)
        assert admin.get(path).status_code == 404, "an admin says for whom"
        assert admin.get(path, params={"tenant": "alice"}).status_code == 200
        assert bob.get(path, params={"tenant": "alice"}).status_code == 403
        assert admin.delete(path, params={"tenant": "alice"}).status_code == 200


def test_schemas_belong_to_a_tenant(keyed: tuple[RunningRouter, FakeController]) -> None:
    router, _ = keyed
    with client_of(router, "alice") as alice, client_of(router, "bob") as bob:
        assert alice.post("/v1/schemas", json={"pml": TRIP}).status_code == 201
        assert bob.get("/v1/schemas/trip").status_code == 404
        assert bob.get("/v1/schemas").json()["data"] == []
        assert bob.delete("/v1/schemas/trip").status_code == 404
        body = {"prompt": PLAN_OBJECT, "max_tokens": 2}
        assert bob.post("/v1/completions", json=body).status_code == 404
        assert alice.post("/v1/completions", json=body).status_code == 200
        assert bob.post("/v1/schemas", json={"pml": TRIP.replace("warm", "cold")}).status_code == 201
        assert alice.get("/v1/schemas/trip").json()["version"] == 1, "the same name, another schema"
        assert alice.delete("/v1/schemas/trip").status_code == 200
        assert bob.get("/v1/schemas/trip").status_code == 200


def test_salts_labels_and_keys_of_requests_do_too(keyed: tuple[RunningRouter, FakeController]) -> None:
    router, fake = keyed
    fake.behaviour.submits.clear()
    with client_of(router, "alice") as alice, client_of(router, "bob") as bob:
        said = CHAT | {"session_id": "same"}
        answers = [
            client.post("/v1/chat/completions", json=said, headers={"Idempotency-Key": "same"})
            for client in (alice, bob, alice)
        ]
        assert "idempotent-replayed" not in answers[1].headers
        assert answers[2].headers["idempotent-replayed"] == "true"
        alice.post("/v1/chat/completions", json=CHAT | {"cache_salt": "s"})
    salts = [submit.salt for submit in fake.behaviour.submits]
    own = tenant_salt("tenant/alice")
    assert salts == [own, tenant_salt("tenant/bob"), own + b"s"]


def test_each_tenant_has_a_quota_of_its_own(place: Path, tokenizer: Tokenizer) -> None:
    tenants = {**TENANTS, "alice": {**TENANTS["alice"], "records_bytes": None}}
    tenants["carol"] = {"keys": [hash_key("key-of-carol")], "records_bytes": 3000}
    with guarded(place, tokenizer, tenants, records_tenant_bytes=600) as (router, _, _):
        made = {}
        for who in ("alice", "bob", "carol"):
            with client_of(router, who) as client:
                answers = [client.post("/v1/sessions", json={}) for _ in range(8)]
                assert {error_of(answer)[:2] for answer in answers if answer.status_code != 200} <= {
                    (429, "records_quota")
                }
                made[who] = sum(answer.status_code == 200 for answer in answers)
    assert made["bob"] < made["carol"] < made["alice"] == 8


def known(router: RunningRouter) -> list[str]:
    """Tenants that the router's file names."""
    return router.service.tenants.owners()[1:]


def test_a_revoked_key_opens_nothing_more_but_its_stream_goes_on(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_file, "CHECK_SECONDS", 0.05)
    with guarded(place, tokenizer) as (router, fake, path), client_of(router, "alice") as client:
        fake.behaviour.hold = True
        answers: list[httpx.Response] = []
        stream = threading.Thread(
            target=lambda: answers.append(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        )
        stream.start()
        wait_until(lambda: bool(fake.behaviour.submits))
        write(path, {"alice": {"keys": []}}, 5000)
        wait_until(lambda: client.get("/v1/models").status_code == 401)
        fake.behaviour.hold = False
        stream.join(10)
        assert answers[0].text.endswith("data: [DONE]\n\n")
        path.write_text("{}")
        os.utime(path, (6000, 6000))
        with client_of(router) as nobody:
            wait_until(lambda: nobody.get("/v1/models").status_code == 401 and not known(router))
            assert nobody.get("/v1/models").status_code == 401, "a file without keys opens nothing"
        write(
            path,
            {"alice": {"keys": [{"sha256": hash_key("key-of-alice"), "expires": "2001-01-01T00:00:00Z"}]}},
            7000,
        )
        wait_until(lambda: "expired" in client.get("/v1/models").text)


def test_others_do_not_reach_a_server_without_keys(place: Path, tokenizer: Tokenizer) -> None:
    config = RouterConfig(model_path=str(DEMO_MODEL), controllers=["ipc://x"], host="0.0.0.0")
    with pytest.raises(ValueError, match="allow-anonymous"):
        Tenants(config)
    with running(place, tokenizer, host="0.0.0.0", allow_anonymous=True) as (router, _), client_of(router) as http:
        assert http.get("/v1/models").status_code == 200
    path = place / "tenants.json"
    write(path, TENANTS)
    path.chmod(0o602)
    with pytest.raises(ValueError, match="chmod"):
        Tenants(msgspec.structs.replace(config, tenants=str(path)))
    path.chmod(0o600)
    assert Tenants(msgspec.structs.replace(config, tenants=str(path))).needs_keys


def test_pages_of_others_are_kept_out(http: httpx.Client) -> None:
    hosts = [("evil.example", 403), ("localhost:1", 200), ("[::1]", 200), ("10.0.0.1:80", 200)]
    for host, status in (
        *hosts,
        ("[::1].evil.example", 403),
        ("", 403),
        ("x@localhost", 403),
        ("localhost:x", 403),
    ):
        assert http.get("/v1/models", headers={"Host": host}).status_code == status, host
    mine = str(http.base_url).rstrip("/")
    for origin, status in (("https://evil.example", 403), ("null", 403), ("http://[", 403), (mine, 200)):
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin})
        assert answer.status_code == status, origin
        assert "access-control-allow-origin" not in answer.headers
    for kind, status in (("text/plain", 415), ("", 415), ("application/json; charset=utf-8", 200)):
        answer = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": kind})
        assert answer.status_code == status, kind
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert http.options("/v1/chat/completions", headers=preflight).status_code == 405


@pytest.mark.parametrize(
    ("target", "header", "status"),
    [
        ("http://localhost/v1/models", "localhost", 200),
        ("http://127.0.0.1:1/v1/models", "evil.example", 200),
        ("http://evil.example/v1/models", "localhost", 403),
        ("http://localhost@evil.example/v1/models", "localhost", 403),
        ("http://user@localhost/v1/models", "localhost", 403),
        ("http://[::1].evil.example/v1/models", "localhost", 403),
        ("http://evil.example?/v1/models", "localhost", 403),
        ("http://evil.example/v1/models", None, 403),
        ("/v1/models", "", 403),
        ("/v1/models?x=http://localhost/", "evil.example", 403),
    ],
)
def test_the_host_of_a_whole_url_counts(http: httpx.Client, target: str, header: str | None, status: int) -> None:
    """As RFC 9112 wants it, whatever `Host` says besides."""
    url = http.base_url
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        host = "" if header is None else f"Host: {header}\r\n"
        connection.sendall(f"GET {target} HTTP/1.1\r\n{host}Connection: close\r\n\r\n".encode())
        answer = connection.makefile("rb").read()
    assert answer.split(b" ")[1] in {str(status).encode(), b"400"}, answer
    assert (answer.split(b" ")[1] == b"200") == (status == 200), answer


def test_pages_that_are_allowed(place: Path, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"cors_origins": ["https://chat.example"], "allowed_hosts": ["my-laptop.example"]}
    with running(place, tokenizer, **options) as (router, _), client_of(router) as http:
        page = {"Origin": "https://chat.example"}
        answer = http.options("/v1/models", headers=page | {"Access-Control-Request-Method": "GET"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        answer = http.post("/v1/chat/completions", json=CHAT, headers=page)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert http.get("/v1/models", headers={"Host": "My-Laptop.example:8000"}).status_code == 200
        evil = {"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"}
        assert "access-control-allow-origin" not in http.options("/v1/models", headers=evil).headers
    with pytest.raises(ValueError, match="cors_origins"):
        RouterConfig(model_path=str(DEMO_MODEL), controllers=["ipc://x"], cors_origins=["*"]).validate()


SECRETS = ("key-of-alice", "zebra crossing in the prompt", "Hello, w", "label-of-a-session", "salty-secret")


@pytest.mark.processes
def test_nothing_that_is_said_is_logged(place: Path, tokenizer: Tokenizer) -> None:
    """All that a router process writes at level debug, and its metrics."""
    fake = FakeController(f"ipc://{place}/c", make_answer(tokenizer)).start()
    path = place / "tenants.json"
    write(path, TENANTS)
    options = {"tenants": str(path), "log_level": "debug", "admin_key_digest": hash_key("key-of-admin")}
    try:
        with router_process(place, fake, **options) as (process, url):
            said: dict[str, Any] = {
                "messages": [{"role": "user", "content": SECRETS[1]}],
                "cache_salt": SECRETS[4],
            }
            with httpx.Client(base_url=url, timeout=60, headers=bearer("alice"), trust_env=False) as http:
                for more in ({}, {"stream": True}, {"temperature": -1}, {"session_id": SECRETS[3]}, {"stop": 5}):
                    http.post("/v1/chat/completions", json=said | more)
                http.post("/v1/chat/completions", content=f'{{"messages": "{SECRETS[1]}')
                http.get("/v1/sessions/" + SECRETS[3], params={"q": SECRETS[1]})
                http.post("/v1/completions", json={"prompt": SECRETS[1]}, headers={"X-Request-Id": "seen"})
                http.post("/tokenize", json={"prompt": SECRETS[1]})
                fake.behaviour.fail_after = 2
                http.post("/v1/chat/completions", json=said)
            httpx.get(f"{url}/v1/models", headers=bearer("mallory"), timeout=60, trust_env=False)
            metrics = httpx.get(f"{url}/metrics", headers=bearer("admin"), timeout=60, trust_env=False).text
            process.terminate()
            assert process.stderr is not None
            written = process.stderr.read().decode(errors="replace")
    finally:
        fake.stop()
    assert "seen" in written, "requests are logged at this level"
    assert "alice" in written, "with their tenant"
    for secret in (*SECRETS, "key-of-mallory", hash_key("key-of-alice")):
        assert secret not in written, secret
        assert secret not in metrics, secret


def test_health_says_that_an_older_file_of_tenants_is_in_force(place: Path, tokenizer: Tokenizer) -> None:
    with guarded(place, tokenizer) as (router, _, path), client_of(router) as http:
        assert "tenants" not in http.get("/health").json()
        path.write_text('{"tenants": {"acme": {"rpm": 1}}}')
        wait_until(lambda: "tenants" in http.get("/health").json())
        said = http.get("/health").json()["tenants"]
        assert said.startswith("an older version of the file of tenants is in force")
        assert "acme" not in said, "it is said to everybody"
        problem = http.get("/ui/api/overview", headers=ADMIN).json()["auth"]["problem"]
        assert "tenants: acme: " in problem
        assert "rpm" in problem
        write(path, TENANTS)
        wait_until(lambda: "tenants" not in http.get("/health").json())
        assert http.get("/ui/api/overview", headers=ADMIN).json()["auth"]["problem"] == ""


def test_controllers_are_told_whose_pins_they_are(place: Path, tokenizer: Tokenizer) -> None:
    tenants = {"acme": {"pins": 0.25}}
    with guarded(place, tokenizer, tenants, tenant_header="X-Tenant") as (router, fake, _):
        for tenant in ("acme", "other"):
            with client_of(router, **{"X-Tenant": tenant}) as http:
                body = {"pml": TRIP, "pin": True}
                assert http.post("/v1/schemas", json=body).status_code == 201
        calls = [call for call in fake.behaviour.modules.calls if call.op == "encode"]
        told = {call.tenant: (call.pins, bool(call.pin_name)) for call in calls}
        assert told == {"acme": (0.25, True), "other": (1.0, True)}
