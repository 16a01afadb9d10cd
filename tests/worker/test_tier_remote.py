"""The remote tier on real servers of Redis and S3: shared by name, never wrong bytes, and away without harm."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import redis
from structlog.testing import capture_logs
from worker.redis_server import RedisServer
from worker.s3_server import S3Server
from worker.tier_driver import wait_until

from trunkline.deploy.config.option_values import check_remote_url
from trunkline.deploy.errors import UserError
from trunkline.kvstore.chunk_format import kv_format
from trunkline.kvstore.chunks import NAME_BYTES, ChunkName, SlotId
from trunkline.kvstore.remote_stores import Place
from trunkline.kvstore.shards import HeadShard
from trunkline.kvstore.tier import SlotKey
from trunkline.worker.errors import WorkerConfigError
from trunkline.worker.tiers import redis_store, remote_tier
from trunkline.worker.tiers.remote_tier import Part, RemoteTier, open_remote_tier

pytestmark = pytest.mark.processes
KV_HEADS, LAYERS, CHUNK, HEAD_DIM = 4, 3, 16, 50
HEAD_BYTES = CHUNK * HEAD_DIM
ONE_RANK = HeadShard(KV_HEADS)


def open_tier(
    url: str, shard: HeadShard = ONE_RANK, ttl_s: float = 60.0, fingerprint: bytes = b"model A"
) -> RemoteTier:
    part = Part(fingerprint, shard, kv_format((LAYERS, len(shard.heads), CHUNK, HEAD_DIM), "int8"))
    tier = open_remote_tier(url, part, ttl_s)
    assert isinstance(tier, RemoteTier)
    return tier


def name(index: int) -> ChunkName:
    return ChunkName(bytes([index]) * NAME_BYTES)


def key(index: int) -> SlotKey:
    return SlotKey(SlotId(-1), name(index), 0)


def content(index: int, shard: HeadShard = ONE_RANK) -> bytes:
    """A chunk's bytes, the part of one rank."""
    whole = np.random.default_rng(index).integers(0, 256, (LAYERS * 2, KV_HEADS, HEAD_BYTES), dtype=np.uint8)
    return whole[:, shard.heads.start : shard.heads.stop].tobytes()


def write(tier: RemoteTier, *indices: int, kept_s: float = 0.0) -> None:
    shard = tier._part.shard
    tier.write_many([(key(index), memoryview(content(index, shard)), kept_s) for index in indices])


def found(tier: RemoteTier, *indices: int) -> list[bool]:
    """Which names give what was written; anything else but a miss fails."""
    buffers = [memoryview(bytearray(tier.slot_bytes)) for _ in indices]
    done = tier.read_many([(key(index), into) for index, into in zip(indices, buffers, strict=True)])
    for index, into, is_done in zip(indices, buffers, done, strict=True):
        assert not is_done or into == content(index, tier._part.shard)
    return done


Server = RedisServer | S3Server


@pytest.fixture(params=["redis", "s3"])
def server(request: pytest.FixtureRequest) -> Server:
    """A server that holds nothing."""
    made: Server = request.getfixturevalue(f"{request.param}_server")
    return made


def values(server: Server) -> dict[Any, bytes]:
    """All values that a server holds, by a place that `put` takes."""
    if isinstance(server, S3Server):
        return {place: server.value(place) for place in server.places()}
    client: Any = server.client()
    return {(place, field): value for place in server.places() for field, value in client.hgetall(place).items()}


def put(server: Server, place: Any, value: bytes) -> None:
    if isinstance(server, S3Server):
        server.put(place, value)
    else:
        client: Any = server.client()
        client.hset(*place, value)


def test_groups_share_it_by_name(server: Server) -> None:
    tier, other = open_tier(server.url), open_tier(server.url.replace("redis:", "valkey:"))
    assert found(tier, 1) == [False]
    write(tier, 1, 2, 4)
    assert found(other, *range(5)) == [False, True, True, False, True]
    assert other.present([name(index) for index in (1, 2, 3, 4)]) == 2
    assert other.present([name(3), name(1)]) == 0
    assert other.present([name(1), name(4)]) == 2
    assert other.present([]) == 0
    assert found(tier, 1) == [True]
    write(tier, *range(40))
    assert other.present([name(index) for index in range(50)]) == 40
    tier.close()
    other.close()


SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 8), (8, 1), (8, 2), (2, 8), (4, 1), (1, 4)]


@pytest.mark.parametrize(("ranks", "others"), SIZES)
def test_groups_of_other_sizes_find_the_same_chunks(server: Server, ranks: int, others: int) -> None:
    """Four KV heads: with eight ranks each head is on two of them."""
    for rank in range(ranks):
        write(open_tier(server.url, HeadShard(KV_HEADS, rank, ranks)), 1, 2, 3)
    assert len(values(server)) == 3 * min(ranks, KV_HEADS)
    for rank in range(others):
        tier = open_tier(server.url, HeadShard(KV_HEADS, rank, others))
        assert tier.present([name(index) for index in (1, 2, 3, 4)]) == 3
        assert found(tier, 3, 4, 1) == [True, False, True]
        fresh = open_tier(server.url, HeadShard(KV_HEADS, rank, others))
        assert found(fresh, 4, 3) == [False, True], "without a probe"


def test_a_path_may_change_its_division(server: Server) -> None:
    """Chunks of one prompt that groups of several sizes have written, and one that is written only in part."""
    for rank in range(2):
        write(open_tier(server.url, HeadShard(KV_HEADS, rank, 2)), 1, 2)
    write(open_tier(server.url), 3, 4)
    for rank in range(4):
        write(open_tier(server.url, HeadShard(KV_HEADS, rank, 4)), 2, 5)
    write(open_tier(server.url, HeadShard(KV_HEADS, 1, 2)), 6)
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            tier = open_tier(server.url, HeadShard(KV_HEADS, rank, ranks))
            has_six = rank * 2 >= ranks > 1
            assert tier.present([name(index) for index in range(1, 8)]) == 5 + has_six
            assert found(tier, *range(1, 8)) == [True] * 5 + [has_six, False]


