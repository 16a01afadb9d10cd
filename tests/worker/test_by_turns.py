"""A benchmark of two commits by turns (benchmarks/by_turns.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from by_turns import Checkout, Figure, compare, main, other
from report import Report

SCRIPT = """
import json, sys
from pathlib import Path

own = Path(__file__)
with (own.parents[2] / "turns").open("a") as turns:
    turns.write(own.parents[1].name + " ")
option, _, path = sys.argv[1:]
if option == "fail":
    raise SystemExit("there is no such part")
case = {"rows": 8, "kind": option}
results = [
    {"case": case, "metric": "step", "value": VALUE, "unit": "us", "runs": 5},
    {"case": case, "metric": own.parents[1].name, "value": 1, "unit": "us", "runs": 5},
]
Path(path).write_text(json.dumps({"results": results}))
"""


def checkout(folder: Path, value: float) -> Checkout:
    """Make a folder that looks like a checkout with an environment, whose benchmark measures this value."""
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks/step.py").write_text(SCRIPT.replace("VALUE", str(value)))
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    return Checkout(folder, folder / ".venv/bin/python")


def figures(**values: float) -> dict[Figure, float]:
    return {Figure((), metric, "s"): value for metric, value in values.items()}


def values(report: Report) -> dict[tuple[str, str], float]:
    return {(result["case"]["metric"], result["metric"]): result["value"] for result in report.results}


def test_ratios_are_those_of_rounds() -> None:
    report = Report("x")
    rounds = [(figures(a=old, b=0.0), figures(a=new, b=1.0)) for old, new in ((10, 5), (100, 60), (20, 14))]
    compare(rounds, report)
    assert values(report) == {
        ("a", "before"): 20,
        ("a", "now"): 14,
        ("a", "now / before"): pytest.approx(0.6),
        ("b", "before"): 0,
        ("b", "now"): 1,
    }


def test_what_one_commit_has_alone_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("x")
    compare([(figures(a=1, old=1), figures(a=1, new=1)), (figures(a=1, old=1), figures(new=2, a=2))], report)
    assert {metric for metric, _ in values(report)} == {"a"}
    assert "# 2 figures are of one commit only" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no figure in common"):
        compare([(figures(old=1), figures(new=1))], report)


@pytest.mark.processes
def test_checkouts_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path / "before", 8.0)
    monkeypatch.setattr("by_turns.OWN", checkout(tmp_path / "now", 6.0).folder)
    path = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["by_turns.py", "--json", str(path), str(tmp_path / "before"), "step.py", "decode"]
    )
    main()
    assert (tmp_path / "turns").read_text().split() == ["before", "now", "now", "before", "before", "now"]
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    assert {result["metric"]: result["value"] for result in found} == {"before": 8, "now": 6, "now / before": 0.75}
    assert found[0]["case"] == {"rows": "8", "kind": "decode", "metric": "step", "unit": "us"}


@pytest.mark.processes
def test_what_cannot_run_is_told(tmp_path: Path) -> None:
    made = checkout(tmp_path / "before", 1.0)
    with pytest.raises(SystemExit, match=r"(?s)step.py fail --json .* ended with code 1:.*no such part"):
        made.run("step.py", ["fail"])
    with pytest.raises(SystemExit, match=r"steps.py: there is no such benchmark"):
        other(made.folder, "steps.py")
    made.python.unlink()
    with pytest.raises(SystemExit, match=r"there is no environment; `make -C .*before setup` makes it"):
        other(made.folder, "step.py")
