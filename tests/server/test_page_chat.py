"""The page in a browser with the pocket SenseNova-U1, whose answers and pictures are right or wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pocket
from pocket.demo import scene, thing
from pocket.scoreboard import judge, picture
from server.browsing import HEIGHT, LOOKS, needs_chromium, pictures, sow
from server.browsing import browser as browser
from server.browsing import show as show
from server.tools import Running, held, png, told
from underpaint.server.news import Preview

POCKET = Path(pocket.__file__).parent / "sensenova-u1"
DRAW = {
    "en": "draw a large red circle at the top left, on a sky blue background, then move it to the bottom right",
    "zh": "画天蓝色背景，左上角有一个大红色圆形，然后把它移到右下角",
}
SAID = {
    "en": ["here is the picture:", "now the circle is moved to the bottom right:", "done"],
    "zh": ["这是图片：", "现在圆形移到右下角：", "完成"],
}
WHERE = {"en": "where is the red circle?", "zh": "红色圆形在哪里？"}
BOTTOM_RIGHT = {"en": "the bottom right", "zh": "右下角"}
COLOUR = {"en": "what colour is the circle?", "zh": "圆形是什么颜色？"}
RED = {"en": "red", "zh": "红色"}
DRAWN = [scene("sky blue", thing("large red circle", cell)) for cell in (0, 8)]
ROOM = scene("sky blue", thing("large red circle", 3), thing("small yellow square", 8))
ATTACHED = {"name": "a.png", "mimeType": "image/png", "buffer": png(picture(ROOM).convert("RGB"))}
RECORD = """talk => {
  window.shown = [];
  const note = record => shown.push(...[...record.addedNodes].filter(e => e.tagName === "IMG").map(e => e.className));
  new MutationObserver(records => records.forEach(note)).observe(talk, { childList: true, subtree: true });
}"""
pytestmark = needs_chromium


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    return start(POCKET, model_id="sensenova-u1")


def say(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def answer(page: Any) -> str:
    """The last answer, when it is whole."""
    page.wait_for_selector("#stop", state="hidden")
    return page.locator(".turn.assistant").last.inner_text()


@LOOKS
def test_a_dialogue_in_text_and_pictures(
    server: Running, show: Callable[..., Any], width: int, language: str, scheme: str
) -> None:
    """Two pictures and a question about the second, then a picture of the reader's in a new dialogue."""
    page, speech = show(server, width, language, scheme), language[:2]
    bodies = sow(page, seed=1)
    page.click("#tab-chat")
    page.locator("#talk").evaluate(RECORD)
    say(page, DRAW[speech])
    assert answer(page).split("\n") == SAID[speech]
    assert page.evaluate("shown") == ["unfinished", "unfinished", ""] * 2
    painted = pictures(page.locator(".turn.assistant img"))
    assert [judge(image, shown).problems for image, shown in zip(painted, DRAWN, strict=True)] == [(), ()]
    say(page, WHERE[speech])
    assert answer(page) == BOTTOM_RIGHT[speech]
    assert [len(body["messages"]) for body in bodies] == [1, 3]
    last = page.locator(".turn").last.bounding_box()
    assert last["y"] + last["height"] <= page.locator("#say").bounding_box()["y"], "the newest answer is in sight"
    page.click("#again")
    assert page.is_visible("#silence")
    page.set_input_files("#chat-files", [ATTACHED])
    page.wait_for_selector("#chat-references li")
    say(page, COLOUR[speech])
    assert answer(page) == RED[speech]
    assert len(bodies[-1]["messages"]) == 1
    assert page.locator("html").evaluate("e => [e.scrollWidth, e.scrollHeight]") == [width, HEIGHT]


