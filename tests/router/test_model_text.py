"""The tokenizer as the PML compiler sees it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from router.harness import DEMO_MODEL

from trunkline.router.stores.model_text import ModelText
from trunkline.router.text.chat_template import ChatTemplateError
from trunkline.router.text.tokenizer import Tokenizer


def model(folder: Path, **changes: object) -> Tokenizer:
    """The demo model's tokenizer with another configuration."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return Tokenizer(folder)


def test_special_tokens_are_tokens_in_templates_only(tokenizer: Tokenizer) -> None:
    text = ModelText(tokenizer)
    assert text.encode_special("<|user|>") == tokenizer.encode("<|user|>", add_special_tokens=False)
    plain = text.encode_plain("<|user|>hi")
    assert len(plain) > 2
    assert tokenizer.decode(plain, skip_special_tokens=True) == "<|user|>hi"
    assert text.encode_plain("no marks here") == text.encode_special("no marks here")
    assert text.encode_plain("") == text.encode_special("") == []


def test_placeholders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = ModelText(tokenizer)
    pad = tokenizer.special_token_id("pad_token")
    assert text.placeholder_ids(None, 3) == [pad] * 3
    dots = text.encode_plain(" ...")
    filled = text.placeholder_ids(" ...", 2 * len(dots) + 1)
    assert filled == [*dots, *dots, dots[0]]
    assert text.placeholder_ids(None, 0) == []
    unknown = model(tmp_path / "unk", unk_token="<|bos|>")
    assert ModelText(unknown).placeholder_ids(None, 1) == [unknown.special_token_id("unk_token")]
    blank = model(tmp_path / "none", pad_token=None)
    assert ModelText(blank).placeholder_ids(None, 2) == blank.encode_plain(" ")[-1:] * 2


def test_what_stands_in_front(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert ModelText(tokenizer).bos_ids == []
    folder = tmp_path / "bos"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text())
    bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    end = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [token], "tokens": [name]}
            for name, token in (("<|bos|>", 0), ("<|end|>", 1))
        },
    }
    path.write_text(json.dumps(description))
    assert ModelText(Tokenizer(folder)).bos_ids == [0]


def test_conversations(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = ModelText(tokenizer)
    assert text.has_chat_template
    turns = [{"role": "user", "content": "Hi"}]
    assert text.render_chat(turns, True) == "<|bos|><|user|>Hi<|end|><|assistant|>"
    with pytest.raises(ChatTemplateError, match="unknown role"):
        text.render_chat([{"role": "judge", "content": ""}], False)
    none = ModelText(model(tmp_path / "plain", chat_template=None))
    assert not none.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        none.render_chat(turns, False)
