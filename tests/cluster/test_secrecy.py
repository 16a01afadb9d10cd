"""What a cluster leaves on the disk, and who gets in with which key: real processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from cluster.harness import Cluster, wait_for

from trunkline.deploy.supervisor.run_folder import client_headers
from trunkline.router.tenancy.auth import hash_key

pytestmark = pytest.mark.processes

KEY = "tl-key-of-alice-in-these-tests"
PROMPT = "zebra crossing in the prompt"


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with keys, whose operator's umask hides nothing."""
    tenants = tmp_path_factory.mktemp("keys") / "tenants.json"
    tenants.write_text(json.dumps({"tenants": {"alice": {"keys": [hash_key(KEY)]}}}))
    tenants.chmod(0o644)
    before = os.umask(0)
    try:
        options = ("--tenants", str(tenants), "--disk-tier", "64MiB", "--tp", "1", "--log-level", "debug")
        cluster = Cluster(*options)
    finally:
        os.umask(before)
    with cluster:
        yield cluster


def ask(cluster: Cluster, **headers: str) -> httpx.Response:
    body = {"prompt": PROMPT * 20, "max_tokens": 4}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_files_are_for_their_owner(careless: Cluster) -> None:
    assert ask(careless, Authorization=f"Bearer {KEY}").status_code == 200
    headers = {"Authorization": f"Bearer {KEY}"}
    session = httpx.post(f"{careless.url}/v1/sessions", json={}, headers=headers, timeout=60)
    assert session.status_code == 200
    wait_for(careless.is_idle, 10)
    found: dict[Path, int] = {}
    for path in careless.folder.rglob("*"):
        with suppress(FileNotFoundError):  # written under another name first
            found[path] = path.lstat().st_mode
    names = {path.name for path in found}
    assert {"admin.key", "router.json", "cluster.json", "tenants", "records.sqlite"} <= names
    assert any(name.endswith(".slab") for name in names)
    own = {careless.folder / "log", careless.folder / "cache", careless.temporary}
    for path, mode in found.items():
        if path not in own:
            assert not mode & (stat.S_IRWXG | stat.S_IRWXO), f"{path} has mode {stat.filemode(mode)}"


def test_keys_of_a_whole_cluster(careless: Cluster) -> None:
    assert ask(careless).status_code == 401
    assert ask(careless, Authorization="Bearer none").status_code == 401
    assert ask(careless, **careless.admin_headers).status_code == 200
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{careless.url}/flush_cache", headers=headers, timeout=60).status_code == 403
    told = subprocess.run(
        [sys.executable, "-m", "trunkline.deploy.cli.app", "ui", "--port", careless.url.rsplit(":", 1)[1]],
        env={**os.environ, **careless.folders},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == f"{careless.url}/ui#key={careless.admin_key}"
    assert client_headers("http://192.0.2.1:8000") == {}, "the key goes to this machine's servers only"


def test_its_log_has_no_secrets(careless: Cluster) -> None:
    for secret in (KEY, careless.admin_key, PROMPT, hash_key(KEY)):
        assert secret not in careless.log
