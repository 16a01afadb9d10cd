"""The order of a visit to a GPU machine: parts with a time limit each, in processes of their own.

A part's findings are lines of JSON in a file (`gpu_device.Output`), so that those of one that hangs or crashes are
kept. The results of all parts so far are written after each: `results.json`, and `results.md` to read. Imports
nothing that takes time, and nothing but the standard library and this folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from report import wide_tables

Status = Literal["done", "failed", "out of time"]

NO_DEVICE: Final = 3
"""Exit code of a part that found no device."""
GRACE_S: Final = 3.0
"""Beyond its limit, for a part that stops itself in time."""
VISIT_S: Final = 592.0
"""For all parts: a machine that is lent for ten minutes must not be taken away in the middle of one."""
WORTH_STARTING_S: Final = 5.0
"""Time left below which a part is not begun."""
SAID_CHARACTERS: Final = 3000
"""Kept of what a part that failed has written."""


@dataclass(frozen=True)
class Part:
    """One of the things to do, in this order."""

    name: str
    seconds: float
    """After so many it is ended, whatever it does."""
    about: str
    is_needed: bool = False
    """Without it nothing after it is worth starting."""
    beside: str = ""
    """This part runs in the background, up to the end of the named one."""
    is_check: bool = False
    """It finds what is right or wrong, not how fast: it may run beside others, and is waited for."""

    @property
    def may_be_cut(self) -> bool:
        """Whether it is ended with what it runs beside, and nothing is wrong then."""
        return bool(self.beside) and not self.is_check


PARTS: Final = (
    Part("start", 20, "Versions, imports, one call of every op", is_needed=True),
    Part("compile", 150, "FlashInfer's kernels are compiled", beside="sanitizer"),
    Part("ops", 50, "Every op against the reference", is_check=True),
    Part("engine", 60, "The whole engine's tokens against a CPU's: one rank, two ranks on one GPU", is_check=True),
    Part("serve", 30, "trunkline serve: answers, hits, schemas, streams, SIGKILL, SIGINT", is_check=True),
    Part("sanitizer", 45, "Memory accesses and races", is_check=True),
    Part("ceilings", 10, "What the device gives at most"),
    Part("decode", 120, "Decode attention: ChunkAttention's Table 3, batches, cuts and stages"),
    Part("flashinfer", 60, "Decode attention beside FlashInfer and torch, on the same buffers, in turn"),
    Part("prefill", 30, "Prefill attention beside cuDNN, FlashAttention-2 and FlashInfer"),
    Part("sampling", 15, "Drawing tokens beside torch's sorts"),
    Part("model", 130, "A model of 8 billion parameters in the real runner"),
    Part("tiers", 15, "Copies to and from main memory"),
)
TOGETHER_S: Final = 120.0
"""For each check that runs beside the others, if not more."""


@dataclass
class Findings:
    """What became of a part."""

    part: str
    status: Status
    seconds: float
    commit: str
    results: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def read(self, lines: str) -> None:
        """What the part has written; a last line that was cut off is left out."""
        for line in lines.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if "fact" in found:
                self.facts[found["fact"]] = found["value"]
            elif "note" in found:
                self.notes.append(found["note"])
            elif "problem" in found:
                self.problems.append(found["problem"])
            else:
                self.results.append(found)


@dataclass
class Running:
    """A part's process."""

    part: Part
    process: subprocess.Popen[bytes]
    began: float
    lines: Path
    said: Path

    def end(self, limit: float, commit: str) -> Findings:
        """Wait until it ends or its time is over, end what is left of it, and read what it found."""
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(max(0.0, self.began + limit - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with all that it has started
        self.process.wait()
        status: Status = "out of time" if code is None else "failed" if code else "done"
        found = Findings(self.part.name, status, round(time.monotonic() - self.began, 1), commit, exit_code=code)
        found.read(self.lines.read_text())
        said = self.said.read_text(errors="replace").strip()[-SAID_CHARACTERS:]
        if status == "failed":
            found.problems.append(f"the part ended with code {code}: {said}")
        elif status == "out of time" and not self.part.may_be_cut:
            found.problems.append(f"the part was ended after {limit:.0f} s: {said[-500:]}")
        return found


class VisitRun:
    """Runs parts and keeps the results."""

    def __init__(
        self,
        folder: Path,
        command: Callable[[Part], list[str]],
        commit: str,
        tell: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            folder: of the results; those of parts that are not run again stay.
            command: of a part; it writes its findings to standard output.
            tell: gets each part's Markdown.
        """
        self._folder = folder
        self._command = command
        self._commit = commit
        self._tell = tell
        self.found: dict[str, Findings] = {}
        folder.mkdir(parents=True, exist_ok=True)
        before = folder / "results.json"
        if before.exists():
            for part in json.loads(before.read_text())["parts"]:
                self.found[part["part"]] = Findings(**part)

    def run(self, parts: Sequence[Part], seconds: float = VISIT_S) -> bool:
        """In their order, as far as they can begin within so many seconds; the last may have less than its own.

        Returns:
            Whether all is well.
        """
        background: dict[str, list[Running]] = {}
        names = [part.name for part in parts]
        deadline = time.monotonic() + seconds
        try:
            for wanted in parts:
                left = deadline - time.monotonic()
                if left < WORTH_STARTING_S:
                    self._tell(f"\nNo time was left for `{wanted.name}`.")
                    continue
                part = replace(wanted, seconds=min(wanted.seconds, left - GRACE_S))
                running = self._start(part)
                if part.beside and part.beside in names:
                    background.setdefault(part.beside, []).append(running)
                    continue
                found = self._keep(running)
                for waiting in sorted(background.pop(part.name, []), key=lambda each: each.part.may_be_cut):
                    self._keep(waiting, at_once=waiting.part.may_be_cut)
                if part.is_needed and (found.status != "done" or found.problems):
                    self._tell(f"\nNothing after `{part.name}` was started.")
                    break
        finally:
            for left_over in background.values():
                for running in left_over:
                    self._keep(running, at_once=True)
        return not any(self.found[name].problems for name in names if name in self.found)

    def _start(self, part: Part) -> Running:
        lines, said = (self._folder / f"{part.name}.{kind}" for kind in ("jsonl", "log"))
        with lines.open("wb") as out, said.open("wb") as errors:
            process = subprocess.Popen(
                self._command(part), stdout=out, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return Running(part, process, time.monotonic(), lines, said)

    def _keep(self, running: Running, *, at_once: bool = False) -> Findings:
        part = running.part
        # The first part reads torch from a disk that is cold, and without it there is no visit.
        grace = part.seconds if part.is_needed else 0.0 if part.may_be_cut else GRACE_S
        limit = 0.0 if at_once else part.seconds + grace
        found = running.end(limit, self._commit)
        self.found[running.part.name] = found
        self.write()
        self._tell("\n".join(part_lines(found)))
        return found

    def write(self) -> None:
        """Complete files or the ones before: what is killed in the middle leaves no half ones."""
        ordered = sorted(self.found.values(), key=lambda found: _order(found.part))
        machine: dict[str, Any] = {}
        for found in ordered:
            machine |= found.facts
        document = {
            "benchmark": "gpu",
            "commit": self._commit,
            "machine": machine,
            "results": [{"part": found.part, **result} for found in ordered for result in found.results],
            "problems": [f"{found.part}: {problem}" for found in ordered for problem in found.problems],
            "parts": [asdict(found) for found in ordered],
        }
        lines = ["# A visit to a GPU", "", f"Commit {self._commit}."]
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in machine.items())]
        for found in ordered:
            lines += part_lines(found)
        for name, text in (("results.json", json.dumps(document, indent=1)), ("results.md", "\n".join(lines))):
            scratch = self._folder / f".{name}"
            scratch.write_text(text + "\n")
            os.replace(scratch, self._folder / name)


def _order(name: str) -> int:
    names = [part.name for part in PARTS]
    return names.index(name) if name in names else len(names)


def part_lines(found: Findings) -> list[str]:
    """Markdown: what was found, in tables, and in sentences what was not."""
    about = next((part.about for part in PARTS if part.name == found.part), found.part)
    lines = ["", f"## {about}", "", f"Part `{found.part}`, {found.status} after {found.seconds:.0f} s."]
    lines += [line for problem in found.problems for line in ("", "**Wrong:**", "", "```", problem, "```")]
    lines += wide_tables(found.results)
    if found.notes:
        lines += ["", *(f"- {note}" for note in found.notes)]
    return lines


def chosen_parts(only: str) -> list[Part]:
    """
    Args:
        only: names with commas; "": all.

    Raises:
        ValueError: a name that is none.
    """
    names = [part.name for part in PARTS]
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if name not in names:
            raise ValueError(f"there is no part {name!r}; there are: {', '.join(names)}")
    return [part for part in PARTS if not wanted or part.name in wanted]


def together(parts: Sequence[Part]) -> list[Part]:
    """The same parts, but all checks run beside the last of them, and nothing is timed before they end."""
    checks = [part for part in parts if part.is_check]
    if not checks:
        return list(parts)
    last = checks[-1].name
    return [
        replace(part, seconds=max(part.seconds, TOGETHER_S), beside="" if part.name == last else last)
        if part.is_check
        else part
        for part in parts
    ]
