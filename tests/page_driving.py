"""Helpers to drive the chat page in a browser: ask, wait for the answer, read what was sent."""

from __future__ import annotations

import json


def ask(page, text):
    """Send a question, wait for the end of the answer, and return the answer."""
    page.fill("#question", text)
    page.keyboard.press("Enter")
    return answered(page)


def answered(page):
    """Wait until no answer is being written, and return the last one."""
    page.locator(".message.assistant").last.wait_for()
    page.locator("#stop").wait_for(state="hidden")
    last = page.locator(".message.assistant").last
    last.locator(".regenerate").wait_for()
    return last


def requests_of(page):
    """Return a list that fills with the bodies of the page's requests for chat completions."""
    sent = []

    def note(request):
        if request.url.endswith("/v1/chat/completions"):
            sent.append(json.loads(request.post_data))

    page.on("request", note)
    return sent


def said(body):
    """Return the role and text of each message of a request's body."""
    return [(message["role"], message["content"]) for message in body["messages"]]


def titles(page):
    return page.locator("#conversations .open").all_inner_texts()
