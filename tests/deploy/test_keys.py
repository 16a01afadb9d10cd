"""`trunkline key`, and where commands find the key that they send."""

from __future__ import annotations

import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trunkline.deploy.cli.app import app
from trunkline.deploy.cli.keys_cli import add_key, keys_of, revoke_key
from trunkline.deploy.config.option_values import (
    API_KEY_VARIABLE,
    keys_needed,
    parse_names,
    server_key,
    server_key_digest,
)
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.run_folder import (
    admin_key,
    admin_key_digest,
    client_headers,
    client_key,
    make_admin_key,
)
from trunkline.router.config import TenantLimits
from trunkline.router.tenancy.auth import KeyRole, hash_key
from trunkline.router.tenancy.tenant_file import read_rules
from trunkline.runtime.wire_keys import PARTS, load
from trunkline.runtime.wire_keys import Role as WireRole

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def no_key_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


def add(file: Path, tenant: str = "alice", **more: Any) -> str:
    given = {"name": "", "role": KeyRole.USER, "expires": "", "gateway": False, "now": NOW, **more}
    return add_key(file, tenant, **given)[0]


def test_a_key_is_in_the_file_as_its_digest_only(file: Path) -> None:
    key = add(file, expires="90d", role=KeyRole.ADMIN, gateway=True)
    text = file.read_text()
    assert key not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    rules = read_rules(str(file), TenantLimits())
    found = rules.keys[hash_key(key)]
    assert (found.tenant, found.name, found.role, found.gateway) == ("alice", "key1", KeyRole.ADMIN, True)
    assert found.expires == (NOW + timedelta(days=90)).timestamp()
    assert os.listdir(file.parent) == ["tenants.json"], "nothing is left beside it"


def test_what_else_is_in_the_file_stays(file: Path) -> None:
    old = hash_key("old")
    said = {
        "default": {"requests": 3, "tokens_per_minute": None},
        "tenants": {"bob": {"keys": [old], "salt": "both", "priority": 2}, "free": {"requests": 1}},
    }
    file.write_text(json.dumps(said))
    add(file, "bob", name="new")
    after = json.loads(file.read_text())
    assert after["tenants"]["bob"]["keys"].pop()["name"] == "new"
    assert after == said
    assert [(row.tenant, row.name, row.digest == old) for row in keys_of(file)] == [
        ("bob", "", True),
        ("bob", "new", False),
    ]
    revoke_key(file, old[:8])
    revoke_key(file, "new", "bob")
    assert json.loads(file.read_text())["tenants"]["bob"]["keys"] == []
    assert read_rules(str(file), TenantLimits()).has_keys, "keys are still needed"


def test_several_commands_at_once_lose_nothing(file: Path) -> None:
    threads = [threading.Thread(target=add, args=(file,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row.name for row in keys_of(file)) == [f"key{number}" for number in range(1, 9)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"name": "key1"}, "already"),
        ({"name": "two words"}, "no spaces"),
        ({"expires": "90"}, "90d"),
        ({"expires": "0d"}, "90d"),
        ({"expires": "2001-01-01T00:00:00Z"}, "over already"),
        ({"expires": "2027-01-01"}, "--expires"),
        ({"expires": "99999y"}, "90d"),
        ({"tenant": "two words"}, "is no name"),
        ({"tenant": "key-x"}, "is no name"),
    ],
)
def test_what_cannot_be_made(file: Path, more: dict[str, Any], said: str) -> None:
    add(file)
    before = file.read_bytes()
    with pytest.raises(UserError) as caught:
        add(file, **more)
    assert said in str(caught.value)
    assert file.read_bytes() == before


