"""A tenant's purge: everything that is stored for it goes, and nothing of anybody else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from router.batch_calls import begin, chat_line, finished
from router.harness import ADMIN, ADMIN_KEY, MESSAGES, STORES, RunningRouter, running, shared_records, wait_until
from router.schema_calls import TRIP
from router.session_calls import chat, create, error_of
from router.test_access import TENANTS, bearer, client_of, write
from typer.testing import CliRunner, Result

from trunkline.deploy.cli.app import app
from trunkline.router.api.purge import Purged, purge
from trunkline.router.request_context import known
from trunkline.router.tenancy.auth import current_identity
from trunkline.router.text.tokenizer import Tokenizer

PATH = "/ui/api/purge"
EMPTY: dict[str, Any] = {"deleted": {}, "left": 0, "is_done": True}


def store_all(http: httpx.Client) -> str:
    """Store something of each kind; return the id of the session."""
    session = create(http)["id"]
    assert chat(http, session).status_code == 200
    assert http.post("/v1/sessions", json={}, headers={"Idempotency-Key": "k"}).status_code == 200
    assert http.post("/v1/responses", json={"input": "Hi"}).status_code == 200
    assert http.post("/v1/conversations", json={}).status_code == 200
    for more in ({}, {"cache_salt": "s"}):
        assert http.post("/v1/schemas", json={"pml": TRIP, **more}).status_code == 201
    assert finished(http, begin(http, [chat_line(0, "Hi")]))["status"] == "completed"
    return str(session)


def size(router: RunningRouter, owner: str) -> int:
    return router.call(router.service.records.usage(owner)).records


@pytest.mark.parametrize("kind", STORES)
def test_a_purge_deletes_all_of_one_tenant(place: Path, tokenizer: Tokenizer, kind: str) -> None:
    write(place / "tenants.json", TENANTS)
    with (
        shared_records(kind) as url,
        running(place, tokenizer, records=url, tenants=str(place / "tenants.json")) as (router, [fake]),
        client_of(router, "alice") as alice,
        client_of(router, "bob") as bob,
        client_of(router, **ADMIN) as admin,
    ):
        session = store_all(alice)
        texts = set(fake.behaviour.modules.texts)
        theirs = store_all(bob)
        others = fake.behaviour.modules.texts - texts
        sizes = size(router, "bob"), size(router, "")
        salt = fake.behaviour.submits[0].salt
        assert admin.post(PATH).status_code == 400
        assert admin.post(PATH, params={"tenant": ""}).status_code == 400
        assert alice.post(PATH, params={"tenant": "alice"}).status_code == 403

        found = admin.post(PATH, params={"tenant": "alice"}).json()
        assert (
            found.pop("deleted").items()
            >= {
                "session": 2,
                "response": 1,
                "conversation": 1,
                "answer": 1,
                "schema": 2,
                "batch": 1,
                "file": 2,
                "file-part": 2,
            }.items()
        )
        assert found == {"left": 0, "is_done": True}
        assert size(router, "alice") == 0
        assert (size(router, "bob"), size(router, "")) == sizes
        assert error_of(chat(alice, session))[:2] == (404, "session_not_found")
        assert alice.get("/v1/schemas").json()["data"] == []
        assert bob.get("/v1/schemas/trip").status_code == chat(bob, theirs).status_code == 200
        wait_until(lambda: len(fake.behaviour.forgets) >= 2)
        assert {message.salt for message in fake.behaviour.forgets} == {salt}
        wait_until(lambda: fake.behaviour.modules.texts == others)
        assert texts
        assert others
        assert admin.post(PATH, params={"tenant": "alice"}).json() == EMPTY


def test_what_is_in_use_is_left_for_the_next_time(place: Path, tokenizer: Tokenizer) -> None:
    """Without keys there is one tenant, whose name is "default"."""
    with running(place, tokenizer) as (router, [fake]), router.client() as http:
        session = create(http, messages=MESSAGES)["id"]
        create(http)
        fake.behaviour.hold = True
        batch = begin(http, [chat_line(0, "Hi")])
        turn = threading.Thread(target=lambda: chat(http, session))
        turn.start()
        wait_until(lambda: len(fake.behaviour.submits) == 2)
        first = http.post(PATH, params={"tenant": "default"}, headers=ADMIN).json()
        assert first["left"] == 2
        assert first["deleted"]["session"] == 1
        fake.behaviour.hold = False
        turn.join(10)
        wait_until(lambda: not router.call(router.service.tasks.all()))
        wait_until(lambda: http.post(PATH, params={"tenant": "default"}, headers=ADMIN).json() == EMPTY)
        assert http.get(f"/v1/batches/{batch}").status_code == 404
        assert router.call(router.service.records.usage()).records == 0


def test_a_long_purge_goes_on_where_it_has_ended(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer) as (router, _), router.client() as http:
        for _ in range(3):
            create(http)

        async def tried(seconds: float) -> Purged:
            with known(identity=current_identity()):
                return await purge(router.service, seconds)

        assert router.call(tried(-1.0)) == Purged(is_done=False)
        assert router.call(tried(60.0)).deleted == {"session": 3}


def test_the_command(place: Path, tokenizer: Tokenizer) -> None:
    key = place / "key"
    key.write_text(ADMIN_KEY)
    with running(place, tokenizer) as (router, [fake]), router.client() as http:

        def command(*options: str, answer: str = "") -> Result:
            arguments = ("records", "purge", "default", "--url", router.url, "--api-key-file", str(key), *options)
            return CliRunner().invoke(app, arguments, input=answer)

        sessions = [create(http)["id"] for _ in range(3)]
        assert command(answer="n\n").exit_code == 1
        assert len(http.get("/v1/sessions").json()["data"]) == 3
        fake.behaviour.hold = True
        turn = threading.Thread(target=lambda: chat(http, sessions[0]))
        turn.start()
        wait_until(lambda: bool(fake.behaviour.submits))
        done = command("--yes")
        assert (done.exit_code, done.stdout) == (1, "deleted: 2 session\n")
        assert "not deleted: 1" in done.stderr
        fake.behaviour.hold = False
        turn.join(10)
        wait_until(lambda: command("--yes").exit_code == 0)
        assert command("--yes").stdout == "deleted: nothing\n"
        key.write_text("tl-another")
        assert "refused" in command("--yes").output


def test_nobody_else_may(place: Path, tokenizer: Tokenizer) -> None:
    write(place / "tenants.json", TENANTS)
    with running(place, tokenizer, tenants=str(place / "tenants.json")) as (router, _):
        for headers, status in (({}, 401), (bearer("alice"), 403), (bearer("gateway"), 403)):
            answer = httpx.post(f"{router.url}{PATH}?tenant=alice", headers=headers, trust_env=False)
            assert answer.status_code == status
