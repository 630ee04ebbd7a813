"""Who goes first among waiting requests: the queue against a sorted list, and on a real engine."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from redis_server import RedisServer
from scripts import run_script
from vllm import SamplingParams
from vllm.config import SchedulerConfig
from vllm.v1.request import Request, RequestStatus

from manthan.vllm_hooks.ordering import LEAST_TOKENS, STEP_S, ReturnsFirstQueue, StepLimit

STEP = 1000
BOUND_S = 10.0
NAMES = itertools.count()


def request(tokens: int, arrival: float = 0.0, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(
        str(next(NAMES)), [1] * tokens, params, None, client_index=0, arrival_time=arrival, priority=priority
    )


def drain(queue: ReturnsFirstQueue) -> list[Request]:
    """Pop all, each as it was peeked."""
    order = list(queue)
    popped = []
    while queue:
        popped.append(queue.peek_request())
        assert queue.pop_request() is popped[-1]
    assert popped == order
    return popped


class Pool:
    """free: number of free blocks."""

    free = 100

    def get_num_free_blocks(self) -> int:
        return self.free


def queue_of(*requests: Request, by_priority: bool = False, pool: Pool | None = None) -> ReturnsFirstQueue:
    queue = ReturnsFirstQueue(STEP, by_priority, BOUND_S, (pool or Pool()).get_num_free_blocks)
    for one in requests:
        queue.add_request(one)
    return queue


def test_a_request_that_came_the_bound_later_never_passes() -> None:
    first, soon, late = request(50 * STEP), request(1, BOUND_S - 0.01), request(1, BOUND_S + 0.01)
    assert drain(queue_of(late, soon, first)) == [soon, first, late]


@pytest.mark.parametrize("by_priority", [True, False])
def test_a_users_priority_wins_where_vllm_heeds_it(by_priority: bool) -> None:
    urgent, cheap, preempted = request(50 * STEP, 5.0, -1), request(1), request(STEP)
    preempted.status = RequestStatus.PREEMPTED
    order = drain(queue_of(cheap, preempted, urgent, by_priority=by_priority))
    assert order == ([urgent, preempted, cheap] if by_priority else [preempted, cheap, urgent])


def test_a_request_without_room_lets_others_pass_until_more_blocks_are_free() -> None:
    pool = Pool()
    large, other, late = request(9, 0.0), request(50 * STEP, 1.0), request(1, 2 * BOUND_S + 0.1)
    queue = queue_of(late, other, large, pool=pool)
    assert queue.peek_request() is large
    assert queue.peek_request() is large, "nobody else comes within twice the bound"
    soon = request(STEP // 2, 2.0)
    queue.add_request(soon)
    assert queue.peek_request() is soon
    pool.free = 99
    assert queue.pop_request() is soon
    assert queue.peek_request() is large, "the first prompt stands back by as much, and came later"
    pool.free = 101
    assert drain(queue) == [large, other, late]


def test_all_that_found_no_room_are_looked_at_again_when_more_blocks_are_free() -> None:
    pool = Pool()
    requests = [request(9, 0.1 * at) for at in range(3)]
    queue = queue_of(*requests, pool=pool)
    assert [queue.peek_request() for _ in range(4)] == [*requests, requests[0]]
    pool.free += 1
    assert queue.peek_request() is requests[0]
    pool.free -= 2
    assert [queue.peek_request() for _ in range(2)] == requests[1:]


def test_a_preempted_request_without_room_lets_nobody_pass() -> None:
    preempted, soon = request(STEP), request(1)
    preempted.status = RequestStatus.PREEMPTED
    queue = queue_of(soon, preempted)
    assert [queue.peek_request() for _ in range(2)] == [preempted] * 2


def test_who_was_passed_is_told_with_the_time_of_the_wait() -> None:
    queue = queue_of(request(50 * STEP, 1.0), request(1, 2.0), request(1, 3.0))
    assert queue.passed(9.0) == []
    queue.pop_request()
    assert queue.passed(9.0) == [8.0]


class Ordered(RuleBasedStateMachine):
    """The queue next to a list of (priority, preempted, due, request), which is sorted each time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.queue = queue_of(by_priority=True, pool=self.pool)
        self.without_room: set[str] = set()
        self.out: list[Request] = []
        self.known: dict[str, int] = {}
        self.listed: list[Request] = []
        """Those in the queue, so that a stable sort by key gives its order."""

    def key(self, one: Request) -> Any:
        tokens = self.known.get(one.request_id, one.num_tokens)
        late = min(BOUND_S, BOUND_S * tokens / STEP) + BOUND_S * (one.request_id in self.without_room)
        return one.priority, one.status is not RequestStatus.PREEMPTED, one.arrival_time + late

    @property
    def sorted(self) -> list[Request]:
        return sorted(self.listed, key=self.key)

    @rule(tokens=st.integers(1, 2 * STEP), arrival=st.sampled_from([0.0, 0.5, 1.0, 3.0]), priority=st.integers(0, 2))
    def add(self, tokens: int, arrival: float, priority: int) -> None:
        one = request(tokens, arrival, priority)
        self.queue.add_request(one)
        self.listed.append(one)

    @precondition(lambda self: self.listed)
    @rule(count=st.integers(1, 4))
    def find_no_room(self, count: int) -> None:
        """Some steps look at the first request, and leave it; a last one tells the queue of it."""
        for _ in range(count):
            assert self.queue.peek_request() is self.sorted[0]
            self.without_room.add(self.sorted[0].request_id)
        assert not self.queue.first_if_within(0) or self.sorted[0].request_id not in self.without_room

    @rule()
    def free(self) -> None:
        self.pool.free += 1
        self.queue.first_if_within(0)
        self.without_room.clear()

    @precondition(lambda self: self.listed)
    @rule(data=st.data(), tokens=st.integers(0, 2 * STEP))
    def update(self, data: Any, tokens: int) -> None:
        one = data.draw(st.sampled_from(self.listed))
        self.known[one.request_id] = tokens
        self.queue.update(one, tokens)

    @precondition(lambda self: self.listed)
    @rule()
    def pop(self) -> None:
        one = self.queue.pop_request()
        assert one is self.sorted[0]
        self.listed.remove(one)
        self.out.append(one)

    @precondition(lambda self: self.out)
    @rule(preempted=st.booleans())
    def put_back(self, preempted: bool) -> None:
        """They were skipped, or the last of them was preempted."""
        some, self.out = ([self.out.pop()], self.out) if preempted else (self.out, [])
        if preempted:
            some[0].status = RequestStatus.PREEMPTED
            self.queue.prepend_request(some[0])
        else:
            self.queue.prepend_requests(reversed(some))
        self.listed = [*some, *self.listed]

    @precondition(lambda self: self.listed)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.listed + self.out), unique=True))
        self.queue.remove_requests(gone)
        self.listed = [one for one in self.listed if one not in gone]

    @invariant()
    def agrees(self) -> None:
        assert list(self.queue) == self.sorted
        assert len(self.queue) == len(self.listed)
        assert bool(self.queue) == bool(self.listed)

    @invariant()
    def nobody_is_passed_by_who_came_twice_the_bound_later(self) -> None:
        order = {one.request_id: at for at, one in enumerate(self.queue)}
        for one, other in itertools.permutations(self.listed, 2):
            same = self.key(one)[:2] == self.key(other)[:2]
            if same and one.arrival_time + 2 * BOUND_S < other.arrival_time:
                assert order[one.request_id] < order[other.request_id]


