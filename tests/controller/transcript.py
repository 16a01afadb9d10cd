"""Golden transcripts: what an engine is told, and what it wants done, as text that can be read without the code.

    engine num_blocks=16 chunk_size=4
                                            a blank line ends a block
    step
      submit 1 prompt 1-9 max 3             events, one a line; then `Engine.step`, 10 ms after the last one
    ----
    plan 1                                  the `Ready`, in the order in which it has to be carried out
      join 1: tokens 1-9, prompt of 9, blocks 0 1 2

Numbers in a row are written as a range. What the workers do is told by hand: `result 1 tokens 40` says that step 1
sampled token 40.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace
from simulation.module_prompts import layout, text

from trunkline.controller.engine.disk_chunks import ChunkReparented, DiskChange, DiskChunk, SlotFreed
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.events import (
    AbortRequest,
    CallTexts,
    DropCache,
    EngineOutputs,
    Event,
    ExpectRequest,
    Ready,
    WorkersBack,
    WorkersLost,
)
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import BeamSearch, Grammar, ModulesCall, Submit
from trunkline.controller.reports import BeamStep, GrammarReady, MoveOutcome, MovesDone, Probed, StepResult
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32, unpack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import Flushed
from trunkline.worker.messages import (
    CompileGrammar,
    ForgetChunks,
    Join,
    PeerAt,
    Probe,
    Sampling,
    StepPlan,
    TierOrder,
)

PACE_S = 0.01


def numbers(words: str) -> list[int]:
    """Return the numbers that "1-4,9" stands for; -1 for "none"."""
    found: list[int] = []
    for part in words.split(","):
        if part == "none":
            found.append(-1)
            continue
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def ranges(values: Sequence[int]) -> str:
    """Write numbers down so that `numbers` reads them."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts) or "none"


def pairs(words: Sequence[str]) -> dict[str, str]:
    """Return the words two by two."""
    return dict(zip(words[::2], words[1::2], strict=True))


class Transcript:
    """One engine, and what it is told."""

    def __init__(self) -> None:
        self.engine: Engine
        self.now = 0.0

    def replay(self, script: str) -> str:
        """Carry out the commands of a transcript; return it with what the engine says now."""
        done = [self._block(block) for block in script.strip().split("\n\n")]
        return "\n\n".join(done) + "\n"

    def _block(self, block: str) -> str:
        told, _, _ = block.partition("\n----")
        lines = [line for line in told.split("\n") if not line.startswith("#")]
        if not lines:
            return told
        command, *words = lines[0].split()
        if command == "engine":
            settings = (word.partition("=") for word in words)
            config = EngineConfig(
                **{name: float(v) if "." in v else int(v) if v.isdigit() else v for name, _, v in settings}  # type: ignore[arg-type]
            )
            self.engine = Engine(config)
            return told
        assert command == "step", f"unknown command: {command}"
        self.now += float(words[1]) if words[:1] == ["after"] else PACE_S
        ready = self.engine.step([self._event(line.split()) for line in lines[1:]], self.now)
        said = list(shown(ready, self.now, has_rows=bool(len(self.engine.scheduler.row_set)))) or ["nothing to do"]
        return "\n".join([told, "----", *said])

    def _event(self, words: list[str]) -> Event:
        kind, *rest = words
        match kind:
            case "submit":
                return request_of(int(rest[0]), pairs(rest[1:]))
            case "expect":
                return ExpectRequest((0, 0), request_of(0, pairs(rest)))
            case "abort":
                return AbortRequest(int(rest[0]), int(pairs(rest[1:]).get("sample", -1)))
            case "result":
                return self._result(int(rest[0]), pairs(rest[1:]))
            case "moved":
                said = pairs(rest[1:])
                status = ["done", "missing", "failed"].index(said.get("status", "done"))
                outcomes = [MoveOutcome(move, status, 200) for move in numbers(rest[0])]
                return MovesDone(int(said.get("rank", 0)), self.engine.epoch, outcomes)
            case "probed":
                return Probed(0, self.engine.epoch, int(rest[0]), int(pairs(rest[1:])["present"]))
            case "compiled":
                return GrammarReady(int(rest[0]), " ".join(rest[1:]))
            case "drop-cache":
                return DropCache()
            case "encode":
                said = pairs(rest[1:])
                texts = [text(numbers(said["text"]), int(said.get("at", 0)))]
                call = ModulesCall(int(rest[0]), "encode", texts, pin_name=said.get("pin", ""))
                return CallTexts(call.ticket, call)
            case "unpin":
                call = ModulesCall(int(rest[0]), "unpin", pin_name=rest[1])
                return CallTexts(call.ticket, call)
            case "workers-lost":
                return WorkersLost(self.engine.epoch + 1)
            case "workers-back":
                return WorkersBack(self.engine.config)
        raise ValueError(f"unknown event: {kind}")

    def _result(self, step: int, said: dict[str, str]) -> StepResult:
        tokens = pack_int32(numbers(said["tokens"])) if "tokens" in said else b""
        elapsed_us = int(1000 * float(said.get("ms", 1)))
        result = StepResult(step, int(said.get("epoch", self.engine.epoch)), tokens, elapsed_us)
        if "search" in said:
            scores = np.array([float(score) for score in said["scores"].split(",")], "<f4").tobytes()
            found = BeamStep(pack_int32(numbers(said["parents"])), pack_int32(numbers(said["next"])), scores)
            result = replace(result, beams={int(said["search"]): found})
        return result


