"""Two tenants of one group: many requests of one delay a request of the other by little."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from cluster.harness import Cluster

from trunkline.router.tenancy.auth import hash_key

pytestmark = pytest.mark.processes

OPTIONS = ("--groups", "1", "--tp", "1", "--threads", "1", "--kv-memory", "32MiB", "--max-batch", "2")
KEYS = {"many": "tl-a-key-of-many-requests", "few": "tl-a-key-of-few-requests"}
REQUESTS = 60


def test_a_tenant_does_not_wait_for_all_requests_of_another(tmp_path: Path) -> None:
    """Counted in answers, not in seconds: when the late request is answered, most of the others still wait."""
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenants": {name: {"keys": [hash_key(key)]} for name, key in KEYS.items()}}))
    tenants.chmod(0o600)
    ended, begun = [0], threading.Event()

    def ask(http: httpx.Client, tenant: str, number: int) -> None:
        body = {"prompt": f"{number} of {tenant}", "max_tokens": 40, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        if tenant == "many":
            ended[0] += 1
            begun.set()

    with Cluster(*OPTIONS, "--tenants", str(tenants)) as cluster:
        limits = httpx.Limits(max_connections=REQUESTS + 1)
        with (
            httpx.Client(base_url=cluster.url, timeout=300.0, limits=limits) as http,
            ThreadPoolExecutor(REQUESTS) as pool,
        ):
            crowd = [pool.submit(ask, http, "many", number) for number in range(REQUESTS)]
            begun.wait()
            ask(http, "few", 0)
            answered = ended[0]
            for one in crowd:
                one.result()
    assert answered < REQUESTS // 2
