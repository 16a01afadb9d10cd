"""What a router remembers of prompts and answers: any conversation gets the tokens that it would have without."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from router.harness import DEMO_MODEL
from router.model_folders import FAMILIES, write_family
from seeds import seeds

from trunkline.kvstore.adapters import KEY_BYTES, adapter_salt
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.routing.names import KvIdentity, prompt_names
from trunkline.router.routing.request import RouteRequest
from trunkline.router.stores.session_history import text_of
from trunkline.router.text.prompt_memory import READ_CHARACTERS_MAX, Prompt, PromptMemory, ReadsSame, Reuse, Scope
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.tools.pieces import CallArguments, CallStart, Piece, TextPiece, ThoughtPiece
from trunkline.router.tools.plan import prepare_tools
from trunkline.router.tools.readings import reads_same

Message = dict[str, Any]
Reached = tuple[int, int]
TOOLS: Final = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
]
_SPACES: Final = ("", " ", "\n", "\n\n", "  \n")
_WORDS: Final = (
    "read",
    "the file",
    "é",
    "😀",
    "<|end|>",
    "<|end",
    "{}",
    "  ",
    "\n",
    "and so on",
    "1.0",
    "<think>",
)
IDENTITIES: Final = (KvIdentity(b"one", "bfloat16", 4), KvIdentity(b"other", "bfloat16", 7))
STEPS: Final = 150
_BEGUN: Final = 2
SCOPE: Final = ("m", b"")


def text(rng: random.Random, most: int = 8) -> str:
    if rng.random() < 0.5:  # texts that others say, too
        return rng.choice(_WORDS[:3])
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, most)))


class Model:
    """A model that says anything, in tokens that are mostly not those of its text."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.tokenizer = tokenizer
        self.rng = rng
        self.plan = prepare_tools(TOOLS, None, None, tokenizer.tool_style, tokenizer.reasoning)

    def say(self) -> tuple[str, list[int]]:
        rng = self.rng
        words = rng.choice(_SPACES) + text(rng).replace("<|end|>", "") + rng.choice(_SPACES)
        if self.tokenizer.reasoning is not None and rng.random() < 0.4:
            words = self._thought(words)
        if rng.random() < 0.4:
            words += self._call()
        ids: list[int] = []
        while words:  # other borders of tokens than the tokenizer's
            size = rng.randint(1, 12)
            ids += self.tokenizer.encode(words[:size], add_special_tokens=False)
            words = words[size:]
        return text_of(ids, self.tokenizer.vocabulary), ids

    def _thought(self, words: str) -> str:
        if self.tokenizer.reasoning.begin:  # type: ignore[union-attr]
            return f"<think>\n{text(self.rng)}\n</think>\n\n{words}"
        thought = f"<|channel|>analysis<|message|>{text(self.rng).replace('<|end|>', '')}<|end|>"
        return f"{thought}<|start|>assistant<|channel|>final<|message|>{words}"

    def _call(self) -> str:
        separators = self.rng.choice(((",", ":"), (", ", ": "), (" , ", " :  ")))
        fields = {name: text(self.rng, 2) for name in self.rng.sample("abcd", self.rng.randint(0, 3))}
        arguments = json.dumps(fields, separators=separators, ensure_ascii=self.rng.random() < 0.5)
        return f'<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>'

    def message(self, answer: str) -> Message:
        """What a client sends back of an answer."""
        parser = self.plan.make_parser(lambda: "call_0")
        pieces: list[Piece] = [TextPiece(answer)]
        if parser is not None:
            pieces = [*parser.feed(answer), *parser.finish()]
        content = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        thought = "".join(piece.text for piece in pieces if isinstance(piece, ThoughtPiece))
        if self.rng.random() < 0.5:
            content = content.strip()
        message: Message = {"role": "assistant", "content": content}
        if thought and self.rng.random() < 0.7:
            message["reasoning_content"] = thought.strip() if self.rng.random() < 0.5 else thought
        if starts := [piece for piece in pieces if isinstance(piece, CallStart)]:
            said = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments) and not piece.index)
            if self.rng.random() < 0.5 and said:
                said = json.dumps(json.loads(said))
            function = {"name": starts[0].name, "arguments": said or "{}"}
            message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
        return message


