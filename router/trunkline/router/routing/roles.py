"""Whether a long prompt is computed at another group than the one where its stream goes on. Pure.

Groups have *roles*. A `prefill` group computes long prompts for others; it gets other requests only if no other
group can take them. A `decode` group computes short prompts and goes on with streams. A group of role `both` does
all, as every group does without roles.

While a group computes a prompt, its running streams wait: each of them for about the time that the prompt takes.
So a request whose stream is to go on at a group may be computed elsewhere first. What is predicted, in prompt
tokens that the stream's group computes in the same time:

      here   = queued + work + new · streams · w                         at the stream's group
      apart  = (queued' + work') · speed + lacking · pull + overhead     at a prefill group

| | |
|---|---|
| `new` | prompt tokens to compute there: neither cached there nor to be pulled |
| `work`, `work'` | these tokens there, and in part those that are to be loaded or pulled, as in all of routing |
| `queued`, `queued'` | prompt tokens of other requests that are to be computed there first |
| `streams` | requests at the stream's group; one more at a `decode` group, for the next one that comes |
| `w` | how much a second of a running stream counts beside one of the request (`RoutingSettings.stream_weight`) |
| `speed` | time that a token takes at the prefill group, in parts of that at the stream's; 1 until measured |
| `lacking` | prompt tokens that the stream's group has not cached |
| `pull` | time to pull a token, as a part of the time to compute it, as in all of routing |
| `overhead` | what a second attempt and the prompt's last, partial chunk cost (`RoutingSettings.apart_tokens`) |

The prompt is computed apart if that is less. If `new` is less than `RoutingSettings.long_tokens`, it never is.
Most pulls run while the prompt is computed, so `lacking · pull` is rather too much.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from trunkline.router.routing.controllers import FloatArray
from trunkline.router.routing.index import IntArray
from trunkline.router.routing.policies import RoutingSettings

PREFILL: Final = "prefill"
DECODE: Final = "decode"


class Prospect(NamedTuple):
    """What is known of a request at all controllers; arrays are by controller."""

    work: FloatArray
    """Prompt tokens to compute; those that are loaded or pulled count in part."""
    queued: FloatArray
    """Prompt tokens of other requests that have still to be computed."""
    requests: FloatArray
    """Requests that have not ended."""
    token_us: FloatArray
    """Measured time to compute a prompt token; 0: not known."""


class Stream(NamedTuple):
    """The group where a request's stream is to go on."""

    controller: int
    new: int
    """Prompt tokens that it would compute: it has not cached them, and cannot pull them."""
    lacking: int
    """Prompt tokens that it has not cached."""
    pull_worth: float
    """Part of the work of computing a token that pulling it saves, 0 to 1."""
    is_decode: bool
    """Whether its role is `decode`."""


def prefill_group(stream: Stream, prefills: IntArray, prospect: Prospect, settings: RoutingSettings) -> int:
    """Return the group that is to compute a prompt whose stream goes on elsewhere; -1: the stream's own group.

    Args:
        prefills: the prefill groups that could compute it.
    """
    at = stream.controller
    if stream.new < settings.long_tokens or not len(prefills):
        return -1
    streams = float(prospect.requests[at]) + stream.is_decode
    here = float(prospect.queued[at] + prospect.work[at]) + stream.new * streams * settings.stream_weight
    speed = np.ones(len(prefills))
    if prospect.token_us[at] > 0:
        measured = prospect.token_us[prefills]
        speed = np.where(measured > 0, measured / prospect.token_us[at], 1.0)
    pulled = stream.lacking * (1.0 - stream.pull_worth) + settings.apart_tokens
    apart = (prospect.queued[prefills] + prospect.work[prefills]) * speed + pulled
    best = int(apart.argmin())
    return int(prefills[best]) if apart[best] < here else -1
