"""What can be refused before a process starts is refused, in one clear sentence."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trunkline.deploy.config import models
from trunkline.deploy.config.disk_folders import DiskFolders, disk_folders
from trunkline.deploy.config.machine import open_listener
from trunkline.deploy.config.option_values import DiskOption, format_bytes
from trunkline.deploy.config.settings import POLICIES, ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.run_folder import Running
from trunkline.deploy.supervisor.serve import Growing, children, plan_cluster
from trunkline.router.config import RouterConfig, TenantLimits
from trunkline.router.membership.static_source import read_members
from trunkline.router.routing.policies import POLICIES as POLICY_RULES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 0}, "--groups is 0"),
        ({"groups": 100_000}, "--groups is 100000; allowed are 1 to 256"),
        ({"tp": 0}, "--tp is 0"),
        ({"tp": 3}, "3 ranks"),
        ({"dtype": "int8"}, "--dtype"),
        ({"kv_dtype": "bfloat16"}, "--kv-dtype"),
        ({"kv_dtype": "fp8_e5m2"}, "--kv-dtype .*auto, int8, fp8"),
        ({"device": "tpu"}, "--device"),
        ({"kernels": "magic"}, "--kernels"),
        ({"kernels": "cuda", "device": "cpu"}, "--kernels is cuda, but the model runs on device cpu"),
        ({"port": 70000}, "--port"),
        ({"chunk_size": 0}, "--chunk-size"),
        ({"token_budget": 8, "max_batch": 8}, "--token-budget"),
        ({"drain_seconds": -1.0}, "--drain-seconds"),
        ({"max_context": 1}, "--max-context"),
        ({"max_context": 10**6}, "at most"),
        ({"kv_memory_bytes": 100}, "--kv-memory"),
        ({"kv_memory_bytes": 1 << 50}, "2048 TiB in all; this machine has"),
        ({"model": ""}, "MODEL is empty"),
        ({"model": "/nonexistent/folder"}, "no folder"),
        ({"model": __file__}, "is a file"),
        ({"log_level": "loud"}, "--log-level"),
        ({"tier_policy": "clock"}, "--tier-policy is 'clock'; allowed are predicted, look-ahead, lru, fifo"),
        ({"role": "prefill,cook"}, "--role: 'cook' is no role; allowed are both, prefill, decode"),
        ({"role": "prefill,decode", "peers": "off"}, "--role has a prefill group, but with --peers off"),
        ({"session_ttl": -1.0}, "--session-ttl is -1; allowed are 0"),
        ({"session_ttl": float("nan")}, "--session-ttl is nan"),
        ({"remote_tier": "http://h"}, "--remote-tier is 'http://h'; allowed are redis://"),
        ({"remote_tier": "redis://h", "host_tier_bytes": 0}, "--remote-tier is given, but --host-tier is 0"),
        ({"remote_tier": "redis://h", "prefix_cache": False}, "--remote-tier keeps KV.*--no-prefix-cache"),
        ({"disk_tier": DiskOption(1 << 30), "host_tier_bytes": 0}, "--disk-tier is given, but --host-tier is 0"),
        ({"disk_tier": DiskOption(1 << 30), "prefix_cache": False}, "--disk-tier keeps KV.*--no-prefix-cache"),
        ({"remote_tier": "redis://h", "host_tier_bytes": 9}, "--host-tier is 9 B; .* where two chunks of"),
        ({"host_tier_bytes": 9}, "--host-tier is 9 B; a chunk of 64 tokens takes .* or 0 for none"),
        ({"host_tier_bytes": 1 << 50}, "--host-tier is 1024 TiB .* 2048 TiB in all; this machine has"),
        ({"disk_tier": DiskOption(1 << 10)}, "--disk-tier is 1 KiB; 2 workers with two chunks"),
        ({"records": "http://:secret@h"}, "--records is 'http://:.*@h'. The URL of a record store is sqlite:PATH"),
        ({"records": "sqlite::memory:", "routers": 2}, "which each process has for itself, but --routers is 2"),
        ({"tenants": "nowhere.json"}, "--tenants: .*nowhere.json: No such file"),
        ({"tenant_header": "X Tenant"}, "--tenant-header is 'X Tenant'"),
        ({"idempotency_ttl": 0.5}, "--idempotency-ttl is 0.5"),
        ({"idempotency_ttl": float("nan")}, "--idempotency-ttl is nan"),
        ({"idempotency_ttl": 1e6}, "--idempotency-ttl is 1e.06; allowed are 0"),
        ({"host": "203.0.113.7", "allow_anonymous": True}, "cannot listen.*--host must be an address"),
    ],
)
def test_impossible_settings(change: dict[str, object], message: str) -> None:
    settings = dataclasses.replace(ServeSettings(port=0), **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        plan_cluster(settings)


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="safetensors"):
        models.resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(UserError, match="architecture"):
        plan_cluster(ServeSettings(model=str(tmp_path), port=0))


def test_what_cannot_be_read_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("a" * 5000, f"{'a' * 5000}/b", f"{'b' * 5000}.gguf"):
        with pytest.raises(UserError, match=r"MODEL is '[ab]{200}', which cannot be read: File name too long"):
            plan_cluster(ServeSettings(model=model, port=0))
    refused = PermissionError(errno.EACCES, "Permission denied", "tokenizer.json")

    def refuse(*_: object) -> None:
        raise refused

    monkeypatch.setattr("trunkline.deploy.supervisor.configs.tokenizer_digest", refuse)
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read: Permission denied"):
        plan_cluster(ServeSettings(port=0))
    monkeypatch.setattr(models, "_checked", refuse)
    with pytest.raises(UserError, match="which cannot be read: Permission denied"):
        models.resolve(str(tmp_path))


@pytest.mark.processes
def test_an_unreachable_hub_is_one_clear_error(tmp_path: Path) -> None:
    """In a process of its own: the hub client reads its environment when it is imported."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "trunkline.deploy.cli.app", "serve", "nobody/nothing"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "HF_HUB_OFFLINE" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_names_every_process(tmp_path: Path) -> None:
    plan = plan_cluster(ServeSettings(port=0, groups=2, tp=2))
    specs = children(plan, tmp_path)
    names = "worker-0.0 worker-0.1 worker-1.0 worker-1.1 controller-0 controller-1 router"
    assert " ".join(spec.member.name for spec in specs) == names
    for spec in specs:
        # What `ps` shows names the role, before the process has set its title and after.
        assert spec.argv[-3:-1] == (f"trunkline.{spec.member.role}", "--config")
        assert Path(spec.argv[-1]) == tmp_path / f"{spec.member.name}.json"
    assert plan.dtype == "float32"
    assert plan.url == f"http://127.0.0.1:{plan.port}"


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    """What each process is told, by name."""
    return {path.stem: json.loads(path.read_bytes()) for path in folder.glob("*.json")}


