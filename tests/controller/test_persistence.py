"""What is found again after a restart: an engine over a real index, and simulated ranks' disks, which survive.

A kill takes the engine, host memory and device with it at any moment; the disks stay as they are, with writes that
nobody has acknowledged, and the index as it was flushed. What is read from then on is checked as always: a slot
gives back what was written under that name and generation, or nothing, and the workers see each token.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from controller.module_harness import ask, jobs_of, words
from controller.tier_harness import CHUNK, TIERED, Session, cut_of, settle, simulate, tiers_of
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.module_prompts import text
from simulation.traffic import Mix, Traffic

from trunkline.controller.engine.disk_chunks import take_disk_changes
from trunkline.controller.engine.engine import Engine
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.storage.persistence import Persistence

CONFIG = replace(TIERED, remote=False, ranks=2)
FINGERPRINT = b"a model"
EPOCH = 1.7e9
SEEDS = seeds(3)
PATH_CHUNKS = 16
"""What one chunk that is missed takes with it, at most: its path below. Few chunks in all are few paths."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute or more lies between two new databases: their boots are numbered by it."""
    minutes = itertools.count(1)
    clock = SimpleNamespace(time=lambda: EPOCH + 60_000.0 * next(minutes), monotonic=time.monotonic)
    monkeypatch.setattr("trunkline.controller.storage.database.time", clock)


class Machine:
    """A controller that is started again and again over the same disks."""

    def __init__(self, folder: Path, config: EngineConfig = CONFIG, *, fingerprint: bytes = FINGERPRINT) -> None:
        self.path = folder / "index.sqlite"
        self.config = config
        self.fingerprint = fingerprint
        self.simulation: Simulation
        self.persistence: Persistence
        self.restored = 0
        self.wall = EPOCH
        self.start(simulate(config))

    def start(self, simulation: Simulation) -> None:
        """The engine begins with what the index says; a simulation that has run before gives its disks."""
        self.simulation = simulation
        self.persistence = Persistence(str(self.path), self.fingerprint, self.wall, simulation.now)
        stored = self.persistence.load(self.config.disk_slots, simulation.now)
        first = self.persistence.first_generation
        engine = simulation.engine = Engine(self.config, 1, first, stored, simulation.now)
        for health in simulation.tree.tiers.health.values():
            health.read_us = 1.0
        self.restored = sum(node.disk_ready for node in simulation.tree.nodes())
        simulation.wanted.disk_changes.clear()
        check_integrity(engine.scheduler)

    def follow(self) -> None:
        """Write down what has changed on disk."""
        self.persistence.note([*self.simulation.wanted.disk_changes, *take_disk_changes(self.simulation.tree)])
        self.simulation.wanted.disk_changes.clear()

    def stop(self) -> None:
        """In order: what is known is written down."""
        settle(self.simulation)
        self.follow()
        self.persistence.close()

    def take_turns(self, ttls: dict[Session, float]) -> None:
        """Let sessions take a turn each, of which nothing is written before it has ended and its time is known."""
        simulation = self.simulation
        simulation.tier_pace = 0.0
        for session, ttl in ttls.items():
            request = session.send(20, ttl=ttl)
            stream = simulation.streams[request]
            while stream.ended is None:
                simulation.step()
            session.ended(request)
        simulation.tier_pace = 0.5

    def restart(self, simulation: Simulation | None = None) -> Simulation:
        """On another day, by another clock."""
        before, self.wall = self.simulation, self.wall + 1000.0
        self.persistence.close()  # what it was told is in the file; of the last events it may know nothing
        simulation = simulation or simulate(self.config)
        simulation.now += random.Random(len(before.streams)).uniform(0.0, 1e6)
        simulation.tiers.disk = before.tiers.disk
        self.start(simulation)
        return simulation


