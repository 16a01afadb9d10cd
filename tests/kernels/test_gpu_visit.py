"""The order of a visit to a GPU machine, its time limits and what it writes, with stand-ins for the parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import gpu_visit
import pytest
from gpu_visit import NO_DEVICE, PARTS, Part, VisitRun, chosen_parts, together

pytestmark = [pytest.mark.area("gpu-kit"), pytest.mark.processes]

FIGURE = '{"case": {"n": 1}, "metric": "time", "value": 2.5, "unit": "us", "runs": 3}'
SCRIPTS = {
    "good": f"print('{FIGURE}'); print('not JSON')",
    "hangs": f"import time; print('{FIGURE}', flush=True); time.sleep(100)",
    "crashes": f"import os, signal; print('{FIGURE}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
    "raises": "raise ValueError('the kernel was lost')",
    "wrong": """print('{"problem": "2 + 2 is 5"}')""",
    "facts": """print('{"fact": "gpu", "value": "a card"}'); print('{"note": "no fan"}')""",
    "cut": "print('{\"case\": {\"n', end='')",
}


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_visit, "GRACE_S", 0.0)


def make_run(folder: Path, told: list[str] | None = None) -> VisitRun:
    def command(part: Part) -> list[str]:
        return [sys.executable, "-c", SCRIPTS.get(part.name.split("-")[0], "pass")]

    return VisitRun(folder, command, "abc", (told if told is not None else []).append)


def part(
    name: str, seconds: float = 60, *, is_needed: bool = False, beside: str = "", is_check: bool = False
) -> Part:
    return Part(name, seconds, f"About {name}", is_needed, beside, is_check)


def with_time(run: Callable[[float], bool]) -> None:
    """Try with limits of more and more seconds until there was time for it: starting takes what it takes."""
    assert any(run(seconds) for seconds in (1.5, 6.0, 24.0, 96.0))


def document(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return loaded


def test_the_parts_are_those_of_a_visit_and_fit_in_ten_minutes() -> None:
    alone = [(part.name, part.seconds) for part in PARTS if not part.beside]
    assert alone == [
        ("start", 20),
        ("ops", 50),
        ("engine", 60),
        ("serve", 30),
        ("sanitizer", 45),
        ("ceilings", 10),
        ("decode", 120),
        ("flashinfer", 60),
        ("prefill", 30),
        ("sampling", 15),
        ("model", 130),
        ("tiers", 15),
    ]
    assert sum(seconds for _, seconds in alone) < 600
    assert [part.name for part in PARTS if part.is_needed] == ["start"]
    names = [part.name for part in PARTS]
    for background in (part for part in PARTS if part.beside):
        assert names.index(background.name) < names.index(background.beside) < names.index("ceilings")


def test_a_part_that_hangs_is_ended_and_the_next_begins(tmp_path: Path) -> None:
    """What it had found is kept."""

    def found_something(seconds: float) -> bool:
        run = make_run(tmp_path)
        assert not run.run([part("hangs", seconds), part("good")])
        assert [(found.part, found.status) for found in run.found.values()] == [
            ("hangs", "out of time"),
            ("good", "done"),
        ]
        assert f"was ended after {seconds:.0f} s" in run.found["hangs"].problems[0]
        return len(run.found["hangs"].results) == 1

    with_time(found_something)


def test_what_a_part_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    script = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); "
        f"open({str(pid)!r}, 'w').write(str(child.pid)); time.sleep(100)"
    )
    monkeypatch.setitem(SCRIPTS, "starts", script)

    def started(seconds: float) -> bool:
        make_run(tmp_path).run([part("starts", seconds)])
        return pid.exists() and pid.read_text() != ""

    with_time(started)
    stat = Path(f"/proc/{pid.read_text()}/stat")
    deadline = time.monotonic() + 20
    # Its entry may stay for a while, as that of a process that has ended.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_parts_that_fail_are_recorded_and_the_next_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert not run.run([part("crashes"), part("raises"), part("wrong"), part("cut"), part("good")])
    found = run.found
    assert [found[name].status for name in ("crashes", "raises", "wrong", "cut", "good")] == [
        "failed",
        "failed",
        "done",
        "done",
        "done",
    ]
    assert "ended with code -11" in found["crashes"].problems[0]
    assert len(found["crashes"].results) == 1
    assert "ValueError: the kernel was lost" in found["raises"].problems[0]
    assert found["wrong"].problems == ["2 + 2 is 5"]
    assert document(tmp_path)["problems"][-1] == "wrong: 2 + 2 is 5"
    assert found["cut"].results == []


@pytest.mark.parametrize("name", ["raises", "wrong", "hangs"])
def test_nothing_follows_a_needed_part_that_fails(name: str, tmp_path: Path) -> None:
    told: list[str] = []
    run = make_run(tmp_path, told)
    assert not run.run([part(name, 1.5 if name == "hangs" else 60, is_needed=True), part("good")])
    assert list(run.found) == [name]
    assert f"Nothing after `{name}` was started" in told[-1]


def test_the_whole_visit_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part that begins gets what is left; what comes after it is said."""
    monkeypatch.setattr(gpu_visit, "WORTH_STARTING_S", 0.5)

    def reached_the_second(seconds: float) -> bool:
        told: list[str] = []
        run = make_run(tmp_path, told)
        assert not run.run([part("good-1"), part("hangs", 200), part("good-2")], seconds=seconds)
        assert told[-1].startswith("\nNo time was left for `"), "of the last"
        if "hangs" not in run.found:
            return False
        assert [found.part for found in run.found.values()] == ["good-1", "hangs"]
        assert run.found["hangs"].seconds < 200, "less than its own limit"
        assert told[-1] == "\nNo time was left for `good-2`."
        return True

    with_time(reached_the_second)


