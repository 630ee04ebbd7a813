"""Models with several KV cache groups: a session goes on where all that the other groups need is saved as well."""

from dataclasses import replace

import pytest
from integrity import check_integrity
from talks import Talks, names

from manthan.manager.events import Evicted, Restored
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.manager import Outcome, PointParts
from manthan.manager.session.resume_points import MOST_SPARE

WINDOW, MAIN = 0, 1
SHAPE = MemoryShape({WINDOW: GroupShape(16, 200, {0: 50}), MAIN: GroupShape(16, 1000, {0: 100})}, MAIN)
WINDOWS = MemoryShape({WINDOW: GroupShape(16, 500, {0: 50})}, stores_main=False)
"""No layer has full attention: no block of a session is stored for itself."""
TEXT = "a b c d e f g h i j k l m n o p"


def words(count: int, first: str = "") -> str:
    """Return a text of this number of words. first: its first word, by which sessions differ."""
    return " ".join([first or "a", *TEXT.split()[1:count]])


def point(talks: Talks, text: str, last: int = 2) -> PointParts:
    """Return the resume point behind a text: the last blocks of the window, which the pool has."""
    if talks.manager.shape.stores_main:
        return talks.point(text, {WINDOW: last})
    hashes = names(text)
    return PointParts(len(hashes), [(WINDOW, hashes[at], at) for at in range(len(hashes) - last, len(hashes))])


def turn(talks: Talks, text: str, who: str = "s", **hints: object) -> Outcome:
    """Have a session be idle at this text, with a resume point at its end."""
    request = talks.start(text.rpartition(" ")[0], who, **hints)
    outcome = talks.finish(request, text, [point(talks, text)])
    talks.step()
    check_integrity(talks.manager, talks.driver)
    assert outcome is not None
    return outcome


def depths(talks: Talks, group: int) -> list[int]:
    """Return which blocks of a group are saved, counted from 1."""
    return sorted(len(text.split()) for text in talks.saved(group))


def match(talks: Talks, text: str, who: str = "s") -> int:
    """Return how many blocks can be loaded for a request that finds nothing in the pool."""
    request = talks.ask(text, who)
    found = talks.manager.match(talks.manager.requests[request], 0, len(text.split()))
    talks.finish(request)
    return found


@pytest.fixture
def talks() -> Talks:
    return Talks(shape=SHAPE)


def test_a_resume_point_is_saved_at_once_and_the_session_when_it_is_idle(talks: Talks) -> None:
    turn(talks, words(5))
    assert (depths(talks, WINDOW), depths(talks, MAIN)) == ([4, 5], [])
    talks.rest()
    assert (depths(talks, WINDOW), depths(talks, MAIN)) == ([4, 5], [1, 2, 3, 4, 5])
    assert talks.states() == {"s": "cold"}
    assert (match(talks, words(4)), match(talks, words(9))) == (0, 5)


def test_a_resume_point_is_kept_until_a_deeper_one_is_saved(talks: Talks) -> None:
    turn(talks, words(5))
    talks.refuses = lambda block: "broken" if block == (WINDOW, names(words(8))[-1]) else ""
    turn(talks, words(8))
    assert depths(talks, WINDOW) == [4, 5]
    talks.rest()
    assert depths(talks, MAIN) == [1, 2, 3, 4, 5]
    assert match(talks, words(9)) == 5


@pytest.mark.invariant(
    11,
    "manager/session/manager.py",
    "continue  # the point cannot be loaded, or is too coarse",
    "pass",
)
def test_a_prompt_is_gone_on_from_though_another_answer_is_wanted(talks: Talks) -> None:
    """Or the answer comes back without what the model thought. There is a resume point where the prompt ends, too."""
    request = talks.start(words(7), "s")
    talks.finish(request, words(9), [point(talks, words(9)), point(talks, words(6))])
    talks.rest()
    assert depths(talks, WINDOW) == [5, 6, 8, 9]
    assert (match(talks, words(7)), match(talks, words(12))) == (6, 9)
    turn(talks, words(12))
    talks.rest()
    assert depths(talks, WINDOW) == [5, 6, 11, 12], "the answer's end is left, the prompt's is spare"
    assert (match(talks, words(9)), match(talks, words(12))) == (6, 12)


def test_behind_a_whole_chunk_no_other_block_is_needed(talks: Talks) -> None:
    """Chunked local attention looks back to its chunk's first token. A prefix of whole chunks needs nothing of it."""
    talks.finish(talks.start(words(4), "s"), words(5), [PointParts(5, [])])
    talks.rest()
    assert talks.states() == {"s": "cold"}
    assert (match(talks, words(4)), match(talks, words(9))) == (0, 5)


