"""Who asks, and how much they may ask for: buckets against exact arithmetic."""

from __future__ import annotations

import json
import os
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from seeds import seeds

from trunkline.router.config import TenantLimits
from trunkline.router.errors import ApiError
from trunkline.router.tenancy.auth import Key, TenantRules, hash_key
from trunkline.router.tenancy.buckets import Bucket
from trunkline.router.tenancy.tenant_file import TenantFile, parse_rules, read_rules
from trunkline.router.tenancy.tenants import Meter, TenantBook, duration

PER_MINUTE = ("requests_per_minute", "tokens_per_minute")


class Book(TenantBook):
    """A book at the time that the test says."""

    def __init__(self, rules: TenantRules, **options: Any) -> None:
        self.now = 0.0
        super().__init__(rules, lambda: self.now, **options)

    def at(self, now: float) -> Book:
        self.now = now
        return self


def refusal(book: Book, name: str, now: float) -> ApiError:
    with pytest.raises(ApiError) as caught:
        book.at(now).admit(name)
    assert caught.value.status == 429
    assert caught.value.code == "rate_limit_exceeded"
    return caught.value


# -- buckets


class ExactBucket:
    """The same with fractions, from the whole history."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = Fraction(per_minute)
        self.level = self.capacity = max(self.per_minute, Fraction(1))
        self.at = Fraction(0)

    def advance(self, now: float) -> None:
        passed = Fraction(now) - self.at
        self.level = min(self.capacity, self.level + passed * self.per_minute / 60)
        self.at = Fraction(now)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_bucket_follows_exact_arithmetic(seed: int) -> None:
    rng = random.Random(seed)
    per_minute = rng.choice([1, 7, 60, 100_000])
    bucket, exact = Bucket(per_minute, 0.0), ExactBucket(per_minute)
    now = 0.0
    for _ in range(3000):
        now += rng.choice([0.0, rng.random(), rng.expovariate(0.2)])
        exact.advance(now)
        assert bucket.level(now) == pytest.approx(float(exact.level), abs=1e-5 * per_minute)
        if rng.random() < 0.6:
            amount = rng.randint(1, max(1, per_minute // 3))
            bucket.take(amount, now)
            exact.level -= amount
        wait_s = bucket.wait_s(1, now)
        assert wait_s == pytest.approx(max(0.0, float((1 - exact.level) * 60 / exact.per_minute)), abs=1e-3)
        if rng.random() < 0.05:
            now += wait_s
            exact.advance(now)
            assert bucket.wait_s(1, now) == 0.0, "who waits as long as told gets one"


def test_a_bucket_that_is_resized_keeps_what_was_used() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.resize(120, 0.0)
    assert bucket.level(0.0) == 70
    bucket.resize(30, 0.0)
    assert bucket.level(0.0) == -20
    assert bucket.level(1000.0) == 30


def test_time_that_stands_still_or_goes_back_fills_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0
    assert bucket.level(101.0) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0011, "2ms"),
        (0.25, "250ms"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (90.25, "1m30.25s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# -- the book


class Model:
    """What one tenant may do, from the list of all that it did."""

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.running = 0
        self.buckets = {
            name: ExactBucket(most) for name in PER_MINUTE if (most := getattr(limits, name)) is not None
        }

    def advance(self, now: float) -> None:
        for bucket in self.buckets.values():
            bucket.advance(now)

    def spend(self, name: str, amount: int) -> None:
        if name in self.buckets:
            self.buckets[name].level -= amount

    def refused_by(self) -> set[str]:
        """Limits that are reached; those too close to tell are in it as well."""
        found = {name for name, bucket in self.buckets.items() if bucket.level < 1 + Fraction(1, 10**4)}
        if self.limits.requests is not None and self.running >= self.limits.requests:
            found.add("requests")
        return found

    def surely_refused(self) -> bool:
        close = Fraction(1, 10**4)
        most = self.limits.requests
        if most is not None and self.running >= most:
            return True
        return any(bucket.level < 1 - close for bucket in self.buckets.values())


def admitted_or_error(book: Book, name: str, now: float) -> Meter | ApiError:
    try:
        return book.at(now).admit(name)
    except ApiError as error:
        return error


def random_limits(rng: random.Random) -> TenantLimits:
    return TenantLimits(
        requests=rng.choice([None, 1, 3]),
        requests_per_minute=rng.choice([None, 5, 60]),
        tokens_per_minute=rng.choice([None, 10, 1000]),
    )


@pytest.mark.parametrize("seed", seeds(4))
def test_a_book_admits_what_the_limits_allow(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c", "d"]
    rules = TenantRules(random_limits(rng), {name: random_limits(rng) for name in names[:3]})
    book = Book(rules)
    models = {name: Model(rules.limits_of(name)) for name in names}
    held: list[tuple[str, Meter]] = []
    now = 0.0
    admitted = refused = 0
    for _ in range(2500):
        now += rng.choice([0.0, 0.0, rng.random(), 5 * rng.random()])
        book.at(now)
        name = rng.choice(names)
        model = models[name]
        model.advance(now)
        if rng.random() < 0.5:
            admission = admitted_or_error(book, name, now)
            if isinstance(admission, ApiError):
                refused += 1
                assert admission.details["limit"] in model.refused_by(), (seed, now)
                assert admission.retry_after, (seed, now)
            else:
                admitted += 1
                assert not model.surely_refused(), (seed, now)
                model.running += 1
                model.spend("requests_per_minute", 1)
                held.append((name, admission))
        elif held:
            name, admission = held.pop(rng.randrange(len(held)))
            model = models[name]
            model.advance(now)
            tokens = rng.randint(1, 400)
            if rng.random() < 0.7:
                admission.charge(tokens)
                model.spend("tokens_per_minute", tokens)
            admission.close()
            admission.close()
            model.running -= 1
        for each in names:
            assert book.running(each) == models[each].running, (seed, now)
    assert admitted > 4, seed  # drawn limits may be one request at a time and ten tokens a minute, for all four
    assert refused > 2, seed
    for _, admission in held:
        admission.close()
    assert all(book.running(name) == 0 for name in names)


@pytest.mark.parametrize("limit", PER_MINUTE)
def test_who_waits_as_long_as_told_is_admitted(limit: str) -> None:
    book = Book(TenantRules(TenantLimits(**{limit: 7})))
    for _ in range(7):
        admission = book.at(0.0).admit("a")
        admission.charge(1)
        admission.close()
    error = refusal(book, "a", 0.0)
    assert error.details == {"limit": limit}
    assert limit in error.message
    assert error.retry_after == 9  # 60 / 7, rounded up
    assert error.headers()["Retry-After"] == "9"
    refusal(book, "a", 8.0)
    book.at(9.0).admit("a")


def test_tokens_may_be_overdrawn_by_what_runs_only() -> None:
    book = Book(TenantRules(TenantLimits(tokens_per_minute=100)))
    first, second, third = (book.at(0.0).admit("a") for _ in range(3))
    first.charge_prompt(5000)  # longer than the limit: it runs all the same
    first.charge_prompt(5000)  # of several prompts the first decides
    first.check_prompt()
    with pytest.raises(ApiError) as caught:
        second.check_prompt()
    assert caught.value.details == {"limit": "tokens_per_minute"}
    assert caught.value.retry_after == 5941  # (1 + 9,900) tokens at 100 a minute
    second.close()
    first.charge(100)
    first.close()
    refusal(book, "a", 5999.0)
    book.at(6001.0)
    third.check_prompt()
    third.charge_prompt(1)
    book.at(6002.0).admit("a")


def test_what_is_given_back_never_overfills_a_bucket() -> None:
    book = Book(TenantRules(TenantLimits(tokens_per_minute=100)))
    admission = book.at(0.0).admit("a")
    admission.charge_prompt(30)
    admission.charge(-30)
    assert admission.headers()["x-ratelimit-remaining-tokens"] == "100"
    admission.charge_prompt(30)
    book.at(60.0)
    admission.charge(-30)  # it has flowed in meanwhile
    assert admission.headers()["x-ratelimit-remaining-tokens"] == "100"


def test_idle_tenants_are_forgotten() -> None:
    book = Book(TenantRules(TenantLimits(requests=2)), tenants_max=100)
    busy = [book.at(0.0).admit(f"busy-{index}") for index in range(150)]
    assert len(book) == 150, "who has something running is not forgotten"
    for index in range(5000):
        book.at(0.0).admit(f"tenant-{index}").close()
    assert len(book) == 150
    for admission in busy:
        admission.close()
    assert len(book) == 100
    assert book.running("busy-0") == 0


def test_tenants_with_rules_of_their_own_are_not_forgotten() -> None:
    names = {f"named-{index}": TenantLimits(requests_per_minute=1) for index in range(20)}
    book = Book(TenantRules(tenants=names), tenants_max=10)
    for name in names:
        book.at(0.0).admit(name).close()
    assert len(book) == 20
    for index in range(1000):
        book.at(0.0).admit(f"tenant-{index}").close()
        assert len(book) == 20, "nobody else stays"
    for name in names:
        refusal(book, name, 0.0)
    book.rules = TenantRules()
    book.at(0.0).admit("somebody").close()
    assert len(book) == 10


def test_routers_share_every_limit_equally() -> None:
    rules = TenantRules(TenantLimits(requests=5, requests_per_minute=6, tokens_per_minute=1))
    book = Book(rules, routers=2)
    held = [book.at(0.0).admit("a") for _ in range(3)]  # a half of 5, rounded up
    assert held[0].headers()["x-ratelimit-limit-requests"] == "3"
    assert refusal(book, "a", 0.0).details == {"limit": "requests"}
    for admission in held:
        admission.close()
    assert refusal(book, "a", 0.0).details == {"limit": "requests_per_minute"}
    book.at(20.0).admit("a").charge(1)
    assert refusal(book, "a", 139.0).details == {"limit": "tokens_per_minute"}  # one in two minutes
    book.at(140.0).admit("a")


def test_new_rules_hold_at_once() -> None:
    book = Book(TenantRules())
    held = [book.at(0.0).admit("a") for _ in range(5)]
    book.rules = TenantRules(tenants={"a": TenantLimits(requests=3, requests_per_minute=10)})
    assert refusal(book, "a", 0.0).details == {"limit": "requests"}
    for admission in held:
        admission.close()
    for _ in range(10):
        book.at(0.0).admit("a").close()
    assert refusal(book, "a", 0.0).details == {"limit": "requests_per_minute"}
    book.rules = TenantRules(tenants={"a": TenantLimits(requests_per_minute=12)})
    book.at(0.0).admit("a")
    book.at(0.0).admit("a")
    refusal(book, "a", 0.0)
    book.rules = TenantRules()
    book.at(0.0).admit("a")


def test_priorities() -> None:
    rules = TenantRules(TenantLimits(priority=3), {"vip": TenantLimits(priority=-2)})
    book = Book(rules)
    batch, vip = book.at(0.0).admit("batch"), book.at(0.0).admit("vip")
    assert [batch.priority(wanted) for wanted in (None, -5, 0, 9)] == [3, 3, 3, 9]
    assert [vip.priority(wanted) for wanted in (None, -5, 0, 9)] == [-2, -2, 0, 9]


def test_what_is_left() -> None:
    book = Book(TenantRules(TenantLimits(requests_per_minute=60, tokens_per_minute=600)))
    admission = book.at(0.0).admit("a")
    admission.charge_prompt(150)
    assert admission.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "450",
        "x-ratelimit-reset-tokens": "15s",
    }
    admission.charge(900)
    assert admission.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert Book(TenantRules()).admit("a").headers() == {}


# -- the file


def test_a_file_fills_in_what_it_does_not_say() -> None:
    base = TenantLimits(requests=8, tokens_per_minute=1000)
    text = {
        "default": {"requests_per_minute": 60, "priority": 1},
        "tenants": {
            "free": {"requests": None, "priority": 5},
            "batch": {"keys": [hash_key("k").upper()], "tokens_per_minute": 9},
        },
    }
    rules = parse_rules(json.dumps(text).encode(), base)
    assert rules.default == TenantLimits(8, 60, 1000, 1)
    assert rules.tenants == {"free": TenantLimits(None, 60, 1000, 5), "batch": TenantLimits(8, 60, 9, 1)}
    assert rules.keys == {hash_key("k"): Key("batch", hash_key("k")[:8])}
    assert rules.has_keys
    assert parse_rules(b"{}", base) == TenantRules(base)


def test_the_file_gives_tenants_shares_of_the_kv_tiers() -> None:
    text = {
        "tenants": {"a": {"kv_floor": 0.1, "kv_ceiling": 0.5}, "b": {"kv_floor": 0.9}, "c": {"kv_floor": None}}
    }
    rules = parse_rules(json.dumps(text).encode(), TenantLimits())
    shares = {name: rules.limits_of(name).kv_share for name in "abcd"}
    assert shares == {"a": (0.1, 0.5), "b": (0.9, 1.0), "c": (0.0, 1.0), "d": (0.0, 1.0)}
    for wrong, problem in (
        ({"tenants": {"a": {"kv_floor": 0.6}, "b": {"kv_floor": 0.5}}}, "all tenants together is 1.1"),
        ({"tenants": {"a": {"kv_floor": 0.6, "kv_ceiling": 0.5}}}, "a: kv_floor is 0.6 and kv_ceiling 0.5"),
        ({"tenants": {"a": {"kv_ceiling": 2}}}, "a: kv_floor is 0.0 and kv_ceiling 2"),
        ({"tenants": {"a": {"pins": 1.5}}}, "a: pins is 1.5; it is a part, from 0 to 1"),
        ({"default": {"kv_floor": 0.1}}, "kv_floor"),
    ):
        with pytest.raises(ValueError, match=problem):
            parse_rules(json.dumps(wrong).encode(), TenantLimits())


def test_the_file_says_how_much_of_the_pins_a_tenant_may_have() -> None:
    text = {"default": {"pins": 0.5}, "tenants": {"a": {"pins": 0}, "b": {}, "c": {"pins": None}}}
    rules = parse_rules(json.dumps(text).encode(), TenantLimits())
    assert [rules.limits_of(name).pins for name in "abcd"] == [0.0, 0.5, None, 0.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "truncated"),
        ("[]", "object"),
        ('{"tenant": {}}', "tenant"),
        ('{"tenants": {"a": {"rpm": 1}}}', "rpm"),
        ('{"tenants": {"a": {"requests": 0}}}', "tenants: a: requests is 0; it must be at least 1"),
        ('{"tenants": {"a": {"requests_per_minute": 1.5}}}', "requests_per_minute"),
        ('{"default": {"tokens_per_minute": -1}}', "default: tokens_per_minute is -1"),
        ('{"default": {"keys": []}}', "keys"),
        ('{"default": {"priority": 4294967296}}', "32-bit"),
        ('{"default": {"requests_per_minute": %s}}' % ("9" * 400), "requests_per_minute has 400 digits"),
        ('{"tenants": {"a": {}, "b": {"key": []}}}', "tenants: b: "),
        ('{"tenants": {"a": {"key": []}}}', "of a tenant requests, requests_per_minute, "),
        ('{"tenants": {"a": {"keys": [{"sha256": "", "roll": 1}]}}}', "of a key sha256, name, role, "),
        ('{"tenants": {"a": {"keys": [{"sha256": "", "role": "root"}]}}}', "allowed are user, metrics, admin"),
        ('{"tenants": 5}', "object"),
        ('{"tenants": {"a b": {}}}', "'a b' is no name"),
        ('{"tenants": {"key-1": {}}}', "key-"),
        ('{"tenants": {"a": {"keys": ["sk-secret"]}}}', "SHA-256"),
        ('{"tenants": {"a": {"keys": ["%s"]}, "b": {"keys": ["%s"]}}}' % (("0" * 64,) * 2), "in common"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tenants\.json") as caught:
        read_rules(str(path), TenantLimits())
    assert said in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_a_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    with pytest.raises(ValueError, match="No such file"):
        TenantFile(str(path), TenantLimits())

    def write(requests: int, when: int) -> None:
        path.write_text(json.dumps({"default": {"requests": requests}}))
        os.utime(path, (when, when))

    write(1, 1000)
    file = TenantFile(str(path), TenantLimits())
    assert file.poll(10.0).default.requests == 1
    write(2, 2000)
    assert file.poll(10.9).default.requests == 1, "not looked at more than once a second"
    assert file.poll(11.0).default.requests == 2
    path.write_text("{")
    assert file.poll(12.0).default.requests == 2, "a file that is wrong changes nothing"
    path.unlink()
    assert file.poll(13.0).default.requests == 2
    write(3, 3000)
    assert file.poll(14.0).default.requests == 3
    path.write_text(json.dumps({"default": {"requests": 4}}))
    os.utime(path, (3000, 3000))  # same time and size
    file.reload()
    assert file.poll(14.0).default.requests == 4


def test_a_new_process_takes_what_was_kept_while_the_file_is_wrong(tmp_path: Path) -> None:
    path, kept = tmp_path / "tenants.json", tmp_path / "kept"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"tenants\.json"):
        TenantFile(str(path), TenantLimits(), str(kept))
    path.write_text('{"default": {"requests": 1}}')
    TenantFile(str(path), TenantLimits(), str(kept))
    path.write_text('{"default": {"requests": 20}}')
    first = TenantFile(str(path), TenantLimits(), str(kept))
    path.write_text('{"default": {"requests": "many"}}')
    first.reload()
    for wrong in (None, '{"default": {"requests": 0}}'):
        path.unlink() if wrong is None else path.write_text(wrong)
        file = TenantFile(str(path), TenantLimits(), str(kept))
        assert file.rules.default.requests == 20
    path.write_text('{"default": {"requests": 300}}')
    assert file.poll(1.0).default.requests == 300
    assert read_rules(str(kept), TenantLimits()).default.requests == 300
    assert sorted(tmp_path.iterdir()) == [kept, path]


def test_what_cannot_be_kept_is_no_reason_to_fail(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"default": {"requests": 1}}')
    file = TenantFile(str(path), TenantLimits(), str(tmp_path / "nowhere" / "kept"))
    assert file.rules.default.requests == 1
