"""`/v1/schemas`: each verb, versions, salts, pins, what routers see of each other."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController
from router.harness import DEMO_MODEL, STORES, RunningRouter, asking, running, shared_records, wait_until
from router.schema_calls import PLAN, TRIP, complete, look, post
from router.session_calls import error_of

from trunkline.kvstore.records import Change, MissingError, Reading, RecordKey, Tended
from trunkline.router import pml
from trunkline.router.config import RouterConfig
from trunkline.router.stores import record_tender
from trunkline.router.stores.schema_records import Definition
from trunkline.router.tenancy.auth import tenant_salt
from trunkline.router.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("fields", "moves"),
    [
        ({}, False),
        ({"encode_scope": "self"}, True),
        ({"relocate": True}, True),
        ({"encode_scope": "self", "relocate": False}, False),
    ],
)
def test_where_kv_is_used_at_another_distance(
    fields: dict[str, Any], moves: bool, http: httpx.Client, fake: FakeController
) -> None:
    """By default only where that is exact."""
    assert post(http, **fields)["relocate"] is moves
    assert complete(http).status_code == 200
    assert fake.behaviour.submits[-1].layout is not None
    assert fake.behaviour.submits[-1].layout.relocate is moves
    assert all(call.relocate is moves for call in encodes(fake))


def encodes(fake: FakeController) -> list[Any]:
    return [call for call in fake.behaviour.modules.calls if call.op == "encode"]


def test_a_schema_is_computed_once(http: httpx.Client, fake: FakeController, tokenizer: Tokenizer) -> None:
    made = post(http)
    assert (made["id"], made["object"], made["name"], made["version"]) == ("trip", "schema", "trip", 1)
    assert (made["status"], made["model"], made["encode_scope"]) == ("ready", "demo", "ancestors")
    assert (made["pin"], made["ttl"], made["expires_at"], made["usage"]["bytes"]) == (False, 0, None, 4000)
    modules = {module["path"]: module for module in made["modules"]}
    assert list(modules) == ["", "city", "sea", "hill"]
    root, city, sea, hill = modules.values()
    assert (root["start"], root["length"]) == (0, made["extent"])
    assert city["start"] == 1 + len(tokenizer.encode_plain(" You plan trips. ")), "<|bos|> comes first"
    assert city["params"] == [{"name": "days", "length": 6, "required": False, "default": None}]
    assert sea["start"] == hill["start"] == city["start"] + city["length"]
    assert hill["start"] + hill["length"] == made["extent"]
    assert {module["tier"] for module in modules.values()} == {"device"}
    assert all(module["bytes"] == 1000 for module in modules.values())
    total = sum(module["tokens"] for module in modules.values())
    assert made["usage"] == {"tokens": total, "computed_tokens": total, "bytes": 4000}
    [call] = encodes(fake)
    assert (call.salt, call.pin_name, call.ttl) == (b"", "", 0)
    assert [text.parent for text in call.texts] == [-1, 0, 0, 0]
    again = post(http)
    assert (again["version"], again["usage"]["computed_tokens"]) == (2, 0)
    told = look(http)
    assert told | {"last_used_at": 0, "usage": 0} == again | {"last_used_at": 0, "usage": 0}
    assert "pml" not in told
    assert complete(http).status_code == 200


def test_the_same_as_json(http: httpx.Client) -> None:
    document = pml.parse_schema(TRIP)
    answer = http.post("/v1/schemas", json={"json": pml.schema_to_json(document)})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert pml.parse_schema(look(http, include="pml")["pml"]) == document
    assert post(http)["modules"] == made["modules"]


def test_cold_and_partly_computed(http: httpx.Client, fake: FakeController) -> None:
    made = post(http, warm=False)
    assert made["status"] == "cold"
    assert {(module["tier"], module["bytes"]) for module in made["modules"]} == {(None, 0)}
    assert not encodes(fake)
    post(http)
    longer = TRIP.replace("<union>", '<module name="food">Eat fish.</module><union>')
    assert post(http, longer, warm=False)["status"] == "partial"
    assert post(http, longer)["status"] == "ready"


@pytest.mark.parametrize("status", ["failed", "quota"])
def test_what_the_engine_refuses_is_a_warning(http: httpx.Client, fake: FakeController, status: str) -> None:
    fake.behaviour.modules.status, fake.behaviour.modules.detail = status, "the pool is too small"
    made = post(http, pin=True)
    assert any("the pool is too small" in warning for warning in made["warnings"])
    assert made["status"] == ("ready" if status == "quota" else "cold")
    assert not fake.behaviour.modules.pins


def test_lists(http: httpx.Client, fake: FakeController) -> None:
    names = [f"s{number}" for number in range(5)]
    for name in names:
        post(http, f'<schema name="{name}">Hello there.</schema>', warm=False)
    post(http, '<schema name="s0">Hello there.</schema>', warm=False, cache_salt="other")
    first = http.get("/v1/schemas", params={"limit": 3}).json()
    assert [item["id"] for item in first["data"]] == names[:3]
    assert (first["object"], first["has_more"], first["last_id"]) == ("list", True, "s2")
    rest = http.get("/v1/schemas", params={"limit": 3, "after": "s2"}).json()
    assert [item["name"] for item in rest["data"]] == names[3:]
    assert not rest["has_more"]
    other = http.get("/v1/schemas", params={"cache_salt": "other"}).json()
    assert [item["id"] for item in other["data"]] == ["s0"]
    assert error_of(http.get("/v1/schemas", params={"limit": 0}))[0] == 400


def test_pins(http: httpx.Client, fake: FakeController) -> None:
    post(http, pin=True, ttl=60)
    [call] = encodes(fake)
    assert (call.pin_name, call.ttl) == ("schema//trip", 60)
    assert fake.behaviour.modules.pins == {"schema//trip": 4}
    for ttl, expires in ((600, 600), (0, None)):
        told = http.patch("/v1/schemas/trip", json={"ttl": ttl}).json()
        assert told["expires_at"] == (expires and told["last_used_at"] + expires)
    assert http.patch("/v1/schemas/trip", json={"ttl": 60}).status_code == 200
    changed = http.patch("/v1/schemas/trip", json={"pin": False}).json()
    assert (changed["pin"], changed["version"], changed["ttl"]) == (False, 1, 60)
    wait_until(lambda: not fake.behaviour.modules.pins)
    assert http.patch("/v1/schemas/trip", json={"pin": True}).json()["pin"] is True
    assert fake.behaviour.modules.pins == {"schema//trip": 4}
    post(http)  # not pinned any more
    wait_until(lambda: not fake.behaviour.modules.pins)
    post(http, pin=True)
    assert http.delete("/v1/schemas/trip").json() == {"id": "trip", "object": "schema.deleted", "deleted": True}
    wait_until(lambda: not fake.behaviour.modules.pins)


def test_names_live_per_salt(http: httpx.Client, fake: FakeController) -> None:
    post(http, cache_salt="a")
    [call] = encodes(fake)
    assert call.salt == b"a"
    assert error_of(http.get("/v1/schemas/trip"))[:2] == (404, "E_SCHEMA_UNKNOWN")
    assert error_of(complete(http))[:2] == (404, "E_SCHEMA_UNKNOWN")
    assert error_of(complete(http, cache_salt="b"))[:2] == (404, "E_SCHEMA_UNKNOWN")
    assert complete(http, cache_salt="a").status_code == 200
    assert fake.behaviour.submits[-1].salt == b"a"
    assert look(http, cache_salt="a")["version"] == 1
    assert post(http)["version"] == 1
    assert http.patch("/v1/schemas/trip", json={"ttl": 5, "cache_salt": "a"}).json()["ttl"] == 5
    assert look(http)["ttl"] == 0
    assert http.delete("/v1/schemas/trip", params={"cache_salt": "a"}).status_code == 200
    assert look(http)["version"] == 1


def test_deleted(http: httpx.Client, fake: FakeController) -> None:
    post(http)
    assert complete(http).status_code == 200
    assert fake.behaviour.modules.texts
    assert http.delete("/v1/schemas/trip").status_code == 200
    wait_until(lambda: not fake.behaviour.modules.texts)
    for answer in (
        http.get("/v1/schemas/trip"),
        http.patch("/v1/schemas/trip", json={"ttl": 5}),
        http.delete("/v1/schemas/trip"),
        complete(http),
        http.get(f"/v1/schemas/{'x' * 600}"),
    ):
        assert error_of(answer)[:2] == (404, "E_SCHEMA_UNKNOWN")
    other = TRIP.replace("many", "no")
    assert post(http, other)["version"] == 1
    assert "no hills" in look(http, include="pml")["pml"]


def test_deleted_while_it_is_posted_again(
    http: httpx.Client, fake: FakeController, router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the answer that it exists and the change of it."""
    post(http)
    records = router.service.records
    get = records.get

    async def delete_first(key: RecordKey, known: Any = (), *, use: bool = True) -> Reading:
        monkeypatch.undo()
        await records.delete(key)
        return await get(key, known, use=use)

    monkeypatch.setattr(records, "get", delete_first)
    assert post(http)["version"] == 1
    assert post(http)["version"] == 2


