"""Fifteen things always hold. Each has a test that names lines of the code, and that fails if one of these is broken.

    @pytest.mark.invariant(11, "manager/session/manager.py", "the line", "a broken one")

The marks are on tests of all folders. Here are those that no other file is about, and what breaks the lines.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from integrity import check_integrity
from machine import Sessions
from shared_talks import FRONTS, SharedTalks
from talks import Talks, long_text

from manthan.benchmarks.simulator.pool import SimulatedPool
from manthan.manager.driver import HIGH_WATERMARK, LOW_WATERMARK
from manthan.manager.pool import FreeBlock
from manthan.manager.session.persist import WAIT_S, JournalLink, RedisLink
from manthan.manager.tiers.journal import Journal
from manthan.manager.tiers.redis import Circuit, Namespace
from manthan.manager.tiers.redis_sessions import RedisSessions

ALWAYS = {
    1: "No wrong KV: a compressed block of another hash, fingerprint or checksum is a miss. Nothing is unpickled.",
    2: "A block under transfer is referenced until every rank has answered. Nobody frees or overwrites it.",
    3: "The scheduler's thread does no I/O and no encoding, and waits for nothing.",
    4: "Decoded KV is never encoded, whatever the budget does.",
    5: "Budgets are hard: bytes are reserved before encoding.",
    6: "Any failure costs a recompute, never an error, a hang or a crash.",
    7: "A block that sessions share is saved once, and dropped with the last of them.",
    8: "Within a session the last blocks are dropped first.",
    9: "A session, its names and its blocks belong to one tenant.",
    10: "A block is stored only after the step that computes it.",
    11: "A session is restored only to a resume point.",
    12: "A compressed block and its profile never part.",
    13: "No request is held back, and steps do not walk the free queue.",
    14: "Nobody is served decoded KV, nor KV computed behind it, but who brought it and did not ask for exact KV.",
    15: "What lasts or is shared is found only by the same weights, all their bytes.",
}
REPO = Path(__file__).parents[1]
PACKAGES = ("codec", "manager", "policies", "vllm_hooks")


# -- 3 ------------------------------------------------------------------------------------------------


class Stuck:
    """Redis and SQLite, neither of which answers before the end. callers: names of the threads that wait for them."""

    def __init__(self) -> None:
        self.callers, self.is_asked, self.is_over = set[str](), threading.Event(), threading.Event()

    def execute(self, *_: object) -> list[Any]:
        self.callers.add(threading.current_thread().name)
        self.is_asked.set()
        if threading.current_thread() is not threading.main_thread():
            self.is_over.wait()
        return []

    def pipeline(self, **_: object) -> "Stuck":
        return self

    def execute_command(self, *_: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.invariant(3, "manager/tiers/journal.py", "if self._news:", "if self._write(self._news.values(), False):")
@pytest.mark.invariant(
    3,
    "manager/tiers/redis_sessions.py",
    "self._lookups[request_id] = partial(self._look_up, session_id, group, tuple(hashes), needed)",
    "self._look_up(session_id, group, tuple(hashes), needed, self._namespace)",
)
@pytest.mark.parametrize("name", ["manthan-redis", "manthan-journal"])
def test_the_scheduler_s_thread_leaves_redis_and_the_journal_to_others_and_waits_for_neither(
    name: str, tmp_path: Path
) -> None:
    """A session comes, is saved, is overwritten, returns and is released, and all is reset. name: of a thread."""
    stuck, closes = Stuck(), ExitStack()
    too_long = threading.Timer(60, stuck.is_over.set)
    if name == "manthan-redis":
        talks: Talks = SharedTalks()
        sessions = RedisSessions(stuck, Circuit(), Namespace("m", "name"), [1], 1e4, {"engine": "e"}, lambda: None)
        talks.driver._redis = RedisLink(sessions, talks.manager, FRONTS)
        sessions.start()
        closes.callback(sessions.close)
    else:
        talks, journal = Talks(), Journal(tmp_path)
        closes.callback(journal._db.close)
        journal._db = stuck  # type: ignore[assignment]
        talks.driver._journal = JournalLink(journal, talks.manager, ())
        closes.callback(journal.close)
    with closes:
        too_long.start()
        for hints in ({}, {}, {"release": True}):
            request = talks.ask("a b c", "alice", **hints)
            if not talks.serve(request):
                talks.now += WAIT_S  # it goes on without an answer
                assert talks.serve(request)
            talks.finish(request, "a b c d")
            talks.rest()
            talks.overwrite()
        assert stuck.is_asked.wait(60)
        talks.driver.reset(talks.now)
        talks.step()
        assert not stuck.is_over.is_set(), "this thread has waited"
        too_long.cancel()
        stuck.is_over.set()
    assert stuck.callers == {name}


# -- 4 ------------------------------------------------------------------------------------------------


@pytest.mark.invariant(
    4,
    "manager/session/manager.py",
    "length = first_false(marks != Mark.DECODED)",
    "length = first_false(np.array(ids) >= 0)",
)
@pytest.mark.invariant(
    4,
    "manager/session/manager.py",
    "return np.where(self._is_whole(rows), self.blocks.mark[rows], np.uint8(Mark.DECODED))",
    "return self.blocks.mark[rows]",
)
def test_a_session_that_comes_and_goes_a_hundred_times_loses_no_more_than_once() -> None:
    """The tiers have room for one of two sessions, and for some of the other's blocks: more of them in some turns.

    In some turns a compressed block cannot be read, and the request that would compute it is aborted.
    """
    machine = Sessions()
    world = machine.world
    for turn in range(100):
        for who, text in (("alice", "SABABABAB"), ("bob", "SBABA" + "ab" * (turn % 4))):
            machine.texts = [text]
            machine.converse(0, "", "a", 0, 0, who, {}, has_slept=True)  # the pool is overwritten before
            machine.all_is_right()
            if turn % 10 == 9:
                world.start(text, len(text), 5, who, "", {})
                request = world.asked[-1].request
                world.manager.load_started("another", request.rows)
                world.manager.load_finished("another", [(0, request.hashes[1])])
                world.finish(world.asked[-1], 99)
    assert world.seen["loaded"] > 170
    assert world.seen["dropped of 0: budget"] > 100
    assert {stored.kv.generation for of_rank in world.stored for stored in of_rank.values()} <= {0, 1}


# -- 13 -----------------------------------------------------------------------------------------------

BLOCKS = 128


class CountedPool(SimulatedPool):
    """Counts how often its free queue is looked through."""

    walks = 0

    def runway(self, most: int) -> int:
        self.walks += 1
        return super().runway(most)

    def unsaved(self, most: int) -> Iterator[FreeBlock]:
        self.walks += 1
        return super().unsaved(most)

    def redundant(self, spare: int) -> Iterator[FreeBlock]:
        self.walks += 1
        return super().redundant(spare)


def returning(turn: int) -> tuple[str, str]:
    """Six sessions that return again and again, and grow to 16 blocks each."""
    return long_text(f"chat{turn % 6}-", 6 + turn // 6), f"chat{turn % 6}"


def one_turn_each(turn: int) -> tuple[str, str]:
    """Sessions that never return. Each takes the pool but for two blocks."""
    return long_text(f"chat{turn}-", BLOCKS - 2), f"chat{turn}"


def walks(load: Any, steps: int, is_exclusive: bool) -> int:
    """Return how often the free queue is walked while 60 requests come, each followed by this number of steps.

    Each request waits for one step, and is asked for as often. Results of transfers come late.
    """
    pool = CountedPool(BLOCKS)
    talks = Talks(
        3 * BLOCKS,
        pool=pool,
        low=LOW_WATERMARK,
        high=HIGH_WATERMARK,
        idle_after_s=2.0,
        is_exclusive=is_exclusive,
        holds=True,
    )
    for turn in range(60):
        talks.now = float(turn)
        text, who = load(turn)
        request = talks.ask(text, who)
        talks.step()
        resident = talks.resident(text)
        for _ in range(steps):
            assert talks.driver.matched(request, resident, BLOCKS, BLOCKS, talks.now) == 0
        assert talks.serve(request), "the request is held back"
        for step in range(steps):
            talks.now = turn + step / steps
            talks.step()
            talks.gathered()
            talks.answer()
        talks.finish(request, text)
    check_integrity(talks.manager, talks.driver)
    assert talks.saved()
    return pool.walks


@pytest.mark.invariant(13, "manager/pool.py", "if self._left < wanted:", "if True:")
@pytest.mark.invariant(13, "manager/driver.py", "if first <= free:", "if False:")
@pytest.mark.parametrize("is_exclusive", [False, True])
@pytest.mark.parametrize("load", [returning, one_turn_each])
def test_no_request_is_held_back_and_steps_do_not_walk_the_free_queue(load: Any, is_exclusive: bool) -> None:
    """The pool has room for all sessions that return, so that nothing is to be loaded."""
    few, many = (walks(load, steps, is_exclusive) for steps in (16, 64))
    assert 0 < many < 1.5 * few


# -- 14 -----------------------------------------------------------------------------------------------


@pytest.mark.invariant(
    14,
    "manager/pool.py",
    "return found.owner == asker[:2] and (len(asker) == 2 or not found.is_coarse)",
    "return True",
)
@pytest.mark.invariant(
    14, "manager/session/manager.py", "length = own + first_false(self.is_exact(rows[own:length]))", "pass"
)
@pytest.mark.invariant(14, "manager/session/manager.py", "counts[: len(head)] = shape.tokens", "pass")
@pytest.mark.parametrize("is_resident", [True, False])
@pytest.mark.parametrize(
    ("who", "prompt", "hints", "served"),
    [
        ("alice", "sys a b c d e f", {}, 6),
        ("alice", "sys a b x", {}, 3),
        ("alice", "sys a b c d e f", {"quality": "exact"}, 1),
        ("bob", "sys a b c d e f", {}, 1),
        (None, "sys a b x", {}, 1),
    ],
)
def test_decoded_kv_and_what_is_computed_behind_it_serve_only_who_brought_it_and_shared_heads_are_exact(
    who: str | None, prompt: str, hints: dict[str, str], served: int, is_resident: bool
) -> None:
    """Of what alice has, "a b c" comes back decoded, "d e" is computed behind it, and "sys" is carol's as well."""
    talks = Talks()
    talks.talk("sys a b c", "alice")
    talks.talk("sys x", "carol")
    talks.rest()
    talks.overwrite()
    talks.talk("sys a b c d e", "alice")
    if not is_resident:
        talks.rest()
        talks.overwrite()
    request = talks.start(prompt, who, **hints)
    found = talks.running[request]
    assert (found.resident, found.loaded) == ((served, 0) if is_resident else (0, served))
    lossy = talks.pool.marks.lossy(found.block_ids[:served])
    assert lossy == set(found.block_ids[1:served])


