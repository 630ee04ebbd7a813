"""Returns first: the scheduler's waiting queue, the bound on reordering, and the number of tokens of a step."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

BOUND_S = 10.0
"""Most seconds that a request stands back: it queues as if it had arrived so much later."""
RETURNS = 32
"""Number of latest returns by which `Losses` judges."""
MANY_LOST, FEW_LOST = 0.2, 0.1
"""Shares of returns' blocks whose KV was lost. Requests are held back from the first share on, until the second."""
STEP_S = 0.05
"""Seconds that a step with several requests should take at most.

Shorter steps compute less: with 48 agents and an 8B model on an H100, 12,000 prompt tokens a second in steps of
0.025 s, 19,000 in steps of 0.05 s, 24,000 in full steps.
"""
LEAST_TOKENS = 1024
"""Tokens always allowed in a step. Steps with fewer tell little about a token's time."""
DECAY = 0.8
"""Weight of the earlier steps, against the last step."""


class _Entry(NamedTuple):
    """Position in the queue; the smallest entry is first. `tie` is unique, so that requests are never compared."""

    priority: int
    not_preempted: bool
    due: float
    tie: int
    request: Request


class ReturnsFirstQueue(RequestQueue):
    """Within one priority, preempted requests first, then by arrival time plus up to `BOUND_S` for tokens to compute.

    The added time is the request's share of a step: `BOUND_S` for a prompt of a full step or more. A request `BOUND_S`
    younger never passes, so that no request starves. `hold_back` sets another bound.

    A sorted list: each change finds its position in O(log n).

    step_tokens: most tokens of a step. by_priority: True if `Request.priority` counts, the lowest first.
    """

    def __init__(self, step_tokens: int, by_priority: bool) -> None:
        self._step_tokens, self._by_priority = step_tokens, by_priority
        self._order: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._to_compute: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._front, self._back = count(-1, -1), count()
        self._bound_s = BOUND_S

    def hold_back(self, seconds: float) -> None:
        """Set the bound instead of `BOUND_S`: the most seconds that a request stands back."""
        if seconds != self._bound_s:
            self._bound_s = seconds
            for entry in list(self._entries.values()):
                self._push(entry.request, entry.tie)

    def held(self, now: float) -> list[float]:
        """Return how many seconds each request has waited that stands back by more than `BOUND_S`."""
        if self._bound_s <= BOUND_S:
            return []
        requests = ((entry.due, entry.request.arrival_time) for entry in self._entries.values())
        return [now - arrival for due, arrival in requests if due - arrival > BOUND_S]

    def update(self, request: Request, to_compute: int) -> None:
        """Set a request's number of tokens to compute. Before the first call, all its tokens count.

        Between `peek_request` and `pop_request` it must not be called: vLLM expects both to name the same request.
        """
        self._to_compute[request] = to_compute
        if (entry := self._entries.get(request.request_id)) is not None:
            self._push(request, entry.tie)

    def first_if_within(self, tokens: int) -> Request | None:
        """Return the first request if it has at most `tokens` tokens to compute."""
        first = self.peek_request() if self._entries else None
        return first if first and self._to_compute.get(first, first.num_tokens) <= tokens else None

    def get(self, request_id: str) -> Request | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.request

    def _push(self, request: Request, tie: int) -> None:
        self.remove_requests([request])
        tokens = self._to_compute.get(request, request.num_tokens)
        entry = _Entry(
            request.priority if self._by_priority else 0,
            request.status is not RequestStatus.PREEMPTED,
            request.arrival_time + self._bound_s * min(1.0, tokens / self._step_tokens),
            tie,
            request,
        )
        self._entries[request.request_id] = entry
        insort(self._order, entry)

    def add_request(self, request: Request) -> None:
        self._push(request, next(self._back))

    def prepend_request(self, request: Request) -> None:
        """Add a request, before all with the same priority and time."""
        self._push(request, next(self._front))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        return self._order[0].request

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        del self._order[bisect_left(self._order, self._entries.pop(request.request_id))]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove the requests, as far as queued."""
        for request in requests:
            if request.request_id in self._entries:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry.request for entry in self._order])


class Losses:
    """Share of blocks whose KV was lost before their session returned, among the latest returns.

    The share is large if the live sessions' KV exceeds pool and tiers: then each session computed again takes the room
    of another session's KV.
    """

    def __init__(self) -> None:
        self._known = self._lost = self._returns = 0.0
        self.are_many = False

    @property
    def share(self) -> float:
        """Number of lost blocks divided by the number of known blocks."""
        return self._lost / max(1.0, self._known)

    def add(self, known: int, lost: int) -> bool:
        """Take note of a return with `known` blocks of earlier requests. Return True if `are_many` has changed.

        lost: number of known blocks that were not found.
        """
        if not known:
            return False
        keep, before = 1 - 1 / RETURNS, self.are_many
        self._known, self._lost = keep * self._known + known, keep * self._lost + lost
        self._returns = keep * self._returns + 1
        limit = FEW_LOST if before else MANY_LOST
        self.are_many = self.share > limit and self._returns > RETURNS / 4
        return self.are_many is not before


class StepLimit:
    """Limits on the tokens of a step, and on a prompt's tokens in it, so that returns wait less.

    A return waits for the step that runs, so that shorter steps serve returns sooner. On an H200 a step with 8,192
    tokens of an 8B model takes 290 ms. There is no limit for a request that is alone.

    vLLM schedules running requests first: the rest of a long prompt takes every step whole. If half a step is enough
    for the first request that waits, vLLM's `long_prefill_token_threshold` leaves half of it. A request that did not
    take that half, because the pool has no room for it, is left none before more blocks are free. A value that the
    operator has set stays.

    block_tokens: size of the largest block. vLLM computes a state's block whole.
    """

    def __init__(self, scheduler: Scheduler, waiting: ReturnsFirstQueue, block_tokens: int) -> None:
        self._scheduler, self._waiting, self._block_tokens = scheduler, waiting, block_tokens
        self._most = scheduler.max_num_scheduled_tokens
        self._least = min(self._most, max(LEAST_TOKENS, 2 * block_tokens))
        self._divides = scheduler.scheduler_config.long_prefill_token_threshold <= 0
        self._tried = "", 0
        """Id of the request for which a step was divided last, and the number of free blocks then."""
        self._seconds = self._tokens = 0.0
        self._last = 0, 0
        """Tokens of the last two steps. While a step runs, vLLM may have scheduled the next one already."""
        self._began = 0.0

    @property
    def token_s(self) -> float | None:
        """Seconds of a full step over the step's tokens; None before a full step."""
        return self._seconds / self._tokens if self._tokens else None

    def begin(self, tokens: int, now: float, requests: int) -> None:
        """Take note of a new step with `tokens` tokens, at `now` s, and set the limits of the next step.

        requests: number of running or waiting requests.
        """
        limit = self._scheduler.max_num_scheduled_tokens
        if requests:
            if min(self._last) >= self._least:
                self._seconds = DECAY * self._seconds + now - self._began
                self._tokens = DECAY * self._tokens + self._last[0]
            self._last, self._began = (self._last[1], tokens), now
            limit = self._most
            if requests > 1 and self._seconds:
                limit = min(limit, max(self._least, int(STEP_S * self._tokens / self._seconds)))
            self._scheduler.max_num_scheduled_tokens = limit
        if self._divides:
            half = max(limit // 2, self._block_tokens)
            first = self._waiting.first_if_within(half) if half < limit else None
            free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            is_left = first is not None and (first.request_id != self._tried[0] or free > self._tried[1])
            if first is not None and is_left:
                self._tried = first.request_id, free
            self._scheduler.scheduler_config.long_prefill_token_threshold = half if is_left else 0

    def rest(self) -> None:
        """Take note of an idle engine, whose time is no step's."""
        self._last = 0, 0
        self._scheduler.max_num_scheduled_tokens = self._most