def request_of(number: int, said: dict[str, str]) -> Request:
    """Make a request out of what a line says of it."""
    own = numbers(said["prompt"])
    drops = tuple(
        (first, first + len(numbers(part))) for part in said.get("drop", "").split() for first in numbers(part)[:1]
    )
    places = None
    if "module" in said:  # at position 0, the request's own tokens behind it
        module = text(numbers(said["module"]), 0)
        places = layout([module], [(len(numbers(said["module"])), len(own))])
    submit = Submit(
        number,
        pack_int32(own),
        len(own),
        int(said.get("max", 1)),
        Sampling(seed=number),
        stop_token_ids=numbers(said["stop"]) if "stop" in said else [],
        n=int(said.get("n", said.get("beams", 1))),
        beam=BeamSearch(int(said["beams"])) if "beams" in said else None,
        priority=int(said.get("priority", 0)),
        grammar=Grammar("regex", said["regex"]) if "regex" in said else None,
        drops=pack_int32(np.array(drops, np.int32)),
        layout=places,
    )
    return Request.of(number, submit)


def shown(ready: Ready, now: float, *, has_rows: bool) -> Iterator[str]:
    """Tell what has to be done, in order.

    Args:
        has_rows: whether any sequence decodes.
    """
    for message in ready.grammars:
        if isinstance(message, CompileGrammar):
            yield f"workers compile grammar {message.grammar}: {message.kind} {message.text}"
        else:
            yield f"workers forget grammar {message.grammar}"
    if ready.plan is not None:
        yield from plan_shown(ready.plan, has_rows=has_rows)
    yield from (f"index: {line}" for change in ready.disk_changes for line in disk_shown(change))
    for order in ready.orders:
        yield from order_shown(order)
    if ready.outputs is not None:
        yield from (f"routers: {line}" for line in outputs_shown(ready.outputs))
    for timeline in ready.ended:
        yield f"log: request {timeline.request.id} is over ({timeline.reason}), {timeline.output_tokens} tokens"
    if ready.problem:
        yield f"the workers cannot be trusted: {ready.problem}"
    if ready.again:
        yield "step again at once"
    if ready.wake_at < float("inf"):
        yield f"step again in {(ready.wake_at - now) * 1000:.0f} ms"


def rows_of(packed: bytes, columns: int) -> list[list[int]]:
    """Return a packed array's rows."""
    return [list(row) for row in unpack_int32(packed, columns).tolist()]


def plan_shown(plan: StepPlan, *, has_rows: bool) -> Iterator[str]:
    """Tell a plan in the order in which workers apply it."""
    yield f"plan {plan.step}" if plan.epoch == 1 else f"plan {plan.step} of epoch {plan.epoch}"
    if plan.leaves:
        yield f"  leave: {ranges(unpack_int32(plan.leaves).tolist())}"
    for join in plan.joins:
        yield "  " + join_shown(join)
    for source, target, first, count in rows_of(plan.copies, 4):
        yield f"  copy the KV of tokens {ranges(range(first, first + count))} of block {source} to block {target}"
    for sequence, index, block in rows_of(plan.blocks, 3):
        yield f"  sequence {sequence}: table entry {index} is block {block}"
    for block, slot, _ in rows_of(plan.saves, 3):
        yield f"  save block {block} to host slot {slot}"
    for block, slot, _ in rows_of(plan.loads, 3):
        yield f"  load block {block} from host slot {slot}"
    for sequence, start, count, write_from, sample in rows_of(plan.prefill, 5):
        stored = f", stored from {write_from} on" if write_from > start else ""
        sampled = ", then sample" if sample else ""
        yield f"  sequence {sequence}: compute tokens {ranges(range(start, start + count))}{stored}{sampled}"
    if plan.rows is None and has_rows:
        yield "  decode the same sequences"
    elif plan.rows is not None:
        yield f"  decode sequences {','.join(map(str, unpack_int32(plan.rows).tolist())) or 'none'}"
        for first, last, start, stop in rows_of(plan.runs or b"", 4):
            yield f"    rows {ranges(range(first, last))} share their blocks {ranges(range(start, stop))}"
    for fork in plan.forks:
        blocks = ranges(unpack_int32(fork.blocks).tolist())
        yield f"  fork sequence {fork.child} from {fork.parent}, blocks {blocks}"
    for block, slot, _ in rows_of(plan.late_saves, 3):
        yield f"  save block {block} to host slot {slot} as it is computed"
    if plan.save_fence:
        yield f"  not before the saves up to plan {plan.save_fence}"
    if plan.load_fence:
        yield f"  not before the loads up to plan {plan.load_fence}"


