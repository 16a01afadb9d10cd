"""The page around the views: keys, colours, sizes, keyboard, what happens when nobody looks or nobody answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from ui.conftest import Dashboard, Watched

pytestmark = [pytest.mark.processes, pytest.mark.area("browser")]

VIEWS = {
    "overview": ".group",
    "tree": ".chunk",
    "requests": "tbody tr",
    "routing": ".decision",
    "playground": ".composer",
    "modules": ".moduleline",
}
"""And what each shows once it has data."""


def is_live(page: Page) -> None:
    expect(page.locator("#live")).to_have_attribute("data-state", "live")


def test_without_a_key_the_page_asks_for_one(dashboard: Dashboard, watched: Watched) -> None:
    watched.allowed.append("status of 401")
    page = watched.page
    page.goto(f"{dashboard.cluster.url}/ui")
    dialog = page.get_by_role("dialog", name="Key")
    expect(dialog).to_be_visible()
    dialog.get_by_label("Admin key").fill("nobody's key")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_contain_text("This key was refused.")
    dialog.get_by_label("Admin key").fill(dashboard.cluster.admin_key)
    dialog.get_by_role("button", name="Use this key").click()
    is_live(page)
    expect(dialog).not_to_be_visible()
    page.reload()
    is_live(page)
    page.get_by_role("button", name="Key").click()
    dialog.get_by_role("button", name="Forget").click()
    expect(dialog).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_key_in_the_address_is_taken_out_of_it(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("routing")
    is_live(page)
    assert page.url == f"{dashboard.cluster.url}/ui#routing"
    assert dashboard.cluster.admin_key not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    assert dashboard.cluster.admin_key in page.evaluate("JSON.stringify(sessionStorage)")


def test_dark_by_the_system_and_by_the_switch(make_page: Callable[..., Watched]) -> None:
    watched = make_page(color_scheme="dark")
    page = watched.open("overview")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.get_by_role("button", name="Dark or light").click()
    light = page.evaluate(background)
    brightness = [sum(int(part) for part in one[4:-1].split(", ")) for one in (dark, light)]
    assert brightness[0] < 150 < 600 < brightness[1]
    page.reload()
    assert page.evaluate(background) == light
    page.keyboard.press("d")
    assert page.evaluate(background) == dark


def test_a_phone_shows_all_without_scrolling_sideways(make_page: Callable[..., Watched]) -> None:
    watched = make_page(viewport={"width": 375, "height": 740}, has_touch=True)
    page = watched.open("overview")
    for view, content in VIEWS.items():
        page.locator(f"#tab-{view}").tap()
        page.locator(content).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, view
        for other in VIEWS:
            expect(page.locator(f"#tab-{other}")).to_be_in_viewport()


def test_the_keyboard_goes_everywhere(watched: Watched) -> None:
    page = watched.open("overview")
    for number, view in enumerate(VIEWS, 1):
        page.keyboard.press(str(number))
        expect(page.locator(f"#tab-{view}")).to_have_attribute("aria-selected", "true")
        expect(page.locator("#view")).to_have_attribute("data-view", view)
    page.locator("#tab-modules").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-overview")).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keyboard")).not_to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(make_page: Callable[..., Watched], scheme: str) -> None:
    page = make_page(color_scheme=scheme).open("overview")
    for number, (view, content) in enumerate(VIEWS.items(), 1):
        page.keyboard.press(str(number))
        page.locator(content).first.wait_for()
        results = Axe().run(page)
        assert results.violations_count == 0, f"{view}: {results.generate_report()}"


def test_nobody_is_asked_while_the_page_is_hidden(watched: Watched) -> None:
    watched.page.clock.install()
    page = watched.open("overview")
    page.evaluate(
        """() => { Object.defineProperty(document, "hidden", {get: () => true, configurable: true});
            document.dispatchEvent(new Event("visibilitychange")); }"""
    )
    expect(page.locator("#live")).to_have_attribute("data-state", "asleep")
    before = len(watched.asked)
    page.clock.run_for(30_000)
    assert len(watched.asked) == before
    with page.expect_request("**/ui/api/overview"):
        page.evaluate(
            """() => { delete document.hidden; document.dispatchEvent(new Event("visibilitychange")); }"""
        )
    is_live(page)


def test_the_page_comes_back_with_the_router(dashboard: Dashboard, watched: Watched) -> None:
    watched.allowed.append("net::ERR_")
    page = watched.open("overview")
    # It does not answer, and connections end: as while a router is started again.
    os.kill(dashboard.cluster.pids["router"], signal.SIGSTOP)
    try:
        page.context.set_offline(True)
        expect(page.locator("#banner")).to_contain_text("The router does not answer.")
        expect(page.locator("#live")).to_have_attribute("data-state", "lost")
    finally:
        os.kill(dashboard.cluster.pids["router"], signal.SIGCONT)
    page.context.set_offline(False)
    is_live(page)
    expect(page.locator("#banner")).not_to_be_visible()


def test_the_page_about_the_api_lists_every_operation(dashboard: Dashboard, watched: Watched) -> None:
    paths = dashboard.get("openapi.json")["paths"]
    page = watched.page
    page.goto(f"{dashboard.cluster.url}/docs")
    operations = page.locator("details")
    expect(operations).to_have_count(sum(len(methods) for methods in paths.values()))
    page.get_by_role("searchbox").fill("/v1/messages/count_tokens")
    expect(operations).to_have_count(1)
    operations.locator("summary").click()
    expect(operations.locator("tbody tr", has_text="tool_choice")).to_be_visible()
    assert Axe().run(page).response["violations"] == []
