"""The models behind a router, and which group serves which of them.

    RouterConfig ──► ServedModel ──┐
    Member, State of a group ──────┴──► Standing: the group's model, or why the group is not used

A router has the tokenizer of each model, so it must not send its tokens to a group with another one. Of groups
with different weights, only those with the same ones are used at a time (`weights_in_force.py`). Groups of one
model may differ in everything else (precision, ranks, chunk size), as they do while a cluster is upgraded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Collection, Iterable, Iterator
from threading import Lock

import structlog

from trunkline.router.config import ModelConfig, RouterConfig, is_pattern
from trunkline.router.jobs.job import ModelLimits
from trunkline.router.membership.member import Member
from trunkline.router.messages import State
from trunkline.router.streams.adapters import OfferedAdapter, offered
from trunkline.router.streams.link import ControllerLink, Standing
from trunkline.router.streams.links import Links
from trunkline.router.streams.weights_in_force import Said, WeightsInForce
from trunkline.router.text.conversation_memory import ConversationMemory
from trunkline.router.text.prompt_memory import PromptMemory
from trunkline.router.text.remembered_prompts import RememberedPrompts
from trunkline.router.text.tokenizer import Tokenizer

_log = structlog.get_logger("trunkline.router.streams.served_models")


class ServedModel:
    """A model that requests can ask for."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, memory: PromptMemory) -> None:
        """`memory`: what the router remembers of prompts, of all models."""
        self.name = config.name
        """The main one of its names: it is in answers to requests that name none, and groups are known by it."""
        self.names = config.all_names
        """Every name that a request may use, the main one first; some may stand for many (`is_pattern`)."""
        self.tokenizer = tokenizer
        self.remembered = RememberedPrompts(memory, config.name, tokenizer)
        """The prompts of its conversations."""
        self._max_context = config.max_context
        self._limits: tuple[list[tuple[int, int]], ModelLimits] | None = None
        """The limits, with the reports from which they were made."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest that changes with the model and the program's version (`system_fingerprint`)."""
        version = importlib.metadata.version("trunkline")
        name = f"{self.name} {self.tokenizer.vocab_size} {version}"
        return "fp_" + hashlib.blake2b(name.encode(), digest_size=5).hexdigest()

    @property
    def probe_token(self) -> int:
        """A token id that may begin a prompt."""
        return self.tokenizer.special_token_id("bos_token") or 0

    def limits(self, links: Iterable[ControllerLink]) -> ModelLimits:
        """Return the limits of what a request may ask for at this moment.

        Args:
            links: the connections to the groups that serve the model.
        """
        sizes = [
            (link.state.max_context, link.state.max_rows)
            for link in links
            if link.state is not None and not link.problem
        ]
        if self._limits is None or self._limits[0] != sizes:
            self._limits = sizes, self._limits_by(sizes)
        return self._limits[1]

    def _limits_by(self, sizes: list[tuple[int, int]]) -> ModelLimits:
        contexts = [self._max_context or self.tokenizer.files.max_context]
        if capacity := [context for context, _ in sizes if context > 0]:
            contexts.append(max(capacity))
        return ModelLimits(
            max_context=min(contexts),
            vocab_size=self.tokenizer.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            defaults=self.tokenizer.files.defaults,
            max_rows=max((rows for _, rows in sizes), default=0),
        )


