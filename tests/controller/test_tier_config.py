"""What a controller is told of tiers: what cannot work is refused, the rest reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from trunkline.controller.config import ControllerConfig
from trunkline.controller.engine_config import ConfigError, EngineConfig

ENDPOINTS: dict[str, Any] = {
    name: f"ipc:///run/{name}" for name in ("plan_endpoint", "report_endpoint", "router_endpoint")
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"disk_slots": -1}, "disk_slots is -1"),
        ({"disk_slots": 4}, "no host pool"),
        ({"remote": True}, "no host pool"),
        ({"remote": True, "host_slots": 4, "prefix_cache": False}, "without the prefix cache"),
        ({"tier_policy": "clock"}, "tier_policy is 'clock'; allowed are predicted, look-ahead, lru, fifo"),
        ({"session_ttl_s": -1.0}, "session_ttl_s is -1.0"),
        ({"session_ttl_s": float("inf")}, "session_ttl_s is inf"),
    ],
)
def test_limits_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(num_blocks=8, **change).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_path": "/kv/index.sqlite"}, "no tier_fingerprint"),
        ({"tier_fingerprint": "xyz"}, "tier_fingerprint 'xyz' is not hexadecimal"),
        ({"index_path": "/i", "tier_fingerprint": "00", "prefix_cache": False}, "without the prefix cache"),
        ({"remote_tier": True, "prefix_cache": False}, "without the prefix cache"),
        ({"tier_policy": ""}, "tier_policy is ''"),
    ],
)
def test_controllers_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ControllerConfig(**ENDPOINTS, **change).validate()


def test_the_engine_is_told_what_the_workers_have() -> None:
    config = ControllerConfig(**ENDPOINTS, tier_policy="lru", session_ttl_s=60.0, positions_shift=False)
    config.validate()
    limits = config.engine(num_blocks=8, host_slots=4, disk_slots=16, remote=True)
    limits.validate()
    assert (limits.host_slots, limits.disk_slots, limits.remote) == (4, 16, True)
    assert (limits.tier_policy, limits.session_ttl_s, limits.positions_shift) == ("lru", 60.0, False)
