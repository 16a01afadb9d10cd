"""Options of `serve` from a file and from the environment, and the service of systemd that uses them."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
from deploy.commands import Serve, invoke

from trunkline.deploy.config.options import SERVE_OPTIONS
from trunkline.deploy.config.settings import ServeSettings

UNIT: Final = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "trunkline.service"


def test_the_command_line_goes_before_the_file_and_the_file_before_the_environment(serve: Serve) -> None:
    text = (
        "{model: a, tp: 4, kv_memory: 2GiB, host-tier: 0, prefix-cache: false, cors-origin: 'https://a,https://b'}"
    )
    variables = {"TRUNKLINE_TP": "2", "TRUNKLINE_REMOTE_TIER": "redis://v/1", "TRUNKLINE_RESTART": "false"}
    assert serve(text, "--kv-memory", "1GiB", **variables) == ServeSettings(
        model="a",
        tp=4,
        kv_memory_bytes=1 << 30,
        host_tier_bytes=0,
        prefix_cache=False,
        cors_origins=("https://a", "https://b"),
        remote_tier="redis://v/1",
        restart=False,
    )
    assert serve("{remote-tier: 'redis://f/1', tp: null}", "m", **variables) == ServeSettings(
        model="m", tp=2, remote_tier="redis://f/1", restart=False
    )


def test_the_variable_of_a_service_in_kubernetes_is_no_port(serve: Serve) -> None:
    assert serve("tp: 1", TRUNKLINE_PORT="tcp://10.0.0.1:80").port == ServeSettings().port


def test_no_variable_means_two_things() -> None:
    root, packages = UNIT.parents[2], ("runtime", "controller", "router", "worker", "kvstore", "kernels", "deploy")
    sources = [path.read_text() for package in packages for path in (root / package / "trunkline").rglob("*.py")]
    known = {name for text in sources for name in re.findall(r'"(TRUNKLINE_[A-Z_]+)"', text)}
    assert "TRUNKLINE_API_KEY" in known
    assert known & {f"TRUNKLINE_{option.parameter.upper()}" for option in SERVE_OPTIONS} == {
        "TRUNKLINE_REMOTE_TIER",
        "TRUNKLINE_RECORDS",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp: 2\nmax-contxt: 5", ":2: max-contxt: is unknown; did you mean 'max-context'?"),
        ("max-model-len: 5", ":1: max-model-len: is unknown; "),
        ("tp: many", ":1: tp: is 'many'; it takes a whole number"),
        ("trace-sample: all", ":1: trace-sample: is 'all'; it takes a number"),
        ("prefix-cache: maybe", ":1: prefix-cache: is 'maybe'; allowed are true and false"),
        ("cors-origin: [a, b]", ":1: cors-origin: takes one value"),
        ("- tp", ":1: the file is a mapping of options"),
        ("tp: [", "this is no YAML"),
        ("kv-memory: lots", "--kv-memory is 'lots', which is not a size"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    done = invoke(["serve", "--config", str(path)], {})
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.processes
def test_the_service_of_systemd_can_be_used(tmp_path: Path, serve: Serve) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, words[:2]) == ("trunkline", ["serve", "--config"])
    assert float(service["TimeoutStopSec"]) > serve("port: 0").drain_seconds + 20
    assert service["RestartPreventExitStatus"] == "2"
    if (verify := shutil.which("systemd-analyze")) is not None:
        here = tmp_path / UNIT.name
        here.write_text(UNIT.read_text().replace(program, "/bin/true"))
        done = subprocess.run([verify, "verify", here], capture_output=True, text=True, check=False, timeout=60)
        assert UNIT.name not in done.stderr, done.stderr


@pytest.mark.processes
def test_the_service_of_a_group_can_be_used(tmp_path: Path) -> None:
    text = UNIT.with_name("trunkline-group@.service").read_text()
    drain = int(text.partition("--drain-seconds ")[2].split()[0])
    assert int(text.partition("TimeoutStopSec=")[2].split()[0]) >= drain + 20
    if (verify := shutil.which("systemd-analyze")) is not None:
        here = tmp_path / "trunkline-group@7400.service"
        here.write_text(text.replace("/opt/trunkline/bin/trunkline", "/bin/true"))
        done = subprocess.run([verify, "verify", here], capture_output=True, text=True, check=False, timeout=60)
        assert here.name not in done.stderr, done.stderr
