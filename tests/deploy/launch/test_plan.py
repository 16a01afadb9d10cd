"""Who runs what where: for any file that is accepted, the rules that keep units out of each other's way hold."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.launch.plans import option, plan, planned, problem
from seeds import base

from trunkline.deploy.config.node_settings import parse_address, parse_ranks
from trunkline.deploy.launch.document import Document, FileError
from trunkline.deploy.launch.plan import API_KEYS, MEMBERS, WIRE_KEYS, Plan
from trunkline.deploy.launch.resources import Facts
from trunkline.deploy.launch.unit_options import Rules, command_rules
from trunkline.router.membership.member import Member
from trunkline.router.membership.static_source import encode_members

EXAMPLES = sorted((Path(__file__).parents[3] / "examples/launch").glob("*.yaml"))


GPUS = tuple(map(str, range(8)))
FIRST = base()


@pytest.fixture(scope="module")
def rules() -> Rules:
    return command_rules()


def random_file(random: random.Random) -> dict[str, Any]:
    """Mostly sound, often with something in it that does not fit."""
    hosts: dict[str, Any] = {}
    for index in range(random.randint(1, 4)):
        ways: list[dict[str, Any]] = [{}, {"ssh": f"h{index}"}, {"command": ["x", str(index)]}]
        host = random.choice(ways)
        if random.random() < 0.9:
            host["address"] = f"10.0.0.{index}"
        if random.random() < 0.3:
            host["gpus"] = random.choice([0, 2, 8, 16])
        if random.random() < 0.3:
            host["cores"] = random.randint(1, 64)
        hosts[f"h{index}"] = host
    groups = []
    for _ in range(random.randint(1, 5)):
        chosen = random.sample(list(hosts), random.randint(1, len(hosts)))
        counts = [random.randint(1, 3) for _ in chosen]
        group: dict[str, Any] = {"tp": sum(counts), "hosts": dict(zip(chosen, counts, strict=True))}
        if random.random() < 0.3:
            group = {"tp": len(chosen) * random.choice([1, 1, 2]), "hosts": chosen}
        if random.random() < 0.3:
            group["count"] = random.randint(1, 4)
        elif random.random() < 0.3:
            group["port"] = random.choice([7390, 7402, 7410, 8000, 65530, 65533])
        if random.random() < 0.1:
            group["options"] = {"max-batch": 8, "threads": 2}
        groups.append(group)
    file: dict[str, Any] = {"version": 1, "hosts": hosts, "groups": groups}
    file["routers"] = [
        {"host": random.choice(list(hosts)), "port": random.choice([8000, 8001, 7300, 7404]), "name": f"r{n}"}
        for n in range(random.randint(1, 3))
    ]
    if random.random() < 0.8:
        file["records"] = "redis://10.0.0.9:6379/1"
    if random.random() < 0.3:
        file["ports"] = {"groups": random.choice([7400, 7301, 65500]), "health": random.choice([7300, 7399])}
    return file


def check_invariants(made: Plan, about: str = "") -> None:
    taken = Counter((unit.host, port) for unit in made.units for port in (*unit.ports, unit.health_port))
    assert [place for place, count in taken.items() if count > 1] == [], about
    assert all(0 < port < 65536 for _, port in taken)
    assert len({unit.name for unit in made.units}) == len(made.units)
    for names in made.groups.values():
        parts = [made.by_name[name] for name in names]
        leader = parts[0]
        tp = int(option(leader, "tp") or 0)
        assert sorted(rank for part in parts for rank in part.ranks) == list(range(tp)), about
        assert 0 in leader.ranks
        assert len({part.host for part in parts}) == len(parts)
        address = parse_address(option(leader, "listen") or "", "--listen")
        assert leader.ports == tuple(range(address.port, address.port + 5))
        for part in parts:
            said = parse_ranks(option(part, "ranks") or "", tp, is_leader=part is leader)
            assert tuple(said) == part.ranks
            if part is not leader:
                assert option(part, "leader") == option(leader, "listen")
        for router in (unit for unit in made.units if unit.kind == "router"):
            assert option(router, "members") == "static:{state}/members.json"
            assert f"tcp://{option(leader, 'listen')}" in {member.address for member in made.members}
            if {part.host for part in parts} != {router.host}:
                assert address.host != "127.0.0.1"
    check_gpus(made)
    check_records(made)


def check_records(made: Plan) -> None:
    """All routers have one store, which those of several hosts reach."""
    routers = [unit for unit in made.units if unit.kind == "router"]
    urls = {unit.environment.get("TRUNKLINE_RECORDS", "") for unit in routers}
    assert len(urls) == 1
    assert len({unit.host for unit in routers}) == 1 or urls.pop().startswith("redis:")


def check_gpus(made: Plan) -> None:
    given = [
        (unit.host, gpu)
        for unit in made.units
        for gpu in unit.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if gpu
    ]
    assert max(Counter(given).values(), default=1) == 1
    for unit in made.units:
        if visible := unit.environment.get("CUDA_VISIBLE_DEVICES"):
            assert len(visible.split(",")) == len(unit.ranks)
            assert max(map(int, visible.split(","))) < (made.hosts[unit.host].gpus or 0)


@pytest.mark.parametrize("cases", [300, pytest.param(5000, marks=pytest.mark.soak)])
def test_no_two_units_get_in_each_others_way(cases: int, rules: Rules) -> None:
    accepted = 0
    for seed in range(FIRST, FIRST + cases):
        file = random_file(random.Random(seed))
        try:
            made = planned(Document("c.yaml", file), rules)
        except FileError:
            continue
        check_invariants(made, f"seed {seed}:\n{yaml.safe_dump(file)}")
        accepted += 1
    assert accepted > cases / 8


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_can_be_planned(path: Path, rules: Rules) -> None:
    check_invariants(plan(path.read_text(), rules))


def test_the_smallest_file(rules: Rules) -> None:
    made = plan("version: 1", rules)
    assert [unit.name for unit in made.units] == ["group-0", "router"]
    assert made.urls == ("http://127.0.0.1:8000",)
    group, router = made.units
    assert option(group, "listen") == "127.0.0.1:7400"
    assert option(router, "members") == "static:{state}/members.json"
    assert made.members == (Member("group-0", "tcp://127.0.0.1:7400", "tcp://127.0.0.1:7401", "local"),)


def test_routers_are_not_restarted_for_further_groups(rules: Rules) -> None:
    facts = {"local": Facts(cores=12, memory_bytes=1 << 36)}
    for name, named in (("group", ""), ("g", "name: g, ")):
        found = []
        for count in (1, 2, 3):
            made = plan(f"version: 1\ngroups: [{{{named}count: {count}}}]", rules, facts)
            shares = {option(unit, "threads") for unit in made.units if unit.group}
            assert shares == {None if count == 1 else str(12 // count)}, "new groups get equal parts"
            contents = {MEMBERS: encode_members(made.members)}
            found.append({unit.name: unit.digest(contents) for unit in made.units})
            assert len(made.members) == count
        one, two, three = found
        assert one.keys() == {f"{name}-0", "router"}
        assert three.keys() - two.keys() == {f"{name}-2"}
        assert one.items() < two.items() < three.items(), "what runs goes on"
    assert [unit.name for unit in plan("version: 1\ngroups: [{name: g}]", rules).units] == ["g", "router"]
    given = [plan(f"version: 1\noptions: {{threads: {n}}}", rules).units[0].digest({}) for n in (1, 2)]
    assert given[0] != given[1], "what the file says takes effect"


def test_groups_register_where_others_can_too(rules: Rules) -> None:
    made = plan("version: 1\nmembers: records\nrecords: redis://:secret@10.0.0.9:6379/0", rules)
    group, router = made.units
    assert option(router, "members") == "records"
    assert group.environment["TRUNKLINE_JOIN"] == "redis://:secret@10.0.0.9:6379/0"
    assert "secret" not in " ".join((*group.argv, *router.argv))
    with pytest.raises(FileError, match="members: is records, but there is no server"):
        plan("version: 1\nmembers: records", rules)


def test_a_group_over_hosts_has_workers_elsewhere(rules: Rules) -> None:
    made = plan(
        "version: 1\nhosts: {a: {ssh: u@a.x}, b: {ssh: b.x}}\ngroups: [{name: g, tp: 4, hosts: [b, a]}]", rules
    )
    leader, workers, router = made.units
    assert (leader.host, leader.ranks, leader.argv[0]) == ("b", (0, 1), "group")
    assert (workers.name, workers.host, workers.ranks, workers.argv[0]) == ("g.a", "a", (2, 3), "workers")
    assert option(workers, "leader") == option(leader, "listen") == "b.x:7400"
    assert router.host == "a"
    assert made.stages() == [("g", "g.a"), ("router",)]


def test_options_go_to_those_who_know_them(rules: Rules) -> None:
    made = plan(
        "version: 1\nhosts: {a: {ssh: a}, b: {ssh: b}}\noptions: {dtype: float32, policy: lmetric, max_batch: 8}\n"
        "groups: [{tp: 2, hosts: [a, b], options: {max-batch: 16, prefix-cache: false}}]",
        rules,
    )
    leader, workers, router = made.units
    assert [option(unit, "dtype") for unit in made.units] == ["float32", "float32", None]
    assert [option(unit, "max-batch") for unit in made.units] == ["16", None, None]
    assert option(router, "policy") == "lmetric"
    assert "--no-prefix-cache" in leader.argv
    assert "--no-prefix-cache" in workers.argv


def test_passwords_and_keys_are_not_on_command_lines(rules: Rules) -> None:
    made = plan(
        "version: 1\ntiers: {remote: 'redis://:hunter2@x/0'}\nsecurity: {api_keys: k.json}\n"
        "groups: [{environment: {HF_TOKEN: hunter2}}]",
        rules,
    )
    assert "hunter2" not in repr([unit.argv for unit in made.units])
    assert made.units[0].environment["TRUNKLINE_REMOTE_TIER"] == "redis://:hunter2@x/0"
    assert [unit.files for unit in made.units] == [(WIRE_KEYS["group"],), (WIRE_KEYS["router"], MEMBERS, API_KEYS)]


_TWO_HOSTS = "version: 1\nhosts: {a: {ssh: a}, b: {ssh: b}}\ngroups: [{hosts: a}]\n"
_TWO_ROUTERS = f"{_TWO_HOSTS}routers: [{{host: a}}, {{host: b}}]\n"


def test_routers_are_told_where_records_are_and_groups_are_not(rules: Rules) -> None:
    for text, expected in (
        (_TWO_HOSTS, None),
        (f"{_TWO_HOSTS}records: 'sqlite:/data/records.sqlite'", "sqlite:/data/records.sqlite"),
        (f"{_TWO_ROUTERS}records: 'redis://:hunter2@x/0'", "redis://:hunter2@x/0"),
        (f"{_TWO_ROUTERS}tiers: {{remote: 'redis://y/0'}}", "redis://y/0"),
        (f"{_TWO_ROUTERS}tiers: {{remote: 'redis://y/0'}}\nrecords: 'redis://x/1'", "redis://x/1"),
    ):
        group, *routers = plan(text, rules).units
        assert "TRUNKLINE_RECORDS" not in group.environment
        assert {router.environment.get("TRUNKLINE_RECORDS") for router in routers} == {expected}
        assert "hunter2" not in repr([router.argv for router in routers])


def test_routers_of_several_hosts_need_a_server_for_records(rules: Rules) -> None:
    assert problem(_TWO_ROUTERS, rules) == (
        "c.yaml:4: routers: there are routers on a and b, which need common sessions and schemas; say `records: "
        "redis://HOST:PORT/DB`, with a Redis or Valkey server that all of them reach"
    )
    assert "c.yaml:5: records: there are routers on a and b" in problem(
        f"{_TWO_ROUTERS}records: 'sqlite:/r'", rules
    )
    said = problem(f"{_TWO_ROUTERS}records: 'http://:hunter2@x'", rules)
    assert said.startswith("c.yaml:5: records: --records is 'http://:***@x'")
    assert "is not given here: records says it" in problem("version: 1\noptions: {records: 'sqlite:/r'}", rules)
    plan(f"{_TWO_HOSTS}routers: [{{host: b, port: 1}}, {{host: b, port: 2, name: other}}]", rules)


def test_each_group_has_a_folder_of_its_own_on_disk(rules: Rules) -> None:
    made = plan("version: 1\ntiers: {disk: '/d/kv/:1GiB'}\ngroups: [{name: g, count: 2}]", rules)
    assert [option(unit, "disk-tier") for unit in made.units] == ["/d/kv/g-0:1GiB", "/d/kv/g-1:1GiB", None]


def test_tiers_of_a_group_are_over_the_clusters(rules: Rules) -> None:
    made = plan("version: 1\ntiers: {host: 1GiB, disk: 0}\ngroups: [{tiers: {host: 0}}, {}]", rules)
    assert [option(unit, "host-tier") for unit in made.units] == ["0", "1GiB", None]
    assert [option(unit, "disk-tier") for unit in made.units] == ["0", "0", None]


def test_groups_on_one_host_share_its_cores_and_gpus(rules: Rules) -> None:
    facts = {"local": Facts(cores=16, memory_bytes=1 << 36, gpus=GPUS[:8])}
    made = plan("version: 1\ngroups: [{tp: 2, count: 2}, {tp: 1, options: {threads: 1}}]", rules, facts)
    assert [option(unit, "threads") for unit in made.units] == ["3", "3", "1", None]
    visible = [unit.environment.get("CUDA_VISIBLE_DEVICES") for unit in made.units]
    assert visible == ["0,1", "2,3", "4", None]


@pytest.mark.parametrize(
    ("count", "groups", "visible"),
    [
        (0, "{}", [None]),
        (1, "{}", ["0"]),
        (2, "{}", ["0,1"]),
        (8, "{count: 2}", ["0,1,2,3", "4,5,6,7"]),
        (8, "{tp: 2}, {}, {}", ["0,1", "2,3,4", "5,6,7"]),
        (8, "{options: {device: cpu}}, {}", [None, "0,1,2,3,4,5,6,7"]),
        (1, "{count: 2, options: {gpu-memory-fraction: 0.5}}", ["0", "0"]),
        (2, "{tp: 2, count: 2, options: {gpu-memory-fraction: 0.45}}", ["0,1", "0,1"]),
        (2, "{tp: 1, count: 3, options: {gpu_memory_fraction: 0.5}}", ["0", "1", "0"]),
    ],
)
def test_a_group_that_says_no_tp_has_its_part_of_the_gpus(
    count: int, groups: str, visible: list[str | None], rules: Rules
) -> None:
    facts = {"local": Facts(cores=16, memory_bytes=1 << 36, gpus=GPUS[:count])}
    made = plan(f"version: 1\ngroups: [{groups}]", rules, facts)
    units = [unit for unit in made.units if unit.kind == "group"]
    assert [unit.environment.get("CUDA_VISIBLE_DEVICES") for unit in units] == visible
    for unit in units:
        # It chooses by its model and what it sees (`placement.default_tp`), or has what it had without GPUs.
        chooses = "tp:" not in groups and unit.environment.get("CUDA_VISIBLE_DEVICES") is not None
        if "tp:" not in groups:
            assert (option(unit, "tp") is None, option(unit, "ranks") is None) == (chooses, chooses)
            assert unit.ranks == (() if chooses else (0,))


def test_gpus_that_a_host_hides_are_not_given_out(rules: Rules) -> None:
    facts = {"local": Facts(cores=16, memory_bytes=1 << 36, gpus=("2", "GPU-8f1c"))}
    made = plan("version: 1\ngroups: [{tp: 1, count: 2}]", rules, facts)
    assert [u.environment.get("CUDA_VISIBLE_DEVICES") for u in made.units] == ["2", "GPU-8f1c", None]


def test_a_group_that_is_alone_decides_itself(rules: Rules) -> None:
    made = plan("version: 1\ngroups: [{tp: 2}]", rules, {"local": Facts(16, 1 << 36)})
    assert option(made.units[0], "threads") is None
    assert "CUDA_VISIBLE_DEVICES" not in made.units[0].environment


def test_a_models_folder_is_relative_to_the_file(rules: Rules) -> None:
    assert plan("version: 1\nmodel: ../m", rules).units[0].argv[1] == "/m"
    assert plan("version: 1\nmodel: OWNER/NAME", rules).units[0].argv[1] == "OWNER/NAME"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "hosts: {a: , b: {ssh: b}}\ngroups: [{tp: 2, hosts: [a, b]}]",
            "its address is 127.0.0.1, at which b cannot",
        ),
        ("hosts: {a: {ssh: a}, b: {ssh: b}}\ngroups: [{tp: 3, hosts: [a, b]}]", "cannot be shared equally"),
        ("hosts: {a: {ssh: a}, b: {ssh: b}}\ngroups: [{tp: 3, hosts: {a: 1, b: 1}}]", "1 on a, 1 on b; tp is 3"),
        ("hosts: {a: {ssh: a}, b: {ssh: b}}\ngroups: [{tp: 2}]", "does not say where; the hosts are a, b"),
        ("hosts: {alpha: {ssh: a}}\ngroups: [{hosts: alhpa}]", "did you mean 'alpha'?"),
        ("hosts: {a: {ssh: a}, b: {ssh: b}}\ngroups: [{tp: 2, hosts: [a, a]}]", "names a host twice"),
        ("hosts: {a: {}, b: {}}", "is the same machine as a"),
        (
            "hosts: {a: {ssh: x, address: 1.2.3.4}, b: {ssh: y, address: 1.2.3.4}}",
            "has the address 1.2.3.4, as a has",
        ),
        (
            "hosts: {a: {gpus: 2}}\ngroups: [{tp: 2}, {tp: 1}]",
            "on host a, 1 in all; the host has 2, of which 2 are given to other groups",
        ),
        (
            "hosts: {a: {gpus: 1}}\ngroups: [{count: 2, options: {gpu-memory-fraction: 0.6}}]",
            "the host has 1, of which 1 are given to other groups. Give fewer ranks (`tp`), or let groups share",
        ),
        ("hosts: {a: {gpus: 1}}\ngroups: [{count: 2}]", "group-1 needs a GPU for each of its ranks on host a"),
        ("hosts: {a: {memory: 1GiB}}\ntiers: {kv_memory: 512MiB, host: 1GiB}", "its groups are given 1.5 GiB"),
        ("tiers: {kv_memory: lots}", "tiers.kv_memory: kv_memory is 'lots'"),
        (
            "groups: [{port: 7396}]\nrouters: [{port: 7400}]",
            "needs port 7396 to 7400 of host local, where router has",
        ),
        ("groups: [{port: 65532}]", "the last one would be too large"),
        ("routers: [{port: 8000, name: a}, {port: 8000, name: b}]", "where a has 8000"),
        (
            "routers: [{listen: 0.0.0.0}]",
            "routers[0].listen: is 0.0.0.0, which others reach, and there are no API keys",
        ),
        ("groups: [{name: router}]", "two units 'router'"),
        ("options: {dtpye: float32}", "did you mean 'dtype'?"),
        ("options: {tp: 2}", "a group's tp says it"),
        ("options: {kv-memory: 1GiB}", "tiers.kv_memory says it"),
        ("options: {max-batch: many}", "takes a whole number"),
        ("options: {prefix-cache: maybe}", "allowed are true and false"),
        ("routers: [{options: {dtype: float32}}]", "routers[0].options.dtype: is unknown"),
        ("ports: {groups: 65530}\ngroups: [{}, {}]", "leaves no ports on host local for group-1"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(text: str, words: str, rules: Rules) -> None:
    facts = {"a": Facts(2, 1 << 34), "local": Facts(2, 1 << 34)}
    assert words in problem(f"version: 1\n{text}", rules, facts)


def test_a_unit_is_another_one_when_its_wire_keys_change_but_not_with_api_keys(rules: Rules) -> None:
    router = plan("version: 1\nsecurity: {api_keys: k}", rules).by_name["router"]
    first = router.digest({WIRE_KEYS["router"]: b"1", API_KEYS: b"1"})
    assert router.digest({WIRE_KEYS["router"]: b"2", API_KEYS: b"1"}) != first
    assert router.digest({WIRE_KEYS["router"]: b"1", API_KEYS: b"2"}) == first


@pytest.mark.parametrize(
    "text",
    [
        "security: {api_keys: k.json}",
        "options: {allow-anonymous: true}",
        "options: {api_key_file: /run/key}",
        "hosts: {a: {environment: {TRUNKLINE_API_KEY: tl-0123456789abcdef}}}",
    ],
)
def test_others_are_let_in_with_keys_or_on_purpose(text: str, rules: Rules) -> None:
    made = plan(f"version: 1\n{text}\nrouters: [{{listen: 0.0.0.0}}]", rules)
    assert option(made.by_name["router"], "host") == "0.0.0.0"


MODELS = """\
version: 1
model: demo
models: {small: ./small, other: org/other}
options: {served_model_name: main}
groups:
  - name: a
  - {name: b, model: small, count: 2}
  - {name: c, model: other}
"""


def test_groups_of_several_models(rules: Rules) -> None:
    made = plan(MODELS, rules)
    served = {unit.name: (unit.argv[1], option(unit, "served-model-name")) for unit in made.units}
    assert served == {
        "a": ("demo", "main"),
        "b-0": ("/files/small", "small"),
        "b-1": ("/files/small", "small"),
        "c": ("org/other", "other"),
        "router": ("demo", "main"),
    }
    assert option(made.by_name["router"], "more-models") == "small=/files/small,other=org/other"
    assert "c.yaml:8: groups[2].model: is 'no'" in problem(MODELS.replace("model: other}", "model: no}"), rules)
    unused = problem(MODELS.replace(", model: small", ""), rules)
    assert "models.small: is served by no group" in unused
    assert "models.small: has a comma" in problem(MODELS.replace("./small", "'a,b'"), rules)
