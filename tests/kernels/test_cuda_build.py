"""Where the CUDA library comes from, with a stand-in for nvcc; and, where the real one is, that all compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trunkline.kernels import cuda_build
from trunkline.kernels.cuda_build import CudaBuildError

HOPPER = (9, 0)
FAKE_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "nvcc {version}"; exit 0; fi
echo run "$@" >> {log}
while [ $# -gt 0 ]; do
  case "$1" in -o) shift; out="$1";; *.cu) source="$1";; esac
  shift
done
sleep {seconds}
if grep -q BROKEN "$source" 2>/dev/null; then echo "error: this is BROKEN" >&2; exit 2; fi
echo made > "$out"
"""


class Toolchain:
    """A folder with sources, a cache, and an nvcc that writes down its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "csrc" / "cuda"
        self.cache = folder / "cache" / "trunkline"
        self.log = folder / "log"
        for path in (self.sources / "device", folder / "csrc" / "common", folder / "bin"):
            path.mkdir(parents=True)
        (self.sources / "one.cu").write_text("int one;")
        (self.sources / "two.cu").write_text("int two;")
        (self.sources / "device" / "part.cuh").write_text("// part")
        (folder / "csrc" / "common" / "plan.h").write_text("// plan")
        self.install("13.0")

    def install(self, version: str, seconds: float = 0) -> None:
        nvcc = self.folder / "bin" / "nvcc"
        nvcc.write_text(FAKE_NVCC.format(version=version, log=self.log, seconds=seconds))
        nvcc.chmod(0o755)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    made = Toolchain(tmp_path)
    monkeypatch.setattr(cuda_build, "SOURCES", made.sources)
    monkeypatch.setattr(cuda_build, "HEADERS", tmp_path / "csrc" / "common")
    monkeypatch.setattr(cuda_build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(cuda_build, "SYSTEM_COMPILER", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return made


def test_builds_once_and_then_finds_it(toolchain: Toolchain) -> None:
    path = cuda_build.library_path(HOPPER)
    assert path.read_text() == "made\n"
    assert path.parent == toolchain.cache
    assert "-90a-" in path.name
    assert toolchain.runs == 3  # two sources and the link
    assert cuda_build.library_path(HOPPER) == path
    assert toolchain.runs == 3
    assert not [left for left in toolchain.cache.iterdir() if left.suffix not in (".so", ".lock")]


@pytest.mark.parametrize("changed", ["csrc/cuda/two.cu", "csrc/cuda/device/part.cuh", "csrc/common/plan.h"])
def test_changed_contents_are_another_library(changed: str, toolchain: Toolchain) -> None:
    before = cuda_build.library_path(HOPPER)
    file = toolchain.folder / changed
    file.write_text(file.read_text() + " ")
    after = cuda_build.library_path(HOPPER)
    assert after != before
    assert toolchain.runs == 6


def test_compiler_architecture_and_flags_are_in_the_name(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {cuda_build.library_path(HOPPER).name, cuda_build.library_path((8, 0)).name}
    toolchain.install("13.1")
    names.add(cuda_build.library_path(HOPPER).name)
    monkeypatch.setattr(cuda_build, "FLAGS", ("-O1",))
    names.add(cuda_build.library_path(HOPPER).name)
    assert len(names) == 4


def test_a_prebuilt_library_needs_no_compiler(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    built = cuda_build.library_path(HOPPER)
    prebuilt = toolchain.folder / "prebuilt" / built.name
    prebuilt.parent.mkdir()
    built.rename(prebuilt)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert cuda_build.library_path(HOPPER) == prebuilt
    (toolchain.sources / "one.cu").write_text("int three;")
    with pytest.raises(CudaBuildError, match=r"no nvcc"):
        cuda_build.library_path(HOPPER)


def test_a_prebuilt_library_of_a_lower_minor_serves(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not of another major, nor of a higher minor, nor one for a single device (90a)."""
    prebuilt = toolchain.folder / "prebuilt"
    prebuilt.mkdir()
    for built in [cuda_build.library_path(capability) for capability in ((8, 0), (8, 6), HOPPER)]:
        built.rename(prebuilt / built.name)
    monkeypatch.setattr(cuda_build, "find_compiler", lambda: None)
    for capability, arch in (((8, 0), "80"), ((8, 6), "86"), ((8, 9), "86"), (HOPPER, "90a")):
        assert f"-{arch}-" in cuda_build.library_path(capability).name
    for other in ((9, 1), (10, 0)):
        with pytest.raises(CudaBuildError, match="no nvcc"):
            cuda_build.library_path(other)


