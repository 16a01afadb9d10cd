"""The dashboard's pure parts: files, trees in preorder, decisions, pieces of prompts."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.router.messages import TreeDescription
from trunkline.router.routing.core import RoutingCore
from trunkline.router.routing.decision_log import DecisionLog
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.request import Origin, RouteRequest
from trunkline.router.ui.assets import FOLDER, PAGE, Assets, is_current
from trunkline.router.ui.chunk_tree import Texts, TreeView, head_of, preorder
from trunkline.router.ui.prompt_pieces import message_spans


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    (tmp_path / "js").mkdir()
    (tmp_path / "js" / "a.js").write_text("1;" * 1000)
    assets = Assets(tmp_path)
    first = assets.find("js/a.js")
    assert first is not None
    assert first is assets.find("js/a.js")
    assert first.media_type == "text/javascript; charset=utf-8"
    assert first.cache_control == "no-cache"
    assert first.compressed is not None
    assert gzip.decompress(first.compressed) == first.content
    assert is_current(first, f'"other", W/{first.etag}')
    assert not is_current(first, '"other"')
    (tmp_path / "js" / "a.js").write_text("2;")
    second = assets.find("js/a.js")
    assert second is not None
    assert (second.content, second.compressed) == (b"2;", None)
    assert second.etag != first.etag
    (tmp_path / "x-1.6.32.min.js").write_text("3")
    versioned = assets.find("x-1.6.32.min.js")
    assert versioned is not None
    assert "immutable" in versioned.cache_control


BAD_NAMES = (
    "",
    ".",
    "..",
    "../secret.js",
    "js/../../secret.js",
    "/secret.js",
    "//secret.js",
    "js//a.js",
    "js\\a.js",
    "js/.hidden.js",
    "js/a.js/",
    "js",
    "js/a.py",
    "js/a.js\0",
    "js/a.js\n",
    "a/b/c/d/e.js",
    "%2e%2e/secret.js",
    "link.js/x.js",
)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_nothing_else_is_served(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "static"
    (folder / "js").mkdir(parents=True)
    (tmp_path / "secret.js").write_text("secret")
    for inside in ("js/a.js", "js/a.py", "js/.hidden.js"):
        (folder / inside).write_text("")
    assert Assets(folder).find("js/a.js") is not None
    assert Assets(folder).find(name) is None


def test_all_that_the_package_has_can_be_served() -> None:
    assets = Assets()
    for path in FOLDER.rglob("*"):
        if path.suffix in (".css", ".html", ".ico", ".js", ".json", ".mjs", ".png", ".svg", ".woff2"):
            assert assets.find(path.relative_to(FOLDER).as_posix()) is not None, path
    if FOLDER.is_dir():
        assert assets.find(PAGE) is not None


@given(st.lists(st.integers(-1, 60), max_size=60))
def test_preorder(wanted: list[int]) -> None:
    parents = [min(parent, index - 1) for index, parent in enumerate(wanted)]
    order = list(preorder(parents))
    assert sorted(order) == list(range(len(parents)))
    place = {index: at for at, index in enumerate(order)}
    sizes = [1] * len(parents)
    for index in reversed(range(len(parents))):
        if parents[index] >= 0:
            sizes[parents[index]] += sizes[index]
    for index, parent in enumerate(parents):
        if parent >= 0:  # within its parent's stretch
            assert place[parent] < place[index] < place[parent] + sizes[parent]
    for one, other in itertools.pairwise(order):  # brothers keep their order
        if parents[one] == parents[other]:
            assert one < other


def described(parents: list[int], flags: list[int], hidden: list[int]) -> TreeDescription:
    count = len(parents)

    def pack(numbers: list[int]) -> bytes:
        return np.array(numbers, "<i4").tobytes()

    return TreeDescription(
        seq=0,
        ticket=0,
        chunk_size=4,
        total_chunks=count + sum(hidden),
        names=b"".join(bytes([index]) * 16 for index in range(count)),
        parents=pack(parents),
        tokens=pack([4] * count),
        chunks=pack([1] * count),
        tiers=bytes([1 + index % 15 for index in range(count)]),
        flags=bytes(flags),
        users=pack(list(range(count))),
        ages=np.full(count, 1.5, "<f4").tobytes(),
        hidden=pack(hidden),
        heads=pack([token for index in range(count) for token in (index, index)]),
        head_tokens=bytes([2] * count),
    )


def test_a_tree_in_portions() -> None:
    calls: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        calls.append(list(ids))
        return f"text {ids}"

    found = described([-1, -1, 0, 1, 0], [0, 1, 8, 1 | 16, 2], [0, 3, 0, 0, 0])
    texts = Texts(decode)  # type: ignore[arg-type]
    view = TreeView(found, texts, {bytes([2]) * 16: ["sess_a", "sess_b"]})
    assert len(list(view.portions(2))) == 2
    assert [node["id"][:2] for node in view.nodes] == ["00", "02", "04", "01", "03"]
    assert [node["parent"] for node in view.nodes] == [-1, 0, 0, -1, 3]
    assert [node["kind"] for node in view.nodes] == ["prefix", "prefix", "cut", "module", "module"]
    assert [node["text"] for node in view.nodes] == [f"text [{i}, {i}]" for i in (0, 2, 4, 1, 3)]
    assert [node["users"] for node in view.nodes] == [0, 2, 4, 1, 3]
    assert [node["salted"] for node in view.nodes] == [False, True, False, False, False]
    assert [node["computing"] for node in view.nodes] == [False, False, False, False, True]
    assert [node["sessions"] for node in view.nodes][1] == ["sess_a", "sess_b"]
    assert view.nodes[3]["children_hidden"] == 3
    again = TreeView(found, texts, {})
    list(again.portions(100))
    assert len(calls) == 5, "texts are decoded once"
    head = head_of(1, found, 9.0)
    assert head == {"group": 1, "now": 9.0, "chunk_size": 4, "chunks": 8, "chunks_shown": 5, "truncated": True}
    assert head_of(0, TreeDescription(seq=0, ticket=0), 9.0)["truncated"] is False


def test_decisions_are_remembered_with_what_was_known() -> None:
    core = RoutingCore("01")
    for controller in range(2):
        core.traits.set_identity(controller, KvIdentity(b"m", "f32", 4))
        core.set_available(controller, True)
    tokens = np.arange(12, dtype="<i4").tobytes()
    for ticket in range(3):
        exclude = frozenset([0]) if ticket == 2 else frozenset[int]()
        request = RouteRequest(tokens, exclude=exclude, origin=Origin(f"r{ticket}", "t", "s"))
        core.sent(ticket, core.route(request, float(ticket)), request, float(ticket))
    logged = core.log.after(0, 10)
    assert [each.number for each in logged] == [1, 2, 3]
    assert [each.at for each in logged] == [0.0, 1.0, 2.0]
    assert [each.origin.request for each in logged] == ["r0", "r1", "r2"]
    assert [each.is_again for each in logged] == [False, False, True]
    first, second, third = (each.weighed for each in logged)
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.tiers.sum() == 0, "nothing was known yet, and the first decision still says so"
    assert second.tiers[logged[0].controller].tolist() == [0, 0, 0, 12], "it is expected there"
    assert second.costs[logged[0].controller] != second.costs[1 - logged[0].controller]
    assert third.candidates.tolist() == [1]
    assert logged[2].controller == 1
    assert all(each.prompt_tokens == 12 for each in logged)


@given(st.integers(1, 5), st.integers(0, 12), st.integers(-2, 15), st.integers(1, 6))
def test_the_decision_log_is_a_ring(size: int, added: int, after: int, limit: int) -> None:
    core = RoutingCore("0")
    core.set_available(0, True)
    request = RouteRequest(b"")
    decision = core.route(request, 0.0)
    log = DecisionLog(size)
    for at in range(added):
        log.add(decision, request, float(at))
    everything = [number for number in range(1, added + 1) if number > after]
    assert [each.number for each in log.after(after, limit)] == everything[-min(size, limit) :]
    assert [each.number for each in log.newest()] == list(range(added, max(0, added - size), -1))


MARK = "\ue000"


def framed(*parts: str | int) -> str:
    return "".join(f"{MARK}{part}{MARK}" if isinstance(part, int) else part for part in parts)


def test_messages_are_found_by_the_frame() -> None:
    """Even where what they say stands in the template, too."""
    contents = ["user", " a ", "assistant"]
    text = "<user>user<end><assistant> a <end><user>assistant<assistant>"
    frame = framed("<user>", 0, "<end><assistant>", 1, "<end><user>", 2, "<assistant>")
    spans = message_spans(text, contents, frame)
    assert [(text[start:stop], number) for start, stop, number in spans] == [
        ("user", 0),
        (" a ", 1),
        ("assistant", 2),
    ]
    assert spans[0][0] == len("<user>")
    trimmed = message_spans(text.replace(" a ", "a"), contents, frame)
    assert [number for _, _, number in trimmed] == [0, 1, 2]


def test_messages_are_searched_for_where_a_template_looks_into_them() -> None:
    contents = ["first thing", "", "gone", "second thing"]
    text = "[first thing][altered][second thing]"
    for frame in ("", "[no marks]", framed("[", 0, "]"), framed("[", 0, "][", 7, "]")):
        found = message_spans(text, contents, frame)
        assert [(text[start:stop], number) for start, stop, number in found] == [
            ("first thing", 0),
            ("second thing", 3),
        ]
