"""Memory accesses and races of our kernels, by `compute-sanitizer` (part `sanitizer`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from gpu_device import NO_CACHING, Gpu, Output, Visit
from gpu_sanitized import PIECES

from trunkline.kernels.cuda_build import find_compiler


class Check(NamedTuple):
    """What is looked at, by which tool."""

    tool: str
    dtype: str
    piece: str = ""
    """Of the small round of all ops; "": all of it."""

    def __str__(self) -> str:
        return f"compute-sanitizer {self.tool}, {self.dtype}" + (f", {self.piece}" if self.piece else "")


CHECKS: Final = (
    Check("memcheck", "bfloat16"),
    Check("memcheck", "float32"),
    Check("racecheck", "float32"),
    *(Check("racecheck", "bfloat16", piece) for piece in PIECES),
)
"""All at once, each in a process of its own. float16 has the code of bfloat16; float32 has a kernel of its own."""
FOUND: Final = re.compile(
    r"^=========\s+((?:Error|Warning|Invalid|Program hit|Internal)\b.*(?:\n=========\s+(?:at|and) .*)?)", re.M
)
"""What was found, and where; of a race, both accesses. Internal: the tool itself has failed."""
COMPUTED: Final = re.compile(r"^computed: (.*)$", re.M)
TOLD_MAX: Final = 5
"""Different findings that are told of each run."""


def find_sanitizer() -> str | None:
    compiler = find_compiler()
    beside = None if compiler is None else compiler.path.resolve().with_name("compute-sanitizer")
    return str(beside) if beside is not None and beside.is_file() else shutil.which("compute-sanitizer")


@dataclass(frozen=True)
class Run:
    """A check under way."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def end(self, out: Output, seconds: float) -> None:
        """Wait for it, at most so long, and tell what it found."""
        code: int | None = None
        try:
            code = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        said = self.log.read_text(errors="replace")
        found = findings(said)
        if code:
            last = next(iter(COMPUTED.findall(said)[-1:]), "nothing")
            out.problem(f"{self.name}, ended with code {code} behind {last}: {'; '.join(found) or said[-1500:]}")
            return
        how = "stopped before its end" if code is None else "done"
        what = "; ".join(found) or "nothing found"
        # A warning is no error: two accesses of a warp in an order that it keeps, perhaps.
        if any(not each.startswith("Warning") for each in found):
            out.problem(f"{self.name}, {how}: {what}")
        else:
            out.note(f"{self.name}, {how}: {what}")


def findings(said: str) -> list[str]:
    """What a sanitizer has reported, each once."""
    texts = [re.sub(r"\s*\n=========\s*|\s*\[\d+ hazards\]", " ", text).strip() for text in FOUND.findall(said)]
    return list(dict.fromkeys(texts))[:TOLD_MAX]


def sanitize(gpu: Gpu, out: Output, visit: Visit) -> None:
    """A small round of every op, whole and in pieces."""
    del gpu
    tool = find_sanitizer()
    if tool is None:
        out.note("compute-sanitizer is not installed; memory accesses were not checked")
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [start(tool, check, Path(folder)) for check in CHECKS]
        for run in runs:
            run.end(out, visit.seconds_left - 1)


def command_of(tool: str, check: Check) -> list[str]:
    # Errors of calls: torch and its libraries probe for what may be missing. Kernels of others, as those of the
    # reference, take most of the time if they are watched.
    command = [tool, "--tool", check.tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    command += ["--kernel-name", "kns=trunkline"]
    command += [sys.executable, str(Path(__file__).with_name("gpu_sanitized.py")), check.dtype]
    return [*command, check.piece] if check.piece else command


def start(tool: str, check: Check, folder: Path) -> Run:
    # torch's allocator would hide accesses beyond a tensor inside its own large blocks. The processes are many.
    environment = {**os.environ, NO_CACHING: "1", "OMP_NUM_THREADS": "1"}
    log = folder / str(check)
    with log.open("wb") as file:
        process = subprocess.Popen(command_of(tool, check), stdout=file, stderr=file, env=environment)
    return Run(str(check), process, log)
