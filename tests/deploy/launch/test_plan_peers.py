"""Groups of a cluster file that take KV from each other: `tiers.peers`, and where they listen for it."""

from __future__ import annotations

from deploy.launch.plans import option, plan, problem

from trunkline.deploy.launch.unit_options import command_rules

RULES = command_rules()


def test_groups_may_be_kept_from_taking_kv_from_each_other() -> None:
    """If the file says nothing, the option's own default counts."""
    made = plan("version: 1\ntiers: {peers: false}\ngroups: [{tiers: {peers: true}}, {tiers: {host: 0}}]", RULES)
    assert [option(unit, "peers") for unit in made.units] == ["on", "off", None]
    assert option(plan("version: 1", RULES).units[0], "peers") is None
    assert "tiers.peers says it" in problem("version: 1\noptions: {peers: off}", RULES)
    assert "tiers.peers: expected `bool" in problem("version: 1\ntiers: {peers: 3}", RULES)
    spread = plan(
        "version: 1\nhosts: {a: {ssh: a}, b: {ssh: b}}\ngroups: [{tp: 2, hosts: [a, b]}]\n"
        "routers: [{host: a}]\ntiers: {peers: false}",
        RULES,
    )
    assert [option(unit, "peers") for unit in spread.units] == ["off", "off", None]


def test_a_group_listens_where_its_peers_can_pull_from_it() -> None:
    text = "version: 1\nhosts: {a: {ssh: a}, b: {ssh: b}}\nrouters: [{host: a}]\n"
    two = f"{text}groups: [{{hosts: a}}, {{hosts: b}}]"
    for more, listen in (
        ("", "a:7400"),
        ("\ntiers: {peers: false}", "127.0.0.1:7400"),
    ):
        assert option(plan(two + more, RULES).units[0], "listen") == listen
    alone = f"{text}groups: [{{hosts: a}}, {{hosts: b, tiers: {{peers: false}}}}]"
    assert option(plan(alone, RULES).units[0], "listen") == "127.0.0.1:7400"
    # An address that others do not reach is none to pull from; the group itself can do without.
    here = plan(two.replace("a: {ssh: a}", "a: "), RULES)
    assert option(here.units[0], "listen") == "127.0.0.1:7400"
    models = "\nmodels: {big: ./big, small: ./small}\n"
    others = f"{text}groups: [{{hosts: a, model: big}}, {{hosts: b, model: small}}]{models}"
    assert option(plan(others, RULES).units[0], "listen") == "127.0.0.1:7400"
