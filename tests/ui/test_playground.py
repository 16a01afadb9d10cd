"""The playground talks to the model, and its colours add up to what the router says of each prompt."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from cluster.chaos import frozen
from playwright.sync_api import Page, Route, expect
from ui.conftest import SYSTEM, Dashboard, Watched

pytestmark = [pytest.mark.processes, pytest.mark.area("browser")]


def sent(page: Page, question: str) -> dict[str, Any]:
    """Ask in the playground; see `told`."""
    page.get_by_role("textbox", name="Message", exact=True).fill(question)
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_empty()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".turn").last.locator(".piecefoot")).to_contain_text("first after")
    return told(page)


def told(page: Page) -> dict[str, Any]:
    """What the router said of the newest answer: its text, and the last events' `usage` and `cache`."""
    stream: str = page.evaluate("window.answer")
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    found: dict[str, Any] = {}
    for event in events:
        found |= {name: event[name] for name in ("usage", "cache") if event.get(name)}
    found["text"] = "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )
    return found


def coloured(page: Page) -> Counter[str]:
    """Tokens of the newest prompt, by where its KV came from."""
    pieces = (
        page.locator(".turn")
        .last.locator(".piece")
        .evaluate_all("all => all.map(one => [one.dataset.source, Number(one.dataset.tokens)])")
    )
    counts: Counter[str] = Counter()
    for source, tokens in pieces:
        counts[source] += tokens
    return counts


def expected(answer: dict[str, Any]) -> Counter[str]:
    """The same, as the router says it."""
    counts = Counter(answer["cache"]["tiers"])
    counts["new"] = answer["usage"]["prompt_tokens"] - counts.total()
    return +counts


def test_colours_add_up_to_the_prompt(watched: Watched) -> None:
    page = watched.open("playground")
    page.get_by_label("System message").fill(SYSTEM)
    page.get_by_label("Most tokens").fill("20")
    first = sent(page, "Which module reads JSON?")
    assert coloured(page) == expected(first)
    assert page.locator(".turn").last.locator(".answer .text").inner_text() == first["text"].strip()
    second = sent(page, "And which one writes it?")
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    assert coloured(page) == expected(second)
    assert coloured(page)["device"] >= first["usage"]["prompt_tokens"] // 64 * 64
    shown = page.locator(".turn").last.locator(".pieces").inner_text()
    assert "Which module reads JSON?" in shown
    expect(page.locator(".turn").last.locator("summary")).to_contain_text(
        f"{second['usage']['prompt_tokens']} tokens"
    )


def without_end(route: Route) -> None:
    """The same request, whose answer goes on behind the model's end."""
    body = route.request.post_data_json
    assert body is not None
    route.continue_(post_data=json.dumps(body | {"ignore_eos": True}))


def test_an_answer_streams_and_stops(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("playground")
    page.route("**/v1/chat/completions", without_end)
    page.get_by_label("Most tokens").fill("1900")
    page.get_by_role("textbox", name="Message", exact=True).fill("List the modules of the standard library.")
    page.get_by_role("button", name="Send").click()
    text = page.locator(".answer .text")
    expect(text).to_have_text(re.compile(r"\S"))
    expect(text).not_to_have_text(text.inner_text())

    def stop() -> None:
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".turn .piecefoot")).to_have_text("Stopped.")

    frozen(dashboard.workers, stop)  # so that the answer does not end before
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("tab", name="Requests").click()
    expect(page.get_by_text("No request is running or waiting.")).to_be_visible()


def test_settings_are_sent_and_errors_are_shown(watched: Watched) -> None:
    watched.allowed.append("status of 400")
    page = watched.open("playground")
    page.get_by_label("Temperature").fill("7")
    page.get_by_role("textbox", name="Message", exact=True).fill("Hi")
    page.keyboard.press("Enter")
    expect(page.locator(".turn .error")).to_contain_text("temperature")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_stored_session_gets_only_what_is_new(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("playground")
    page.get_by_role("button", name="Stored session").click()
    page.get_by_label("Most tokens").fill("12")
    first = sent(page, "What does sys.exit do?")
    second = sent(page, "When?")
    assert coloured(page) == expected(second)
    assert second["usage"]["prompt_tokens_details"]["session_tokens"] >= first["usage"]["prompt_tokens"]
    note = page.locator(".note").inner_text()
    session = note.split()[-1]
    assert dashboard.get(f"v1/sessions/{session}")["turns"] == 2
    # The conversation is still there after a look at another view.
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Overview").click()
    page.get_by_role("tab", name="Playground").click()
    expect(page.locator(".turn")).to_have_count(2)


def test_wrong_pml_shows_its_line(watched: Watched) -> None:
    watched.allowed.append("status of 400")
    page = watched.open("modules")
    field = page.get_by_label("PML source")
    source = field.input_value()
    field.fill(source.replace("</union>", "</onion>"))
    page.get_by_role("button", name="Check").click()
    line = source[: source.index("</union>")].count("\n") + 1
    expect(page.locator(".said .error")).to_contain_text("E_XML")
    expect(page.locator(".said .error")).to_contain_text(f"line {line}")
    expect(page.locator(".lines .wrong")).to_have_text(str(line))
    field.fill(source)
    expect(page.locator(".lines .wrong")).to_have_count(0)
    page.get_by_role("button", name="Check").click()
    expect(page.locator(".said .good")).to_contain_text("is fine")


def test_a_checked_schema_is_not_kept(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("modules")
    source = page.get_by_label("PML source").input_value()
    page.get_by_label("PML source").fill(source.replace('name="example"', 'name="only-checked"'))
    page.get_by_role("button", name="Check").click()
    expect(page.locator(".said .good")).to_contain_text("“only-checked” is fine")
    assert "only-checked" not in [one["name"] for one in dashboard.get("v1/schemas")["data"]]


def test_modules_are_chosen_and_run(dashboard: Dashboard, watched: Watched) -> None:
    page = watched.open("modules")
    page.get_by_role("button", name="Keep").click()
    expect(page.locator(".said .good")).to_contain_text("Kept “example”, version 1")
    schema = dashboard.get("v1/schemas/example")
    for module in schema["modules"]:
        if module["path"]:
            line = page.locator(f'.moduleline[data-path="{module["path"]}"]')
            expect(line).to_contain_text(f"{module['tokens']} tokens")
            expect(line.locator(".tier")).to_have_text(module["tier"])
    rome, oslo = page.get_by_label("rome"), page.get_by_label("oslo")
    expect(rome).to_be_checked()
    oslo.check()
    expect(rome).not_to_be_checked()
    page.locator('[id="module-rules"]').check()
    page.locator(".params input").fill("five")
    with page.expect_request("**/v1/chat/completions") as waiting:
        page.get_by_role("button", name="Run").click()
    expect(page.locator(".piecefoot")).to_contain_text("first after")
    answer = told(page)
    sent_body = waiting.value.post_data_json
    assert sent_body is not None
    assert sent_body["prompt"] == {
        "schema": "example",
        "modules": [{"path": "rules", "args": {"days": "five"}}, "oslo"],
    }
    assert coloured(page) == expected(answer)
    module = page.locator(".piece[data-kind=module][data-module=oslo]").first
    expect(module).to_have_attribute("data-source", "device")
    expect(page.locator(".piece[data-kind=argument]").first).to_contain_text("five")
    expect(page.locator(".piecefoot")).to_contain_text(
        f"{answer['usage']['prompt_tokens_details']['module_tokens']} in modules"
    )
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".said .good")).to_contain_text("forgotten")
    assert dashboard.get("v1/schemas")["data"] == []
