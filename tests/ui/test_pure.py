"""The page's pure modules, in the browser that runs them: rules that hold for all trees, prompts and sources."""

from __future__ import annotations

import random
from typing import Any

import pytest
from playwright.sync_api import Page
from ui.conftest import Watched

pytestmark = [pytest.mark.processes, pytest.mark.area("browser")]

TIERS = ("device", "host", "disk", "remote")


@pytest.fixture
def page(watched: Watched) -> Page:
    """A page of the dashboard's origin."""
    return watched.open("requests")


def run(page: Page, module: str, expression: str, argument: Any = None) -> Any:
    """An expression of `m`, the module, and `x`, the argument."""
    script = f'async (x) => {{ const m = await import("/ui/static/js/core/{module}.js"); return {expression}; }}'
    return page.evaluate(script, argument)


def random_tree(draw: random.Random, size: int) -> list[dict[str, Any]]:
    """Nodes in preorder."""
    children: dict[int, list[int]] = {-1: []}
    for at in range(size):
        parent = draw.randrange(-1, at) if at else -1
        children.setdefault(parent, []).append(at)
        children.setdefault(at, [])
    nodes: list[dict[str, Any]] = []

    def visit(at: int, parent: int) -> None:
        nodes.append(
            {
                "id": f"{at:x}",
                "parent": parent,
                "tokens": draw.randint(1, 64),
                "tiers": draw.choice([1, 3, 2, 4]),
                "users": draw.choice([0, 0, 2]),
                "age_s": 1,
                "kind": "prefix",
                "children_hidden": 0,
                "text": f"t{at}",
                "salted": False,
                "sessions": [],
            }
        )
        index = len(nodes) - 1
        for child in children[at]:
            visit(child, index)

    for root in children[-1]:
        visit(root, -1)
    return nodes


def test_a_layout_keeps_all_tokens_and_overlaps_nothing(page: Page) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        nodes = random_tree(draw, draw.randint(1, 200))
        parts = run(
            page,
            "tree",
            """m.layOut(x, window.d3).parts.map(
                ({key, x0, x1, y0, y1, tokens}) => ({key, x0, x1, y0, y1, tokens}))""",
            nodes,
        )
        assert sum(part["tokens"] for part in parts) == sum(node["tokens"] for node in nodes)
        assert len({part["key"] for part in parts}) == len(parts)
        for at, a in enumerate(parts):
            assert a["x1"] - a["x0"] == a["tokens"]
            for b in parts[at + 1 :]:
                beside = a["x1"] <= b["x0"] or b["x1"] <= a["x0"]
                apart = a["y1"] <= b["y0"] + 1e-9 or b["y1"] <= a["y0"] + 1e-9
                assert beside or apart, (seed, a, b)


def test_a_layout_stays_when_the_order_changes(page: Page) -> None:
    nodes = [
        {"id": str(at), "parent": -1, "tokens": 8, "tiers": 1, "users": 0, "kind": "prefix"} for at in range(9)
    ]
    rows = run(
        page,
        "tree",
        """[x, [...x].reverse()].map(((places) => (nodes) => Object.fromEntries(
            m.layOut(nodes, window.d3, places).parts.map((p) => [p.key, p.y0])))(new Map()))""",
        nodes,
    )
    assert rows[0] == rows[1]


def test_colours_give_each_token_once(page: Page) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        pieces: list[dict[str, Any]] = [
            {
                "text": "x" * draw.randint(0, 30),
                "tokens": draw.randint(1, 20),
                "kind": "text",
                "module": draw.choice(["a", "b"]),
                "cached": draw.random() < 0.4,
                "dropped": draw.random() < 0.1,
            }
            for _ in range(draw.randint(1, 12))
        ]
        seen = [piece for piece in pieces if not piece["dropped"]]
        left = sum(piece["tokens"] for piece in seen)
        tiers = {}
        for name in TIERS:
            tiers[name] = draw.randint(0, left)
            left -= tiers[name]
        found = run(page, "pieces", 'm.coloured(x[0], {tiers: x[1]}, (name) => name === "a")', [pieces, tiers])
        for name in TIERS:
            assert sum(piece["tokens"] for piece in found if piece["source"] == name) == tiers[name], seed
        assert sum(piece["tokens"] for piece in found if piece["source"] == "new") == left
        assert "".join(piece["text"] for piece in found) == "".join(str(piece["text"]) for piece in pieces)


def test_events_come_whole_however_they_are_cut(page: Page) -> None:
    text = 'data: {"a": 1}\n\n: ping\n\ndata: one\ndata: two\r\n\r\ndata: [DONE]\n\n'
    events = run(page, "sse", "((p) => [...x].flatMap((c) => p.feed(c)))(new m.SseParser())", text)
    assert events == ['{"a": 1}', "one\ntwo", "[DONE]"]


def test_colours_of_a_source_change_nothing(page: Page) -> None:
    sources = (
        '<schema name="a">x</schema>',
        "<a b='1' c",
        "</",
        "a < b > c",
        "<!-- x",
        "<a><![CDATA[ <b> ]]></a>",
        "",
    )
    for source in sources:
        assert run(page, "pml", 'm.highlight(x).map((t) => t.text).join("")', source) == source


OUTLINE = """<schema name="s"><system>a <!-- <module name="no"> --> <module name="m"> x <param name="p" len="3"
  default="&lt;b&gt;" required="true"/><union default="v">
  <module name="u"/><module name="v">y</module></union></module></system>
  <scaffold name="both" modules="m m/v"/></schema>"""


def test_an_outline_has_modules_unions_and_parameters(page: Page) -> None:
    found = run(page, "pml", "m.outline(x)", OUTLINE)
    assert [(one["path"], one["depth"], one["union"], one["isDefault"]) for one in found["modules"]] == [
        ("m", 0, 0, False),
        ("m/u", 1, 1, False),
        ("m/v", 1, 1, True),
    ]
    assert found["modules"][0]["params"] == [{"name": "p", "length": 3, "fallback": "<b>", "required": True}]
    assert run(page, "pml", "m.outline(x)", OUTLINE.replace("</union>", "</onion>")) is None
    assert run(page, "pml", "m.outline(x)", OUTLINE[:-4]) is None


def test_figures(page: Page) -> None:
    shown = run(
        page, "format", "x.map((v) => [m.short(v), m.duration(v), m.percent(v)])", [0, 0.05, 12345, 2.5e6, None]
    )
    assert shown == [
        ["0", "0 ms", "0 %"],
        ["0.1", "50 ms", "5.0 %"],
        ["12.3k", "3 h", "1234500 %"],
        ["2.50M", "29 d", "250000000 %"],
        ["–", "–", "–"],
    ]
