"""Sub-agents that name their parent. The tier's room is in blocks."""

import pytest
from integrity import check_empty, check_integrity
from talks import Talks

from manthan.manager.events import DropCause, Parent
from manthan.manager.histories import Histories
from manthan.manager.listing import Listing
from manthan.manager.session.table import MOST_RELATIVES


def family(capacity: int, **hints: str) -> Talks:
    """Return a parent and its child that share two blocks. Both are cold, the parent is older."""
    talks = Talks(capacity)
    talks.talk("sys task p1 p2", "parent")
    talks.rest()
    talks.talk("sys task c1 c2", "child", **hints)
    talks.rest()
    return talks


def budget_drops(talks: Talks) -> str:
    check_integrity(talks.manager, talks.driver)
    return " ".join(words for words, cause in talks.dropped() if cause is DropCause.BUDGET)


CHILD = {"parent_session_id": "parent"}


def test_a_shared_head_goes_behind_both_tails_and_its_owner_does_not_lose_it_before() -> None:
    talks, drops = family(8, **CHILD), []
    for size in (2, 2, 2, 2, 1):
        talks.go_cold(" ".join(f"{len(drops)}{at}" for at in range(size)))
        drops.append((budget_drops(talks), talks.texts().get("parent"), talks.texts().get("child")))
    assert drops == [
        ("", "sys task p1 p2", "sys task c1 c2"),
        ("p1 p2", "sys task", "sys task c1 c2"),
        ("p1 p2 c1 c2", "sys task", "sys task"),
        ("p1 p2 c1 c2 sys task", None, None),
        ("p1 p2 c1 c2 sys task 01", None, None),
    ]


@pytest.mark.parametrize(("hints", "text"), [(CHILD, "sys task"), ({}, None)])
def test_a_parent_that_waits_still_has_the_head_when_its_child_is_finished(
    hints: dict[str, str], text: str | None
) -> None:
    """The tail of a finished child goes before all else."""
    talks = family(6, **hints)
    talks.go_cold("x y z")
    assert budget_drops(talks) == "p1 p2 c2"
    talks.talk("sys task c1 c2 c3", "child", release=True)
    check_integrity(talks.manager, talks.driver)
    assert talks.dropped()[-1] == ("c1" if hints else "sys task c1", DropCause.RELEASED)
    assert talks.texts().get("parent") == text
    assert ("sys task" in talks.saved()) is bool(hints)


def test_a_child_of_which_only_the_head_is_kept_is_alive() -> None:
    talks = Talks(6)
    keep = [{"from": 0, "to": 16, "seconds": 1000}]
    talks.talk("sys task c1 c2", "child", parent_session_id="parent", keep=keep)
    talks.rest()
    talks.talk("sys task p1 p2", "parent")
    talks.rest()
    talks.go_cold("w x y z v")
    assert budget_drops(talks) == "c1 c2 p1 p2"
    assert (talks.texts()["child"], talks.texts()["parent"]) == ("sys task", "sys task")


def test_a_pinned_child_keeps_the_head_for_its_parent() -> None:
    talks = Talks(8)
    talks.talk("sys p1 p2", "parent")
    talks.talk("sys c1", "child", parent_session_id="parent", pin=True)
    talks.rest()
    talks.go_cold("t u v w x y z")
    assert talks.texts()["parent"] == "sys"


def test_what_a_family_keeps_makes_room_also_for_one_who_comes_before_the_childs_tail_is_saved() -> None:
    talks = Talks(4)
    talks.go_cold("sys task p1 p2")
    talks.talk("sys task c1", "child", parent_session_id="sys task p1 p2")
    talks.now += 1
    talks.talk("w x y z", "other")
    talks.driver.steer("evict", talks.session("other"), talks.now)
    talks.save()
    assert talks.saved() == {"w", "w x", "w x y", "w x y z"}
    check_integrity(talks.manager, talks.driver)


def test_who_leaves_a_family_leaves_what_was_kept_for_it() -> None:
    talks = Talks(6)
    talks.talk("sys task c1 c2", "child", parent_session_id="parent")
    talks.rest()
    talks.talk("sys task p1 p2", "parent")
    talks.rest()
    talks.go_cold("x y")
    assert (budget_drops(talks), talks.texts()["child"]) == ("c1 c2", "sys task")
    talks.talk("sys task p1 p2", "parent", parent_session_id="another")
    talks.manager.steer("release", talks.session("parent"), talks.now)
    check_integrity(talks.manager, talks.driver)
    assert talks.texts()["child"] == "sys task"


def test_a_parent_that_names_its_own_parent_later_brings_its_children_along() -> None:
    talks = Talks()
    talks.talk("sys a b", "child", parent_session_id="middle")
    talks.talk("sys c d", "middle", parent_session_id="parent")
    relatives = talks.manager.table.relatives(talks.session("child"))
    assert relatives == [talks.session("middle")]
    check_integrity(talks.manager, talks.driver)


def test_a_child_that_expires_leaves_the_head_which_goes_in_the_parents_turn() -> None:
    talks = Talks(6)
    talks.go_cold("sys task p1")
    talks.talk("sys task c1 c2", "child", parent_session_id="sys task p1", ttl_s=50)
    talks.rest()
    talks.go_cold("x y")
    assert (budget_drops(talks), talks.texts()["sys task p1"]) == ("p1", "sys task")
    talks.rest(50)
    assert ("c1 c2", DropCause.EXPIRED) in talks.dropped()
    assert talks.texts() == {"sys task p1": "sys task", "x y": "x y"}
    talks.go_cold("k l m")
    assert budget_drops(talks) == "p1 task"


