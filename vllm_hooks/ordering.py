"""Returns first: the scheduler's waiting queue, the bound on reordering, and the number of tokens of a step."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

STEP_S = 0.1
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
    """Within one priority, preempted requests first, then by arrival time plus the time that a request stands back.

    A request stands back by up to `bound_s` for the tokens to compute, by all of it for a prompt of a full step or
    more. A request that the pool has no room for stands back by a further `bound_s`, until more blocks are free: those
    that need fewer blocks do not wait for it. A request `2 * bound_s` younger never passes, so that no request starves.

    A sorted list: each change finds its position in O(log n).

    Args:
        step_tokens: most tokens of a step.
        by_priority: True if `Request.priority` counts, the lowest first.
        bound_s: in seconds.
        free: returns the number of the pool's free blocks.
    """

    def __init__(self, step_tokens: int, by_priority: bool, bound_s: float, free: Callable[[], int]) -> None:
        self._step_tokens, self._by_priority, self._bound_s, self._free = step_tokens, by_priority, bound_s, free
        self._order: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._to_compute: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._front, self._back = count(-1, -1), count()
        self._latest = -inf
        """Latest arrival of a request that left the queue."""
        self._looked_at: tuple[str, int] | None = None
        """Id of the request that vLLM looks at, and free blocks then; None once vLLM has taken it."""
        self._too_large, self._free_then = set[str](), 0
        """Ids of requests that the pool has no room for, and free blocks when vLLM found the last of them so."""

    def passed(self, now: float) -> list[float]:
        """Return how many seconds each request has waited that a later one has passed."""
        arrivals = (entry.request.arrival_time for entry in self._entries.values())
        return [now - arrival for arrival in arrivals if arrival < self._latest]

    def update(self, request: Request, to_compute: int) -> None:
        """Set a request's number of tokens to compute. Before the first call, all its tokens count.

        Between `peek_request` and `pop_request` it must not be called: vLLM expects both to name the same request.
        """
        self._to_compute[request] = to_compute
        if (entry := self._entries.get(request.request_id)) is not None:
            self._push(request, entry.tie)

    def first_if_within(self, tokens: int) -> bool:
        """True if the first request has at most `tokens` tokens to compute, and the pool may have room for it.

        A request that vLLM has just left is sorted behind others first.
        """
        self._set_back()
        first = self._order[0].request if self._order else None
        if first is None or first.request_id in self._too_large:
            return False
        return self._to_compute.get(first, first.num_tokens) <= tokens

    def get(self, request_id: str) -> Request | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.request

    def _push(self, request: Request, tie: int) -> None:
        self.remove_requests([request])
        share = min(1.0, self._to_compute.get(request, request.num_tokens) / self._step_tokens)
        entry = _Entry(
            request.priority if self._by_priority else 0,
            request.status is not RequestStatus.PREEMPTED,
            request.arrival_time + self._bound_s * (share + (request.request_id in self._too_large)),
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
        """Return the first request.

        vLLM takes the request with `pop_request`. If the pool has no room for it, vLLM leaves it, and schedules no more
        in this step.
        """
        self._set_back()
        first = self._order[0].request
        self._looked_at = first.request_id, self._free()
        return first

    def _set_back(self) -> None:
        """Sort the request that vLLM has left behind others, and all such requests anew if more blocks are free."""
        changed = set[str]()
        if self._looked_at is not None:
            left, self._free_then = self._looked_at
            self._looked_at = None
            self._too_large.add(left)
            changed.add(left)
        if self._too_large and self._free() > self._free_then:
            changed, self._too_large = self._too_large, set()
        for request_id in changed:
            if (entry := self._entries.get(request_id)) is not None:
                self._push(entry.request, entry.tie)

    def pop_request(self) -> Request:
        request = self._order[0].request
        self._looked_at, self._latest = None, max(self._latest, request.arrival_time)
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


class StepLimit:
    """Limits on the tokens of a step, and on a prompt's tokens in it, so that returns wait less.

    A return waits for the step that runs, so that shorter steps serve returns sooner. On an H200 a step with 8,192
    tokens of an 8B model takes 290 ms. There is no limit for a request that is alone.

    vLLM schedules running requests first: the rest of a long prompt takes every step whole. If half a step is enough
    for the first request that waits, vLLM's `long_prefill_token_threshold` leaves half of it. A value that the operator
    has set stays.

    block_tokens: size of the largest block. vLLM computes a state's block whole.
    """

    def __init__(self, scheduler: Scheduler, waiting: ReturnsFirstQueue, block_tokens: int) -> None:
        self._scheduler, self._waiting, self._block_tokens = scheduler, waiting, block_tokens
        self._most = scheduler.max_num_scheduled_tokens
        self._least = min(self._most, max(LEAST_TOKENS, 2 * block_tokens))
        self._divides = scheduler.scheduler_config.long_prefill_token_threshold <= 0
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
            is_left = half < limit and self._waiting.first_if_within(half)
            self._scheduler.scheduler_config.long_prefill_token_threshold = half if is_left else 0

    def rest(self) -> None:
        """Take note of an idle engine, whose time is no step's."""
        self._last = 0, 0
        self._scheduler.max_num_scheduled_tokens = self._most
