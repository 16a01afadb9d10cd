"""What a prompt with modules must lead to, worked out from its layout alone (`trunkline.controller.messages`).

A text's tokens see all tokens of the texts above it, and those before them in their own text. A request's own
tokens, and its output, see every token of a seen range and every own token that stands at a smaller position.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulation.model import MODULES, extend_seen, next_token, text_token

from trunkline.controller.messages import ModuleText, PromptLayout
from trunkline.kvstore.chunks import unpack_int32


def tokens_of(text: ModuleText) -> list[int]:
    return [int(token) for token in unpack_int32(text.tokens)]


def stored_texts(texts: Sequence[ModuleText]) -> list[list[bytes]]:
    """Of each text, what is stored of each of its tokens."""
    stored: list[list[bytes]] = []
    for text in texts:
        above: list[bytes] = []
        parent = text.parent
        while parent >= 0:
            above = stored[parent] + above
            parent = texts[parent].parent
        seen = MODULES
        for value in above:
            seen = extend_seen(seen, value)
        stored.append([])
        for token in tokens_of(text):
            value = text_token(seen, token)
            seen = extend_seen(seen, value)
            stored[-1].append(value)
    return stored


def seen_positions(layout: PromptLayout) -> dict[int, tuple[int, int]]:
    """By position, the text that is seen there and which of its tokens."""
    places: dict[int, tuple[int, int]] = {}
    for index, text in enumerate(layout.texts):
        for start, stop in unpack_int32(text.seen, 2).tolist():
            for token in range(start, stop):
                assert text.position + token not in places
                places[text.position + token] = index, token
    return places


def reaches(layout: PromptLayout) -> dict[int, int]:
    """By position of a seen token, the sum of its distances to all that its text sees there."""
    positions: list[list[int]] = []
    sums: list[list[int]] = []
    for text in layout.texts:
        seen = list(positions[text.parent]) if text.parent >= 0 else []
        sums.append([])
        for position in range(text.position, text.position + len(text.tokens) // 4):
            sums[-1].append(sum(position - other for other in seen))
            seen.append(position)
        positions.append(seen)
    return {position: sums[text][token] for position, (text, token) in seen_positions(layout).items()}


def own_reaches(layout: PromptLayout) -> dict[int, int]:
    """Likewise of the request's own tokens, which see all that stands before them."""
    positions = sorted([*seen_positions(layout), *own_positions(layout)])
    return {p: sum(p - other for other in positions if other < p) for p in own_positions(layout)}


def own_positions(layout: PromptLayout) -> list[int]:
    """Of the request's own prompt tokens, in their order."""
    return [position + i for position, count in unpack_int32(layout.runs, 2).tolist() for i in range(count)]


def prompt_tokens(layout: PromptLayout, own: Sequence[int]) -> list[int]:
    """All that is seen of a prompt, by position."""
    tokens = {p: tokens_of(layout.texts[text])[i] for p, (text, i) in seen_positions(layout).items()}
    tokens |= dict(zip(own_positions(layout), own, strict=True))
    return [tokens[position] for position in sorted(tokens)]


def seen_prompt(layout: PromptLayout, own: Sequence[int]) -> bytes:
    """What is seen behind a whole prompt."""
    stored = stored_texts(layout.texts)
    places, mine = seen_positions(layout), dict(zip(own_positions(layout), own, strict=True))
    assert not places.keys() & mine.keys()
    assert max(mine) > max(places, default=-1), "the last token of a prompt is the request's own"
    seen = MODULES
    for position in sorted([*places, *mine]):
        if position in places:
            text, token = places[position]
            seen = extend_seen(seen, stored[text][token])
        else:
            seen = seen_behind(seen, mine[position])
    return seen


def seen_behind(seen: bytes, token: int) -> bytes:
    """What is seen after one more token of the request's own, or of its output."""
    return extend_seen(seen, text_token(seen, token))


def expected_module_output(
    layout: PromptLayout, own: Sequence[int], seed: int, max_tokens: int, stop_ids: tuple[int, ...] = ()
) -> list[int]:
    """The stream that a request must produce, whatever the schedule."""
    seen = seen_prompt(layout, own)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(seen, seed))
        if output[-1] in stop_ids:
            break
        seen = seen_behind(seen, output[-1])
    return output
