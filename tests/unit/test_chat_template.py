"""Chat templates: the text they render, the files they are found in, and the limits they are held to."""

import json
import threading

import pytest
from chat_templates import CHATML, LLAMA_STYLE, QWEN_STYLE
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st

from cpmrt.errors import CheckpointError, CpmrtError, RequestError
from cpmrt.text import ChatTemplate, template_allowance, template_sandbox
from cpmrt.weights.hub import BUNDLED

TEMPLATES = {"chatml": CHATML, "qwen": QWEN_STYLE, "llama": LLAMA_STYLE}
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}

USER = [{"role": "user", "content": " What is 1 < 2? 你好\n"}]
CHATS = [
    USER,
    [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "Yes"}, *USER],
    [{"role": "user", "content": ""}],
]
TOOL = {"type": "function", "function": {"name": "weather", "description": "<é>", "parameters": {"b": 1, "a": []}}}
CALLS = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "北京"}}}],
    },
]


def write(folder, template, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS | {"chat_template": template} | config))
    return folder


def open_template(folder, template, **config):
    return ChatTemplate.open(write(folder, template, **config))


def test_minicpm_chatml(tmp_path):
    template = open_template(tmp_path, CHATML)
    assert template.render(CHATS[1]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n What is 1 < 2? 你好\n<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\n What is 1 < 2? 你好\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(USER, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_a_message_of_tool_calls_without_content_fits_every_template(tmp_path):
    """A template that tests for the content finds it undefined, and one that uses it unasked gets an empty string."""
    assert "<|im_start|>assistant\n<|im_end|>" in ChatTemplate.open(BUNDLED).render(CALLS)
    assert open_template(tmp_path, "{{ messages[1].content is defined }}").render(CALLS) == "False"
    assert open_template(tmp_path, "{{ messages[1].content|length }}").render(CALLS) == "0"
    with pytest.raises(RequestError, match="UndefinedError"):
        open_template(tmp_path, "{{ messages[1].other.more }}").render(CALLS)


def test_arguments_of_tool_calls_may_be_json_in_a_string(tmp_path):
    """Arguments as a JSON string, as in the OpenAI API and `answer.tool_calls`, render like the same arguments as an
    object."""

    def rendered(arguments, source="{{ messages[0].tool_calls[0].function.arguments|tojson }}"):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        return open_template(tmp_path, source).render(messages)

    assert rendered('{"city": "北京"}') == rendered({"city": "北京"}) == '{"city": "北京"}'
    assert rendered("north") == '"north"' and rendered("[1]") == '"[1]"'
    with pytest.raises(RequestError, match=r"tool_calls\[0\]\.function\.arguments.*at most 64 levels"):
        rendered('{"a":' * 70 + "1" + "}" * 70)
    joined = "{{ 'f(' + messages[0].tool_calls[0].function.arguments + ')' + messages[0].content }}"
    assert rendered('{"city": "北京"}', joined) == rendered({"city": "北京"}, joined) == 'f({"city": "北京"})'


def test_thinking_is_undefined_unless_said(tmp_path):
    template = open_template(tmp_path, QWEN_STYLE)
    plain = template.render(USER)
    assert template.render(USER, enable_thinking=True) == plain
    assert template.render(USER, enable_thinking=False) == plain + "<think>\n\n</think>\n\n"


def test_bos_in_the_template(tmp_path):
    assert open_template(tmp_path, LLAMA_STYLE).render(USER, date_string="!").startswith("<s><|start|>user<|end|>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", [*CHATS, CALLS])
@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"enable_thinking": False}, {"date_string": "1 May"}])
def test_equals_transformers(tmp_path, name, chat, options):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>")
    if chat is CALLS and name == "chatml":
        chat = [{"content": "", **message} | {"content": message["content"] or ""} for message in chat]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            chat, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompt, **options
        )
        actual = open_template(tmp_path, TEMPLATES[name]).render(chat, add_generation_prompt=prompt, **options)
        assert actual == expected


