"""Nonsense in options, variables and addresses is refused in one line, with what is allowed, before a start."""

from __future__ import annotations

import math
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import pytest
from deploy.commands import invoke

from trunkline.deploy.config.node_settings import Kind, NodeSettings
from trunkline.deploy.config.options import NODE_OPTIONS, SERVE_OPTIONS
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.config.variables import check_names
from trunkline.deploy.errors import UserError

NUMBERS: Final[dict[type, tuple[float, ...]]] = {int: (-1, 10**30), float: (-1.0, 1e30, math.nan, math.inf)}
"""Values that no option may have, by the type of its field."""


def test_numbers() -> None:
    checked = 0
    records: tuple[Any, ...] = (ServeSettings(), NodeSettings(leader="h", controllers="h"))
    for record in records:
        for field in fields(record):
            option = next((each for each in (*SERVE_OPTIONS, *NODE_OPTIONS) if each.field == field.name), None)
            if option is None or option.parse is not None:
                continue
            for value in NUMBERS.get(option.kind, ()):
                wrong = replace(record, **{field.name: value})
                with pytest.raises(UserError, match=f"^{option.flag} is .* (allowed|must)") as caught:
                    wrong.validate(*([] if record is records[0] else [Kind.ROUTER]))
                assert "--" not in str(caught.value)[2:], "of no other option"
                checked += 1
    assert checked >= 40


@pytest.mark.parametrize("value", ["-1", "1e9", "nan", "inf", f"{'9' * 18}TiB", "lots", ""])
def test_sizes(value: str) -> None:
    checked = 0
    for option in SERVE_OPTIONS:
        if "SIZE" in (option.metavar or "") or option.field.endswith("_bytes"):
            assert option.parse is not None
            with pytest.raises(UserError, match=f"^{option.flag} (is|asks)"):
                option.parse(value)
            checked += 1
    assert checked == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --threads 10000", f"--threads is 10000; allowed are 1 to {os.cpu_count()}, the cores"),
        ("serve --max-batch 100000", "--max-batch is 100000; allowed are 1 to 16384"),
        ("scale 0", "at least one group stays"),
        ("scale 99999999999999999999999", "allowed are 1 to 256"),
        ("serve --tp 1e3", "'--tp': '1e3' is not a whole number"),
        ("group --drain-seconds soon", "'--drain-seconds': 'soon' is not a number"),
        ("scale many", "'many' is not a whole number"),
        ("size --ttl x", "'--ttl': 'x' is not a number"),
        ("status --port 70000", "--port is 70000; allowed are 1 to 65535"),
        ("flush --port 0", "--port is 0; allowed are 1 to 65535"),
        ("top --interval nan", "--interval is nan; allowed are 0.2 to 3600"),
        ("size demo --ttl inf", "--ttl is inf; it must be more than 0 and less than"),
        ("size demo --tp 99999", "--tp is 99999; allowed are 1 to 4096"),
        ("chat --max-tokens 0", "--max-tokens is 0; allowed are 1 to"),
        ("chat --temperature nan", "--temperature is nan; allowed are 0 to 2"),
        ("launch up nowhere.yaml --start-seconds nan", "--start-seconds is nan; allowed are 1 to 86400"),
        ("launch stop nowhere.yaml --seconds nan", "--seconds is nan; allowed are 0 to 86400"),
        ("launch logs -n 99999999999999999999", "--lines is 99999999999999999999; allowed are 0 to 1000000"),
    ],
)
def test_single_numbers(words: str, message: str) -> None:
    done = invoke(words.split(), {"COLUMNS": "300"})
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["chat", "top", "doctor", "flush", "schema list"])
@pytest.mark.parametrize("url", ["nonsense", "http://[::1", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_addresses(command: str, url: str) -> None:
    done = invoke([*command.split(), "--url", url], {"COLUMNS": "300"})
    assert (done.exit_code, url in done.output) == (1, True), done.output
    assert command == "doctor" or done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("command", ["chat", "top", "doctor", "flush"])
def test_keys_that_no_header_can_have(command: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes("schlüssel".encode())
    for words, variables in ((["--api-key-file", str(file)], {}), ([], {"TRUNKLINE_API_KEY": "schlüssel"})):
        done = invoke([command, "--url", "http://127.0.0.1:9", *words], {"COLUMNS": "300", **variables})
        assert (done.exit_code, "is no key" in done.stderr) == (2, True), done.stderr
        assert "schl" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TRUNKLINE_TP", "two", "TRUNKLINE_TP is 'two'; it takes a whole number"),
        ("TRUNKLINE_DRAIN_SECONDS", "soon", "TRUNKLINE_DRAIN_SECONDS is 'soon'; it takes a number"),
        ("TRUNKLINE_RESTART", "maybe", "TRUNKLINE_RESTART is 'maybe'; allowed are true and false"),
        ("TRUNKLINE_THREADS", "0", "--threads is 0; allowed are 1 to"),
        (
            "TRUNKLINE_API_KYE",
            "x" * 20,
            "has TRUNKLINE_API_KYE, which no option reads; did you mean TRUNKLINE_API_KEY?",
        ),
        ("TRUNKLINE_KV_MEMROY", "8GiB", "did you mean TRUNKLINE_KV_MEMORY?"),
        ("TRUNKLINE_HOSTS", "0.0.0.0", "did you mean TRUNKLINE_HOST?"),
    ],
)
def test_variables(name: str, value: str, message: str) -> None:
    done = invoke(["serve"], {name: value, "COLUMNS": "300"})
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_variables_that_are_meant_for_others() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = [*root.glob("*/trunkline/**/*.py"), *root.glob("deploy/systemd/*"), *root.glob("benchmarks/*.py")]
    own = {name for path in sources for name in re.findall(r"TRUNKLINE_[A-Z0-9_]*[A-Z0-9]", path.read_text())}
    assert "TRUNKLINE_CPU_ISA" in own
    check_names(dict.fromkeys(own, "x"))
    service = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_PROTO"]
    check_names(
        {f"TRUNKLINE_{part}{end}": "x" for part in ("", "ROUTER_", "GROUPS_", "CONTROLLER_") for end in service}
    )
    with pytest.raises(UserError, match=r"TRUNKLINE_ROUTER, .*TRUNKLINE_ROUTERS"):
        check_names({"TRUNKLINE_ROUTER": "2"})
