"""Chat templates render as `transformers` renders them, and model folders are read as it reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from router.harness import DEMO_MODEL, VOCAB_SIZE
from transformers.utils.chat_template_utils import render_jinja_template

from trunkline.router.text import template_limits
from trunkline.router.text.chat_template import ChatRenderer, ChatTemplate, ChatTemplateError
from trunkline.router.text.tokenizer import SamplingDefaults, Tokenizer, read_model_files
from trunkline.router.text.tool_styles import ToolStyle
from trunkline.router.text.tool_turns import TurnError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hi {{ 1 }} 😀"},
    {"role": "assistant", "content": "Hello.\n"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "headers": """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
""",
    "instructions": """
{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] %}
    {% set rest = messages[1:] %}
{% else %}
    {% set rest = messages %}
{% endif %}
{{ bos_token }}
{% for message in rest %}
    {% if loop.index0 % 2 == 0 and message.role != 'user' %}
        {{ raise_exception('must alternate') }}
    {% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content + eos_token }}{% endgeneration %}
    {% else %}
[INST] {{ message.content }} [/INST]
    {% endif %}
{% endfor %}
{% if system is defined %}{{ system }}{% endif %}
""",
    "json": "{{ messages | tojson }}|"
    "{{ messages | tojson(indent=2) }}|{{ tools is none }}{{ unknown is defined }}",
    "loops": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }},{% endfor %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ strftime_now('%Y') | length }}{{ '  x ' | trim }}{{ messages[-1]['content'][::-1] }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name: str) -> None:
    special: Any = SPECIAL
    for prompt in (True, False):
        result: Any = render_jinja_template(
            conversations=[CONVERSATION], chat_template=TEMPLATES[name], add_generation_prompt=prompt, **special
        )
        rendered = ChatTemplate(TEMPLATES[name], SPECIAL).render(CONVERSATION, add_generation_prompt=prompt)
        assert rendered == result[0][0]


TOOL_TEMPLATES = {
    "hermes": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall them within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system' and tools) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
""",
    "llama3_json": """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.index0 == 1 and tools is not none %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
""",
    "mistral": """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.index0 <= 1 %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- tool | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set text = call.function | tojson %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
            {{- text[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
""",
}
"""In the manner of Qwen, Llama 3.1 and Mistral."""
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ADD = {"name": "add", "description": "Adds <numbers>.", "parameters": NUMBER}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": ADD}]


def with_call(arguments: Any, call_id: str = "abcDEF123") -> list[dict[str, Any]]:
    """A conversation in which a function was called."""
    call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + é?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": "add", "content": "2"},
        {"role": "user", "content": "Thanks"},
    ]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_tools_equal_transformers(name: Any, tools: Any) -> None:
    special: Any = SPECIAL
    result: Any = render_jinja_template(
        conversations=[with_call({"x": 1, "y": "é"})], chat_template=TOOL_TEMPLATES[name], tools=tools, **special
    )
    renderer = ChatRenderer(TOOL_TEMPLATES[name], SPECIAL, ToolStyle(name))
    text = renderer.render(with_call('{"x":1,"y":"\\u00e9"}'), add_generation_prompt=False, tools=tools)
    assert text == result[0][0]
    assert '{"x": 1, "y": "é"}' in text
    assert ("Adds <numbers>." in text) == bool(tools)
    if name == "mistral":  # whose template wants ids of nine characters
        text = renderer.render(with_call("{}", "call_0123456789"), tools=TOOLS)
        [first, second] = [part.split('"')[0] for part in text.split('id": "')[1:]]
        assert first == second
        assert len(first) == 9


def test_arguments_are_text_for_templates_that_want_text() -> None:
    source = (
        "{{ tools is none }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ 'a:' + c.function.arguments + ';' }}{{ c.function.arguments }}{{ c.function.arguments is mapping }}"
        "{% endfor %}{% endfor %}"
    )
    renderer = ChatRenderer(source, SPECIAL, ToolStyle())
    assert renderer.render(with_call('{"x":1}')) == 'Truea:{"x":1};{"x":1}True'
    assert renderer.render(with_call('{"x": cut')) == 'Truea:{"x": cut;{"x": cutFalse'
    assert renderer.render(with_call("[1]")) == "Truea:[1];[1]False"
    renderer = ChatRenderer("plain", SPECIAL, ToolStyle(), tool_source="{{ tools | length }}")
    assert renderer.render(CONVERSATION) == "plain"
    assert renderer.render(CONVERSATION, tools=TOOLS) == "1"


