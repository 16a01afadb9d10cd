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
