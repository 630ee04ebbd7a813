"""The serving loop by example: what of a session that went cold is restored."""

from dataclasses import replace

import jobs
import numpy as np
import pytest
from integrity import check_integrity
from talks import GROUP, IDLE_AFTER_S, Talks, long_text, name, names

from manthan.manager.driver import A_STEP
from manthan.manager.events import DropCause, Overwritten, PrefetchHit, Restored
from manthan.manager.pool import Mark
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.transfer import STORE_DOWN, Answers, Transfer, TransferResult

TEXT, MORE = "a b c d e f", "a b c d e f g h"
PREFETCHES = {"prefetch_lead_s": 1.0}
WINDOW = 1


def went_cold(again: int = 0, **hints: object) -> Talks:
    """An engine that computes this number of found blocks again, with a session that went cold and was overwritten."""
    talks = Talks(blocks=50, low=0.05, high=0.1, again=again, driver=PREFETCHES)
    talks.finish(talks.start(TEXT, "A", **hints))
    assert set(talks.rest()) == set(names(TEXT))
    assert talks.resident(TEXT) == 6, "saved blocks stay in the pool"
    talks.overwrite()
    return talks


def test_a_request_that_the_driver_does_not_know_waits_until_it_is_admitted() -> None:
    """A recheck is one: stores would be given up for it while it runs."""
    talks = Talks(blocks=50)
    talks.driver.matched("recheck", 0, 8, 40, talks.now)
    assert talks.driver._first_waiting == 40
    talks.driver.admitted("recheck", 0, 8, 40)
    assert talks.driver._first_waiting == 0


@pytest.mark.parametrize("again", [0, 1])
def test_blocks_that_are_computed_again_are_not_restored(again: int) -> None:
    talks = went_cold(again)
    request = talks.running[talks.start(MORE, "A")]
    assert (request.resident, request.loaded) == (0, 6 - again)


def test_nothing_is_restored_where_the_last_block_alone_would_be() -> None:
    talks = went_cold(again=1)
    request = talks.ask(MORE, "A")
    assert talks.driver.matched(request, 5, 8, 8, talks.now) == 0


@pytest.mark.parametrize("again", [0, 1])
def test_a_prefetched_session_is_found_although_some_is_computed_again(again: int) -> None:
    talks = went_cold(again, expect_return_s=19.0)
    talks.now = 18.5
    assert [len(load) for load in talks.step().loads] == [6]
    assert talks.resident(TEXT) == 6
    request = talks.running[talks.start(MORE, "A")]
    assert (request.resident, request.loaded) == (6 - again, 0)
    assert len(talks.told(PrefetchHit)) == 1


def test_a_load_reads_the_resume_point_behind_the_block_that_is_computed_again() -> None:
    """Its blocks are needed before that block, and are not dropped while they are read."""
    shape = MemoryShape({0: GROUP, WINDOW: GroupShape(16, 200, {0: 50})})
    talks = Talks(shape=shape, blocks=50, again=1, driver={"last_tokens": 0}, holds=True)
    talks.finish(talks.start(TEXT, "A"), points=[talks.point(TEXT, {WINDOW: 1})])
    talks.holds = False
    talks.rest()
    talks.overwrite()
    talks.holds = True
    request = talks.ask(TEXT, "A")
    assert talks.driver.usable(96) == 6
    assert talks.driver.matched(request, 0, 6, 8, talks.now) == 5
    talks.driver.loading(request, 0, 6, [1, 2, 3, 4, 5], [(WINDOW, [name(TEXT)], [6])])
    main, window = talks.step().loads
    assert [main.block_hashes, window.block_hashes] == [names(TEXT)[:5], [name(TEXT)]]
    blocks = talks.manager.blocks
    part = talks.session("A").points[-1].rows
    assert blocks.pins[part].tolist() == [1]
    talks.driver.answered([jobs.done(main, 100)], talks.now)
    assert blocks.pins[part].tolist() == [1], "one job of two has ended"
    talks.driver.answered([jobs.done(window, failed={0: "missing"})], talks.now)
    assert talks.manager.match(talks.manager.requests[request], 0, 6) == 0, "nobody looks for it again"
    check_integrity(talks.manager)