def test_the_jinja_file_wins_then_the_json_file_then_the_config(tmp_path):
    assert ChatTemplate.open(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    assert ChatTemplate.open(tmp_path) is None
    assert open_template(tmp_path, "config").render(USER) == "config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert ChatTemplate.open(tmp_path).render(USER) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja {{ eos_token }}{{ pad_token }}")
    assert ChatTemplate.open(tmp_path).render(USER) == "jinja </s>"


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = open_template(tmp_path, named)
    assert template.render(USER) == template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=[TOOL]) == "tools"
    assert open_template(tmp_path, named[:1]).render(USER, tools=[TOOL]) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools of {{ bos_token }}")
    assert [ChatTemplate.open(tmp_path).render(USER, tools=tools) for tools in ([], [TOOL])] == ["file", "tools of <s>"]


def test_text_parts_become_one_string_and_the_callers_messages_stay(tmp_path):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    template = open_template(tmp_path, "{{ messages[0].content is string }} {{ messages[0].content }}")
    assert template.render(messages) == "True a b"
    assert messages == [{"role": "user", "content": parts}]


def test_hugging_face_extensions(tmp_path):
    source = "{{ strftime_now('%Y')|length }} {{ {'b': '<é>', 'a': 1}|tojson }} {{ {'b': 1}|tojson(indent=1) }}"
    assert open_template(tmp_path, source).render(USER) == '4 {"b": "<é>", "a": 1} {\n "b": 1\n}'
    source = "{{ '%s-%02d' % ('a', 7) }} {{ '{:>3}'.format(5) }} {{ 'x' * 3 }} {{ [1] + [2] }} {{ 'a' ~ 1 ~ none }}"
    assert open_template(tmp_path, source).render(USER) == "a-07   5 xxx [1, 2] a1None"


def test_large_numbers_in_data_are_no_attack(tmp_path):
    source = (
        "{% macro f(n) %}{{ n }}{% endmacro %}{{ f(n) }} {{ '%d'|format(n) }} {{ n|tojson }} {{ n + 1 }} {{ n * 2.0 }}"
    )
    text = open_template(tmp_path, source).render(USER, n=123_456_789_012)
    assert text == "123456789012 123456789012 123456789012 123456789013 246913578024.0"


def test_a_loop_can_be_handed_to_a_macro(tmp_path):
    source = (
        "{% macro f(l) %}{{ l.index }}/{{ l.length }} {% endmacro %}{% for m in messages %}{{ f(loop) }}{% endfor %}"
    )
    assert open_template(tmp_path, source).render(CHATS[1]) == "1/4 2/4 3/4 4/4 "


def test_lazy_filters(tmp_path):
    source = "{{ messages|map(attribute='role')|join(', ') }} {{ ' '.join(messages|map(attribute='role')) }}"
    assert open_template(tmp_path, source).render(CHATS[1][:2]) == "system, user system user"


def test_a_long_conversation_is_no_attack(tmp_path):
    messages = [{"role": "user", "content": "word " * 2000}, {"role": "assistant", "content": "x" * 9000}] * 300
    assert len(open_template(tmp_path, QWEN_STYLE).render(messages)) > 5_000_000


