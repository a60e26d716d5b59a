"""Speed of the chat page: a long answer costs little in each frame, and written parts are never drawn again."""

from __future__ import annotations

import json
from bisect import bisect_right

import pytest
from page_driving import answered

pytestmark = pytest.mark.all

LENGTH = 60_000
FRAME_MS = 16
LONG_TASK_MS = 50
TRIES = 5

SECTION = """## A heading

Some **words** with `code`, *more* words, [a link](https://e.example/a_(b)) and a sum of $x_i + y_i$ in a paragraph that
goes over more than one line, as paragraphs do.

- an item
  - another one, deeper
- and the next

```python
def step(values, limit=10):
    # a comment
    return [value * 2 for value in values if value < limit]
```

| name | count |
|------|------:|
| one  |     1 |
| two  |     2 |

"""

# The answer comes from the page itself, as fast as a fast model writes, so that no server takes part in the timing.
FAKE_MODEL = """
window.answerWith = (text, size) => {
  const ask = window.fetch, encoder = new TextEncoder();
  const choice = (delta, reason) => ({ choices: [{ index: 0, delta, finish_reason: reason }] });
  const event = (delta, reason) => `data: ${JSON.stringify(choice(delta, reason))}\\n\\n`;
  window.fetch = async (path, options) => {
    if (!String(path).includes("chat/completions")) return ask(path, options);
    let at = 0;
    const pull = async controller => {
      await new Promise(resolve => setTimeout(resolve, 12));
      let events = "";
      for (let i = 0; i < 8 && at < text.length; i++, at += size) {
        events += event({ content: text.slice(at, at + size) }, null);
      }
      if (at >= text.length) events += event({}, "stop") + "data: [DONE]\\n\\n";
      controller.enqueue(encoder.encode(events));
      if (at >= text.length) controller.close();
    };
    return new Response(new ReadableStream({ pull }));
  };
};
"""


LINES = {"answer": SECTION, "code": "    x = call(y, 'text', 3)  # done\n", "prose": "Words that **go** on and on. "}


def of_kind(kind: str) -> str:
    line = LINES[kind]
    return ("```python\n" if kind == "code" else "") + (line * (LENGTH // len(line) + 1))[:LENGTH]


def write(page, text):
    page.evaluate("text => { answerWith(text, 30); }", text)
    page.fill("#question", "go")
    page.keyboard.press("Enter")


def cpu_ms_of_tasks(browser, page, text):
    """Write an answer; return the CPU time of each task of the page's main thread, and of those that draw a frame."""
    browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline", "__metadata"])
    write(page, text)
    answered(page)
    events = [event for event in json.loads(browser.stop_tracing())["traceEvents"] if "tdur" in event]
    frames = [event for event in events if event["name"] == "FireAnimationFrame"]
    threads = {(event["pid"], event["tid"]) for event in frames}
    ours = [event for event in events if (event["pid"], event["tid"]) in threads]
    tasks = [event for event in ours if event["name"].endswith("RunTask")]
    begun = sorted(task["ts"] for task in tasks)
    drawing = {begun[bisect_right(begun, frame["ts"]) - 1] for frame in frames}
    return [task["tdur"] / 1e3 for task in tasks], [task["tdur"] / 1e3 for task in tasks if task["ts"] in drawing]


@pytest.mark.parametrize("kind", ["answer", "code", "prose"])
def test_each_frame_of_a_long_answer_is_short(browser, open_page, says, kind):
    tried = []
    for _ in range(TRIES):  # other programs cost CPU time too, so the best run counts
        page = open_page(says.url, init_script=FAKE_MODEL)
        tasks, frames = cpu_ms_of_tasks(browser, page, of_kind(kind))
        assert len(frames) > 50
        frame, longest = sorted(frames)[int(len(frames) * 0.95)], max(tasks)
        tried.append((round(frame, 1), round(longest)))
        if frame < FRAME_MS and longest < LONG_TASK_MS:
            return
    raise AssertionError(f"(95 % of the frames, the longest task) in ms: {tried}")


def test_what_is_written_is_not_drawn_again(open_page, says):
    page = open_page(says.url, init_script=FAKE_MODEL)
    write(page, of_kind("answer"))
    page.locator(".prose > :nth-child(12)").wait_for()
    page.evaluate("""() => {
      window.early = [...document.querySelectorAll(".prose > :nth-child(-n + 10), .prose > :nth-child(-n + 10) *")];
      window.changes = 0;
      const observer = new MutationObserver(list => { changes += list.length; });
      for (const part of early) observer.observe(part, { childList: true, characterData: true, attributes: true });
    }""")
    answered(page)
    assert page.evaluate("early.length > 20 && early.every(part => part.isConnected)")
    # Formulas are drawn once Temml is loaded.
    assert page.evaluate("changes") <= 2


def test_an_answer_is_read_by_the_part_that_grows(open_page, says):
    """The Markdown parser reads each character of an answer a few times only, however long the answer is."""
    page = open_page(says.url)
    read = page.evaluate("""async text => {
      const { MarkdownStream } = await import("/page/markdown/stream.js");
      const stream = new MarkdownStream(document.createElement("div"));
      let read = 0;
      for (let at = 0; at < text.length; at += 50) {
        stream.push(text.slice(at, at + 50));
        read += stream.tail.length + 50;
        while (stream.draw());
      }
      return read;
    }""", of_kind("answer"))
    assert read < 20 * LENGTH


def test_scrolling_up_stays_there_while_the_answer_grows(open_page, says):
    page = open_page(says.url, init_script=FAKE_MODEL)
    write(page, of_kind("answer"))
    page.locator(".prose > :nth-child(40)").wait_for()
    page.hover("#scroller")
    page.mouse.wheel(0, -1500)
    page.locator("#to-end").wait_for()
    before = page.evaluate("document.querySelector('#scroller').scrollTop")
    answered(page)
    assert abs(page.evaluate("document.querySelector('#scroller').scrollTop") - before) < 5
    page.click("#to-end")
    page.locator("#to-end").wait_for(state="hidden")
    assert page.locator(".regenerate").is_visible()


def test_words_of_a_growing_paragraph_stay(open_page, says):
    page = open_page(says.url)
    kept = page.evaluate("""async () => {
      const { MarkdownStream } = await import("/page/markdown/stream.js");
      const root = document.createElement("div"), stream = new MarkdownStream(root);
      const show = text => { stream.push(text); stream.draw(); return [...root.firstChild.childNodes]; };
      const first = show("**bold** and `code` and wo"), then = show("rds, then $x$ and *mo"), last = show("re*.");
      return [first.length, first.every(node => then.includes(node)), then.filter(node => last.includes(node)).length,
              root.textContent];
    }""")
    assert kept == [4, True, 5, "bold and code and words, then x and more."]
