"""Folders of models with tokenizers of their own, made here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from router.harness import DEMO_MODEL
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

VOCAB_SIZE: Final = 300
_SPECIAL: Final = [f"<|{name}|>" for name in ("bos", "end", "system", "user", "assistant", "pad")]
"""The demo model's special tokens, which its chat template uses."""


def write_tokenizer(folder: Path, text: str) -> None:
    """Put a tokenizer with the demo model's chat template into a model's folder.

    Args:
        text: what it is trained with; other texts make other tokenizers.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    trained.save(str(folder / "tokenizer.json"))
    shutil.copy(DEMO_MODEL / "tokenizer_config.json", folder)


def make_second(folder: Path) -> Path:
    """Write what a router reads of a model: another tokenizer than the demo model's, and a shorter context."""
    shutil.copy(DEMO_MODEL / "generation_config.json", folder)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024})
    )
    write_tokenizer(folder, "a few words of another language")
    return folder


_QWEN3: Final = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }} in <tool_call></tool_call><|end|>{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' + c.function | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
_GPT_OSS: Final = (
    "{% if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "{{ '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_CHANNEL_MARKS: Final = [f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "call", "end")]
FAMILIES: Final = {
    "qwen3": (_QWEN3, ["<think>", "</think>", "<tool_call>", "</tool_call>"], []),
    "gpt-oss": (_GPT_OSS, [], _CHANNEL_MARKS),
}
"""Templates in the forms of model families, the tokens that they add, and their special tokens."""


def write_family(folder: Path, name: str) -> Path:
    """Write what a router reads of a model of one of `FAMILIES`. Its other tokens are the demo model's."""
    template, added, special = FAMILIES[name]
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    if name == "gpt-oss":  # whose answers end with another token; `<|end|>` ends a message
        tokenizer = Tokenizer.from_str(tokenizer.to_str().replace('"<|end|>"', '"<|return|>"'))
    tokenizer.add_tokens(added)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": tokenizer.get_vocab_size()}))
    shutil.copy(DEMO_MODEL / "generation_config.json", folder)
    known = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**known, "eos_token": tokenizer.id_to_token(1), "chat_template": template})
    )
    return folder