class Conversation:
    """Messages of a client, which may change them, and what of them is known for certain."""

    def __init__(self, scope: Scope, rng: random.Random) -> None:
        self.scope = scope
        self.messages: list[Message] = [{"role": "system", "content": rng.choice(("Rules.", "Rules. " * 20))}]
        self.prompt: Prompt | None = None


class World:
    """Conversations of some tenants with one model, and a check of every prompt."""

    def __init__(self, tokenizer: Tokenizer, seed: int, bytes_max: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        self.model = Model(tokenizer, self.rng)
        self.memory = PromptMemory(bytes_max)
        self.same = functools.cache(reads_same(self.model.plan))
        self.encode = functools.cache(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.known: dict[tuple[Scope, tuple[int, ...]], set[tuple[str, str]]] = {}
        """The texts of tokens from a prompt's last border to the end of its answer: that of either part."""
        self.begun: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
        """Those tokens by their scope and the first ones of them."""
        self.conversations = [
            Conversation((model, salt), self.rng) for model in ("m", "n") for salt in (b"a", b"b") for _ in "123"
        ]
        self.spliced = 0
        self.reused = 0

    def step(self) -> None:
        rng = self.rng
        conversation = rng.choice(self.conversations)
        self.change(conversation)
        conversation.messages.append({"role": "user", "content": text(rng)})
        self.ask(conversation)
        assert self.memory.bytes <= self.memory.bytes_max
        entries = [entry for entries in self.memory._scopes.values() for entry in entries]
        assert self.memory.bytes == sum(entry.size for entry in entries)
        assert len(self.memory) == len(entries)
        for each in self.memory._scopes.values():
            assert [entry.text for entry in each] == sorted(entry.text for entry in each)

    def change(self, conversation: Conversation) -> None:
        """Sometimes a client edits a message, goes back, forks, or begins anew."""
        rng, messages = self.rng, conversation.messages
        chance = rng.random()
        if chance < 0.1 and len(messages) > 1:
            at = rng.randrange(len(messages))
            messages[at] = {**messages[at], "content": text(rng)}
        elif chance < 0.2:
            del messages[rng.randint(1, len(messages)) :]
        elif chance < 0.3:
            other = rng.choice(self.conversations)
            other.messages = list(messages)
        elif chance < 0.33 or len(messages) > 12:
            conversation.messages = Conversation(conversation.scope, rng).messages

    def ask(self, conversation: Conversation) -> None:
        rendered = self.tokenizer.render_chat(conversation.messages)
        prompt, reuse = remembered(self.memory, self.tokenizer, conversation.scope, rendered, self.same)
        self.check(conversation.scope, rendered, prompt)
        self.check_names(prompt)
        self.reused += len(reuse.tokens)
        self.spliced += reuse.answer_tokens
        said = [self.model.say() for _ in range(self.rng.choice((0, 1, 1, 1, 1, 2)))]
        for answer, ids in said:
            self.memory.answered(prompt, answer, ids)
            tail = (*prompt.tokens[prompt.start.tokens :].tolist(), *ids)
            behind = rendered[prompt.start.characters :]
            self.known.setdefault((conversation.scope, tail), set()).add((behind, answer))
            self.begun.setdefault((conversation.scope, *tail[:_BEGUN]), set()).add(tail)
        if said:
            conversation.messages.append(self.model.message(self.rng.choice(said)[0]))

    def check(self, scope: Scope, rendered: str, prompt: Prompt) -> None:
        """Between two borders there are the tokens of that text, or those of an answer that reads the same."""
        anew = self.tokenizer.encode(rendered, add_special_tokens=False)
        if prompt.tokens.tolist() == anew:
            return
        at = self.tokenizer.borders.places(rendered, np.array(anew, np.int32))[:, 0].tolist()
        cuts = [0, *at, len(rendered)]
        reached: set[Reached] = {(0, 0)}
        ways = [(0, 0)]
        while ways:
            way = ways.pop()
            if way[1] == len(cuts) - 1:
                continue
            new = set(self.ways(scope, rendered, cuts, prompt.tokens.tolist(), way)) - reached
            reached |= new
            ways += new
        assert (len(prompt.tokens), len(cuts) - 1) in reached

    def check_names(self, prompt: Prompt) -> None:
        """What is known of its chunks are their names, also if a stream goes on elsewhere and has more of them."""
        more = pack_int32([self.rng.randrange(9) for _ in range(self.rng.choice((0, 0, 0, 30)))])
        for identity in IDENTITIES:
            request = RouteRequest(pack_int32(prompt.tokens) + more, begun=prompt.names)
            known = prompt_names(request, identity)
            assert known == prompt_names(msgspec.structs.replace(request, begun=None), identity)
            assert known.root
            assert prompt.names[known.root, identity.chunk_size] == known.chains[0].names

    def ways(
        self, scope: Scope, rendered: str, cuts: list[int], tokens: list[int], way: Reached
    ) -> Iterator[Reached]:
        """The places behind a place: tokens and borders before it."""
        place, index = way
        part = self.encode(rendered[cuts[index] : cuts[index + 1]])
        if tokens[place : place + len(part)] == part:
            yield place + len(part), index + 1
        for tail in self.begun.get((scope, *tokens[place : place + _BEGUN]), ()):
            if tuple(tokens[place : place + len(tail)]) != tail:
                continue
            for end in range(index + 1, len(cuts)):
                shown = rendered[cuts[index] : cuts[end]]
                if any(
                    shown.startswith(before) and self.same(before, said, shown[len(before) :])
                    for before, said in self.known[scope, tail]
                ):
                    yield place + len(tail), end


def remembered(
    memory: PromptMemory, tokenizer: Tokenizer, scope: Scope, rendered: str, same: ReadsSame
) -> tuple[Prompt, Reuse]:
    """A prompt's tokens, as a router makes them."""
    reuse = memory.reuse(scope, rendered, tokenizer.borders, same)
    rest = tokenizer.encode(rendered[reuse.characters :], add_special_tokens=False)
    return memory.remember(scope, rendered, reuse, rest, tokenizer.borders), reuse


@pytest.fixture(scope="module", params=["demo", *FAMILIES])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "demo":
        return Tokenizer(DEMO_MODEL)
    return Tokenizer(write_family(tmp_path_factory.mktemp("model"), request.param))


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("bytes_max", [1 << 24, 40_000])
def test_random_conversations(family: Tokenizer, seed: int, bytes_max: int) -> None:
    world = World(family, seed, bytes_max)
    for _ in range(STEPS):
        world.step()
    assert world.reused
    assert world.spliced
    assert len(world.memory) > 1


def turn(memory: PromptMemory, tokenizer: Tokenizer, rendered: str, *answers: list[int]) -> Prompt:
    prompt, _ = remembered(memory, tokenizer, SCOPE, rendered, lambda _, one, other: one.strip() == other.strip())
    for ids in answers:
        memory.answered(prompt, text_of(ids, tokenizer.vocabulary), ids)
    return prompt


def test_answers_that_read_the_same_are_told_apart(tokenizer: Tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    first = "<|bos|><|user|>hi<|end|><|assistant|>"
    second = f"{first}you<|end|><|user|>and<|end|><|assistant|>"
    third = f"{second}so<|end|><|user|>on<|end|><|assistant|>"
    memories = []
    for said in ("you", "you\n\n  "):
        memory = PromptMemory(1 << 20)
        turn(memory, tokenizer, first, ids(said))
        memories.append((memory, turn(memory, tokenizer, second)))
    (one, short), (other, long) = memories
    assert len(short.tokens) < len(long.tokens)
    other.answered(short, " so", ids(" so"))  # behind other tokens than those that it has
    assert turn(other, tokenizer, third).tokens.tolist() == [*long.tokens.tolist(), *ids(third[len(second) :])]
    one.answered(short, " so", ids(" so"))
    assert [answer.text for answer in one._scopes[SCOPE][0].answers] == ["you", " so"]
    one.remember(SCOPE, third, Reuse(), [*long.tokens.tolist(), *ids(third[len(second) :])], tokenizer.borders)
    [entry] = one._scopes[SCOPE]
    assert [answer.text for answer in entry.answers] == ["you"]  # the other one follows other tokens


def test_sampled_answers_and_other_branches(tokenizer: Tokenizer) -> None:
    memory, prompt = PromptMemory(1 << 20), "<|bos|><|user|>hi<|end|><|assistant|>"
    said = [[5 + number, 300 + number, 40] for number in range(3)]
    turn(memory, tokenizer, prompt, *said)
    for answer in said:
        for question in ("a", "b"):
            rendered = f"{prompt}{text_of(answer, tokenizer.vocabulary).strip()}<|end|><|user|>{question}<|end|>"
            known = turn(memory, tokenizer, rendered)
            start = len(tokenizer.encode(prompt, add_special_tokens=False))
            assert known.tokens[start : start + 3].tolist() == answer


def test_nothing_is_remembered_without_room(tokenizer: Tokenizer) -> None:
    memory = PromptMemory(20_000)
    turn(memory, tokenizer, "<|user|>hi<|end|>")
    turn(memory, tokenizer, "<|user|>" + "hi " * 2000 + "<|end|>")
    assert len(memory) == 1  # what takes most of the room drives nothing out
    memory = PromptMemory(0)
    prompt = turn(memory, tokenizer, "<|user|>hi<|end|>", [5])
    assert (len(memory), memory.bytes) == (0, 0)
    assert prompt.tokens.tolist() == tokenizer.encode("<|user|>hi<|end|>", add_special_tokens=False)


def test_a_tenant_can_be_forgotten(tokenizer: Tokenizer) -> None:
    memory, rendered = PromptMemory(1 << 20), "<|user|>hi<|end|>"
    for salt in (b"a", b"a2", b"b", adapter_salt(bytes(KEY_BYTES), b"a")):
        for model in ("m", "n"):
            remembered(memory, tokenizer, (model, salt), rendered, lambda *_: False)
    memory.forget(b"a")
    assert set(memory._scopes) == {("m", b"b"), ("n", b"b")}
    assert memory.bytes == sum(entry.size for [entry] in memory._scopes.values())
    memory.forget(b"")
    assert (len(memory), memory.bytes) == (0, 0)


def test_long_answers_are_not_read(tokenizer: Tokenizer) -> None:
    prompt = "<|bos|><|user|>hi<|end|><|assistant|>"
    read: list[int] = []

    def same(_: str, one: str, other: str) -> bool:
        read.append(len(one) + len(other))
        return one.split() == other.split()

    for words, found in ((2000, True), (READ_CHARACTERS_MAX, False)):
        memory = PromptMemory(1 << 24)
        said = tokenizer.encode("a b" * words + "\n", add_special_tokens=False)
        first, _ = remembered(memory, tokenizer, SCOPE, prompt, same)
        memory.answered(first, text_of(said, tokenizer.vocabulary), said)
        for shown, taken in (
            ("a  b" * words, found),
            ("a b" * words, True),
            ("x<|end|>" * 9 + "a b" * words, False),
        ):
            _, reuse = remembered(memory, tokenizer, SCOPE, f"{prompt}{shown}<|end|>", same)
            assert (reuse.answer_tokens == len(said)) == taken
            memory.forget(b"")
            remembered(memory, tokenizer, SCOPE, prompt, same)
            memory.answered(first, text_of(said, tokenizer.vocabulary), said)
    assert sum(read) <= 2 * 3 * READ_CHARACTERS_MAX
    assert max(read) <= READ_CHARACTERS_MAX
