"""What a router finds of a prompt, as a real engine tells of its chunks, against what the engine then finds."""

from __future__ import annotations

import random

import msgspec
import pytest
from seeds import seeds
from simulation.driver import Simulation
from simulation.module_prompts import Schemas, layout, text
from simulation.told import truth

from trunkline.controller.engine_config import EngineConfig
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.routing.core import Decision, RouteRequest, RoutingCore
from trunkline.router.routing.names import KvIdentity, prompt_names

CHUNK = 8
FINGERPRINT = b"some model"


class Controller:
    """An engine, and a router that is told all of it."""

    def __init__(self, *, positions_shift: bool = True) -> None:
        config = EngineConfig(
            num_blocks=600,
            chunk_size=CHUNK,
            max_context=600,
            token_budget=256,
            max_rows=16,
            model_fingerprint=FINGERPRINT,
            positions_shift=positions_shift,
        )
        self.simulation = Simulation(config, check=False)
        self.identity = KvIdentity(FINGERPRINT, config.dtype, CHUNK, positions_shift)

    def predict(self, request: RouteRequest) -> Decision:
        """As a router that has just heard of everything."""
        told = truth(self.simulation.engine.scheduler.kv.tree)
        core = RoutingCore("0")
        core.traits.set_identity(0, self.identity)
        core.set_available(0, True)
        core.index.apply(0, b"".join(told), bytes(told.values()))
        return core.route(request, 0.0)

    def run(
        self, prompt: list[int], max_tokens: int, request: RouteRequest | None = None
    ) -> tuple[Decision, int, list[int]]:
        """The prediction, the cached tokens that there were, and the output.

        Args:
            request: salt, drops and layout; None: none.
        """
        request = msgspec.structs.replace(request or RouteRequest(b""), tokens=pack_int32(prompt))
        predicted = self.predict(request)
        number = self.simulation.submit(
            prompt, max_tokens, salt=request.salt, drops=request.drops, layout=request.layout
        )
        self.simulation.run()
        stream = self.simulation.streams[number]
        assert stream.started is not None, stream.ended
        assert predicted.new_tokens + predicted.cached_tokens == len(stream.prompt)
        return predicted, stream.started.cached_tokens, stream.output


@pytest.mark.parametrize("seed", seeds(1))
def test_plain_prompts(seed: int) -> None:
    rng, controller, hits = random.Random(seed), Controller(), 0
    histories: list[tuple[bytes, list[int]]] = [(b"", [])]
    for _ in range(40):
        salt, known = rng.choice(histories)
        if rng.random() < 0.2:
            salt = rng.choice((b"", b"a"))
        prompt = known[: rng.randrange(len(known) + 1)] if rng.random() < 0.3 else known
        prompt = (prompt + [rng.randrange(3) for _ in range(rng.randint(1, 40))])[:300]
        predicted, cached, output = controller.run(prompt, rng.randint(1, 20), RouteRequest(b"", salt=salt))
        # Whole chunks only, and of a prompt that is all there the last token is computed again.
        assert predicted.cached_tokens - 1 <= cached < predicted.cached_tokens + CHUNK
        assert sum(predicted.tier_tokens[1:]) == 0
        histories.append((salt, prompt + output))
        hits += predicted.cached_tokens
    assert hits > 20


@pytest.mark.parametrize("positions_shift", [True, False])
@pytest.mark.parametrize("seed", seeds(1))
def test_prompts_with_modules(seed: int, positions_shift: bool) -> None:
    rng, controller = random.Random(seed), Controller(positions_shift=positions_shift)
    schemas = Schemas(rng, CHUNK)
    prompts = [schemas.prompt() for _ in range(12)]
    hits = near = 0
    for turn in range(60):
        own, made = rng.choice(prompts)
        predicted, cached, _ = controller.run(own, rng.randint(1, 12), RouteRequest(b"", layout=made))
        assert predicted.cached_tokens - 1 <= cached, turn
        hits += predicted.cached_tokens
        # A text that another one begins with is found in it, which is not told.
        near += cached < predicted.cached_tokens + CHUNK
    assert hits > 20
    assert near >= 20


