"""Several models in one `trunkline serve`: their settings, GPUs, disk folders and processes."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from deploy.commands import Serve
from seeds import seeds

from trunkline.controller.config import ControllerConfig
from trunkline.deploy.config import models
from trunkline.deploy.config.disk_folders import DiskFolders, disk_folders
from trunkline.deploy.config.further_models import settings_of_models
from trunkline.deploy.config.machine import Gpu
from trunkline.deploy.config.option_values import DiskOption, FurtherModel, parse_models
from trunkline.deploy.config.plans import Beside, place
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.configs import configs_of
from trunkline.deploy.supervisor.members import CommandError
from trunkline.deploy.supervisor.run_folder import Running
from trunkline.deploy.supervisor.serve import ClusterPlan, Growing, plan_models
from trunkline.router.config import RouterConfig
from trunkline.worker.config import WorkerConfig

ShowGpus = Callable[[int], None]
FILE = """
model: demo
served-model-name: large
tp: 2
max-context: 512
kv-memory: 64MiB
disk-tier: {folder}:300MiB
models:
  small: {other}
  tiny: {{model: {other}, dtype: bfloat16, groups: 2, tp: 1, kv_memory: 32MiB, max-context: 256}}
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another checkpoint."""
    folder = tmp_path / "other"
    shutil.copytree(models.DEMO_FOLDER, folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    return folder


@pytest.fixture
def plan(tmp_path: Path, other: Path, serve: Serve) -> ClusterPlan:
    """The plan of a file with three models."""
    settings = serve(FILE.format(folder=tmp_path / "kv", other=other), "--port", "0", "--device", "cpu")
    return plan_models(settings)


def test_each_model_has_settings_of_its_own(plan: ClusterPlan, tmp_path: Path, other: Path) -> None:
    large, small, tiny = (each.settings for each in plan.models)
    assert [each.model_name for each in plan.models] == ["large", "small", "tiny"]
    assert (large.tp, large.groups, large.max_context, large.dtype) == (2, 1, 512, "auto")
    assert (small.model, small.tp, small.groups, small.max_context) == (str(other), 2, 1, None)
    assert (tiny.model, tiny.tp, tiny.groups, tiny.max_context, tiny.dtype) == (str(other), 1, 2, 256, "bfloat16")
    assert [each.kv_memory_bytes for each in (large, small, tiny)] == [64 << 20, 64 << 20, 32 << 20]
    assert {each.disk_tier for each in (large, small, tiny)} == {DiskOption(100 << 20, tmp_path / "kv")}
    assert len({each.tier_fingerprint for each in plan.models}) == 3
    assert plan.title.count(" + ") == 2


def test_processes_of_each_model_are_told_of_their_own_one(plan: ClusterPlan, other: Path) -> None:
    with disk_folders(plan.disk, [each.disk for each in plan.others]) as disk:
        found = configs_of(plan, Path("/run"), disk)
    assert " ".join(member.name for member in found) == (
        "controller-0 worker-0.0 worker-0.1 controller-1 worker-1.0 worker-1.1 controller-2 worker-2.0 "
        "controller-3 worker-3.0 router"
    )
    names, paths = list[str](), list[str]()
    for member, config in found.items():
        if isinstance(config, ControllerConfig):
            names.append(config.model_name)
            paths.append(config.index_path)
            assert (config.group, config.member) == (member.group, str(member.group))
        elif isinstance(config, WorkerConfig):
            assert config.model == str(models.DEMO_FOLDER if member.group == 0 else other)
            assert config.disk_path.startswith(str(Path(paths[member.group]).parent))
        else:
            router = config
    assert names == ["large", "small", "tiny", "tiny"]
    assert len(set(paths)) == 4
    assert len({config.plan_endpoint for config in found.values() if isinstance(config, ControllerConfig)}) == 4
    assert isinstance(router, RouterConfig)
    assert [(each.name, each.max_context) for each in router.all_models] == [
        ("large", 512),
        ("small", plan.others[0].max_context),
        ("tiny", 256),
    ]


def test_the_models_of_one_server_keep_their_kv_on_disk(plan: ClusterPlan) -> None:
    disks = [each.disk for each in plan.models]
    with disk_folders(disks[0], disks[1:]) as disk:
        for index, folders in enumerate([disk, *disk.others]):
            assert len(folders.groups) == plan.models[index].settings.groups
            for folder in folders.groups:
                (folder / "rank-0.slab").write_bytes(b"x" * (45 << 20))
    with disk_folders(disks[0], disks[1:]) as disk:
        kept = [folder for folders in (disk, *disk.others) for folder in folders.groups]
        assert [(folder / "rank-0.slab").stat().st_size for folder in kept] == 4 * [45 << 20]
        assert not any(folders.warnings for folders in (disk, *disk.others))


def test_the_number_of_groups_is_that_of_the_file(plan: ClusterPlan, tmp_path: Path) -> None:
    growing = Growing(plan, tmp_path, DiskFolders(), Running(1, "", plan.title, 1))
    assert list(plan.groups) == [0, 1, 2, 3]
    with pytest.raises(CommandError, match="several models"):
        growing.grow(5, [4])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("small", "--more-models has 'small'; write NAME=MODEL"),
        ("a=demo,a=demo", "names 'a' twice"),
        (" \t=demo", "--more-models has '=demo'"),
        ('{"a": }', "begins like JSON"),
        ('{"a": {"tp": 2}}', "model 'a' names no folder"),
        ('{"a": {"model": "demo", "tp": [2]}}', "model 'a': tp takes one value"),
        ('{"a": {"model": "demo", "groop": 2}}', "groop is no option of a model; did you mean 'groups'?"),
        ('{"a": {"model": "demo", "port": 2}}', "port is no option of a model"),
        ('{"a": {"model": "demo", "tp": "two"}}', "model 'a': tp is 'two'; it takes a whole number"),
        ('{"a": {"model": "demo", "kv-memory": "lots"}}', "model 'a': --kv-memory is 'lots', which is not a size"),
        ("a=demo", "'trunkline-demo' and 'a' are the same model in the same form"),
        ('{"trunkline-demo": {"model": "demo", "dtype": "bfloat16"}}', "two models are named 'trunkline-demo'"),
        ("a=/nowhere/at/all", "there is no folder /nowhere/at/all"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        plan_models(ServeSettings(port=0, device="cpu", models=parse_models(text)))
    assert message in str(refused.value)


def test_all_models_together_must_fit_into_memory(other: Path) -> None:
    asked = psutil.virtual_memory().total * 2 // 3
    further = (FurtherModel("small", str(other), (("tp", 1),)),)
    settings = ServeSettings(
        port=0, tp=1, device="cpu", host_tier_bytes=asked, disk_tier=DiskOption(0), models=further
    )
    with pytest.raises(UserError, match=r"--host-tier is .* for the workers of all models"):
        plan_models(settings)
    assert len(settings_of_models(settings)) == 2


def test_models_share_the_gpus_of_a_machine(other: Path, show_gpus: ShowGpus) -> None:
    show_gpus(4)
    small = FurtherModel("small", str(other), (("tp", 1),))
    plan = plan_models(ServeSettings(port=0, models=(small,)))
    assert [each.placement.groups for each in plan.models] == [((0, 1),), ((2,),)], "half of them is the first's"
    with pytest.raises(UserError, match=r"model 'small' needs 1 GPU, and of 4 other models leave 0; give models"):
        plan_models(ServeSettings(port=0, tp=4, models=(small,)))
    plan = plan_models(ServeSettings(port=0, tp=4, gpu_memory_fraction=0.45, models=(small,)))
    assert [each.placement.groups for each in plan.models] == [((0, 1, 2, 3),), ((0,),)]


@pytest.mark.parametrize("seed", seeds(4))
def test_no_gpu_is_given_twice(seed: int) -> None:
    random_ = random.Random(seed)
    placed = 0
    for _ in range(500):
        gpus = tuple(Gpu("a GPU", 80 << 30) for _ in range(random_.randint(1, 8)))
        fraction = random_.choice([None, None, 0.2, 0.3, 0.45])
        used: Counter[int] = Counter()
        beside = Beside()
        for number in range(random_.randint(1, 4)):
            settings = ServeSettings(
                served_model_name=f"model-{number}",
                groups=random_.randint(1, 3),
                tp=random_.choice([1, 1, 2, 4]),
                gpu_memory_fraction=fraction,
            )
            try:
                found = place(settings, gpus, beside.taken)
            except UserError:
                continue
            placed += 1
            beside = beside.with_gpus(found, is_shared=fraction is not None)
            assert len(found.groups) == settings.groups
            for own in found.groups:
                assert len(set(own)) == len(own) == settings.tp
                used.update(own)
        assert all(0 <= gpu < len(gpus) for gpu in used)
        assert all(count * (fraction or 1.0) <= 1.0 + 1e-9 for count in used.values())
    assert placed > 300
