"""What is shipped: the wheel and the source archive hold everything a user needs, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

import httpx
import pytest
from cluster.harness import wait_for

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("runtime", "controller", "worker", "router", "kvstore", "kernels", "deploy")
DEMO = "deploy/trunkline/deploy/demo_model"
DEMO_BYTES_MAX = 16 << 20
pytestmark = [pytest.mark.processes, pytest.mark.area("wheel"), pytest.mark.timeout(900)]  # a wheel is compiled


def build(kind: str, folder: Path) -> Path:
    """Build a wheel or a source archive. The kernels are compiled apart, without optimisation and for the oldest
    machine only, in a fifth of the time: the installation that runs this test has compiled them with all."""
    options = {
        "cmake.build-type": "Debug",
        "cmake.define.TRUNKLINE_LEVELS": "0",
        "build-dir": str(folder / "build"),
    }
    settings = options if kind == "wheel" else {}
    code = f"from scikit_build_core.build import build_{kind}; print(build_{kind}({str(folder)!r}, {settings!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_every_package_with_its_types(wheel_names: list[str]) -> None:
    for package in PACKAGES:
        folder = ROOT / package / "trunkline" / package
        expected = {f"trunkline/{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
        assert expected - set(wheel_names) == set()
        assert f"trunkline/{package}/py.typed" in wheel_names
    assert {"trunkline/prompts/__init__.py", "trunkline/prompts/py.typed"} <= set(wheel_names)
    assert "trunkline/__init__.py" not in wheel_names
    assert [name for name in wheel_names if "tests" in name or "__pycache__" in name] == []


def test_the_wheel_holds_the_demo_model_licence_and_command(wheel_names: list[str]) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"trunkline/deploy/demo_model/{name}" in wheel_names
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
    assert any(name.endswith("entry_points.txt") for name in wheel_names)


def test_the_demo_model_is_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / DEMO).iterdir()) <= DEMO_BYTES_MAX


def test_the_source_archive_can_be_built_from(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {"pyproject.toml", "LICENSE", "README.md", f"{DEMO}/config.json", f"{DEMO}/model.safetensors"}
    needed |= {f"{package}/trunkline/{package}/py.typed" for package in PACKAGES}
    assert needed - names == set()


def installed(wheel: Path, folder: Path, *, with_dependencies: bool) -> Path:
    """An environment that has nothing but the wheel, and either what it depends on, too, or this environment's
    libraries (but for Trunkline itself, whose editable install is not followed there)."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    options = ["-c", str(ROOT / "constraints.txt")] if with_dependencies else ["--no-deps"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True)
    if not with_dependencies:
        (own,) = (folder / "lib").glob("python*/site-packages")
        (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = "import trunkline.router as r; print(r.__file__)"
    told = subprocess.run([python, "-P", "-c", where], capture_output=True, text=True, check=True).stdout
    assert Path(told.strip()).is_relative_to(folder), told
    return folder / "bin" / "trunkline"


@pytest.mark.parametrize("with_dependencies", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_wheel_serves_the_demo(wheel: Path, with_dependencies: bool) -> None:
    # Not pytest's folder: its paths can be too long for sockets.
    with tempfile.TemporaryDirectory(prefix="tl-wheel-") as name:
        folder = Path(name)
        command = installed(wheel, folder / "venv", with_dependencies=with_dependencies)
        (folder / "t").mkdir()
        environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "TMPDIR": str(folder / "t"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        options = ["--port", "0", "--tp", "1", "--threads", "1", "--kv-memory", "64MiB"]
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen([command, "serve", *options], cwd=folder, env=environment, stderr=output)
        try:
            wait_for(lambda: b"Ready after" in log.read_bytes() or process.poll() is not None, 120)
            ready = re.search(r"Ready after .* s: (http://\S+)", log.read_text())
            assert ready is not None, log.read_text()
            body = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0}
            answer = httpx.post(f"{ready[1]}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
            assert "Join" in answer["choices"][0]["message"]["content"]
            assert httpx.get(f"{ready[1]}/ui").status_code == 200
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, log.read_text()
