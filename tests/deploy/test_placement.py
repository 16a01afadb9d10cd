"""Machines with 0, 1, 2 and 8 GPUs: how many workers a group has, who gets which GPU, what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import typer
from safetensors.torch import save_file

from trunkline.deploy.cli.app import app
from trunkline.deploy.config import machine, models
from trunkline.deploy.config.disk_folders import DiskFolders
from trunkline.deploy.config.node_settings import Kind, NodeSettings
from trunkline.deploy.config.option_values import DiskOption
from trunkline.deploy.config.plans import ClusterPlan, default_tp, place, settle
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.node import node
from trunkline.deploy.supervisor import serve
from trunkline.deploy.supervisor.configs import configs_of
from trunkline.deploy.supervisor.serve import grown, plan_cluster
from trunkline.kvstore.chunk_format import KV_DTYPES
from trunkline.worker.config import WorkerConfig
from trunkline.worker.model.families import read_model_config
from trunkline.worker.model.tensor_index import expected_shapes

ShowGpus = Callable[[int], None]
ROOT = Path(__file__).parents[2]
DEMO = models.resolve("demo")


def placed(plan: ClusterPlan) -> dict[str, int | None]:
    """The GPU of each worker, from the configurations that the processes would get."""
    found = configs_of(plan, Path("/run"), DiskFolders()).items()
    return {member.name: config.gpu for member, config in found if isinstance(config, WorkerConfig)}


@pytest.mark.parametrize(
    ("visible", "groups", "tp"), [(0, 1, 2), (0, 3, 2), (1, 1, 1), (2, 1, 2), (2, 2, 1), (8, 4, 2), (8, 8, 1)]
)
def test_the_default_number_of_workers_is_what_the_machine_allows(
    visible: int, groups: int, tp: int, show_gpus: ShowGpus
) -> None:
    show_gpus(visible)
    plan = plan_cluster(ServeSettings(port=0, groups=groups))
    assert plan.settings.tp == tp
    assert plan.device == ("cuda" if visible else "cpu")
    given = placed(plan)
    assert len(given) == groups * tp
    if visible:
        assert sorted(given.values()) == list(range(groups * tp))  # type: ignore[type-var]
    else:
        assert set(given.values()) == {None}


@pytest.mark.parametrize(
    ("heads", "groups", "visible", "tp"), [(32, 1, 8, 8), (28, 1, 8, 7), (40, 3, 8, 2), (9, 1, 8, 3), (7, 2, 8, 1)]
)
def test_the_largest_divisor_that_each_group_can_have(heads: int, groups: int, visible: int, tp: int) -> None:
    assert default_tp(groups, visible, lambda n: heads % n == 0) == tp


@pytest.mark.parametrize(("visible", "tp"), [(0, 1), (4, 2)])
def test_one_worker_on_cpus_with_matrix_registers(
    visible: int, tp: int, show_gpus: ShowGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_matrix_registers", lambda: True)
    show_gpus(visible)
    assert len(placed(plan_cluster(ServeSettings(port=0, groups=2)))) == 2 * tp
    assert plan_cluster(ServeSettings(port=0, tp=2)).settings.tp == 2


def test_what_is_asked_for_is_never_changed(show_gpus: ShowGpus) -> None:
    for visible in (0, 2, 8):
        show_gpus(visible)
        assert plan_cluster(ServeSettings(port=0, tp=1)).settings.tp == 1
    assert placed(plan_cluster(ServeSettings(port=0, tp=1))) == {"worker-0": 0}
    assert plan_cluster(ServeSettings(port=0, device="cpu")).device == "cpu"


def test_each_group_has_gpus_of_its_own(show_gpus: ShowGpus) -> None:
    show_gpus(8)
    plan = plan_cluster(ServeSettings(port=0, groups=2, tp=2))
    assert placed(plan) == {"worker-0.0": 0, "worker-0.1": 1, "worker-1.0": 2, "worker-1.1": 3}
    assert plan.placement.describe() == (
        "group 0: GPUs 0, 1 · group 1: GPUs 2, 3 of 8 visible (NVIDIA H200, 140 GiB) · "
        "each worker may use 90 % of its GPU's memory"
    )


def test_further_groups_leave_the_others_where_they_are(show_gpus: ShowGpus) -> None:
    show_gpus(6)
    plan = plan_cluster(ServeSettings(port=0, groups=1, tp=2))
    more = grown(plan, 3)
    assert placed(more) == {f"worker-{group}.{rank}": 2 * group + rank for group in range(3) for rank in range(2)}
    assert list(placed(plan).values()) == list(placed(more).values())[:2]
    with pytest.raises(UserError, match=r"--groups 4 with 2 workers each needs 8 GPUs; this machine shows 6"):
        grown(plan, 4)


def test_further_groups_need_memory(show_gpus: ShowGpus) -> None:
    show_gpus(0)
    half = psutil.virtual_memory().total // 2 - (1 << 20)
    none = DiskOption(0)
    settings = ServeSettings(port=0, groups=2, tp=1, kv_memory_bytes=half, host_tier_bytes=0, disk_tier=none)
    plan = plan_cluster(settings)
    assert grown(plan, 1).settings.groups == 1
    with pytest.raises(UserError, match=r"--kv-memory is .* for each of 3 workers, .* this machine has"):
        grown(plan, 3)


def test_groups_share_gpus_when_they_are_told_to(show_gpus: ShowGpus) -> None:
    show_gpus(2)
    plan = plan_cluster(ServeSettings(port=0, groups=3, tp=1, gpu_memory_fraction=0.45))
    assert placed(plan) == {"worker-0.0": 0, "worker-1.0": 1, "worker-2.0": 0}
    found = configs_of(plan, Path("/run"), DiskFolders()).values()
    assert {c.gpu_memory_fraction for c in found if isinstance(c, WorkerConfig)} == {0.45}
    plan = plan_cluster(ServeSettings(port=0, groups=2, tp=2, gpu_memory_fraction=0.5))
    assert placed(plan) == {"worker-0.0": 0, "worker-0.1": 1, "worker-1.0": 0, "worker-1.1": 1}
    show_gpus(1)
    plan = plan_cluster(ServeSettings(port=0, groups=3, gpu_memory_fraction=1 / 3))
    assert set(placed(plan).values()) == {0}
    assert plan.settings.tp == 1


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_kv_in_8_bits_is_for_gpus_too(kv_dtype: str, show_gpus: ShowGpus) -> None:
    show_gpus(1)
    plan = plan_cluster(ServeSettings(port=0, dtype="bfloat16", kv_dtype=kv_dtype))
    found = configs_of(plan, Path("/run"), DiskFolders()).values()
    workers = [(c.device, c.kv_dtype) for c in found if isinstance(c, WorkerConfig)]
    assert workers == [("cuda", kv_dtype)]


@pytest.mark.parametrize(
    ("visible", "given", "message"),
    [
        (0, {"device": "cuda"}, "--device is cuda, but this machine shows no NVIDIA GPU; use --device cpu"),
        (0, {"gpu_memory_fraction": 0.5}, "--gpu-memory-fraction is 0.5, but workers compute on CPUs .*no NVIDIA"),
        (8, {"gpu_memory_fraction": 0.5, "device": "cpu"}, "workers compute on CPUs; leave it out"),
        (
            1,
            {"tp": 2},
            r"--tp asks for 2 workers .* shows 1 \(NVIDIA H200\)\. Ask for 1 at most, .*CUDA_VISIBLE_DEVICES",
        ),
        (3, {"tp": 4}, r"shows 3 \(NVIDIA H200\)\. Ask for 3 at most"),  # 3 itself need not split the model
        (2, {"tp": 4, "gpu_memory_fraction": 0.1}, "--tp asks for 4 workers .* each needs a GPU of its own"),
        (1, {"groups": 2}, "--groups 2 with 1 worker each needs 2 GPUs; .* shows 1 .*--gpu-memory-fraction 0.5"),
        (2, {"groups": 2, "tp": 2}, "needs 4 GPUs; this machine shows 2 .* Use --groups 1, let groups share"),
        (8, {"groups": 5, "tp": 2}, "--groups 5 with 2 workers each needs 10 GPUs; this machine shows 8"),
        (2, {"groups": 5, "tp": 1}, "needs 5 GPUs; .*--gpu-memory-fraction 0.33"),
        (1, {"groups": 2, "gpu_memory_fraction": 0.6}, "is 0.6, but .* 2 workers on a GPU .* up to 0.5"),
        (1, {"groups": 3, "gpu_memory_fraction": 0.34}, "allowed are up to 0.33"),
        (8, {"gpu_memory_fraction": 0.0}, "--gpu-memory-fraction is 0; it must be more than 0"),
        (8, {"gpu_memory_fraction": 1.1}, "is 1.1; it must be more than 0 and at most 1"),
        (8, {"gpu_memory_fraction": float("nan")}, "--gpu-memory-fraction is nan"),
        (8, {"tp": 3}, "cannot split .* over 3 ranks; possible for this model: 1, 2"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_numbers(
    visible: int, given: dict[str, object], message: str, show_gpus: ShowGpus
) -> None:
    show_gpus(visible)
    with pytest.raises(UserError, match=message):
        plan_cluster(ServeSettings(port=0, **given))  # type: ignore[arg-type]


def test_no_gpu_gets_more_than_it_has() -> None:
    """Whatever is not refused: every rank of a group on a GPU of its own, shares of a GPU at most the whole."""
    cases = itertools.product((1, 2, 3, 5, 8), (1, 2, 3), (1, 2, 8), (None, 0.1, 0.25, 0.5))
    for groups, ranks, visible, fraction in cases:
        settings = ServeSettings(groups=groups, tp=ranks, gpu_memory_fraction=fraction)
        shown = tuple(machine.Gpu("any", 1 << 30) for _ in range(visible))
        fits = ranks <= visible and -(-groups // (visible // ranks)) * (fraction or 1) <= 1
        try:
            placement = place(settings, shown)
        except UserError:
            assert not fits
            continue
        assert fits
        assert all(len(set(own)) == ranks for own in placement.groups)
        on = Counter(index for own in placement.groups for index in own)
        assert set(on) <= set(range(visible))
        assert max(on.values()) * (fraction or 1) <= 1


def group_plan(kind: Kind, given: NodeSettings, settings: ServeSettings) -> ClusterPlan:
    """As `run_node` makes it."""
    settings, part = given.plan(kind, node._with_tp(kind, settings, given))
    return plan_cluster(settings, node=part)


def test_a_part_counts_its_own_gpus_from_zero(show_gpus: ShowGpus) -> None:
    show_gpus(2)
    plain = NodeSettings(plain_tcp=True, listen="127.0.0.1:7400")
    assert group_plan(Kind.GROUP, plain, ServeSettings(port=0)).settings.tp == 2
    elsewhere = NodeSettings(plain_tcp=True, leader="127.0.0.1:7400", ranks="2-3")
    plan = group_plan(Kind.WORKERS, elsewhere, ServeSettings(port=0, tp=4))
    assert placed(plan) == {"worker-2": 0, "worker-3": 1}
    show_gpus(1)
    assert group_plan(Kind.GROUP, plain, ServeSettings(port=0)).settings.tp == 1
    with pytest.raises(UserError, match=r"--ranks asks for 2 workers of a group .* shows 1 .* Ask for 1 at most"):
        group_plan(Kind.WORKERS, elsewhere, ServeSettings(port=0, tp=4))
    show_gpus(0)
    assert group_plan(Kind.GROUP, plain, ServeSettings(port=0)).settings.tp == 2


def test_a_driver_without_a_usable_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the driver's own words."""
    found = machine.Gpus(problem="CUDA error 803 of cuInit: system has unsupported display driver / cuda driver")
    monkeypatch.setattr(machine, "find_gpus", lambda: found)
    _, placement = settle(ServeSettings(), DEMO)
    assert (placement.device, placement.warning) == ("cpu", f"No GPU is used: {found.problem}.")
    with pytest.raises(UserError, match=r"--device is cuda, but CUDA error 803 of cuInit: system has unsupported"):
        settle(ServeSettings(device="cuda"), DEMO)