def test_results_are_written_after_each_part(tmp_path: Path) -> None:
    seen: list[list[object]] = []

    class Watching(list[str]):
        def append(self, text: str) -> None:
            seen.append([found["part"] for found in document(tmp_path)["parts"]])

    assert make_run(tmp_path, Watching()).run([part("facts"), part("good-1"), part("good-2")])
    assert seen == [["facts"], ["facts", "good-1"], ["facts", "good-1", "good-2"]]
    text = (tmp_path / "results.md").read_text()
    for words in (
        "| gpu | a card |",
        "- no fan",
        "Part `good-1`, done after",
        "| n | time (us) | runs |",
        "| 1 | 2.5 | 3 |",
    ):
        assert words in text
    assert document(tmp_path)["results"][0] == {"part": "good-1", **json.loads(FIGURE)}
    assert document(tmp_path)["machine"] == {"gpu": "a card"}


def test_a_second_visit_repeats_what_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path).run([part("good"), part("raises")])
    monkeypatch.setitem(SCRIPTS, "raises", f"print('{FIGURE.replace('2.5', '7.5')}')")
    run = make_run(tmp_path)
    assert run.run([part("raises")])
    values = [(result["part"], result["value"]) for result in document(tmp_path)["results"]]
    assert values == [("good", 2.5), ("raises", 7.5)]
    assert document(tmp_path)["problems"] == []


def test_a_part_in_the_background_ends_before_times_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    write = f"open({str(marks)!r}, 'a').write"
    monkeypatch.setitem(SCRIPTS, "back", f"import time\nfor _ in range(2000): {write}('b'); time.sleep(0.01)")
    monkeypatch.setitem(
        SCRIPTS,
        "check",
        f"import time\nwhile not open({str(marks)!r}, 'a+').tell(): time.sleep(0.01)\n{write}('c')",
    )
    monkeypatch.setitem(SCRIPTS, "measure", f"import time; {write}('m'); time.sleep(0.3); {write}('n')")
    run = make_run(tmp_path)
    assert run.run([part("back", beside="check"), part("check"), part("measure")])
    written = marks.read_text()
    assert "b" in written[: written.index("c")], "both at once"
    assert written[written.index("m") :] == "mn", "nothing beside what is timed"
    assert run.found["back"].status == "out of time"
    assert run.found["back"].problems == [], "it is given up, not wrong"


def test_checks_run_beside_each_other_and_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the last check ends before another, which is waited for; what is timed comes after both."""
    marks = tmp_path / "marks"
    marks.touch()
    common = (
        "import time; from pathlib import Path\n"
        f"marks = Path({str(marks)!r})\n"
        "def write(letter):\n with marks.open('a') as file: file.write(letter)\n"
        "def wait_for(letter):\n while letter not in marks.read_text(): time.sleep(0.01)\n"
    )
    monkeypatch.setitem(SCRIPTS, "slow", common + "write('s'); wait_for('l'); time.sleep(0.2); write('w')")
    monkeypatch.setitem(SCRIPTS, "last", common + "wait_for('s'); write('l')")
    monkeypatch.setitem(SCRIPTS, "measure", common + "write('m')")
    run = make_run(tmp_path / "out")
    assert run.run(together([part("slow", is_check=True), part("last", is_check=True), part("measure")]))
    assert marks.read_text() == "slwm"
    assert [found.status for found in run.found.values()] == ["done"] * 3


def test_a_check_that_does_not_end_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_visit, "TOGETHER_S", 0.0)
    run = make_run(tmp_path)
    assert not run.run(together([part("hangs", 1.0, is_check=True), part("good", is_check=True)]))
    assert "was ended after 1 s" in run.found["hangs"].problems[0]
    assert run.found["good"].status == "done"


def test_together_changes_checks_alone() -> None:
    changed = {part.name: part for part in together(PARTS)}
    assert list(changed) == [part.name for part in PARTS]
    checks = [part.name for part in PARTS if part.is_check]
    assert checks == ["ops", "engine", "serve", "sanitizer"]
    assert [changed[name].beside for name in checks] == ["sanitizer"] * 3 + [""]
    assert all(changed[part.name] == part for part in PARTS if not part.is_check)
    timed = sum(part.seconds for part in PARTS if not part.is_check and not part.beside)
    assert timed + max(changed[name].seconds for name in checks) < gpu_visit.VISIT_S
    assert together([part("good")]) == [part("good")]


def test_parts_are_chosen_by_name() -> None:
    assert chosen_parts("") == list(PARTS)
    assert [part.name for part in chosen_parts("model,ops")] == ["ops", "model"], "in their order"
    with pytest.raises(ValueError, match=r"no part 'moddel'; there are: start, compile, ops"):
        chosen_parts("moddel")


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, gpu.__file__, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.skipif(bool(os.environ.get("CUDA_VISIBLE_DEVICES")), reason="there may be a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run_command("--out", tmp_path / "out", "--only", "start,ceilings")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "finds no CUDA device here" in done.stdout
    found = document(tmp_path / "out")["parts"]
    assert [(part["part"], part["exit_code"]) for part in found] == [("start", NO_DEVICE)]
