"""A real cluster of two groups, and a real browser that looks at its dashboard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest
from cluster.harness import Cluster
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

CHROMIUM: Final = shutil.which("chromium")
SYSTEM: Final = (
    "You are the help desk of a library for programmers. Answer briefly, name the module that is meant, and "
    "give an example of a call. If a function can raise an error, say which one, and do not speak of others."
)
PATIENCE_MS: Final = 60_000
"""How long a page may take for what comes for certain: that is the machine's business."""
KEEP_ANSWER: Final = """
const real = window.fetch;
window.fetch = async (...call) => {
  const response = await real(...call);
  if (String(call[0]).endsWith("/chat/completions")) window.answer = response.clone().text().catch(() => "");
  return response;
};
"""
"""The protocol of browsers forgets the bodies of streams."""
QUESTIONS: Final = ("What does os.path.join do?", "What does json.dumps do?", "How do I read a file?")


@dataclass
class Dashboard:
    """The served dashboard, and its endpoints for comparison."""

    cluster: Cluster
    browser: Browser

    @property
    def url(self) -> str:
        """Of the page, with the key as `trunkline ui` prints it."""
        return f"{self.cluster.url}/ui#key={self.cluster.admin_key}"

    @property
    def workers(self) -> list[int]:
        """Their process ids. If they stand still, what runs goes on until a page has looked: on a busy machine a
        browser takes longer than the longest answer."""
        return [pid for name, pid in self.cluster.pids.items() if name.startswith("worker")]

    def get(self, path: str) -> Any:
        """An endpoint's answer."""
        answer = httpx.get(f"{self.cluster.url}/{path}", headers=self.cluster.admin_headers, timeout=30.0)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, *turns: str, session: str, tokens: int = 8) -> dict[str, Any]:
        """A request under the shared system message."""
        messages = [{"role": "system", "content": SYSTEM}, *({"role": "user", "content": turn} for turn in turns)]
        body = {"messages": messages, "session_id": session, "max_tokens": tokens}
        return self.cluster.post("/v1/chat/completions", body)


@dataclass
class Watched:
    """A page that may not complain, nor ask anybody but the router."""

    page: Page
    dashboard: Dashboard
    allowed: list[str] = field(default_factory=list)
    """Patterns of messages on the console that the test provokes."""
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def on_console(self, message: ConsoleMessage) -> None:
        """Errors and warnings are complaints."""
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def on_request(self, request: Request) -> None:
        """Who was asked."""
        self.asked.append(request.url)

    def open(self, view: str) -> Page:
        """A view, with data."""
        self.page.goto(f"{self.dashboard.url}&{view}")
        self.page.locator("#live[data-state=live]").wait_for()
        return self.page

    def check(self) -> None:
        """No complaints, no strangers."""
        wrong = [text for text in self.complaints if not any(re.search(one, text) for one in self.allowed)]
        assert wrong == []
        home = urlsplit(self.dashboard.cluster.url).netloc
        assert [url for url in self.asked if urlsplit(url).netloc != home] == []
        assert [url for url in self.asked if self.dashboard.cluster.admin_key in url] == []


@pytest.fixture(scope="session")
def served() -> Iterator[Cluster]:
    """Two groups."""
    if CHROMIUM is None:
        pytest.skip("these tests need Debian's `chromium`")
    with Cluster("--groups", "2", "--tp", "1", "--dtype", "float32") as cluster:
        yield cluster
        assert cluster.stop() == 0


@pytest.fixture(scope="module")
def dashboard(served: Cluster) -> Iterator[Dashboard]:
    """Two groups that have answered a few requests with a common beginning, and a browser.

    The browser lives for one file of tests. While it lives, Playwright runs an event loop in this thread, and
    other tests could not call `asyncio.run`.
    """
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        dashboard = Dashboard(served, browser)
        for number, question in enumerate(QUESTIONS):
            dashboard.chat(question, session=f"user-{number}")
            dashboard.chat(question, "And why?", session=f"user-{number}")
        yield dashboard
        browser.close()


@pytest.fixture
def make_page(dashboard: Dashboard) -> Iterator[Callable[..., Watched]]:
    """Opens pages, which are checked and closed in the end."""
    opened: list[tuple[BrowserContext, Watched]] = []

    def make(**options: Any) -> Watched:
        context = dashboard.browser.new_context(**{"reduced_motion": "reduce", **options})
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(KEEP_ANSWER)
        watched = Watched(context.new_page(), dashboard)
        watched.page.on("console", watched.on_console)
        watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        context.on("request", watched.on_request)
        opened.append((context, watched))
        return watched

    yield make
    for context, watched in opened:
        context.close()
        watched.check()


@pytest.fixture
def watched(make_page: Callable[..., Watched]) -> Watched:
    """A page on a desk."""
    return make_page(viewport={"width": 1280, "height": 860})