def test_what_cannot_be_revoked(file: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        revoke_key(file, "key1")
    add(file, "alice")
    add(file, "bob")
    with pytest.raises(UserError, match="--tenant"):
        revoke_key(file, "key1")
    with pytest.raises(UserError, match="has no key 'nothing'"):
        revoke_key(file, "nothing")
    with pytest.raises(UserError, match="has no key"):
        revoke_key(file, keys_of(file)[0].digest[:7])
    file.write_text("{")
    with pytest.raises(UserError, match="nothing was changed"):
        add(file)
    assert file.read_text() == "{"
    with pytest.raises(UserError) as caught:
        keys_of(file)
    assert "changed" not in str(caught.value)  # a list changes nothing at any time
    with pytest.raises(UserError, match="No such file"):
        add(file.parent / "nowhere" / "tenants.json")


def test_the_commands(file: Path) -> None:
    def ask(*words: str) -> str:
        result = CliRunner().invoke(app, ["key", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    key = ask("new", "--tenant", "alice", "--role", "metrics", "--file", str(file)).strip()
    assert hash_key(key) in read_rules(str(file), TenantLimits()).keys
    shown = ask("list", "--file", str(file))
    assert "alice" in shown
    assert "metrics" in shown
    assert key not in shown
    ask("revoke", "key1", "--file", str(file))
    assert keys_of(file) == []
    assert ask("draw") != ask("draw")
    refused = CliRunner().invoke(app, ["key", "new", "--tenant", "a", "--role", "root", "--file", str(file)])
    assert refused.exit_code == 2


def test_where_a_server_has_its_key_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_key("") == server_key_digest("") == ""
    monkeypatch.setenv(API_KEY_VARIABLE, "a-key-of-16-chars")
    assert server_key_digest("") == hash_key("a-key-of-16-chars")
    file = tmp_path / "key"
    file.write_text("another-key-of-more\n")
    assert server_key(str(file)) == "another-key-of-more"
    for bad in ("short", "two words are no key", "x" * 513):
        file.write_text(bad)
        with pytest.raises(UserError, match="is no key") as caught:
            server_key(str(file))
        assert bad not in str(caught.value)
    file.write_text("")
    with pytest.raises(UserError, match="it is empty"):
        server_key(str(file))
    with pytest.raises(UserError, match="No such file"):
        server_key(str(tmp_path / "none"))


def test_where_a_command_has_its_key_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_admin_key(tmp_path)
    key = admin_key(tmp_path)
    make_admin_key(tmp_path)
    assert admin_key(tmp_path) == key, "drawn once"
    assert admin_key_digest(tmp_path) == hash_key(key)
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600
    assert admin_key(tmp_path / "none") == admin_key_digest(tmp_path / "none") == ""
    for url in ("http://127.0.0.1:1", "https://llm.example", "nonsense", "http://[::1"):
        assert client_key(url) == ""
    monkeypatch.setenv(API_KEY_VARIABLE, "a-key-of-16-chars")
    assert client_headers("https://llm.example") == {"Authorization": "Bearer a-key-of-16-chars"}


def test_what_listens_where(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        ServeSettings(host=host).validate()
    with pytest.raises(UserError, match="--allow-anonymous"):
        ServeSettings(host="0.0.0.0").validate()
    ServeSettings(host="0.0.0.0", allow_anonymous=True).validate()
    file.write_text('{"default": {"requests": 5}}')
    assert not keys_needed(str(file), "")
    with pytest.raises(UserError, match="no API keys"):
        ServeSettings(host="0.0.0.0", tenants=str(file)).validate()
    add(file)
    ServeSettings(host="0.0.0.0", tenants=str(file)).validate()
    monkeypatch.setenv(API_KEY_VARIABLE, "a-key-of-16-chars")
    ServeSettings(host="0.0.0.0").validate()
    for wrong, said in (
        ({"cors_origins": ("*",)}, "--cors-origin"),
        ({"allowed_hosts": ("a/b",)}, "--allowed-host"),
    ):
        with pytest.raises(UserError, match=said):
            ServeSettings(**wrong).validate()  # type: ignore[arg-type]
    assert parse_names(" a, b,,") == ("a", "b")


# -- trunkline key wire


def say(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["key", "wire", *map(str, words)])
    return result.exit_code, result.output


def test_the_command_makes_changes_and_divides_keys(tmp_path: Path) -> None:
    file, part = tmp_path / "cluster.keys", tmp_path / "router.keys"
    code, text = say(file)
    assert code == 0
    assert load(file).generations[0].name in text
    assert not any(load(file).generations[0].of(role).secret in text for role in WireRole)
    code, text = say(file)
    assert (code, "exists already" in text) == (2, True)
    assert say(part, "--part", "router", "--of", file)[0] == 0
    assert load(part) == load(file).part(PARTS["router"])
    assert say(file, "--rotate")[0] == 0
    assert len(load(file).generations) == 2
    assert say(file, "--retire")[0] == 0
    assert len(load(file).generations) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rotate", "--retire"], "exclude each other"),
        (["--part", "router"], "--of"),
        (["--of", "x"], "--part"),
        (["--part", "cook", "--of", "x"], "allowed are group"),
        (["--rotate"], "cannot be read"),
        (["--part", "router", "--of", "nothing"], "cannot be read"),
    ],
)
def test_the_command_says_what_is_wrong_with_wire_keys(tmp_path: Path, words: list[str], message: str) -> None:
    code, text = say(tmp_path / "keys", *words)
    assert code == 2
    assert message in " ".join(text.split())
    assert not (tmp_path / "keys").exists()
