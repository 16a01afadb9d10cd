"""Where the CUDA library comes from, with a stand-in for nvcc; and, where the real one is, that all compiles."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from trunkline.kernels import cuda_build
from trunkline.kernels.cuda_build import CudaBuildError

pytestmark = [pytest.mark.area("cuda"), pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[2]
CMAKE = Path(sys.executable).with_name("cmake")
HOPPER = (9, 0)
FAKE_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
case " $* " in *" -E "*) echo probe >> {log}; {host}; exit $?;; esac
echo run "$@" >> {log}
while [ $# -gt 0 ]; do
  case "$1" in -o) shift; out="$1";; *.cu) source="$1";; esac
  shift
done
sleep {seconds}
if grep -q BROKEN "$source" 2>/dev/null; then echo "error: this is BROKEN" >&2; exit 2; fi
echo made > "$out"
"""
TOO_NEW = "#error -- unsupported GNU version! gcc versions later than 15 are not supported!"
TOO_OLD = (
    "nvcc warning : The -std=c++20 flag is not supported with the configured host compiler. Flag will be ignored."
)


def says(release: str) -> str:
    return f"nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {release}, V{release}.88"


class Toolchain:
    """A folder with sources, a cache, and an nvcc that writes down its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "csrc" / "cuda"
        self.cache = folder / "cache" / "trunkline"
        self.prebuilt = folder / "prebuilt"
        self.log = folder / "log"
        for path in (self.sources / "device", folder / "csrc" / "common", folder / "bin"):
            path.mkdir(parents=True)
        (self.sources / "one.cu").write_text("int one;")
        (self.sources / "two.cu").write_text("int two;")
        (self.sources / "device" / "part.cuh").write_text("// part")
        (folder / "csrc" / "common" / "plan.h").write_text("// plan")
        self.install()
        self.write_program("g++", "#!/bin/sh\necho 'g++ (Fake) 13.2.0'\n")

    def install(self, release: str = "13.0", seconds: float = 0, host: str = ":") -> None:
        """
        Args:
            host: shell command that stands for what nvcc makes of its C++ compiler.
        """
        self.install_saying(says(release), seconds, host)

    def install_saying(self, version: str, seconds: float = 0, host: str = ":") -> None:
        self.write_program("nvcc", FAKE_NVCC.format(version=version, log=self.log, seconds=seconds, host=host))

    def write_program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def runs(self) -> int:
        return len([line for line in self.lines if line.startswith("run ")])


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    made = Toolchain(tmp_path)
    monkeypatch.setattr(cuda_build, "SOURCES", made.sources)
    monkeypatch.setattr(cuda_build, "HEADERS", tmp_path / "csrc" / "common")
    monkeypatch.setattr(cuda_build, "PREBUILT", made.prebuilt)
    monkeypatch.setattr(cuda_build, "SYSTEM_COMPILER", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("NVCC_CCBIN", raising=False)
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


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), HOPPER, (10, 0), (10, 3), (12, 0)])
def test_one_prebuilt_library_serves_every_device(
    capability: tuple[int, int], toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before one that this machine's nvcc made, and needs no nvcc."""
    for with_cached in (False, True):
        if with_cached:
            cuda_build.library_path(capability)
        built = cuda_build.build_prebuilt(toolchain.prebuilt)
        with monkeypatch.context() as patch:
            patch.setattr(cuda_build, "find_compiler", lambda: None)
            assert cuda_build.library_path(capability) == built
        assert cuda_build.library_path(capability) == built
        built.unlink()


def test_a_prebuilt_library_is_of_these_sources(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_build.build_prebuilt(toolchain.prebuilt)
    monkeypatch.setattr(cuda_build, "find_compiler", lambda: None)
    (toolchain.sources / "one.cu").write_text("int three;")
    assert cuda_build.prebuilt_library() is None
    with pytest.raises(CudaBuildError, match=r"no nvcc"):
        cuda_build.library_path(HOPPER)


def test_only_one_library_goes_into_a_wheel(toolchain: Toolchain) -> None:
    """What earlier sources were compiled to would only make it larger."""
    first = cuda_build.build_prebuilt(toolchain.prebuilt)
    (toolchain.sources / "one.cu").write_text("int three;")
    second = cuda_build.build_prebuilt(toolchain.prebuilt)
    assert first != second
    assert [path for path in toolchain.prebuilt.iterdir() if path.suffix == ".so"] == [second]
    runs = toolchain.runs
    assert cuda_build.build_prebuilt(toolchain.prebuilt) == second
    assert toolchain.runs == runs


def test_what_is_compiled_for_every_device(toolchain: Toolchain) -> None:
    """Machine code for 8.x and 9.0a, and PTX that newer devices take: that of 9.0a would do for none."""
    cuda_build.build_prebuilt(toolchain.prebuilt)
    for line in toolchain.lines[1:]:
        assert "-gencode=arch=compute_80,code=[sm_80,compute_80] -gencode=arch=compute_90a,code=sm_90a" in line
    assert "compute_90a," not in " ".join(code for code in cuda_build.EVERY_DEVICE.codes if "code=[" in code)


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (says("11.8"), r"nvcc is release 11\.8; .*C\+\+20 and need nvcc 12 or newer: .*trunkline\[nvcc\]"),
        ("strange", r"nvcc says only 'strange'; .*need nvcc 12 or newer"),
    ],
)
def test_an_nvcc_that_is_too_old_is_named(version: str, sentence: str, toolchain: Toolchain) -> None:
    toolchain.install_saying(version)
    with pytest.raises(CudaBuildError, match=sentence):
        cuda_build.library_path(HOPPER)
    with pytest.raises(CudaBuildError, match=sentence):
        cuda_build.build_prebuilt(toolchain.prebuilt)
    assert toolchain.lines == [], "nothing was compiled"