def test_a_session_that_goes_cold_is_accounted_for_with_its_resume_point(talks: Talks) -> None:
    turn(talks, words(5))
    assert talks.manager.usage().saved_nbytes == 2 * 50
    talks.rest()
    pool_nbytes, nbytes = 5 * 1000 + 2 * 200, 5 * 100 + 2 * 50
    assert talks.told(Evicted) == [Evicted("s", 5, 2, 80, pool_nbytes, 5, 500, nbytes, 0, 10.0, 0.0, False)]
    usage = talks.manager.usage()
    assert (usage.points, usage.saved_blocks, usage.saved_nbytes, usage.pool_nbytes) == (1, 7, nbytes, pool_nbytes)
    talks.driver.reset(talks.now)
    assert talks.manager.usage().points == 0


# -- spare points -------------------------------------------------------------------------------------


def long(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


def points_of(talks: Talks) -> list[int]:
    return [point.depth for point in talks.manager.table.by_id["s"].points]


def test_of_earlier_prompts_those_in_the_distance_are_thinned_out() -> None:
    """A client that drops the last d blocks computes at most about as many more anew."""
    talks = Talks(capacity=2000, blocks=400, shape=SHAPE)
    for end in range(4, 201, 4):
        turn(talks, long(end))
        talks.rest()
    found = points_of(talks)
    assert len(found) <= MOST_SPARE + 2
    assert found[-6:] == [180, 184, 188, 192, 196, 200]
    for dropped in range(4, 196):
        nearest = max((depth for depth in found if depth <= 200 - dropped), default=0)
        assert 200 - dropped - nearest <= max(8, 2 * dropped), f"{dropped} dropped, of points at {found}"
    assert match(talks, long(190) + " other") == 188


def test_spare_points_have_a_share_of_the_budget_that_sessions_divide() -> None:
    """Each of these takes 100 bytes, and an eighth of the budget is 1,512."""
    talks = Talks(capacity=120, blocks=400, shape=SHAPE)
    for end in range(4, 49, 4):
        for who in "st":
            turn(talks, f"{who} {long(end)}", who)
            talks.rest()
    spare = talks.manager.points._spare
    assert sorted(len(points) for points in spare.values()) == [7, 8]


def test_whoever_makes_room_gives_up_spare_points_first() -> None:
    talks = Talks(capacity=16, blocks=400, shape=SHAPE)  # 1,600 bytes
    for end in (4, 6, 8):
        turn(talks, long(end))
        talks.rest()
    assert points_of(talks) == [4, 6, 8]
    turn(talks, words(5, "t"), "t")
    talks.rest()
    assert points_of(talks) == [8]
    assert talks.states() == {"s": "cold", "t": "cold"}


def test_a_pinned_session_has_none() -> None:
    talks = Talks(shape=SHAPE)
    for end in (4, 6, 8):
        turn(talks, long(end), pin=True)
        talks.rest()
    assert points_of(talks) == [8]


# -- encoding -----------------------------------------------------------------------------------------


def test_exact_tokens_of_a_larger_block_are_the_session_s_first_ones() -> None:
    window, main = GroupShape(32, 200, {0: 50, 8: 60, 32: 90}), GroupShape(16, 1000, {0: 100, 8: 120, 16: 150})
    talks = Talks(shape=MemoryShape({WINDOW: window, MAIN: main}, MAIN), sink_tokens=40)
    hashes = names(words(4))
    for at in (1, 3):
        talks.pool.cache(talks.pool.take(1)[0], WINDOW, hashes[at])
    parts = PointParts(4, [(WINDOW, hashes[1], 0), (WINDOW, hashes[3], 1)])
    talks.finish(talks.start(words(3)), words(4), [parts])
    [job] = talks.step().stores
    assert list(zip(job.first_tokens(32), job.exacts(32), strict=True)) == [(0, 32), (32, 8)]


def test_groups_are_encoded_in_codecs_of_their_own(talks: Talks) -> None:
    main = replace(SHAPE.groups[MAIN], codec="wht-4x")
    talks.manager.recode(replace(SHAPE, groups={**SHAPE.groups, MAIN: main}), 10_000)
    talks.holds = True
    turn(talks, words(5))
    talks.now = 10.0
    talks.step()
    assert {job.group: job.codec for job in talks.jobs.values()} == {WINDOW: "", MAIN: "wht-4x"}


# -- windows alone ------------------------------------------------------------------------------------


def test_pins_count_windows() -> None:
    talks = Talks(capacity=20, shape=WINDOWS)  # of which pinned sessions may take 5, and each takes 2
    assert [turn(talks, words(5, who), who, pin=True).is_pinned for who in "abc"] == [True, True, False]


def test_a_load_of_windows_restores_all_tokens_before_the_resume_point() -> None:
    talks = Talks(shape=WINDOWS)
    turn(talks, words(8))
    talks.rest()
    talks.overwrite()
    request = talks.start(words(9), "s")
    assert talks.driver.found(request) == 8 * SHAPE.block_tokens
    assert [(event.good, event.blocks, event.at_points) for event in talks.told(Restored)] == [(8, 8, 2)]
