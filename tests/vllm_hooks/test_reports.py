"""The log and the metrics of sessions with windows and states besides full attention."""

import logging
from types import SimpleNamespace
from typing import Any

import jobs
import logged
import pytest
from logged import said
from talks import Talks

from manthan.manager.events import (
    BlocksDropped,
    BlocksSaved,
    DropCause,
    Loading,
    LookedUp,
    Overwritten,
    PrefetchHit,
    Restored,
    StoreFailed,
    StoreIsUp,
    Turn,
    Unjudged,
)
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.hints import NO_HINTS
from manthan.vllm_hooks.telemetry.telemetry import Telemetry

MAIN, STATE, WINDOW = 0, 1, 2
SHAPE = MemoryShape(
    {
        MAIN: GroupShape(96, 9600, {0: 2400}),
        STATE: GroupShape(96, 4000, {0: 4000}),
        WINDOW: GroupShape(96, 2000, {0: 500}),
    }
)
TEXT = "a b c d e f g h"
RESIDENT, SAVED = 8 * 9600 + 4000 + 2 * 2000, 8 * 2400 + 4000 + 2 * 500


class Told(Talks):
    """A session of eight blocks and three of other groups that goes cold, and what is told of it."""

    def __init__(self) -> None:
        super().__init__(shape=SHAPE)
        self.telemetry = Telemetry(self.manager)
        self.finish(self.start(TEXT, "s"), TEXT, [self.point(TEXT, {STATE: 1, WINDOW: 2})])
        self.rest()

    def restore(self, cause: str = "") -> str:
        """Return the line that says what came back. cause: why a block of the window did not."""
        self.overwrite()
        self.holds = True
        request = self.start(TEXT, "s")
        loads = self.driver.loads_of(request)
        bad = [job for job in loads if job.group == WINDOW][-1]
        with said(logging.INFO) as lines:
            for job in loads:
                failed = {0: cause} if cause and job is bad else {}
                nbytes = SHAPE.groups[job.group].bounds[0]
                self.driver.answered([jobs.done(job, nbytes, failed, 0.004)], self.now)
        [line] = [line for line in lines if "restored" in line]
        return line

    def count(self, name: str) -> int:
        return sum(self.telemetry._counters[name].values())


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_eviction_tells_bytes_of_all_groups() -> None:
    with said(logging.INFO) as lines:
        told = Told()
    what = f"8 blocks (768 tokens) and 3 of windows or states, 82.8KiB to 23.6KiB ({RESIDENT / SAVED:.2f}x), 8 encoded"
    assert [line for line in lines if what in line]
    assert (told.count("evictions"), told.telemetry.totals["evictions"]) == (1, 1)
    assert (told.count("encoded_blocks"), told.count("encodings")) == (11, 11)


def test_a_restore_tells_tokens_of_full_attention_only(told: Told) -> None:
    line = told.restore()
    assert line == ("Manthan: session s restored 8 of 8 blocks (768 tokens) and 3 of windows or states in 4 ms")
    assert (told.count("restores"), told.count("restored_blocks")) == (1, 11)
    assert told.telemetry.totals["restored_tokens"] == 8 * 96


def test_a_load_that_failed_restores_nothing(told: Told) -> None:
    line = told.restore("checksum")
    assert "restored 0 of 8 blocks (0 tokens) in 4 ms; the rest could not be read (checksum)" in line
    assert (told.count("restores"), told.count("restored_blocks")) == (0, 0)
    assert told.telemetry._counters["failures"] == {"checksum": 1}


def test_the_tokens_of_returns_are_counted_by_cost() -> None:
    """All 96 tokens of a first request are computed. Of a return's 112, the session had 100: 64 are found."""
    talks = Talks()
    telemetry = Telemetry(talks.manager)

    def served(request_id: str, tokens: int, known: int | None, found: int, restored: int) -> None:
        request: Any = SimpleNamespace(request_id=request_id, num_prompt_tokens=tokens)
        telemetry.began(request, NO_HINTS, known)
        if restored:
            blocks = restored // talks.manager.shape.block_tokens
            talks.manager.events(Restored("s", blocks, blocks, 0, 9, 0.1, [], request_id))
        telemetry.ended(request, None, found, tokens - found)

    served("first", 96, None, 0, 0)
    served("head of others", 96, None, 32, 32)
    names = "returns", "return_resident_tokens", "return_restored_tokens", "return_recomputed_tokens"
    assert [telemetry.totals[name] for name in names] == [0, 0, 0, 0]
    served("return", 112, 100, 64, 48)
    assert [telemetry.totals[name] for name in names] == [1, 16, 48, 36]
    served("resident", 112, 112, 96, 0)
    assert [telemetry.totals[name] for name in names] == [2, 112, 48, 52]
    assert telemetry.totals["computed_tokens"] == 96 + 64 + 48 + 16
    assert telemetry.totals["restored_tokens"] == 32 + 48
    assert not telemetry._known
    assert not telemetry._brought