def test_a_newer_nvcc_is_taken_instead_of_one_that_is_too_old(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = toolchain.folder / "newer"
    (toolchain.folder / "bin" / "nvcc").rename(newer)
    toolchain.install("11.8")
    monkeypatch.setattr(cuda_build, "SYSTEM_COMPILER", newer)
    compiler = cuda_build.find_compiler()
    assert compiler is not None
    assert (compiler.path, compiler.release) == (newer, (13, 0))


def test_a_cached_library_outlives_a_compiler_that_became_too_old(toolchain: Toolchain) -> None:
    built = cuda_build.library_path(HOPPER)
    toolchain.install("11.8")
    assert cuda_build.library_path(HOPPER) == built


def test_without_a_host_compiler_it_is_named(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    (toolchain.folder / "bin" / "g++").unlink()
    monkeypatch.setenv("PATH", str(toolchain.folder / "bin"))
    with pytest.raises(CudaBuildError, match=r"there is no g\+\+ here; .*apt-get install g\+\+.*NVCC_CCBIN"):
        cuda_build.library_path(HOPPER)
    monkeypatch.setenv("NVCC_CCBIN", "g++-99")
    with pytest.raises(CudaBuildError, match=r"there is no g\+\+-99 here"):
        cuda_build.library_path(HOPPER)
    assert toolchain.lines == []


@pytest.mark.parametrize(("code", "said"), [(1, TOO_NEW), (0, TOO_OLD)], ids=["too new", "too old"])
def test_a_host_compiler_that_nvcc_refuses(code: int, said: str, toolchain: Toolchain) -> None:
    """nvcc's own words, before anything is compiled; of one that is too old it only warns."""
    toolchain.install(host=f"echo '{said}' >&2; (exit {code})")
    words = (
        rf"(?s)release 13\.0\) does not work with g\+\+ \(g\+\+ \(Fake\) 13\.2\.0\).*{re.escape(said)}.*NVCC_CCBIN"
    )
    with pytest.raises(CudaBuildError, match=words):
        cuda_build.library_path(HOPPER)
    assert toolchain.lines == ["probe"]


def run_module(toolchain: Toolchain, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The file itself, by its path and without the package, as a build runs it."""
    copy = toolchain.folder / "cuda_build.py"
    copy.write_bytes(Path(cuda_build.__file__).read_bytes())
    return subprocess.run(
        [sys.executable, "-I", copy, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_a_build_finds_what_it_should_install(toolchain: Toolchain) -> None:
    assert run_module(toolchain, "--find").stdout == "\n"
    made = run_module(toolchain)
    assert (made.returncode, made.stderr) == (0, "")
    assert Path(made.stdout.strip()).parent == toolchain.prebuilt
    assert run_module(toolchain, "--find").stdout == made.stdout
    (toolchain.sources / "two.cu").write_text("int three;")
    assert run_module(toolchain, "--find").stdout == "\n"


@pytest.mark.skipif(not CMAKE.exists() or shutil.which("c++") is None, reason="no cmake or no C++ compiler")
def test_the_package_gets_what_was_compiled(toolchain: Toolchain) -> None:
    """Of the sources as they are; without a library it says that none is inside, and an editable install has no
    use for a copy."""
    tree = toolchain.folder / "tree"
    kernels = tree / "kernels" / "trunkline" / "kernels"
    shutil.copytree(cuda_build.PACKAGE / "csrc", kernels / "csrc")
    shutil.copy(cuda_build.__file__, kernels)
    shutil.copy(ROOT / "CMakeLists.txt", tree)

    def configure(name: str, *options: str) -> tuple[str, str]:
        command: list[str | Path] = [CMAKE, "-S", tree, "-B", tree / name, f"-DPython_EXECUTABLE={sys.executable}"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout, (tree / name / "cmake_install.cmake").read_text()

    said, installed = configure("without")
    assert "no CUDA kernels inside" in said
    assert "trunkline_cuda" not in installed
    made = subprocess.run([sys.executable, kernels / "cuda_build.py"], capture_output=True, text=True, check=True)
    library = made.stdout.strip()
    said, installed = configure("with")
    assert f"CUDA kernels: {library}" in said
    assert f'trunkline/kernels/prebuilt" TYPE FILE FILES "{library}"' in installed
    _, installed = configure("editable", "-DSKBUILD_STATE=editable")
    assert "trunkline_cuda" not in installed
    (kernels / "csrc" / "cuda" / "elementwise.cu").write_text("int other;")
    said, _ = configure("stale")
    assert "no CUDA kernels inside" in said


def test_a_wheel_without_kernels_says_so(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    (toolchain.folder / "bin" / "nvcc").unlink()
    hidden = "import runpy, sys, pathlib; pathlib.Path.is_file = lambda self: False; sys.argv = sys.argv[1:]; "
    copy = toolchain.folder / "cuda_build.py"
    copy.write_bytes(Path(cuda_build.__file__).read_bytes())
    code = hidden + "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, copy, "--if-possible"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "NO CUDA kernels inside" in done.stdout
    assert "pip install 'trunkline[nvcc]'" in done.stdout


def test_only_the_check_turns_warnings_into_errors(toolchain: Toolchain) -> None:
    cuda_build.library_path(HOPPER)
    assert "-Werror" not in toolchain.log.read_text()
    cuda_build.check()
    strict = [line for line in toolchain.log.read_text().splitlines() if "-Werror all-warnings" in line]
    assert len(strict) == 2  # the sources; the link warns of nothing


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
    toolchain.install(seconds=0.3)
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


needs_nvcc = pytest.mark.skipif(cuda_build.find_compiler() is None, reason="no nvcc")
EVERY_CODE = {("machine code", 80), ("machine code", 90), ("PTX", 80)}


@needs_nvcc
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("devices", "codes", "megabytes"),
    [
        pytest.param(cuda_build.one_device("90a"), {("machine code", 90)}, (3, 8), id="one device"),
        pytest.param(cuda_build.EVERY_DEVICE, EVERY_CODE, (8, 14), id="every device", marks=pytest.mark.soak),
    ],
)
def test_every_kernel_compiles_without_warnings(
    devices: cuda_build.Devices, codes: set[tuple[str, int]], megabytes: tuple[int, int]
) -> None:
    """As `make check-cuda`; the result is kept in the user's cache, so that it is quick while nothing changed.

    Daily for compute capability 9.0 alone, in less time: no line is for older devices only, some are for this.
    Under a name of its own: what users build may have had warnings.
    """
    compiler = cuda_build.find_compiler()
    assert compiler is not None
    target = cuda_build.cache_folder() / f"strict-{cuda_build.library_name(devices, compiler)}"
    library = cuda_build.build(devices, target, compiler, cuda_build.STRICT)
    assert megabytes[0] * 1e6 < library.stat().st_size < megabytes[1] * 1e6
    assert device_codes(library.read_bytes()) == codes


FATBIN = struct.Struct("<IHHQ")
"""Of all code of a source: magic number, version, bytes of this header, bytes that follow it."""
FATBIN_MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQ12xI")
"""One code in it: kind, version, bytes of this header, bytes that follow it, …, compute capability times 10."""


def device_codes(library: bytes) -> set[tuple[str, int]]:
    """(kind, compute capability times 10) of the code in a library, as `cuobjdump -lelf -lptx` tells them."""
    found, at = set(), library.find(struct.pack("<I", FATBIN_MAGIC))
    while at >= 0:
        _, version, header, following = FATBIN.unpack_from(library, at)
        if (version, header) == (1, FATBIN.size):
            entry, end = at + header, at + header + following
            while entry < end:
                kind, _, entry_header, size, capability = ENTRY.unpack_from(library, entry)
                found.add(({1: "PTX", 2: "machine code"}[kind], capability))
                entry += entry_header + size
        at = library.find(struct.pack("<I", FATBIN_MAGIC), at + 1)
    return found


@needs_nvcc
@pytest.mark.timeout(600)
def test_two_builds_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of other numbers and folders of other names, which nvcc writes into what it makes: into names
    of what is in anonymous namespaces, as both of these sources have. For every device."""
    some = tmp_path / "csrc" / "cuda"
    shutil.copytree(cuda_build.SOURCES, some, ignore=shutil.ignore_patterns("*.cu"))
    shutil.copytree(cuda_build.SOURCES.parent / "common", some.parent / "common")
    for name in ("float8_rows.cu", "logit_edits.cu"):
        shutil.copy(cuda_build.SOURCES / name, some)
    monkeypatch.setattr(cuda_build, "SOURCES", some)
    first, second = (cuda_build.build_prebuilt(tmp_path / name) for name in ("first", "second"))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert device_codes(first.read_bytes()) == EVERY_CODE