def test_routers_share_what_the_supervisor_listens_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_listener("127.0.0.1", 0) as listener:
        monkeypatch.chdir(tmp_path)
        Path("tenants.txt").write_text('{"tenants": {"a": {"requests": 1}}}')
        settings = ServeSettings(
            port=0,
            groups=2,
            tp=1,
            routers=2,
            policy="least-loaded",
            resume_seconds=7.0,
            tenants="tenants.txt",
            tenant_limits=TenantLimits(requests=4),
            tenant_header="X-Tenant",
            idempotency_ttl=60.0,
            file_bytes_max=4096,
            prompt_memory_bytes=8192,
        )
        plan = plan_cluster(settings, listener=listener)
        assert plan.port == listener.getsockname()[1]
        specs = {spec.member.name: spec for spec in children(plan, tmp_path)}
        assert specs["router-0"].descriptors == specs["router-1"].descriptors == (listener.fileno(),)
        assert specs["controller-0"].descriptors == ()
        told = configs(tmp_path)
        assert told["router-0"] | {"number": 1} == told["router-1"]
        router = told["router-0"]
        assert (router["listen_fd"], router["policy"], router["routers"]) == (listener.fileno(), "least-loaded", 2)
        assert router["tenants"] == str(tmp_path / "tenants.txt"), "wherever the router runs"
        assert router["tenant_limits"]["requests"] == 4
        said = (router[name] for name in ("resume_seconds", "tenant_header", "idempotency_ttl_seconds"))
        assert (*said, router["file_bytes_max"]) == (7.0, "X-Tenant", 60.0, 4096)
        assert router["prompt_memory_bytes"] == 8192
        assert router["members"] == f"static:{tmp_path / 'members.json'}"
        Growing(plan, tmp_path, DiskFolders(), Running(plan.port, plan.url, plan.title, 1)).publish((0, 1))
        groups = read_members(tmp_path / "members.json")
        for number in range(2):
            group = groups[str(number)]
            controller = told[f"controller-{number}"]
            assert (controller["router_endpoint"], controller["events_endpoint"]) == (group.address, group.events)
            assert controller["status_path"] == router["status_path"] == str(tmp_path / "status")