def test_only_the_check_turns_warnings_into_errors(toolchain: Toolchain) -> None:
    cuda_build.library_path(HOPPER)
    assert "-Werror" not in toolchain.log.read_text()
    cuda_build.check(["80"])
    strict = [line for line in toolchain.log.read_text().splitlines() if "-Werror all-warnings" in line]
    assert len(strict) == 2  # the sources; the link warns of nothing


def test_a_cached_library_outlives_its_compiler(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    built = cuda_build.library_path(HOPPER)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(cuda_build, "find_compiler", lambda: None)
    assert cuda_build.library_path(HOPPER) == built


def test_without_a_compiler_the_remedies_are_named(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "find_compiler", lambda: None)
    with pytest.raises(CudaBuildError, match=r"sm_90a.*pip install 'trunkline\[nvcc\]'.*CUDA_HOME"):
        cuda_build.library_path(HOPPER)


def test_a_failing_compile_shows_what_the_compiler_said(toolchain: Toolchain) -> None:
    (toolchain.sources / "two.cu").write_text("BROKEN")
    with pytest.raises(CudaBuildError, match=r"(?s)nvcc failed.*two\.cu.*error: this is BROKEN"):
        cuda_build.library_path(HOPPER)
    assert not list(toolchain.cache.glob("*.so"))
    (toolchain.sources / "two.cu").write_text("int two;")
    assert cuda_build.library_path(HOPPER).exists()


def test_an_unwritable_cache_is_an_error_of_ours(toolchain: Toolchain) -> None:
    toolchain.cache.parent.write_text("a file")
    with pytest.raises(CudaBuildError, match="cannot be built in"):
        cuda_build.library_path(HOPPER)


def test_of_processes_at_the_same_time_one_builds(toolchain: Toolchain) -> None:
    toolchain.install("13.0", seconds=0.3)
    code = (
        "import sys; from pathlib import Path; from trunkline.kernels import cuda_build as b;"
        "root = Path(sys.argv[1]);"
        "b.SOURCES, b.HEADERS, b.PREBUILT = root / 'csrc/cuda', root / 'csrc/common', root / 'prebuilt';"
        "print(b.library_path((9, 0)).read_text())"
    )
    command = [sys.executable, "-c", code, str(toolchain.folder)]
    environment = {**os.environ}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in running] == [b"made\n\n"] * 3
    assert toolchain.runs == 3


def test_devices_have_architectures() -> None:
    named = {capability: cuda_build.architecture(capability) for capability in ((8, 0), (8, 9), (9, 0), (12, 0))}
    assert named == {(8, 0): "80", (8, 9): "89", (9, 0): "90a", (12, 0): "120"}
    with pytest.raises(CudaBuildError, match=r"7\.5; the kernels need 8\.0"):
        cuda_build.architecture((7, 5))


@pytest.mark.timeout(600)
@pytest.mark.skipif(cuda_build.find_compiler() is None, reason="no nvcc")
def test_every_kernel_compiles_without_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    """`make check-cuda`; the result is kept in the user's cache, so that it is quick while nothing changed.

    Under a name of its own: what users build may have had warnings.
    """
    compiler = cuda_build.find_compiler()
    assert compiler is not None
    for arch in cuda_build.CHECKED_ARCHITECTURES:
        target = cuda_build.cache_folder() / f"strict-{cuda_build.library_name(arch, compiler)}"
        library = cuda_build.build(arch, target, compiler, cuda_build.STRICT)
        assert library.stat().st_size > 100_000
