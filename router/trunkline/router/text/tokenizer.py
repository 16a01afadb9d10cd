"""A model's tokenizer (text and messages to token ids, token ids to text), and its configuration files.

It uses the `tokenizers` library and a sandboxed Jinja environment instead of transformers and torch, so a router
starts in half a second and stays small. The files of the Hugging Face model folder are read once, at the start. A
missing optional file means defaults; a broken file is an error that names it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import tokenizers

from trunkline.kvstore.fingerprint import tokenizer_digest
from trunkline.router.errors import ApiError
from trunkline.router.request_context import current
from trunkline.router.text.borders import BorderTokens
from trunkline.router.text.chat_template import ChatRenderer, ChatTemplateError, RenderedChat
from trunkline.router.text.detokenizer import TokenVocabulary
from trunkline.router.text.embedding_files import Embedder, read_embedder
from trunkline.router.text.reasoning_styles import ReasoningStyle, detect_reasoning
from trunkline.router.text.token_places import TokenPlaces
from trunkline.router.text.tool_styles import ToolStyle, detect_style

_SPECIAL_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_CONTEXT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_FALLBACK_CONTEXT: Final = 2048
_WIDTH_NAMES: Final = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")
"""Names of the size of the final hidden states. The first one is OPT's, if the model has projections at both
ends."""


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling parameters of `generation_config.json`, for requests that do not give them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ModelFiles(msgspec.Struct, frozen=True):
    """A model's properties in its configuration files."""

    max_context: int
    """Number of positions that the model was trained for, or that its context was stretched to."""
    vocab_size: int
    """Number of rows of the embedding; 0: the configuration does not give it."""
    eos_ids: tuple[int, ...]
    """Ids of the tokens that end a text, without the tokenizer's own end token (`special_tokens["eos_token"]`)."""
    defaults: SamplingDefaults
    special_tokens: dict[str, str]
    """Special tokens by the names that templates use: `bos_token`, `eos_token`, …"""
    chat_template: str | None
    stretched_from: int = 0
    """Number of positions that the model was trained for, if its context was stretched beyond them; else 0."""
    tokenizer_class: str = ""
    """The class that `transformers` has for the tokenizer; "": the configuration does not give it."""
    tool_chat_template: str | None = None
    """Separate template for conversations with tools; None: the model has none, like most models."""
    hidden_size: int = 0
    """Size of the final hidden states; 0: the configuration does not give it."""
    embedder: Embedder = Embedder()
    architecture: str = ""
    """The configuration's `model_type`, such as "llama"; "": it does not give it."""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _token_text(value: object) -> str | None:
    """Return a special token's text, given as a string or as an `AddedToken` object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in (_read_json(folder / "special_tokens_map.json"), tokenizer_config):
        for name in _SPECIAL_TOKEN_NAMES:
            text = _token_text(source.get(name))
            if text is not None:
                tokens[name] = text
    return tokens


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name: "default", "tool_use". Files take precedence over the tokenizer's
    configuration."""
    template = tokenizer_config.get("chat_template")
    found: dict[str, Any] = {"default": template}
    if isinstance(template, list):  # several named ones: [{"name": …, "template": …}, …]
        found = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates/tool_use.jinja",
    }
    found |= {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    return ()


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    known = {
        name: generation[name] for name in SamplingDefaults.__struct_fields__ if generation.get(name) is not None
    }
    if generation.get("do_sample") is False:  # given as false, not left out: the model is meant to answer greedily
        known["temperature"] = 0.0
    try:
        return msgspec.convert(known, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ValueError(f"generation_config.json: {error}") from error


def read_model_files(folder: Path) -> ModelFiles:
    """Read the configuration files of a model folder.

    Raises:
        ValueError: A file cannot be read; the text names it.
    """
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    config = {**config, **(text_config or {})}
    generation = _read_json(folder / "generation_config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    contexts = [config[name] for name in _CONTEXT_NAMES if isinstance(config.get(name), int)]
    vocab_size = config.get("vocab_size")
    stretched = config.get("stretched_from")
    widths = [config[name] for name in _WIDTH_NAMES if isinstance(config.get(name), int)]
    templates = _chat_templates(folder, tokenizer_config)
    return ModelFiles(
        max_context=contexts[0] if contexts else _FALLBACK_CONTEXT,
        vocab_size=vocab_size if isinstance(vocab_size, int) else 0,
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id")),
        defaults=_defaults(generation),
        special_tokens=_special_tokens(folder, tokenizer_config),
        chat_template=templates.get("default"),
        tokenizer_class=str(tokenizer_config.get("tokenizer_class") or ""),
        stretched_from=stretched if isinstance(stretched, int) else 0,
        tool_chat_template=templates.get("tool_use"),
        hidden_size=widths[0] if widths else 0,
        embedder=read_embedder(folder),
        architecture=str(config.get("model_type") or ""),
    )


OFF_LOOP_CHARACTERS: Final = 64 << 10
"""Length of a text from which on it is tokenised in a thread: in the event loop it would stop all streams for over
10 ms."""
TEXT_BYTES_MAX: Final = 6 << 20
"""Largest number of bytes of one text in UTF-8. Each may become a token, which takes a hundred bytes while the
text is encoded."""
TOKENS_MAX: Final = 1 << 20
"""Largest number of tokens of one text. Making a list of as many tokens holds Python's lock for 20 to 40 ms."""
_LINE_END: Final = "\n"
_Result = TypeVar("_Result")


class Tokenizer:
    """The tokenizer and chat template of one model folder."""

    def __init__(self, folder: str | Path, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        """Load the files. `tool_call_parser`, `reasoning_parser`: as in `RouterConfig`.

        Raises:
            ValueError: A file is missing or broken; the text names it.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"{path} cannot be loaded: {error}") from error
        self.fingerprint: str = tokenizer_digest(folder)
        """Digest of the tokenizer: token ids of tokenizers with another fingerprint mean other texts."""
        # Truncation and padding of the checkpoint are meant for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.files: ModelFiles = read_model_files(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        special = [token_id for token_id, token in added.items() if token.special]
        self.vocabulary = TokenVocabulary(self._tokenizer, description.get("decoder"), special)
        strings = self._tokenizer.get_vocab()
        self.vocab_size: int = self.files.vocab_size or max(strings.values()) + 1
        self._longest_token_characters = max(map(len, strings))
        template = self.files.tool_chat_template or self.files.chat_template
        texts = [token.content for token in added.values()]
        specials = [token.content for token in added.values() if token.special]
        self.tool_style: ToolStyle = detect_style(tool_call_parser, template, texts, specials)
        """How this model writes tool calls."""
        self.reasoning: ReasoningStyle | None = detect_reasoning(reasoning_parser, template, texts, specials)
        """How this model marks its thoughts; None: it has none."""
        self.borders = BorderTokens(added, self.eos_ids, _unknown_id(description.get("model", {}), strings))
        """Where texts can be split."""
        self._chat = self._renderer()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    def _renderer(self) -> ChatRenderer | None:
        files = self.files
        source = files.chat_template or files.tool_chat_template
        if source is None:
            return None
        return ChatRenderer(source, files.special_tokens, self.tool_style, tool_source=files.tool_chat_template)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def special_token_id(self, name: str) -> int | None:
        """Return the id of "bos_token", "eos_token", …; None if the model has no such token."""
        text = self.files.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text, from the generation configuration and from the tokenizer."""
        own = self.special_token_id("eos_token")
        return frozenset(self.files.eos_ids) | (frozenset() if own is None else {own})

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens in a text, without tokenising it."""
        # In byte-level vocabularies a character of a token is one byte, and a character of text has at least one.
        # The factor 4 is a margin for normalisers that shorten text (NFC joins up to three characters).
        return len(text) // (4 * self._longest_token_characters)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text. `add_special_tokens`: add the tokens of the tokenizer's post-processor (often BOS).

        Raises:
            ApiError: 400, the text is too long or has too many tokens.
        """
        return _encode(self._tokenizer, text, add_special_tokens=add_special_tokens)

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        # A second tokenizer, because the switch belongs to the tokenizer and not to a call. It is made when it is
        # first needed: with a large vocabulary it takes a second and a hundred megabytes.
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text in which special tokens count as plain text.

        Raises:
            ApiError: 400, the text is too long or has too many tokens.
        """
        return _encode(self._plain, text, add_special_tokens=False)

    @functools.cached_property
    def leading_ids(self) -> tuple[int, ...]:
        """Tokens that the post-processor puts in front of a text: often BOS, often none."""
        text = "a"
        alone, whole = (self.encode(text, add_special_tokens=added) for added in (False, True))
        found = (start for start in range(len(whole)) if whole[start : start + len(alone)] == alone)
        return tuple(whole[: next(found, 0)])

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat is not None

    async def encode_async(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text like `encode`, in a thread if it is long."""
        record, began = current().record, time.monotonic()
        if len(text) < OFF_LOOP_CHARACTERS:
            ids = self.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = await self.beside_loop(lambda: self.encode(text, add_special_tokens=add_special_tokens))
        if record is not None and record.trace is not None:
            record.trace.tokenized(began, len(text), len(ids))
        return ids

    async def beside_loop(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, which a thread of the tokenizer does."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def encode_rest(self, text: str) -> list[int]:
        """Encode a text that continues another one, without the tokens that mark the beginning of a text."""
        if not text:
            return []
        # Some tokenizers put a space in front of every text. Here it comes before the line end; both are cut off.
        line_end = self.encode(_LINE_END, add_special_tokens=False)
        ids = await self.encode_async(_LINE_END + text, add_special_tokens=False)
        if ids[: len(line_end)] == line_end:
            return ids[len(line_end) :]
        return await self.encode_async(text, add_special_tokens=False)  # a token joins the line end and the text

    def places(
        self, text: str, tokens: Sequence[int], *, add_special_tokens: bool, stays: bool = False
    ) -> tuple[Sequence[int], TokenPlaces]:
        """Return the tokens of a text, and which characters each stands for.

        Args:
            tokens: Tokens of the text, or of one that reads the same. If their places cannot be told, the text is
                encoded again, and other tokens come back.
            add_special_tokens: As in `encode`.
            stays: Whether `tokens` come back in any case.

        Raises:
            ApiError: As in `encode`.
        """
        found = TokenPlaces.of_bytes(text, tokens, self.vocabulary)
        if found is not None:
            return tokens, found
        borders = self.borders.places(text, np.array(tokens, np.int32))
        if stays or len(borders):
            return tokens, TokenPlaces.of_segments(text, tokens, borders, self._placed)
        self.encode(text, add_special_tokens=add_special_tokens)  # for its limits
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, TokenPlaces.of_offsets(encoding.offsets)

    def _placed(self, text: str, tokens: Sequence[int]) -> TokenPlaces | None:
        found = TokenPlaces.of_bytes(text, tokens, self.vocabulary)
        if found is not None:
            return found
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return TokenPlaces.of_offsets(encoding.offsets) if encoding.ids == list(tokens) else None

    @property
    def uses_documents(self) -> bool:
        """Whether the chat template shows documents."""
        return self._chat is not None and self._chat.uses_documents

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a conversation. It includes special tokens, so encode it without adding any.

        Args:
            messages: Messages in OpenAI's form, including calls and their results.
            add_generation_prompt: Whether the text ends where an answer begins.
            extra: Extra variables of the template.
            tools: Functions that may be called (`ToolPlan.template_tools`).

        Raises:
            PromptError: There is no template, it refused the messages, or the result of a tool answers no call.
        """
        made = self.rendered_chat(messages, add_generation_prompt=add_generation_prompt, extra=extra, tools=tools)
        return made.text

    def rendered_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> RenderedChat:
        """Return the text of a conversation, as `render_chat`, for those that begin with the same messages.

        Args:
            options: Those of `ChatRenderer.rendered`.
        """
        if self._chat is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        return self._chat.rendered(messages, **options)

    @property
    def goes_on(self) -> bool:
        """Whether a conversation's text can be made from that of its beginning."""
        return self._chat is not None and self._chat.goes_on

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode a whole list of ids; unknown ids are skipped."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def count_thoughts(self, thought: str, tokens: Sequence[int]) -> int:
        """Return how many tokens of an answer belong to its thought, with its marks. Where the thought's end is no
        single token, the thought is encoded anew."""
        if not thought or self.reasoning is None:
            return 0
        end = self._tokenizer.token_to_id(self.reasoning.end) if self.reasoning.end else None
        if end is not None:
            return tokens.index(end) + 1 if end in tokens else len(tokens)
        return min(len(self.encode(thought, add_special_tokens=False)), len(tokens))

    def token_string(self, token: int) -> str:
        """Return a token as the vocabulary writes it ("Ġthe", "▁the"); "" for an unknown id."""
        return self._tokenizer.id_to_token(token) or ""


def _unknown_id(model: dict[str, Any], strings: Mapping[str, int]) -> int | None:
    """Return the token for what a tokenizer has no other token for, given its `model`; None: there is none."""
    by_name = strings.get(model.get("unk_token") or "")
    number = model.get("unk_id", by_name)
    return number if isinstance(number, int) else None


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if 4 * len(text) > TEXT_BYTES_MAX and (size := len(text.encode())) > TEXT_BYTES_MAX:
        raise ApiError(
            400,
            f"a text has {size} bytes in UTF-8; at most {TEXT_BYTES_MAX} are tokenised at once. Please "
            "shorten it, or send it in parts.",
            code="string_above_max_length",
        )
    # The batch call releases the GIL and computes no offsets.
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    if (count := len(encoding)) > TOKENS_MAX:
        del encoding  # freed here, not where the error is answered
        raise ApiError(
            400,
            f"a text has {count} tokens; at most {TOKENS_MAX} are tokenised at once. Please "
            "shorten it, or send it in parts.",
            code="string_above_max_length",
        )
    ids: list[int] = encoding.ids
    return ids
