"""Conversations of the chat page, in a browser: asking, stopping, branching, keeping, renaming, deleting, exporting."""

from __future__ import annotations

import json
import re

import pytest
from page_driving import answered, ask, requests_of, said, titles
from serving import saying_llm, serving

pytestmark = pytest.mark.all

NUMBERS = " ".join(map(str, range(900)))
"""A long answer that is no loop, as the page ends answers that repeat themselves."""


def test_a_conversation(page):
    sent = requests_of(page)
    first = ask(page, "say(one)yas")
    assert first.locator(".prose").inner_text() == "one"
    assert re.search(r"4 tokens · .*tokens/s · first after [\d.]+ s · prompt \d+ · cached 0", first.inner_text())
    ask(page, "and what did I say?")
    assert said(sent[1]) == [("user", "say(one)yas"), ("assistant", "one"), ("user", "and what did I say?")]
    assert page.inner_text("#model") == "says" and titles(page) == ["say(one)yas"]
    assert not page.problems


def test_the_first_view_invites(open_page, says):
    page = open_page(says.url)
    page.locator("#facts li").first.wait_for()
    assert re.fullmatch(r"says\s*·?\s*CPU\s*·?\s*[\d,]+ tokens of context", page.inner_text("#facts"))
    assert page.inner_text("#model") == "says"
    example = page.locator("#examples button").first
    question = example.locator("span").inner_text()
    example.click()
    answered(page)
    assert page.locator(".bubble").inner_text() == question and not page.locator("#welcome").is_visible()


def test_a_new_chat_during_an_answer_knows_nothing_of_the_old_one(open_page, tmp_path):
    def slow():
        return saying_llm(tmp_path, lambda prompt: NUMBERS[:199], delay_s=0.005)

    with serving(slow) as server:
        page = open_page(server.url)
        sent = requests_of(page)
        page.fill("#question", "the old secret")
        page.keyboard.press("Enter")
        page.get_by_text("0 1 2").first.wait_for()
        page.click("#fresh")
        assert page.locator(".message").count() == 0
        ask(page, "something else")
        assert said(sent[1]) == [("user", "something else")]
        # The old answer was written to its end meanwhile, in its own conversation.
        page.locator("#conversations .open", has_text="the old secret").click()
        assert answered(page).locator(".prose").inner_text() == NUMBERS[:199]
        assert page.locator(".message").count() == 2


def test_answering_again_and_editing_make_branches(page):
    sent = requests_of(page)
    ask(page, "say(first)yas")
    ask(page, "say(second)yas")
    page.locator(".message.assistant").first.locator(".regenerate").click()
    answered(page)
    assert said(sent[2]) == [("user", "say(first)yas")] and page.locator(".message").count() == 2
    assert page.locator(".branches span").inner_text() == "2 / 2"
    page.click("text=say(first)yas >> nth=1")
    page.locator(".message.user .edit").click()
    page.locator(".editor textarea").fill("say(other)yas")
    page.keyboard.press("Enter")
    assert answered(page).locator(".prose").inner_text() == "other"
    page.locator(".message.user").get_by_label("Version before").click()
    page.locator(".message.assistant").get_by_label("Version before").click()
    assert page.locator(".prose").all_inner_texts() == ["first", "second"]


def test_stop_and_a_server_that_restarts_in_between(open_page, tmp_path):
    def slow():
        return saying_llm(tmp_path, lambda prompt: NUMBERS, delay_s=0.005)

    with serving(slow) as server:
        port = int(server.url.rpartition(":")[2])
        page = open_page(server.url)
        page.fill("#question", "count")
        page.keyboard.press("Enter")
        page.locator(".prose", has_text="0 1 2").wait_for()
        page.keyboard.press("Escape")
        assert "You stopped this answer." in answered(page).inner_text()
        server.wait_idle()
        page.fill("#question", "again")
        page.keyboard.press("Enter")
        page.locator(".prose", has_text="0 1 2").nth(1).wait_for()
        server.running.stop()
        assert "shutting down" in answered(page).locator(".wrong").inner_text()
    assert "cannot be reached" in ask(page, "anybody?").locator(".wrong").inner_text()
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "back again"), port=port):
        page.locator(".regenerate").last.click()
        page.locator(".prose", has_text="back again").wait_for()
        assert answered(page).locator(".wrong").count() == 0


