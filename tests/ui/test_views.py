"""Every view of the dashboard shows what the endpoints say."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect
from ui.conftest import Dashboard, Watched

pytestmark = [pytest.mark.processes, pytest.mark.area("browser")]


def figure(page: Page, name: str) -> str:
    """One of the overview's big figures."""
    return page.locator(f"[data-figure={name}] b").inner_text()


def whole(value: float) -> str:
    return f"{round(value):,}"


@contextmanager
def running_request(dashboard: Dashboard, session: str) -> Iterator[None]:
    """A stream that has begun, and goes on until it is left: workers stand still."""
    begun, leave = threading.Event(), threading.Event()

    def read() -> None:
        body = {
            "messages": [{"role": "user", "content": "Count. " * 100}],  # longer than a chunk
            "session_id": session,
            "max_tokens": 1000,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{dashboard.cluster.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=dashboard.cluster.admin_headers, timeout=60.0) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    begun.set()
                if leave.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(60.0)
        for pid in dashboard.workers:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        leave.set()
        for pid in dashboard.workers:
            os.kill(pid, signal.SIGCONT)
        reader.join()


def test_the_overview_has_the_figures_of_all_groups(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("overview")
    cards = page.locator(".group")
    expect(cards).to_have_count(2)
    groups = dashboard.get("ui/api/overview")["groups"]
    for group in groups:
        card = page.get_by_role("article", name=f"Group {group['group']}")
        expect(card.locator(".badge").first).to_have_text(group["status"])
        device = card.locator(".tierline[data-tier=device] .figure")
        blocks = group["blocks"]
        expect(device).to_have_text(f"{blocks['total'] - blocks['free']} / {blocks['total']}")
        for tier in group["tiers"]:
            expect(card.locator(f".tierline[data-tier={tier['name']}]")).to_have_count(1)
    prompt, cached = (sum(group[name] for group in groups) for name in ("prompt_tokens", "cached_tokens"))
    saved = page.locator("[data-figure=saved]")
    expect(saved.locator("b")).to_have_text(whole(cached))
    expect(saved.locator("small")).to_have_text(f"of {whole(prompt)} prompt tokens")
    expect(page.locator(".alert")).to_have_count(0)
    expect(page.locator(".plot canvas")).to_have_count(4)


def test_the_overview_counts_what_runs(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("overview")
    expect(page.locator("[data-figure=running] b")).to_have_text("0")
    with running_request(dashboard, "runs"):
        expect(page.locator("[data-figure=running] b")).to_have_text("1")
    expect(page.locator("[data-figure=running] b")).to_have_text("0")


def test_alerts_name_the_group_and_the_tier(watched: Watched) -> None:
    watched.open("requests")
    alerts = watched.page.evaluate(
        """async () => (await import("/ui/static/js/core/alerts.js")).alertsOf({groups: [
            {group: 0, status: "ready", tiers: [{name: "disk", problem: "no space"}]},
            {group: 1, status: "starting", detail: "rank 0 not there", tiers: []}]})"""
    )
    assert [alert["level"] for alert in alerts] == ["bad", "warn"]
    assert "Group 1" in alerts[0]["text"]
    assert "rank 0 not there" in alerts[0]["detail"]
    assert "disk" in alerts[1]["text"]
    assert alerts[1]["detail"] == "no space"


def group_with_tree(dashboard: Dashboard) -> tuple[int, dict[str, Any]]:
    """The group with the most cached, and its tree."""
    trees = [dashboard.get(f"ui/api/tree?group={group}") for group in range(2)]
    best = max(trees, key=lambda tree: len(tree["nodes"]))
    return best["group"], best


def opened_tree(dashboard: Dashboard, watched: Watched) -> tuple[Page, dict[str, Any]]:
    page = watched.open("tree")
    group, tree = group_with_tree(dashboard)
    expect(page.get_by_label("Group", exact=True).locator("option")).to_have_count(2)
    page.get_by_label("Group", exact=True).select_option(str(group))
    tokens = sum(node["tokens"] for node in tree["nodes"])
    expect(page.locator(".summary")).to_contain_text(f"{whole(tokens)} tokens")
    return page, tree


def test_the_tree_is_as_wide_as_its_tokens(dashboard: Dashboard, watched: Watched) -> None:
    page, tree = opened_tree(dashboard, watched)
    chunks = sum(node["chunks"] for node in tree["nodes"])
    expect(page.locator(".summary")).to_contain_text(f"{whole(chunks)} chunk")
    shared = max(tree["nodes"], key=lambda node: node["tokens"])
    boxes = page.locator(".chunk:not(.bundle)").evaluate_all(
        "all => all.map(one => [one.dataset.part, one.getBoundingClientRect().width])"
    )
    found = dict(boxes)
    by_id = {node["id"]: node["tokens"] for node in tree["nodes"]}
    per_token = (found[shared["id"]] + 1) / shared["tokens"]
    compared = [(width + 1, by_id[key] * per_token) for key, width in boxes if key in by_id and by_id[key] > 8]
    assert len(compared) > 2
    assert all(abs(width - wanted) < 2.5 for width, wanted in compared)


def test_the_tree_zooms_by_mouse(dashboard: Dashboard, watched: Watched) -> None:
    page, _ = opened_tree(dashboard, watched)
    box = page.locator(".chunk:not(.bundle)", has_text=re.compile("help desk")).first
    before = box.bounding_box()
    box.click(position={"x": 8, "y": 4})
    expect(page.get_by_role("navigation", name="Zoomed to").locator("button")).to_have_count(2)
    expect(page.locator(".details blockquote")).to_contain_text("You are the help desk")
    after = box.bounding_box()
    assert before is not None
    assert after is not None
    assert after["height"] >= before["height"]  # it may be the only one and fill the view before
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="All").click()
    expect(page.get_by_role("button", name="Whole tree")).to_be_disabled()
    assert box.bounding_box() == before
    page.locator(".chunks").hover(position={"x": 30, "y": 40})
    page.mouse.wheel(0, -400)
    grown = box.bounding_box()
    assert grown is not None
    assert grown["width"] > before["width"]


def test_the_tree_zooms_by_keyboard(dashboard: Dashboard, watched: Watched) -> None:
    page, tree = opened_tree(dashboard, watched)
    page.keyboard.press("ArrowRight")  # takes the keyboard to the tree
    expect(page.locator(".chunk.marked")).to_have_count(1)
    roots = sum(node["parent"] < 0 for node in tree["nodes"])
    for _ in range(roots):
        if "help desk" in page.locator(".details blockquote").inner_text():
            break
        page.keyboard.press("ArrowDown")
    expect(page.locator(".details blockquote")).to_contain_text("help desk")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".details blockquote")).not_to_contain_text("You are the help desk")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Whole tree")).to_be_enabled()
    page.keyboard.press("Backspace")
    expect(page.get_by_role("button", name="Whole tree")).to_be_disabled()


