"""Change the product in one small way at a time and see whether the tests notice.

    python tests/mutants/run.py --check                     every mutant of the tables still fits the sources
    python tests/mutants/run.py                             all mutants against the tests that `make test` runs
    python tests/mutants/run.py --set whole --json out.json against those of all areas as well; results in a file
    python tests/mutants/run.py --names NAME… --hints-only  some mutants, only the tests that their entries name

A mutant is an entry of a table beside this file (`controller.toml` and so on): a text of the product's sources,
its replacement, and the fault in one sentence. Tests run first where the entry expects them to fail, then in the
folders of the part, then everywhere, and end with the first failure. A failing test counts only if it fails again
by itself, and passes on the sources as they are. A test in which the interpreter dies has failed.

The checkout is not touched. Its files are copied to a temporary folder with an environment of their own, in which
`trunkline` is imported from the copy. Before a mutant's tests run, an interpreter of that environment is asked
where it finds the changed module.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
CHECKOUT: Final = HERE.parents[1]
AREAS: Final = {
    "controller": ("controller", "simulation"),
    "kvstore": ("kvstore", "controller", "simulation"),
    "router": ("router", "prompts"),
    "worker": ("worker",),
    "kernels": ("kernels", "worker"),
    "deploy": ("deploy", "runtime"),
    "chart": ("kubernetes",),
}
"""Folders of `tests/` that belong to a part of the product, by the name of its table."""
SOURCES: Final = {"deploy": ("deploy/trunkline", "runtime"), "chart": ("deploy/helm",)}
"""Folders with the sources of a part, where it is not the folder with the part's name."""
SUFFIXES: Final = frozenset((".py", ".cc", ".h", ".tpl", ".yaml", ".json", ".js"))
LIBRARIES: Final = {"_native": "kernels", "_names": "kvstore"}
"""The native libraries, each with the part that has it beside its modules."""
SETS: Final = {"fast": "none", "whole": "all"}
"""The areas (`tests/areas.py`) whose tests a set of tests has besides those of no area."""
STAGE_SECONDS_MAX: Final = 3600
DISMISSED_MAX: Final = 3
"""Failures that say nothing of a mutant, and are passed over; with more the sources are not fit to be tried."""
NO_TEST: Final = "the collection of tests"
"""What failed, where it was no single test."""
NO_END: Final = "the interpreter's end"
"""What failed, where the interpreter died before the first test or behind the last one."""
_WRONG_ARGUMENTS: Final = 4
"""Pytest's exit status."""
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?|\S+)(?: - .*)?$", re.MULTILINE)
_BEGUN: Final = re.compile(r"^(\S+\.py::[^\s\[]+(?:\[.*?\](?= |$))?)", re.MULTILINE)
_SUMMARY: Final = re.compile(r"^=+ .* in \d+\.\d+s", re.MULTILINE)
"""The line without which pytest has not ended."""


class MutantError(Exception):
    """A mutant that cannot be tried: its entry, or this program, is wrong."""


@dataclass(frozen=True)
class Edit:
    """A text of the sources and what replaces it."""

    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """An entry of a table."""

    area: str
    name: str
    fault: str
    edits: tuple[Edit, ...]
    """The present one, then those for earlier states of the sources."""
    hints: tuple[str, ...]
    """Paths below `tests/` where it should be noticed."""


@dataclass(frozen=True)
class Fit:
    """A mutant in the sources at hand."""

    path: Path
    """Relative to the checkout."""
    text: str
    """The file with the fault."""
    edit: Edit


@dataclass
class Verdict:
    """What became of a mutant."""

    name: str
    area: str
    path: str
    killed: bool
    stage: str = ""
    """Where it was noticed: hints, area, rest, or import."""
    by: str = ""
    """The failing test."""
    seconds: float = 0.0
    dismissed: list[str] = field(default_factory=list)
    """Tests that failed, but do not always fail with the fault, or fail without it as well."""


# -- the tables


def load_mutants() -> list[Mutant]:
    """All entries of all tables, in the order of `AREAS`.

    Raises:
        MutantError: two have one name, or an entry lacks something.
    """
    mutants = [mutant for area in AREAS for mutant in _table(area)]
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MutantError(f"names are used twice: {', '.join(twice)}")
    return mutants


def _table(area: str) -> Iterator[Mutant]:
    for entry in tomllib.loads((HERE / f"{area}.toml").read_text(encoding="utf-8"))["mutant"]:
        if missing := [key for key in ("name", "fault", "old", "new", "tests") if key not in entry]:
            raise MutantError(f"{area}.toml: {entry.get('name')} has no {', '.join(missing)}")
        edits = [Edit(each["old"], each["new"]) for each in (entry, *entry.get("earlier", ()))]
        yield Mutant(area, entry["name"], entry["fault"], tuple(edits), tuple(entry["tests"]))


