"""`--tenants`, `--tenant-limits`, `--tenant-header`, `--idempotency-ttl`: what they say, and who is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trunkline.deploy.config.disk_folders import disk_folders
from trunkline.deploy.config.option_values import parse_tenant_limits
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.serve import children, plan_cluster
from trunkline.router.config import TenantLimits, load_config


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", TenantLimits()),
        ("requests=8", TenantLimits(requests=8)),
        (" requests = 8 , tokens_per_minute=1000,", TenantLimits(requests=8, tokens_per_minute=1000)),
        ("requests_per_minute=60,priority=-3", TenantLimits(requests_per_minute=60, priority=-3)),
    ],
)
def test_limits(text: str, limits: TenantLimits) -> None:
    assert parse_tenant_limits(text) == limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requests", "requests is a whole number, not ''"),
        ("requests=many", "requests is a whole number, not 'many'"),
        ("requests=1.5", "not '1.5'"),
        ("rpm=60", "NAME=NUMBER.*requests_per_minute"),
        ("requests=1,requests=2", "once at most"),
        ("requests=0", "at least 1, or left out for no limit"),
        ("priority=4294967296", "32-bit"),
    ],
)
def test_what_are_no_limits(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_tenant_limits(text)


def test_routers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tenants.json").write_text(json.dumps({"tenants": {"a": {"requests": 1}}}))
    settings = ServeSettings(
        port=0,
        routers=2,
        tenants="tenants.json",
        tenant_limits=TenantLimits(requests=4),
        tenant_header="X-Tenant",
        idempotency_ttl=60.0,
    )
    settings.validate()
    plan = plan_cluster(settings)
    with disk_folders(plan.disk) as disk:
        specs = children(plan, tmp_path, disk)
    paths = set(tmp_path.glob("router*.json"))
    assert len(paths) == 2
    assert len(specs) > 2
    for path in paths:
        config = load_config(str(path))
        assert config.tenants == str(tmp_path / "tenants.json"), "wherever the router runs"
        assert config.tenant_limits == TenantLimits(requests=4)
        assert config.tenant_header == "X-Tenant"
        assert config.idempotency_ttl_seconds == 60
        assert config.routers == 2
