"""Chat templates render as `transformers` renders them, and model folders are read as it reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from router.harness import DEMO_MODEL, VOCAB_SIZE
from transformers.utils.chat_template_utils import render_jinja_template

from trunkline.router.chat_template import ChatTemplate, ChatTemplateError
from trunkline.router.model_files import SamplingDefaults, read_model_files
from trunkline.router.tokenizer import Tokenizer

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
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(name: str, prompt: bool) -> None:
    special: Any = SPECIAL
    result: Any = render_jinja_template(
        conversations=[CONVERSATION], chat_template=TEMPLATES[name], add_generation_prompt=prompt, **special
    )
    rendered = ChatTemplate(TEMPLATES[name], SPECIAL).render(CONVERSATION, add_generation_prompt=prompt)
    assert rendered == result[0][0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ messages[7]['content'] + 'x' }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{% for i in range(10**9) %}x{% endfor %}", "failed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursed"),
    ],
)
def test_what_a_template_must_not_do(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, SPECIAL).render(CONVERSATION)


def test_a_broken_template() -> None:
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


@pytest.mark.parametrize(
    ("generation", "temperature"),
    [({"do_sample": False, "temperature": 0.6}, 0.0), ({"temperature": 0.6}, 0.6), ({}, 1.0)],
)
def test_a_model_that_says_not_to_sample_is_greedy_by_default(
    tmp_path: Path, generation: dict[str, Any], temperature: float
) -> None:
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
    assert files.chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert read_model_files(folder).chat_template == "file"
    loaded = Tokenizer(folder)
    assert loaded.eos_ids == {1, 4, 5}
    assert loaded.special_token_id("bos_token") == 0
    assert loaded.special_token_id("unk_token") is None
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
    write_model(tmp_path, generation_config={"temperature": "hot"})
    with pytest.raises(ValueError, match="generation_config"):
        Tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        Tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="object"):
        Tokenizer(tmp_path)
