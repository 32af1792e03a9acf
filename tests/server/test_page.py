"""The page in a real browser: a conversation, kept chats, again, calls and thoughts, a phone (about 20 s)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the path")
Acted = Callable[..., tuple[Any, Any]]

CALL = (
    'Let me see.</think>I look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, running: Any, **options: Any) -> tuple[Any, list[str]]:
    """A page, and what went wrong on it."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(15_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(running.url)
    return page, errors


def shot(page: Any, name: str) -> None:
    """A picture for people, where they asked for one."""
    folder = os.environ.get("CEDAR_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")
    page.wait_for_selector("#send", state="visible")


def texts(page: Any) -> list[str]:
    return list(page.locator("#log article > .text").all_inner_texts())


def test_a_conversation_that_is_kept(acted: Acted, browser: Any) -> None:
    running, actor = acted("It lives in the forest.", "Near the river.", "By the old bridge.", "A new chat's answer.")
    page, errors = opened(browser, running)
    page.wait_for_selector("#model:has-text('bytes a token')")
    shot(page, "empty")
    ask(page, "Where does the fox live?")
    ask(page, "Where exactly?")
    assert texts(page) == ["Where does the fox live?", "It lives in the forest.", "Where exactly?", "Near the river."]
    assert "It lives in the forest." in actor.prompt()
    page.click("text=Again")
    page.wait_for_selector("text=By the old bridge.")
    assert "Near the river." not in texts(page) and "Near the river." not in actor.prompt()
    page.locator("#panel summary").click()
    page.wait_for_selector("#now:has-text('waiting')")
    assert "found in the cache" in page.inner_text("#prompt") and "% of the context" in page.inner_text("#cache")
    shot(page, "conversation")
    page.keyboard.press("Alt+n")
    assert page.is_visible("#hello") and texts(page) == []
    ask(page, "Something else")
    page.reload()
    page.wait_for_selector("#log article >> nth=1")
    page.click("#list")
    assert page.locator("#chats div").count() == 2
    shot(page, "chats")
    page.click("#chats >> text=Where does the fox live?")
    assert texts(page)[-1] == "By the old bridge."
    page.click("#list")
    page.locator("#chats div").nth(1).locator("button").nth(1).click()
    assert page.locator("#chats div").count() == 1
    assert not errors


def test_thoughts_and_calls_are_folded(acted: Acted, browser: Any) -> None:
    running, _ = acted(CALL)
    # the nano's own default is no thinking: the actor's closing mark would be dropped as text
    page, errors = opened(browser, running)
    page.route("**/v1/chat/completions", lambda route: route.continue_(
        post_data=route.request.post_data[:-1] + ',"thinking":{"type":"enabled"},"max_tokens":500}'))  # fmt: skip
    ask(page, "Weather?")
    assert page.inner_text(".call summary") == "Call of weather"
    assert page.text_content(".call pre") == '{"city": "Paris"}'
    assert page.text_content("details:not(.call) .text >> nth=0") == "Let me see."
    assert not page.is_visible("text=Let me see.")
    page.locator("article details summary").first.click()
    assert page.is_visible("text=Let me see.")
    shot(page, "call")
    assert not errors


def test_stop_and_an_error_on_a_dark_phone(acted: Acted, browser: Any) -> None:
    running, actor = acted("word " * 200, token_s=0.05)
    page, _ = opened(
        browser, running, viewport={"width": 360, "height": 640}, color_scheme="dark", is_mobile=True, has_touch=True
    )
    page.fill("#input", "Go on")
    page.click("#send")
    page.wait_for_selector("text=word word")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=stopped")
    assert actor.cancelled.wait(2)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    shot(page, "phone")
    actor.submit = None
    page.fill("#input", "And now?")
    page.click("#send")
    page.wait_for_selector(".error")
    assert "internal error" in page.inner_text(".error") and page.input_value("#input") == "And now?"


def test_the_panel_draws_the_cache(server: Any, browser: Any) -> None:
    page, errors = opened(browser, server)
    page.locator("#panel summary").click()
    page.wait_for_selector("#pages:has-text('in memory')")
    text = "The fox of the page test lives near the river. " * 9
    for _ in range(2):
        page.keyboard.press("Alt+n")
        ask(page, text)
    assert "(memory, resumed as g" in page.inner_text("#prompt")
    page.wait_for_timeout(1200)
    shot(page, "panel")
    assert not errors
