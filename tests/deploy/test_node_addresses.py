"""Addresses of groups and numbers of ranks, as people write them."""

from __future__ import annotations

import pytest

from trunkline.deploy.config.node_settings import Address, parse_address, parse_addresses, parse_ranks
from trunkline.deploy.errors import UserError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:7400", "10.0.0.1", 7400),
        ("group-0.group.ns.svc:81", "group-0.group.ns.svc", 81),
        ("host_1", "host_1", 7400),
        (" h:65531 ", "h", 65531),
    ],
)
def test_an_address(text: str, host: str, port: int) -> None:
    assert parse_address(text, "--leader") == Address(host, port)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write HOST:PORT"),
        (":7400", "write HOST:PORT"),
        ("-h:1", "write HOST:PORT"),
        ("h/x:1", "write HOST:PORT"),
        ("h:", "allowed are ports 1 to 65531"),
        ("h:0", "allowed are ports 1 to 65531"),
        ("h:65532", "a group has 5"),
        ("h:٣", "allowed are ports"),
        ("[::1]:7400", "IPv6"),
        ("::1", "IPv6"),
    ],
)
def test_what_is_no_address(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_address(text, "--leader")
    assert str(error.value).startswith("--leader is ")


def test_endpoints_are_consecutive_ports() -> None:
    address = parse_address("h:7400", "--leader")
    assert [address.endpoint(offset) for offset in (0, 1, 4)] == ["tcp://h:7400", "tcp://h:7401", "tcp://h:7404"]


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1,b", ["a:1", "b:7400"]),
        ("g-{0..2}.g:7400", ["g-0.g:7400", "g-1.g:7400", "g-2.g:7400"]),
        ("g{08..10}:9", ["g08:9", "g09:9", "g10:9"]),
        ("z{0..1}-{5..6}", ["z0-5:7400", "z0-6:7400", "z1-5:7400", "z1-6:7400"]),
        ("h:74{00..02}", ["h:7400", "h:7401", "h:7402"]),
        ("a , ,b,", ["a:7400", "b:7400"]),
    ],
)
def test_addresses(text: str, addresses: list[str]) -> None:
    assert [str(address) for address in parse_addresses(text, "--controllers")] == addresses


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" , ", "names no group"),
        ("a,a:7400", "names a:7400 twice"),
        ("g-{0..256}", "more than 256"),
        ("g-{0..15}-{0..16}", "more than 256"),
        ("g-{0..999999}", "more than 256"),
        (",".join(f"h{number}" for number in range(257)), "more than 256"),
        ("g-{3..1}", "the smaller number first"),
        ("g-{a..b}", "a range is written"),
        ("g-{0..1", "a range is written"),
    ],
)
def test_what_are_no_addresses(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_addresses(text, "--controllers")


def test_ranks() -> None:
    assert parse_ranks("", 4, is_leader=True) == range(4)
    assert parse_ranks("0-1", 4, is_leader=True) == range(2)
    assert parse_ranks("2-3", 4, is_leader=False) == range(2, 4)
    assert parse_ranks("3", 4, is_leader=False) == range(3, 4)


@pytest.mark.parametrize(
    ("text", "is_leader", "message"),
    [
        ("1-2", True, "rank 0 runs beside the controller, so write 0-2"),
        ("0-1", False, "rank 0 runs beside the controller"),
        ("", False, "write A-B"),
        ("2-4", False, "there are ranks 0 to 3"),
        ("3-2", False, "there are ranks 0 to 3"),
        ("1,2", False, "write A-B"),
        ("-1", False, "write A-B"),
    ],
)
def test_what_are_no_ranks(text: str, is_leader: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_ranks(text, 4, is_leader=is_leader)