def test_a_group_that_was_here_before_can_be_started_again(tmp_path: Path) -> None:
    plan = plan_cluster(ServeSettings(port=0, groups=2, tp=1))
    first = {spec.member: spec for spec in children(plan, tmp_path)}
    growing = Growing(plan, tmp_path, DiskFolders(), Running(plan.port, plan.url, plan.title, 1))
    told = configs(tmp_path)
    again = growing.grow(2, [1])
    assert [spec.member.name for spec in again] == ["worker-1.0", "controller-1"]
    assert all(first[spec.member] == spec for spec in again), "routers reach it where they did"
    assert configs(tmp_path) == told
    further = [spec.member.name for spec in growing.grow(3, [2])]
    assert further == ["worker-2.0", "controller-2"] == [spec.member.name for spec in growing.grow(3, [2])]


def test_policies_are_those_of_the_router() -> None:
    assert tuple(POLICY_RULES) == POLICIES


@pytest.mark.parametrize(
    ("role", "roles"),
    [
        ("both", ["both", "both", "both"]),
        ("prefill,decode", ["prefill", "decode", "decode"]),
        ("prefill,both,decode,both", ["prefill", "both", "decode"]),
    ],
)
def test_each_group_is_told_its_role(tmp_path: Path, role: str, roles: list[str]) -> None:
    plan = plan_cluster(ServeSettings(port=0, groups=3, tp=1, role=role, disk_tier=DiskOption(0)))
    with disk_folders(plan.disk) as disk:
        children(plan, tmp_path, disk)
    told = configs(tmp_path)
    assert [told[f"controller-{group}"]["role"] for group in range(3)] == roles


