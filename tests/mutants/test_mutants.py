"""The tables of mutants keep up with the sources, and so does what tries them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from mutants.run import AREAS, NO_END, Copy, Edit, Mutant, MutantError, Sources, Trial, load_mutants, problems


def test_every_mutant_fits_the_sources() -> None:
    """A change of a line that a mutant names changes the mutant as well (`run.py --check` lists them)."""
    assert problems() == []


def test_each_part_has_mutants() -> None:
    parts = [mutant.area for mutant in load_mutants()]
    assert {area: parts.count(area) for area in AREAS if area not in parts} == {}
    assert len(parts) >= 60


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with one module of the controller."""
    root = tmp_path / "checkout"
    package = root / "controller/trunkline/controller"
    package.mkdir(parents=True)
    kernels = root / "kernels/trunkline/kernels"
    kernels.mkdir(parents=True)
    (kernels / "__init__.py").touch()
    (package / "pool.py").write_text("one = 1\ntwo = 1 + 1\n")
    (root / "pyproject.toml").write_text('[project]\nscripts = {trunkline = "trunkline.controller.pool:main"}\n')
    return root


def _mutant(*edits: tuple[str, str]) -> Mutant:
    return Mutant("controller", "name", "A fault.", tuple(Edit(*edit) for edit in edits), ())


@pytest.mark.parametrize(
    ("edits", "problem"),
    [
        ((("three", "3"),), "nowhere"),
        ((("1", "2"),), "3×"),
        ((("two = 1", "two = 1"),), "changes nothing"),
        ((("two = 1", "two = ("),), "makes no Python"),
        ((("two", "zwei"), ("one", "eins")), "must stand in one place"),
    ],
)
def test_a_mutant_that_does_not_fit_is_an_error(
    checkout: Path, edits: tuple[tuple[str, str], ...], problem: str
) -> None:
    with pytest.raises(MutantError, match=problem):
        Sources(checkout).fit(_mutant(*edits))


def _commit(checkout: Path) -> None:
    for command in (
        ("init", "--quiet"),
        ("add", "."),
        ("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message", "all"),
    ):
        subprocess.run(("git", *command), cwd=checkout, check=True)


@pytest.mark.processes
def test_a_copy_imports_its_own_sources_and_leaves_the_checkout_alone(checkout: Path, tmp_path: Path) -> None:
    _commit(checkout)
    (checkout / "controller/trunkline/controller/pool.py").write_text("one = 1\ntwo = 1 + 1\nthree = 3\n")
    copy = Copy(checkout, tmp_path)
    fit = Sources(checkout).fit(_mutant(("was", "is"), ("two = 1 + 1", "two = 1 + 2")))
    ask = (copy.python, "-c", "from trunkline.controller import pool; print(pool.two, pool.three, pool.__file__)")

    def said() -> str:
        return subprocess.run(ask, cwd="/", check=True, capture_output=True, text=True).stdout.strip()

    place = copy.root / fit.path
    assert said() == f"2 3 {place}"
    with copy.changed(fit):
        assert said() == f"3 3 {place}"
        assert "1 + 2" not in (checkout / fit.path).read_text()
    assert said() == f"2 3 {place}"


def _tests(checkout: Path, dies: str) -> None:
    """Write a test of the checkout's module."""
    (checkout / "tests").mkdir()
    text = "import os\nfrom trunkline.controller import pool\n\ndef test_two():\n"
    (checkout / "tests/test_pool.py").write_text(
        f"{text}    assert getattr(pool.two, 'real', 2) == 2\n    {dies}\n"
    )
    _commit(checkout)


@pytest.mark.processes
def test_a_mutant_that_kills_the_interpreter_is_noticed(checkout: Path, tmp_path: Path) -> None:
    """In a test, or before the first one; with any exit status."""
    _tests(checkout, "")
    trial = Trial(Copy(checkout, tmp_path), "fast", "hints")

    def by(changed: str) -> str | None:
        mutant = Mutant("controller", "name", "A fault.", (Edit("two = 1 + 1", changed),), ("test_pool.py",))
        verdict = trial.run(mutant, Sources(checkout).fit(mutant))
        assert verdict.dismissed == []
        return verdict.by if verdict.killed else None

    dies = "import os\nclass Two:\n    real = property(lambda self: os.abort())\ntwo = Two()"
    assert by(dies) == "tests/test_pool.py::test_two"
    assert by("import os\nos._exit(0)") == NO_END


@pytest.mark.processes
def test_an_interpreter_that_dies_without_the_fault_says_nothing(checkout: Path, tmp_path: Path) -> None:
    _tests(checkout, "os._exit(3)")
    mutant = Mutant("controller", "name", "A fault.", (Edit("two = 1 + 1", "two = 2"),), ("test_pool.py",))
    verdict = Trial(Copy(checkout, tmp_path), "fast", "hints").run(mutant, Sources(checkout).fit(mutant))
    assert (verdict.killed, verdict.dismissed) == (False, ["tests/test_pool.py::test_two"])
