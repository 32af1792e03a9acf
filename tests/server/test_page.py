"""The page in a real browser: a conversation, kept chats, calls, the panel, dark and light, a phone (about 20 s)."""

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


def quiet(page: Any) -> None:
    """Nothing reaches over the edge of the window."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


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
    # on a wide window the panel is open from the start
    page.wait_for_selector("#now:has-text('waiting')")
    assert "found in the cache" in page.inner_text("#prompt") and "% of the context" in page.inner_text("#cache")
    shot(page, "conversation")
    page.keyboard.press("Alt+n")
    assert page.is_visible("#hello") and texts(page) == []
    ask(page, "Something else")
    page.reload()
    page.wait_for_selector("#log article >> nth=1")
    assert page.locator("#chats div").count() == 2
    page.keyboard.press("Alt+c")
    assert not page.is_visible("#chats")
    page.click("#list")
    page.click("#chats >> text=Where does the fox live?")
    assert texts(page)[-1] == "By the old bridge."
    page.locator("#chats div").nth(1).locator("button").nth(1).click()
    assert page.locator("#chats div").count() == 1
    quiet(page)
    assert not errors


def test_settings_and_tools(acted: Acted, browser: Any) -> None:
    running, actor = acted(CALL, "I know.</think>It is sunny in Paris.")
    page, errors = opened(browser, running)
    page.keyboard.press("Alt+s")
    page.select_option("#effort", "low")
    page.fill("#system", "Be brief.")
    page.fill("#longest", "500")
    page.fill("#tools", '{"name": "weather"')
    page.fill("#input", "Weather?")
    page.press("#input", "Enter")
    assert "not JSON" in page.inner_text(".error") and page.input_value("#input") == "Weather?"
    page.fill(
        "#tools", '{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}'
    )
    shot(page, "settings")
    page.click("#settings summary")
    ask(page, "Weather?")
    assert "Be brief." in actor.prompt() and "Effort: 50" in actor.prompt() and "weather" in actor.prompt()
    # thoughts and calls are folded
    assert page.inner_text(".call summary") == "Call of weather"
    assert page.text_content(".call pre") == '{"city": "Paris"}'
    assert page.text_content(".thought .text") == "Let me see." and not page.is_visible("text=Let me see.")
    page.locator(".thought summary").first.click()
    assert page.is_visible("text=Let me see.")
    page.locator(".call summary").click()
    assert not page.is_visible("text=Send the results")
    page.fill(".call textarea", "18 degrees, sunny")
    shot(page, "call")
    page.click("text=Send the results")
    page.wait_for_selector("text=It is sunny in Paris.")
    assert "<tool_result>18 degrees, sunny</tool_result>" in actor.prompt() and "Let me see." in actor.prompt()
    page.reload()
    assert page.input_value("#system") == "Be brief." and page.input_value("#effort") == "low"
    assert not errors


def test_code_stands_apart(acted: Acted, browser: Any) -> None:
    running, _ = acted("So:\n```python\nprint('<b>')\n```\nDone.", token_s=0.002)
    page, errors = opened(browser, running)
    ask(page, "Code?")
    assert page.text_content("article pre") == "print('<b>')"
    assert page.text_content("article.assistant > .text") == "So:\nprint('<b>')Done."
    assert not errors


def test_stop_and_an_error_on_a_dark_phone(acted: Acted, browser: Any) -> None:
    running, actor = acted("word " * 200, token_s=0.05)
    page, _ = opened(
        browser, running, viewport={"width": 360, "height": 640}, color_scheme="dark", is_mobile=True, has_touch=True
    )
    assert not page.is_visible("#panel") and not page.is_visible("#chats")
    page.fill("#input", "Go on")
    page.click("#send")
    page.wait_for_selector("text=word word")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=stopped")
    assert actor.cancelled.wait(2)
    quiet(page)
    shot(page, "phone")
    page.click("#look")
    page.wait_for_selector("#now:has-text('waiting')")
    quiet(page)
    shot(page, "phone-panel")
    page.keyboard.press("Escape")
    page.click("#list")
    shot(page, "phone-chats")
    page.click("#chats button >> nth=0")
    assert not page.is_visible("#chats")
    actor.submit = None
    page.fill("#input", "And now?")
    page.click("#send")
    page.wait_for_selector(".error")
    assert "internal error" in page.inner_text(".error") and page.input_value("#input") == "And now?"


def test_colours(acted: Acted, browser: Any) -> None:
    running, _ = acted("x")
    page, errors = opened(browser, running, color_scheme="light")

    def back() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    system = back()
    page.click("#theme")
    assert back() == system
    page.click("#theme")
    dark = back()
    assert dark != system
    page.reload()
    assert back() == dark
    page.click("#theme")
    page.emulate_media(color_scheme="dark")
    assert back() == dark and not errors


def test_nothing_from_elsewhere_may_run(acted: Acted, browser: Any) -> None:
    running, _ = acted("<img src=x onerror=alert(1)><script>alert(2)</script>")
    page, errors = opened(browser, running)
    asked: list[str] = []
    page.on("dialog", lambda dialog: asked.append(dialog.message) or dialog.dismiss())
    page.on("request", lambda request: asked.append(request.url) if running.url not in request.url else None)
    ask(page, "<b>markup</b>")
    assert texts(page) == ["<b>markup</b>", "<img src=x onerror=alert(1)><script>alert(2)</script>"]
    page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'window.bad = 1'; document.body.append(s)"
    )
    assert page.evaluate("window.bad") is None and not asked
    assert all("Content Security Policy" in error for error in errors) and errors


def test_the_panel_draws_the_cache(server: Any, browser: Any) -> None:
    page, errors = opened(browser, server, viewport={"width": 1280, "height": 900})
    page.wait_for_selector("#pages:has-text('pages in use')")
    text = "The fox of the page test lives near the river. " * 9
    for _ in range(2):
        page.keyboard.press("Alt+n")
        ask(page, text)
    assert "(memory, grade G" in page.inner_text("#prompt")
    widths = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#prompt-bar i')].map(i => [i.className, i.offsetWidth]))"
    )
    assert widths["hit"] > 0
    for words in ("held", "run again", "computed"):
        assert words in page.inner_text("#prompt-key")
    page.click("#explain")
    page.wait_for_selector("#parted:has-text('held')")
    page.wait_for_timeout(1200)
    assert page.locator("#speed path").count() == 1 and "tokens/s" in page.inner_text("#rate")
    assert "prefixes" in page.inner_text("#pages-key") and "no tier" in page.inner_text("#disk")
    shot(page, "panel")
    assert not errors
