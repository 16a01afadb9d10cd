"""The chat format, in one place: the template that ships and the encoder training uses.

A conversation is ``<|bos|>`` and then, per message, ``<|role|>`` content ``<|end|>``. Every
message is delimited by special tokens alone, without blanks or line breaks around them. So
a text has the same tokens wherever it stands, and two conversations that begin with the
same messages begin with the same tokens: what a prefix cache needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

BOS, END, SYSTEM, USER, ASSISTANT, PAD = (
    "<|bos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|pad|>",
)
SPECIAL_TOKENS = (BOS, END, SYSTEM, USER, ASSISTANT, PAD)
BOS_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, PAD_ID = range(len(SPECIAL_TOKENS))
ROLE_IDS = {"system": SYSTEM_ID, "user": USER_ID, "assistant": ASSISTANT_ID}

# An unknown role is an error: silently dropping a message would change the conversation.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Message:
    """One turn; ``learn`` says whether its tokens count in the loss."""

    role: str
    content: str
    learn: bool = False


def question(text: str) -> Message:
    """A user turn: read, never imitated."""
    return Message("user", text)


def answer(text: str) -> Message:
    """An assistant turn: what the model shall produce."""
    return Message("assistant", text, learn=True)


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text alone."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_chat(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and for each token 1 if it is to be predicted."""
    ids, learn = [BOS_ID], [0]
    for message in messages:
        content = plain_ids(tokenizer, message.content)
        ids += [ROLE_IDS[message.role], *content, END_ID]
        learn += [0, *[int(message.learn)] * (len(content) + 1)]
    return ids, learn


def prompt_ids(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """A conversation that ends where the assistant is to speak."""
    return [*encode_chat(tokenizer, messages)[0], ASSISTANT_ID]
