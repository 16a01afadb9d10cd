"""What the file of a cluster may say, how mistakes in it are told, and what its documentation says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from generate.launch_table import table

from trunkline.deploy.launch.document import FileError, parse
from trunkline.deploy.launch.fileformat import Cluster, Host, Ssh, read, schema
from trunkline.deploy.launch.plan import make_plan
from trunkline.deploy.launch.unit_options import command_rules

PAGE = (Path(__file__).parents[3] / "docs/launch.md").read_text()
EXAMPLES = sorted((Path(__file__).parents[3] / "examples/launch").glob("*.yaml"))


def cluster(text: str) -> Cluster:
    return read(parse(text, "c.yaml"))


def problem(text: str) -> str:
    with pytest.raises(FileError) as caught:
        cluster(text)
    return str(caught.value)


def test_plain_words_mean_what_they_say() -> None:
    value = parse("{a: on, b: no, c: 22:30, d: 0x10, e: 1.5, f: ~, g: '5', h: -3, i: true, j: 1_000}", "c").value
    expected = {"a": "on", "b": "no", "c": "22:30", "d": "0x10", "e": 1.5, "f": None, "g": "5", "h": -3}
    assert value == {**expected, "i": True, "j": "1_000"}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("version: 1\nname: a\nname: b", 3, "twice, in lines 2 and 3"),
        ("version: 1\nx: !!python/object:os.system y", 2, "tags"),
        ("version: 1\nhosts:\n  <<: {a: 1}", 3, "merge keys"),
        ("version: 1\nhosts: [", 2, "no YAML"),
        ("version: 1\n? [a]\n: b", 1, "no word"),
    ],
)
def test_yaml_that_is_not_for_here_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    said = problem(text)
    assert words in said
    assert f"c.yaml:{line}" in said or f"line {line}" in said


def test_aliases_do_not_grow_without_limit() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(FileError, match="too large"):
        parse("\n".join(rows), "c.yaml")


def test_deep_nesting_is_refused() -> None:
    for depth in (30, 400):
        with pytest.raises(FileError):
            parse("[" * depth + "]" * depth, "c.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x", "c.yaml:1: version: is not given; this program reads version 1"),
        ("version: 2", "c.yaml:1: version: is 2"),
        ("version: true", "version: is True"),
        ("- 1", "the file is a mapping"),
        ("version: 1\ngruops: []", "c.yaml:2: gruops: is unknown; did you mean 'groups'?"),
        (
            "version: 1\nhosts:\n  a:\n    ssh: {host: b, prot: 5}",
            "c.yaml:4: hosts.a.ssh.prot: is unknown; did you",
        ),
        ("version: 1\ngroups:\n- tp: 1\n- tpp: 2", "c.yaml:4: groups[1].tpp: is unknown; did you mean 'tp'?"),
        ("version: 1\ngroups:\n- tp: 0", "c.yaml:3: groups[0].tp: expected `int` >= 1"),
        ("version: 1\ngroups:\n- tp: two", "c.yaml:3: groups[0].tp: expected `int | null`, got `str`"),
        ("version: 1\nhosts: 5", "c.yaml:2: hosts: is a mapping"),
        ("version: 1\nhosts:\n  A b: {}", "c.yaml:3: hosts.A b: is no name for a host"),
        ("version: 1\nhosts:\n  a: {ssh: b, command: [c]}", "c.yaml:3: hosts.a: has ssh and command"),
        ("version: 1\nhosts:\n  a: {ssh: -oProxyCommand=x}", "which names no host"),
        ("version: 1\nhosts:\n  a: {address: '::1'}", "is no IPv4 address"),
        ("version: 1\nhosts:\n  a: {state: here}", "write an absolute path"),
        ("version: 1\nhosts:\n  a: {memory: lots}", "c.yaml:3: hosts.a.memory: memory is 'lots'"),
        ("version: 1\nhosts:\n  a: {environment: {A B: 1}}", "cannot be an environment variable"),
        ("version: 1\ngroups: [{port: 7400, count: 2}]", "groups[0].port: is for one group"),
        ("version: 1\nsecurity: {plain_tcp: true, wire_keys: x}", "leave one of them out"),
        ("version: 1\nname: Demo", "name: is 'Demo'; names are made of"),
    ],
)
def test_mistakes_are_told_with_place_and_advice(text: str, words: str) -> None:
    assert words in problem(text)


def test_defaults_and_short_forms() -> None:
    found = cluster("version: 1\nhosts: {a: , b: {ssh: u@h}, c: {ssh: {host: h, options: [ProxyJump=g]}}}")
    assert found.hosts["a"] == Host()
    assert found.hosts["b"].ssh == "u@h"
    assert found.hosts["c"].ssh == Ssh(host="h", options=["ProxyJump=g"])


def as_plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_accepts_what_the_reader_accepts(path: Path) -> None:
    document = parse(path.read_text(), path.name)
    read(document)
    jsonschema_rs.validator_for(schema()).validate(as_plain(document.value))


def test_the_schema_refuses_unknown_names() -> None:
    validator = jsonschema_rs.validator_for(schema())
    assert not validator.is_valid({"version": 1, "gruops": []})
    assert not validator.is_valid({"version": 1, "hosts": {"a": {"shh": "b"}}})
    assert not validator.is_valid({"groups": []})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


def test_the_table_of_fields_is_up_to_date() -> None:
    """`python docs/generate/launch_table.py` prints it."""
    assert table() in PAGE


def test_files_on_the_page_can_be_planned() -> None:
    found = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert found
    for text in found:
        document = parse(text, "docs/launch.md")
        assert make_plan(document, read(document), command_rules(), name="c").units
