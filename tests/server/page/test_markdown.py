"""Answers as Markdown: shown right, the same in pieces as at once, and never run as HTML."""

from __future__ import annotations

import random
from html.parser import HTMLParser

import pytest
from page_driving import ask

pytestmark = pytest.mark.all

SHOW = """async ([pieces]) => {
  const { MarkdownStream } = await import("/page/markdown/stream.js");
  const root = document.createElement("div");
  const stream = new MarkdownStream(root);
  for (const piece of pieces) {
    stream.push(piece);
    while (stream.draw());
  }
  return root.innerHTML;
}"""

HARMLESS = {
    "p", "div", "span", "a", "strong", "em", "s", "code", "pre", "ul", "ol", "li", "blockquote", "hr", "br", "table",
    "thead", "tbody", "tr", "th", "td", "button", "svg", "use",
}  # fmt: skip
HARMLESS_ATTRIBUTES = {
    "class", "href", "target", "rel", "title", "type", "role", "tabindex", "aria-label", "aria-hidden", "start",
    "display",
}  # fmt: skip


class Elements(HTMLParser):
    """A parser that collects the names and attributes of all elements."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


DOCUMENT = """# Title

Text with **bold**, *slanted*, ~~struck~~, `code` and [a link](https://e.example/a_(b)_c).
A bare one: https://e.example/x?y=1.

- one
- two
  1. first
  2. second

     more of the second
- three

1. x

2. y

Setext
------

| a | b |
|:--|--:|
| 1 | `2` |
| **3** | 4 |

```python
def f(x):
    '''Several
    lines'''
    return x  # done
```

> quoted
> > deeper

    indented

$$
a
+ b
$$

Prices of $5 and $6, sums of $x_1 + y_1$ and \\(z\\).

***
## End
"""


@pytest.fixture(scope="module")
def show(browser, says):
    """Return a function that renders a text given in pieces and returns its HTML."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(says.url)
    page.evaluate("async () => (await import('/page/markdown/math.js')).loadTemml()")
    yield lambda *pieces: page.evaluate(SHOW, [pieces])
    context.close()


@pytest.mark.parametrize(("text", "expected"), [
    ("~~no~~ **yes**", "<p><s>no</s> <strong>yes</strong></p>"),
    ("[a](https://e.example/x_(y))", '<a href="https://e.example/x_(y)" target="_blank" '
                                     'rel="noopener noreferrer nofollow">a</a>'),
    ("- a\n  - b\n    - c", "<ul><li><p class=\"tight\">a</p><ul><li><p class=\"tight\">b</p><ul><li>"
                            "<p class=\"tight\">c</p></li></ul></li></ul></li></ul>"),
    ("3. a\n4. b", '<ol start="3">'),
    ("|a|b|\n|-|-:|\n|1|2|", '<tbody><tr><td>1</td><td class="align-right">2</td></tr></tbody>'),
    ("a *b* _c_ snake_case_name", "<p>a <em>b</em> <em>c</em> snake_case_name</p>"),
    ("`` a`b ``", "<code>a`b</code>"),
    ("$x_1$", "<msub><mi>x</mi><mn"),
    ("$$\\frac{a}{b}$$", "<mfrac><mi>a</mi><mi>b</mi></mfrac>"),
    ("\\[a^2\\]", "<msup><mi>a</mi><mn"),
    ("It costs $5 and $6.", "<p>It costs $5 and $6.</p>"),
    ("$\\undefinedmacro$", "<code>\\undefinedmacro</code>"),
    ("```js\nlet a = 1;\n```", '<span class="code-keyword">let</span> a = <span class="code-number">1</span>;'),
    ("```unknown\n<b>\n```", "&lt;b&gt;"),
    ("![a picture](https://e.example/p.png)", '<a href="https://e.example/p.png"'),
])  # fmt: skip
def test_what_models_write(show, text, expected):
    assert expected in show(text)


def test_headings_leave_out_no_level(show):
    html = show("# a\n\n### b\n\n###### c\n\n## d\n\n### e\n\n- # within\n")
    assert [html[i + 1 : i + 3] for i in range(len(html)) if html[i : i + 2] == "<h"] == ["h3", "h4", "h5", "h4", "h5"]


@pytest.mark.parametrize("seed", range(40))
def test_piece_by_piece_is_as_at_once(show, seed):
    rng = random.Random(seed)
    blocks = DOCUMENT.split("\n\n")
    text = DOCUMENT if seed < 4 else "\n\n".join(rng.choices(blocks, k=12)) + "\n"
    text = text if seed < 8 else "".join(rng.choices("-*1. >`$|#a\n  \n", k=300))
    cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.choice((10, 100, 1000)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert show(*pieces) == show(text)


def test_the_text_of_code_is_what_was_written(page):
    code = "\n".join(f"if a{i} < {i}:\n\n    '''x" for i in range(60))
    ask(page, f"say(```python\n{code}\n```)yas")
    assert page.locator("pre").evaluate("pre => pre.textContent") == code
    assert page.locator("pre").evaluate("""pre => {
        getSelection().selectAllChildren(pre);
        return String(getSelection());
    }""").rstrip("\n") == code


@pytest.mark.parametrize("attack", [
    "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<svg/onload=alert(1)>",
    "<a href=javascript:alert(1)>x</a>",
    "[x](javascript:alert(1))", "[x](JaVaScRiPt&colon;alert(1))", "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x)", "[x](file:///etc/passwd)", "![x](javascript:alert(1))", "<javascript:alert(1)>",
    "[x]: javascript:alert(1)\n\n[x]", '[y](https://e.example/"onmouseover=alert(1))', "**<b onclick=alert(1)>**",
    "```<script>alert(1)</script>\n<script>alert(1)</script>\n```", "$\\href{javascript:alert(1)}{x}$",
    "$\\class{a}{x} \\style{color:red}{x} \\includegraphics{https://e.example/x.png}$", "$\\def\\a{\\a\\a}\\a$",
    "|<img src=x onerror=alert(1)>|\n|-|\n|x|", "[x](/v1/models)", "[x](//e.example)",
    "<style>*{display:none}</style>", "<iframe src=https://e.example>", "<form action=https://e.example>",
])  # fmt: skip
def test_hostile_text_stays_text(show, attack):
    parser = Elements()
    parser.feed(show(attack))
    for name, attributes in parser.elements:
        assert name in HARMLESS or name.startswith("m"), name  # MathML's names begin so
        assert set(attributes) <= HARMLESS_ATTRIBUTES, attributes
        assert attributes.get("href", "#icon-copy").startswith(("#icon-copy", "https://e.example"))


def test_a_hostile_answer_runs_nothing(page):
    links = "[x](javascript:alert(2)) $\\href{javascript:x}{y}$"
    answer = ask(page, f"say(<img src=x onerror=alert(1)><script>window.hit=1</script>{links})yas")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hit") is None and not page.problems
    assert "<img src=x onerror=alert(1)>" in answer.inner_text()
    assert "<script>" in page.locator(".message.user").inner_text()


@pytest.mark.parametrize("text", [
    ">" * 20_000, "- " * 10_000 + "x", "".join("  " * i + "- x\n" for i in range(300)), "[" * 20_000, "**a " * 5_000,
    "![a](" * 4_000, "`" * 20_000, "$" * 20_000, "\\(" * 10_000, "|" * 20_000 + "\n" + "|-" * 5_000, "<" * 20_000,
    "$" + "{" * 3_000 + "$", "_a__b" * 4_000, "1) " * 7_000 + "x", "$$\n" * 7_000, "[a]: b\n" * 3_000,
])  # fmt: skip
def test_enormous_nesting_is_shown_in_time(show, text):
    letters = show(text)
    assert len(letters) < 100 * len(text)
