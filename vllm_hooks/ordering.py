"""Session returns before first prompts: a waiting queue for vLLM's scheduler, and limits on the tokens of a step.

A session return is a request whose prompt is mostly in the prefix cache or in Manthan's tiers, not to be computed.
"""

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
"""Most seconds that a step with several requests should take.

In shorter steps fewer tokens are computed in a second. With 48 agents and an 8B model on an H100: 12,000 prompt tokens
a second in steps of 0.025 s, 19,000 in steps of 0.05 s, 24,000 in steps with vLLM's limit.
"""
LEAST_TOKENS = 1024
"""Least limit of a step's tokens, unless vLLM's is lower. From smaller steps the time of a token is not estimated."""
DECAY = 0.8  # factor on sums of earlier steps' seconds and tokens, at each further step


class _Entry(NamedTuple):
    """Position in the queue; the smallest entry is first. `tie` is unique, so that requests are never compared."""

    priority: int
    not_preempted: bool
    due: float
    tie: int
    request: Request


class ReturnsFirstQueue(RequestQueue):
    """Waiting queue. In a priority, preempted requests are first, then others in the order of arrival time plus delay.

    The delay is `bound_s * tokens to compute / step_tokens`, at most `bound_s` seconds. If vLLM leaves a request for
    lack of room, its delay is `bound_s` more until more blocks are free, so that smaller requests pass.
    Apart from priority and preemption, no request passes one that arrived `2 * bound_s` earlier: none starves.

    step_tokens: most tokens that vLLM computes in a step. by_priority: True to serve requests with the lowest
    `Request.priority` first; False to ignore it. free: returns the number of the pool's free blocks.
    """

    def __init__(self, step_tokens: int, by_priority: bool, bound_s: float, free: Callable[[], int]) -> None:
        self._step_tokens, self._by_priority, self._bound_s, self._free = step_tokens, by_priority, bound_s, free
        self._order: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._to_compute: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._front, self._back = count(-1, -1), count()
        self._latest = -inf  # latest arrival time among the requests that vLLM has taken from the queue
        self._looked_at: tuple[str, int] | None = None
        """Id of the request that `peek_request` last returned, and free blocks then; None once vLLM has taken it."""
        self._too_large, self._free_then = set[str](), 0
        """Ids of requests that vLLM has left in the queue, for lack of room, and free blocks when it last left one."""

    def passed(self, now: float) -> list[float]:
        """Return the seconds waited by each request in the queue that came before one that vLLM has taken from it."""
        arrivals = (entry.request.arrival_time for entry in self._entries.values())
        return [now - arrival for arrival in arrivals if arrival < self._latest]

    def update(self, request: Request, to_compute: int) -> None:
        """Set the number of tokens to compute for a request. Before the first call, all the request's tokens count.

        Do not call `update` between `peek_request` and `pop_request`: vLLM expects both to return the same request.
        """
        self._to_compute[request] = to_compute
        if (entry := self._entries.get(request.request_id)) is not None:
            self._push(request, entry.tie)

    def first_if_within(self, tokens: int) -> bool:
        """True if the first request has at most `tokens` tokens to compute, and the pool may have room for the request.

        A request that vLLM has just left in the queue is delayed before the check.
        """
        self._set_back()
        first = self._order[0].request if self._order else None
        if first is None or first.request_id in self._too_large:
            return False
        return self._to_compute.get(first, first.num_tokens) <= tokens

    def get(self, request_id: str) -> Request | None:
        return self._entries[request_id].request if request_id in self._entries else None

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
        self._push(request, next(self._front))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """Return the first request, after a delay of the request that vLLM has last left in the queue.

        vLLM then takes the request with `pop_request`, or leaves it for lack of room, and ends the step's admission.
        """
        self._set_back()
        first = self._order[0].request
        self._looked_at = first.request_id, self._free()
        return first

    def _set_back(self) -> None:
        """Delay the request that vLLM left in the queue. End all such delays if more blocks are free than then."""
        changed = set[str]()
        if self._looked_at is not None:
            left, self._free_then = self._looked_at
            self._looked_at = None
            self._too_large.add(left)
            changed.add(left)
        if self._too_large and self._free() > self._free_then:
            changed, self._too_large = self._too_large, set()
        for entry in [self._entries[request_id] for request_id in changed & self._entries.keys()]:
            self._push(entry.request, entry.tie)

    def pop_request(self) -> Request:
        request = self._order[0].request
        self._looked_at, self._latest = None, max(self._latest, request.arrival_time)
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        del self._order[bisect_left(self._order, self._entries.pop(request.request_id))]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove the requests that are in the queue. Ignore the others."""
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
    """Limits on the tokens of a step, and on the tokens of one prompt in a step, so that session returns wait less.

    A new request waits for the end of the running step, so that shorter steps serve requests sooner. On an H200 a step
    with 8,192 tokens of an 8B model takes 290 ms. A request that is alone gets steps with vLLM's own limit.

    vLLM schedules running requests first, so that the rest of a long prompt fills each step. If half a step is enough
    for the first waiting request, vLLM's `long_prefill_token_threshold` is set to half a step. If the operator has set
    that threshold, it is not changed.

    block_tokens: tokens of the largest block. Limits are not smaller, because vLLM computes a block of states at once.
    """

    def __init__(self, scheduler: Scheduler, waiting: ReturnsFirstQueue, block_tokens: int) -> None:
        self._scheduler, self._waiting, self._block_tokens = scheduler, waiting, block_tokens
        self._most = scheduler.max_num_scheduled_tokens
        self._least = min(self._most, max(LEAST_TOKENS, 2 * block_tokens))
        self._divides = scheduler.scheduler_config.long_prefill_token_threshold <= 0
        self._seconds = self._tokens = 0.0
        self._last = 0, 0  # tokens of the last two steps, because vLLM may schedule a step while another runs
        self._began = 0.0

    @property
    def token_s(self) -> float | None:
        """Mean seconds for a token in steps with at least `_least` tokens; None until known."""
        return self._seconds / self._tokens if self._tokens else None

    def begin(self, tokens: int, now: float, requests: int) -> None:
        """Note a new step with `tokens` tokens, begun at `now` in seconds, and set the limits of the next step.

        requests: number of running and waiting requests together.
        """
        limit = self._scheduler.max_num_scheduled_tokens
        if requests:
            if min(self._last) >= self._least:
                self._seconds = DECAY * self._seconds + now - self._began
                self._tokens = DECAY * self._tokens + self._last[0]
            self._last, self._began = (self._last[1], tokens), now
            limit = self._most
            if requests > 1 and self.token_s:
                limit = min(limit, max(self._least, int(STEP_S / self.token_s)))
            self._scheduler.max_num_scheduled_tokens = limit
        if self._divides:
            half = max(limit // 2, self._block_tokens)
            is_left = half < limit and self._waiting.first_if_within(half)
            self._scheduler.scheduler_config.long_prefill_token_threshold = half if is_left else 0

    def rest(self) -> None:
        """Note that the engine is idle, so that idle time does not count as a step's. Reset the limit of a step."""
        self._last = 0, 0
        self._scheduler.max_num_scheduled_tokens = self._most
