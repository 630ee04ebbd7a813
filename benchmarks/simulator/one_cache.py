"""Replay a trace through a single cache without a KV pool, and through a cache that knows all later requests.

found = one_cache(trace.requests, policy, options, blocks, trace.block_tokens)
best = clairvoyant(trace.requests, blocks, trace.block_tokens)
"""

import heapq
from collections.abc import Iterable, Sequence

from manthan.benchmarks.simulator.traces import TracedRequest
from manthan.manager.events import DropCause, Events
from manthan.manager.pool import Mark, Runway
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.manager import SessionManager
from manthan.policies import EvictionPolicy, PolicyOptions


class _Marks:
    """Marks of a pool's blocks, which tell exact from lossy KV: here all KV is exact."""

    def __getitem__(self, block_id: int) -> Mark:
        return Mark.EXACT


class _WholePool:
    """Pool that reports all blocks as resident, so that the blocks of a request that just ended can be stored."""

    marks = _Marks()

    def lookup(self, group: int, block_hashes: Sequence[bytes]) -> list[int]:
        return [0] * len(block_hashes)

    def _ignore(self, *_: object) -> None:
        """Do nothing: the pool has no free queue to keep in order."""

    hold = keep = lead = forget = release = _ignore


def one_cache(
    requests: Iterable[TracedRequest],
    policy: type[EvictionPolicy],
    options: PolicyOptions | None,
    capacity: int,
    block_tokens: int,
) -> list[int]:
    """Return the number of blocks that each request finds in a cache of `capacity` blocks.

    A request takes no time. Its session's blocks are stored at once, as far as the policy drops stored blocks to make
    room. The session manager and the policy are those of a server.
    """
    shape = MemoryShape({0: GroupShape(block_tokens, 1, {0: 1}, is_lossless=True)})
    manager = SessionManager(policy, shape, capacity, 0.0, Events(), options=options)
    manager.bind(Runway(_WholePool(), 0))  # type: ignore[arg-type]
    found = []
    for number, traced in enumerate(requests):
        name, now, prompt = str(number), traced.at, traced.hashes[: traced.prompt_blocks]
        request = manager.request_started(
            name, prompt, traced.session, now, tokens=traced.input_tokens, hints=traced.hints
        )
        found.append(manager.match(request, 0, traced.usable_blocks(block_tokens)))
        tokens = traced.input_tokens + traced.output_tokens
        manager.request_finished(name, traced.hashes, now, tokens=tokens, ending=traced.stop)
        for plan in manager.plan_stores(now, room=len(traced.hashes), wanted=0):
            manager.stored(plan, dict.fromkeys(range(len(plan.rows)), 1), now, {})
        session = request.session
        if manager.table.by_id.get(session.session_id) is session and not session.is_cold:  # the rest did not fit
            manager.cut(session, manager.blocks.saved_prefix(session.rows), DropCause.ABANDONED)
    return found


def clairvoyant(requests: Sequence[TracedRequest], capacity: int, block_tokens: int) -> list[int]:
    """Return the number of blocks that each request finds in a cache of `capacity` blocks that knows all requests.

    The block with the latest next use is dropped first, and of several such blocks the one furthest from its prompt's
    start (L. A. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal 1966).
    A request's own blocks may be dropped at once. The cache holds whole prefixes, because a request that uses a block
    uses all blocks before it. The time is O(n log n) for n blocks of all requests.
    """
    following = _next_uses(requests)
    kept: dict[bytes, int] = {}
    """Index of the next request that uses each kept block, by block hash; len(requests) if none does."""
    order: list[tuple[int, int, bytes]] = []
    """Heap of (-next use, -index in the latest request with the block, block hash). Old entries contradict `kept`."""
    found = []
    for traced, uses in zip(requests, following, strict=True):
        most = traced.usable_blocks(block_tokens)
        found.append(next((at for at in range(most) if traced.hashes[at] not in kept), most))
        for depth, (block_hash, use) in enumerate(zip(traced.hashes, uses, strict=True)):
            kept[block_hash] = use
            heapq.heappush(order, (-use, -depth, block_hash))
        while len(kept) > capacity:
            use, _, block_hash = heapq.heappop(order)
            if kept.get(block_hash) == -use:
                del kept[block_hash]
    return found


def _next_uses(requests: Sequence[TracedRequest]) -> list[list[int]]:
    """Return the index of the next request that uses each block of each request; len(requests) if none does."""
    never, upcoming, following = len(requests), dict[bytes, int](), []
    for number in reversed(range(never)):
        hashes = requests[number].hashes
        following.append([upcoming.get(block_hash, never) for block_hash in hashes])
        upcoming.update(dict.fromkeys(hashes, number))
    return following[::-1]
