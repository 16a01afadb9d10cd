"""The folder for a visit to a GPU machine: what is in it, and that it needs nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from argparse import Namespace
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import gpu
import gpu_compiled
import gpu_kit
import gpu_tokens
import pytest
from gpu_kit import BROUGHT, FLASHINFER, PRESENT, KitError, assemble

pytestmark = [pytest.mark.area("gpu-kit"), pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[2]


KEPT = {"no_flashinfer": False, "flashinfer_kernels": None}
"""Options as they are by default."""


def make_wheel(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"# {name}\n")
    return path


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    wheel = make_wheel(tmp_path / "trunkline-0.1.0-py3-none-linux_x86_64.whl", "trunkline/kernels/ops.py")
    make_wheel(tmp_path / "others" / "part-1-py3-none-any.whl", "part.py", "part-1.data/purelib/beside.py")
    assemble(tmp_path / "kit", wheel, tmp_path / "others", [[1, 2]])
    return tmp_path / "kit"


def test_what_is_inside(kit: Path) -> None:
    assert sorted(path.name for path in (kit / "wheels").iterdir()) == [
        "part-1-py3-none-any.whl",
        "trunkline-0.1.0-py3-none-linux_x86_64.whl",
    ]
    scripts = {path.name for path in (kit / "benchmarks").iterdir()}
    assert {"gpu.py", "gpu_part.py", "gpu_visit.py", "engine_loop.py", "report.py"} <= scripts
    assert gpu_tokens.expected_tokens(kit) == [[1, 2]]
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", (kit / gpu.COMMIT_FILE).read_text().strip())
    assert os.access(kit / "run.sh", os.X_OK)


def test_wheels_are_unpacked_without_pip(kit: Path, tmp_path: Path) -> None:
    gpu.unpack(kit, tmp_path / "site")
    files = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.py")}
    assert files == {"trunkline/kernels/ops.py", "part.py", "beside.py"}
    with pytest.raises(SystemExit, match="has no wheels; make gpu-kit makes such a folder"):
        gpu.unpack(tmp_path, tmp_path / "site")


def test_it_runs_from_its_own_folder(kit: Path, tmp_path: Path) -> None:
    """The parts of this kit get its wheels, its benchmarks and its reference, from any folder."""
    (kit / "benchmarks" / "gpu_part.py").write_text(
        "import json, os, sys, part, beside, trunkline.kernels.ops\n"
        "print(json.dumps({'fact': 'arguments', 'value': sys.argv[1:]}))\n"
        "print(json.dumps({'fact': 'from', 'value': os.path.dirname(part.__file__)}))\n"
    )
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""}
    done = subprocess.run(
        ["sh", kit / "run.sh", "--only", "ceilings"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu-results" / "results.json").read_text())
    assert document["machine"]["arguments"] == ["ceilings", "10", "--kit", str(kit)]
    assert document["commit"] == (kit / gpu.COMMIT_FILE).read_text().strip()
    assert not Path(document["machine"]["from"]).exists(), "what was unpacked is gone"


def test_it_may_not_get_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kit, "KIT_BYTES_MAX", 1 << 10)
    wheel = make_wheel(tmp_path / "trunkline-0.1.0-py3-none-linux_x86_64.whl", "x.py")
    with pytest.raises(KitError, match=r"would take \d\.\d MiB; .* The largest: \w+\.py .*--no-flashinfer"):
        assemble(tmp_path / "kit", wheel, tmp_path, [])


def test_what_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kit, "ROOT", tmp_path)
    with pytest.raises(KitError, match="make wheel builds one"):
        gpu_kit.newest_wheel()
    with pytest.raises(KitError, match=r"wheels for Python 3\.12 cannot be downloaded: .*constraints\.txt"):
        gpu_kit.download(["msgspec"], "3.12", tmp_path)


def test_a_wheel_without_cuda_kernels_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_kit, "download", lambda *_: None)
    monkeypatch.setattr(gpu_kit, "generate", lambda *_: {"tokens": []})
    library = "trunkline/kernels/prebuilt/trunkline_cuda-all-0-0.so"
    for names, is_said in ((("x.py",), True), ((library,), False)):
        wheel = make_wheel(tmp_path / "trunkline-0.1.0-py3-none-linux_x86_64.whl", *names)
        gpu_kit.make_kit(Namespace(wheel=wheel, to=tmp_path / "kit", python="3.12", **KEPT))
        assert ("no CUDA kernels inside" in capsys.readouterr().out) is is_said


def compile_one(cache: Path, name: str, *, log: str) -> None:
    """As FlashInfer leaves it."""
    folder = cache / ".cache" / "flashinfer" / "0.6.12" / "90a" / "cached_ops" / name
    folder.mkdir(parents=True)
    (folder / f"{name}.so").write_text(f"the code of {name}")
    (folder / f"{name}_1.cuda.o").write_text("an object")
    (folder / ".ninja_log").write_text(log)


def test_kernels_that_one_visit_has_compiled_come_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete ones alone, to where FlashInfer loads them as they are."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "there"))
    results = tmp_path / "flashinfer-kernels.tar.gz"
    gpu_compiled.compiled_here(results)
    assert not results.exists(), "nothing was compiled"
    compile_one(tmp_path / "there", "decode", log="# ninja log v7\n2\t6\t1\t/there/decode.so\tfae3\n")
    compile_one(tmp_path / "there", "cut", log="# ninja log v7\n2\t6\t1\t/there/cut_1.cuda.o\tfae3\n")
    gpu_compiled.compiled_here(results)
    wheel = make_wheel(tmp_path / "trunkline-0.1.0-py3-none-linux_x86_64.whl", "trunkline/kernels/ops.py")
    others = tmp_path / "others"
    make_wheel(others / "flashinfer-1-py3-none-any.whl", "flashinfer/jit.py")
    assert gpu_compiled.take(results, others / gpu_compiled.KERNELS) == 1
    assemble(tmp_path / "kit", wheel, others, [])
    for site, name in ((tmp_path / "site", "flashinfer"), (tmp_path / "plain", "other")):
        (site / name).mkdir(parents=True)
        gpu_compiled.put_beside(tmp_path / "kit" / gpu_compiled.KERNELS, site)
    built_in = tmp_path / "site" / "flashinfer" / "data" / "aot"
    assert [path.relative_to(built_in).as_posix() for path in built_in.rglob("*.so")] == ["decode/decode.so"]
    assert (built_in / "decode" / "decode.so").read_text() == "the code of decode"
    # The next visit compiles another one; its file has both.
    compile_one(tmp_path / "later", "prefill_90a", log="# ninja log v7\n2\t6\t1\t/later/prefill_90a.so\tfae3\n")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "later"))
    gpu_compiled.compiled_here(results, tmp_path / "kit" / gpu_compiled.KERNELS)
    assert gpu_compiled.take(results, tmp_path / "both") == 2
    assert sorted(path.stem for path in (tmp_path / "both").rglob("*.so")) == ["decode", "prefill_90a"]
    (tmp_path / "site" / "flashinfer" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert [gpu_compiled.has_kernel(name) for name in ("decode", "prefill", "cut")] == [True, True, False]
    assert not list((tmp_path / "plain").rglob("*.so")), "another FlashInfer is left alone"


def test_the_whole_cache_will_do_and_other_files_will_not(tmp_path: Path) -> None:
    compile_one(tmp_path / "there", "decode", log="decode.so")
    with tarfile.open(tmp_path / "cache.tgz", "w:gz") as archive:
        archive.add(tmp_path / "there" / ".cache" / "flashinfer", "flashinfer")
    assert gpu_compiled.take(tmp_path / "cache.tgz", tmp_path / "out") == 1
    assert [path.name for path in (tmp_path / "out").rglob("*.*")] == ["decode.so"]
    with tarfile.open(tmp_path / "empty.tgz", "w:gz"):
        pass
    for name, words in (("empty.tgz", "has no kernels inside"), ("none.tgz", "cannot be read")):
        with pytest.raises(ValueError, match=rf"{name} {words}.*flashinfer-kernels\.tar\.gz"):
            gpu_compiled.take(tmp_path / name, tmp_path / "out")


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_needs(names: tuple[str, ...]) -> dict[str, Distribution]:
    """Distributions here, and all that they need, by name."""
    found: dict[str, Distribution] = {}
    waiting = [normalised(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for another system, or an extra
            continue
        requires = found[name].requires or []
        needs = [need for need in requires if "extra ==" not in need]
        waiting += [normalised(match[0]) for need in needs if (match := re.match(r"[\w.-]+", need))]
    return found


HIDING = """
import importlib, importlib.machinery, json, sys
hidden = set(json.loads(sys.argv[1]))
class Filter(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path = [Filter if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
import gpu_part, gpu_start, trunkline
for name in gpu_start.MODULES:
    importlib.import_module(name)
"""
"""Imports all that parts import, where some modules are not to be found."""


def test_nothing_else_is_needed() -> None:
    """All that the parts import is on the other machine or brought along."""
    known = {*with_needs(PRESENT), *map(normalised, BROUGHT), "trunkline"}
    owners = {module: set(map(normalised, names)) for module, names in packages_distributions().items()}
    hidden = sorted(module for module, names in owners.items() if not names & known)
    assert "pytest" in hidden

    def run(hidden: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
        command = [sys.executable, "-c", HIDING, json.dumps(hidden)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run(hidden)
    assert (done.returncode, done.stderr) == (0, "")
    without = run([*hidden, "uvicorn"])
    assert "No module named 'uvicorn'" in without.stderr, "the check would see what is missing"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_whole_kit_imports_all_on_a_machine_without_this_environment(tmp_path: Path) -> None:
    """Made for this Python; torch and what else is there come from here, Trunkline and the rest from the kit."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = tmp_path / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", wheels, ROOT], check=True)
    (wheel,) = wheels.iterdir()
    kit = tmp_path / "kit"
    gpu_kit.make_kit(Namespace(wheel=wheel, to=kit, python=python, **KEPT))
    names = " ".join(path.name for path in (kit / "wheels").iterdir())
    for name in (*BROUGHT, *(pinned.partition("==")[0] for pinned in FLASHINFER)):
        assert name.replace("-", "_") in names
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    for present in with_needs(PRESENT).values():
        for top in {Path(str(file)).parts[0] for file in present.files or [] if ".." not in str(file)}:
            if (here / top).exists() and not (site / top).exists():
                (site / top).symlink_to(here / top)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PYTHON"] = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run(
        ["sh", kit / "run.sh", "--only", "start"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # All modules were imported before a device was looked for.
    assert done.returncode == 2, done.stdout + done.stderr
    assert "finds no CUDA device here" in done.stdout
    assert (tmp_path / "gpu-results" / "start.log").read_text() == ""