PLAIN = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] or m.role == refused %}"
    "{{ raise_exception('no ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("style", "written"),
    [
        (ToolStyle("hermes"), '<tool_call>\n{"name": "add", "arguments": {"x":1}}\n</tool_call>'),
        (ToolStyle("llama3_json"), '{"name": "add", "parameters": {"x":1}}'),
        (ToolStyle("mistral"), '[TOOL_CALLS][{"name": "add", "arguments": {"x":1}}]'),
        (ToolStyle("mistral", newer=True), '[TOOL_CALLS]add[ARGS]{"x":1}'),
    ],
    ids=["hermes", "llama3_json", "mistral", "mistral newer"],
)
def test_tools_for_a_template_that_knows_none(style: ToolStyle, written: str) -> None:
    renderer = ChatRenderer(PLAIN, SPECIAL, style)
    text = renderer.render(with_call('{"x":1}'), tools=TOOLS)
    system, rest = text.removeprefix("<system>Be brief.\n\n").split("<user>", 1)
    assert json.dumps(TOOLS[0], ensure_ascii=False) in system
    assert written.replace('{"x":1}', '{"parameter_name": "value"}').replace("add", "function_name") in system
    response = "<tool_response>\n2\n</tool_response>"
    assert rest == f"1 + é?<assistant>{written}<user>{response}\nThanks"
    assert renderer.render(with_call('{"x":1}')) == f"<system>Be brief.<user>{rest}"


def test_a_template_that_takes_no_system_message_gets_tools_from_the_user() -> None:
    renderer = ChatRenderer(PLAIN, SPECIAL, ToolStyle())
    extra = {"refused": "system"}
    text = renderer.render(CONVERSATION[1:], extra=extra, tools=TOOLS)
    assert text.startswith("<user>You can call functions")
    assert "</tool_call>\n\nHi {{ 1 }}" in text
    with pytest.raises(ChatTemplateError, match="no system"):
        renderer.render(CONVERSATION, extra=extra, tools=TOOLS)
    with pytest.raises(TurnError, match="'abcDEF123' answers no call"):
        renderer.render(with_call("{}")[3:])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ messages[7]['content'] + 'x' }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{% for i in range(10**9) %}x{% endfor %}", "more than 1000000 steps"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursed"),
    ],
)
def test_what_a_template_must_not_do(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, SPECIAL).render(CONVERSATION)
    with pytest.raises(ChatTemplateError, match="broken"):
        ChatTemplate("{% if %}", {})


def test_switches_of_the_template_cannot_replace_its_variables() -> None:
    template = ChatTemplate("{{ thinking }}{{ bos_token }}{{ messages | length }}", SPECIAL)
    extra: dict[str, Any] = {"thinking": True, "bos_token": "fake", "messages": []}
    assert template.render(CONVERSATION, extra=extra) == "True<s>4"


def write_model(folder: Path, **files: Any) -> Path:
    """A model folder with the demo's tokenizer and the given JSON files."""
    (folder / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_model_that_says_not_to_sample_is_greedy_by_default(tmp_path: Path) -> None:
    for generation, temperature in (
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"temperature": 0.6}, 0.6),
        ({}, 1.0),
    ):
        folder = write_model(tmp_path, generation_config=generation)
        assert read_model_files(folder).defaults.temperature == temperature


def test_reading_a_model_folder(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path,
        config={"max_position_embeddings": 777, "vocab_size": 5000, "eos_token_id": 3},
        generation_config={"eos_token_id": [4, 5], "temperature": 0.6, "top_k": 20, "do_sample": True},
        special_tokens_map={"bos_token": "<|bos|>", "pad_token": {"content": "<|pad|>"}},
        tokenizer_config={
            "eos_token": {"content": "<|end|>", "special": True},
            "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
        },
    )
    files = read_model_files(folder)
    assert (files.max_context, files.vocab_size, files.eos_ids) == (777, 5000, (4, 5))
    assert files.defaults == SamplingDefaults(temperature=0.6, top_k=20)
    assert files.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    assert (files.chat_template, files.tool_chat_template) == ("d", "t")
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tool file")
    files = read_model_files(folder)
    assert (files.chat_template, files.tool_chat_template) == ("file", "tool file")
    loaded = Tokenizer(folder)
    assert loaded.eos_ids == {1, 4, 5}
    assert loaded.special_token_id("bos_token") == 0
    assert loaded.special_token_id("unk_token") is None
    loaded.close()


def test_the_style_of_a_model_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tokenizer_config={"chat_template": "{{ tools }}[TOOL_CALLS]"})
    for option, expected in (("auto", "mistral"), ("hermes", "hermes")):
        loaded = Tokenizer(folder, option)
        assert loaded.tool_style == ToolStyle(expected)  # type: ignore[arg-type]
        loaded.close()


def test_a_bare_model_folder(tmp_path: Path) -> None:
    loaded = Tokenizer(write_model(tmp_path))
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.files.defaults == SamplingDefaults()
    with pytest.raises(ChatTemplateError, match="no chat template"):
        loaded.render_chat(CONVERSATION)
    loaded.close()