def test_a_source_is_read_once(
    http: httpx.Client, fake: FakeController, router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose router has compiled the schema reads the record's header only."""
    post(http)
    records, read = router.service.records, []
    get = records.get

    async def watched(key: RecordKey, known: Any = (), *, use: bool = True) -> Reading:
        reading = await get(key, known, use=use)
        read.append(len(reading.segments))
        return reading

    monkeypatch.setattr(records, "get", watched)
    for _ in range(2):
        assert complete(http).status_code == 200
    assert http.patch("/v1/schemas/trip", json={"ttl": 60}).status_code == 200
    assert complete(http).status_code == 200
    assert read == [0, 0, 1, 0, 0], "the change reads all"
    assert http.patch("/v1/schemas/trip", json={"ttl": 0}).json()["version"] == 1
    assert look(http, include="pml")["pml"] == pml.schema_to_xml(pml.parse_schema(TRIP))


def test_schemas_of_earlier_versions(http: httpx.Client, router: RunningRouter) -> None:
    """Their headers have the source in them, until they are changed."""
    records, key = router.service.records, RecordKey("schema", "", "trip")
    old = msgspec.msgpack.encode(Definition(model="demo", source=TRIP, version=7, ttl=60.0))
    router.call(records.create(key, Change(old, 60.0)))
    assert complete(http).status_code == 200
    told = look(http, include="pml")
    assert (told["version"], told["ttl"]) == (7, 60)
    assert pml.parse_schema(told["pml"]) == pml.parse_schema(TRIP)
    assert http.patch("/v1/schemas/trip", json={"ttl": 600}).json()["version"] == 7
    reading = router.call(records.get(key))
    assert [segment.content for segment in reading.segments] == [TRIP.encode()]
    assert TRIP.encode() not in reading.record.header
    assert complete(http).status_code == 200
    assert post(http)["version"] == 8


def test_a_tenants_schema_of_an_earlier_version(place: Path, tokenizer: Tokenizer) -> None:
    """Its kind was a hash of the tenant and the salt. The tenant's first use moves it to where schemas are now."""
    with (
        running(place, tokenizer, tenant_header="X-Tenant") as (router, _),
        router.client(**{"X-Tenant": "team"}) as http,
        router.client(**{"X-Tenant": "other"}) as stranger,
    ):
        records = router.service.records
        said = b"\0team\0" + tenant_salt("tenant/team")
        old = RecordKey(f"schema:{hashlib.blake2b(said, digest_size=16).hexdigest()}", "", "trip")
        header = msgspec.msgpack.encode(Definition(model="demo", source=TRIP, version=7))
        router.call(records.create(old, Change(header)))
        assert complete(stranger).status_code == 404
        assert complete(http).status_code == 200
        with pytest.raises(MissingError):
            router.call(records.get(old))
        assert look(http)["version"] == 7
        assert [item["id"] for item in http.get("/v1/schemas").json()["data"]] == ["trip"]
        assert http.delete("/v1/schemas/trip").status_code == 200

        for first in (http.delete, partial(http.patch, json={"ttl": 60})):  # without a use before
            router.call(records.create(old, Change(header)))
            assert first("/v1/schemas/trip").status_code == 200
        assert http.delete("/v1/schemas/trip").status_code == 200
        router.call(records.create(old, Change(header)))
        post(http)
        assert http.delete("/v1/schemas/trip").status_code == 200
        assert complete(http).status_code == 404, "the old one does not come back"


def test_the_quota_of_a_tenant(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer, records_tenant_bytes=600) as (router, _), router.client() as http:
        post(http)
        assert post(http)["version"] == 2, "a schema that is there may be changed"
        answer = http.post("/v1/schemas", json={"pml": TRIP.replace("trip", "tour")})
        assert error_of(answer)[:2] == (429, "records_quota")
        assert http.delete("/v1/schemas/trip").status_code == 200
        post(http, TRIP.replace("trip", "tour"))


def test_an_expired_schema_loses_its_pins(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every controller: the one that was its home at first is not its home any more."""
    monkeypatch.setattr(record_tender, "PERIOD_SECONDS", 0.05)
    with running(place, tokenizer, controllers=2) as (router, fakes), router.client() as http:
        post(http, pin=True)
        for fake in fakes:
            fake.behaviour.modules.pins["schema//trip"] = 4
        records, key = router.service.records, RecordKey("schema", "", "trip")
        record = router.call(records.get(key)).record
        router.call(records.put(key, record.version, Change(record.header, 0.01, record.head)))
        wait_until(lambda: not any(fake.behaviour.modules.pins for fake in fakes))
        with pytest.raises(MissingError):
            router.call(records.get(key))
        assert complete(http).status_code == 404
        assert len(router.service.schemas) == 0


def test_pins_end_though_the_router_stops_meanwhile(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other router would learn that the schema has expired."""
    monkeypatch.setattr(record_tender, "PERIOD_SECONDS", 0.05)
    with running(place, tokenizer) as (router, [fake]), router.client() as http:
        post(http, pin=True)
        records, key = router.service.records, RecordKey("schema", "", "trip")
        tend, expired = records.tend, threading.Event()

        async def slowly() -> Tended:
            done = await tend()
            if done.deleted:
                expired.set()
                while not router._server.should_exit:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)
            return done

        monkeypatch.setattr(records, "tend", slowly)
        record = router.call(records.get(key)).record
        router.call(records.put(key, record.version, Change(record.header, 0.01, record.head)))
        assert expired.wait(60)
        assert fake.behaviour.modules.pins
        router.stop()
        wait_until(lambda: not fake.behaviour.modules.pins)


def test_pins_move_with_their_home(place: Path, tokenizer: Tokenizer) -> None:
    """A pinned schema's home goes: its next use pins it at another controller. The home comes back: the other
    controller's pin ends."""
    with running(place, tokenizer, controllers=2) as (router, fakes), router.client() as http:
        post(http, pin=True)
        [home] = [fake for fake in fakes if fake.behaviour.modules.pins]
        [other] = [fake for fake in fakes if fake is not home]
        home.behaviour.status = "starting"
        wait_until(lambda: router.ready == 1)
        assert complete(http).status_code == 200
        wait_until(lambda: other.behaviour.modules.pins == {"schema//trip": 4})
        home.behaviour.status = "ready"
        wait_until(lambda: router.ready == 2)
        assert complete(http).status_code == 200
        wait_until(lambda: not other.behaviour.modules.pins)
        assert home.behaviour.modules.pins == {"schema//trip": 4}


def test_a_client_that_leaves_ends_the_work(
    http: httpx.Client, fake: FakeController, router: RunningRouter
) -> None:
    fake.behaviour.modules.hold = True
    with asking(router, "/v1/schemas", {"pml": TRIP, "pin": True}):
        wait_until(lambda: bool(encodes(fake)))
    wait_until(lambda: any(call.op == "cancel" for call in fake.behaviour.modules.calls))
    [encode] = encodes(fake)
    cancel = next(call for call in fake.behaviour.modules.calls if call.op == "cancel")
    assert cancel.ticket == encode.ticket
    fake.behaviour.modules.hold = False
    assert look(http)["status"] == "cold"
    assert complete(http).status_code == 200
    assert encodes(fake)[-1].pin_name == "schema//trip", "its first use sets the pin that was not"


def test_pins_are_set_again_over_a_new_connection(
    http: httpx.Client, fake: FakeController, router: RunningRouter
) -> None:
    post(http, pin=True)
    complete(http)
    assert len(encodes(fake)) == 1
    fake.behaviour.modules.pins.clear()
    [link] = router.service.links
    connections = link.connections

    async def lose() -> None:
        link.lost("a test")

    router.spawn(lose())
    wait_until(lambda: link.connections > connections and link.ready)
    assert complete(http).status_code == 200
    assert complete(http).status_code == 200
    assert [call.pin_name for call in encodes(fake)] == ["schema//trip"] * 2
    assert fake.behaviour.modules.pins == {"schema//trip": 4}


@pytest.mark.parametrize("store", STORES)
def test_another_router_sees_every_change(place: Path, tokenizer: Tokenizer, store: str) -> None:
    with shared_records(store) as records, running(place, tokenizer, records=records) as (one, [fake]):
        config = RouterConfig(model_path=str(DEMO_MODEL), controllers=[fake.endpoint], port=0, records=records)
        two = RunningRouter(config, Tokenizer(DEMO_MODEL))
        two.start()
        try:
            wait_until(lambda: two.ready == 1)
            with one.client() as first, two.client() as second:
                post(first)
                assert complete(second).status_code == 200
                before = len(fake.behaviour.submits[-1].layout.texts)  # type: ignore[union-attr]
                assert complete(second).status_code == 200
                post(first, TRIP.replace("<union>", "Between.<union>"))
                assert complete(second).status_code == 200
                assert len(fake.behaviour.submits[-1].layout.texts) == before + 1  # type: ignore[union-attr]
                first.delete("/v1/schemas/trip")
                assert complete(second).status_code == 404
                post(first)  # version 1 again, of another record
                assert complete(second).status_code == 200
                assert len(fake.behaviour.submits[-1].layout.texts) == before  # type: ignore[union-attr]
        finally:
            two.stop()


def test_requests_go_where_their_modules_are(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer, controllers=2) as (router, fakes), router.client() as http:
        homes = set()
        for number in range(8):
            source = TRIP.replace('"trip"', f'"trip{number}"')
            post(http, source)
            [home] = (fake for fake in fakes if encodes(fake))
            homes.add(home.endpoint)
            session = http.post("/v1/sessions", json={"schema": f"trip{number}"}).json()["id"]
            for body in ({"pml": f'<prompt schema="trip{number}">x</prompt>'}, {"session_id": session}):
                messages = [{"role": "user", "content": "x"}]
                assert http.post("/v1/chat/completions", json={**body, "messages": messages}).status_code == 200
            assert len(home.behaviour.submits) == 2
            for fake in fakes:
                fake.behaviour.modules.calls.clear()
                fake.behaviour.submits.clear()
        assert len(homes) == 2
        names = [item["id"] for item in http.get("/v1/schemas").json()["data"]]
        assert names == [f"trip{number}" for number in range(8)]


def test_metrics(http: httpx.Client) -> None:
    http.post("/v1/schemas", json={"pml": "<"})
    post(http)
    complete(http)
    complete(http, PLAN.replace("sea", "lake"))
    text = http.get("/metrics").text
    for line in (
        'trunkline_pml_errors_total{code="E_XML"} ',
        'trunkline_pml_errors_total{code="E_MODULE_UNKNOWN"} ',
        "trunkline_module_requests_total ",
        "trunkline_module_prompt_tokens_total ",
        "trunkline_schemas_cached ",
        'endpoint="/v1/schemas",status="201"',
    ):
        assert line in text
    http.get("/v1/schemas/nope")
    assert 'endpoint="/v1/schemas/{schema}",status="404"' in http.get("/metrics").text


def test_the_source_of_a_schema_that_xml_cannot_write(http: httpx.Client) -> None:
    sent = {"schema": "odd", "items": ["a bell \u0007 rings"]}
    assert http.post("/v1/schemas", json={"json": sent, "warm": False}).status_code == 201
    told = http.get("/v1/schemas/odd", params={"include": "pml"}).json()
    assert "pml" not in told
    assert told["json"]["items"] == sent["items"]
    post(http, warm=False)
    told = http.get("/v1/schemas/trip", params={"include": "pml"}).json()
    assert "json" not in told
    assert told["pml"].startswith("<schema")
