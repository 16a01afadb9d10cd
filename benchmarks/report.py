"""What all benchmarks share: arguments, the machine's description, the table and the JSON form."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any


def argument_parser(description: str | None, parts: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes: `--quick`, `--json PATH` and, if it has parts, `--parts`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cells, under a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    if parts:
        some = f"some of {', '.join(parts)}"
        parser.add_argument("--parts", type=some_of(parts), default=tuple(parts), metavar="PART,…", help=some)
    return parser


def some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a reader for an option's value: some of these names, with commas between them. They come in the order
    of `names`; unknown ones are an error of the command line."""

    def chosen(text: str) -> tuple[str, ...]:
        given = text.split(",")
        if unknown := sorted(set(given) - set(names)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; there are {', '.join(names)}")
        return tuple(name for name in names if name in given)

    return chosen


def parse_arguments(description: str | None) -> argparse.Namespace:
    return argument_parser(description).parse_args()


def server_environment(**more: str) -> dict[str, str]:
    """Return the environment of a server that is measured, with these variables.

    Python keeps the modules that it has compiled, whatever is set for this process: an installed program has them
    compiled, and else each start would compile hundreds.
    """
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return own | more


def cpu_name() -> str:
    """The processor as Linux names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit that is measured, which a folder lies in; `+` if the tree has changes."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def place_in(page: Path, name: str) -> tuple[str, str]:
    """Return what a page has up to its mark `<!-- NAME -->`, and from its mark `<!-- /NAME -->` on.

    Raises:
        SystemExit: The page does not have both, once.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    parts = page.read_text(encoding="utf-8").split(begin)
    if len(parts) != 2 or parts[1].count(end) != 1:
        raise SystemExit(f"{page}: what is written there lies between {begin.strip()} and {end.strip()}, once")
    return parts[0] + begin, end + parts[1].split(end)[1]


def fill(page: Path, name: str, lines: list[str]) -> None:
    """Replace what a page has between two marks (`place_in`)."""
    before, behind = place_in(page, name)
    page.write_text(before + "".join(f"{line}\n" for line in lines) + behind, encoding="utf-8")


def wide_tables(results: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: a row per case, a column per metric; cases that are told apart by other keys get another
    table."""
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    lines: list[str] = []
    for result in results:
        tables.setdefault(tuple(result["case"]), []).append(result)
    for keys, found in tables.items():
        metrics = dict.fromkeys((result["metric"], result["unit"]) for result in found)
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for result in found:
            row = rows.setdefault(tuple(result["case"].values()), {"runs": result["runs"]})
            row[result["metric"]] = f"{result['value']:.4g}"
        titles = [f"{name} ({unit})" if unit else name for name, unit in metrics]
        lines += ["", f"| {' | '.join([*keys, *titles])} | runs |", "|" + "---|" * (len(keys) + len(metrics) + 1)]
        for case, row in rows.items():
            cells = [*map(str, case), *(row.get(name, "") for name, _ in metrics), str(row["runs"])]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def median_seconds(calls: list[Callable[[], object]], threads: int, budget_s: float) -> tuple[list[float], int]:
    """Let calls take turns for so many seconds; return their medians and the number of rounds.

    Args:
        threads: That the calls compute with: the time of one is CPU time, that of more wall time.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    deadline = time.perf_counter() + budget_s
    while len(times[0]) < 3 or time.perf_counter() < deadline:
        for call, taken in zip(calls, times, strict=True):
            start = clock()
            call()
            taken.append(clock() - start)
    return [median(taken) for taken in times], len(times[0])


class Report:
    """Collects results; prints a Markdown table and writes the JSON form of all benchmarks."""

    def __init__(self, benchmark: str) -> None:
        self.benchmark = benchmark
        self.results: list[dict[str, Any]] = []

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, runs: int) -> None:
        """One figure: the median of `runs` runs unless the metric's name says otherwise."""
        self.results.append({"case": case, "metric": metric, "value": value, "unit": unit, "runs": runs})

    def _print_long(self) -> None:
        """One table, a row per figure."""
        keys = list(dict.fromkeys(key for result in self.results for key in result["case"]))
        print(f"| {' | '.join(keys)} | metric | value | unit | runs |")
        print("|" + "---|" * (len(keys) + 4))
        for result in self.results:
            cells = [str(result["case"].get(key, "")) for key in keys]
            print(f"| {' | '.join(cells)} | {result['metric']} | {result['value']:.4g} | ", end="")
            print(f"{result['unit']} | {result['runs']} |")

    def _print_wide(self) -> None:
        print("\n".join(wide_tables(self.results)))

    def finish(self, path: Path | None, *, wide: bool = False) -> None:
        """Print the tables and, if there is a path, write the JSON form."""
        if wide:
            self._print_wide()
        else:
            self._print_long()
        self.close(path)

    def close(self, path: Path | None) -> None:
        """Like `finish`, for those who have printed tables of their own."""
        machine = {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "gpu": None,
            "torch": version("torch"),
            "python": platform.python_version(),
        }
        print(f"\ncommit {commit()}, {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}")
        if path is not None:
            document = {
                "benchmark": self.benchmark,
                "commit": commit(),
                "machine": machine,
                "results": self.results,
            }
            path.write_text(json.dumps(document, indent=1) + "\n")