@pytest.mark.parametrize("seed", seeds(2))
def test_prompts_of_which_something_is_dropped(seed: int) -> None:
    rng, kept = random.Random(seed), 0
    for _ in range(15):
        controller = Controller(positions_shift=rng.random() < 0.7)
        history = [rng.randrange(3) for _ in range(rng.randint(40, 120))]
        _, _, output = controller.run(history, 10)
        prompt = history + output + [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        edges = sorted(rng.sample(range(len(prompt) - 2), rng.choice((2, 4))))
        drops = tuple(zip(edges[::2], edges[1::2], strict=True))
        predicted, cached, _ = controller.run(prompt, 5, RouteRequest(b"", drops=drops))
        assert predicted.cached_tokens - CHUNK <= cached < predicted.cached_tokens + CHUNK
        kept += cached > 0
    assert kept


@pytest.mark.parametrize("seed", seeds(2))
def test_conversations_that_drop_more_with_each_turn(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        controller, drops = Controller(), list[tuple[int, int]]()
        history = [rng.randrange(9) for _ in range(rng.randint(20, 60))]
        controller.run(history, 1)
        for _ in range(7):
            last = drops[-1][1] if drops else 0
            if len(history) - last > 40 and rng.random() < 0.8:
                start = rng.randint(last + 1, len(history) - 30)
                drops.append((start, rng.randint(start + 1, len(history) - 20)))  # before the turn's last chunks
            history += [rng.randrange(9) for _ in range(rng.randint(1, 40))]
            predicted, cached, _ = controller.run(history, 1, RouteRequest(b"", drops=tuple(drops)))
            assert predicted.cached_tokens - CHUNK <= cached < predicted.cached_tokens + 2 * CHUNK
            history.append(rng.randrange(9))


def test_names_depend_on_all_that_kv_depends_on() -> None:
    tokens = pack_int32(range(20))
    first = prompt_names(RouteRequest(tokens), KvIdentity(b"m", "float32", 4)).chains[0].names
    assert len(first) == 5
    others = [
        prompt_names(RouteRequest(tokens, salt=b"x"), KvIdentity(b"m", "float32", 4)).chains[0].names,
        prompt_names(RouteRequest(tokens), KvIdentity(b"n", "float32", 4)).chains[0].names,
        prompt_names(RouteRequest(tokens), KvIdentity(b"m", "bfloat16", 4)).chains[0].names,
        prompt_names(RouteRequest(tokens), KvIdentity(b"m", "float32", 5)).chains[0].names,
        prompt_names(RouteRequest(pack_int32([7, *range(1, 20)])), KvIdentity(b"m", "float32", 4)).chains[0].names,
    ]
    assert all(not set(first) & set(other) for other in others)
    longer = (
        prompt_names(RouteRequest(tokens + pack_int32([1, 2, 3])), KvIdentity(b"m", "float32", 4)).chains[0].names
    )
    assert longer == first


def test_a_text_counts_only_as_a_whole() -> None:
    core = RoutingCore("0")
    identity = KvIdentity(b"m", "float32", 4)
    core.traits.set_identity(0, identity)
    core.set_available(0, True)
    made = layout([text(range(10), 0), text(range(6), 10, 0)], [(16, 5)])
    request = RouteRequest(pack_int32(range(5)), layout=made)
    first, second, own = prompt_names(request, identity).chains
    assert (len(first.names), first.last_tokens, first.least) == (3, 2, 3)
    assert (len(second.names), second.last_tokens, second.least) == (2, 2, 2)
    assert len(own.names) == 1
    core.index.apply(0, b"".join(first.names[:2]), b"\1\1")
    assert core.route(request, 0.0).cached_tokens == 0
    core.index.apply(0, first.names[2], b"\1")
    assert core.route(request, 0.0).cached_tokens == 10
    core.index.apply(0, b"".join([*second.names, *own.names]), b"\1\2\4")
    decision = core.route(request, 0.0)
    assert (decision.tier_tokens, decision.new_tokens) == ([14, 2, 4, 0], 1)


def test_layouts_without_sense_are_refused() -> None:
    made = layout([text(range(3), 0, parent=0)], [(3, 1)])
    with pytest.raises(ValueError, match="text 0 has text 0 above it"):
        prompt_names(RouteRequest(pack_int32([1]), layout=made), KvIdentity(b"", "", 4))
