"""Resume points that another engine has stored, and prefetches of sessions that need one."""

from collections.abc import Iterator

import pytest
from shared_talks import SharedTalks
from talks import Talks, names

from manthan.manager.events import BlocksDropped, LookedUp
from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.tiers.redis import sample
from manthan.manager.tiers.redis_sessions import StoredPoint

WINDOW, MAIN, STATE = 0, 1, 2
LAST = {WINDOW: 2, STATE: 1}
"""Number of last blocks that a request needs of each other group."""
NBYTES = {WINDOW: 50, MAIN: 100, STATE: 70}
SHAPE = MemoryShape({group: GroupShape(16, 500, {0: nbytes}) for group, nbytes in NBYTES.items()}, MAIN)
TEXT = "a b c d e f g h i j"


def needed(depth: int) -> Iterator[tuple[int, int]]:
    """Yield group and position of each block that is needed behind `depth` blocks, the groups mixed."""
    yield STATE, depth - 1
    yield from ((WINDOW, at) for at in range(max(0, depth - 2), depth))


def parts(depth: int) -> set[BlockName]:
    return {(group, names(TEXT)[at]) for group, at in needed(depth)}


def words(count: int) -> str:
    return " ".join(TEXT.split()[:count])


class Pointed(SharedTalks):
    def __init__(self) -> None:
        super().__init__(needed, shape=SHAPE)

    def find_point(self, request_id: str, blocks: int, depth: int) -> None:
        """Let Redis have `blocks` of the blocks that were asked for, and a point `depth` blocks behind the first."""
        _, asked, wanted = self.redis.asked[request_id]
        first = len(self.manager.requests[request_id].hashes) - len(asked)
        assert wanted is not None
        assert set(wanted(depth)) == parts(first + depth)
        self.tier |= {(group, block_hash): NBYTES[group] for group, block_hash in wanted(depth)}
        sizes = [NBYTES[group] for group, _ in wanted(depth)]
        self.find(request_id, blocks, sample(names(TEXT)), StoredPoint(depth, sizes))

    def go_cold(self, blocks: int) -> None:
        """Have a session of this number of blocks be saved, with a resume point at its end."""
        self.finish(self.start(words(blocks), "alice"), words(blocks), [self.point(words(blocks), LAST)])
        self.rest()
        assert self.states() == {"alice": "cold"}

    def dropped(self) -> set[BlockName]:
        return {(drop.group, block_hash) for drop in self.told(BlocksDropped) for block_hash in drop.block_hashes}


@pytest.fixture
def talks() -> Pointed:
    return Pointed()


def test_blocks_are_of_no_use_without_a_point(talks: Pointed) -> None:
    request = talks.ask(words(8), "alice")
    talks.find(request, 6, sample(names(TEXT)))
    assert talks.match(request) == 0
    assert talks.told(LookedUp) == [LookedUp("alice", "nothing")]


def test_a_session_goes_on_from_another_engine_s_point(talks: Pointed) -> None:
    request = talks.ask(words(8), "alice")
    talks.find_point(request, 6, 5)
    assert talks.match(request) == 5
    blocks = talks.manager.blocks
    assert blocks.saved_nbytes == 6 * 100 + 2 * 50 + 70
    assert {blocks.name(row): blocks.nbytes[row] for row in talks.session("alice").point_rows.tolist()} == {
        name: NBYTES[name[0]] for name in parts(5)
    }
    talks.serve(request)
    assert talks.running[request].loaded == 5
    talks.finish(request, words(9), [talks.point(words(9), LAST)])
    assert talks.dropped() == set(), "not all before the deeper point is saved"
    talks.rest()
    assert talks.dropped() == parts(5)
    talks.overwrite()
    assert talks.match(talks.ask(words(9), "alice")) == 9


def test_beside_a_deeper_point_the_session_s_own_is_spare(talks: Pointed) -> None:
    talks.go_cold(5)
    request = talks.ask(words(10), "alice")
    talks.find_point(request, 3, 3)
    assert not talks.dropped()
    assert [point.depth for point in talks.manager.table.by_id["alice"].points] == [5, 8]
    assert talks.match(request) == 8


# -- sessions that are expected -----------------------------------------------------------------------


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_prefetch_loads_a_session_and_its_point(is_readable: bool) -> None:
    talks = Talks(shape=SHAPE, driver={"prefetch_lead_s": 1.0})
    talks.finish(talks.start(words(5), "alice"), words(5), [talks.point(words(5), LAST)])
    talks.rest()
    talks.overwrite()
    if not is_readable:
        del talks.tier[STATE, names(TEXT)[4]]
    talks.finish(talks.ask("", prefetch="alice"))
    work = talks.step()
    loaded = {(job.group, block_hash) for job in work.loads for block_hash in job.block_hashes}
    assert loaded == {(MAIN, block_hash) for block_hash in names(words(5))} | parts(5)
    talks.step()
    if is_readable:
        assert talks.resident(words(5)) == 5
        assert all(talks.pool.lookup(group, [block_hash])[0] >= 0 for group, block_hash in parts(5))
        assert talks.states() == {"alice": "cold"}
        assert talks.rest() == [], "the compressed blocks were kept"
    else:
        assert "alice" not in talks.states()