# -- the lines, and what happens if they are broken ---------------------------------------------------


class Break(NamedTuple):
    """A line of a file of the code, and a broken one. test: that holds the invariant `number`, and must fail then."""

    test: str
    number: int
    file: str
    line: str
    broken: str

    def __str__(self) -> str:
        return f"{self.number}-{Path(self.file).stem}"


def all_breaks() -> list[Break]:
    """Return what the marks of all tests say."""
    found = []
    for path in sorted((REPO / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.invariant" in text else ():
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.invariant":
                    test = f"{path.relative_to(REPO)}::{node.name}"  # type: ignore[attr-defined]
                    found.append(Break(test, *map(ast.literal_eval, mark.args)))
    return sorted(found, key=lambda each: each.number)


BREAKS = all_breaks()
TESTS = list(dict.fromkeys(each.test for each in BREAKS))


def apply(each: Break, root: Path) -> None:
    """Break a line. It must be there once."""
    path = root / each.file
    lines = path.read_text(encoding="utf-8").split("\n")
    at = [number for number, line in enumerate(lines) if line.strip() == each.line]
    assert len(at) == 1, f"{each.file} has {each.line!r} {len(at)} times: {each.test} must name the line as it is now"
    lines[at[0]] = lines[at[0]].replace(each.line, each.broken)
    path.write_text("\n".join(lines), encoding="utf-8")
    ast.parse(path.read_text(encoding="utf-8"))


def run(tests: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    """Run tests over the packages below this folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile", "unshrunk"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}  # coverage is not of copies
    env |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([*command, *tests], cwd=REPO, env=env, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the packages, over which all of these tests pass."""
    root = tmp_path_factory.mktemp("copy")
    for name in PACKAGES:
        shutil.copytree(REPO / name, root / "manthan" / name, ignore=shutil.ignore_patterns("__pycache__"))
    ended = run(TESTS, root)
    assert ended.returncode == 0, ended.stdout
    return root


def test_each_invariant_has_a_test_that_names_a_line() -> None:
    assert {each.number for each in BREAKS} == set(ALWAYS) == set(range(1, 16))


@pytest.mark.parametrize("each", BREAKS, ids=str)
def test_a_line_that_a_test_names_is_there(each: Break, tmp_path: Path) -> None:
    (tmp_path / each.file).parent.mkdir(parents=True)
    shutil.copy(REPO / each.file, tmp_path / each.file)
    apply(each, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("each", BREAKS, ids=str)
def test_a_broken_line_makes_its_test_fail(each: Break, unbroken: Path) -> None:
    file = unbroken / "manthan" / each.file
    whole = file.read_bytes()
    try:
        apply(each, unbroken / "manthan")
        ended = run([each.test], unbroken)
    finally:
        file.write_bytes(whole)
    assert ended.returncode == 1, ended.stdout
    assert re.search(r"^E +(AssertionError|assert |Failed: )", ended.stdout, re.MULTILINE), ended.stdout