def test_broken_model_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    write_model(tmp_path)
    for text, message in (
        ('{"temperature": "hot"}', "generation_config"),
        ("{", "not valid JSON"),
        ("[]", "object"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Tokenizer(tmp_path)


def doubled(value: str, expression: str) -> str:
    turn = f"{{% set ns.x = {expression} %}}"
    return f"{{% set ns = namespace(x={value}) %}}{{% for i in range(60) %}}{turn}{{% endfor %}}"


RUNAWAY = {
    "nested loops": "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "loops over a list": "{% set r = range(999) | list %}"
    "{% for a in r %}{% for b in r %}{% for c in r %}x{% endfor %}{% endfor %}{% endfor %}",
    "a filtered loop": "{% set r = range(999) | list %}{% for a in r %}{% for b in r if b < 0 %}{% endfor %}"
    "{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [[], []] recursive %}{{ loop([[], []]) if loop.depth < 40 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "call blocks": "{% macro f(n) %}{{ caller() if n == 0 }}{% if n %}{% call f(n - 1) %}{% endcall %}"
    "{% call f(n - 1) %}{% endcall %}{% endif %}{% endmacro %}{% call f(40) %}{% endcall %}",
    "blocks": "{% block b %}{% for i in range(99) %}{{ self.b() }}{% endfor %}{% endblock %}",
    "range": "{{ range(10**12) | list }}",
    "ranges in a loop": "{% for i in range(999) %}{{ range(99999) | list | length }}{% endfor %}",
    "a repeated text": "{{ 'x' * 10**10 }}",
    "a text that doubles": doubled("'x'", "ns.x + ns.x"),
    "a text that is joined": doubled("'x'", "ns.x ~ ns.x"),
    "a text that is kept": "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
    "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
    "a text that is replaced": doubled("'xx'", "ns.x.replace('x', ns.x)"),
    "a filter that replaces": doubled("'xx'", "ns.x | replace('x', ns.x)"),
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a number that doubles": doubled("99", "ns.x * ns.x"),
    "padding": "{{ 'x'.ljust(10**10) }}",
    "an indent": "{{ 'x\n' | indent(10**10) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a method that formats": "{{ '{:>{}}'.format(1, 10**10) }}",
    "random text": "{{ lipsum(10**9) }}",
}


@pytest.mark.parametrize("source", RUNAWAY.values(), ids=RUNAWAY)
def test_templates_that_run_away_are_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many steps, not after some time; the error names what is at fault."""
    monkeypatch.setattr(template_limits, "STEPS_MAX", 100_000)
    with pytest.raises(ChatTemplateError, match="chat template"):
        ChatTemplate(source, SPECIAL).render(CONVERSATION)


def test_long_conversations_take_few_steps() -> None:
    """The limit is far away from what requests need, and each rendering is counted for itself."""
    template = ChatTemplate(TEMPLATES["headers"], SPECIAL)
    turns = [CONVERSATION[0], *([*CONVERSATION[1:3]] * 8000), CONVERSATION[-1]]
    for _ in range(2):
        with template_limits.counted():
            assert template.render(turns)


def test_what_templates_may_do() -> None:
    """Nothing of what is counted changes a result."""
    source = (
        "{{ 'a' ~ 1 ~ none ~ ('b' ~ 2) }}|{{ 'ab' * 3 }}|{{ 3 * [1] }}|{{ '%s-%03d' % ('x', 7) }}|{{ 2 ** 10 }}|"
        "{{ 'x'.ljust(3) }}|{{ 'x' | center(5) }}|{{ 'a\nb' | indent(2) }}|{{ [1, 2] + [3] }}|{{ 7 % 4 }}|"
        "{% for i in range(5) if i is even %}{{ i }}{{ ',' if not loop.last }}{% else %}none{% endfor %}|"
        "{% for i in [] %}{% else %}none{% endfor %}|{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(1) ~ m(2) }}|"
        "{{ '{}/{:>4}'.format(1, 2) }}|{{ 'aXa' | replace('a', 'bb') }}|{{ ['a', 'b'] | join('-') }}"
    )
    expected = (
        "a1Noneb2|ababab|[1, 1, 1]|x-007|1024|x  |  x  |a\n  b|[1, 2, 3]|3|0,2,4|none|<1><2>|1/   2|bbXbb|a-b"
    )
    assert ChatTemplate(source, SPECIAL).render(CONVERSATION) == expected


def test_a_large_number_that_goes_through_a_filter_costs_nothing() -> None:
    """Templates write the arguments of calls with filters; an account's number is no width."""
    for name in ("string", "int", "abs", "round", "trim", "default(0)"):
        source = f"{{% for m in messages %}}{{{{ m.account | {name} }}}}{{% endfor %}}"
        rendered = ChatTemplate(source, SPECIAL).render([{"role": "user", "account": 123456789012}])
        assert rendered == "123456789012"


def test_numbered_calls_are_counted_over_the_conversation() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.id }}>{% endfor %}"
        "{% if m.role == 'tool' %}={{ m.tool_call_id }}:{{ m.content }}{% endif %}{% endfor %}{{ tools and '' }}"
    )
    renderer = ChatRenderer(source, SPECIAL, ToolStyle("kimi_k2"))
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": "add", "arguments": "{}"}} for at in (1, 2)
    ]
    turns: list[Any] = []
    for call in calls:
        turns += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": call["id"]},
        ]
    first, second = "functions.add:0", "functions.add:1"
    assert renderer.render(turns, tools=TOOLS) == f"<{first}>={first}:3<{second}>={second}:3"
