"""Whether a long prompt is computed at another group than the one where its stream goes on. Pure.

Groups have *roles*. A `prefill` group computes long prompts for others; it gets other requests only if no other
group can take them. A `decode` group computes short prompts and goes on with streams. A group of role `both` does
all, as every group does without roles.

While a group computes a prompt, its running streams wait: each of them for about the time that the prompt takes.
So a request whose stream is to go on at a group may be computed elsewhere first. What is predicted, in prompt
tokens that a group computes in the same time:

      here   = queued + work + new · streams · w                 at the stream's group
      apart  = queued' + work' + lacking · pull + overhead       at a prefill group

| | |
|---|---|
| `new` | prompt tokens to compute there: neither cached there nor to be pulled |
| `work`, `work'` | these tokens there, and in part those that are to be loaded or pulled, as in all of routing |
| `queued`, `queued'` | prompt tokens of other requests that are to be computed there first |
| `streams` | requests at the stream's group; one more at a `decode` group, for the next one that comes |
| `w` | how much a second of a running stream counts beside one of the request (`RoutingSettings.stream_weight`) |
| `lacking` | prompt tokens that the stream's group has not cached |
| `pull` | time to pull a token there, as a part of the time to compute it at the prefill group |
| `overhead` | what a second attempt and the prompt's last, partial chunk cost (`RoutingSettings.apart_tokens`) |

The prompt is computed apart if that is less. If `new` is less than `RoutingSettings.long_tokens`, it never is.
Most pulls run while the prompt is computed, so `lacking · pull` is rather too much. Groups are taken to be equally
fast: one that seldom computes prompts has not measured how fast it is.
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
    times: FloatArray
    """Measured times to compute and to pull a prompt token, `[controllers, 2]`; 0: not known."""


class StreamGroup(NamedTuple):
    """The group where a request's stream is to go on."""

    controller: int
    new: int
    """Prompt tokens that it would compute: it has not cached them, and cannot pull them."""
    lacking: int
    """Prompt tokens that it has not cached."""
    is_decode: bool
    """Whether its role is `decode`."""


def prefill_group(stream: StreamGroup, prefills: IntArray, prospect: Prospect, settings: RoutingSettings) -> int:
    """Return the group that is to compute a prompt whose stream goes on elsewhere; -1: the stream's own group.

    Args:
        prefills: the prefill groups that could compute it.
    """
    at = stream.controller
    if stream.new < settings.long_tokens or not len(prefills):
        return -1
    streams = float(prospect.requests[at]) + stream.is_decode
    here = float(prospect.queued[at] + prospect.work[at]) + stream.new * streams * settings.stream_weight
    compute_us, pull_us = prospect.times[prefills, 0], prospect.times[at, 1]
    pull = np.full(len(prefills), 1.0 - settings.peer_worth)
    if pull_us > 0:
        np.divide(pull_us, compute_us, out=pull, where=compute_us > 0)
    apart = prospect.queued[prefills] + prospect.work[prefills] + stream.lacking * pull + settings.apart_tokens
    best = int(apart.argmin())
    return int(prefills[best]) if apart[best] < here else -1
