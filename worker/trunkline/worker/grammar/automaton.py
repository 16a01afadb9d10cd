"""The one place that knows xgrammar: a model's vocabulary, compiled grammars, and where an output stands in one.

Importing this module takes tenths of a second, so rank 0 does it in the compile thread, at the first grammar
(`grammar.compiler`). Without `light_import` it would take three times as long.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from trunkline.kvstore.chunks import Int32Array
from trunkline.worker.grammar.checks import GrammarError, prepare
from trunkline.worker.grammar.light_import import TokenizerFile, import_xgrammar

import_xgrammar()
import xgrammar  # noqa: E402 (as it was imported just now)

_NOT_IN_JSON: Final = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_NOT_IN_TEXT: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
WHITESPACE_MAX: Final = 16
"""Largest number of white-space characters in a row between two parts of a JSON text, where white space is free:
enough to indent, and small models do not get lost."""
FORETOLD_MAX: Final = 256
"""Largest number of characters that are foretold at once."""
FORETELL_S_MAX: Final = 0.002
"""CPU time beyond which an output is foretold no more."""
COMPACT_PROPERTIES_MAX: Final = 400
"""Largest number of properties of an object without free white space."""
_NAMES: Final = {
    "json_schema": "JSON schema",
    "regex": "regex",
    "ebnf": "EBNF grammar",
    "structural_tag": "grammar",
}
_SOURCE: Final = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ?|Check failed: \(.*?\) is false: ?|Warning: ")
"""Pattern of the part of a message that says where in xgrammar's sources it was written."""
_HEX_ESCAPE: Final = re.compile(r"\\(?:\\|x([0-9a-f]{2}))")
"""Pattern of an escape in EBNF: a backslash, or a character by two digits."""
_KIND_OF_ERROR: Final = re.compile(
    r"^(Regex parsing (error|warning)|EBNF (parser|lexer) error|Invalid (structural tag|JSON) error):? *"
)
_INTERNAL: Final = re.compile(r"\.(cc|cpp|h|py)\b|Traceback|std::|RecursionGuard|/project/")
_PROBLEM_CHARACTERS_MAX: Final = 200


class Vocabulary:
    """A model's tokens as bytes, in the forms in which grammars see them.

    Special tokens (`<|end|>`, …) spell nothing: the text that a client gets does not show them, so a grammar
    must not take them for their names. Structural tags are different: the markers of tool calls, by which tags
    begin, often are special tokens.
    """

    def __init__(self, model: Path, vocab_size: int) -> None:
        """Read `tokenizer.json`.

        Args:
            model: the model's folder.
            vocab_size: of the model; the ids beyond the tokenizer's are never allowed.
        """
        self._tokenizer = tokenizer = TokenizerFile(model / "tokenizer.json")
        encoded = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer,  # type: ignore[arg-type]  # of the class that it takes for the right one
            vocab_size=vocab_size,
            stop_token_ids=[0],
        )
        spelled = encoded.decoded_vocab
        spelled += [b""] * (vocab_size - len(spelled))
        hidden = list(spelled)
        for token, added in tokenizer.backend_tokenizer.get_added_tokens_decoder().items():
            if token < vocab_size:
                # Added tokens are written as they are, not in the encoding of the others.
                spelled[token] = added.content.encode()
                hidden[token] = b"" if added.special else spelled[token]
        self.size = vocab_size
        blank = [token for token, text in enumerate(hidden) if not text]
        self.end = blank[0] if blank else vocab_size - 1
        """The token that ends an output in the automaton when no stop token does; never sampled for that."""

        def compiler(texts: list[bytes]) -> xgrammar.GrammarCompiler:
            info = xgrammar.TokenizerInfo(
                texts,
                xgrammar.VocabType.RAW,
                vocab_size=vocab_size,
                stop_token_ids=[self.end],
                add_prefix_space=encoded.add_prefix_space,
            )
            return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

        self._text = compiler(hidden)
        # xgrammar lets strings of a limited length contain control characters, which JSON does not.
        self._json = compiler([b"" if _NOT_IN_JSON.search(text) else text for text in hidden])
        self._tags = compiler([b"" if _NOT_IN_TEXT.search(text) else text for text in spelled])

    def spell(self, text: str) -> list[int]:
        """Return the ids as which the tokenizer writes a text, as far as the model has them."""
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return list(takewhile(lambda token: token < self.size, ids))

    def compile(self, kind: str, text: str, *, spaced: bool = False) -> TokenGrammar:
        """Compile a grammar (`CompileGrammar`); may take very long, without holding the GIL.

        Raises:
            GrammarError: it is not valid, not supported, or matches no text.
        """
        kind, text = prepare(kind, text)
        try:
            match kind:
                case "regex":
                    compiled = self._text.compile_regex(text)
                case "ebnf":
                    compiled = self._text.compile_grammar(text)
                case "structural_tag":
                    compiled = self._tags.compile_structural_tag(_with_whitespace(text, spaced=spaced))
                case _ if spaced or _is_wide(json.loads(text)):
                    compiled = self._json.compile_json_schema(text, max_whitespace_cnt=WHITESPACE_MAX)
                case _:
                    compiled = self._json.compile_grammar(_compact(text))
        except MemoryError as error:
            raise GrammarError("the grammar needs too much memory to compile") from error
        except (RuntimeError, ValueError, TypeError) as error:  # xgrammar's, and pydantic's for tags
            raise GrammarError(explain(kind, str(error))) from error
        grammar = TokenGrammar(compiled, self)
        if not grammar.matches_something():
            raise GrammarError("the grammar matches no text that ends")
        return grammar


