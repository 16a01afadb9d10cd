"""The tokenizer of a GGUF file in the forms of a checkpoint's folder: tokenizer.json and its companions. No torch.

Two kinds are read. "gpt2" merges bytes and lists its merges; the file names, but does not hold, the rules that cut
a text before. "llama" is SentencePiece's: it has a score per token instead of merges, and the pair is joined first
that makes the token of the highest score, so the merges are all pairs of tokens that make a token, in the order of
scores. A whole tokenizer.json in the file (`tokenizer.huggingface.json`) wins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from trunkline.worker.errors import CheckpointError, UnsupportedModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Types of tokens beside the normal ones, 1."""
_MARK: Final = "\u2581"
_ROLES: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
"""How the format calls a special token, by the name in tokenizer_config.json."""
_ENDS: Final = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
)
"""Tokens that end an answer wherever a model has them; files name only one or two of theirs."""
_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

_ENGLISH: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"


def _cased(ending: str, digits: str) -> str:
    """Return the rule that also cuts between lower and upper case."""
    words = rf"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _TAIL


class _Cut(NamedTuple):
    """How texts are cut into the pieces within which bytes are merged."""

    pattern: str = ""
    """Regular expression of the pieces; empty: GPT-2's."""
    composed: bool = False
    """Whether texts are normalised to NFC first."""
    single_digits: bool = False
    """Whether every digit is a piece, before GPT-2's rule is applied."""
    whole_pieces: bool = False
    """Whether a piece that is a token is taken whole, without merges."""
    has_bos: bool = False
    """Whether texts begin with BOS where the file does not say."""


def _words(digits: str) -> str:
    return rf"{_ENGLISH}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + _TAIL


_LLAMA3: Final = _Cut(_words(r"\p{N}{1,3}"), whole_pieces=True, has_bos=True)
_QWEN2: Final = _Cut(_words(r"\p{N}"), composed=True)
_DIGITS: Final = _Cut(single_digits=True)
CUTS: Final[Mapping[str, _Cut]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum"), _Cut()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _DIGITS),
    "tekken": _Cut(_cased("", r"\p{N}"), whole_pieces=True, has_bos=True),
    "gpt-4o": _Cut(_cased(f"{_ENGLISH}?", r"\p{N}{1,3}")),
}
"""The cuts that are known, by `tokenizer.ggml.pre`."""
MODELS: Final = ("gpt2", "llama")
"""The kinds of tokenizers that are read, by `tokenizer.ggml.model`."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json, by name.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or of cuts, that is not read.
        CheckpointError: values that are missing, of the wrong type or do not fit each other.
    """
    table = _Table(metadata)
    roles = {ours: id for ours, theirs in _ROLES.items() if (id := table.id_of(f"{theirs}_token_id")) is not None}
    whole = metadata.get("tokenizer.huggingface.json")
    text = whole if isinstance(whole, str) else json.dumps(_tokenizer(table, roles), ensure_ascii=False)
    config: dict[str, Any] = {f"{role}_token": table.tokens[id] for role, id in roles.items()}
    templates = _templates(metadata)
    if templates:
        config["chat_template"] = (
            templates["default"]
            if set(templates) == {"default"}
            else [{"name": name, "template": template} for name, template in templates.items()]
        )
    ends = {table.id_of(f"{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    ends |= {id for id, token in enumerate(table.tokens) if token in _ENDS and table.kinds[id] == _CONTROL}
    generation: dict[str, Any] = {"eos_token_id": sorted(id for id in ends if id is not None)}
    for theirs, ours in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{theirs}")
        if type(value) in (int, float):
            generation[ours] = value
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False),
        "generation_config.json": json.dumps(generation),
    }


