"""Which product files one plain streamed chat enters, in each process of a served cluster.

    python benchmarks/request_files.py [--tree DIR] [--list] [--json PATH]

A demo cluster (one group of one rank) is served with a profiler in every process. It notes how often each function
of the product runs while the cluster is idle, and then during one streamed chat. A file counts if one of its
functions ran more than twice as often during the chat. The figure is no time: it says how much there is to read.

`--tree` measures the product of another checkout, with this checkout's environment and without its native kernels.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
from report import Report, argument_parser

ROOT: Final = Path(__file__).resolve().parents[1]
PARTS: Final = ("runtime", "controller", "worker", "router", "kvstore", "kernels", "deploy")
START_SECONDS_MAX: Final = 120.0
IDLE_SECONDS: Final = 2.0
QUESTION: Final = {
    "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    "stream": True,
    "max_tokens": 24,
    "seed": 1,
}
_READY: Final = re.compile(r"^Ready after .* s: (http://\S+)$", re.MULTILINE)
PROFILER: Final = """
import json, os, sys, threading, time
folder = os.environ["REQUEST_FILES"]
if os.environ.get("REQUEST_FILES_TREE"):  # else an editable install finds its own checkout first
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
counts, phase = {}, [""]

def note(frame, event, argument):
    if event == "call" and phase[0]:
        code = frame.f_code
        at = code.co_filename.rfind("/trunkline/")
        if at >= 0:
            key = (code.co_filename[at + 1:], code.co_qualname)
            counts[key] = counts.get(key, 0) + 1

def watch():
    while True:
        time.sleep(0.01)
        try:
            wanted = open(folder + "/phase").read()
        except OSError:
            wanted = ""
        if wanted != phase[0]:
            done, phase[0] = phase[0], wanted
            if done and counts:
                with open(f"{folder}/{done}-{os.getpid()}.json", "w") as file:
                    json.dump([[*key, count] for key, count in counts.items()], file)
                counts.clear()

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
threading.setprofile(note)
sys.setprofile(note)
"""
"""Becomes `sitecustomize`, which every Python process imports at its start."""


class Profiled:
    """A served demo cluster whose processes note which functions they call."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(PROFILER)
        (folder / "t").mkdir()
        paths = [folder, *(tree / part for part in PARTS if (tree / part).is_dir())]
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "REQUEST_FILES": str(folder),
            "REQUEST_FILES_TREE": "" if tree == ROOT else str(tree),
            "TMPDIR": str(folder / "t"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }
        program = "import sys; from trunkline.deploy import main; sys.exit(main.main())"
        options = "--groups 1 --tp 1 --dtype float32 --port 0 --host 127.0.0.1 --kv-memory 256MiB".split()
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, "serve", "demo", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
            )
        end = time.monotonic() + START_SECONDS_MAX
        while (ready := _READY.search(self._log.read_text())) is None:
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise SystemExit(f"the cluster did not start:\n{self._log.read_text()}")
            time.sleep(0.1)
        self.url = ready[1]

    def stop(self) -> None:
        """End all its processes."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def chat(self) -> None:
        """Make one plain streamed chat."""
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=QUESTION, timeout=60)
        answer.raise_for_status()
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]

    def record(self, phase: str) -> None:
        """Begin a phase; "": none. The processes look every 10 ms."""
        (self.folder / "phase.new").write_text(phase)
        (self.folder / "phase.new").rename(self.folder / "phase")
        time.sleep(0.3)

    def calls(self, phase: str) -> dict[int, Counter[tuple[str, str]]]:
        """Return how often each function ran in a phase: by process, then by file and name."""
        return {
            int(path.stem.rpartition("-")[2]): Counter(
                {(file, name): count for file, name, count in json.loads(path.read_text())}
            )
            for path in self.folder.glob(f"{phase}-*.json")
        }


def role_of(files: set[str]) -> str:
    """Return whose process it is that entered these files: the role that most of them belong to."""
    parts = Counter(file.split("/")[1] for file in files)
    return next((role for role in ("worker", "router", "controller") if parts[role] > 1), "supervisor")


def entered(chat: Counter[tuple[str, str]], idle: Counter[tuple[str, str]]) -> set[str]:
    """Return the files that the chat entered; functions that also run without one ran more often than that."""
    return {file for (file, name), count in chat.items() if count > 2 * idle[file, name]}


def measure(tree: Path) -> dict[str, set[str]]:
    """Return the files that one chat enters, by role."""
    with tempfile.TemporaryDirectory(prefix="tl-files-") as folder:
        cluster = Profiled(Path(folder), tree)
        try:
            for _ in range(2):
                cluster.chat()  # what is loaded or compiled at the first request does not count
            time.sleep(1.0)
            cluster.record("idle")
            time.sleep(IDLE_SECONDS)
            cluster.record("chat")
            cluster.chat()
            cluster.record("")
            idle, chat = cluster.calls("idle"), cluster.calls("chat")
        finally:
            cluster.stop()
    found: dict[str, set[str]] = {}
    for process, calls in chat.items():
        files = entered(calls, idle.get(process, Counter()))
        if files:
            found.setdefault(role_of(files), set()).update(files)
    return found


def main() -> None:
    """Print how many files there are, and which with `--list`."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose product is served")
    parser.add_argument("--list", action="store_true", help="name the files")
    arguments = parser.parse_args()
    found = measure(arguments.tree.resolve())
    report = Report("request_files")
    found["all"] = set().union(*found.values())
    for role, files in sorted(found.items()):
        case: dict[str, Any] = {"process": role}
        report.add(case, "files", len(files), "files", 1)
    report.finish(arguments.json)
    for role, files in sorted(found.items()) if arguments.list else ():
        if role != "all":
            print(f"\n{role}\n  " + "\n  ".join(sorted(files)))


if __name__ == "__main__":
    main()
