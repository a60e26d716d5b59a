"""A real browser for the tests of the chat page, which run under the page's own policy: no test may evaluate
strings."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP cpmrt.test 127.0.0.1"]  # fmt: skip


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens an address in a fresh browser context; `page.problems` collects errors and
    dialogs."""
    contexts = []

    def open_page(url: str, *, init_script: str = "", ready: str = "#question:focus", **options):
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}} | options)
        contexts.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
        page.on("dialog", lambda dialog: page.problems.append("dialog") or dialog.dismiss())
        if init_script:
            page.add_init_script(init_script)
        page.goto(url)
        page.locator(ready).wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def page(open_page, says):
    return open_page(says.url)
