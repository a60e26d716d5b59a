"""Requests of the chat page and its notes on answers: settings, the key, a full context, a limit on the length."""

from __future__ import annotations

import pytest
from page_driving import answered, ask, requests_of, said
from serving import saying_llm, serving

from cpmrt.executor import ExecutorLimits

pytestmark = pytest.mark.all


def set_numbers(page, **numbers):
    page.click("#open-settings")
    for name, value in numbers.items():
        page.fill(f"#setting-{name}", str(value))
    page.get_by_role("button", name="Done").click()


def test_what_nobody_set_is_left_to_the_model(page, says):
    sent = requests_of(page)
    ask(page, "say(one)yas")
    assert set(sent[0]) == {"messages", "stream", "stream_options", "loop_repeats"} and sent[0]["loop_repeats"] == 8
    page.click("#open-settings")
    own = page.request.get(f"{says.url}/v1/models").json()["data"][0]["sampling_defaults"]
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        box = page.locator(f"#setting-{name}")
        assert float(box.get_attribute("placeholder")) == own[name] and box.input_value() == ""
    assert own["source"] in page.inner_text("#sampling-source")


def test_settings_are_sent_and_survive_a_reload(page):
    sent = requests_of(page)
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    page.select_option("#thinking", "off")
    page.get_by_role("button", name="Done").click()
    set_numbers(page, temperature=0.5, top_k=3)
    page.reload()
    page.locator("#question:focus").wait_for()
    ask(page, "say(one)yas")
    assert said(sent[0])[0] == ("system", "Be brief.")
    assert sent[0]["temperature"] == 0.5 and sent[0]["top_k"] == 3
    assert sent[0]["chat_template_kwargs"] == {"enable_thinking": False}
    page.click("#open-settings")
    page.get_by_role("button", name="Back to the model's own").click()
    page.get_by_role("button", name="Done").click()
    ask(page, "say(two)yas")
    assert not {"temperature", "top_k", "chat_template_kwargs"} & set(sent[1])


def test_a_system_prompt_belongs_to_its_conversation(page):
    def set_system(text):
        page.click("#open-settings")
        page.fill("#system", text)
        page.get_by_role("button", name="Done").click()

    sent = requests_of(page)
    set_system("Be brief.")
    ask(page, "say(one)yas")
    page.click("#fresh")
    ask(page, "say(two)yas")
    set_system("Be kind.")
    page.locator("#conversations .open", has_text="one").click()
    page.locator(".prose", has_text="one").wait_for()
    set_numbers(page, temperature=1)  # opening the dialog alone changes no prompt
    ask(page, "say(three)yas")
    page.click("#fresh")
    ask(page, "say(four)yas")
    assert [said(body)[0][1] for body in sent] == ["Be brief.", "Be brief.", "Be brief.", "Be kind."]


def test_a_limit_on_the_length_is_shown(page):
    set_numbers(page, max_tokens=5)
    answer = ask(page, "say(0123456789)yas")
    assert answer.locator(".prose").inner_text() == "01234"
    assert "“Max tokens” is set to 5" in answer.locator(".note").inner_text()
    page.reload()
    assert "“Max tokens” is set to 5" in answered(page).locator(".note").inner_text()


def test_a_full_context_leaves_out_the_oldest_turns_and_says_so(open_page, tmp_path):
    limits = ExecutorLimits(max_sequences=2, max_context=512, prefill_chunk=256, run_ahead=2)
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "x" * 100, limits=limits)) as server:
        page = open_page(server.url)
        sent = requests_of(page)
        for number in range(6):
            answer = ask(page, f"question {number} " + "." * 60)
            assert answer.locator(".prose").inner_text() == "x" * 100
        assert said(sent[-1])[0][1].startswith("question") and len(said(sent[-1])) < 11
        assert said(sent[-1])[-1][1].startswith("question 5")
        assert "oldest question" in answer.locator(".notes").inner_text()
        assert page.locator(".message.user").count() == 6


@pytest.mark.parametrize(("prompt_tokens", "question", "left_out"), [
    (12, "x" * 6000, 0),  # "hi" costs 12 tokens for 2 characters: that says nothing of the next question
    (7500, "short", 1),  # 7500 of 8192 tokens are used, and an answer needs room too
    (6000, "short", 0),
])  # fmt: skip
def test_turns_are_left_out_by_what_they_cost(page, prompt_tokens, question, left_out):
    path = [
        {"id": "a", "role": "user", "content": "hi" if prompt_tokens < 100 else "y" * 15_000},
        {"id": "b", "role": "assistant", "content": "hello", "speed": {"prompt": prompt_tokens}},
        {"id": "c", "role": "user", "content": question},
    ]
    counted = page.evaluate("""async path => (await import("/page/context.js"))
        .turnsToLeaveOut({ path, system: "", contextLength: 8192 })""", path)  # fmt: skip
    assert counted == left_out


def test_a_question_that_alone_is_too_long_says_so(open_page, tmp_path):
    limits = ExecutorLimits(max_sequences=2, max_context=128, prefill_chunk=64, run_ahead=2)
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "x", limits=limits)) as server:
        page = open_page(server.url)
        assert "128" in ask(page, "y" * 500).locator(".wrong").inner_text()
        assert ask(page, "short").locator(".prose").inner_text() == "x"


def test_the_key_is_asked_for_and_survives_a_reload_but_not_the_tab(open_page, tmp_path):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "in"), api_keys=("secret",)) as server:
        page = open_page(server.url, ready="#key:focus")
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        page.locator("#facts", has_text="tokens of context").wait_for()
        page.reload()
        assert ask(page, "hi").locator(".prose").inner_text() == "in"
        stored = page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
        assert "secret" not in stored[0] and "secret" in stored[1]
        tab = page.context.new_page()
        tab.goto(server.url)
        tab.locator("#key:focus").wait_for()


def test_messages_and_code_are_copied_on_an_address_without_https(open_page, tmp_path):
    text = "Use **this**:\n\n```python\nif x:\n    pass\n```"
    with serving(lambda: saying_llm(tmp_path, lambda prompt: text), api_keys=("k",)) as server:
        page = open_page(server.url.replace("127.0.0.1", "cpmrt.test"),
                         init_script="sessionStorage.setItem('cpmrt.key', '{\"key\": \"k\"}')")  # fmt: skip
        assert page.evaluate("[isSecureContext, typeof navigator.clipboard]") == [False, "undefined"]
        ask(page, "hi")
        for button, copied in (("Copy answer", text), ("Copy code", "if x:\n    pass"), ("Copy question", "hi")):
            page.locator(".message").nth(0 if "question" in button else 1).hover()
            page.get_by_label(button).click()
            page.locator(".copy.done").wait_for()
            page.fill("#question", "")
            page.focus("#question")
            page.keyboard.press("Control+V")
            assert page.input_value("#question") == copied
            page.locator(".copy.done").wait_for(state="detached")
