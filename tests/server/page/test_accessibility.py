"""Accessibility of the chat page: keyboard, screen readers, phones, dark colours."""

from __future__ import annotations

import re

import pytest
from page_driving import ask

pytestmark = pytest.mark.all

ANSWER = """say(# Title

Text with `code` and [a link](https://e.example).

### Part

```python
x = 1  # y
```

|a|
|-|
|b|

$x$)yas"""


def findings(page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    results = axe.Axe().run(page).response
    assert len(results["passes"]) > 15
    return [(found["id"], [node["html"][:120] for node in found["nodes"]]) for found in results["violations"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_axe_finds_nothing(open_page, says, scheme, width):
    # The policy lets no injected script run, so that axe needs it off.
    page = open_page(says.url, viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=True)
    assert findings(page) == []
    ask(page, ANSWER)
    ask(page, "say(<think>hm</think>yes)yas")
    page.locator(".regenerate").last.click()
    page.locator(".branches").wait_for()
    assert findings(page) == []
    page.click("#open-settings")
    assert findings(page) == []
    page.keyboard.press("Escape")
    if width < 800:
        page.click("#open-sidebar")
        page.wait_for_timeout(300)
        assert findings(page) == []


def test_what_is_written_is_said_once(page):
    page.evaluate("""() => {
      window.said = [];
      const status = document.querySelector("#announcement");
      const observer = new MutationObserver(() => said.push(status.textContent));
      observer.observe(status, { childList: true, characterData: true, subtree: true });
    }""")
    words = " ".join(f"word {number}" for number in range(40))  # the page ends answers that repeat themselves
    ask(page, f"say({words})yas")
    said = [text for text in page.evaluate("said") if text]
    assert said == ["The answer is being written.", words]
    live = page.locator("[aria-live], [role=log], [role=status], [role=alert]")
    assert sorted(live.evaluate_all("all => all.map(each => each.id)")) == ["announcement", "toast"]


def test_landmarks_and_headings(page):
    ask(page, ANSWER)
    for landmark in ("banner", "navigation", "main"):
        assert page.get_by_role(landmark).count() == 1
    levels = page.locator("h1, h2, h3, h4, h5, h6").evaluate_all(
        "all => all.filter(each => each.checkVisibility() && !each.closest('nav')).map(each => Number(each.tagName[1]))"
    )
    assert levels == [1, 2, 2, 3, 4]


def test_everything_can_be_done_with_the_keyboard(page):
    page.keyboard.type("say(hi)yas")
    page.keyboard.press("Enter")
    page.locator(".regenerate").wait_for()
    seen = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"))
    assert {
        "New chat", "say(hi)yas", "Rename “say(hi)yas”", "Delete “say(hi)yas”", "Import", "Export all", "Conversations",
        "Settings", "Edit question", "Copy answer", "Answer again", "Message",
    } <= seen  # fmt: skip
    page.focus("#question")
    page.keyboard.press("ArrowUp")
    page.locator(".editor textarea:focus").wait_for()
    page.keyboard.press("Escape")
    page.locator(".edit:focus").wait_for()
    page.keyboard.press("Control+Shift+O")
    page.locator("#question:focus").wait_for()
    assert page.locator("#welcome").is_visible()


def test_the_page_fits_a_phone(open_page, says):
    page = open_page(says.url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    table = "|" + "wide cell|" * 20 + "\n|" + "-|" * 20
    ask(page, f"say({'x' * 400}\n\n```\n{'y' * 300}\n```\n\n{table})yas")
    for button in ("#open-settings", "#open-sidebar"):
        page.click(button)
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.keyboard.press("Escape")
    page.wait_for_timeout(250)
    assert not page.locator("#sidebar").is_visible() and page.locator("#question").is_visible()
    heights = page.locator("button:visible").evaluate_all("all => all.map(each => each.offsetHeight)")
    assert min(heights) >= 24


@pytest.mark.parametrize(("scheme", "low", "high"), [("light", 200, 256), ("dark", 0, 60)])
def test_colours_follow_the_system(open_page, says, scheme, low, high):
    page = open_page(says.url, color_scheme=scheme)
    colours = re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert all(low <= int(colour) < high for colour in colours[:3])