def test_every_process_is_told_of_its_tiers(tmp_path: Path) -> None:
    url = "redis://:secret@127.0.0.1:6379/0"
    option = DiskOption(1 << 30, tmp_path / "kv")
    settings = ServeSettings(port=0, groups=2, tp=2, disk_tier=option, remote_tier=url, session_ttl=60.0)
    plan = plan_cluster(settings)
    assert not (tmp_path / "kv").exists()  # planning touches nothing
    folder = tmp_path / "run"
    folder.mkdir()
    with disk_folders(plan.disk) as disk:
        children(plan, folder, disk)
        line = plan.describe_tiers(disk)
    told = configs(folder)
    assert told["router"]["records"] == url, "the server is there already"
    base = tmp_path / "kv" / plan.tier_fingerprint
    for group in range(2):
        controller = told[f"controller-{group}"]
        assert controller["index_path"] == str(base / f"group-{group}" / "index.sqlite")
        assert controller["tier_fingerprint"] == plan.tier_fingerprint
        assert (controller["remote_tier"], controller["session_ttl_s"]) == (True, 60.0)
        assert (controller["tier_policy"], controller["positions_shift"]) == ("predicted", True)
        for rank in range(2):
            worker = told[f"worker-{group}.{rank}"]
            assert worker["disk_path"] == str(base / f"group-{group}" / f"rank-{rank}.slab")
            assert worker["disk_bytes"] == disk.rank_bytes > (1 << 30) // 4 * 0.9
            assert (worker["remote_url"], worker["tier_fingerprint"]) == (url, plan.tier_fingerprint)
    # Controllers do not need the password, no other user can read the files, and people are not shown it.
    assert [name for name, config in told.items() if "secret" in str(config)] == [
        name for name in told if not name.startswith("controller")
    ]
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.json")} == {0o600}
    assert line == (
        f"host 1 GiB each · disk {format_bytes(disk.rank_bytes)} each in {tmp_path}/kv · "
        "remote redis://:***@127.0.0.1:6379/0"
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prefix_cache": False}, "none"),
        ({"host_tier_bytes": 0}, "none"),
        ({"host_tier_bytes": 600 << 10, "dtype": "float32"}, "host 600 KiB each"),  # one chunk
        ({"disk_tier": DiskOption(0)}, "host 1 GiB each"),
    ],
)
def test_the_disk_tier_of_the_default_is_off_where_it_cannot_be(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    plan = plan_cluster(dataclasses.replace(ServeSettings(port=0, tp=1), **change))
    assert plan.disk is None
    with disk_folders(plan.disk) as disk:
        children(plan, tmp_path, disk)
    told = configs(tmp_path)
    assert (told["controller"]["index_path"], told["worker-0"]["disk_path"]) == ("", "")
    assert plan.describe_tiers(disk) == expected


def test_who_has_no_home_is_told_why_there_is_no_disk_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    plan = plan_cluster(ServeSettings(port=0, tp=1))
    with disk_folders(plan.disk) as disk:
        assert (
            plan.describe_tiers(disk)
            == "host 1 GiB each · no disk, as there is no home folder (--disk-tier PATH:SIZE)"
        )


def test_the_disk_tier_is_on_by_default(cache_home: Path) -> None:
    plan = plan_cluster(ServeSettings(port=0, tp=1))
    with disk_folders(plan.disk) as disk:
        assert disk.groups == [cache_home / "trunkline" / "kv" / plan.tier_fingerprint / "group-0"]


def test_kv_of_other_computations_has_other_names_and_folders(tmp_path: Path) -> None:
    """Rounded weights give other KV; the rest makes other bytes of it."""
    plans = [
        plan_cluster(ServeSettings(port=0, **change))
        for change in (
            {},
            {"quantization": "int8"},
            {"dtype": "bfloat16"},
            {"kv_dtype": "int8"},
            {"chunk_size": 32},
            {"tp": 1},
            {"max_context": 128, "groups": 2, "max_batch": 8},  # no difference
        )
    ]
    assert len({plan.tier_fingerprint for plan in plans}) == len({plan.exchange_fingerprint for plan in plans}) + 1
    assert len({plan.tier_fingerprint for plan in plans}) == 6
    assert plans[0].tier_fingerprint == plans[-1].tier_fingerprint
    assert plans[0].fingerprint != plans[1].fingerprint  # part of the chunks' names


@pytest.mark.parametrize(
    "name",
    [
        *("a\x1b[31mred", "a\nb", "a\tb", "\x7f", "\x9b31m", "a\u202eb", "a\u2028b", "\x00", "a\u200bb"),
        *(" a", "a ", " ", "x" * 257, "\ud800"),
    ],
)
def test_names_that_would_reach_terminals_are_printable(name: str, tmp_path: Path) -> None:
    """Control characters could say anything there, or hide what was said."""
    with pytest.raises(UserError, match="--served-model-name") as caught:
        ServeSettings(served_model_name=name).validate()
    assert str(caught.value).isprintable(), "nor does the error itself have them"
    assert len(str(caught.value)) < 300
    with pytest.raises(ValueError, match="model name"):
        RouterConfig(
            model_path=str(models.DEMO_FOLDER), controllers=["ipc://x"], served_model_name=name
        ).validate()
    folder = tmp_path / name.strip()[:200] if name.isascii() and "\0" not in name and name.strip() else None
    if folder is not None and not folder.name.isprintable():
        folder.mkdir()
        with pytest.raises(UserError, match="please give --served-model-name") as caught:
            models.default_name(str(folder))
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["mine", "org/model:tag", "Qwen2.5 7B (int8)", "模型-é😀", "x" * 256])
def test_printable_names_are_taken(name: str) -> None:
    ServeSettings(served_model_name=name).validate()
    RouterConfig(model_path=str(models.DEMO_FOLDER), controllers=["ipc://x"], served_model_name=name).validate()


def test_several_names() -> None:
    settings = ServeSettings(served_model_name="mine,gpt-4o,claude-*")
    settings.validate()
    assert settings.served_names == ("mine", "gpt-4o", "claude-*")
    assert models.main_name(settings) == "mine"
    assert models.main_name(ServeSettings()) == "trunkline-demo"
    for wrong in ("claude-*", "a,,b", "a, b", "a,"):
        with pytest.raises(UserError, match="--served-model-name"):
            ServeSettings(served_model_name=wrong).validate()
