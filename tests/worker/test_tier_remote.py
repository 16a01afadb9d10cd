"""The remote tier on a real redis_server: shared by name, never wrong bytes, and away without harm."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import redis
from structlog.testing import capture_logs
from worker.redis_server import RedisServer

from trunkline.deploy.config.option_values import check_remote_url
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, SlotId
from trunkline.kvstore.remote_stores import REMOTE_STORES, RemoteStore
from trunkline.kvstore.tier import SharedTier, SlotKey
from trunkline.worker.errors import WorkerConfigError
from trunkline.worker.tiers import remote_tier
from trunkline.worker.tiers.disk_tier import RecordKeeper
from trunkline.worker.tiers.remote_tier import open_remote_tier

pytestmark = pytest.mark.processes
SLOT = 300_000
KEEPER = RecordKeeper(b"model A", rank=0, tp=1)


def open_tier(url: str, keeper: RecordKeeper = KEEPER, ttl_s: float = 60.0, slot: int = SLOT) -> SharedTier:
    return open_remote_tier(url, slot, keeper, ttl_s)


def name(index: int) -> ChunkName:
    return ChunkName(bytes([index]) * NAME_BYTES)


def key(index: int) -> SlotKey:
    return SlotKey(SlotId(-1), name(index), 0)


def content(index: int) -> bytes:
    return np.random.default_rng(index).bytes(SLOT)


def found(tier: SharedTier, index: int) -> bool:
    """Whether the name gives what was written; anything else but a miss fails."""
    into = memoryview(bytearray(SLOT))
    if not tier.read(key(index), into):
        return False
    assert into == content(index)
    return True


def test_controllers_share_it_by_name(redis_server: RedisServer) -> None:
    tier, other = open_tier(redis_server.url), open_tier(redis_server.url.replace("redis:", "valkey:"))
    assert not found(tier, 1)
    for index in (1, 2, 4):
        tier.write(key(index), memoryview(content(index)))
    assert [found(other, index) for index in range(5)] == [False, True, True, False, True]
    assert other.present([name(index) for index in (1, 2, 3, 4)]) == 2
    assert other.present([name(3), name(1)]) == 0
    assert other.present([name(1), name(4)]) == 2
    assert other.present([]) == 0
    assert found(tier, 1)
    tier.close()
    other.close()


@pytest.mark.parametrize("use", ["read", "present", "write"])
def test_a_use_begins_the_time_to_live_anew(redis_server: RedisServer, use: str) -> None:
    tier = open_tier(redis_server.url, ttl_s=1000.0)
    client: Any = redis.Redis.from_url(redis_server.url)
    tier.write(key(1), memoryview(content(1)))
    (place,) = client.keys("tl:*")
    client.expire(place, 100)
    match use:
        case "read":
            assert found(tier, 1)
        case "present":
            assert tier.present([name(1), name(2)]) == 1
        case "write":
            tier.write(key(1), memoryview(content(1)))
    assert client.ttl(place) > 100
    client.close()
    tier.close()


def test_deleted_chunks_are_gone_and_others_stay(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "_DELETED_AT_ONCE", 2)
    tier = open_tier(redis_server.url)
    for index in range(6):
        tier.write(key(index), memoryview(content(index)))
    tier.delete([name(index) for index in (0, 1, 2, 4, 9)])
    assert [found(tier, index) for index in range(6)] == [False, False, False, True, False, True]
    tier.delete([])
    redis_server.kill()
    with pytest.raises(OSError, match="remote tier"):
        tier.delete([name(3)])
    tier.close()


def test_without_a_time_to_live_chunks_stay(redis_server: RedisServer) -> None:
    tier = open_tier(redis_server.url, ttl_s=0.0)
    client: Any = redis.Redis.from_url(redis_server.url)
    tier.write(key(1), memoryview(content(1)))
    assert found(tier, 1)
    assert tier.present([name(1)]) == 1
    assert [client.ttl(place) for place in client.keys("tl:*")] == [-1]
    client.close()
    tier.close()


def test_other_configurations_never_meet(redis_server: RedisServer) -> None:
    tier = open_tier(redis_server.url)
    for keeper in (RecordKeeper(b"model B", 0, 1), RecordKeeper(b"model A", 1, 2), RecordKeeper(b"model A", 0, 2)):
        redis_server.begin_anew()
        other = open_tier(redis_server.url, keeper)
        tier.write(key(1), memoryview(content(1)))
        assert not found(other, 1)
        assert other.present([name(1)]) == 0
        other.write(key(1), memoryview(content(2)))
        assert found(tier, 1)
        # Even a value that got under the wrong key is a miss.
        places = redis_server.places()
        (mine,) = [place for place in places if b":0/1:" in place and b"model A".hex().encode() in place]
        (theirs,) = set(places) - {mine}
        redis_server.client().set(theirs, redis_server.value(mine))
        assert not found(other, 1)


def test_damaged_values_are_misses(redis_server: RedisServer) -> None:
    tier = open_tier(redis_server.url)
    tier.write(key(1), memoryview(content(1)))
    (place,) = redis_server.places()
    whole = bytearray(redis_server.value(place))
    rng = np.random.default_rng(3)
    for at in (*range(0, 64, 5), *rng.integers(64, len(whole), 10).tolist()):
        whole[at] ^= 16
        redis_server.client().set(place, bytes(whole))
        assert not found(tier, 1), at
        whole[at] ^= 16
    for value in (whole[:-1], whole + b"x", b"", b"short"):
        redis_server.client().set(place, bytes(value))
        assert not found(tier, 1)
    redis_server.client().set(place, bytes(whole))
    assert found(tier, 1)


def test_chunks_expire(redis_server: RedisServer) -> None:
    open_tier(redis_server.url, ttl_s=100.0).write(key(1), memoryview(content(1)))
    open_tier(redis_server.url, ttl_s=0.0).write(key(2), memoryview(content(2)))
    lives = {k[-2:]: redis_server.client().pttl(k) for k in redis_server.places()}
    assert 50_000 < lives[b"01"] <= 100_000
    assert lives[b"02"] == -1


def test_a_store_that_goes_and_comes_back(redis_server: RedisServer) -> None:
    """One warning for an outage; calls fail at once until the next attempt is due, and then all is as before."""
    tier = open_tier(redis_server.url)
    tier.write(key(1), memoryview(content(1)))
    redis_server.kill()
    with capture_logs() as logs:
        for _ in range(20):
            with pytest.raises(OSError, match="remote tier at"):
                tier.read(key(1), memoryview(bytearray(SLOT)))
            with pytest.raises(OSError, match="remote tier at"):
                tier.write(key(1), memoryview(content(1)))
            with pytest.raises(OSError, match="remote tier at"):
                tier.present([name(1)])
        redis_server.start()
        deadline = time.monotonic() + 30
        while True:
            try:
                assert not found(tier, 1)  # the server keeps nothing
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                break
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]
    tier.write(key(1), memoryview(content(1)))
    assert found(tier, 1)


def test_a_full_store_refuses(redis_server: RedisServer) -> None:
    tier = open_tier(redis_server.url)
    tier.write(key(1), memoryview(content(1)))
    redis_server.client().config_set("maxmemory", 1)
    redis_server.client().config_set("maxmemory-policy", "noeviction")
    with pytest.raises(OSError, match="maxmemory"):
        tier.write(key(2), memoryview(content(2)))


def test_passwords_are_not_told(redis_server: RedisServer) -> None:
    redis_server.kill()
    tier = open_tier(redis_server.url.replace("127", "user:secret@127"))
    with capture_logs() as logs, pytest.raises(OSError, match="remote tier") as raised:
        tier.present([name(1)])
    assert "secret" not in str(raised.value) + str(logs)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host", r"scheme 'ftp'\): allowed are redis"),
        ("host:6379", "scheme 'host'"),
        ("redis://host:x", "host"),
    ],
)
def test_urls_that_name_nothing(url: str, message: str) -> None:
    with pytest.raises(WorkerConfigError, match=message):
        open_tier(url)


def test_over_a_socket_of_this_host(redis_server: RedisServer) -> None:
    tier, other = open_tier(redis_server.socket_url), open_tier(redis_server.url)
    tier.write(key(1), memoryview(content(1)))
    assert found(other, 1)
    assert found(tier, 1)
    redis_server.kill()
    with pytest.raises(OSError, match=r"remote tier at /.*redis\.sock"):
        tier.read(key(1), memoryview(bytearray(SLOT)))
    tier.close()
    other.close()


class DictTier:
    """A store of another kind."""

    def __init__(self, url: str, slot_bytes: int, keeper: RecordKeeper, ttl_s: float) -> None:
        self.given = url, slot_bytes, keeper, ttl_s


def test_a_further_kind_of_store_is_a_further_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one table: the launcher and the workers know it then."""
    url = "dict://here"
    for check in (check_remote_url, open_tier):
        with pytest.raises((UserError, WorkerConfigError), match=r"allowed are redis://.*, unix:///PATH\?db=DB$"):
            check(url)
    store = RemoteStore("dict://PLACE", f"{__name__}:DictTier", lambda parts: "" if parts.hostname else "no place")
    monkeypatch.setitem(REMOTE_STORES, "dict", store)
    ServeSettings(remote_tier=url).validate()
    tier = open_tier(url)
    assert isinstance(tier, DictTier)
    assert tier.given == (url, SLOT, KEEPER, 60.0)
    for check in (check_remote_url, open_tier):
        with pytest.raises((UserError, WorkerConfigError), match="no place"):
            check("dict://")