TestAgainstASortedList = Ordered.TestCase
TestAgainstASortedList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- tokens of a step -------------------------------------------------------------------------------------


def limit_of(tokens: int, block: int = 16, *waiting: Request, threshold: int = 0) -> tuple[StepLimit, Any]:
    """The limit, and the scheduler in which it sets the next step's tokens."""
    scheduling = SchedulerConfig.default_factory(long_prefill_token_threshold=threshold)
    scheduler: Any = SimpleNamespace(max_num_scheduled_tokens=tokens, scheduler_config=scheduling)
    return StepLimit(scheduler, queue_of(*waiting), block), scheduler


def limit_after(steps: int, token_s: float, tokens: int = 8192, block: int = 16, requests: int = 2) -> int:
    """The limit after steps each of which takes as many tokens as it may, and so many seconds for each."""
    (limit, scheduler), now = limit_of(tokens, block), 0.0
    for _ in range(steps):
        limit.begin(scheduler.max_num_scheduled_tokens, now, requests)
        now += scheduler.max_num_scheduled_tokens * token_s
    return int(scheduler.max_num_scheduled_tokens)


@pytest.mark.parametrize(
    ("token_s", "options", "tokens"),
    [
        (STEP_S / 2000, {}, 2000),
        (STEP_S / 9000, {}, 8192),
        (1.0, {}, LEAST_TOKENS),
        (1.0, {"block": 800}, 1600),
        (1.0, {"tokens": 512}, 512),
        (1.0, {"requests": 1}, 8192),
    ],
)
def test_steps_are_as_long_as_they_may_take(token_s: float, options: dict[str, int], tokens: int) -> None:
    assert limit_after(40, token_s, **options) == pytest.approx(tokens, rel=0.01)


