"""What is shipped: the wheel and the source archive hold everything a user needs, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("controller", "worker", "router", "kvstore", "kernels", "deploy")
DEMO = "deploy/trunkline/deploy/demo_model"
DEMO_BYTES_MAX = 16 << 20


def build(kind: str, folder: Path) -> Path:
    code = f"from scikit_build_core.build import build_{kind}; print(build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"))) as wheel:
        return wheel.namelist()


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
