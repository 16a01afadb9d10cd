"""The request of which routing chooses the controller, and the decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from trunkline.controller.messages import Holder, KeptChunks, ModuleText, PromptLayout
from trunkline.router.routing.tails import Tail
from trunkline.router.text.prompt_memory import ChunkNames


class Origin(msgspec.Struct, frozen=True):
    """The origin of a request, for the dashboard and logs; no choice depends on it."""

    request: str = ""
    """Id of the HTTP request."""
    tenant: str = ""
    session: str = ""
    """The session's name, as its client gave it."""


class RouteRequest(msgspec.Struct, frozen=True):
    """A request for which a controller is to be chosen."""

    tokens: bytes
    """The prompt as int32, little-endian; of a prompt with modules only its own tokens. If a stream goes on at
    another controller, the output so far follows the prompt."""
    salt: bytes = b""
    session: str = ""
    """Name of the session that the request is a turn of, different for each tenant; "": it belongs to no
    session."""
    model: str = ""
    """Main name of the model that the request asks for; "": all controllers serve the same one."""
    home: int = -1
    """The home of the request's schema, which most likely has the modules' KV; -1: there is none."""
    drops: tuple[tuple[int, int], ...] = ()
    """Ranges `[start, stop)` of the prompt that the model does not see (`Submit.drops`)."""
    layout: PromptLayout | None = None
    """Layout of a prompt with modules (`Submit.layout`); None: the prompt has no modules."""
    exclude: frozenset[int] = frozenset()
    """Controllers that have just failed the request or refused it. They are chosen only if there is no other."""
    pinned: int = -1
    """The only controller on which the request can run; -1: it can run on any."""
    names: Sequence[bytes] | None = None
    """Names of the prompt's whole chunks, if the caller knows them. Then `tokens`, `salt`, `drops` and `layout`
    are ignored, and all controllers must have the same identity. None: the names are computed from the tokens."""
    begun: ChunkNames | None = None
    """Names of the first chunks of a plain prompt that were computed before, to which more are added; None: none
    are known, or the prompt is not remembered."""
    token_count: int = 0
    """Tokens of the prompt; used only with `names`."""
    output_tokens: int = 0
    """Tokens that the answer is expected to have, which need room, too; 0: not known."""
    may_part: bool = False
    """Whether the prompt may be computed at another group than the one where the stream goes on."""
    planned: int = -1
    """The controller at which it was planned that the stream goes on; it is chosen if it can take the request. -1:
    nothing was planned."""
    origin: Origin = Origin()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt, as far as no names of its chunks are needed to know it."""
        return self.token_count if self.names is not None else len(self.tokens) // 4


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """The knowledge of all controllers at the time when one of them was chosen."""

    candidates: NDArray[np.int64]
    """The controllers that could take the request."""
    tiers: NDArray[np.int64]
    """Prompt tokens that each controller has, `[controllers, 4]`: on the device, in host memory, on disk,
    expected."""
    costs: NDArray[np.float64]
    """Cost of each controller by the prefix-aware rule (`View.costs`)."""
    names: Sequence[str]
    """The controllers' names; "": there is no such controller. Arrays may have further rows that mean nothing."""


class Sleeping(NamedTuple):
    """Chunks of a prompt that a peer has on disk, from where it exports none."""

    controller: int
    first: bytes
    """Name of the first of them."""
    tokens: int


class Left(NamedTuple):
    """A conversation that goes on at another controller than the one that has most of it."""

    member: str
    """Id of the group that has most of it."""
    names: bytes
    """Names of the last chunks of the prompt that the group has (`WentOn.names`)."""
    prompt_tokens: int


class Decision(msgspec.Struct, frozen=True):
    """The controller to which a request goes, and why."""

    controller: int
    reason: str
    """"prefix": lowest cost, and part of the prompt is cached there; "load": lowest cost; "session": the session's
    last request went there; "tail": the controller has computed the open tail with which the prompt goes on;
    "most": not at lowest cost, but the controller has more of the prompt than any other, and more than half;
    "home": it is the home of the request's schema; "only": no other controller can take the request; "pinned";
    "prefill": it computes the prompt, and the stream goes on elsewhere; "planned": the stream goes on there, as
    was planned; or the name of a policy other than "prefix"."""
    new_tokens: int
    """Prompt tokens that the controller will have to compute or pull, as far as is known."""
    cached_tokens: int
    """Prompt tokens that the controller has cached in some tier."""
    tier_tokens: list[int]
    """The cached prompt tokens by tier: on the device, in host memory, on disk, and those that other requests are
    expected to compute, or have computed behind the last full chunk. Their sum is `cached_tokens`."""
    cost: float
    """Cost of the chosen controller by the prefix-aware rule, whatever the policy."""
    best_cost: float
    """Lowest cost of all candidates by the prefix-aware rule."""
    names: list[bytes]
    """Names of the prompt's chunks that the controller has not published, for `ChunkIndex.expect`."""
    blocks: int = 0
    """Number of chunks of the prompt."""
    weighed: Weighed | None = None
    """The costs and cached tokens of all controllers, for the dashboard and traces; None: the decision is not made
    in full (`RoutingCore.route`)."""
    name: str = ""
    """The controller's name."""
    tail: Tail | None = None
    """The prompt's open tail; None for prompts with modules or dropped ranges."""
    pulled_tokens: int = 0
    """Those of `new_tokens` that the controller can pull from peers."""
    holders: list[Holder] = []
    """Peers that have chunks which the controller lacks (`Submit.holders`)."""
    sleeping: Sleeping | None = None
    """A peer that has more of the prompt, on disk only."""
    goes_on: int = -1
    """The controller where the stream is to go on after its first token; -1: at `controller`."""
    text_holders: dict[int, list[Holder]] = {}
    """Peers that have chunks of texts which the controller lacks (`ModuleText.holders`), by the text's index in
    the layout."""
    kept: KeptChunks | None = None
    """What peers have kept behind the prompt's cut, if the controller lacks it (`Submit.kept`)."""
    left: Left | None = None
    """The peer that is to hear that the conversation goes on here; None: there is none."""

    def with_holders(self, texts: Sequence[ModuleText]) -> list[ModuleText]:
        """Return the texts of the request's layout, each with the groups from which it can be pulled."""
        given = self.text_holders
        return [
            msgspec.structs.replace(text, holders=given[index]) if index in given else text
            for index, text in enumerate(texts)
        ]

    def laid_out(self, layout: PromptLayout | None) -> PromptLayout | None:
        """Return the request's layout, its texts as `with_holders` returns them."""
        if layout is None or not self.text_holders:
            return layout
        return msgspec.structs.replace(layout, texts=self.with_holders(layout.texts))
