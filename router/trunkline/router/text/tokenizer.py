"""A model's tokenizer: text and messages to token ids, token ids to text.

Built on the `tokenizers` library and an own sandboxed Jinja environment, so that a router process needs
neither torch nor transformers (it starts in half a second and stays small).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import tokenizers

from trunkline.router.errors import ApiError
from trunkline.router.request_context import current
from trunkline.router.text.chat_template import ChatRenderer, ChatTemplateError
from trunkline.router.text.detokenizer import TokenVocabulary
from trunkline.router.text.model_files import ModelFiles, read_model_files
from trunkline.router.text.tool_styles import ToolStyle, detect_style

OFF_LOOP_CHARACTERS: Final = 64 << 10
"""Texts longer than this are tokenised in a thread: they would stop all streams for over 10 ms."""
TEXT_BYTES_MAX: Final = 6 << 20
"""Of one text, in UTF-8. It may become as many tokens, and each takes a hundred bytes while it is encoded."""
TOKENS_MAX: Final = 1 << 20
"""Of one text. Python's lock is held while their list is made: 20 to 40 ms for so many."""
_LINE_END: Final = "\n"


class Tokenizer:
    """Tokenizer of one model folder."""

    def __init__(self, folder: str | Path, tool_call_parser: str = "auto") -> None:
        """Load it. `tool_call_parser`: as in `RouterConfig`.

        Raises:
            ValueError: a file is missing or broken; the text names it.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            source = path.read_text(encoding="utf-8")
            description = json.loads(source)
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"{path} cannot be loaded: {error}") from error
        self.fingerprint: str = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
        """Token ids of another one mean other texts."""
        # Serving never wants a checkpoint's training-time cut or padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.files: ModelFiles = read_model_files(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        special = [token_id for token_id, token in added.items() if token.special]
        self.vocabulary = TokenVocabulary(self._tokenizer, description.get("decoder"), special)
        strings = self._tokenizer.get_vocab()
        self.vocab_size: int = self.files.vocab_size or max(strings.values()) + 1
        self._longest_token_characters = max(map(len, strings))
        self.tool_style: ToolStyle = detect_style(
            tool_call_parser,
            self.files.tool_chat_template or self.files.chat_template,
            [token.content for token in added.values()],
            [token.content for token in added.values() if token.special],
        )
        """How this model writes tool calls."""
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
        """Id of "bos_token", "eos_token", …, if the model has it."""
        text = self.files.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text: the generation configuration's and the tokenizer's own."""
        own = self.special_token_id("eos_token")
        return frozenset(self.files.eos_ids) | (frozenset() if own is None else {own})

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the text's length in tokens, without tokenising it."""
        # Byte-level vocabularies write a byte as one character and a character has at least one byte;
        # normalisers may shorten text (NFC joins up to three characters), hence the margin.
        return len(text) // (4 * self._longest_token_characters)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; `add_special_tokens` adds what the tokenizer's post-processor says (often BOS).

        Raises:
            ApiError: 400, it is too long, or becomes too many tokens.
        """
        return _encode(self._tokenizer, text, add_special_tokens=add_special_tokens)

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        # Of its own, because the switch is the tokenizer's and not a call's; made when it is first needed, because
        # a large vocabulary takes a second and a hundred megabytes.
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are what is written there, like everything else.

        Raises:
            ApiError: as `encode`.
        """
        return _encode(self._plain, text, add_special_tokens=False)

    @functools.cached_property
    def leading_ids(self) -> tuple[int, ...]:
        """What the post-processor puts in front of a text: often BOS, often nothing."""
        text = "a"
        alone, whole = (self.encode(text, add_special_tokens=added) for added in (False, True))
        found = (start for start in range(len(whole)) if whole[start : start + len(alone)] == alone)
        return tuple(whole[: next(found, 0)])

    @property
    def has_chat_template(self) -> bool:
        """Whether there is one."""
        return self._chat is not None

    async def encode_async(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`encode`, in a thread if the text is long."""
        record, began = current().record, time.monotonic()
        if len(text) < OFF_LOOP_CHARACTERS:
            ids = self.encode(text, add_special_tokens=add_special_tokens)
        else:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(
                self._threads, lambda: self.encode(text, add_special_tokens=add_special_tokens)
            )
        if record is not None and record.trace is not None:
            record.trace.tokenized(began, len(text), len(ids))
        return ids

    async def encode_rest(self, text: str) -> list[int]:
        """Token ids of a text that goes on where others stopped: without what marks the beginning of one."""
        if not text:
            return []
        # Some tokenizers put a space in front of whatever they are given; in front of the line end, here.
        line_end = self.encode(_LINE_END, add_special_tokens=False)
        ids = await self.encode_async(_LINE_END + text, add_special_tokens=False)
        if ids[: len(line_end)] == line_end:
            return ids[len(line_end) :]
        return await self.encode_async(text, add_special_tokens=False)  # the two grew together

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation. It carries its special tokens: encode it without adding any.

        Args:
            messages: in OpenAI's form, calls and their results included.
            add_generation_prompt: whether it ends where an answer begins.
            extra: the template's own switches.
            tools: what may be called (`ToolPlan.template_tools`).

        Raises:
            ChatTemplateError: there is no template, or it refused the messages.
        """
        if self._chat is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, extra=extra, tools=tools)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole list of ids; ids without a token give nothing."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_string(self, token: int) -> str:
        """The tokenizer's own writing of a token ("Ġthe", "▁the"); empty if there is none."""
        return self._tokenizer.id_to_token(token) or ""


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