BAD_MESSAGES = [
    (None, "messages: expected a list"),
    ([], "messages: expected a list"),
    ("hello", "messages: expected a list"),
    ({"role": "user"}, "messages: expected a list"),
    (["hello"], "messages[0]: expected a dict"),
    ([*USER, None], "messages[1]: expected a dict"),
    ([{"content": "a"}], "messages[0].role: expected a string"),
    ([{"role": 1, "content": "a"}], "messages[0].role: expected a string"),
    ([{"role": "user"}], "messages[0].content: expected a string"),
    ([{"role": "user", "content": None}], "messages[0].content: expected a string"),
    ([{"role": "user", "content": 3}], "messages[0].content: expected a string"),
    ([{"role": "user", "content": {"text": "a"}}], "messages[0].content: expected a string"),
    ([{"role": "user", "content": b"a"}], "messages[0].content: expected JSON data"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]: expected a part"),
    ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0]: expected a part"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]: expected a part"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0]: expected a part"),
    ([{"role": "assistant", "tool_calls": "f()"}], "messages[0].tool_calls: expected a list"),
    ([{"role": "assistant", "tool_calls": ["f()"]}], "messages[0].tool_calls: expected a list"),
    ([{"role": "assistant", "tool_calls": []}], "messages[0].content: expected a string"),
    ([{"role": "user", "content": "a", 1: 2}], "messages[0]: expected strings as keys"),
    ([{"role": "user", "content": "a", "extra": object()}], "messages[0].extra: expected JSON data"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_malformed_messages(tmp_path, messages, message):
    with pytest.raises(RequestError) as caught:
        open_template(tmp_path, CHATML).render(messages)
    assert message in str(caught.value)


@pytest.mark.parametrize("tools", ["f", {"a": 1}, [print], ["f"], [{"f": print}], 3])
def test_malformed_tools(tmp_path, tools):
    with pytest.raises(RequestError, match="tools"):
        open_template(tmp_path, QWEN_STYLE).render(USER, tools=tools)


def test_data_that_holds_itself(tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(RequestError, match="nesting"):
        open_template(tmp_path, CHATML).render([{"role": "user", "content": "a", "x": loop}])


BAD_TEMPLATES = [
    ("a\n{% for x in %}", "line 2 of the template"),
    ("{% if %}", "line 1 of the template"),
    ("{% endfor %}", "line 1 of the template"),
    ("\n\n{{ messages", "line 3 of the template"),
    ("{{ 'a }}", "line 1 of the template"),
    ("{% unknown %}", "line 1 of the template"),
    ("{% generation %}", "of the template"),
    ("{{ 1|nothing }}", "line 1 of the template"),
    ("{{ " + "(" * 20_000 + " }}", "cannot be compiled"),
    ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "cannot be compiled"),
    ("x" * (2**20 + 1), "too large"),
    (3, "expected a string or a list"),
    ({"default": "a"}, "expected a string or a list"),
    ([1], "expected a string or a list"),
    ([{"name": "default"}], "expected a string or a list"),
    ([{"name": "tool_use", "template": "a"}], 'expected one named "default"'),
    ([], 'expected one named "default"'),
]


@pytest.mark.parametrize(("template", "message"), BAD_TEMPLATES)
def test_malformed_templates(tmp_path, template, message):
    with pytest.raises(CheckpointError) as caught:
        open_template(tmp_path, template).check()
    assert message in str(caught.value) and "tokenizer_config.json" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_templates_are_compiled_for_the_first_chat_and_once(tmp_path, monkeypatch):
    compiled, compile_source = [], template_sandbox.ChatEnvironment.compile

    def note(environment, source, **options):
        compiled.append(source)
        return compile_source(environment, source, **options)

    monkeypatch.setattr(template_sandbox.ChatEnvironment, "compile", note)
    template = open_template(tmp_path, CHATML)
    counts = [len(compiled)]
    for _ in range(2):
        template.render(USER)
        counts.append(len(compiled))
    assert counts == [0, 1, 1]


def test_a_template_that_cannot_be_compiled_is_told_at_each_chat(tmp_path):
    template = open_template(tmp_path, "a\n{% if %}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="line 2 of the template"):
            template.render(USER)


def test_malformed_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"eos_token: expected a token"):
        open_template(tmp_path, CHATML, eos_token=7)
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"chat_template.json is not valid JSON"):
        ChatTemplate.open(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is not UTF-8"):
        ChatTemplate.open(tmp_path)


REFUSED = [
    ("{{ raise_exception('no ' ~ 'system') }}", "refuses the messages: no system"),
    ("\n{{ nothing.at_all }}", "line 2 of the template"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{{ messages[0]|tojson(indent=messages) }}", "TypeError"),
    ("{{ namespace()|tojson }}", "TypeError"),
    ("{% include 'other' %}", "TypeError"),
    ("{{ lipsum() }}", "UndefinedError"),
]


@pytest.mark.parametrize(("template", "message"), REFUSED)
def test_templates_that_do_not_take_the_messages(tmp_path, template, message):
    with pytest.raises(RequestError) as caught:
        open_template(tmp_path, template).render(USER)
    assert message in str(caught.value) and "\n" not in str(caught.value)


DOUBLE = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = NEXT %}{% endfor %}{{ ns.s }}"
HOSTILE = [
    "{{ ''.__class__.__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ raise_exception.__globals__.items() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% set s = 'a' * 9999 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ range(1000000) }}",
    DOUBLE.replace("START", "'aa'").replace("NEXT", "ns.s ~ ns.s"),
    DOUBLE.replace("START", "'aa'").replace("NEXT", "ns.s + ns.s"),
    DOUBLE.replace("START", "[1]").replace("NEXT", "[ns.s, ns.s]"),
    DOUBLE.replace("START", "[1]").replace("NEXT", "{'a': ns.s, 'b': ns.s}"),
    DOUBLE.replace("START", "[1]").replace("NEXT", "(ns.s, ns.s)"),
    DOUBLE.replace("START", "3").replace("NEXT", "ns.s * ns.s"),
    DOUBLE.replace("START", "'aa'").replace("NEXT", "ns.s|replace('a', ns.s)"),
    DOUBLE.replace("START", "'aa'").replace("NEXT", "'%s%s' % (ns.s, ns.s)"),
    DOUBLE.replace("START", "'aa'").replace("NEXT", "'{0}{0}'.format(ns.s)"),
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * [1] }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.expandtabs(10**9) }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'|center(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ '{:{w}d}'.format(1, w=99999) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "{{ (['b'] * 100000)|join('a' * 100000) }}",
    "{{ (['b'] * 100000)|map('upper')|join('a' * 100) }}",
    "{{ ('a' * 100).join((['b'] * 100000)|map('upper')) }}",
    "{{ '%99999d'|format(1) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ ('\n' * 1000000)|indent(100000) }}",
    "{{ ([1] * 100000)|tojson(indent=100000) }}",
    "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
    "{% set x %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile_templates_are_stopped(tmp_path, template):
    with pytest.raises(CheckpointError, match="a chat template may not do this"):
        open_template(tmp_path, template).render(USER)


