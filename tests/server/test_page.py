"""The page in a browser, where there is one: it paints, previews, cancels, edits and talks at both widths."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from timing import wait_until

from server.browsing import HEIGHT, IN_SIGHT, LOOKS, needs_chromium
from server.browsing import browser as browser
from server.browsing import show as show
from server.test_chat import script as script
from server.tools import ENDLESS, Running, held, png, record, told
from underpaint.server.news import Preview

RED = png(Image.new("RGB", (64, 64), "red"))
CONTRAST = """element => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  let ground = element;
  while (channels(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
  const [one, other] = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor]
    .map((text) => luminance(channels(text))).sort((a, b) => b - a);
  return (one + 0.05) / (other + 0.05);
}"""
"""Relative luminances as WCAG 2.2 defines them."""
pytestmark = needs_chromium


@pytest.fixture
def small_talker(talker_root: Path, tmp_path: Path) -> Path:
    """The tiny SenseNova-U1, whose pictures are as small as it where nobody says how large."""
    root = tmp_path / "small"
    shutil.copytree(talker_root, root)
    defaults = {"reference_resolution": 128, "num_inference_steps": 3, "page_rows": 16}
    (root / "underpaint.json").write_text(json.dumps(defaults))
    return root


@LOOKS
def test_painting(
    start: Callable[..., Running], show: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, width: int, language: str,
    scheme: str,
) -> None:  # fmt: skip
    server = start()
    page = show(server, width, language, scheme)
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
    page.fill("#steps", "100")
    cancels = record(monkeypatch, server.site.desk.crew, "cancel")
    with held(server.service.runner, due=lambda *_: bool(told(server, Preview))):
        page.click("#go")
        page.wait_for_selector("figure.unfinished img")
        assert page.locator("figure.unfinished img").evaluate(IN_SIGHT)
        page.click("#cancel")
        wait_until(lambda: bool(cancels))
    page.wait_for_selector("#progress", state="hidden")
    assert page.locator("figure").count() == 3
    server.idle()
    page.locator("figure").last.get_by_role("button").nth(1).click()
    assert page.input_value("#seed") == "7"
    assert page.locator("#references li").count() == 0
    assert page.locator("html").evaluate("e => e.scrollWidth") <= width


def test_a_painting_that_the_server_has_not_taken_on_yet(
    start: Callable[..., Running], show: Callable[..., Any]
) -> None:
    """While the request is on its way another cannot be sent, and Cancel is not lost."""
    server = start(max_steps=ENDLESS)
    page = show(server, 1280, "en-GB", "light")
    on_their_way: list[Any] = []
    page.route("**/v1/jobs", lambda route: on_their_way.append(route))
    page.fill("#prompt", "a red teapot")
    page.evaluate(f"document.getElementById('steps').max = document.getElementById('steps').value = {ENDLESS}")
    for _ in range(2):
        page.press("#prompt", "Control+Enter")
    page.click("#cancel")
    while not on_their_way:
        page.wait_for_timeout(50)
    page.wait_for_timeout(200)  # for another, if there is one
    (request,) = on_their_way
    request.continue_()
    page.wait_for_selector("#progress", state="hidden")
    assert page.inner_text("#notice") == "Cancelled."
    server.idle()


@LOOKS
def test_talking(
    start: Callable[..., Running], show: Callable[..., Any], small_talker: Path, script: list[int], width: int,
    language: str, scheme: str,
) -> None:  # fmt: skip
    """With pictures in the question, pictures in the answer, and a question about those."""
    server = start(small_talker)
    page = show(server, width, language, scheme)
    page.click("#tab-chat")
    assert page.is_visible("#silence")
    page.set_input_files("#chat-files", [{"name": "a.png", "mimeType": "image/png", "buffer": RED}])
    page.wait_for_selector("#chat-references li")
    page.fill("#message", "draw")
    page.press("#message", "Enter")
    page.wait_for_selector(".turn.assistant img")
    page.wait_for_selector("#stop", state="hidden")
    assert page.locator("#chat-references li").count() == 0
    sizes = page.locator("#talk img").evaluate_all("all => all.map(i => [i.naturalWidth, i.clientWidth > 100])")
    assert sizes == [[64, True], [128, True]]
    assert page.inner_text(".turn.assistant").split() == ["describe", "the", "picture"] * 2
    server.idle()
    page.uncheck("#may-paint")
    page.fill("#message", "what is it?")
    page.press("#message", "Enter")
    page.wait_for_selector(".turn.assistant >> nth=1")
    page.click("#again")
    page.wait_for_selector("#stop", state="hidden")
    assert page.locator(".turn").count() == 0
    assert page.is_visible("#silence")
    assert page.locator("html").evaluate("e => e.scrollWidth") <= width
    # What is written is never out of sight, however little there is of it.
    assert page.locator("#send").evaluate("e => e.getBoundingClientRect().bottom") <= HEIGHT
    server.idle()


def test_the_keyboard_is_enough(start: Callable[..., Running], show: Callable[..., Any]) -> None:
    """From the top of the page to a picture of an added reference, and back into the form, without a mouse."""
    server = start()
    page = show(server, 1280, "en-GB", "light")
    picked = {"name": "a.png", "mimeType": "image/png", "buffer": RED}
    page.on("filechooser", lambda chooser: chooser.set_files([picked]))
    page.keyboard.press("Tab")
    assert focused(page) == "language"
    page.keyboard.press("Tab")
    assert focused(page) == "prompt"
    page.keyboard.type("a red teapot")
    page.keyboard.press("Tab")
    assert focused(page) == "pick"
    page.keyboard.press("Enter")
    page.wait_for_selector("#references li")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("figure figcaption button")
    page.wait_for_selector("#progress", state="hidden")
    page.focus("#go")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.word") == "use"
    page.keyboard.press("Space")
    assert page.locator("#references li").count() == 2
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert focused(page) == "prompt"
    assert page.locator("#references li").count() == 1
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the focus is must be seen"


def focused(page: Any) -> str:
    return page.evaluate("document.activeElement.id")


def test_the_other_language_is_one_click_away_and_is_kept(
    start: Callable[..., Running], show: Callable[..., Any], talker_root: Path
) -> None:
    page = show(start(talker_root), 390, "fr-FR", "light")
    assert page.locator("html").get_attribute("lang") == "en"
    words = page.locator("[data-word]").all_text_contents()
    page.click("#language")
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    others = page.locator("[data-word]").all_text_contents()
    assert all(words)
    assert all(others)
    assert not set(words) & set(others)
    page.reload()
    page.wait_for_selector("#size option", state="attached")
    assert page.locator("[data-word]").all_text_contents() == others


@LOOKS
def test_texts_stand_out(
    start: Callable[..., Running], show: Callable[..., Any], width: int, language: str, scheme: str
) -> None:
    """At least 4.5 to 1, as WCAG 2.2 asks for (1.4.3), in light and in dark."""
    page = show(start(), width, language, scheme)
    for selector in ("h1", "#model", "#empty", "#prompt", "#go", "#language", "#form label"):
        assert page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector


def test_a_refusal_is_shown_as_a_sentence(start: Callable[..., Running], show: Callable[..., Any]) -> None:
    page = show(start(), 390, "en-GB", "dark")
    page.fill("#prompt", "a")
    page.fill("#guidance", "4")
    page.fill("#negative", "blurred")
    page.fill("#seed", "99999999999999999999")
    page.click("#go")
    page.wait_for_selector("#notice:not([hidden])")
    assert "seed" in page.inner_text("#notice")
    assert page.is_enabled("#go")


def test_a_negative_prompt_without_guidance_is_not_dropped(
    start: Callable[..., Running], show: Callable[..., Any]
) -> None:
    page = show(start(), 1280, "en-GB", "light")
    page.fill("#negative", "blurred")
    page.fill("#prompt", "a red teapot")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert "no effect without true_cfg_scale" in page.inner_text("#notice")