class _Table:
    """The tokens of a file."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise CheckpointError("tokenizer.ggml.tokens is empty")
        kinds = self.get("token_type")
        self.kinds: list[int] = [1] * len(self.tokens) if kinds is None else self._list("token_type", int)
        if len(self.kinds) != len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.token_type has {len(self.kinds)} entries for {len(self.tokens)} tokens"
            )
        self.ids: dict[str, int] = {}
        for id, token in enumerate(self.tokens):
            self.ids.setdefault(token, id)

    def get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else value is True

    def id_of(self, key: str) -> int | None:
        """Return a token's id that the file gives; None: it gives none."""
        value = self.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.{key} is {value!r:.80}; there are {len(self.tokens)} tokens")
        return value

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._list("merges", str):
            place = merge.find(" ", 1)
            pair = merge[:place], merge[place + 1 :]
            if place < 0 or not all(part in self.ids for part in (*pair, "".join(pair))):
                raise CheckpointError(f"tokenizer.ggml.merges has {merge!r:.80}, which joins no two tokens to one")
            pairs.append(pair)
        return pairs

    def scores(self) -> list[float]:
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(self.tokens)} tokens")
        return scores

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise CheckpointError(f"tokenizer.ggml.{key} is missing or no list of {kind.__name__}")
        return value


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: "default", "tool_use"."""
    start = "tokenizer.chat_template"
    found = {
        key.removeprefix(start).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key == start or key.startswith(f"{start}.")
    }
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _tokenizer(table: _Table, roles: Mapping[str, int]) -> dict[str, Any]:
    model = table.get("model")
    if model not in MODELS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {model!r:.80}, which is not supported; supported: {', '.join(MODELS)}"
        )
    parts, has_bos = _byte_merges(table) if model == "gpt2" else _sentence_pieces(table, roles)
    begins = [roles["bos"]] if "bos" in roles and table.flag("add_bos_token", has_bos) else []
    ends = [roles["eos"]] if "eos" in roles and table.flag("add_eos_token", False) else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(table)),
        "post_processor": _frame(table.tokens, begins, ends),
        **parts,
    }


def _added_tokens(table: _Table) -> Iterator[dict[str, Any]]:
    for id, (token, kind) in enumerate(zip(table.tokens, table.kinds, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token and table.ids[token] == id:
            yield {
                "id": id,
                "content": token,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": kind != _USER_DEFINED,
            }


def _frame(tokens: Sequence[str], begins: Sequence[int], ends: Sequence[int]) -> dict[str, Any] | None:
    """Return the post-processor that puts tokens around a text."""
    if not begins and not ends:
        return None

    def places(text: str, kind: int) -> list[dict[str, Any]]:
        return [
            *({"SpecialToken": {"id": tokens[id], "type_id": kind}} for id in begins),
            {"Sequence": {"id": text, "type_id": kind}},
            *({"SpecialToken": {"id": tokens[id], "type_id": kind}} for id in ends),
        ]

    special = {tokens[id]: {"id": tokens[id], "ids": [id], "tokens": [tokens[id]]} for id in (*begins, *ends)}
    return {
        "type": "TemplateProcessing",
        "single": places("A", 0),
        "pair": [*places("A", 0), *places("B", 1)],
        "special_tokens": special,
    }


def _byte_merges(table: _Table) -> tuple[dict[str, Any], bool]:
    """Return the parts of a tokenizer that merges bytes, and whether its texts begin with BOS."""
    name = table.get("pre")
    cut = CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        said = f"is {name!r:.80}" if name else "is missing (the file is old; convert it again)"
        raise UnsupportedModelError(f"tokenizer.ggml.pre {said}; supported: {', '.join(CUTS)}")
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not cut.pattern}
    steps: list[dict[str, Any]] = [bytes_of]
    if cut.pattern:
        split = {"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated", "invert": False}
        steps = [split, bytes_of]
    elif cut.single_digits:
        steps = [{"type": "Digits", "individual_digits": True}, bytes_of]
    parts = {
        "normalizer": {"type": "NFC"} if cut.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _merging(table.ids, table.merges(), ignore_merges=cut.whole_pieces),
    }
    return parts, cut.has_bos


def _sentence_pieces(table: _Table, roles: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
    """Return the parts of SentencePiece's tokenizer, and whether its texts begin with BOS."""
    has_space = table.flag("add_space_prefix", True)
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    prefix = [{"type": "Prepend", "prepend": _MARK}] if has_space else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = roles.get("unk", next((id for id, kind in enumerate(table.kinds) if kind == _UNKNOWN), None))
    model = _merging(
        table.ids,
        list(_merges_by_score(table)),
        unk_token=None if unknown is None else table.tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in table.kinds,
    )
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, marks]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    return parts, True


def _merges_by_score(table: _Table) -> Iterator[tuple[str, str]]:
    """Yield the pairs whose join is a token, the highest score first. No text may be joined to a control token."""
    scores, kinds = table.scores(), table.kinds
    usable = {token: id for token, id in table.ids.items() if kinds[id] in (1, _USER_DEFINED)}
    found = []
    for token, id in usable.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in usable and right in usable:
                found.append((-scores[id], usable[left], usable[right]))
    for _, left_id, right_id in sorted(found):
        yield table.tokens[left_id], table.tokens[right_id]


def _merging(ids: Mapping[str, int], merges: list[tuple[str, str]], **own: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(ids),
        "merges": merges,
        **own,
    }
