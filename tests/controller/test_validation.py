"""Whatever passes `problem_of_submit` can be planned, encoded and held by the workers' tensors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trunkline.controller.engine.validation import (
    is_request_number,
    problem_of_prefetch,
    problem_of_submit,
    request_of_prefetch,
)
from trunkline.controller.messages import Prefetch, Submit
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.cuts import DROPS_MAX
from trunkline.worker.messages import Sampling

NAN, INFINITY = float("nan"), float("inf")
GOOD = Submit(1, pack_int32([0, 5, 99]), 3, 5, Sampling(), [7])


def test_ordinary_requests_pass() -> None:
    assert problem_of_submit(GOOD, 100) == ""
    assert problem_of_submit(msgspec.structs.replace(GOOD, tokens=b""), 100) == ""  # the engine says why not
    generous = Sampling(
        temperature=0.0,
        top_p=0.0,
        top_k=2**31 - 1,
        min_p=1.0,
        seed=2**64 - 1,
        presence_penalty=-2.0,
        repetition_penalty=1e-300,
        logit_bias={5: -100.0},
        logprobs=20,
    )
    assert problem_of_submit(msgspec.structs.replace(GOOD, sampling=generous), 100) == ""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"request": -1}, "32 bits"),
        ({"request": 1 << 32}, "32 bits"),
        ({"tokens": b"\x01"}, "int32"),
        ({"tokens": pack_int32([0, 100])}, "token ids"),
        ({"tokens": pack_int32([-1, 5])}, "token ids"),
        ({"prediction": pack_int32([0, 100])}, "prediction"),
        ({"stop_token_ids": [1, 1 << 31]}, "stop token"),
        ({"stop_token_ids": [-1]}, "stop token"),
    ],
)
def test_numbers_that_fit_nothing(change: dict[str, Any], word: str) -> None:
    assert word in problem_of_submit(msgspec.structs.replace(GOOD, **change), 100)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": NAN},
        {"temperature": -0.1},
        {"temperature": INFINITY},
        {"top_p": 1.5},
        {"top_k": 1 << 31},
        {"top_k": -1},
        {"min_p": NAN},
        {"presence_penalty": INFINITY},
        {"frequency_penalty": -INFINITY},
        {"repetition_penalty": -1.0},
        {"logprobs": -2},
        {"logprobs": 1 << 63},
        {"logit_bias": {3: NAN}},
    ],
)
def test_sampling_that_no_tensor_holds(field: dict[str, Any]) -> None:
    problem = problem_of_submit(msgspec.structs.replace(GOOD, sampling=Sampling(**field)), 100)
    assert next(iter(field)) in problem


def test_unknown_vocabulary_admits_any_id() -> None:
    assert problem_of_submit(msgspec.structs.replace(GOOD, tokens=pack_int32([2**31 - 1])), 0) == ""


def test_request_numbers() -> None:
    assert [is_request_number(n) for n in (-1, 0, 2**32 - 1, 2**32)] == [False, True, True, False]


HISTORY = msgspec.structs.replace(GOOD, tokens=pack_int32(range(20)), prompt_len=20)


@pytest.mark.parametrize(
    ("drops", "word"),
    [
        ([], ""),
        ([4, 8], ""),
        ([0, 3, 5, 19], ""),
        ([4, 4], "not empty"),
        ([8, 4], "ascending"),
        ([-1, 4], "ascending"),
        ([4, 8, 8, 9], "apart"),
        ([6, 8, 1, 2], "ascending"),
        ([4, 20], "must stay"),
        ([4, 2**31 - 1], "must stay"),
        ([x for i in range(DROPS_MAX + 1) for x in (2 * i, 2 * i + 1)], "at most"),
    ],
)
def test_dropped_ranges(drops: list[int], word: str) -> None:
    packed = pack_int32(drops)
    for problem in (
        problem_of_submit(msgspec.structs.replace(HISTORY, drops=packed), 100),
        problem_of_prefetch(_prefetch(HISTORY.tokens, packed), 100),
    ):
        assert bool(problem) == bool(word)
        assert word in problem


@pytest.mark.parametrize("packed", [b"\x01", b"\x01\0\0\0", b"\0" * 12])
def test_drops_that_are_no_pairs(packed: bytes) -> None:
    assert "pairs" in problem_of_submit(msgspec.structs.replace(HISTORY, drops=packed), 100)
    assert "pairs" in problem_of_prefetch(_prefetch(HISTORY.tokens, packed), 100)


def test_drops_end_within_the_prompt_not_within_what_was_generated() -> None:
    """A request that moves here brings output; only its prompt is cut."""
    moved = msgspec.structs.replace(HISTORY, prompt_len=10, drops=pack_int32([4, 12]))
    assert "must stay" in problem_of_submit(moved, 100)


@pytest.mark.parametrize("ttl", [NAN, INFINITY, -1.0])
def test_times_to_live_that_are_none(ttl: float) -> None:
    assert "ttl" in problem_of_submit(msgspec.structs.replace(GOOD, ttl=ttl), 100)
    assert problem_of_submit(msgspec.structs.replace(GOOD, ttl=30.0), 100) == ""
    assert "next_s" in problem_of_submit(msgspec.structs.replace(GOOD, next_s=ttl), 100)


def test_what_the_engine_is_told() -> None:
    message = msgspec.structs.replace(HISTORY, drops=pack_int32([4, 8, 10, 11]), ttl=5.0, salt=b"t")
    request = Request.of(77, message)
    assert (request.id, request.drops, request.submit.ttl, request.submit.salt) == (
        77,
        ((4, 8), (10, 11)),
        5.0,
        b"t",
    )
    announced = request_of_prefetch(_prefetch(HISTORY.tokens, message.drops))
    assert announced.drops == request.drops
    assert announced.tokens.tolist() == list(range(20))


def test_announcements_are_checked_like_requests() -> None:
    assert problem_of_prefetch(_prefetch(HISTORY.tokens), 100) == ""
    assert "token ids" in problem_of_prefetch(_prefetch(pack_int32([100])), 100)
    assert "int32" in problem_of_prefetch(_prefetch(b"\x01"), 100)


def _prefetch(tokens: bytes, drops: bytes = b"") -> Prefetch:
    return Prefetch(ticket=1, tokens=tokens, drops=drops)
