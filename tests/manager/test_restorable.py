"""What the cold store gives back, as who routes requests is told. The state machines of all kinds check it as well."""

from world import BESIDE, IDLE_AFTER_S, World

from manthan.manager.sessions.integrity import restorable
from manthan.manager.sessions.restorable import News
from manthan.manager.sessions.session import DropCause
from manthan.manager.work import Name

NOTHING = News([], [], [])


def world(**options: object) -> World:
    made = World(ranks=1, pool_blocks=20, cold_blocks=20, **options)  # type: ignore[arg-type]
    made.manager.restorable.listen()
    return made


def say(world: World, text: str, prompt: int | None = None) -> None:
    """A request and its answer; what it left behind is idle."""
    world.start(text, prompt or len(text), None)
    request = world.requests[-1]
    world.admit(request)
    if request.restore is not None:
        world.end_restore(request.restore, set())
    world.finish(request, len(text))


def let_go_cold(world: World) -> None:
    world.now += IDLE_AFTER_S
    world.step(0, 99)
    for spill in list(world.spills):
        world.answer(spill, 0, True)


def names(*keys: str, group: int = 0) -> list[Name]:
    return [(group, key.encode()) for key in keys]


def test_a_chain_is_told_of_when_it_is_cold_from_its_head_on() -> None:
    of = world()
    say(of, "abc")
    assert of.manager.restorable.take() == NOTHING
    of.now += IDLE_AFTER_S
    of.step(0, 99)
    for spill in sorted(of.spills, key=lambda spill: -len(spill.key)):
        assert of.manager.restorable.take().stored == []
        of.answer(spill, 0, True)
    assert of.manager.restorable.take().stored == names("a", "ab", "abc")
    say(of, "abcd")
    assert of.manager.restorable.take() == NOTHING, "codes outlive the way back"
    let_go_cold(of)
    assert of.manager.restorable.take().stored == names("abcd")


def expire(of: World, session_id: str) -> None:
    of.manager._pruning.forget_session(of.manager.table.by_id[session_id], DropCause.EXPIRED)


def fail(of: World, key: bytes, group: int | None = None) -> None:
    """These codes could not be read."""
    beside = [] if group is None else [(group, key)]
    of.manager.restore_started("somebody's", [b"a", b"ab", b"abc", b"abcd"])
    of.manager.restore_finished("somebody's", [key] if group is None else [], beside)


def test_what_two_sessions_share_is_told_of_once_and_until_both_are_gone() -> None:
    of = world()
    say(of, "abx")
    let_go_cold(of)
    of.manager.restorable.take()
    say(of, "aby")
    let_go_cold(of)
    assert of.manager.restorable.take().stored == names("aby")
    first, second = (session.session_id for session in of.manager.table.by_id.values())
    expire(of, first)
    news = of.manager.restorable.take()
    assert news.removed == news.forgotten == names("abx")
    expire(of, second)
    assert sorted(of.manager.restorable.take().removed) == names("a", "ab", "aby")


def test_codes_that_are_lost_take_those_behind_them_along() -> None:
    of = world()
    say(of, "abcd")
    let_go_cold(of)
    of.manager.restorable.take()
    of.start("abcde", 5, None)  # hot: its chain stays whatever happens to codes
    fail(of, b"ab")
    news = of.manager.restorable.take()
    assert sorted(news.removed) == names("ab", "abc", "abcd")
    assert news.forgotten == []


def test_with_windows_and_states_a_chain_is_told_of_up_to_an_anchor_and_with_it() -> None:
    of = world(beside=BESIDE)
    say(of, "abcd", prompt=3)
    assert of.manager.restorable.take().stored == []
    let_go_cold(of)
    told = of.manager.restorable.take().stored
    window, state = BESIDE
    parts = [*names("abc", "abcd", group=window), *names("abcd", group=state)]
    assert {*names("a", "ab", "abc", "abcd"), *parts} <= set(told)
    assert set(told) == set(restorable(of.manager))
    fail(of, b"abcd", state)
    gone = set(of.manager.restorable.take().removed)
    assert {*names("abcd"), *names("abcd", group=state)} <= gone
    assert set(told) - gone == set(restorable(of.manager)) != set()


def test_who_listens_late_is_told_of_all_that_there_is() -> None:
    of = World(ranks=1, pool_blocks=20, cold_blocks=20, beside=BESIDE)
    say(of, "abcd", prompt=3)
    let_go_cold(of)
    say(of, "xy")
    assert not of.manager.restorable.has_news
    of.manager.restorable.listen()
    told = set(of.manager.restorable.take().stored)
    assert told == set(restorable(of.manager)) != set()
    of.reset()
    assert set(of.manager.restorable.take().removed) == told
    assert not set(of.manager.restorable.all())