def test_the_tree_finds_text_and_pauses(dashboard: Dashboard, watched: Watched) -> None:
    page, _ = opened_tree(dashboard, watched)
    page.keyboard.press("/")
    page.keyboard.type("help desk")
    expect(page.locator(".chunk.found").first).to_be_visible()
    expect(page.locator(".chunk.dim").first).to_be_attached()
    page.keyboard.press("Enter")
    expect(page.locator(".details blockquote")).to_contain_text("help desk")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Go on")).to_have_attribute("aria-pressed", "true")
    page.get_by_label("Search the tree").fill("nobody said this")
    expect(page.locator(".toolbar [role=status]")).to_have_text("0 found")


def test_chunks_in_use_stand_out(dashboard: Dashboard, watched: Watched) -> None:
    page, _ = opened_tree(dashboard, watched)
    with running_request(dashboard, "user-0"):
        [request] = [one for one in dashboard.get("ui/api/requests") if one["session"] == "user-0"]
        page.get_by_label("Group", exact=True).select_option(str(request["group"]))
        expect(page.locator(".chunk.used").first).to_be_visible()
    expect(page.locator(".chunk.used")).to_have_count(0)


def test_requests_come_and_go(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("requests")
    table = page.get_by_role("region", name="Requests, table")
    expect(page.get_by_text("No request is running or waiting.")).to_be_visible()
    with running_request(dashboard, "long-one"):
        row = table.locator("tbody tr", has_text="long-one")
        expect(row).to_have_count(1)
        expect(row.locator(".badge")).to_have_text("running")
        [known] = [one for one in dashboard.get("ui/api/requests") if one["session"] == "long-one"]
        expect(row.locator("code").first).to_have_attribute("title", known["id"])
        expect(row.locator("td").nth(4)).to_have_text(whole(known["prompt_tokens"]))
        page.get_by_label("Filter requests").fill("somebody else")
        expect(page.get_by_text("No requests match.")).to_be_visible()
    page.get_by_label("Filter requests").fill("")
    expect(page.get_by_text("No request is running or waiting.")).to_be_visible()


def test_sessions_sort_and_filter(dashboard: Dashboard, watched: Watched) -> None:
    stored = dashboard.cluster.post("/v1/sessions", {"messages": [{"role": "system", "content": "Be brief."}]})
    page = watched.open("requests")
    table = page.get_by_role("region", name="Sessions, table")
    row = table.locator(f'tr:has(code[title="{stored["id"]}"])')
    expect(row.locator(".badge").first).to_have_text("stored")
    known = {one["id"] for one in dashboard.get("ui/api/sessions")}
    expect(table.locator("tbody tr")).to_have_count(len(known))
    table.get_by_role("button", name="Session").click()
    names = table.locator("tbody th code").evaluate_all("all => all.map(one => one.title)")
    assert names == sorted(
        names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )
    table.get_by_role("button", name="Session").click()
    assert table.locator("tbody th code").evaluate_all("all => all.map(one => one.title)") == names[::-1]
    page.get_by_label("Filter sessions").fill("user-1")
    expect(table.locator("tbody tr")).to_have_count(1)


def test_routing_shows_decisions_with_costs(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("routing")
    decisions = dashboard.get("ui/api/decisions?after=0")["decisions"]
    expect(page.locator(".decision")).to_have_count(min(len(decisions), 120))
    newest, first = decisions[-1], page.locator(".decision").first
    expect(first.locator("b").first).to_have_text(f"→ group {newest['group']}")
    expect(first.locator(".badge").first).to_have_text(newest["reason"])
    expect(first.locator(".cost")).to_have_count(len(newest["match"]))
    for cost in newest["match"]:
        expect(first.locator(".cost").nth(newest["match"].index(cost))).to_contain_text(whole(cost["cost"]))
    expect(first.locator(".cost[aria-current]")).to_have_count(1)
    page.get_by_label("Filter decisions").fill("user-2")
    expect(page.locator(".decision")).to_have_count(sum(one["session"] == "user-2" for one in decisions))
    dashboard.chat(session="user-2")
    expect(page.locator(".decision")).to_have_count(sum(one["session"] == "user-2" for one in decisions) + 1)