def test_time_without_requests_and_steps_of_few_tokens_say_nothing() -> None:
    limit, scheduler = limit_of(8192)
    assert limit.token_s is None
    for now, tokens in (0.0, 8192), (0.01, 8192), (0.02, 8192):
        limit.begin(tokens, now, 2)
    assert limit.token_s == pytest.approx(0.01 / 8192)
    limit.rest()
    for now, tokens in (100.0, 8192), (100.01, 9), (200.0, 9), (300.0, 9), (400.0, 9):
        limit.begin(tokens, now, 2)
        assert scheduler.max_num_scheduled_tokens == 8192
    assert limit.token_s == pytest.approx(0.01 / 8192)


# -- a real engine ----------------------------------------------------------------------------------------

SCENARIOS = ["resident", "late", "saved", "lost", "overwritten", "aborted", "grammar", "preempted"]
STEPS = ["short_steps", "divided", "without_room"]
FIRSTS = ["first-0", "first-1", "first-2"]


def served(
    what: list[str], policy: str, ordering: str, is_async: bool = False, talk: list[int] | None = None, **manthan: Any
) -> dict[str, Any]:
    job = {"what": what, "policy": policy, "is_async": is_async, "talk": talk}
    job["manthan"] = {"ordering": ordering} | ({"admission_s": BOUND_S} if ordering == "returns" else {}) | manthan
    found: dict[str, Any] = run_script("ordered_sessions.py", job)[0]
    return found


@pytest.fixture(scope="module")
def returns() -> dict[str, Any]:
    """With asynchronous scheduling, as a server has it."""
    return served([*SCENARIOS, *STEPS], "fcfs", "returns", is_async=True)


@pytest.fixture(scope="module")
def arrival() -> dict[str, Any]:
    return served(["resident", "saved"], "fcfs", "arrival")


@pytest.mark.parametrize("where", ["resident", "saved"])
def test_a_return_passes_first_prompts_that_came_before_it(
    returns: dict[str, Any], arrival: dict[str, Any], where: str
) -> None:
    assert (returns["scheduler"], arrival["scheduler"]) == ("AsyncScheduler", "Scheduler")
    assert returns[where]["admitted"] == ["back", *FIRSTS]
    assert arrival[where]["admitted"] == [*FIRSTS, "back"]
    assert returns[where]["answers"] == arrival[where]["answers"]


@pytest.mark.parametrize("why", ["late", "lost"])
def test_a_return_that_came_too_late_or_lost_its_kv_passes_nobody(returns: dict[str, Any], why: str) -> None:
    assert returns[why]["admitted"] == [*FIRSTS, "back"]


def test_a_return_whose_blocks_are_overwritten_as_it_waits_is_as_a_first_prompt(returns: dict[str, Any]) -> None:
    assert returns["overwritten"]["admitted"][-2:] == ["short", "gone"]


def test_an_aborted_request_leaves(returns: dict[str, Any]) -> None:
    assert returns["aborted"]["counts"] == [0, 2]
    assert returns["aborted"]["admitted"] == ["first-0", "first-2"] == sorted(returns["aborted"]["answers"])


