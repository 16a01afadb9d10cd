"""Whatever passes `problem_of` can be planned, encoded and held by the workers' tensors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trunkline.controller.messages import Submit
from trunkline.controller.submissions import is_request_number, problem_of
from trunkline.kvstore.layout import pack_int32
from trunkline.worker.messages import Sampling

NAN, INFINITY = float("nan"), float("inf")
GOOD = Submit(1, pack_int32([0, 5, 99]), 3, 5, Sampling(), [7])


def test_ordinary_requests_pass() -> None:
    assert problem_of(GOOD, 100) == ""
    assert problem_of(msgspec.structs.replace(GOOD, tokens=b""), 100) == ""  # the engine says why not
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
    assert problem_of(msgspec.structs.replace(GOOD, sampling=generous), 100) == ""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"request": -1}, "32 bits"),
        ({"request": 1 << 32}, "32 bits"),
        ({"tokens": b"\x01"}, "int32"),
        ({"tokens": pack_int32([0, 100])}, "token ids"),
        ({"tokens": pack_int32([-1, 5])}, "token ids"),
        ({"stop_token_ids": [1, 1 << 31]}, "stop token"),
        ({"stop_token_ids": [-1]}, "stop token"),
    ],
)
def test_numbers_that_fit_nothing(change: dict[str, Any], word: str) -> None:
    assert word in problem_of(msgspec.structs.replace(GOOD, **change), 100)


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
    problem = problem_of(msgspec.structs.replace(GOOD, sampling=Sampling(**field)), 100)
    assert next(iter(field)) in problem


def test_unknown_vocabulary_admits_any_id() -> None:
    assert problem_of(msgspec.structs.replace(GOOD, tokens=pack_int32([2**31 - 1])), 0) == ""


def test_request_numbers() -> None:
    assert [is_request_number(n) for n in (-1, 0, 2**32 - 1, 2**32)] == [False, True, True, False]
