"""The chat page: one file that runs nothing but its own script, and does what a person expects of it."""

from __future__ import annotations

import re
import shutil

import pytest
from serving import saying_llm, serving

from cpmrt.server.api import PAGE, chat_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


def test_the_page_is_one_file_that_asks_nobody_else(says):
    answer = says.client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == PAGE.read_bytes()
    text = answer.text
    assert not re.search(r"<script[^>]+src|<link[^>]+stylesheet|@import|url\(|https?://", text)
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", " on"):
        pattern = rf"<[^>]*{way}\w+=" if way == " on" else re.escape(way)
        assert not re.search(pattern, text), way


def test_only_its_own_script_may_run():
    _, headers = chat_page()
    policy = headers["Content-Security-Policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert policy.count("'sha256-") == 2


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, says):
    page = browser.new_page(bypass_csp=True, viewport={"width": 390, "height": 700}, color_scheme="dark")
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.on("dialog", lambda dialog: page.problems.append("dialog") or dialog.dismiss())
    page.goto(says.url)
    yield page
    page.close()


def ask(page, text, count=1):
    page.fill("#question", text)
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('.regenerate').length && "
                           "document.querySelectorAll('.message.assistant').length === n", arg=count)  # fmt: skip
    return page.locator(".message.assistant").last


@pytest.mark.all
def test_a_conversation(page):
    first = ask(page, "say(Use **bold** and `code`:\n\n```python\nprint(1)\n```\n- one\n- two)yas")
    assert first.locator("strong").inner_text() == "bold" and first.locator("p code").inner_text() == "code"
    assert first.locator("pre code").inner_text() == "print(1)" and first.locator("li").count() == 2
    assert re.search(r"\d+ tokens · .*tokens/s · first after [\d.]+ s · prompt \d+ · cached 0", first.inner_text())
    second = ask(page, "and what did I say?", count=2)
    assert "Use **bold**" in page.evaluate("messages[1].content") and page.evaluate("messages.length") == 4
    second.locator(".regenerate").click()
    page.wait_for_function("!running && messages.length === 4")
    assert page.locator(".message.assistant").count() == 2
    assert page.inner_text("#model") == "says" and not page.problems


@pytest.mark.all
def test_thoughts_are_folded_away(page):
    answer = ask(page, "say(<think>hm</think>yes)yas")
    assert answer.locator("summary").inner_text() == "Thoughts" and answer.locator("p").inner_text() == "yes"


@pytest.mark.all
def test_html_in_an_answer_or_a_question_stays_text(page):
    attack = (
        "<img src=x onerror=alert(1)><script>window.hit=1</script>[x](javascript:alert(2)) "
        '[y](https://e.example/"onmouseover=alert(3)) **<b onclick=alert(4)>** `<svg onload=alert(5)>`'
    )
    answer = ask(page, f"say({attack})yas")
    page.wait_for_timeout(50)
    assert page.evaluate("window.hit") is None and not page.problems
    assert page.locator("main img, main script, main svg, main b, main a[href^=javascript]").count() == 0
    assert "<img src=x onerror=alert(1)>" in answer.inner_text()
    assert "<script>" in page.locator(".message.user").inner_text()


@pytest.mark.all
def test_the_page_fits_a_phone_and_the_dark(page):
    ask(page, "say(" + "x" * 400 + "\n\n    " + "y" * 300 + ")yas")
    page.click("#options")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background)[:3])) < 60


@pytest.mark.all
def test_everything_can_be_done_with_the_keyboard(page):
    page.keyboard.type("say(hi)yas")
    page.keyboard.press("Enter")
    page.wait_for_selector(".regenerate")
    seen = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"fresh", "options", "question", "send", "regenerate"} <= seen


@pytest.mark.all
def test_stop_and_a_server_that_restarts_in_between(browser, tmp_path):
    def slow():
        return saying_llm(tmp_path, lambda prompt: "0123456789" * 300, delay_s=0.005)

    with serving(slow) as server:
        port = int(server.url.rpartition(":")[2])
        page = browser.new_page(bypass_csp=True)
        page.goto(server.url)
        page.fill("#question", "count")
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('.message.assistant').innerText.includes('0123')")
        page.click("#stop")
        page.wait_for_selector(".regenerate")
        assert "stopped" in page.locator(".message.assistant").inner_text()
        server.wait_idle()
        page.fill("#question", "again")
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelectorAll('.message.assistant')[1]?.innerText.includes('0123')")
        server.running.stop()
        page.wait_for_function("document.querySelectorAll('.wrong').length === 2")
        assert "shutting down" in page.locator(".wrong").last.inner_text()
    page.fill("#question", "anybody?")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.wrong').length === 3")
    assert "cannot be reached" in page.locator(".wrong").last.inner_text()
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "back again"), port=port):
        page.locator(".regenerate").click()
        page.wait_for_function("document.querySelector('main').innerText.includes('back again')")
        assert page.evaluate("messages.length") >= 4
    page.close()
