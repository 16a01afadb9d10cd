"""A text is encoded as its parts between borders are, with every kind of tokenizer."""

from __future__ import annotations

import itertools
import random
from typing import Any, Final

import numpy as np
import pytest
from seeds import seeds
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from trunkline.router.text.borders import BorderTokens, agreed_length, starts

SAMPLE: Final = ["the file has lines and the lines have words", "<|end|> is a mark, [x] is none", "é\n\n  — 😀"]
PLAIN: Final = AddedToken("<|end|>", special=True, normalized=False)
MARKS: Final = [
    PLAIN,
    AddedToken("<|user|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|left|>", special=True, normalized=False, lstrip=True),
    AddedToken("<|word|>", special=True, normalized=False, single_word=True),
    AddedToken("<|norm|>", special=True, normalized=True),
    AddedToken("<call>", special=False, normalized=False),
    AddedToken("<|tool", special=True, normalized=False),
    AddedToken("<|tool|>", special=True, normalized=False),
]
PIECES: Final = [*(mark.content for mark in MARKS), "the ", "file", " ", "\n", "é", "😀", "<|", "|>", "a<", "[x]"]
KINDS: Final[dict[str, tuple[Any, Any]]] = {
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes with a space in front": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "spaces": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "spaces in front of the first": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "no spaces in front": (None, pre_tokenizers.Metaspace(prepend_scheme="never")),
    "normalised": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "composed": (normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    made.normalizer, made.pre_tokenizer = KINDS[request.param]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(SAMPLE * 3, trainer)
    made.add_special_tokens([mark for mark in MARKS if mark.special])
    made.add_tokens([mark for mark in MARKS if not mark.special])
    return made


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("seed", seeds(1))
def test_parts_make_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    borders = BorderTokens(tokenizer.get_added_tokens_decoder(), encode(tokenizer, "<|end|>"), unknown=0)
    assert set(borders.contents.values()) == {"<|end|>", "<|user|>", "<|tool|>"}
    assert borders.ends == {"<|end|>"}
    found = 0
    for _ in range(300):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 12)))
        ids = encode(tokenizer, text)
        places = borders.places(text, np.array(ids, np.int32))
        cuts = [(0, 0), *places.tolist(), (len(text), len(ids))]
        for (begin, first), (end, last) in itertools.pairwise(cuts):
            assert encode(tokenizer, text[begin:end]) == ids[first:last], text
            assert encode(tokenizer, text[begin:]) == ids[first:], text
        for characters, tokens in places.tolist():
            assert text.startswith(borders.contents[ids[tokens]], characters)
        found += len(places)
    assert found > 100


@pytest.mark.parametrize("seed", seeds(1))
def test_texts_part_where_they_differ(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        common, one, other = ("".join(rng.choice("ab😀") for _ in range(rng.randint(0, 6))) for _ in range(3))
        one, other = common + one, common + other
        agreed = agreed_length(one, other)
        assert agreed == agreed_length(other, one) >= len(common)
        assert one[:agreed] == other[:agreed]
        assert agreed in (len(one), len(other)) or one[agreed] != other[agreed]
        contents, start = {"a", "b😀"}, rng.randint(0, len(one))
        expected = [at for at in range(start, len(one)) if any(one.startswith(each, at) for each in contents)]
        assert list(starts(one, contents, start)) == expected
