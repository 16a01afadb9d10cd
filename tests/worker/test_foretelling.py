"""What a grammar demands next is told in advance, for drafts; what it allows does not depend on that."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from seeds import seeds
from tokenizers import Tokenizer
from worker.grammar_driver import STOP, Grammars, V, allowed

from trunkline.deploy.config.models import DEMO_FOLDER
from trunkline.kvstore.chunks import unpack_int32
from trunkline.worker.grammar.automaton import Vocabulary
from trunkline.worker.grammar.compiler import GrammarStore

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"enum": ["Ada", "Grace"]},
        "temperature": {"type": "integer", "minimum": 0, "maximum": 150},
        "units": {"type": "array", "items": {"enum": ["kelvin", "celsius"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["first_name", "temperature", "units"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """A store with the same grammar twice, compiled without a trial; it tells of the first."""
    store = GrammarStore(DEMO_FOLDER, V)
    compiled = Vocabulary(DEMO_FOLDER, V).compile("json_schema", json.dumps(SCHEMA))
    store._grammars |= {1: compiled, 2: compiled}
    store.foretelling.add(1)
    yield Grammars(store)
    store.close()


@pytest.mark.parametrize("seed", seeds(3))
def test_what_is_demanded_is_foretold_once_and_changes_nothing(grammars: Grammars, seed: int) -> None:
    """Two rows draw the same at random: mostly what one of them was foretold."""
    rng, tokenizer = random.Random(seed), Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    told, plain = grammars.row(1), grammars.row(2)
    coming: list[int] = []
    texts: list[str] = []
    for _ in range(200):
        may = allowed(grammars, told)
        assert allowed(grammars, plain) == may
        assert not coming or coming[0] in may
        follows = bool(coming) and rng.random() < 0.95
        drawn = coming[0] if follows else rng.choice(sorted(may))
        if drawn == STOP:
            break
        told.append(drawn)
        plain.append(drawn)
        coming = coming[1:] if coming[:1] == [drawn] else []
        found = grammars.store.foretell([told, told, plain])
        if coming:
            assert found is None, "it is told once"
        elif found is not None:
            assert list(found) == [told.id]
            coming = unpack_int32(found[told.id]).tolist()
            texts.append(tokenizer.decode(coming))
    assert set(json.loads(tokenizer.decode(told.tokens[told.prompt_len :].tolist()))) == {
        "first_name",
        "temperature",
        "units",
    }
    assert any("temperature" in text for text in texts) or len(texts) > 3, "tokens that differ begin a text anew"
