"""Tokens that are kept exact: the first ones of each session, and heads that sessions share."""

import pytest
from integrity import check_empty
from talks import Talks, name

from manthan.manager.pool import Mark
from manthan.manager.session import manager
from manthan.manager.session.table import Shares


def exact(talks: Talks, *texts: str) -> list[int]:
    """Return the number of exact tokens of each text's last block, as it is saved."""
    blocks = talks.manager.blocks
    return [int(blocks.exact[blocks.row(0, name(text))]) for text in texts]


@pytest.mark.parametrize(("sink", "counts", "nbytes"), [(4, [4, 0, 0], 350), (20, [16, 4, 0], 750)])
def test_a_session_s_first_tokens_are_kept_exact(sink: int, counts: list[int], nbytes: int) -> None:
    talks = Talks(sink_tokens=sink)
    talks.talk("a b c", "alice")
    talks.rest()
    assert exact(talks, "a", "a b", "a b c") == counts
    usage = talks.manager.usage()
    assert (usage.exact_blocks, usage.saved_nbytes) == (sum(map(bool, counts)), nbytes)


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.25, 2), (0.5, 3)])
def test_shared_heads_are_kept_exact_within_a_share(share: float, kept: int) -> None:
    talks = Talks(capacity=40, shares=Shares(heads=share))
    for last in "xyz":
        talks.talk(f"s t u {last}")
    talks.rest()
    assert exact(talks, "s", "s t", "s t u", "s t u x") == [16] * kept + [0] * (4 - kept)


def test_a_head_makes_way_for_one_that_more_sessions_share() -> None:
    talks = Talks(capacity=40)
    for last in "xy":
        talks.talk(f"s t {last}", last)
    talks.rest()
    assert exact(talks, "s", "s t") == [16, 16]
    for _ in range(3):
        for last in "klmn":
            talks.talk(f"p {last}", last)
        talks.rest()
    assert exact(talks, "s", "s t", "p") == [16, 0, 16]


def test_heads_whose_resident_kv_is_lossy_keep_no_other_head_from_making_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MOST_HEADS", 1)
    talks = Talks(capacity=40)
    for _ in range(3):
        for last in "xy":
            talks.talk(f"s t {last}", last)
        talks.rest()
    assert exact(talks, "s", "s t") == [16, 16]
    talks.pool.marks.set(talks.pool.lookup(0, [name("s t")]), Mark.DECODED, None)
    for _ in range(3):
        for last in "klmn":
            talks.talk(f"p {last}", last)
        talks.rest()
    assert exact(talks, "s", "s t", "p") == [0, 16, 16]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sessions_lost_with_a_head_that_cannot_be_stored_again_are_not_saved_later(ranks: int) -> None:
    talks = Talks(ranks=ranks)
    talks.talk("sys a", "A")
    talks.rest()
    talks.talk("sys b", "B")
    talks.holds, talks.now = True, talks.now + talks.manager.idle_after_s
    talks.step()
    talks.gathered()
    talks.overwrite()
    [head] = [job for job in talks.jobs.values() if job.exact_tokens]
    talks.answer([head], {0: "write_failed"})
    talks.holds = False
    talks.answer()
    assert talks.states() == {}
    talks.rest(100)
    check_empty(talks.manager)