def test_blocks_that_a_request_keeps_are_not_overwritten_twice() -> None:
    """vLLM admits it again with all its blocks once its load has ended, and with new ones after a preemption."""
    talks = went_cold()
    request, before = talks.start(MORE, "A"), talks.driver._overwritten
    talks.driver.admitted(request, 0, 8, 8)
    assert talks.driver._overwritten == before
    talks.driver.admitted(request, 0, 8, 9)
    assert talks.driver._overwritten == before + 1
    talks.driver.matched(request, 2, 8, 8, talks.now)
    talks.driver.admitted(request, 2, 8, 8)
    assert talks.driver._overwritten == before + 1 + 6


def test_loads_of_a_step_go_by_the_size_of_their_request_and_steps_in_order() -> None:
    """A window's block makes a request larger than another with as many blocks. A request's jobs stay together."""
    shape = MemoryShape({0: GROUP, WINDOW: GroupShape(16, 200, {0: 50})})
    talks = Talks(shape=shape, blocks=200, driver={"last_tokens": 0}, holds=True)
    texts = {"long": long_text("l", 9), "window": long_text("w", 2), "plain": long_text("p", 2)}
    talks.holds = False
    for who, text in texts.items():
        points = [talks.point(text, {WINDOW: 1} if who == "window" else {})]
        talks.finish(talks.start(text, who), points=points)
    talks.rest()
    talks.overwrite()
    talks.holds = True
    asked = {talks.start(text, who): who for who, text in texts.items()}
    order = [(asked[str(job.request_id)], job.group) for job in talks.step().loads]
    assert order == [("plain", 0), ("window", 0), ("window", WINDOW), ("long", 0)]


def test_a_prefetch_goes_behind_the_loads_of_its_step() -> None:
    """Nobody waits for it, although it is the smaller one."""
    talks, longer = Talks(blocks=50, driver=PREFETCHES), long_text("l", 9)
    talks.finish(talks.start(longer, "B"))
    talks.finish(talks.start(TEXT, "A", expect_return_s=19.0))
    talks.rest()
    talks.overwrite()
    talks.now, talks.holds = 18.5, True
    request = talks.start(longer, "B")
    assert [(job.request_id, len(job)) for job in talks.step().loads] == [(request, 9), (None, 6)]


def test_what_was_found_of_a_prompt_is_what_was_resident_and_what_was_restored() -> None:
    talks = went_cold()
    del talks.tier[0, names(TEXT)[4]]
    request = talks.start(MORE, "A")
    assert talks.driver.found(request) == 4 * 16
    [event] = talks.told(Restored)
    assert (event.blocks, event.good, event.causes) == (6, 4, ["missing"])
    talks.finish(request)
    assert talks.driver.found(request) == 0
    check_integrity(talks.manager)


def test_what_was_found_before_a_preemption_does_not_count_twice() -> None:
    talks = went_cold()
    request = talks.start(MORE, "A")
    one = talks.running[request]
    assert talks.driver.found(request) == 6 * talks.manager.shape.block_tokens
    talks.pool.free(one.block_ids[::-1])
    one.block_ids = []
    talks.overwrite()
    assert talks.serve(request, is_again=True)
    assert talks.driver.found(request) == 6 * talks.manager.shape.block_tokens


def test_what_a_request_has_computed_before_a_preemption_does_not_count_as_found() -> None:
    talks = Talks()
    request = talks.start("sys a b c", "A")
    one = talks.running[request]
    talks.pool.free(one.block_ids[::-1])
    one.block_ids = []
    assert talks.serve(request, is_again=True)
    assert talks.driver.found(request) == 0


