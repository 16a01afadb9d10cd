"""The model that serving benchmarks compare engines with: a random Llama of 110 million parameters.

Too large for the caches of a small machine, small enough to build in seconds. Hidden size 768, 12 layers, 12
heads over 4 KV heads, MLP 2,400, vocabulary 16,384, untied, bfloat16: 110.4 million parameters. Its tokenizer
knows one word per id, so that prompts of ids and prompts of text are the same. With an MLP of 2,560 (114.8 million
parameters) rows of all matrices, and of the halves of two ranks, are whole blocks of GGUF files.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

VOCABULARY: Final = 16_384
MLP: Final = 2400
BLOCKS_MLP: Final = 2560


def small_model(mlp: int = MLP) -> Path:
    """The checkpoint's folder; made at the first call and kept in the temporary folder of the machine."""
    own = "" if mlp == MLP else f"-{mlp}"
    folder = Path(tempfile.gettempdir(), f"trunkline-benchmark-small{own}-{os.getuid()}")
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    quiet: Any = logging.disable_progress_bar
    quiet()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=mlp,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        LlamaForCausalLM(config).bfloat16().save_pretrained(scratch)
        words = {"<s>": 0, "</s>": 1, **{f"w{token}": token for token in range(2, VOCABULARY)}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast: Any = PreTrainedTokenizerFast
        fast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(scratch)
        Path(scratch).chmod(0o755)
        os.rename(scratch, folder)
        os.mkdir(scratch)  # what the context manager removes
    return folder


if __name__ == "__main__":
    print(small_model())
