"""`trunkline records`: what it says of a store, and old files of other hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trunkline.deploy.cli import records_cli
from trunkline.deploy.cli.app import app
from trunkline.kvstore.records import Change, RecordKey, open_records

AWAY = "redis://:hunter2@127.0.0.1:1/0"


def records(*arguments: str) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["records", *arguments], env=environment)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_cli, "PATIENCE_S", 0.1)
    monkeypatch.setattr("trunkline.deploy.config.record_files.PATIENCE_S", 0.1)


async def store_one(path: Path) -> None:
    store = open_records(f"sqlite:{path}")
    try:
        await store.create(RecordKey("session", "", "a"), Change(b"x" * 1000))
    finally:
        await store.close()


def test_a_store_is_looked_at(cache_home: Path) -> None:
    path = cache_home / "trunkline" / "kv" / "records" / "records.sqlite"
    path.parent.mkdir(parents=True)
    asyncio.run(store_one(path))
    for arguments in ((), ("--records", f"sqlite:{path}")):
        done = records("check", *arguments)
        assert (done.exit_code, done.stdout) == (0, f"1 record, 1.5 KiB, in sqlite:{path}\n")
    endangered = records("check", "--records", "sqlite::memory:")
    assert endangered.exit_code == 1
    assert "end with it" in endangered.stdout


def test_an_import_that_finds_nothing_says_so(tmp_path: Path) -> None:
    done = records("import", str(tmp_path))
    assert done.exit_code == 0
    assert "has no records of earlier versions" in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("check", "--records", AWAY), 1, "redis://:***@127.0.0.1:1/0 does not answer"),
        (("check", "--records", "memcached://:hunter2@h"), 2, "--records is 'memcached://:***@h'"),
        (("import", "/nonexistent"), 2, "/nonexistent: No such file"),
    ],
)
def test_what_cannot_be_is_one_clear_error(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = records(*arguments)
    assert done.exit_code == code, done.output
    assert message in done.output
    assert "hunter2" not in done.output
