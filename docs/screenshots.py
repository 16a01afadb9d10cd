"""Makes docs/images/ui-*.png: the dashboard of a real cluster with some users, light, dark and on a phone.

With `--film` it makes docs/images/dashboard.webp instead: the same dashboard in motion, of at most 3 MB.

Run as `python docs/screenshots.py`; needs Debian's `chromium` and the development extra. `--url` and `--key-file`
take a cluster that runs already. The figures in the pictures differ from run to run; what they show does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.async_api import Browser, Page, ViewportSize, async_playwright

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from cluster.harness import Cluster  # noqa: E402
from dashboard_traffic import Traffic  # noqa: E402

DESKTOP: Final = ViewportSize(width=1280, height=860)
FILM: Final = ViewportSize(width=1000, height=620)
SCENES: Final = (("overview", 12), ("tree", 24), ("requests", 10), ("routing", 10))
"""Views of the film and their frames."""
FRAME_MS: Final = 400
FILM_BYTES_MAX: Final = 3_000_000
PHONE: Final = ViewportSize(width=375, height=760)
USERS: Final = 12
WARM_SECONDS: Final = 40.0
"""Until the charts have something to show."""


@contextlib.contextmanager
def served(url: str, key_file: str) -> Iterator[tuple[str, str]]:
    """Address and admin key of a cluster."""
    if url:
        yield url, Path(key_file).read_text().strip()
        return
    with Cluster("--groups", "2", "--tp", "1", "--kv-memory", "48MiB", "--host-tier", "24MiB") as cluster:
        yield cluster.url, cluster.admin_key


async def opened(browser: Browser, address: str, dark: bool, size: ViewportSize) -> Page:
    """A page with the dashboard."""
    page = await browser.new_page(
        viewport=size, color_scheme="dark" if dark else "light", device_scale_factor=1.5 if size is DESKTOP else 2
    )
    await page.goto(address)
    return page


async def talk(page: Page) -> None:
    """A conversation of two turns in the playground."""
    await page.locator("#system").fill(
        "You are the help desk of a library for programmers. Answer in one sentence."
    )
    for question in ("What does os.path.join do?", "What does json.dumps do?"):
        await page.locator("#question").fill(question)
        await page.get_by_role("button", name="Send").click()
        await page.get_by_role("button", name="Send").wait_for(timeout=30_000)
        await (
            page.locator(".turn")
            .last.locator(".piece[data-source=device], .piece[data-source=new]")
            .first.wait_for()
        )


async def choose(page: Page) -> None:
    """A prompt of modules, run twice, so that the second finds its modules."""
    await page.get_by_role("button", name="Keep").click()
    await page.get_by_text("Kept “").wait_for(timeout=30_000)
    for path in ("rules", "oslo"):
        await page.locator(f'[id="module-{path}"]').check()
    await page.get_by_role("button", name="Run").click()
    await page.locator(".turn .piecefoot .legend").first.wait_for(timeout=30_000)


async def point_at_chunk(page: Page) -> None:
    """The first chunk that has something to say."""
    await page.locator(".chunk:not(.bundle)").nth(3).hover()


async def shoot(browser: Browser, base: str, folder: Path, settle: float) -> None:
    """Every picture."""
    plans = [
        ("overview", None, (False, True), True),
        ("tree", point_at_chunk, (False, True), True),
        ("requests", None, (False,), False),
        ("routing", None, (False,), False),
        ("playground", talk, (True, False), True),
        ("modules", choose, (False,), False),
    ]
    for view, act, darks, phone in plans:
        shots = [(dark, DESKTOP, "dark" if dark else "light") for dark in darks]
        if phone:
            shots.append((False, PHONE, "phone"))
        for dark, size, name in shots:
            page = await opened(browser, f"{base}&{view}", dark, size)
            await page.wait_for_timeout(settle * 1000)
            if act is not None:
                await act(page)
                await page.wait_for_timeout(400)
            await page.screenshot(path=folder / f"ui-{view}-{name}.png")
            await page.close()


async def film(browser: Browser, base: str, path: Path) -> None:
    """Write the moving picture, as sharp as the limit of bytes allows."""
    frames: list[Image.Image] = []
    for view, count in SCENES:
        page = await browser.new_page(viewport=FILM, color_scheme="light")
        await page.goto(f"{base}&{view}")
        await page.wait_for_timeout(2_500)
        for _ in range(count):
            frames.append(Image.open(io.BytesIO(await page.screenshot())).convert("RGB"))
            await page.wait_for_timeout(FRAME_MS)
        await page.close()
    for quality in (80, 65, 50, 35):
        frames[0].save(
            path, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0, quality=quality, method=4
        )
        if path.stat().st_size <= FILM_BYTES_MAX:
            return
    raise ValueError(f"{path.name} has {path.stat().st_size} bytes even at low quality")


async def main(url: str, key: str, options: argparse.Namespace) -> None:
    """Traffic, then pictures."""
    traffic = Traffic(url, {"Authorization": f"Bearer {key}"})
    await traffic.prepare()
    traffic.start(USERS)
    try:
        await asyncio.sleep(options.warm)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--font-render-hinting=none"]
            )
            if options.film:
                await film(browser, f"{url}/ui#key={key}", options.folder / "dashboard.webp")
            else:
                await shoot(browser, f"{url}/ui#key={key}", options.folder, 2.5)
            await browser.close()
    finally:
        await traffic.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="", help="of a cluster that runs; without: one is started")
    parser.add_argument("--key-file", default="", help="its admin.key")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument(
        "--warm", type=float, default=WARM_SECONDS, help="seconds of traffic before the first picture"
    )
    parser.add_argument("--film", action="store_true", help="make the moving picture only")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with served(options.url, options.key_file) as (address, admin_key):
        asyncio.run(main(address, admin_key, options))