def test_a_session_grows_over_several_runs(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    session = Session(machine.simulation)
    session.turn(10)
    for _ in range(4):
        machine.stop()
        session.simulation = machine.restart()
        stored = (len(session.history) - 1) // CHUNK * CHUNK
        assert sum(tiers_of(session.turn(6))) == stored


def test_what_stands_behind_a_cut_is_found_after_a_restart(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    session = Session(machine.simulation)
    session.turn(30)
    settle(machine.simulation)
    machine.follow()  # on disk, and in the index, before it is moved
    session.turn(5, drops=((4, 16),))
    machine.stop()
    for _ in range(2):
        session.simulation = machine.restart()
        stream = session.turn(3, drops=((4, 16),))
        assert stream.started is not None
        assert stream.started.cut == "kept"
        assert sum(tiers_of(stream)) >= len(stream.prompt) - 3 - 2 * CHUNK
        machine.stop()
    session.simulation = machine.restart()
    other = Session(session.simulation, start=900)
    other.history = list(session.history)
    assert sum(tiers_of(other.turn(2))) == 16, "who sees everything finds the head and what was cut off"


def test_edits_go_on_after_restarts(tmp_path: Path) -> None:
    """In each run one more range is dropped, of what an earlier run computed or moved behind a cut."""
    machine, drops = Machine(tmp_path), list[tuple[int, int]]()
    session = Session(machine.simulation)
    session.turn(30)
    for more in ((5, 6), (9, 11), (14, 21), (22, 23), (29, 30)):
        machine.stop()
        session.simulation = machine.restart()
        drops.append(more)
        stream = session.turn(5, drops=tuple(drops))
        assert cut_of(stream) == "kept"
        assert sum(tiers_of(stream)) >= len(stream.prompt) - 5 - 2 * CHUNK


def test_texts_of_modules_are_found_after_a_restart(tmp_path: Path) -> None:
    """With their last chunks, which are not full, at another place, and the own tokens of prompts, too."""
    machine = Machine(tmp_path)
    root, city = text(words(0, 10), 0), text(words(20, 7), 10, parent=0)
    ask(machine.simulation, [root, city], [(17, 6)])
    machine.stop()
    simulation = machine.restart()
    assert machine.restored == 3 + 2 + 2
    assert tiers_of(ask(simulation, [root, city], [(17, 6)])) == [0, 0, 17 + 5, 0]
    moved = ask(simulation, [root, text(words(20, 7), 40, parent=0)], [(47, 1)])
    assert moved.cached_tokens == 17
    assert jobs_of(simulation).started_texts == 0
    machine.stop()
    other = ask(machine.restart(), [text(words(20, 7), 10)], [(17, 1)], own=[3])
    assert other.cached_tokens == 0, "without the root it is another text"


def test_salts_stay_apart_over_a_restart(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    prompt = list(range(30))
    machine.simulation.submit(prompt, 2, salt=b"a")
    machine.simulation.run()
    machine.stop()
    simulation = machine.restart()
    requests = [simulation.submit(prompt, 2, salt=salt) for salt in (b"", b"b", b"a")]
    simulation.run()
    found = [sum(tiers_of(simulation.streams[request])) for request in requests]
    assert found == [0, 0, 28]


@pytest.mark.parametrize(
    ("change", "fingerprint"),
    [
        ({"model_fingerprint": b"other"}, b"other"),
        ({"model_fingerprint": b"other"}, FINGERPRINT),
        ({"chunk_size": 8}, b"other"),
        ({"disk_slots": 0}, FINGERPRINT),
    ],
)
def test_another_model_begins_with_nothing(tmp_path: Path, change: dict[str, object], fingerprint: bytes) -> None:
    """Also where the index is this model's: roots carry the model in their names."""
    machine = Machine(tmp_path)
    Session(machine.simulation).turn(30)
    machine.stop()
    other = Machine(tmp_path, replace(CONFIG, **change), fingerprint=fingerprint)
    assert other.restored == 0
    other.simulation.tiers.disk = machine.simulation.tiers.disk
    stream = Session(other.simulation).turn(30)
    assert sum(tiers_of(stream)) == 0


@pytest.mark.parametrize("later", [False, True])
def test_what_was_over_before_this_machine_started_is_over(tmp_path: Path, later: bool) -> None:
    """By a clock that began when the machine did, it ended at a negative time; 0 would say never."""
    machine = Machine(tmp_path)
    short, ever = Session(machine.simulation), Session(machine.simulation, 500)
    machine.take_turns({short: 500.0, ever: 0.0})
    machine.stop()
    machine.wall += 1e6
    simulation = simulate(CONFIG)
    simulation.now = 3.0 if later else 0.0
    simulation.tiers.disk = machine.simulation.tiers.disk
    machine.start(simulation)
    tree = simulation.tree
    assert machine.restored == 10
    first = {node.key[:2]: node for node in tree.nodes() if node.depth == 1}
    ended, kept = first[(100).to_bytes(2, "little")], first[(500).to_bytes(2, "little")]
    assert 0.0 < ended.expires < 1.0
    assert kept.expires == math.inf
    simulation.now = max(simulation.now, 1.0)
    settle(simulation)
    assert len(list(tree.nodes())) == 5
    for session, found in ((short, 0), (ever, 20)):
        session.simulation = simulation
        assert sum(tiers_of(session.turn(3))) == found


def test_chunks_written_while_their_request_ran_end_with_it_after_a_restart(tmp_path: Path) -> None:
    """They came into the index before their end of life was known. It is the request's, as it was in memory."""
    machine = Machine(tmp_path)
    simulation = machine.simulation
    session = Session(simulation)
    request = session.send(20, max_tokens=40, ttl=500.0)
    simulation.step_until(lambda: sum(node.disk_ready for node in simulation.tree.nodes()) >= 5)
    machine.follow()
    assert simulation.streams[request].ended is None
    simulation.run()
    session.ended(request)
    machine.stop()
    simulation = machine.restart()
    assert machine.restored == 14
    settle(simulation)
    assert not list(simulation.tree.nodes()), "the time of all of them was over before the restart"


def test_a_lost_index_is_an_empty_cache(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    session = Session(machine.simulation)
    session.turn(30)
    machine.stop()
    machine.path.write_bytes(b"this is no database" * 1000)
    session.simulation = machine.restart()
    assert machine.restored == 0
    assert sum(tiers_of(session.turn(3))) == 0
    machine.stop()
    session.simulation = machine.restart()
    assert machine.restored == 10, "slots that still held old chunks are written under newer generations"
    assert sum(tiers_of(session.turn(3))) == 40


def whole(simulation: Simulation) -> set[bytes]:
    """Names of the chunks that the engine thinks to be on disk and that all disks have, with all that is above."""
    tree = simulation.tree
    slots = tree.tiers.copies.disk
    found: set[bytes] = {root.name for root in tree.roots()}
    for node in tree.nodes():  # parents first
        assert node.parent is not None
        held = (node.name, slots.generation(node.disk)) if node.disk_ready else None
        on_all = all(rank.get(node.disk, (b"", 0, []))[:2] == held for rank in simulation.tiers.disk)
        if held is not None and on_all and node.parent.name in found:
            found.add(node.name)
    return found - {root.name for root in tree.roots()}


def run_and_kill(machine: Machine, rng: random.Random, traffic_seed: int, modules: float) -> tuple[int, int]:
    """Restart, and random traffic up to the next kill; chunks that were on disk before the start, and after it."""
    mix = Mix(cuts=0.4, beams=0.1, modules=modules, calls=modules / 20)
    traffic = Traffic(machine.config, mix, traffic_seed, check=False)
    traffic.simulation.pace_s = 1e-5
    before = whole(machine.simulation)
    machine.restart(traffic.simulation)
    after = whole(machine.simulation)
    for _ in range(rng.randrange(20, 60)):
        while traffic.live >= traffic.mix.crowd:
            traffic.act()
            machine.follow()
        traffic.submit()
        for _ in range(rng.randrange(8)):
            traffic.act()
            machine.follow()
    for _ in range(rng.randrange(4)):
        traffic.act()  # of this the index is not told any more
    return len(before), len(before & after)


@pytest.mark.parametrize("modules", [0.0, 0.5])
def test_killed_at_any_moment(tmp_path: Path, modules: float) -> None:
    """Random traffic with cuts, and kills in the middle of it: at least 95 % of what was on disk is found. What
    the index did not see any more, or saw too early, is a miss: all text is right."""
    held = found = restored = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        disk_slots = rng.choice([30, 200])
        machine = Machine(folder, replace(CONFIG, host_slots=20, disk_slots=disk_slots))
        for run in range(4):
            before, after = run_and_kill(machine, rng, 100 * seed + run % 2, modules)
            held, found = held + before, found + after
        machine.restart()
        restored += machine.restored
        settle(machine.simulation)
    assert held
    assert restored
    assert found >= 0.95 * held - PATH_CHUNKS, f"{found} of {held}"


def test_a_session_of_one_run_is_right_in_the_next_whatever_became_of_it(tmp_path: Path) -> None:
    """Killed before the index was told of a cut, of overwritten slots, of anything."""
    for told in (0, 1, 4, 7, 10, 11):
        folder = tmp_path / str(told)
        folder.mkdir()
        machine = Machine(folder, replace(CONFIG, disk_slots=12, host_slots=12))
        session = Session(machine.simulation)
        for turn in range(6):
            session.turn(6, drops=((4, 12),) if len(session.history) > 24 else ())
            settle(machine.simulation)
            if turn == told // 2:
                machine.follow()
        session.simulation = machine.restart()
        session.turn(3, drops=((4, 12),) if told % 2 else ((4, 20),))
        check_integrity(machine.simulation.engine.scheduler)
