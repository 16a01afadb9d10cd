"""Plots of docs/measurements/ from the JSON files that the benchmarks write. Needs matplotlib (extra `dev`).

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


def truncation_quality(rows: Rows) -> Figure:
    """Perplexity over fifty cuts, and recall behind one, by way of going on."""
    figure, (over_time, recall) = _panels(2)
    for index, method in enumerate(("ca", "tt", "nkvt")):
        over_time.plot(*series(rows, "part_perplexity", "part", method=method, sinks=4), marker=".", label=method)
        ratios, shares = series(rows, "recall", "ratio", method=method, sinks=4)
        recall.bar([place + (index - 1) * 0.25 for place in range(len(ratios))], shares, 0.25, label=method)
    _label(over_time, "fifty cuts, half retained, 4 sinks", "part behind cut", "perplexity")
    over_time.set_yscale("log")
    _label(recall, "facts asked back behind a cut, 4 sinks", "ratio retained", "exact answers, %")
    recall.set_xticks(range(len(ratios)), [str(ratio) for ratio in ratios])
    recall.set_ylim(0, 110)
    recall.legend(ncols=3)
    return figure


def hit_rate(rows: Rows) -> Figure:
    """Turns that find their history, by capacity and policy."""
    figure, panels = _panels(2)
    for axes, part in zip(panels, ("policies", "unsaturated"), strict=True):
        for policy in ("look-ahead", "lru", "fifo"):
            x, y = series(rows, "hit_rate", "c_over_f", part=part, policy=policy)
            axes.plot(x, y, marker="o", label=policy)
        queue = "a long queue" if part == "policies" else "no queue"
        _label(axes, queue, "capacity / peak footprint of live sessions", "turns that hit, %")
        axes.set_ylim(0, 100)
    return figure


def session_turns(rows: Rows) -> Figure:
    """How much sooner the first token comes by where the history is, and when layers were loaded and computed."""
    figure, (speedup, layers) = _panels(2)
    total = max(row["case"]["history"] + row["case"]["new"] for row in rows if row["case"]["part"] == "turns")
    for impl in ("device", "host", "disk", "remote"):
        histories, values = series(rows, "speedup", "history", part="turns", impl=impl)
        points = [(h, v) for h, v in zip(histories, values, strict=True) if h >= total / 2]
        shares = dict(sorted((100 * h / total, v) for h, v in points))
        speedup.plot(list(shares), list(shares.values()), marker="o", label=impl)
    _label(speedup, f"turns of {total} tokens", "history, %", "times sooner than recomputed")
    for kind, offset in (("load", 0.2), ("compute", -0.2)):
        places, starts = series(rows, "start", "layer", part="trace", kind=kind)
        _, stops = series(rows, "stop", "layer", part="trace", kind=kind)
        widths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        layers.barh([place + offset for place in places], widths, 0.4, left=starts, label=kind)
    _label(layers, "layer-wise preload over a slow link", "ms", "layer")
    layers.invert_yaxis()
    return figure


def prompt_cache(rows: Rows) -> Figure:
    """How the time to the first token grows with what is cached, and how many times sooner it comes."""
    figure, (growth, speedup) = _panels(2)
    for impl in ("full", "first_use", "prefix_varied", "prefix", "device", "device_varied", "host"):
        growth.plot(*series(rows, "ttft", "n", part="growth", impl=impl), marker=".", label=impl)
        if impl != "full":
            speedup.plot(*series(rows, "speedup", "n", part="growth", impl=impl), marker=".", label=impl)
    own = next(row["case"]["u"] for row in rows if row["case"]["part"] == "growth")
    _label(growth, f"n cached tokens, {own} of its own", "n", "time to first token, ms")
    growth.set_yscale("log")
    _label(speedup, "against full prefill", "n", "times sooner")
    return figure


def masking_quality(rows: Rows) -> Figure:
    """Share of the context's gain that each way of making a context keeps."""
    figure, panels = _panels(2)
    for axes, part in zip(panels, ("texts", "facts"), strict=True):
        kept = [row for row in rows if row["metric"] == "kept" and row["case"]["part"] == part]
        kept = [row for row in kept if row["case"]["scope"] not in ("plain", "none")]
        errors = [row for row in rows if row["metric"] == "standard_error" and row["case"]["part"] == part]
        spread = {tuple(row["case"].values()): row["value"] for row in errors}
        names = [_way(row["case"]) for row in kept]
        bars = [spread[tuple(row["case"].values())] for row in kept]
        axes.barh(names, [row["value"] for row in kept], xerr=bars)
        axes.axvline(100, color="black", linewidth=0.8)
        _label(axes, part, "context gain kept, %", "", has_legend=False)
        axes.tick_params(axis="y", labelsize=6)
        axes.invert_yaxis()
    return figure


def _way(case: dict[str, Any]) -> str:
    parts = [case["scope"]]
    parts += [f"gaps of {case['gaps']}"] if case["gaps"] != "no" else []
    parts += [case["places"]] if case["places"] != "right" else []
    parts += [f"first {case['renewed']} renewed"] if case["renewed"] else []
    return ", ".join(parts)


PLOTS: Final[dict[str, Callable[[Rows], Figure]]] = {
    "overload": overload,
    "memory_sharing": memory_sharing,
    "preemption": preemption,
    "hit_rate": hit_rate,
    "session_turns": session_turns,
    "truncation_quality": truncation_quality,
    "prompt_cache": prompt_cache,
    "masking_quality": masking_quality,
}
"""By the benchmark's name."""


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.2 * count, 3.2), layout="constrained")
    return figure, [figure.add_subplot(1, count, index + 1) for index in range(count)]


def _label(axes: Axes, title: str, x: str, y: str, *, has_legend: bool = True) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if has_legend:
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
