"""Grammars need neither `transformers` nor torch to be imported, and read tokenizers as `transformers` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.worker.grammar.automaton import Vocabulary
from trunkline.worker.grammar.light_import import TokenizerFile


@pytest.mark.processes
def test_trials_import_nothing_heavy() -> None:
    looked_for = {"torch", "transformers", "xgrammar"}
    code = f"import sys, trunkline.worker.grammar.trial; print({looked_for} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{'xgrammar'}\n"


@pytest.mark.processes
def test_what_workers_are_forked_from_asks_no_driver() -> None:
    """A process that has asked CUDA how many GPUs there are cannot fork others that use one. So says torch where
    it is built for CUDA, which is imitated here."""
    code = """if True:
        import torch
        asked = []
        torch.cuda._is_compiled = lambda: True
        torch._C._cuda_getDeviceCount = lambda: asked.append(1) or 0
        import trunkline.worker.__main__
        print(len(asked), torch.cuda.is_available(), len(asked))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 False 1\n"


def with_byte_tokens(folder: Path) -> Path:
    """A tokenizer whose tokens spell blanks as "▁" and bytes as "<0x0A>", as those of SentencePiece do."""
    spelled = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    vocab = {token: i for i, token in enumerate(spelled)}
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "<|call|>"])
    tokenizer.add_tokens([AddedToken("ä b")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["byte level", "byte tokens"])
def test_tokenizers_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    # Here, after xgrammar: what stood in for the package is gone.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    path = (DEMO_FOLDER if kind == "byte level" else with_byte_tokens(tmp_path)) / "tokenizer.json"
    own = TokenizerFile(path)
    judge = PreTrainedTokenizerFast(tokenizer_file=str(path))  # type: ignore[no-untyped-call]
    assert own.get_vocab() == judge.get_vocab()
    assert own.encode("a b", add_special_tokens=False) == judge.encode("a b", add_special_tokens=False)
    ids = [*range(len(own.get_vocab()))]
    assert own.convert_ids_to_tokens(ids) == judge.convert_ids_to_tokens(ids)
    added = own.backend_tokenizer.get_added_tokens_decoder()
    assert {token: str(one) for token, one in added.items()} == {
        token: str(one) for token, one in judge.added_tokens_decoder.items()
    }


def test_tokens_are_known_as_the_bytes_that_they_mean(tmp_path: Path) -> None:
    import xgrammar  # noqa: PLC0415 (as `automaton` has imported it)

    tokenizer = TokenizerFile(with_byte_tokens(tmp_path) / "tokenizer.json")
    vocab = tokenizer.get_vocab()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=300, stop_token_ids=[0])  # type: ignore[arg-type]
    spelled = {token: info.decoded_vocab[vocab[token]] for token in ("<0x0A>", "<0xC3>", "▁a", "ä b")}
    assert spelled == {"<0x0A>": b"\n", "<0xC3>": b"\xc3", "▁a": b" a", "ä b": "ä b".encode()}
    assert info.add_prefix_space
    grammar = Vocabulary(tmp_path, 300).compile("regex", "( a|\n)b")
    matcher = grammar.matcher([vocab["<unk>"]])
    matcher.accept([vocab["<0x0A>"]])
    words = np.zeros(10, dtype=np.int32)
    matcher.fill(words)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert allowed.tolist() == [vocab["<0x62>"], vocab["b"]]
