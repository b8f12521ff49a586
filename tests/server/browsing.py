"""A browser that looks at the page of a server, and fails the test for whatever it must not do."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from timing import WAIT_SECONDS

from server.tools import Running

CHROMIUM = Path("/usr/bin/chromium")
HEIGHT = 844
LOOKS = pytest.mark.parametrize(
    ("width", "language", "scheme"), [(1280, "en-GB", "light"), (390, "zh-CN", "dark")], ids=["wide", "phone"]
)
IN_SIGHT = "e => { const box = e.getBoundingClientRect(); return box.top < innerHeight && box.bottom > 0; }"
playwright = pytest.importorskip("playwright.sync_api")
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; whatever it asked of others, broke, or complained of fails the test."""
    faults: list[str] = []
    contexts = []

    def open_page(server: Running, width: int, language: str, scheme: str) -> Any:
        look = {"viewport": {"width": width, "height": HEIGHT}, "locale": language, "color_scheme": scheme}
        contexts.append(browser.new_context(**look))
        contexts[-1].set_default_timeout(1000 * WAIT_SECONDS)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if _is_complaint(message) else None)
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


def _is_complaint(message: Any) -> bool:
    """The browser notes refused requests by itself; the page shows those as sentences."""
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")


def pictures(images: Any) -> list[Image.Image]:
    """What the ``<img>`` elements of a locator show."""
    urls = images.evaluate_all("all => all.map(image => image.src)")
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def sow(page: Any, seed: int) -> list[dict[str, Any]]:
    """Give every question of the chat a seed, which the page leaves to the server. Returns a list that their bodies
    come into."""
    bodies: list[dict[str, Any]] = []

    def pass_on(route: Any) -> None:
        bodies.append({**route.request.post_data_json, "seed": seed})
        route.continue_(post_data=json.dumps(bodies[-1]))

    page.route("**/v1/chat/completions", pass_on)
    return bodies