@pytest.mark.parametrize("expression", ["''|attr('__class__')", "raise_exception.__globals__", "dict.__base__"])
def test_internals_are_undefined(tmp_path, expression):
    assert open_template(tmp_path, "{{ (" + expression + ") is defined }}").render(USER) == "False"


def test_time_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(template_allowance, "DEADLINE_S", 0.2)
    monkeypatch.setattr(template_sandbox, "_TURN_COST", 0)
    doubling = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    with pytest.raises(CheckpointError, match=r"longer than 0.2 s"):
        open_template(tmp_path, doubling).render(USER)


def test_threads_have_their_own_limits(tmp_path):
    template, results = open_template(tmp_path, "{{ 'a' * 1000000 }}"), []
    threads = [threading.Thread(target=lambda: results.append(len(template.render(USER)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1_000_000] * 8


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments"])
            | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return [open_template(tmp_path_factory.mktemp(name), source) for name, source in TEMPLATES.items()]


@examples(100)
@given(st.lists(json_values, max_size=3) | json_values, json_values)
@example([{"role": "user", "content": "\ud800"}], None)
def test_only_our_errors_come_out_of_any_messages(templates, messages, tools):
    for template in templates:
        try:
            assert isinstance(template.render(messages, tools=tools), str)
        except RequestError as error:
            assert "\n" not in str(error)


FRAGMENTS = """{% for m in messages %} {% endfor %} {{ m.role }} {{ m }} {% %} {% if m %} {% endif %} {# x #}
{% set a = messages %} {{ a|tojson }} {{ a * 9 }} {% macro f() %} {% endmacro %} {{ f() }} {% break %} {{ a.b.c }}
{{ loop.index }} {% raw %} {{ a|map('upper') }} '"""
fragments = st.sampled_from(FRAGMENTS.split()) | st.sampled_from(FRAGMENTS.replace("} {", "}\0{").split("\0"))


@examples(100)
@given(st.lists(fragments, max_size=10).map(" ".join) | st.text("{}%#'\" aif().|-\n", max_size=30))
def test_only_our_errors_come_out_of_any_template(tmp_path, source):
    try:
        assert isinstance(open_template(tmp_path, source).render(USER), str)
    except CpmrtError as error:
        assert "\n" not in str(error)
