"""Layouts and calls that no router should send, and requests that no group can run: all are refused with a
reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from controller.module_harness import ROOMY, ask, submit, words
from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.module_prompts import layout, text

from trunkline.controller.engine.validation import (
    problem_of_call,
    problem_of_layout,
    problem_of_prefetch,
    problem_of_submit,
)
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, ModulesCall, ModuleText, Prefetch, PromptLayout, Submit
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling

INT32_MAX = (1 << 31) - 1
A = text([1, 2, 3, 4], 0)
B = text([5, 6], 4, parent=0, seen=[(1, 2)])
GOOD = layout([A, B], [(4, 1), (8, 2)])
VOCABULARY = 50


def test_what_is_right_passes() -> None:
    assert problem_of_layout(GOOD, 3, VOCABULARY) == ""
    assert problem_of_layout(layout([], [(0, 1)]), 1, 0) == ""
    assert problem_of_layout(layout([A], []), 0, VOCABULARY) == "", "an announcement of texts only"
    high = text([1], INT32_MAX - 3)
    assert problem_of_layout(layout([high], [(INT32_MAX - 2, 1)]), 1, 0) == ""
    unseen = [text([1, 2], 0, seen=[]), text([3, 4], 1, seen=[]), text([5], 2, parent=0)]
    assert problem_of_layout(layout(unseen, [(3, 1)]), 1, 0) == "", "texts that are not seen may stand anywhere"


@pytest.mark.parametrize(
    ("wrong", "own", "words_of_it"),
    [
        (replace(GOOD, ttl=float("nan")), 3, "ttl"),
        (replace(GOOD, ttl=float("inf")), 3, "ttl"),
        (replace(GOOD, ttl=-1.0), 3, "ttl"),
        (replace(GOOD, runs=b"abcd"), 3, "pairs of int32"),
        (replace(GOOD, runs=b"abc"), 3, "pairs of int32"),
        (GOOD, 4, "runs hold 3 tokens; the prompt has 4"),
        (layout([A], []), 1, "runs hold 0 tokens"),
        (layout([A], [(4, 0), (5, 1)]), 1, "empty"),
        (layout([A], [(4, -1), (5, 2)]), 1, "empty"),
        (layout([], [(-1, 1), (5, 1)]), 2, "before the prompt"),
        (layout([], [(5, 2), (6, 1)]), 3, "not in the order"),
        (layout([], [(9, 1), (6, 1)]), 2, "not in the order"),
        (layout([A], [(3, 2)]), 2, "position 3 has two tokens"),
        (layout([A, text([7, 8], 2)], [(9, 1)]), 1, "position 2 has two tokens"),
        (layout([A, text([7, 8], 9)], [(4, 1)]), 1, "own tokens end at position 5, but texts are seen up to 11"),
        (layout([], [(INT32_MAX, 1)]), 1, "ends at position"),
        (layout([], [(INT32_MAX - 5, INT32_MAX)]), INT32_MAX, "ends at position"),
        (layout([text([], 0)], [(4, 1)]), 1, "text 0: it is empty"),
        (layout([A, text([50], 4)], [(5, 1)]), 1, "text 1: token ids from 50 to 50"),
        (layout([text([-1], 0)], [(5, 1)]), 1, "token ids from -1"),
        (layout([ModuleText(b"abc", 0)], [(5, 1)]), 1, "no array of int32"),
        (layout([text([1], -1)], [(5, 1)]), 1, "stands at position -1"),
        (layout([text([1, 2], INT32_MAX - 1)], [(5, 1)]), 1, "stands at position"),
        (layout([text([1], 1 << 70)], [(5, 1)]), 1, "stands at position"),
        (layout([text([1], 0, parent=0)], [(5, 1)]), 1, "its parent is text 0"),
        (layout([text([1], 0, parent=1), A], [(5, 1)]), 1, "its parent is text 1"),
        (layout([text([1], 0, parent=-2)], [(5, 1)]), 1, "its parent is text -2"),
        (layout([A, text([1], 3, parent=0, seen=[])], [(5, 1)]), 1, "before the end of its parent"),
        (layout([ModuleText(A.tokens, 0, -1, b"1234")], [(5, 1)]), 1, "seen ranges are 4 bytes"),
        (layout([text([1, 2], 0, seen=[(0, 3)])], [(5, 1)]), 1, "[0, 3) of its 2 tokens"),
        (layout([text([1, 2], 0, seen=[(1, 1)])], [(5, 1)]), 1, "not empty"),
        (layout([text([1, 2], 0, seen=[(1, 2), (0, 1)])], [(5, 1)]), 1, "ascending"),
        (layout([text([1, 2], 0, seen=[(-1, 1)])], [(5, 1)]), 1, "[-1, 1)"),
        (PromptLayout([A] * 65_537, b""), 0, "65537 texts"),
        (layout([], [(2 * i, 1) for i in range(65_537)]), 65_537, "65537 runs"),
    ],
)
def test_layouts_that_cannot_be(wrong: PromptLayout, own: int, words_of_it: str) -> None:
    assert words_of_it in problem_of_layout(wrong, own, VOCABULARY)


@pytest.mark.parametrize(
    ("change", "words_of_it"),
    [
        ({"op": "decode"}, "'decode' is unknown; known are encode, look, forget, unpin, cancel"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": -1.0}, "ttl"),
        ({"texts": [A, text([], 4)]}, "text 1: it is empty"),
        ({"texts": [A] * 65_537}, "65537 texts"),
        ({"pin_name": "x" * 2049}, "pin_name has 2049 characters"),
    ],
)
def test_calls_that_cannot_be(change: dict[str, Any], words_of_it: str) -> None:
    good = ModulesCall(1, "encode", [A, B])
    assert problem_of_call(good, VOCABULARY) == ""
    assert words_of_it in problem_of_call(msgspec.structs.replace(good, **change), VOCABULARY)


def test_submissions_and_announcements_are_checked() -> None:
    good = Submit(1, pack_int32([1, 2, 3]), 3, 5, Sampling(), layout=GOOD)
    assert problem_of_submit(good, VOCABULARY) == ""
    assert "dropped ranges" in problem_of_submit(replace(good, drops=pack_int32([0, 1])), VOCABULARY)
    assert "runs hold" in problem_of_submit(replace(good, prompt_len=2), VOCABULARY)
    assert "runs hold" in problem_of_submit(replace(good, prompt_len=-1), VOCABULARY)
    announced = Prefetch(1, pack_int32([1, 2, 3]), layout=GOOD)
    assert problem_of_prefetch(announced, VOCABULARY) == ""
    assert problem_of_prefetch(replace(announced, tokens=b"", layout=replace(GOOD, runs=b"")), VOCABULARY) == ""
    assert "runs hold" in problem_of_prefetch(replace(announced, tokens=b""), VOCABULARY)


def refusal(
    config: EngineConfig, change: dict[str, Any], texts: list[ModuleText], runs: list[tuple[int, int]]
) -> str:
    simulation = Simulation(config)
    request = submit(simulation, texts, runs, **change)
    ended = simulation.streams[request].ended
    assert ended is not None
    assert ended.reason == "invalid"
    assert simulation.engine.is_idle
    return ended.detail


SMALL = replace(ROOMY, num_blocks=12, max_context=60)


@pytest.mark.parametrize(
    ("config", "change", "texts", "runs", "words_of_it"),
    [
        (SMALL, {}, [], [(60, 1)], "ends at position 61; this model has 60"),
        (SMALL, {}, [], [(59, 1)], "ends at position 60; this model has 60"),
        (SMALL, {}, [text(words(0, 4), 57, seen=[])], [(1, 1)], "text 0 ends at position 61"),
        (SMALL, {"max_tokens": 5}, [text(words(0, 41), 0)], [(41, 1)], "need 13 blocks of 4 tokens at once"),
        (SMALL, {}, [text(words(0, 41), 0, seen=[]), A], [(4, 1)], "need 14 blocks"),
        (SMALL, {"n": 4, "max_tokens": 12}, [], [(0, 2)], "need 16 blocks"),
        (ROOMY, {"n": 13}, [A], [(4, 1)], "at most 12 sequences"),
        (SMALL, {"beam": BeamSearch(4), "n": 4, "max_tokens": 12}, [], [(0, 2)], "need 16 blocks"),
        (SMALL, {"prompt_logprobs": 0}, [A], [(4, 1)], "scored"),
        (SMALL, {"max_tokens": 0}, [A], [(4, 1)], "max_tokens is 0"),
        (replace(SMALL, prefix_cache=False), {}, [A], [(4, 1)], "prefix cache is off"),
        (SMALL, {"max_tokens": 3}, [text(words(0, 50), 0)], [(50, 1)], "text 0 and those that it sees need 13"),
        (
            replace(ROOMY, num_blocks=600, max_context=1000),
            {},
            [text([i], i) for i in range(560)],
            [(560, 1)],
            "Use fewer, longer modules",
        ),
    ],
)
def test_requests_that_no_group_can_run(
    config: EngineConfig,
    change: dict[str, Any],
    texts: list[ModuleText],
    runs: list[tuple[int, int]],
    words_of_it: str,
) -> None:
    assert words_of_it in refusal(config, change, texts, runs)


def test_what_just_fits_runs_to_its_end() -> None:
    """To the model's last position, and with the pool's last block."""
    simulation = Simulation(SMALL)
    assert len(ask(simulation, [], [(50, 1)], 40).output) == 9
    texts = [text(words(0, 16), 0, seen=[]), text(words(20, 21), 16, parent=0)]
    stream = ask(simulation, texts, [(37, 1)], 7)
    assert len(stream.output) == 7
    assert refusal(SMALL, {"max_tokens": 8}, texts, [(37, 1)])