class ServedModels(Collection[ServedModel]):
    """The models behind a router; the first one is meant by requests that name none."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer) -> None:
        """
        Args:
            tokenizer: that of the first model. The others are loaded here.

        Raises:
            ValueError: a tokenizer cannot be loaded.
        """
        first, *others = config.all_models
        self.memory = PromptMemory(config.prompt_memory_bytes)
        """What the router remembers of prompts."""
        self.conversations = ConversationMemory(config.prompt_memory_bytes // 2, Lock())
        """What it remembers of the same conversations as messages."""
        loaded = [
            ServedModel(
                each, Tokenizer(each.model_path, each.tool_call_parser, each.reasoning_parser), self.memory
            )
            for each in others
        ]
        self._models = (ServedModel(first, tokenizer, self.memory), *loaded)
        self._by_name = {name: model for model in reversed(self._models) for name in model.names}
        patterns = sorted(filter(is_pattern, self._by_name), key=len, reverse=True)
        self._by_beginning = [(name[:-1], self._by_name[name]) for name in patterns]
        self.links = Links()
        """The connections to the groups, which say what adapters there are."""
        self._ids_are_told = bool(config.members)
        self._model_is_named = config.model_is_named
        self._in_force = {model.name: WeightsInForce[ControllerLink]() for model in self._models}

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __contains__(self, model: object) -> bool:
        return model in self._models

    @property
    def first(self) -> ServedModel:
        """The model that requests mean that name none."""
        return self._models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may use, of all models; some may stand for many (`is_pattern`)."""
        return tuple(name for model in self._models for name in model.names)

    def adapter(self, name: str) -> OfferedAdapter | None:
        """Return the adapter that a request with this name asks for. None: there is none, or the name is a
        model's."""
        if name in self._by_name:
            return None
        return next((each for each in offered(self.links) if each.name == name), None)

    def find(self, name: str) -> ServedModel | None:
        """Return the model that a request with this name asks for: that with the name, or the base of the adapter
        with the name, or else that with the longest pattern that fits. None: there is none."""
        found = self._by_name.get(name)
        if found is None and (adapter := self.adapter(name)) is not None:
            found = self._by_name.get(adapter.model) or self._models[0]
        return found or next((model for begin, model in self._by_beginning if name.startswith(begin)), None)

    def of_link(self, link: ControllerLink) -> ServedModel:
        """Return the model that a group serves; the first one while that is not known."""
        return self._by_name.get(link.standing.model) or self._models[0]

    def judge(self, member: Member, state: State) -> Standing:
        """Return which model a group serves, or why requests must not go there.

        Args:
            member: the group as the membership describes it.
            state: what the group says of itself.
        """
        said = state.group
        if self._ids_are_told and said.member and said.member != member.id:
            return Standing(
                "", f"the membership says that {member.address} is group {member.id!r}, but it is {said.member!r}"
            )
        name = said.model or member.model
        model = self._by_name.get(name)
        if len(self._models) == 1 and not (self._model_is_named and said.is_named):
            model = self._models[0]
        if model is None:
            served = ", ".join(repr(each.name) for each in self._models)
            what = f"it serves model {name[:200]!r}" if name else "it does not say which model it serves"
            return Standing("", f"{what}; this router has {served}. --served-model-name of the group names it")
        if said.tokenizer and said.tokenizer != model.tokenizer.fingerprint:
            return Standing(
                model.name,
                f"its model {(name or model.name)[:200]!r} has another tokenizer ({said.tokenizer[:64]}) than "
                f"model {model.name!r} of this router ({model.tokenizer.fingerprint})",
            )
        return Standing(model.name)

    def weigh(self, link: ControllerLink, *, is_member: bool, now: float) -> list[ControllerLink]:
        """Decide anew which weights serve each model, after a group has reported its state, was lost or has left.

        Args:
            is_member: whether the group is still a member.
            now: the time in seconds.

        Returns:
            the groups that may be used from now on, or no longer may.
        """
        changed: list[ControllerLink] = []
        for model, rule in self._in_force.items():
            before = rule.current
            if not is_member or link.fault or link.standing.model != model or (link.state and not link.weights):
                rule.forget(link, now)
            elif link.state is None:
                rule.lost(link, now)
            else:
                rule.note(link, _said(link.state), now)
            if rule.current != before:
                _log.info("weights_in_force", model=model, weights=rule.current, before=before)
            concerned = rule if rule.current != before else [link] if link in rule else []
            changed += [each for each in concerned if each.set_rival(_rival(model, each, rule.refuses(each)))]
        if not any(link in rule for rule in self._in_force.values()) and link.set_rival(""):
            changed.append(link)
        return changed

    def close(self) -> None:
        """End the tokenizers' threads."""
        for model in self._models:
            model.tokenizer.close()


def _said(state: State) -> Said:
    return Said(state.group.weights, state.status == "ready", state.status == "draining", state.epoch)


def _rival(model: str, group: ControllerLink, in_force: str) -> str:
    """Return why a group must not be used. `in_force`: the digest of the weights that serve its model; "": it
    may be used."""
    if not in_force:
        return ""
    return (
        f"its weights ({group.weights[:12]}) are others than those that serve model {model!r} now "
        f"({in_force[:12]}); it takes requests when the groups with those have left"
    )
