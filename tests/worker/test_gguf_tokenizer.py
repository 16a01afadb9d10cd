"""Tokenizers of GGUF files: the ids are those of the tokenizer that the file was made from."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any, Final

import pytest
from seeds import seeds
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from trunkline.worker.model.gguf.tokenizer import tokenizer_files

ENGLISH: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NO_WORD: Final = r"[^\r\n\p{L}\p{N}]?"
CASED: Final = rf"{NO_WORD}{UPPER}*{LOWER}+{{0}}|{NO_WORD}{UPPER}+{LOWER}*{{0}}|"
PATTERNS: Final = {
    "llama-bpe": ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + END,
    "qwen2": ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + END,
    "tekken": CASED.replace("{0}", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + END,
    "gpt-4o": CASED.replace("{0}", f"{ENGLISH}?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + END,
    "gpt-2": "",
    "smollm": "",
}
"""The rules as the models' own tokenizers have them; empty: GPT-2's."""
WORDS: Final = (
    *("the", "The", "I'll", "IT'S", "don't", "camelCase", "HTTPServer", "naïve", "nai\u0308ve", "Straße"),
    *(
        "日本語",
        "русский",
        "हिन्दी",
        "العربية",
        "😀",
        "👩‍💻",
        "1",
        "42",
        "31415",
        "٣",
        "½",
        "x_1",
        "==",
        "//",
        "...",
        "\u00a0",
    ),
    *("\n", "\n\n", "\r\n", "\t", " ", "  ", "   ", "<s>", "<|end|>", "<x>", "\u2581", "\u200b", "e\u0301"),
)
SPECIAL: Final = ("<s>", "<|end|>")


def texts(rng: random.Random, count: int) -> list[str]:
    """Return texts of such words and of random characters, with and without blanks between."""
    found = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            odd = chr(
                rng.choice((rng.randrange(32, 127), rng.randrange(0x80, 0xD7FF), rng.randrange(0x10000, 0x1FAFF)))
            )
            parts.append(odd if rng.random() < 0.2 else rng.choice(WORDS))
            parts.append(rng.choice(("", " ", "")))
        found.append("".join(parts))
    return found


def original(pre: str, rng: random.Random) -> Tokenizer:
    """Return a tokenizer that merges bytes, with these rules, of a random corpus."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not PATTERNS[pre])
    steps: list[Any] = [bytes_of]
    if PATTERNS[pre]:
        steps = [pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated"), bytes_of]
    elif pre == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), bytes_of]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(rng, 300), trainer)
    return tokenizer


def by_id(tokenizer: Tokenizer) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


@pytest.mark.parametrize("pre", PATTERNS)
@pytest.mark.parametrize("seed", seeds(1))
def test_merged_bytes(pre: str, seed: int) -> None:
    rng = random.Random(seed)
    ours = original(pre, rng)
    tokens = by_id(ours)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in json.loads(ours.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    files = tokenizer_files(metadata)
    read = Tokenizer.from_str(files["tokenizer.json"])
    for text in texts(rng, 400):
        expected = ours.encode(text).ids
        assert read.encode(text, add_special_tokens=False).ids == expected
        begins = [0] if pre in ("llama-bpe", "tekken") else []
        assert read.encode(text).ids == [*begins, *expected]
        composed = text if pre != "qwen2" else normalizers.NFC().normalize_str(text)
        assert read.decode(expected, skip_special_tokens=False) == composed


def pieces(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """Return SentencePiece's ids: of all neighbours whose join is a token, those of the highest score are joined
    first; what is no token in the end is its bytes."""
    found = ["\u2581", *text.replace(" ", "\u2581")]
    while True:
        pairs = [
            (-scores[left + right], ids[left], ids[right], place)
            for place, (left, right) in enumerate(itertools.pairwise(found))
            if left in scores and right in scores and left + right in scores
        ]
        if not pairs:
            break
        place = min(pairs)[3]
        found[place : place + 2] = [found[place] + found[place + 1]]
    return [
        id
        for piece in found
        for id in ([ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()])
    ]


@pytest.mark.parametrize("seed", seeds(2))
def test_sentence_pieces(seed: int) -> None:
    rng = random.Random(seed)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdé"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6]
    scores = [0.0] * len(tokens)
    first = len(tokens) - 6
    while len(tokens) < first + 60:
        token = "".join(rng.choice(tokens[first:]) for _ in range(2))
        if token not in tokens and len(token) < 7:
            tokens.append(token)
            kinds.append(1)
            scores.append(-float(len(tokens)))
    files = tokenizer_files(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": kinds,
            **{f"tokenizer.ggml.{role}_token_id": id for id, role in enumerate(("unknown", "bos", "eos"))},
        }
    )
    read = Tokenizer.from_str(files["tokenizer.json"])
    ids = {token: id for id, token in enumerate(tokens)}
    usable = dict(zip(tokens[first:], scores[first:], strict=True))
    for _ in range(1000):
        text = "".join(rng.choice("aaabbccdé  ñ日") for _ in range(rng.randrange(1, 24)))
        expected = pieces(text, usable, ids)
        assert read.encode(text).ids == [1, *expected]
        assert read.decode(expected) == text


def test_what_a_file_says_of_texts() -> None:
    """Templates by name, tokens that end answers, switches, and a whole tokenizer instead of a list."""
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "é"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 1, 4],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.chat_template": "one",
        "tokenizer.chat_template.tool_use": "two",
        "general.sampling.top_k": 20,
    }
    files = tokenizer_files(metadata)
    config = json.loads(files["tokenizer_config.json"])
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    assert config == {"eos_token": "<|im_end|>", "chat_template": templates}
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [1, 2], "top_k": 20}
    assert Tokenizer.from_str(files["tokenizer.json"]).encode("aé").ids == [0, 4, 1]
    del metadata["tokenizer.chat_template.tool_use"]
    files = tokenizer_files({**metadata, "tokenizer.huggingface.json": "whole"})
    assert files["tokenizer.json"] == "whole"
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == "one"