def test_a_parent_keeps_nothing_that_only_other_sessions_share_with_it() -> None:
    talks = Talks(5)
    talks.go_cold("sys a b")
    talks.talk("sys c", "child", parent_session_id="sys a b")
    talks.talk("sys a b d", "other")
    talks.rest()
    talks.go_cold("x")
    assert (budget_drops(talks), talks.texts()["sys a b"]) == ("c", "sys")
    talks.manager.steer("release", talks.session("other"), talks.now)
    check_integrity(talks.manager, talks.driver)


def test_a_childs_first_request_keeps_the_head_that_it_has_in_its_prompt() -> None:
    talks = Talks(4)
    talks.go_cold("sys task p1 p2")
    request = talks.start("sys task c1", "child", parent_session_id="sys task p1 p2")
    talks.go_cold("x y z")
    assert (budget_drops(talks), talks.saved()) == ("p1 p2", {"sys", "sys task", "x", "x y"})
    talks.finish(request, "sys task c1 c2")
    check_integrity(talks.manager, talks.driver)


def test_all_descendants_of_an_ancestor_keep_its_head() -> None:
    talks = Talks(8)
    talks.talk("sys task p1", "parent")
    talks.talk("sys task c1", "child", parent_session_id="parent")
    talks.talk("sys task d1", "grandchild", parent_session_id="child")
    talks.rest()
    talks.talk("sys task c1 c2", "child", release=True)
    talks.go_cold("x y z")
    talks.talk("sys task d1", "grandchild")
    talks.go_cold("u v w")
    assert budget_drops(talks) == "p1 z"
    assert (talks.texts()["parent"], talks.texts()["grandchild"]) == ("sys task", "sys task d1")
    talks.manager.steer("release", talks.session("parent"), talks.now)
    assert "sys task d1" in talks.saved(), "a parent that is finished ends nobody else"
    talks.manager.steer("release", talks.session("grandchild"), talks.now)
    assert set(talks.texts()) == {"x y z", "u v w"}
    check_integrity(talks.manager, talks.driver)


@pytest.mark.parametrize(
    "parents",
    [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}, {"a": "nobody", "b": "nobody", "c": "nobody"}],
)
def test_circles_and_unknown_parents_do_no_harm(parents: dict[str, str]) -> None:
    talks = Talks(6)
    for turn in "123":
        for who in "abc":
            hints = {"parent_session_id": parents[who]} if who in parents else {}
            talks.talk(" ".join(["sys", *(f"{who}{at}" for at in range(int(turn) + 1))]), who, **hints)
            talks.rest()
            check_integrity(talks.manager, talks.driver)
    talks.go_cold("u v w x y z")
    assert set(talks.texts()) == {"u v w x y z"}
    talks.manager.steer("release", talks.session("u v w x y z"), talks.now)
    check_empty(talks.manager)


def test_a_parent_may_come_after_its_child_and_is_one_of_the_same_tenant() -> None:
    talks = Talks(7)
    for tenant in ("acme", "beta"):
        talks.talk("sys c1", "child", tenant, parent_session_id="parent")
    talks.talk("sys p1", "parent", "acme")
    relatives = talks.manager.table.relatives
    assert relatives(talks.session("acme/parent")) == [talks.session("acme/child")]
    assert relatives(talks.session("beta/child")) == []
    told = [talks.manager.table.parent_of(*who) for who in (("child", "beta"), ("child", ""), ("parent", "acme"))]
    assert told == ["parent", None, None]


def test_a_family_is_bounded() -> None:
    talks = Talks(400, blocks=400)
    for at in range(MOST_RELATIVES + 3):
        talks.talk(f"sys {at}", f"child{at}", parent_session_id="parent")
    check_integrity(talks.manager)
    last = talks.session(f"child{MOST_RELATIVES + 2}")
    assert (last.parent, talks.manager.table.relatives(last)) == ("parent", [])


def test_a_child_takes_nothing_decoded_from_its_parent() -> None:
    talks = Talks()
    talks.go_cold("sys task p1")
    talks.overwrite()
    talks.finish(talks.start("sys task p1 p2", "sys task p1"), "sys task p1 p2 p3")
    request = talks.start("sys task c1", "child", parent_session_id="sys task p1")
    assert (talks.running[request].resident, talks.running[request].loaded) == (0, 0)
    request = talks.start("sys task p1", "sys task p1", parent_session_id="sys task p1")
    assert talks.running[request].resident == 3, "it is the parent itself"


def test_listing_and_life_tell_the_parent() -> None:
    talks = Talks()
    histories = Histories(talks.manager, lambda: talks.now)
    talks.manager.events.subscribe(histories)
    for text in ("sys c1 c2", "sys c1 c2 c3"):
        talks.talk(text, "child", "acme", parent_session_id="parent")
    talks.talk("sys p1", "parent", "acme", parent_session_id="parent")
    listing = Listing(talks.manager, talks.driver.fronts, ["host"])
    child = talks.session("acme/child")
    assert listing.info(child).parent == listing.info(child, "acme").parent == "parent"
    assert listing.info(talks.session("acme/parent")).parent is None, "it named itself"
    assert talks.told(Parent) == [Parent("acme/child", "parent")]
    assert [event.text for event in histories.of(child) if event.kind == "parent"] == ["Works for parent."]
