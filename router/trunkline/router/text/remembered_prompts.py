"""The prompts of one model as a router remembers them: encoded as far as they are new (`prompt_memory.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trunkline.kvstore.chunks import Int32Array
from trunkline.router.text.detokenizer import make_detokenizer
from trunkline.router.text.prompt_memory import ChunkNames, Prompt, PromptMemory, ReadsSame, Reuse, part_of
from trunkline.router.text.token_ids import TokenIds
from trunkline.router.text.tokenizer import OFF_LOOP_CHARACTERS, Tokenizer


class RememberedPrompt:
    """A prompt and its tokens, until its answers are complete."""

    def __init__(
        self,
        memory: PromptMemory,
        prompt: Prompt,
        reuse: Reuse,
        tokenizer: Tokenizer,
    ) -> None:
        self._memory = memory
        self._prompt = prompt
        self._tokenizer = tokenizer
        self.reuse = reuse
        """The part of the prompt that was known before."""

    @property
    def tokens(self) -> Int32Array:
        """Its token ids."""
        return self._prompt.tokens

    @property
    def names(self) -> ChunkNames:
        """Names of its chunks, to which more may be added."""
        return self._prompt.names

    @property
    def ids(self) -> TokenIds:
        """Its token ids, which read like a list."""
        return TokenIds(self._prompt.tokens)

    def answered(self, tokens: Sequence[int], ends: Collection[int]) -> None:
        """Remember an answer that is complete. `ends`: tokens that end it, which are no part of it."""
        if tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        detokenizer = make_detokenizer(self._tokenizer.vocabulary, skip_special_tokens=False, at_start=False)
        text = "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()
        self._memory.answered(self._prompt, text, tokens)


class RememberedPrompts:
    """The prompts of one model."""

    def __init__(self, memory: PromptMemory, model: str, tokenizer: Tokenizer) -> None:
        """`model`: its main name, for the scope of its prompts."""
        self.memory = memory
        """The memory, which all models share."""
        self._model = model
        self._tokenizer = tokenizer

    @property
    def is_on(self) -> bool:
        """Whether anything is remembered."""
        return self.memory.bytes_max > 0

    def known(self, text: str, salt: bytes, same: ReadsSame) -> Reuse:
        """Return what is known of a prompt's text.

        Args:
            salt: Salt of the request's KV.
            same: See `PromptMemory.reuse`.
        """
        return self.memory.reuse((self._model, salt), text, self._tokenizer.borders, same)

    async def encoded(self, text: str, salt: bytes, known: Reuse) -> RememberedPrompt:
        """Encode what is new in a prompt and remember it. `known`: what `known` has found.

        Raises:
            ApiError: 400, what is new is too long or has too many tokens.
        """
        rest = text[known.characters :]
        tokenizer = self._tokenizer
        ids = await tokenizer.encode_async(rest, add_special_tokens=False) if rest else []
        if len(rest) < OFF_LOOP_CHARACTERS:
            return self.keep(text, salt, known, ids)
        part = await tokenizer.beside_loop(lambda: part_of(rest, ids, tokenizer.borders))
        prompt = self.memory.remember_part((self._model, salt), text, known, part)
        return RememberedPrompt(self.memory, prompt, known, tokenizer)

    def keep(self, text: str, salt: bytes, known: Reuse, rest: Sequence[int]) -> RememberedPrompt:
        """Remember a prompt. `rest`: tokens of the text behind what is known."""
        prompt = self.memory.remember((self._model, salt), text, known, rest, self._tokenizer.borders)
        return RememberedPrompt(self.memory, prompt, known, self._tokenizer)
