"""The page in a browser, where there is one: it paints, previews, cancels, edits and talks at both widths."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.tools import Running, slow_down

CHROMIUM = Path("/usr/bin/chromium")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; whatever it asked of others, or broke, fails the test."""
    faults: list[str] = []
    contexts = []

    def open_page(server: Running, width: int, language: str) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 844}, locale=language))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.append(request.url) if _is_foreign(request.url, server) else None)
        page.goto(server.url)
        page.wait_for_selector("#size option", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def _is_foreign(url: str, server: Running) -> bool:
    return not url.startswith((server.url, "data:", "blob:"))


@pytest.mark.parametrize(("width", "language"), [(1280, "en-GB"), (390, "zh-CN")])
def test_painting(
    start: Callable[..., Running], show: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, width: int, language: str
) -> None:
    server = start()
    page = show(server, width, language)
    page.fill("#prompt", "a red teapot")
    page.fill("#seed", "7")
    page.fill("#n", "2")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("figure:nth-of-type(2) figcaption button")
    page.locator("figure").first.get_by_role("button").first.click()
    page.wait_for_selector("#references li")
    page.fill("#n", "1")
    page.click("#go")
    page.wait_for_selector("figure:nth-of-type(3) figcaption button")
    page.wait_for_selector("#progress", state="hidden")
    slow_down(monkeypatch, server.site, 0.05)
    page.fill("#steps", "100")
    page.click("#go")
    page.wait_for_selector("figure.unfinished img")
    page.click("#cancel")
    page.wait_for_selector("#progress", state="hidden")
    assert page.locator("figure").count() == 3
    server.idle()
    page.locator("figure").last.get_by_role("button").nth(1).click()
    assert page.input_value("#seed") == "7"
    assert page.locator("#references li").count() == 0
    assert page.locator("html").evaluate("e => e.scrollWidth") <= width


@pytest.mark.parametrize(("width", "language"), [(1280, "en-GB"), (390, "zh-CN")])
def test_talking(
    start: Callable[..., Running], show: Callable[..., Any], talker_root: Path, width: int, language: str
) -> None:
    server = start(talker_root)
    page = show(server, width, language)
    page.click("#tab-chat")
    page.uncheck("#may-paint")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    page.wait_for_selector(".turn.assistant")
    page.click("#again")
    page.wait_for_selector("#stop", state="hidden")
    assert page.locator(".turn").count() == 0
    assert page.locator("html").evaluate("e => e.scrollWidth") <= width
    server.idle()
