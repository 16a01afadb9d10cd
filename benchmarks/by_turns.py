"""A benchmark of two commits by turns: what it measures here, and in a checkout of another commit.

    python benchmarks/by_turns.py [--quick] [--rounds 3] [--json PATH] BEFORE SCRIPT [OPTION ...]

BEFORE is the folder of the other checkout, which has an environment of its own (`make setup` there); SCRIPT the
name of a benchmark of both, such as router_decisions.py, and what follows it are its options. Each round runs each
checkout's own script once, in a process of its own; which goes first changes from round to round. Figures with the
same case, metric and unit are compared: the medians of all rounds, and the median of the rounds' ratios, which
other work on the machine changes less than the figures. Benchmarks that start servers have options of their own
for this, by which servers of both commits run at the same time (`--programs`, `--before`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import REMAINDER
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from report import Report, argument_parser, commit, server_environment

OWN: Final = Path(__file__).resolve().parents[1]
ERROR_CHARACTERS: Final = 3000


class Figure(NamedTuple):
    """What one value of a benchmark is of."""

    case: tuple[tuple[str, str], ...]
    metric: str
    unit: str


Figures = Mapping[Figure, float]


class Checkout(NamedTuple):
    """A commit's files and its interpreter."""

    folder: Path
    python: Path

    def run(self, script: str, options: Sequence[str]) -> Figures:
        """Run a benchmark; return what it has measured.

        Raises:
            SystemExit: It failed; with the end of what it printed.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "results.json")
            command = [str(self.python), str(self.script(script)), *options, "--json", str(path)]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=server_environment(), check=False
            )
            if done.returncode or not path.exists():
                said = done.stdout.decode(errors="replace")[-ERROR_CHARACTERS:]
                raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}:\n{said}")
            results = json.loads(path.read_text())["results"]
        found = {}
        for result in results:
            case = tuple((key, str(value)) for key, value in result["case"].items())
            found[Figure(case, result["metric"], result["unit"])] = float(result["value"])
        return found

    def script(self, name: str) -> Path:
        return self.folder / "benchmarks" / name


def other(folder: Path, script: str) -> Checkout:
    """Return the checkout in a folder.

    Raises:
        SystemExit: It has no such script, or no environment.
    """
    found = Checkout(folder, folder / ".venv/bin/python")
    if not found.script(script).is_file():
        raise SystemExit(f"{found.script(script)}: there is no such benchmark")
    if not found.python.exists():
        raise SystemExit(f"{found.python}: there is no environment; `make -C {folder} setup` makes it")
    return found


def compare(rounds: Sequence[tuple[Figures, Figures]], report: Report) -> None:
    """Add the figures that both commits have in every round, those of before first in each pair.

    Raises:
        SystemExit: There is none.
    """
    common = [figure for figure in rounds[0][1] if all(figure in each for pair in rounds for each in pair)]
    if not common:
        raise SystemExit("both commits have no figure in common: their scripts have other cases or metrics")
    for figure in common:
        before, now = ([pair[at][figure] for pair in rounds] for at in (0, 1))
        ratios = [new / old for old, new in zip(before, now, strict=True) if old]
        case = {**dict(figure.case), "metric": figure.metric, "unit": figure.unit}
        report.add(case, "before", median(before), "", len(rounds))
        report.add(case, "now", median(now), "", len(rounds))
        if len(ratios) == len(rounds):
            report.add(case, "now / before", median(ratios), "", len(rounds))
    missing = {figure for pair in rounds for each in pair for figure in each} - set(common)
    if missing:
        print(f"# {len(missing)} figures are of one commit only, or not of every round", flush=True)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=0, help="default: 3, quick: 1")
    parser.add_argument("before", type=Path, metavar="BEFORE", help="folder of a checkout of another commit")
    parser.add_argument("command", nargs=REMAINDER, metavar="SCRIPT ...", help="a benchmark, and its options")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("which benchmark? SCRIPT is missing")
    script, *options = arguments.command
    before, now = other(arguments.before.resolve(), script), Checkout(OWN, Path(sys.executable))
    found: list[tuple[Figures, Figures]] = []
    for turn in range(arguments.rounds or (1 if arguments.quick else 3)):
        order = (before, now) if turn % 2 == 0 else (now, before)
        figures = {each: each.run(script, options) for each in order}
        found.append((figures[before], figures[now]))
    report = Report("by_turns")
    compare(found, report)
    print(f"{script} {' '.join(options)}: before is {commit(before.folder)}")
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
