"""Two builds of the kernels' library in one process, for benchmarks that compare them by turns.

By turns within milliseconds both builds have the same machine, however its pace changes, which two runs one after
the other have not. The other library (`_native.so`) must have this one's interface.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any, TypeVar
from unittest import mock

import tvm_ffi
from report import Report

from trunkline.kernels import cpu, native

T = TypeVar("T")


def add_beside(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beside", type=Path, metavar="LIBRARY", help="compare with this build, and nothing else")


def of_builds(other: Path, make: Callable[[], T]) -> tuple[T, T]:
    """Return what `make` makes with this build and with another."""
    modules: tuple[Any, Any] = native.library(), tvm_ffi.load_module(str(other.resolve()))
    if (version := modules[1].interface_version()) != native.INTERFACE_VERSION:
        raise SystemExit(f"{other} has interface {version}, this build {native.INTERFACE_VERSION}")
    made = []
    for module in modules:
        with (
            mock.patch.object(native, "library", return_value=module),
            mock.patch.object(cpu, "library", return_value=module),
        ):
            made.append(make())
    return made[0], made[1]


def compare(
    report: Report, case: dict[str, Any], this: Callable[[], float], other: Callable[[], float], rounds: int
) -> None:
    """Report the time of one build divided by that of the other, of pairs of runs, which return theirs.

    Both orders are as frequent: the first of a pair follows its own run of the pair before, and finds its caches.
    """
    this(), other()
    ratios = []
    for number in range(rounds + rounds % 2):
        if number % 2:
            first = this()
            ratios.append(first / other())
        else:
            first = other()
            ratios.append(this() / first)
    names = ("of_other_build, lower quartile", "of_other_build", "of_other_build, upper quartile")
    for name, ratio in zip(names, quantiles(ratios), strict=True):
        report.add({"part": "builds", **case}, name, ratio, "ratio", len(ratios))