def _with_whitespace(tag: str, *, spaced: bool) -> str:
    """Return a structural tag that says how much white space its JSON has, unless it does so itself.

    xgrammar has no word for "none" in tags: such a schema's place takes the grammar that it comes to.
    """
    whole = json.loads(tag)
    stack = [whole]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        if not isinstance(node, dict):
            continue
        if "json_schema" not in node:
            stack += node.values()
        elif node.get("type") != "json_schema" or node.get("max_whitespace_cnt") is not None:
            continue
        elif spaced or node.keys() - {"type", "json_schema", "max_whitespace_cnt"} or _is_wide(node):
            node["max_whitespace_cnt"] = WHITESPACE_MAX  # also of styles that are no plain JSON
        else:
            schema = _compact(json.dumps(node["json_schema"]))
            node.clear()
            node |= {"type": "grammar", "grammar": schema}
    return json.dumps(whole)


def _compact(schema: str) -> str:
    """Return the EBNF of a JSON schema's documents as `json.dumps` writes them: a blank behind each comma and
    colon."""
    # xgrammar compiles this text several times faster than what it makes of the schema directly.
    text = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))
    # It writes \xdf for "ß", but reads all hexadecimal digits that follow: "ße" would become U+0DFE.
    return _HEX_ESCAPE.sub(lambda found: rf"\u00{found[1]}" if found[1] else found[0], text)