def test_conversations_survive_a_reload(page):
    ask(page, "say(one)yas")
    page.click("#fresh")
    ask(page, "say(two)yas")
    page.reload()
    answered(page)
    assert page.locator(".prose").inner_text() == "two" and titles(page) == ["say(two)yas", "say(one)yas"]
    page.locator("#conversations .open").last.click()
    page.locator(".prose", has_text="one").wait_for()


def test_an_answer_that_a_reload_breaks_off_is_kept_and_says_so(open_page, tmp_path):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: NUMBERS, delay_s=0.005)) as server:
        page = open_page(server.url)
        page.fill("#question", "count")
        page.keyboard.press("Enter")
        page.locator(".prose", has_text="0 1 2 3").wait_for()
        page.reload()
        answer = answered(page)
        assert answer.locator(".prose").inner_text().startswith("0 1 2 3")
        assert answer.locator(".note").inner_text() in (
            "The page was closed before this answer ended.", "The connection was lost.")  # fmt: skip


def test_rename_delete_and_undo(page):
    ask(page, "say(one)yas")
    item = page.locator("#conversations li")
    item.hover()
    page.get_by_label("Rename").click()
    page.locator("#conversations input").fill("A better name")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="A better name").wait_for()
    item.hover()
    page.get_by_label("Delete").click()
    page.locator("#welcome").wait_for()
    assert titles(page) == []
    page.get_by_role("button", name="Undo").click()
    item.wait_for()
    page.reload()
    item.wait_for()
    assert titles(page) == ["A better name"]


def test_what_is_exported_can_be_imported_elsewhere(page, open_page, says, tmp_path):
    ask(page, "say(<think>hm</think>one)yas")
    page.locator(".regenerate").click()
    answered(page)
    with page.expect_download() as download:
        page.click("#save-all")
    path = tmp_path / "export.json"
    download.value.save_as(path)
    other = open_page(says.url)
    other.set_input_files("#file", path)
    assert answered(other).locator(".prose").last.inner_text() == "one"
    assert other.locator(".branches span").inner_text() == "2 / 2" and titles(other) == titles(page)
    assert other.locator("summary").inner_text() == "Thoughts"


@pytest.mark.parametrize(("content", "told"), [
    ("{", "no JSON"),
    ("[]", "no exported conversations"),
    (json.dumps({"format": "cpmrt-conversations", "version": 9, "conversations": []}), "version 9"),
    ({"messages": "x"}, "no messages"),
    ({"messages": [{"id": "a", "parent": "a", "role": "user", "content": "its own parent"}]}, "not one of this format"),
    ({"messages": [{"id": "a", "parent": None, "role": "<b>", "content": "x"}]}, "not one of this format"),
    ({"messages": [{"id": "a", "parent": None, "role": "user", "content": {"x": 1}}]}, "not one of this format"),
])  # fmt: skip
def test_a_file_that_is_none_of_ours_changes_nothing(page, content, told):
    if isinstance(content, dict):
        content = json.dumps({"format": "cpmrt-conversations", "version": 1, "conversations": [content]})
    page.set_input_files("#file", {"name": "x.json", "mimeType": "application/json", "buffer": content.encode()})
    page.locator("#toast", has_text=told).wait_for()
    assert titles(page) == [] and not page.problems


def test_two_tabs_show_the_same_list(page, says):
    other = page.context.new_page()
    other.goto(says.url)
    ask(page, "say(one)yas")
    other.locator("#conversations .open").wait_for()
    assert titles(other) == ["say(one)yas"]


def test_a_browser_that_keeps_no_more_says_so(open_page, says):
    page = open_page(says.url, init_script="IDBObjectStore.prototype.put = () => { throw new Error('no room'); }")
    assert ask(page, "say(one)yas").locator(".prose").inner_text() == "one"
    assert "no room" in page.inner_text("#toast")


def test_a_browser_without_storage_still_chats(open_page, says):
    page = open_page(says.url, init_script="IDBFactory.prototype.open = () => { throw new Error('forbidden'); }")
    assert "until it is closed" in page.inner_text("#toast")
    ask(page, "say(one)yas")
    page.click("#fresh")
    page.locator("#conversations .open").click()
    assert answered(page).locator(".prose").inner_text() == "one"
    assert not page.problems
