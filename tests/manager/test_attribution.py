"""What is remembered of a session whose KV is gone, whose conversation was changed, or that only looks like another."""

from engine import SHAPE, Engine, chain

from manthan.manager.sessions.session import Block, DropCause, Session
from manthan.manager.sessions.tips import Tips
from manthan.policies import SessionView


def view(engine: Engine, session_id: str) -> SessionView:
    return engine.manager.table.view(engine.session(session_id), 1)


def lose_everything(engine: Engine) -> None:
    """All codes of what is cold make room for one that is larger than the store."""
    engine.evict()
    engine.now += 1
    engine.talk(" ".join(f"w{i}" for i in range(engine.manager.budget.nbytes // SHAPE.cold_nbytes)), "large")
    engine.evict()


def test_a_session_that_lost_its_kv_has_its_history_when_it_returns() -> None:
    engine = Engine(capacity=4)
    engine.talk("a b", "s")
    engine.talk("a b c", "s")
    ended = engine.now
    lose_everything(engine)
    assert set(engine.chains()) == {"large"}
    engine.now += 20
    engine.start("a b c d", "s")
    assert engine.session("s").chain == []
    assert (view(engine, "s").uses, view(engine, "s").gap, view(engine, "s").created) == (3, engine.now - ended, 0.0)


def test_one_whose_tail_was_dropped_is_known_again() -> None:
    engine = Engine(capacity=4)
    engine.talk("a b c", "s")
    engine.evict()
    engine.now += 1
    engine.talk("x y z", "other")
    engine.evict()
    assert engine.chains()["s"] == "a"
    engine.start("a b c d", "s")
    assert engine.states()["s"] == "hot"
    assert view(engine, "s").uses == 2


def test_a_name_is_not_given_twice_to_one_that_comes_back() -> None:
    engine = Engine(capacity=4)
    engine.talk("a b", "s")
    lose_everything(engine)
    engine.talk("x y", "s")
    engine.start("a b c", "s")
    assert {name for name in engine.chains() if name.startswith("s")} == {"s", "s~2"}


def test_a_changed_conversation_goes_on_with_its_history() -> None:
    engine = Engine()
    engine.talk("sys a b", "old")
    engine.talk("sys a b c d", "old")
    engine.now = 7.0
    engine.start("sys a b x", None)
    changed = view(engine, "anonymous-1")
    assert (changed.uses, changed.gap, changed.left_tokens) == (3, 7.0, 2 * 16)
    assert engine.chains()["old"] == "sys a b c d"


def test_who_only_shares_a_beginning_with_many_is_a_new_session() -> None:
    engine = Engine()
    engine.talk("sys a b")
    engine.talk("sys c d")
    engine.talk("sys e f")
    assert [view(engine, name).uses for name in engine.chains()] == [1, 2, 1]  # the second might have been a change
    assert view(engine, "anonymous-3").left_tokens == 0


def test_a_session_that_ends_where_others_go_on_is_not_everybodys() -> None:
    engine = Engine()
    engine.talk("sys p a b")
    engine.talk("sys p")
    engine.talk("sys p c d")
    engine.talk("sys p e f")
    assert set(engine.chains().values()) == {"sys p a b", "sys p", "sys p c d", "sys p e f"}


def test_tokens_are_counted_exactly_where_they_are_said() -> None:
    engine = Engine()
    manager = engine.manager
    manager.request_started("r", chain("a b"), "s", 0.0, tokens=37)
    manager.request_finished("r", chain("a b c"), 1.0, tokens=50)
    assert (view(engine, "s").added_tokens, view(engine, "s").answer_tokens) == (37, 13)
    manager.request_started("q", chain("a b c"), "s", 2.0, tokens=58)
    assert (view(engine, "s").added_tokens, view(engine, "s").gap) == (8, 1.0)


def test_the_oldest_are_forgotten() -> None:
    tips = Tips()
    for i in range(5):
        key = b"%d" % i
        tips.remember(Session(f"s{i}", None, 0.0, 0.0, chain=[Block(key, 0)]), limit=3)
    assert [tips.recall([b"%d" % i], None, "") is not None for i in range(5)] == [False, False, True, True, True]


def test_a_name_is_known_by_that_name_or_none() -> None:
    tips = Tips()
    tips.remember(Session("s", "s", 0.0, 0.0, chain=[Block(b"k", 0)]), limit=3)
    assert tips.recall([b"k"], None, "") is tips.recall([b"k"], "s", "") is not None
    assert tips.recall([b"k"], "other", "") is None
    assert tips.recall([b"k"], "s", "somebody") is None


# -- answers that come back changed -----------------------------------------------------------------------


def test_a_session_whose_thinking_is_left_out_goes_on() -> None:
    engine = Engine()
    engine.finish(engine.start("sys a b", "s"), "sys a b think1 think2 answer")
    engine.evict()
    engine.now += 1
    request = engine.start("sys a b answer c", "s")
    assert engine.chains() == {"s": "sys a b"}
    assert (view(engine, "s").uses, view(engine, "s").left_tokens) == (2, 3 * 16)
    [dropped] = engine.manager.take_drops()
    assert ({*dropped.keys}, dropped.cause) == ({*chain("sys a b think1 think2 answer")[3:]}, DropCause.ABANDONED)
    engine.finish(request, "sys a b answer c think3 answer2")
    assert engine.chains() == {"s": "sys a b answer c think3 answer2"}


def test_nothing_is_left_of_what_was_left_out() -> None:
    engine = Engine()
    prompt = "sys a"
    for turn in range(20):
        engine.finish(engine.start(prompt, "s"), f"{prompt} think{turn} thought{turn} answer{turn}")
        engine.evict()
        engine.manager.take_drops()
        prompt += f" answer{turn} question{turn}"
    assert set(engine.chains()) == {"s"}
    assert engine.manager.usage.cold_blocks == len(f"{prompt} x".split()) == len(engine.session("s").chain)


def test_a_next_prompt_that_ends_within_the_old_answer_s_block() -> None:
    engine = Engine()
    manager = engine.manager
    manager.request_started("q", chain("a b"), "s", 0.0, tokens=35)
    manager.request_finished("q", chain("a b think thought"), 0.0, tokens=70)
    manager.request_started("again", chain("a b"), "s", 1.0, tokens=35)  # another answer is wanted: both may be
    assert engine.chains() == {"s": "a b think thought"}
    manager.request_finished("again", chain("a b other"), 1.0, tokens=50)
    assert engine.chains() == {"s": "a b think thought", "s~2": "a b other"}
    manager.request_started("next", chain("a b"), "s", 2.0, tokens=45)
    assert sorted(engine.chains().values()) in (["a b", "a b other"], ["a b", "a b think thought"])


def test_a_question_aside_leaves_the_conversation_alone() -> None:
    engine = Engine()
    engine.talk("sys a b c d", "s")
    engine.talk("sys title t", "s")
    assert engine.chains() == {"s": "sys a b c d", "s~2": "sys title t"}


def test_without_a_name_it_may_be_somebody_else() -> None:
    engine = Engine()
    engine.talk("sys a b think")
    engine.talk("sys a b answer c")
    assert sorted(engine.chains().values()) == ["sys a b answer c", "sys a b think"]
    assert view(engine, "anonymous-2").uses == 2  # its history is known all the same