def test_reading_what_the_own_group_wrote_is_one_question(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(server.url, HeadShard(KV_HEADS, 1, 2))
    write(tier, 1, 2)
    asked: list[Sequence[Place]] = []
    read = tier._store.read

    def note(places: Sequence[Place], kept_s: float) -> Any:
        asked.append(places)
        return read(places, kept_s)

    monkeypatch.setattr(tier._store, "read", note)
    monkeypatch.setattr(tier._store, "parts", None)
    assert found(tier, 1, 2) == [True, True]
    assert [len(places) for places in asked] == [2]


@pytest.mark.parametrize("use", ["read", "present", "write"])
def test_a_use_makes_a_chunk_live_longer_and_never_shorter(redis_server: RedisServer, use: str) -> None:
    client: Any = redis.Redis.from_url(redis_server.url)
    for ttl_s, expected in ((1000.0, 1000), (10.0, 100)):
        tier = open_tier(redis_server.url, ttl_s=ttl_s)
        write(tier, 1)
        (place,) = client.keys("tl:kv:*")
        client.expire(place, 100)
        match use:
            case "read":
                assert found(tier, 1) == [True]
            case "present":
                assert tier.present([name(1), name(2)]) == 1
            case "write":
                write(tier, 1)
        assert expected - 60 < client.ttl(place) <= expected
        tier.close()
    client.close()


def test_deleted_chunks_are_gone_and_others_stay(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all their parts, also those that groups of other sizes have written."""
    monkeypatch.setattr(redis_store, "_DELETED_AT_ONCE", 2)
    tier = open_tier(server.url)
    write(tier, *range(6))
    for rank in range(4):
        write(open_tier(server.url, HeadShard(KV_HEADS, rank, 4)), 1, 3)
    tier.delete([name(index) for index in (0, 1, 2, 4, 9)])
    assert found(tier, *range(6)) == [False, False, False, True, False, True]
    assert len(values(server)) == 2 + 4
    tier.delete([])
    server.kill()
    try:
        with pytest.raises(OSError, match="remote tier"):
            tier.delete([name(3)])
    finally:
        server.start()
    tier.close()


def test_times_to_live(redis_server: RedisServer) -> None:
    """The tier's own, unless the write says another one; 0 is never."""
    write(open_tier(redis_server.url, ttl_s=100.0), 1)
    write(open_tier(redis_server.url, ttl_s=0.0), 2)
    write(open_tier(redis_server.url, ttl_s=100.0), 3, kept_s=25.5)
    write(open_tier(redis_server.url, ttl_s=100.0), 4, kept_s=5000.0)
    tier = open_tier(redis_server.url, ttl_s=0.0)
    assert found(tier, 2) == [True]
    assert tier.present([name(2)]) == 1
    lives: Any = {place[-2:]: redis_server.client().pttl(place) for place in redis_server.places()}
    assert 50_000 < lives[b"01"] <= 100_000
    assert lives[b"02"] == -1
    assert 0 < lives[b"03"] <= 25_500
    assert 4_000_000 < lives[b"04"] <= 5_000_000


def test_other_models_never_meet(server: Server) -> None:
    tier, other = open_tier(server.url), open_tier(server.url, fingerprint=b"model B")
    write(tier, 1)
    assert found(other, 1) == [False]
    assert other.present([name(1)]) == 0
    mine = dict(values(server))
    write(other, 1)
    (theirs,) = values(server).keys() - mine.keys()
    # Even a value that got under the wrong key is a miss.
    put(server, theirs, next(iter(mine.values())))
    assert found(other, 1) == [False]
    assert found(tier, 1) == [True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_values_are_misses(server: Server, ranks: int) -> None:
    """Flipped bits and lengths, in a rank's own part and in one that is joined with others."""
    for rank in range(ranks):
        write(open_tier(server.url, HeadShard(KV_HEADS, rank, ranks)), 1)
    tier = open_tier(server.url)
    place, value = sorted(values(server).items())[-1]
    whole = bytearray(value)
    rng = np.random.default_rng(3)
    for at in (*range(0, 64, 5), *rng.integers(64, len(whole), 10).tolist()):
        whole[at] ^= 16
        put(server, place, bytes(whole))
        assert found(tier, 1) == [False], at
        whole[at] ^= 16
    for broken in (whole[:-1], whole + b"x", b"", b"short"):
        put(server, place, bytes(broken))
        assert found(tier, 1) == [False]
    put(server, place, bytes(whole))
    assert found(tier, 1) == [True]


def test_one_damaged_chunk_of_several_is_one_miss(server: Server) -> None:
    tier = open_tier(server.url)
    write(tier, 1, 2, 3)
    place, value = next((place, value) for place, value in values(server).items() if value[16:32] == name(2))
    put(server, place, value[:-1] + bytes([value[-1] ^ 1]))
    assert found(tier, 1, 2, 3) == [True, False, True]


def test_a_store_that_goes_and_comes_back(server: Server) -> None:
    """One warning for an outage; calls fail at once until the next attempt is due, and then all is as before."""
    tier = open_tier(server.url)
    write(tier, 1)
    server.kill()
    with capture_logs() as logs:
        for _ in range(20):
            with pytest.raises(OSError, match="remote tier at"):
                found(tier, 1)
            with pytest.raises(OSError, match="remote tier at"):
                write(tier, 1)
            with pytest.raises(OSError, match="remote tier at"):
                tier.present([name(1)])
        server.start()
        deadline = time.monotonic() + 30
        while True:
            try:
                assert found(tier, 1) == [False]  # the server keeps nothing
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                break
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]
    write(tier, 1)
    assert found(tier, 1) == [True]


def test_a_store_that_does_not_answer_is_left_after_its_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "_RETRY_FIRST_S", 60.0)
    tier = open_tier(server.url)
    write(tier, 1)
    server.pause()
    try:
        with pytest.raises(OSError, match="remote tier at"):
            found(tier, 1)
        with pytest.raises(OSError, match="the next attempt is due later"):
            found(tier, 1)
    finally:
        server.resume()


def test_a_full_store_refuses(redis_server: RedisServer) -> None:
    tier = open_tier(redis_server.url)
    write(tier, 1)
    redis_server.client().config_set("maxmemory", 1)
    redis_server.client().config_set("maxmemory-policy", "noeviction")
    with pytest.raises(OSError, match="maxmemory"):
        write(tier, 2)


def test_a_bucket_without_rights_refuses(s3_server: S3Server) -> None:
    tier = open_tier(s3_server.url)
    write(tier, 1)
    s3_server.demand_rights()
    with capture_logs() as logs, pytest.raises(OSError, match="403 Forbidden") as raised:
        found(tier, 1)
    s3_server.begin_anew()
    assert "a-secret" not in str(raised.value) + str(logs)


def test_a_bucket_that_is_not_there_is_an_outage(s3_server: S3Server) -> None:
    """Not a store without chunks."""
    url = s3_server.url.replace("kv-bucket", "other-bucket")
    for ask in (found, write):
        with pytest.raises(OSError, match="remote tier at other-bucket"):
            ask(open_tier(url), 1)


def test_passwords_are_not_told(redis_server: RedisServer) -> None:
    tier = open_tier(redis_server.url.replace("127", "user:secret@127"))
    with capture_logs() as logs, pytest.raises(OSError, match="remote tier") as raised:
        tier.present([name(1)])
    assert "secret" not in str(raised.value) + str(logs)


def test_access_keys_of_files(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Of a profile of AWS's tools, where the environment has no key."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(WorkerConfigError, match="no profile 'team'"):
        open_tier(s3_server.url + "&profile=team")
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = k\naws_secret_access_key = told-to-none\n")
    tier = open_tier(s3_server.url + "&profile=team")
    write(tier, 1)
    assert found(tier, 1) == [True]
    (tmp_path / "credentials").write_text("aws_secret_access_key = told-to-none\n")
    with pytest.raises(WorkerConfigError) as raised:
        open_tier(s3_server.url + "&profile=team")
    assert "told-to-none" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host", "allowed are redis"),
        ("host:6379", "allowed are redis"),
        ("redis://host:x", "host"),
        ("s3:///prefix", r"write s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket", "credentials are taken from the environment"),
        ("s3://bucket?key=1", "option 'key' is unknown; allowed are endpoint, region, profile"),
        ("s3://bucket?endpoint=localhost:9000", "endpoint is http://HOST:PORT"),
    ],
)
def test_urls_that_name_nothing(url: str, message: str) -> None:
    for check in (check_remote_url, open_tier):
        with pytest.raises((UserError, WorkerConfigError), match=message) as raised:
            check(url)
        assert "secret" not in str(raised.value)


