"""What the values of options may say: sizes, tiers, URLs, limits of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from trunkline.deploy.config.option_values import (
    DiskOption,
    check_remote_url,
    format_bytes,
    parse_bytes,
    parse_disk_tier,
    parse_tenant_limits,
    redacted,
)
from trunkline.deploy.errors import UserError
from trunkline.router.config import TenantLimits


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("0", DiskOption(0)),
        ("20GiB", DiskOption(20 << 30)),
        (" 2 GB ", DiskOption(2 * 10**9)),
        ("/data/kv:512MiB", DiskOption(512 << 20, Path("/data/kv"))),
        ("/data/a:b:1GiB", DiskOption(1 << 30, Path("/data/a:b"))),
        ("~/kv:1GiB", DiskOption(1 << 30, Path("/h/kv"))),
        ("kv:1GiB", DiskOption(1 << 30, Path("/kv"))),
    ],
)
def test_disk_options(text: str, option: DiskOption, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/h")
    assert parse_disk_tier(text) == option


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lots", "is not a size"),
        ("", "is not a size"),
        ("/data/kv", "says no size; write PATH:SIZE, such as /data/kv:20GiB"),
        ("/data/kv:", "says no size; write PATH:SIZE, such as /data/kv:20GiB"),
        (":1GiB", "write PATH:SIZE"),
        ("/data/kv:0", "write 0 alone"),
    ],
)
def test_what_is_no_disk_option(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_disk_tier(text)


def test_remote_urls() -> None:
    urls = "redis://localhost redis://h:6379/0 rediss://u:p@h:1/15?x=y redis://[::1]:6379/ redis://:p@h "
    urls += "unix:///run/redis.sock unix:///r?db=3 unix://u:p@/r.sock "
    urls += "s3://bucket s3://bucket/some/prefix?endpoint=http://127.0.0.1:9000&region=eu-west-1&profile=team"
    for url in urls.split():
        check_remote_url(url)


def test_an_unknown_store_is_told_which_there_are() -> None:
    with pytest.raises(UserError) as caught:
        check_remote_url("memcached://h")
    assert str(caught.value) == (
        "--remote-tier is 'memcached://h'; allowed are redis://HOST:PORT/DB, rediss://HOST:PORT/DB, "
        "valkey://HOST:PORT/DB, valkeys://HOST:PORT/DB, unix:///PATH?db=DB, s3://BUCKET/PREFIX"
    )


@pytest.mark.parametrize(
    "url",
    [
        *("memcached://:secret@h", "http://u:secret@h:80", "h:6379", "redis://", "redis://:secret@"),
        *("redis://:secret@h:port", "redis://:secret@h:99999", "redis://:secret@h/zero", "redis://[::1"),
        *("unix://:secret@h/r.sock", "unix://:secret@/", "unix:///r.sock?db=secret", "u:secret@h"),
        *("unix:///r.sock?password=secret&db=", "redis://:se/cret@h/x", "redis://:se?cret@h/x"),
        *("redis://:se#cret@h/x", "ftp://h/?password=secret", "ftp://h/?password=secret@secret"),
    ],
)
def test_other_urls_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(UserError, match="--remote-tier is") as caught:
        check_remote_url(url)
    assert "cret" not in str(caught.value)
    assert "se" not in redacted(url).removeprefix("redis")


def test_what_is_shown_of_a_url() -> None:
    assert redacted("redis://h:6379/0") == "redis://h:6379/0"
    assert redacted("rediss://u:p@h:1/2?password=p") == "rediss://u:***@h:1/2"
    assert redacted("redis://:p@h") == "redis://:***@h"


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", TenantLimits()),
        ("requests=8", TenantLimits(requests=8)),
        (" requests = 8 , tokens_per_minute=1000,", TenantLimits(requests=8, tokens_per_minute=1000)),
        ("requests_per_minute=60,priority=-3", TenantLimits(requests_per_minute=60, priority=-3)),
    ],
)
def test_limits(text: str, limits: TenantLimits) -> None:
    assert parse_tenant_limits(text) == limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requests", "requests is a whole number, not ''"),
        ("requests=many", "requests is a whole number, not 'many'"),
        ("requests=1.5", "not '1.5'"),
        ("rpm=60", "NAME=NUMBER.*requests_per_minute"),
        ("requests=1,requests=2", "once at most"),
        ("requests=0", "at least 1, or left out for no limit"),
        ("priority=4294967296", "32-bit"),
    ],
)
def test_what_are_no_limits(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_tenant_limits(text)


SIZES = {"1GiB": 1 << 30, "1 gib": 1 << 30, "512M": 512 << 20, "2GB": 2 * 10**9, "1.5KiB": 1536, "64": 64}
SIZES |= {" 7 b ": 7, "3T": 3 << 40}


@pytest.mark.parametrize(("text", "count"), SIZES.items())
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text, "--kv-memory") == count


@pytest.mark.parametrize("text", ["", "GiB", "1 GiBs", "-1", "1,5G", "0", "0.1B", "1e9", "9" * 30, "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"--kv-memory is .*(size|less than)"):
        parse_bytes(text, "--kv-memory")


def test_formatted_sizes() -> None:
    counts = (1, 1023, 1024, 1536, 1 << 30, 5 << 50)
    assert [format_bytes(n) for n in counts] == ["1 B", "1023 B", "1 KiB", "1.5 KiB", "1 GiB", "5120 TiB"]
