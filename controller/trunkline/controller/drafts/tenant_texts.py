"""What the requests of each tenant have said and were told: texts in which their later ones find drafts. Pure.

    a request ends ─► its output, its prompt: wait ─► indexed in parts, while the workers compute or rest;
                                                      of prompts what the index has not got yet

Agents read the same files in one session after the other, and what they write is often like something that they
have read; the radix tree knows such a text only behind the very same path. So there is one `TextIndex` per salt.
A turn's prompt repeats the turns before it: blocks of which the index has a copy are skipped. Memory is bounded:
an index starts small and grows, and the tenant that was active least recently is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

import numpy as np

from trunkline.controller.drafts.acceptance import Acceptance
from trunkline.controller.drafts.text_index import NO_TOKEN, RUNS, TextIndex
from trunkline.kvstore.chunks import Int32Array

TEXT_TOKENS: Final = 1 << 18
"""Tokens that are kept of a tenant: some dozen files of a project, in 7.3 MB."""
FIRST_TOKENS: Final = 1 << 13
"""Tokens for which a tenant's index has room in the beginning."""
TENANTS_MAX: Final = 32
"""Largest number of tenants of which texts are kept."""
TENANT_BYTES_MAX: Final = 64 << 20
"""Memory of the indexes of all tenants together."""
WAITING_MAX: Final = 1 << 18
"""Tokens of prompts that may wait to be indexed, of all tenants together; the oldest are given up."""
BLOCK: Final = 64
"""Tokens that are skipped together if the index has them."""

_ANCHORS: Final = (64, 48, 32, 16)
"""Places in a block, each behind a run by which a copy is looked for: that run may stand elsewhere, too."""


class Tenant:
    """What is known of a tenant's requests, and of no other's."""

    __slots__ = ("acceptance", "index")

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.index: TextIndex | None = None
        """What they have said and were told; None: nothing yet."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return Acceptance.nbytes + (self.index.nbytes if self.index is not None else 0)


class TenantTexts:
    """What tenants' requests have said and were told, by salt."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, Tenant] = OrderedDict()
        """By salt; the tenant that was active least recently comes first."""
        self._waiting: deque[tuple[bytes, Int32Array, bool]] = deque()
        """Texts that are not indexed, or their ends, with their salts, in order of arrival; and whether the index
        may have parts of them, as of prompts."""
        self._growing: deque[TextIndex] = deque()
        """Indexes that grow, which they do one after the other."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all tenants."""
        return sum(tenant.nbytes for tenant in self._tenants.values())

    @property
    def waits(self) -> bool:
        """Whether texts wait to be indexed, or an index grows."""
        return bool(self._waiting or self._growing)

    def of(self, salt: bytes) -> Tenant:
        """Return what is known of a tenant, which is the latest active one now."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            tenant = self._tenants[salt] = Tenant()
            self._forget()
        self._tenants.move_to_end(salt)
        return tenant

    def add(self, salt: bytes, prompt: Int32Array, output: Int32Array) -> None:
        """Take in a request that has ended. Its texts are indexed by `index_some`, the output first.

        Args:
            prompt: `[n]`; not kept, but copied.
            output: `[n]`; kept.
        """
        if len(output):
            self._waiting.append((salt, output[-TEXT_TOKENS:], False))
        if len(prompt) >= BLOCK:
            self._waiting.append((salt, prompt[-TEXT_TOKENS:].copy(), True))
        while sum(len(each) for _, each, _ in self._waiting) > WAITING_MAX:
            self._waiting.popleft()

    def index_some(self, most: int) -> int:
        """Index what is new in up to `most` tokens of the texts that wait, or so many again of an index that is
        growing, for which texts wait; return how many."""
        looked = 0
        if self._growing:
            looked = self._growing[0].grow_some(most)
            if not self._growing[0].grows:
                self._growing.popleft()
            return looked
        while self._waiting and looked < most:
            salt, tokens, may_be_known = self._waiting.popleft()
            part, rest = np.split(tokens, [most - looked])
            if len(rest):
                self._waiting.appendleft((salt, rest, may_be_known))
            looked += len(part)
            index = self.of(salt).index
            for piece in pieces_unknown(index, part) if may_be_known and index is not None else [part]:
                self._extend(salt, piece)
        return looked

    def _extend(self, salt: bytes, text: Int32Array) -> None:
        tenant = self.of(salt)
        if tenant.index is None:
            tenant.index = TextIndex(FIRST_TOKENS)
        if not tenant.index.grows:
            tenant.index.grow(min(tenant.index.count + len(text) + 1, TEXT_TOKENS))
            if tenant.index.grows:
                self._growing.append(tenant.index)
        tenant.index.extend(np.append(text, np.int32(NO_TOKEN)))
        self._forget()

    def _forget(self) -> None:
        """Forget the tenants that were active least recently, where there is no room for all."""
        tenants = self._tenants
        while len(tenants) > TENANTS_MAX or (self.nbytes > TENANT_BYTES_MAX and len(tenants) > 1):
            _, forgotten = tenants.popitem(last=False)
            if forgotten.index is not None and forgotten.index.grows:
                self._growing.remove(forgotten.index)


def pieces_unknown(index: TextIndex, tokens: Int32Array) -> list[Int32Array]:
    """Return the parts of a text `[n]` of which an index has no copy.

    Blocks of `BLOCK` tokens are known or not as a whole; a part begins with the last tokens of the block before
    it, so that runs over its beginning are found, too. A last block that is not whole counts as unknown.
    """
    count = len(tokens) // BLOCK
    blocks = tokens[: count * BLOCK].reshape(count, BLOCK)
    known = np.zeros(count + 2, np.bool_)
    for anchor in _ANCHORS:
        known[1:-1] |= index.has_blocks(blocks, anchor)
    known[0] = True
    known[-1] = count * BLOCK == len(tokens)
    changes = np.flatnonzero(np.diff(known, append=True))  # where unknown blocks begin, and behind their ends
    starts, stops = changes[::2] * BLOCK, changes[1::2] * BLOCK
    return [
        tokens[max(0, start - RUNS[0]) : stop if stop <= count * BLOCK else None]
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    ]