def test_over_a_socket_of_this_host(redis_server: RedisServer) -> None:
    tier, other = open_tier(redis_server.socket_url), open_tier(redis_server.url)
    write(tier, 1)
    assert found(other, 1) == [True]
    assert found(tier, 1) == [True]
    redis_server.kill()
    with pytest.raises(OSError, match=r"remote tier at /.*redis\.sock"):
        found(tier, 1)
    tier.close()
    other.close()


class OldRedis(socketserver.ThreadingTCPServer):
    """Answers as Redis 6 does: it knows neither NX nor GT of PEXPIRE."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), OldRedisHandler)


class OldRedisHandler(socketserver.StreamRequestHandler):
    """A connection to it."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2])
            too_many = words[0].upper() == b"PEXPIRE" and len(words) > 3
            refused = b"-ERR wrong number of arguments for 'pexpire' command\r\n"
            self.wfile.write(refused if too_many else b"+OK\r\n" if words[0].upper() == b"SELECT" else b":1\r\n")


def test_a_server_that_is_too_old_is_said_at_the_start() -> None:
    with OldRedis() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"redis://127.0.0.1:{server.server_address[1]}/0"
        with capture_logs() as logs:
            open_tier(url).try_out()
        assert [entry["event"] for entry in logs] == ["remote tier fails"]
        assert "nothing can be written: the server is older than Redis 7" in logs[0]["error"]
        server.shutdown()


def test_a_trial_leaves_nothing_behind(server: Server) -> None:
    with capture_logs() as logs:
        open_tier(server.url).try_out()
    assert not logs
    assert not server.places()


def test_a_store_that_is_away_is_said_at_the_start_and_tried_again(redis_server: RedisServer) -> None:
    redis_server.kill()
    tier = open_tier(redis_server.url)
    with capture_logs() as logs:
        tier.try_out()
    assert "nothing can be written" in logs[0]["error"]
    redis_server.start()
    wait_until(lambda: not _fails(tier))


def _fails(tier: RemoteTier) -> bool:
    try:
        write(tier, 1)
    except OSError:
        return True
    return False
