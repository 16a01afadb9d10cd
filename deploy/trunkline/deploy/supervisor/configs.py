"""The configuration of each process of a cluster, or of the part that runs here, from its plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from trunkline.controller.config import ControllerConfig
from trunkline.deploy.config.disk_folders import INDEX_NAME, DiskFolders
from trunkline.deploy.config.option_values import keys_needed, server_key_digest
from trunkline.deploy.config.plans import ClusterPlan, Meeting, local_endpoint
from trunkline.deploy.supervisor.members import Member, Role
from trunkline.deploy.supervisor.run_folder import MEMBERS_FILE, STATUS_SOCKET, admin_key_digest
from trunkline.kvstore.chunk_format import type_name
from trunkline.kvstore.fingerprint import tokenizer_digest
from trunkline.router.config import ModelConfig, RouterConfig
from trunkline.worker.config import WorkerConfig

Config = RouterConfig | ControllerConfig | WorkerConfig

# Settings that a process gets as they were given, under their own names.
_OF_ROUTERS: Final = """policy routers host resume_seconds drain_seconds tool_call_parser reasoning_parser
    tenant_limits tenant_header allow_anonymous trace_sample records_tenant_bytes file_bytes_max
    prompt_memory_bytes lora_updates"""
_OF_CONTROLLERS: Final = """chunk_size token_budget max_waiting prefix_cache preemption target_itl_ms tier_policy
    speculation drain_seconds"""
_OF_WORKERS: Final = "kernels chunk_size"


def configs_of(plan: ClusterPlan, folder: Path, disk: DiskFolders) -> dict[Member, Config]:
    """Return the configuration of each process that is to run here.

    Args:
        folder: The run folder.
        disk: Where the disk tier is.
    """
    settings, node = plan.settings, plan.node
    configs: dict[Member, Config] = {}
    if node is None or node.ranks:
        disks = (disk, *(disk.others or [DiskFolders()] * len(plan.others)))
        for each, its_disk in zip(plan.models, disks, strict=True):
            configs |= _group_configs(each, folder, its_disk, is_one=len(plan.groups) == 1)
    if (node is None or node.is_router) and not plan.first_group:
        router = _router_config(plan, folder)
        for number in range(settings.routers):
            name = f"router-{number}" if settings.routers > 1 else "router"
            configs[Member(name, Role.ROUTER, -1)] = msgspec.structs.replace(router, number=number)
    return configs


def _group_configs(plan: ClusterPlan, folder: Path, disk: DiskFolders, *, is_one: bool) -> dict[Member, Config]:
    """Return the configurations of a model's groups.

    Args:
        is_one: Whether the cluster has one group, so that its processes need no numbers.
    """
    node = plan.node
    configs: dict[Member, Config] = {}
    for index in range(plan.settings.groups):
        group = plan.first_group + index
        meeting, suffix = plan.meeting(folder, group), "" if is_one else f"-{group}"
        if node is None or node.listen is not None:
            member = Member(f"controller{suffix}", Role.CONTROLLER, group)
            configs[member] = _controller_config(plan, group, meeting, folder, disk)
        configs.update(_worker_configs(plan, group, meeting, folder, disk, suffix))
    return configs


def _as_given(plan: ClusterPlan, names: str) -> dict[str, Any]:
    """Return some settings by their names, and what processes of every role are told alike."""
    settings, node = plan.settings, plan.node
    return {
        **{name: getattr(settings, name) for name in names.split()},
        "max_context": plan.max_context,
        "parent_pid": os.getpid(),
        "log_level": settings.log_level,
        "log_format": "json",
        "otlp_endpoint": settings.otlp_endpoint,
        "wire_keys": node.wire_keys if node else "",
        "plain_tcp": node.plain_tcp if node else False,
    }


def _router_config(plan: ClusterPlan, folder: Path) -> RouterConfig:
    settings, node = plan.settings, plan.node
    assert plan.records is not None
    controllers = node.controllers if node else ()
    return RouterConfig(
        **_as_given(plan, _OF_ROUTERS),
        model_path=str(plan.folder),
        controllers=[address.endpoint(0) for address in controllers],
        events=[address.endpoint(1) for address in controllers],
        members=node.members if node else f"static:{folder / MEMBERS_FILE}",
        metrics_path=str(folder / "metrics"),
        tenants=str(Path(settings.tenants).absolute()) if settings.tenants else "",
        tenants_kept=str(folder / "tenants") if settings.tenants else "",
        api_key_digest=server_key_digest(settings.api_key_file),
        admin_key_digest=admin_key_digest(folder),
        needs_keys=keys_needed(settings.tenants, settings.api_key_file),
        allowed_hosts=list(settings.allowed_hosts),
        cors_origins=list(settings.cors_origins),
        show_lines=list(settings.show_lines),
        idempotency_ttl_seconds=settings.idempotency_ttl,
        records=plan.records.url_in(folder),
        records_bytes_max=settings.records_max_bytes,
        port=plan.port,
        listen_fd=plan.listen_fd,
        status_path=str(folder / STATUS_SOCKET),
        served_model_name=plan.model_name,
        served_model_aliases=plan.names[1:],
        model_is_named=bool(settings.served_model_name),
        models=[
            *(ModelConfig(model_path=str(folder), names=[name]) for name, folder in (node.models if node else ())),
            *(_model_config(other) for other in plan.others),
        ],
    )


def _model_config(plan: ClusterPlan) -> ModelConfig:
    """Return what routers are told of a further model."""
    return ModelConfig(
        model_path=str(plan.folder),
        names=plan.names,
        tool_call_parser=plan.settings.tool_call_parser,
        reasoning_parser=plan.settings.reasoning_parser,
        max_context=plan.max_context,
    )


def _controller_config(
    plan: ClusterPlan, group: int, meeting: Meeting, folder: Path, disk: DiskFolders
) -> ControllerConfig:
    settings = plan.settings
    kept = disk.folder_of(group - plan.first_group)
    return ControllerConfig(
        **_as_given(plan, _OF_CONTROLLERS),
        group=group,
        tp=settings.ranks,
        plan_endpoint=meeting.plan,
        report_endpoint=meeting.report,
        router_endpoint=meeting.router,
        events_endpoint=meeting.events,
        local_endpoint=local_endpoint(folder) if plan.node else "",
        status_path=str(folder / STATUS_SOCKET),
        model_fingerprint=plan.fingerprint,
        member=plan.node.member_id if plan.node else str(group),
        model_name=plan.model_name,
        tokenizer_digest=tokenizer_digest(plan.folder),
        weights_digest=plan.weights,
        model_is_named=bool(settings.served_model_name),
        dtype=type_name(plan.dtype, settings.kv_dtype),
        max_rows=settings.max_batch,
        index_path=str(kept / INDEX_NAME) if kept else "",
        tier_fingerprint=plan.tier_fingerprint if kept or settings.remote_tier else "",
        remote_tier=bool(settings.remote_tier),
        peers=plan.has_peers,
        role=settings.role_of(group - plan.first_group),
        session_ttl_s=settings.session_ttl,
        positions_shift=plan.positions_shift,
        vocab_size=plan.vocab_size,
        adapters=dict(settings.adapters),
        lora_rank_max=settings.max_lora_rank,
    )


def _worker_configs(
    plan: ClusterPlan, group: int, meeting: Meeting, folder: Path, disk: DiskFolders, suffix: str
) -> Iterator[tuple[Member, WorkerConfig]]:
    settings, node = plan.settings, plan.node
    kept = disk.folder_of(group - plan.first_group)
    is_spread = node is not None and node.is_spread(settings.ranks)
    for here, rank in enumerate(node.ranks if node else range(settings.ranks)):
        export, export_host = plan.export_of(folder, group, rank, here)
        yield (
            Member(f"worker{suffix}{'.' if suffix else '-'}{rank}", Role.WORKER, group),
            WorkerConfig(
                **_as_given(plan, _OF_WORKERS),
                model=str(plan.folder),
                rank=rank,
                tp=settings.ranks,
                group=f"group-{group}",
                device=plan.device,
                gpu=plan.placement.gpu(group - plan.first_group, here),
                gpu_memory_fraction=plan.placement.fraction,
                dtype=plan.dtype,
                kv_dtype=settings.kv_dtype,
                window_share=settings.window_share,
                expert_parallel=settings.ep == "on",
                cuda_graphs=settings.cuda_graphs == "on",
                invariant_rows=settings.speculation != "off",  # so that drafts change no bit of what rows compute
                quantisation="int8" if settings.quantization == "int8" else "",
                kv_memory_bytes=settings.kv_memory_per_worker(plan.device),
                host_memory_bytes=settings.host_tier_per_worker(plan.device),
                disk_path=str(kept / f"rank-{rank}.slab") if kept else "",
                disk_bytes=disk.rank_bytes if kept else 0,
                remote_url=settings.remote_tier,
                remote_ttl_s=settings.session_ttl,
                tier_fingerprint=plan.tier_fingerprint if kept or settings.remote_tier else "",
                exchange_fingerprint=plan.exchange_fingerprint,
                export=export,
                export_host=export_host,
                plan_endpoint=meeting.plan_at,
                report_endpoint=meeting.report_at,
                rendezvous=meeting.rendezvous,
                is_spread=is_spread,
                collectives="gloo" if is_spread and plan.device == "cpu" else "auto",
                model_fingerprint=plan.fingerprint,
                status_path=str(folder / STATUS_SOCKET) if node and node.leader else "",
                threads=settings.threads_per_worker(),
            ),
        )


def expected_folders(plan: ClusterPlan) -> DiskFolders:
    """Return the folders that the disk tier gets if no other server uses them, without making any: `check_configs`
    checks the processes' configurations with them. The size of a slab in it is a placeholder."""
    others = [expected_folders(other) for other in plan.others]
    if plan.disk is None:
        return DiskFolders(others=others)
    return DiskFolders([plan.disk.group_folder(group) for group in range(plan.settings.groups)], 1, others=others)
