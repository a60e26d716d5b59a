"""Chat templates in the styles of several families, and one that asks everything about the contents."""

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_STYLE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}
    {%- if message.content is string %}{{- message.content.strip() }}{% endif %}
    {%- endgeneration %}
    {%- if loop.index0 == ns.last %}{{- ' (last question)' }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + call.function.name + ' ' }}{{- call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_STYLE = (
    "{{ bos_token }}{% if messages[0]['role'] not in ['user', 'system'] %}"
    "{{ raise_exception('Conversations start with a user, not with ' ~ messages[0]['role']) }}{% endif %}"
    "{% macro head(role) %}{{ '<|start|>' ~ role ~ '<|end|>\n\n' }}{% endmacro %}"
    "{% for message in messages %}{{ head(message['role']) }}{{ message['content'] | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
    "{% if date_string is defined %}{{ date_string }}{% endif %}"
)
# This template reads and writes messages' contents in every way that a template can. `{...}["get"]` gives a method,
# which Jinja writes with an address that differs each time, so only its first six characters are written.
CURIOUS = """
{%- macro shown(text, limit) %}{% if '<|im_end|>' in text %}(ends a turn){% endif %}{{ text[:limit] }}{% endmacro %}
{%- set ns = namespace(all='', parts=[]) %}
{%- for m in messages if m.content is string and m.content != '<|im_start|>' %}
    {%- set text = m.content | trim %}
    {{- '<|im_start|>' ~ m['role'] ~ '\\n' ~ text.replace('<|im_end|>', '[end]') ~ '<|im_end|>\\n' }}
    {%- if text == '<|im_end|>' or text.startswith('<think>') or text is in ['a<|im_end|>'] %}{{- 'seen' }}{% endif %}
    {{- shown(text, 9) | trim }}{{ shown(text | upper, 99) }}{{ text | replace('<', '&lt;') }}{{ text | tojson }}
    {{- '<|im_start|>%s|{}<|im_end|>' % text }}{{ '<|im_start|>{}'.format(text) }}{{ text | length }}
    {{- text.split('</think>')[-1].lstrip('\\n') }}{{ text[::-1] }}{{ [text, m] }}{{ text.find('|im') }}{{ text[-1:] }}
    {{- [text, '<|im_start|>'] | join('<|im_end|>') }}{{ '<s>'.join([text, text]) }}{{ text | first }}
    {{- messages | selectattr('content', 'equalto', '<|im_end|>') | list | length }}{{ m | tojson(ensure_ascii=true) }}
    {{- {text: 'found'}[text] }}{{ {'<|im_end|>': 'ends', text: m}.get(text, text) }}{{ [text].count('<|im_end|>') }}
    {{- ['a', '<s>', text].index(text) }}{{ ({'<s>': 'starts'}[text] | string)[:6] }}{{ {text: text}['<|im_end|>'] }}
    {%- for char in text %}{{ char }}{% endfor %}
    {%- set ns.all = ns.all + text + '<|im_end|>' %}
    {%- set _ %}{{ text }}<|im_end|>{% endset %}{{ _ }}{{ text.partition('|') | join(',') }}{{ text.title() }}
{%- endfor %}
{{- messages | map(attribute='content') | sort | first }}{{ messages | map(attribute='content') | unique | list }}
{{- ns.all }}{{ messages | map(attribute='content') | map('trim') | join('<|im_start|>') }}
{%- for doc in documents or [] %}{{ doc.title }}: {{ doc['text'] }}<|im_end|>{% endfor %}
"""