class Sources:
    """The product's files of one checkout, read once."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self._texts: dict[str, dict[Path, str]] = {}

    def texts(self, area: str) -> dict[Path, str]:
        """The files of a part, by their paths relative to the checkout."""
        if area not in self._texts:
            paths = [
                path
                for folder in SOURCES.get(area, (area,))
                for path in sorted((self.checkout / folder).rglob("*"))
                if path.suffix in SUFFIXES and path.is_file()
            ]
            self._texts[area] = {path.relative_to(self.checkout): path.read_text("utf-8") for path in paths}
        return self._texts[area]

    def fit(self, mutant: Mutant) -> Fit:
        """The mutant in these sources.

        Raises:
            MutantError: its text is not found, or found more than once, or what comes of it is no Python.
        """
        places = [
            (path, edit, text.count(edit.old))
            for edit in mutant.edits
            for path, text in self.texts(mutant.area).items()
            if edit.old in text
        ]
        if len(places) != 1 or places[0][2] != 1:
            found = ", ".join(f"{path} ({count}×)" for path, _, count in places) or "nowhere"
            raise MutantError(f"{mutant.area}.toml: the text of {mutant.name} must stand in one place: {found}")
        path, edit, _ = places[0]
        text = self.texts(mutant.area)[path].replace(edit.old, edit.new)
        if edit.old == edit.new:
            raise MutantError(f"{mutant.area}.toml: {mutant.name} changes nothing")
        if path.suffix == ".py":
            try:
                ast.parse(text)
            except SyntaxError as error:
                raise MutantError(f"{mutant.area}.toml: {mutant.name} makes no Python: {error}") from None
        return Fit(path, text, edit)


def problems(checkout: Path = CHECKOUT) -> list[str]:
    """What keeps mutants from being tried in a checkout; none: all of them fit."""
    sources, found = Sources(checkout), []
    for mutant in load_mutants():
        try:
            sources.fit(mutant)
        except MutantError as error:
            found.append(str(error))
    return found


def stale_hints(checkout: Path = CHECKOUT) -> list[str]:
    """Entries whose hints name tests that are not there; such a mutant only takes longer."""
    return [
        f"{mutant.name}: tests/{hint}"
        for mutant in load_mutants()
        for hint in mutant.hints
        if not (checkout / "tests" / hint).exists()
    ]


# -- the copy


def library_of(path: Path) -> str | None:
    """Return the native library that a file is compiled into; None: it is compiled into none."""
    if path.suffix not in (".cc", ".h"):
        return None
    return "_names" if "names" in path.parts else "_native"


class Copy:
    """A copy of a checkout, with an environment in which `trunkline` is imported from it."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.root = folder / "copy"
        self.python = self.root / ".venv/bin/python"
        self._copy_files(checkout)
        self._make_environment()
        for library, part in LIBRARIES.items():
            built = Path(sysconfig.get_path("purelib")) / "trunkline" / part / f"{library}.so"
            if built.exists():
                self._place(library).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(built, self._place(library))

    def _copy_files(self, checkout: Path) -> None:
        """The files as they lie there, and the history, which some tests ask for."""
        clone = ("git", "clone", "--quiet", "--shared", "--no-checkout", str(checkout), str(self.root))
        subprocess.run(clone, check=True)
        subprocess.run(("git", "reset", "--quiet"), cwd=self.root, check=True)
        listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = subprocess.run(listing, cwd=checkout, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (checkout / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, self.root / name)

    def _make_environment(self) -> None:
        """Not the checkout's own: the finder of its editable install would win over any path."""
        environment = self.root / ".venv"
        make = (sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(environment))
        subprocess.run(make, check=True)
        library = Path(sysconfig.get_path("purelib"))
        (packages,) = environment.glob("lib/python*/site-packages")
        parts = sorted(path.parent for path in self.root.glob("*/trunkline") if path.is_dir())
        (packages / "copy.pth").write_text("".join(f"{path}\n" for path in (*parts, library)), encoding="utf-8")
        command = environment / "bin/trunkline"
        program = "import sys\nfrom trunkline.deploy.main import main\nsys.exit(main())\n"
        project = tomllib.loads((self.root / "pyproject.toml").read_text("utf-8"))["project"]
        module, name = project["scripts"]["trunkline"].split(":")
        program = program.replace("trunkline.deploy.main", module).replace("main()", f"{name}()", 1)
        command.write_text(f"#!{environment}/bin/python\n{program}", encoding="utf-8")
        command.chmod(0o755)
        for tool in Path(sysconfig.get_path("scripts")).iterdir():
            if not (environment / "bin" / tool.name).exists() and not tool.name.startswith("activate"):
                (environment / "bin" / tool.name).symlink_to(tool)

    def check_imports(self, path: Path) -> None:
        """
        Raises:
            MutantError: an interpreter of the environment finds another file than the copy's.
        """
        if path.suffix != ".py":
            return
        module = ".".join(path.with_suffix("").parts[path.parts.index("trunkline") :]).removesuffix(".__init__")
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)"
        done = subprocess.run((self.python, "-c", code), cwd="/", capture_output=True, text=True, check=False)
        if done.returncode or done.stdout.strip() != str(self.root / path):
            said = done.stderr[-500:]
            raise MutantError(f"{module} is imported from {done.stdout.strip()}, not from the copy. {said}")

    @contextmanager
    def changed(self, fit: Fit) -> Iterator[None]:
        """Let the copy have a fault for a while."""
        path = self.root / fit.path
        library = library_of(fit.path)
        before = path.read_text("utf-8")
        self._write(path, fit.text)
        try:
            self.check_imports(fit.path)
            if library is not None:
                self._build(library)
            yield
        finally:
            self._write(path, before)
            if library is not None:
                self._build(library)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".py":  # its time and size may be those of the compiled file
            Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def _build(self, library: str) -> None:
        """Compile a native library of the copy, as the package's build does; only what has changed."""
        folder, cmake = self.root / "build/mutant", Path(sysconfig.get_path("scripts")) / "cmake"
        configure = (cmake, "-S", self.root, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}")
        for command in (configure, (cmake, "--build", folder, "-j", "2", "--target", library)):
            subprocess.run(("nice", *command), check=True, stdout=subprocess.DEVNULL)
        place = self._place(library)
        place.unlink(missing_ok=True)  # a process may still have the old one mapped
        shutil.copy2(folder / place.name, place)

    def _place(self, library: str) -> Path:
        return self.root / LIBRARIES[library] / "trunkline" / LIBRARIES[library] / f"{library}.so"

    def run_tests(self, arguments: Sequence[str], tests: str) -> tuple[int, str]:
        """Run pytest in the copy on a set of tests; return its exit status (5: no test was found) and output."""
        command: list[str | Path] = ["nice", self.python, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider"]
        if (self.root / "tests/areas.py").exists():  # earlier states of the sources have no areas
            command.append(f"--areas={SETS[tests]}")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with subprocess.Popen(
            (*command, *arguments),
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=STAGE_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                return 2, f"no end within {STAGE_SECONDS_MAX} s"
            finally:
                with suppress(ProcessLookupError):  # also what the tests started and left
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said


# -- the trial


class Trial:
    """Runs tests on mutants."""

    def __init__(self, copy: Copy, tests: str, last_stage: str) -> None:
        self._copy = copy
        self._tests = tests
        self._last_stage = last_stage
        self._sound: dict[str, bool] = {}
        """Whether a test passes without any fault."""

    def run(self, mutant: Mutant, fit: Fit) -> Verdict:
        """Try one mutant."""
        verdict = Verdict(mutant.name, mutant.area, str(fit.path), killed=False)
        began = time.monotonic()
        for stage, arguments in self._stages(mutant):
            if self._kills(fit, arguments, verdict):
                verdict.killed, verdict.stage = True, stage
                break
        verdict.seconds = round(time.monotonic() - began, 1)
        return verdict

    def _stages(self, mutant: Mutant) -> Iterator[tuple[str, list[str]]]:
        tests = self._copy.root / "tests"
        hints = [f"tests/{hint}" for hint in mutant.hints if (tests / hint.partition("::")[0]).exists()]
        if hints:
            yield "hints", hints
        if self._last_stage == "hints":
            return
        skipped = [f"--ignore={hint}" for hint in hints if "::" not in hint]
        folders = [f"tests/{name}" for name in AREAS[mutant.area] if (tests / name).is_dir()]
        yield "area", [*(folder for folder in folders if folder not in hints), *skipped]
        if self._last_stage == "area":
            return
        skipped += [f"--ignore={folder}" for folder in folders]
        # Tests of the house's style see any change of a text, and say nothing of what it does.
        yield "rest", ["tests", "--ignore=tests/test_tidy.py", "--ignore=tests/mutants", *skipped]

    def _kills(self, fit: Fit, arguments: list[str], verdict: Verdict) -> bool:
        """Run tests; return whether one fails because of the fault."""
        while True:
            with self._copy.changed(fit):
                test = self._first_failure(arguments)
                is_one = test not in (None, NO_TEST, NO_END)
                is_steady = is_one and self._first_failure([str(test)]) is not None
            if test is None:
                return False
            if not is_one:
                without = [*arguments, "--collect-only"] if test == NO_TEST else arguments
                if self._first_failure(without) is not None:
                    raise MutantError(f"without any fault, tests fail: {' '.join(without)}")
            if not is_one or (is_steady and self._is_sound(test)):
                verdict.by = test
                return True
            verdict.dismissed.append(test)
            if len(verdict.dismissed) > DISMISSED_MAX:
                raise MutantError(f"too many tests fail without any fault: {', '.join(verdict.dismissed)}")
            arguments = [*arguments, f"--deselect={test}"]

    def _first_failure(self, arguments: Sequence[str]) -> str | None:
        """Return the first test that fails or kills the interpreter, `NO_TEST` or `NO_END`; None if all pass."""
        status, said = self._copy.run_tests(arguments, self._tests)
        begun: list[str] = _BEGUN.findall(said)
        if status == _WRONG_ARGUMENTS and not begun:
            raise MutantError(f"pytest ended with {status}:\n{said[-2000:]}")
        if not _SUMMARY.search(said):
            return begun[-1] if begun else NO_END
        if status in (0, 5):
            return None
        if (found := _FAILED.findall(said)) and "::" in found[0]:
            return str(found[0])
        return NO_TEST if status in (1, 2) else NO_END

    def _is_sound(self, test: str) -> bool:
        """Return whether a test passes without any fault."""
        if test not in self._sound:
            self._sound[test] = self._first_failure([test]) is None
        return self._sound[test]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only see whether all mutants fit the sources")
    parser.add_argument("--names", nargs="+", default=[], help="these mutants, or all of these tables")
    parser.add_argument("--set", choices=sorted(SETS), default="fast", help="which tests run")
    last = parser.add_mutually_exclusive_group()
    last.add_argument("--hints-only", action="store_true", help="no other tests than the entries name")
    last.add_argument("--area-only", action="store_true", help="no tests outside the part's folders")
    parser.add_argument("--json", type=Path, help="file of results; mutants that it has are not tried again")
    parser.add_argument("--tree", type=Path, default=CHECKOUT, help="another checkout than the one of this file")
    return parser.parse_args()


def _chosen(names: Sequence[str]) -> list[Mutant]:
    mutants = load_mutants()
    known = {mutant.name for mutant in mutants} | set(AREAS)
    if unknown := [name for name in names if name not in known]:
        raise MutantError(f"there is no mutant or table called {', '.join(unknown)}")
    return [mutant for mutant in mutants if not names or mutant.name in names or mutant.area in names]


def _tell(verdict: Verdict) -> None:
    what = f"killed by {verdict.by} ({verdict.stage})" if verdict.killed else "SURVIVED"
    print(f"{verdict.name}: {what}, {verdict.seconds:.0f} s", flush=True)
    for test in verdict.dismissed:
        print(f"    {test} failed, but it fails without the fault, too, or not always with it", flush=True)


def main() -> int:
    """Exit status 0: all mutants were killed, or fit; 1: not; 2: a wrong entry or option."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the copy goes, as after Ctrl-C
    if options.check:
        found = problems(options.tree)
        for line in (*found, *(f"(no such test: {hint})" for hint in stale_hints(options.tree))):
            print(line)
        print(f"{len(load_mutants())} mutants, {len(found)} do not fit")
        return min(1, len(found))
    try:
        mutants, sources = _chosen(options.names), Sources(options.tree)
        fits = {mutant.name: sources.fit(mutant) for mutant in mutants}
        known: list[dict[str, Any]] = []
        if options.json is not None and options.json.exists():
            known = json.loads(options.json.read_text("utf-8"))
        done = {verdict["name"] for verdict in known}
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            last_stage = "hints" if options.hints_only else "area" if options.area_only else "rest"
            trial = Trial(Copy(options.tree.resolve(), Path(folder)), options.set, last_stage)
            for mutant in (each for each in mutants if each.name not in done):
                verdict = trial.run(mutant, fits[mutant.name])
                _tell(verdict)
                known.append(asdict(verdict))
                if options.json is not None:
                    options.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = [verdict for verdict in known if verdict["name"] in fits]
    survivors = [verdict["name"] for verdict in chosen if not verdict["killed"]]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed; survivors: {', '.join(survivors) or 'none'}")
    return min(1, len(survivors))


if __name__ == "__main__":
    sys.exit(main())