def test_a_long_session_goes_cold_by_some_blocks_a_step() -> None:
    """Its tail is overwritten first, however many steps that takes, and also when it goes cold again as it is."""
    blocks = 2 * A_STEP + 10
    text = long_text("w", blocks)
    hashes = names(text)
    talks = Talks(blocks, blocks=8 * blocks)
    for stored in (hashes, []):
        talks.finish(talks.start(text, "A"), text)
        talks.now += IDLE_AFTER_S
        steps = [talks.step().stores]
        while talks.driver.has_work:  # an engine without requests steps on, too
            steps.append(talks.step().stores)
        assert all(sum(map(len, jobs)) <= A_STEP for jobs in steps)
        assert [block_hash for jobs in steps for job in jobs for block_hash in job.block_hashes] == stored
        assert talks.pool.runway(8 * blocks) == 8 * blocks
        check_integrity(talks.manager, talks.driver)
        at = dict(zip(talks.pool.lookup(0, hashes), range(blocks), strict=True))
        taken = talks.pool.take(8 * blocks)
        assert [at[block] for block in taken if block in at] == [*reversed(range(blocks))]
        talks.pool.free(taken)


def test_blocks_that_another_engine_hands_over_keep_their_marks() -> None:
    """What that engine has decoded is not encoded here; what it computed behind these is, once there is a way to it."""
    talks = Talks(blocks=50)
    request = talks.ask(MORE, "A")
    assert talks.driver.matched(request, 0, 8, 8, talks.now) == 0
    talks.driver.admitted(request, 0, 8, 8, brought=8)
    assert talks.driver.found(request) == 8 * 16
    ids = talks.pool.take(8)
    talks.driver.handed(request, [ids[:6]], [ids[6:]])
    talks.driver.computed(request, ids)  # vLLM caches them when they are there
    talks.pool.cache_all(ids, names(MORE), talks.manager.shape.main)
    assert [talks.pool.marks[each] for each in ids] == [Mark.DECODED] * 6 + [Mark.DERIVED] * 2
    assert talks.pool.marks.serves(ids[0], talks.driver.asker(request))
    assert not talks.pool.marks.serves(ids[0], talks.driver.asker(talks.ask(MORE, "B")))
    outcome = talks.driver.finished(request, names(MORE), talks.now, 129)
    talks.pool.free(ids[::-1])
    assert outcome is not None
    assert outcome.lossy_tokens == 8 * 16
    talks.now += IDLE_AFTER_S
    assert not talks.step().stores
    check_integrity(talks.manager)


@pytest.mark.parametrize(("brought", "lost"), [(0, [8]), (6, [2]), (8, [])])
def test_blocks_that_come_from_elsewhere_are_not_missed(brought: int, lost: list[int]) -> None:
    """Blocks that were overwritten before they were saved, and that somebody has to compute again."""
    talks = Talks(blocks=50)
    talks.finish(talks.start(MORE, "A"), MORE)
    talks.overwrite()
    request = talks.ask(MORE + " i", "A")
    talks.driver.admitted(request, 0, 8, 9, brought=brought)
    assert [event.blocks for event in talks.told(Overwritten)] == lost


def test_blocks_that_a_request_has_loaded_stay_saved_though_their_only_session_is_released() -> None:
    talks = Talks(100, shape=MemoryShape({0: replace(GROUP, is_lossless=True)}))
    talks.talk("sys a b c", "alice")
    talks.rest()
    talks.overwrite()
    talks.holds = True
    request = talks.ask("sys a b x", "bob")
    assert talks.serve(request)
    talks.manager.forget_session(talks.session("alice"), DropCause.RELEASED)
    talks.answer(talks.driver.loads_of(request))
    assert talks.saved() >= {"sys", "sys a", "sys a b"}
    talks.holds = False
    talks.finish(request, "sys a b x y")
    check_integrity(talks.manager, talks.driver)
    assert talks.texts()["bob"] == "sys a b x y"


@pytest.mark.parametrize("causes", [("damaged", STORE_DOWN), (STORE_DOWN, "damaged")])
def test_a_block_that_one_rank_finds_damaged_is_bad_though_another_s_store_is_down(causes: tuple[str, str]) -> None:
    answers = Answers([Transfer(1, "load", 0, [b"x"], np.array([1], np.int32))], "A")
    for cause in causes:
        answers.add(TransferResult(1, np.zeros(1, np.int64), {0: cause}), 2)
    assert answers.failed == {(0, b"x"): "damaged"}
