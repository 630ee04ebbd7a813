"""Belady's optimum against all choices that there are, and against what real caches find."""

from belady import belady
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import BLOCK, EXCERPT, best_of_all, block_lru, request

from manthan.manager.simulator.traces import read_trace

texts = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=7)


@given(texts, st.integers(1, 4))
@settings(max_examples=examples(150), deadline=None)
def test_nobody_finds_more_and_somebody_as_much(texts: list[str], capacity: int) -> None:
    requests = [request(float(at), text) for at, text in enumerate(texts)]
    assert belady(requests, BLOCK, capacity) == best_of_all(requests, capacity)


@given(texts, st.integers(1, 8))
def test_lru_finds_no_more(texts: list[str], capacity: int) -> None:
    requests = [request(float(at), text, rest=0) for at, text in enumerate(texts)]
    assert block_lru(requests, capacity) <= belady(requests, BLOCK, capacity)


def test_the_last_token_is_always_computed() -> None:
    assert belady([request(0, "abc"), request(1, "abc")], BLOCK, 9) == 3
    assert belady([request(0, "abc", rest=0), request(1, "abc", rest=0)], BLOCK, 9) == 2


def test_answers_are_found_when_they_are_asked() -> None:
    assert belady([request(0, "a", answer="b"), request(1, "abc")], BLOCK, 9) == 2


def test_what_is_not_measured_fills_the_cache() -> None:
    requests = [request(at, "abc") for at in range(4)]
    assert belady(requests, BLOCK, 9) == 9
    assert belady(requests, BLOCK, 9, first=3) == 3


def test_with_room_for_all_it_finds_what_was_asked_before() -> None:
    trace = read_trace(EXCERPT)
    seen: set[bytes] = set()
    again = 0
    for one in trace.requests:
        usable = one.keys[: (one.input_tokens - 1) // 512]
        again += next((i for i, key in enumerate(usable) if key not in seen), len(usable))
        seen.update(one.keys)
    assert belady(trace.requests, 512, trace.distinct_blocks) == again > 0