def test_who_waits_for_a_grammar_is_passed_and_served_then(returns: dict[str, Any]) -> None:
    assert sorted(returns["grammar"]["admitted"]) == ["bound", "free"] == sorted(returns["grammar"]["answers"])


def test_a_preempted_request_resumes_before_a_shorter_one_that_came_earlier(returns: dict[str, Any]) -> None:
    assert returns["preempted"]["admitted"] == ["long-0", "long-1", "long-1", "short"]
    assert {name: len(found) for name, found in returns["preempted"]["answers"].items()} == {
        **dict.fromkeys(["long-0", "long-1"], 100),
        "short": 4,
    }


def test_several_requests_are_computed_in_short_steps_and_one_alone_in_whole_ones(returns: dict[str, Any]) -> None:
    assert returns["short_steps"] == {"alone": 512, "together": 96}


def test_a_return_does_not_wait_for_the_end_of_a_long_prompt(returns: dict[str, Any]) -> None:
    found = returns["divided"]
    before, computed = found["before"]["long"], found["computed"]["long"]
    assert 0 < before < computed <= before + 3 * 96 < 700
    assert len(found["answers"]) == 3


@pytest.mark.parametrize(
    ("tokens", "block", "threshold"), [(100, 16, 500), (501, 16, 0), (100, 600, 600), (100, 1000, 0)]
)
def test_a_step_is_divided_for_a_return_that_fits_into_half_of_it(tokens: int, block: int, threshold: int) -> None:
    limit, scheduler = limit_of(1000, block, request(tokens))
    limit.begin(0, 0.0, 1)
    assert scheduler.scheduler_config.long_prefill_token_threshold == threshold


def test_no_half_is_left_to_a_return_that_the_pool_has_no_room_for() -> None:
    limit, scheduler = limit_of(1000, 16, request(100))
    thresholds = []
    for is_looked_at in False, True, False:
        if is_looked_at:
            limit._waiting.peek_request()
        limit.begin(0, 0.0, 1)
        thresholds.append(scheduler.scheduler_config.long_prefill_token_threshold)
    assert thresholds == [500, 0, 0]
    limit._waiting.add_request(request(101))
    limit.begin(0, 0.0, 1)
    assert scheduler.scheduler_config.long_prefill_token_threshold == 500, "another request is first"


def test_a_threshold_of_the_operators_stays() -> None:
    for waiting in [request(1)], []:
        limit, scheduler = limit_of(1000, 16, *waiting, threshold=77)
        limit.begin(0, 0.0, 1)
        assert scheduler.scheduler_config.long_prefill_token_threshold == 77


def test_a_request_that_the_pool_has_no_room_for_lets_others_pass(returns: dict[str, Any]) -> None:
    assert returns["without_room"]["admitted"] == ["long", "small", "large"]
    assert len(returns["without_room"]["answers"]) == 3


@pytest.mark.slow
def test_a_longer_bound_lets_returns_pass_for_longer() -> None:
    found = served(["late"], "fcfs", "returns", is_async=True, admission_s=2 * BOUND_S)
    assert found["late"]["admitted"] == ["back", *FIRSTS]


@pytest.mark.slow
def test_priorities_of_users_go_over_the_order() -> None:
    found = served(["priorities"], "priority", "returns")
    assert found["priorities"]["admitted"] == ["urgent", "back", "first", "patient"]


@pytest.mark.slow
def test_a_return_that_another_engine_has_served_passes_once_it_is_found(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        tiers = {"kind": "redis", "redis": {"url": server.url}}
        talk = served(["save"], "fcfs", "returns", tiers=tiers)["save"]
        found = served(["looked_up"], "fcfs", "returns", talk=talk, tiers=tiers)
    assert found["looked_up"]["admitted"] == ["first-0", "back", "first-1", "first-2"]


def test_vllms_own_queue_stays_where_the_order_is_arrival(arrival: dict[str, Any]) -> None:
    assert arrival["kind"] == "FCFSRequestQueue"