def test_gauges_are_of_all_groups(told: Told) -> None:
    gauges = told.telemetry._gauges()
    assert gauges["resume_points"] == {"": 1}
    assert gauges["cold_bytes"] == {"": SAVED}
    assert gauges["hot_bytes"] == {"": 0}
    assert gauges["sessions"] == {"active": 0, "idle": 0, "cold": 1}
    assert gauges["compression_ratio"] == {"": round(RESIDENT / SAVED, 4)}
    told.driver.reset(told.now)
    assert told.telemetry._gauges()["resume_points"] == {"": 0}


def test_events_are_counted() -> None:
    talks = Talks()
    telemetry = Telemetry(talks.manager)
    tell = talks.manager.events
    with logged.warnings() as lines:
        for _ in range(2):
            tell(StoreFailed(["disk"]))
    assert lines == ["Manthan: blocks could not be stored (disk): 1"], "a cause is logged once a minute"
    for event in (
        *(Overwritten(3), PrefetchHit("a"), LookedUp("b", "found"), LookedUp("c", "nothing"), StoreIsUp(False)),
        Turn("d", tokens=32, blocks=2, seconds=1.0, found=16, lossy=16),
        BlocksSaved(0, [b"1", b"2"], 0, seconds=0.5),
        BlocksSaved(0, [b"3"], 0),  # another engine has stored it
        BlocksDropped(0, [b"1"], DropCause.BUDGET),
        Loading([0, 3, 3]),
        Restored("e", blocks=4, good=3, at_points=1, nbytes=9, seconds=0.1, causes=["missing"], request_id=None),
    ):
        tell(event)
    stats = telemetry.take()
    assert stats is not None
    assert stats.data["counters"] == {
        "failures": {"disk": 2, "missing": 1},
        "overwritten_blocks": {"": 3},
        "prefetch_hits": {"": 1},
        "lookups": {"found": 1, "nothing": 1},
        "lossy_tokens": {"": 16},
        "encoded_blocks": {"": 2},
        "dropped_blocks": {"budget": 1},
        "restored_levels": {"0": 1, "3": 2},
        "prefetches": {"": 1},
        "prefetched_blocks": {"": 4},
    }
    assert stats.data["observations"] == {"encode_seconds": [0.5, 0.5]}
    assert stats.data["gauges"]["cold_store_up"] == {"": 0.0}
    assert (telemetry.totals["prefetches"], telemetry.totals["failures"]) == (1, 3)
    assert telemetry.changed == {"b", "d", "e"}


def test_the_slowest_rank_s_progress_is_logged_each_quarter_until_the_verdict() -> None:
    talks = Talks()
    telemetry = Telemetry(talks.manager)
    with said(logging.INFO) as lines:
        for blocks in ({0: 16, 1: 12}, {1: 16}, {0: 20}, {0: 64, 1: 31}, {1: 32}):
            telemetry.measured(blocks, "klt-8x", "wht-4x")
    assert lines == [f"Manthan: codec klt-8x measured on {n} of 64 blocks; wht-4x until then" for n in (16, 32)]
    assert telemetry.measured_blocks == 32
    talks.manager.events(Unjudged())
    assert telemetry.measured_blocks == 0


def test_a_session_that_is_dropped_whole_and_a_slow_redis_are_logged() -> None:
    talks = Talks(capacity=2)
    Telemetry(talks.manager)
    with said(logging.INFO) as lines:
        for name in ("a b", "c", "d e"):  # the end of "a b" makes room for "c"
            talks.go_cold(name)
        for _ in range(3):
            talks.manager.events(LookedUp("x", "unanswered"))
    assert [line for line in lines if "went cold" not in line] == [
        "Manthan: session a b is dropped for want of room in the cold store",
        "Manthan: session c is dropped for want of room in the cold store",
        "Manthan: lookups that Redis did not answer within 5 ms, whose prompts are computed: 1",
    ]


def test_what_is_not_saved_yet_is_hot() -> None:
    talks = Talks()
    telemetry = Telemetry(talks.manager)
    talks.talk("a b c", "s")
    assert telemetry._gauges()["hot_bytes"] == {"": 3 * 500}
    talks.rest()
    assert telemetry._gauges()["hot_bytes"] == {"": 0}