def join_shown(join: Join) -> str:
    """Tell who joins."""
    blocks = ranges(unpack_int32(join.blocks).tolist())
    place = join.beam_position
    beam = f", beam {place.index} of search {place.search}" if place is not None else ""
    extents = f", extents {rows_of(join.extents, 5)}" if join.extents else ""
    tokens = ranges(unpack_int32(join.tokens).tolist())
    prompt = f"prompt of {join.prompt_len}"
    return f"join {join.sequence}: {tokens} from index {join.first}, {prompt}, blocks {blocks}{beam}{extents}"


def disk_shown(change: DiskChange) -> Iterator[str]:
    """Tell a change on disk."""
    match change:
        case DiskChunk():
            yield f"disk slot {change.slot} holds tokens {ranges(unpack_int32(change.tokens).tolist())}"
        case SlotFreed(slot):
            yield f"disk slot {slot} is free"
        case ChunkReparented():
            yield "a chunk has moved behind a cut"


def order_shown(order: TierOrder) -> Iterator[str]:
    """Tell an order to the tiers."""
    if isinstance(order, Probe):
        yield f"probe {order.id}: which of {len(order.names) // 16} chunks does the remote tier have?"
        return
    if isinstance(order, ForgetChunks):
        yield f"delete {len(order.names) // 16} chunks from the remote tier"
        return
    if isinstance(order, PeerAt):
        yield f"peer {order.peer} is at {', '.join(order.endpoints) or 'no place'}"
        return
    for move in order.moves:
        below = {TierKind.DISK: f"disk slot {move.slot}", TierKind.PEER: f"peer {move.peer}"}.get(
            TierKind(move.tier), "the remote tier"
        )
        ways = (f"host slot {move.host_slot}", below)
        source, target = ways if move.is_write else ways[::-1]
        yield f"move {move.id}: {source} to {target}, after plan {order.after}"


def outputs_shown(outputs: EngineOutputs) -> Iterator[str]:
    """Tell what routers are told."""
    for started in outputs.started:
        tiers = [
            f"{count} in {kind.name.lower()}"
            for kind, count in zip(TierKind, started.tier_tokens, strict=True)
            if count
        ]
        found = f" ({', '.join(tiers)})" if tiers else ""
        cut = f", its cut {started.cut}" if started.cut else ""
        miss = f", then missed: {started.miss}" if started.miss else ""
        yield f"request {started.request} starts, {started.cached_tokens} tokens cached{found}{miss}{cut}"
    for requests, samples, tokens in zip(outputs.requests, outputs.samples, outputs.tokens, strict=True):
        for request, sample, token in zip(requests.tolist(), samples.tolist(), tokens.tolist(), strict=True):
            yield f"request {request} {f'sample {sample} ' if sample else ''}token {token}"
    for beams in outputs.beams:
        for found_beam in beams.hypotheses:
            said = ranges(unpack_int32(found_beam.tokens).tolist())
            yield f"request {beams.request} found {said} ({found_beam.reason}, score {found_beam.score:.2f})"
    for finished in outputs.finished:
        sample = f" sample {finished.sample}" if finished.sample >= 0 else ""
        detail = f": {finished.detail}" if finished.detail else ""
        yield f"request {finished.request}{sample} ends ({finished.reason}){detail}"
    for done in outputs.modules:
        detail = f": {done.detail}" if done.detail else ""
        yield f"call {done.ticket} is answered ({done.status}), {done.computed_tokens} tokens computed{detail}"
    for _, reply in outputs.replies:
        if isinstance(reply, Flushed):
            yield f"{reply.blocks_freed} blocks were freed"
        else:
            yield f"{reply.known_tokens} tokens are known, {reply.coming_tokens} have to be fetched"
