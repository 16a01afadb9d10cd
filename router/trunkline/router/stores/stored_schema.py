"""A schema that is ready for prompts: its record and definition, compiled, and its uses in this router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from msgspec.structs import replace

from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.records import Record
from trunkline.router import pml
from trunkline.router.stores.schema_records import Definition, pin_name_of
from trunkline.router.streams.link import ControllerLink

OFF_LOOP_CHARACTERS: Final = 16 << 10
"""Length in characters above which a source is compiled in a thread. The thread compiles one source at a time."""
_PART_BYTES: Final = 600
"""Approximate size in bytes of a compiled module, text or parameter: up to 25 times the size of its source."""
_MANY_TEXTS: Final = 512
_HINT_SECONDS: Final = 1.0
_HINT_TEXTS_MAX: Final = 16
_USES_MAX: Final = 4096


class Compiled(NamedTuple):
    """A compiled source, with what is sent to controllers and told to clients."""

    schema: pml.CompiledSchema
    texts: list[ModuleText]
    """All texts of the schema, as messages to a controller."""
    warnings: list[str]
    """Warnings for the schema's author."""


class StoredSchema:
    """The current version of a schema, compiled and ready for prompts."""

    def __init__(self, salt: bytes, record: Record, definition: Definition, ready: Compiled) -> None:
        self.salt = salt
        self.record = record
        self.definition = definition
        self.ready = ready
        self.weight = _weight(definition, ready)
        """Bytes counted for this schema in the cache."""
        self.uses: Counter[str] = Counter()
        """Recent imports of each module, by path, as seen by this router."""
        self.pinned_at: ControllerLink | None = None
        """The home where this router set the pin last; None: it has set none."""
        self.pinned_on = 0
        """Number of that home's connection over which the pin was set; 0: it must be set again."""
        self._hinted_at = float("-inf")

    @property
    def name(self) -> str:
        """Name of the schema, which is also its id."""
        return self.record.key.id

    @property
    def key(self) -> str:
        """Key that determines the schema's home controller and names its pins."""
        return pin_name_of(self.record.key)

    @property
    def compiled(self) -> pml.CompiledSchema:
        """The compiled schema, for `pml.compile_prompt`."""
        return self.ready.schema

    @property
    def is_large(self) -> bool:
        """Whether work on the whole schema is too long for the event loop."""
        return len(self.ready.texts) > _MANY_TEXTS or len(self.definition.source) > OFF_LOOP_CHARACTERS

    def used(self, paths: Iterable[str]) -> None:
        """Count the modules that a prompt imports."""
        self.uses.update(paths)
        if self.uses.total() > _USES_MAX:  # recent imports count more
            self.uses = Counter({path: count // 2 for path, count in self.uses.items() if count > 1})

    def hint(self, prompt: pml.CompiledPrompt, now: float) -> PromptLayout | None:
        """Return texts that the next requests will probably need; None if a hint was given within the last second.

        Args:
            prompt: The prompt of the current request.
            now: Loop time in seconds.
        """
        if now - self._hinted_at < _HINT_SECONDS:
            return None
        self._hinted_at = now
        wanted = pml.likely_texts(self.compiled, prompt, self.uses, _HINT_TEXTS_MAX)
        if not wanted:
            return None
        return replace(pml.hint_layout(self.compiled, wanted), relocate=self.definition.relocate)


def _weight(definition: Definition, ready: Compiled) -> int:
    """Return the approximate size of a schema in memory, in bytes."""
    parts = len(ready.texts)
    size = len(definition.source) + sum(len(text.tokens) for text in ready.texts)
    for module in ready.schema.modules:
        parts += 1 + len(module.params)
        size += len(module.path)
    return size + parts * _PART_BYTES