def _is_wide(schema: Any) -> bool:
    """Return whether an object in a schema has so many properties that compact JSON would take too long to compile
    (the time grows with their square, and without white space between them much faster)."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            properties = node.get("properties")
            if isinstance(properties, dict) and len(properties) > COMPACT_PROPERTIES_MAX:
                return True
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return False


class TokenGrammar:
    """A compiled grammar; shared by the sequences that follow it."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self.compiled = compiled
        self.vocabulary = vocabulary

    @property
    def bytes(self) -> int:
        """Memory that the grammar takes, about."""
        return int(self.compiled.memory_size_bytes)

    def matcher(self, stop_ids: Iterable[int]) -> Matcher:
        """Return the state at the beginning of an output that one of `stop_ids` ends."""
        return Matcher(self, stop_ids)

    def matches_something(self) -> bool:
        """Whether there is a first token."""
        matcher = xgrammar.GrammarMatcher(self.compiled)
        words = np.zeros((1, -(-self.vocabulary.size // 32)), dtype=np.int32)
        return not matcher.fill_next_token_bitmask(words) or bool(words.any())


class Matcher:
    """The place of one output in its grammar.

    Once the grammar is matched and nothing can follow, or the output has left it, only the stop ids are
    allowed. If there are none, the grammar has nothing more to say, and everything is allowed.
    """

    def __init__(self, grammar: TokenGrammar, stop_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary = grammar.vocabulary
        self.accepted = 0
        """Number of output tokens taken in so far."""
        self.spent_s = 0.0
        """CPU time that was spent on the next token already, before `fill`."""
        self._foretold: list[int] = []
        """What was foretold and has not come yet; as long as it comes, nothing more is foretold."""
        self._foretells = True
        self._stop_ids = sorted({token for token in stop_ids if 0 <= token < vocabulary.size})
        self._finished = False
        self._end = vocabulary.end
        self._matcher = xgrammar.GrammarMatcher(
            grammar.compiled, override_stop_tokens=self._stop_ids or [vocabulary.end]
        )

    def finish(self) -> None:
        """Let the output end here."""
        self._finished = True

    def accept(self, tokens: Iterable[int]) -> None:
        """Take in the next output tokens, also those that the grammar does not allow."""
        for token in tokens:
            self.accepted += 1
            self._foretold = self._foretold[1:] if self._foretold[:1] == [token] else []
            if not self._finished:
                self._finished = not self._matcher.accept_token(token) or self._matcher.is_terminated()

    def foretell(self) -> list[int]:
        """Return the ids that spell what the grammar demands next, if that is more than was foretold already.

        A demanded text can be spelled by other tokens, too, and its last one may go on with what is free: the ids
        leave the last one out, and are what a model is likely to draw, no more.
        """
        if self._finished or self._foretold or not self._foretells:
            return []
        start = time.thread_time()
        text: str = self._matcher.find_jump_forward_string()[:FORETOLD_MAX]
        if len(text) > 1:
            self._foretold = self._vocabulary.spell(text)[:-1]
        self._foretells = time.thread_time() - start < FORETELL_S_MAX
        return self._foretold

    def fill(self, words: Int32Array) -> None:
        """Write the allowed next ids.

        Args:
            words: int32 `[ceil(vocabulary / 32)]`, contiguous; bit i of word w is id 32·w + i (little-endian).
        """
        if not self._finished:
            if not self._matcher.fill_next_token_bitmask(words[None]):
                words[:] = -1  # all; xgrammar then need not have written
            if not self._stop_ids:
                words.view(np.uint8)[self._end // 8] &= ~np.uint8(1 << self._end % 8)
            self._finished = not words.any()
        if self._finished:
            words[:] = 0 if self._stop_ids else -1
            for token in self._stop_ids:
                words.view(np.uint8)[token // 8] |= np.uint8(1 << token % 8)


def explain(kind: str, message: str) -> str:
    """Return xgrammar's message as a sentence for the author of the grammar."""
    detail = _SOURCE.sub("", message).split("The JSON string is")[0].split("\n")[0]
    detail = detail.replace("It is ignored.", "").strip(" .:")
    detail = _KIND_OF_ERROR.sub("", detail)
    if kind != "ebnf":
        detail = re.sub(r"^at line \d+, column \d+: *", "", detail)  # of an EBNF that the user never saw
    name = _NAMES.get(kind, kind.replace("_", " "))
    if "bad_alloc" in detail:
        return f"the {name} needs too much memory to compile"
    if not detail or not detail.isprintable() or _INTERNAL.search(detail):
        return f"the {name} is not valid"
    return f"the {name} cannot be used: {detail[0].lower()}{detail[1:]}"[:_PROBLEM_CHARACTERS_MAX]
