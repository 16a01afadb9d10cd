"""Plots of docs/benchmarks.md from the JSON files that the benchmarks write. Needs matplotlib, of the extra `dev`.

    python benchmarks/overload.py --json overload.json
    python benchmarks/plots.py overload.json docs/images

A picture has the benchmark's name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Rows = list[dict[str, Any]]


def series(rows: Rows, metric: str, x: str, **case: Any) -> tuple[list[Any], list[float]]:
    """x and y of the results of one metric whose case has these values."""
    found = [r for r in rows if r["metric"] == metric and all(r["case"].get(k) == v for k, v in case.items())]
    return [r["case"][x] for r in found], [r["value"] for r in found]


def overload(rows: Rows) -> Figure:
    """Normalised latency against request rate, one panel per data set."""
    figure, panels = _panels(2)
    for axes, dataset in zip(panels, ("alpaca-like", "sharegpt-like"), strict=True):
        for metric, label in (
            ("normalised_latency_p50", "p50"),
            ("normalised_latency", "mean"),
            ("normalised_latency_p99", "p99"),
        ):
            axes.plot(*series(rows, metric, "rate", dataset=dataset), marker="o", label=label)
        _label(axes, dataset, "requests/s", "normalised latency, ms/token")
        axes.set_yscale("log")
    return figure


def memory_sharing(rows: Rows) -> Figure:
    """Memory saved by samples and beams, one panel per data set."""
    figure, panels = _panels(2)
    for axes, dataset in zip(panels, ("alpaca-like", "sharegpt-like"), strict=True):
        for method in ("samples", "beams"):
            axes.plot(*series(rows, "memory_saved", "k", dataset=dataset, method=method), marker="o", label=method)
        _label(axes, dataset, "samples or beams", "memory saved, %")
        axes.set_ylim(0, 100)
    return figure


def preemption(rows: Rows) -> Figure:
    """Time to come back by block size."""
    figure, (axes,) = _panels(1)
    for impl in ("swap", "recompute", "memcpy"):
        axes.plot(*series(rows, "time", "chunk_size", impl=impl), marker="o", label=impl)
    _label(axes, "256 tokens leave and come back", "chunk size, tokens", "ms")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    return figure


PLOTS: Final[dict[str, Callable[[Rows], Figure]]] = {
    "overload": overload,
    "memory_sharing": memory_sharing,
    "preemption": preemption,
}
"""By the benchmark's name."""


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.2 * count, 3.2), layout="constrained")
    return figure, [figure.add_subplot(1, count, index + 1) for index in range(count)]


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what a benchmark wrote with --json")
    parser.add_argument("folder", type=Path, help="where the picture goes, as NAME.svg")
    arguments = parser.parse_args()
    document = json.loads(arguments.results.read_text())
    name = document["benchmark"]
    if name not in PLOTS:
        raise SystemExit(f"{arguments.results} is of {name!r}; there are plots of {', '.join(PLOTS)}")
    mpl.rcParams["svg.hashsalt"] = name  # the same data, the same bytes
    arguments.folder.mkdir(parents=True, exist_ok=True)
    PLOTS[name](document["results"]).savefig(arguments.folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
