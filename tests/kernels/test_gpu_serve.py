"""The part `serve` of the GPU benchmark, here with the CPU: a real server each time."""

from __future__ import annotations

import io
import itertools

import gpu_serve
import psutil
import pytest
from gpu_device import Output, Visit
from gpu_serve import Streams, Way, check_serving
from gpu_visit import Findings

pytestmark = [pytest.mark.area("gpu-kit"), pytest.mark.processes]

SMALL = ("--kv-memory", "64MiB", "--host-tier", "64MiB")
FEW = Streams(24, 8)


class OnCpu:
    """All that the part asks of a device."""

    worker = {"device": "cpu"}  # noqa: RUF012 (never changed)


def found_by(*ways: Way, seconds: float = 120) -> Findings:
    stream = io.StringIO()
    check_serving(OnCpu(), Output(stream), Visit(seconds), ways, FEW)  # type: ignore[arg-type]
    found = Findings("serve", "done", 0, "")
    found.read(stream.getvalue())
    return found


def test_a_server_starts_answers_survives_and_stops() -> None:
    """And nothing of it is left. (Servers of other tests may be there all the time.)"""
    before = set(psutil.Process().children(recursive=True))
    found = found_by(Way("fp8 KV", ("--dtype", "bfloat16", "--kv-dtype", "fp8", *SMALL)))
    assert found.problems == []
    assert [result["metric"] for result in found.results] == [
        "ready",
        "first completion",
        "second completion, cached",
        "chat with a schema",
        "24 streams at once",
        "answer after SIGKILL of the worker",
        "stop",
    ]
    assert {result["case"]["serve"] for result in found.results} == {"fp8 KV"}
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [each for each in left if any("trunkline" in word for word in each.cmdline())]


def test_a_server_that_cannot_start_is_told_with_its_words_and_the_next_comes() -> None:
    found = found_by(Way("a wrong option", ("--kv-dtype", "int3")), Way("another", ("--tp", "0")))
    assert found.results == []
    assert [problem.partition(":")[0] for problem in found.problems] == [
        "serve with a wrong option",
        "serve with another",
    ]
    assert "ended with code 2 before it was ready" in found.problems[0]
    assert "int3" in found.problems[0]


def test_servers_take_a_part_of_the_memory_that_the_command_line_knows() -> None:
    """Other checks run on the same device at the same time. The first option is for GPUs alone, and says so."""
    assert all({"--gpu-memory-fraction", "--kv-memory"} & set(way.options) for way in gpu_serve.WAYS)
    found = found_by(gpu_serve.WAYS[0])
    assert found.results == []
    assert "--gpu-memory-fraction is 0.1, but workers compute on CPUs; leave it out" in found.problems[0]


def test_no_server_is_started_without_time_for_it() -> None:
    found = found_by(Way("default options"), seconds=gpu_serve.START_S - 1)
    assert found.notes == ["no time was left to serve with default options"]
    assert (found.results, found.problems) == ([], [])


def test_a_second_completion_that_is_not_cached_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is another text."""
    body, asked = gpu_serve.completion, itertools.count()
    monkeypatch.setattr(gpu_serve, "completion", lambda prompt, tokens: body(f"{next(asked)} {prompt}", tokens))
    found = found_by(Way("default options", SMALL))
    assert found.results[-1]["metric"] == "second completion, cached"
    assert "tokens were cached the second time" in found.problems[0]
