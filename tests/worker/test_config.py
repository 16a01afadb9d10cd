"""A rank's configuration: what is read from its file, and the sentence for each thing that cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trunkline.worker.config import WorkerConfig, load_config
from trunkline.worker.errors import WorkerConfigError

GOOD: dict[str, Any] = {
    "model": "m",
    "plan_endpoint": "ipc://a",
    "report_endpoint": "ipc://b",
    "pool_blocks": 9,
}


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD))
    assert load_config(path) == WorkerConfig(**GOOD)
    with pytest.raises(WorkerConfigError, match="No such file"):
        load_config(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1}, r"rank is 1; it must be in \[0, 1\)"),
        ({"tp": 2}, "need a rendezvous"),
        ({"device": "tpu"}, "allowed: cpu, cuda"),
        ({"device": "cuda"}, "gpu is not given"),
        ({"gpu": -1}, "gpu is -1"),
        ({"gpu_memory_fraction": 0}, "gpu_memory_fraction is 0"),
        ({"gpu_memory_fraction": 1.01}, "at most 1"),
        ({"dtype": "int8"}, "allowed: float32"),
        ({"kv_dtype": "bfloat16"}, "allowed: auto, int8, fp8"),
        ({"chunk_size": 0}, "1 to 1024 tokens"),
        ({"pool_blocks": 0}, "pool_blocks or kv_memory_bytes"),
        ({"threads": 0}, "threads is 0"),
        ({"colour": "red"}, "colour"),
        ({"model": 3}, "Expected `str`"),
        ({"disk_bytes": -1}, "disk_bytes is -1"),
        ({"disk_bytes": 1, "host_memory_bytes": 1, "tier_fingerprint": "00"}, "no disk_path"),
        ({"disk_bytes": 1, "disk_path": "x", "tier_fingerprint": "00"}, "needs a host pool above it"),
        ({"remote_url": "redis://h", "tier_fingerprint": "00"}, "needs a host pool above it"),
        ({"remote_url": "redis://h", "host_memory_bytes": 1}, "needs a tier_fingerprint"),
        ({"tier_fingerprint": "xy"}, "tier_fingerprint is 'xy'"),
        ({"tier_fingerprint": "00" * 65}, "up to 64 pairs"),
        ({"remote_ttl_s": -1.0}, "remote_ttl_s is -1.0"),
        ({"io_threads": 0}, "io_threads is 0"),
        ({"host_memory_bytes": -1}, "host_memory_bytes is -1"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(WorkerConfigError, match=message):
        load_config(path)
