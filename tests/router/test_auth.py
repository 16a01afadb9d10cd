"""Who may do what: roles, keys, owners, and the pages that may ask a server without keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
from fastapi import FastAPI
from router.harness import RunningRouter
from starlette.datastructures import Headers

from trunkline.router.app import create_app
from trunkline.router.errors import ApiError
from trunkline.router.http.middleware import host_name, is_allowed_host, is_local_name
from trunkline.router.request_context import known
from trunkline.router.stores.schema_records import key_of
from trunkline.router.tenancy.auth import (
    ANONYMOUS,
    Access,
    Authenticator,
    Identity,
    Key,
    KeyRole,
    TenantRules,
    access_needed,
    cache_salt,
    check_once,
    current_identity,
    draw_key,
    hash_key,
    is_loopback,
    may_enter,
    salt_of,
    tenant_salt,
)

OPEN = {
    "/",
    "/health",
    "/version",
    "/ping",
    "/load",
    "/docs",
    "/openapi.json",
    "/ui",
    "/ui/",
    "/ui/static/{name:path}",
}
ADMINS = {"/flush_cache", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


def all_routes(app: FastAPI) -> list[Any]:
    """With those of the routers that are included."""
    found: list[Any] = []
    for route in app.routes:
        included = getattr(route, "original_router", None)
        found += [route] if included is None else included.routes
    return found


def test_every_route_is_classified(router: RunningRouter) -> None:
    """An endpoint that nobody thought about when it was added is not served, and fails here."""
    seen = set()
    for route in all_routes(create_app(router.service)):
        path = getattr(route, "path", "")
        seen.add(path)
        if not getattr(route, "methods", None):
            continue
        access = access_needed(path.replace("{", "").replace("}", ""))
        if path in OPEN:
            assert access is Access.OPEN, path
        elif path in ADMINS or path.startswith("/ui/api/"):
            assert access is Access.ADMIN, path
        elif path == "/metrics":
            assert access is Access.METRICS
        else:
            assert access is Access.USER, f"{path}: classify it in auth.py, and here"
    assert {"/flush_cache", "/v1/sessions/{session_id}", "/ui/api/overview"} <= seen


def test_what_nobody_classified_is_unknown() -> None:
    for path in ("/v1", "/v1/", "/v1/new", "/ui/new", "/UI", "/metrics/", "//metrics", "/flush_cache/", "", "*"):
        assert access_needed(path) is Access.UNKNOWN
        for role in (None, *KeyRole):
            assert not may_enter(role, Access.UNKNOWN, keys_needed=False)


def test_roles() -> None:
    allowed = {
        None: {Access.OPEN},
        KeyRole.USER: {Access.OPEN, Access.USER},
        KeyRole.METRICS: {Access.OPEN, Access.METRICS},
        KeyRole.ADMIN: {Access.OPEN, Access.USER, Access.METRICS, Access.ADMIN},
    }
    for role, expected in allowed.items():
        assert {access for access in Access if may_enter(role, access, keys_needed=True)} == expected
        without = expected | {Access.USER, Access.METRICS}
        assert {access for access in Access if may_enter(role, access, keys_needed=False)} == without


def test_keys_are_drawn_apart() -> None:
    drawn = {draw_key() for _ in range(100)}
    assert len(drawn) == 100
    assert all(key.startswith("tl-") and len(key) == 46 for key in drawn)


RULES = TenantRules(
    keys={
        hash_key("of-team"): Key("team", "laptop"),
        hash_key("scrapes"): Key("ops", "prom", KeyRole.METRICS),
        hash_key("boss"): Key("ops", "boss", KeyRole.ADMIN),
        hash_key("over"): Key("team", "old", expires=100.0),
        hash_key("gate"): Key("front", "gate", gateway=True),
    },
    salts={"a": "both", "b": "both", "open": "shared"},
    has_keys=True,
)


def admit(
    headers: Mapping[str, str], access: Access = Access.USER, rules: TenantRules = RULES, header: str = "x-tenant"
) -> Identity:
    who = Authenticator(header=header, admin_key=hash_key("tl-admin"))
    return who.admit(headers, access, rules, 100.0)


def refused(headers: Mapping[str, str], access: Access = Access.USER, rules: TenantRules = RULES) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admit(headers, access, rules)
    return caught.value


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_says_who() -> None:
    for headers in (bearer("of-team"), {"authorization": "bearer  of-team "}, {"x-api-key": "of-team"}):
        found = admit(headers)
        assert (found.tenant, found.role, found.key, found.owner) == ("team", KeyRole.USER, "laptop", "team")
        assert found.salt == tenant_salt("tenant/team")
        assert not found.is_all
    assert admit(bearer("boss"), Access.ADMIN).is_all
    assert admit(bearer("boss")).owner == "ops"
    own = admit(bearer("tl-admin"), Access.ADMIN)
    assert (own.tenant, own.owner, own.salt) == ("admin", "", b"")


def test_refusals() -> None:
    for headers in ({}, bearer("wrong"), bearer(""), {"authorization": "Basic b2YtdGVhbQ=="}, bearer("over")):
        error = refused(headers)
        assert (error.status, error.code) == (401, "invalid_api_key")
        assert error.headers()["WWW-Authenticate"].startswith("Bearer")
    assert "expired" in refused(bearer("over")).message
    for key, access in (("of-team", Access.METRICS), ("of-team", Access.ADMIN), ("scrapes", Access.USER)):
        error = refused(bearer(key), access)
        assert (error.status, error.kind) == (403, "permission_error")
        assert access.value in error.message
    assert "wrong" not in refused(bearer("wrong")).message, "keys are not shown"


def test_without_keys_only_admins_need_one() -> None:
    none = TenantRules()
    assert admit({}, rules=none) == Identity()
    found = admit(bearer("whatever"), rules=none)
    assert found.tenant == "key-" + hash_key("whatever")[:32]
    assert (found.owner, found.salt, found.role) == ("", b"", None)
    assert admit({}, Access.METRICS, none).tenant == ANONYMOUS
    assert refused({}, Access.ADMIN, none).status == 401
    assert refused(bearer("whatever"), Access.ADMIN, none).status == 401
    assert admit(bearer("tl-admin"), Access.ADMIN, none).role is KeyRole.ADMIN


def test_who_once_needed_keys_needs_them_for_ever() -> None:
    who = Authenticator()
    assert not who.needs_keys(TenantRules())
    assert who.needs_keys(RULES)
    assert who.needs_keys(TenantRules()), "the last key was taken out of the file"
    assert Authenticator(single_key=hash_key("k")).needs_keys(TenantRules())
    assert Authenticator(needs_keys=True).needs_keys(TenantRules())


def test_a_gateway_names_tenants() -> None:
    found = admit(bearer("gate") | {"x-tenant": "alice"})
    assert (found.tenant, found.owner, found.role) == ("alice", "alice", KeyRole.USER)
    assert refused(bearer("of-team") | {"x-tenant": "alice"}).status == 403, "a client must not choose"
    assert refused({"x-tenant": "alice"}).status == 401
    none = TenantRules()
    assert admit({"x-tenant": "alice"}, rules=none).owner == "alice", "the gateway is trusted by its place"
    assert admit({"x-tenant": "alice"}, rules=none, header="").tenant == ANONYMOUS
    single = Authenticator(header="x-tenant", single_key=hash_key("k"))
    assert single.admit(bearer("k") | {"x-tenant": "bob"}, Access.USER, none, 0.0).owner == "bob"
    assert single.admit(bearer("k"), Access.USER, none, 0.0).owner == ""
    for bad in ("two words", "a" * 129, "ü"):
        assert refused(bearer("gate") | {"x-tenant": bad}).status == 400
    twice = Headers(raw=[(b"authorization", b"Bearer gate"), (b"x-tenant", b"a"), (b"x-tenant", b"b")])
    assert "more than once" in refused(twice).message


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"host"])
def test_a_header_that_decides_is_given_once(name: bytes) -> None:
    check_once(Headers(raw=[(name, b"a"), (b"other", b"b"), (b"other", b"b")]))
    with pytest.raises(ApiError, match="more than once"):
        check_once(Headers(raw=[(name, b"a"), (name, b"a")]))


def test_salts() -> None:
    assert salt_of("a", RULES) == salt_of("b", RULES) != salt_of("c", RULES)
    assert salt_of("open", RULES) == b""
    assert salt_of("both", RULES) != salt_of("a", RULES), "a tenant cannot have the name of a group's salt"
    assert current_identity() == Identity()
    assert cache_salt(None) == b""
    with known(identity=Identity("a", salt=salt_of("a", RULES))):
        assert cache_salt("x") == salt_of("a", RULES) + b"x"
        assert cache_salt(None) != b""
    # No text of a client is another tenant's salt.
    own = salt_of("a", RULES)
    with pytest.raises(UnicodeDecodeError):
        own.decode()
    keys = set()
    for owner in ("", "a", "b"):
        with known(identity=Identity(owner=owner)):
            keys |= {key_of("trip", salt) for salt in (b"", b"s", b"\0s")}
    assert len(keys) == 9


def test_an_admin_acts_for_a_tenant() -> None:
    who = Authenticator()
    boss = admit(bearer("boss"), Access.ADMIN)
    acting = who.acting_for(boss, "team", RULES)
    assert (acting.owner, acting.salt, acting.is_all) == ("team", salt_of("team", RULES), False)
    assert acting.role is KeyRole.ADMIN
    assert who.acting_for(boss, "default", RULES).owner == ""
    with pytest.raises(ApiError, match="admin"):
        who.acting_for(admit(bearer("of-team")), "other", RULES)
    with pytest.raises(ApiError, match="name"):
        who.acting_for(boss, "two words", RULES)


def test_addresses_and_names() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST", "app.localhost"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "notlocalhost", "", "127.evil.example"):
        assert not is_loopback(host), host
    assert host_name("Localhost.:80") == "localhost"
    assert host_name("[::1]:80") == host_name("[0:0::1]") == "::1"
    assert [is_local_name(name) for name in ("10.1.2.3", "fe80::1", "evil.example")] == [True, True, False]


ALLOWED: Final = frozenset({"my-laptop.example"})
NAMES: Final = (
    *("localhost", "LocalHost", "app.localhost", "127.0.0.1", "127.9.9.9", "10.0.0.1", "[::1]", "[fe80::1]"),
    *("my-laptop.example", "My-Laptop.example", "localhost.", "[::ffff:127.0.0.1]"),
)
"""As good as they are, and with a port."""
HOSTILE_HOSTS: Final = (
    *(
        "",
        " ",
        ".",
        ":",
        ":80",
        "[]",
        "[::1",
        "::1",
        "[::1].evil.example",
        "[::1]evil.example",
        "[::1]:80.evil.example",
    ),
    *("localhost:", "localhost:port", "localhost:-1", "localhost:65536", "localhost:080000", "localhost:80:80"),
    *("localhost:80/", "localhost/", "localhost/evil.example", "localhost?", "localhost#", "http://localhost"),
    *("user@localhost", "localhost@evil.example", "localhost:80@evil.example", "localhost\\evil.example"),
    *("localhost.evil.example", "evil.example", "evil-localhost", "localhost..", "localhost ", " localhost"),
    *("127.0.0.1.evil.example", "127.1", "0x7f.0.0.1", "2130706433", "127.0.0.1.", "127.0.0.01", "[127.0.0.1]"),
    *("[::1%25eth0]", "[::1%lo]", "[v1.a]", "my-laptop.example.evil.example", "evil.example,localhost"),
    *("localhost, evil.example", "localhost\x00", "localhost\x00.evil.example", "localhost\t", "loc\u0430lhost"),
    *("\uff4cocalhost", "local%68ost", "\u0661\u0662\u0667.0.0.1", "localhost:\u0668\u0660"),
)


@pytest.mark.parametrize("name", NAMES)
def test_good_hosts(name: str) -> None:
    for host in (name, f"{name}:80", f"{name}:65535", f"{name}:0"):
        assert is_allowed_host(host, ALLOWED), host


@pytest.mark.parametrize("host", HOSTILE_HOSTS)
def test_hostile_hosts(host: str) -> None:
    assert not is_allowed_host(host, ALLOWED)