@LOOKS
def test_a_cancelled_answer_is_remembered_as_far_as_it_came(
    server: Running, show: Callable[..., Any], width: int, language: str, scheme: str
) -> None:
    """In the middle of its second picture."""
    page, speech = show(server, width, language, scheme), language[:2]
    bodies = sow(page, seed=1)
    page.click("#tab-chat")
    with held(server.service.runner, due=lambda *_: any(preview.index == 1 for preview in told(server, Preview))):
        say(page, DRAW[speech])
        page.wait_for_selector(".turn.assistant img:not(.unfinished)")
        page.wait_for_selector(".turn.assistant img.unfinished")
        page.click("#stop")
        *said, note = answer(page).split("\n")
    assert said == SAID[speech][:2]
    assert note == page.locator(".turn small").inner_text()
    assert page.locator(".turn.assistant img").count() == 1
    server.idle()
    say(page, COLOUR[speech])
    assert answer(page) == RED[speech]
    assert [part["type"] for part in bodies[-1]["messages"][1]["content"]] == ["text", "image_url", "text"]


def test_a_question_without_an_answer_is_given_back(server: Running, show: Callable[..., Any]) -> None:
    """Whether the reader cancels or the server is not there."""
    page = show(server, 390, "en-GB", "light")
    page.click("#tab-chat")
    page.set_input_files("#chat-files", [ATTACHED])
    page.wait_for_selector("#chat-references li")
    page.route("**/v1/chat/completions", lambda route: None)
    page.fill("#message", WHERE["en"])
    page.focus("#send")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "stop"
    page.keyboard.press("Enter")
    assert_given_back(page)
    assert page.evaluate("document.activeElement.id") == "send"
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.press("#message", "Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert_given_back(page)
    page.unroute("**/v1/chat/completions")
    page.press("#message", "Enter")
    assert answer(page) == "the left"
    assert page.is_hidden("#notice")


def assert_given_back(page: Any) -> None:
    page.wait_for_selector("#stop", state="hidden")
    assert page.input_value("#message") == WHERE["en"]
    assert page.locator("#chat-references li").count() == 1
    assert page.locator(".turn").count() == 0
    assert page.is_visible("#silence")


def test_enter_sends_and_other_keys_do_not(server: Running, show: Callable[..., Any]) -> None:
    page = show(server, 1280, "en-GB", "light")
    page.click("#tab-chat")
    page.fill("#message", "a")
    page.press("#message", "Shift+Enter")
    assert page.input_value("#message") == "a\n"
    assert page.locator(".turn").count() == 0
    page.fill("#message", "")
    page.press("#message", "Enter")
    assert page.locator(".turn").count() == 0, "there is nothing to send"


def test_the_end_stays_in_sight_unless_the_reader_scrolls_up(server: Running, show: Callable[..., Any]) -> None:
    page = show(server, 390, "en-GB", "light")
    page.set_viewport_size({"width": 390, "height": 600})
    sow(page, seed=1)
    page.click("#tab-chat")
    say(page, DRAW["en"])
    answer(page)
    assert page.locator("#talk").evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight") <= 1
    with held(server.service.runner) as gate:
        say(page, DRAW["en"])
        gate.wait()
        page.wait_for_selector(".turn.assistant >> nth=1")
        page.locator("#talk").evaluate("e => { e.scrollTop = 0; }")
    answer(page)
    assert page.locator("#talk").evaluate("e => e.scrollTop") == 0


@LOOKS
def test_painting_and_editing(
    server: Running, show: Callable[..., Any], width: int, language: str, scheme: str
) -> None:
    page = show(server, width, language, scheme)
    page.fill("#seed", "7")
    page.fill("#prompt", "a large yellow cross in the centre, on a brown background")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("figure figcaption button")
    page.locator("figure").first.get_by_role("button").first.click()
    page.wait_for_selector("#progress", state="hidden")
    page.fill("#prompt", "make the yellow cross green")
    page.click("#go")
    page.wait_for_selector("figure:nth-of-type(2) figcaption button")
    expected = [scene("brown", thing(f"large {colour} cross", 4)) for colour in ("green", "yellow")]
    painted = pictures(page.locator("figure img"))
    assert [judge(image, shown).problems for image, shown in zip(painted, expected, strict=True)] == [(), ()]