def test_the_images_default_command_lets_the_machine_decide() -> None:
    lines = (ROOT / "deploy/docker/Dockerfile.cuda").read_text().splitlines()
    [command] = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    serve_command: Any = typer.main.get_command(app)
    assert command[0] == "serve"
    given = serve_command.commands["serve"].make_context("serve", command[1:]).params
    assert (given["tp"], given["groups"], given["device"]) == (None, 1, "auto")


def make_latent_model(folder: Path) -> Path:
    """Write a model with latent attention, beside the demo model's tokenizer; return `folder`."""
    folder.mkdir()
    for file in DEMO.glob("*.json"):
        if file.name != "model.safetensors.index.json":
            shutil.copy(file, folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    own = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "q_lora_rank": None,
    }
    vocabulary = {"vocab_size": json.loads((DEMO / "config.json").read_text())["vocab_size"]}
    (folder / "config.json").write_text(json.dumps({**sizes, **experts, **own, **vocabulary}))
    shapes = expected_shapes(read_model_config(folder), "model.")
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def test_latent_attention_is_refused_where_it_has_no_kernels(tmp_path: Path, show_gpus: ShowGpus) -> None:
    model = str(make_latent_model(tmp_path / "latent"))
    show_gpus(1)
    with pytest.raises(
        UserError, match=r"latent attention, for which there are kernels on CPUs only, .*--device cpu"
    ):
        plan_cluster(ServeSettings(model=model, port=0))
    assert plan_cluster(ServeSettings(model=model, port=0, kernels="reference")).settings.kernels == "reference"
    show_gpus(0)
    with pytest.raises(UserError, match="KV in fp8 is not supported with latent attention"):
        plan_cluster(ServeSettings(model=model, port=0, kv_dtype="fp8"))
    # A chunk is whole on every rank.
    parts = [plan_cluster(ServeSettings(model=model, port=0, tp=tp)).disk for tp in (1, 4)]
    assert parts[0] is not None
    assert parts[1] is not None
    assert parts[0].chunk_bytes == parts[1].chunk_bytes == 64 * (24 + 8) * 4
    small = plan_cluster(ServeSettings(model=model, port=0, kv_dtype="int8", tp=4)).disk
    assert small is not None
    assert small.chunk_bytes == 64 * (24 + 2 * 8 + 2 * 4)


def test_what_only_cpus_compute_is_refused_on_gpus(
    show_gpus: ShowGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"architectures": ["GptOssForCausalLM"], "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 9}
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **sizes}))
    model = read_model_config(tmp_path)
    monkeypatch.setattr(serve, "check_model", lambda *_, **options: model)
    show_gpus(1)
    with pytest.raises(
        UserError, match=r"has sinks in its attention, clamped .*--device cpu.*--kernels reference"
    ):
        plan_cluster(ServeSettings(port=0, tp=1))
    assert (
        plan_cluster(ServeSettings(port=0, tp=1, max_context=64, kernels="reference")).placement.device == "cuda"
    )
