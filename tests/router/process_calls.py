"""Router processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from router.fake_controller import FakeController
from router.harness import DEMO_MODEL, free_port, wait_until

SHORT_LEASES = """
from trunkline.router.tasks import task_lease
task_lease.LEASE_SECONDS = 2.0
"""
"""A prelude: what a router that dies had begun goes on elsewhere two seconds later, not ten."""


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def router_process(
    place: Path, fake: FakeController, *, prelude: str = "", **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A router process, ready; killed in the end if it is still there. `prelude`: Python that it runs first."""
    port = free_port()
    fields = {"model_path": str(DEMO_MODEL), "controllers": [fake.endpoint], "port": port, **options}
    config = place / "router.json"
    config.write_bytes(msgspec.json.encode(fields))
    script = f"import sys\n{prelude}\nfrom trunkline.router.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", script, "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: healthy(f"http://127.0.0.1:{port}") or process.poll() is not None)
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            assert process.stderr is not None
            process.stderr.read()
