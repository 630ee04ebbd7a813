"""What the best of all caches would have found, knowing the future.

L. A. Belady: A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5 (2), 1966; here
with bypass: a block that is needed later than all others need not be taken in.
"""

import heapq
from collections.abc import Sequence

from manthan.manager.simulator.traces import TracedRequest


def belady(requests: Sequence[TracedRequest], block_tokens: int, capacity: int, first: int = 0) -> int:
    """Blocks that a cache of `capacity` blocks finds at most: of each prompt, an unbroken run from its beginning on.

    Only what is found from the request number `first` on is counted; the last token of a prompt is always computed.
    Whoever asks for a block asks for all before it, so what is kept is whole prefixes if, of blocks that are needed at
    the same time, the deeper goes first. O(n log n) for n blocks of all requests.
    """
    following = _next_uses(requests)
    cached: dict[bytes, int] = {}  # to its next use
    order: list[tuple[int, int, bytes]] = []  # next use and depth, both negative; out of date where `cached` differs
    found = 0
    for number, request in enumerate(requests):
        if number >= first:
            usable = min(request.prompt_blocks, (request.input_tokens - 1) // block_tokens)
            found += next((i for i in range(usable) if request.keys[i] not in cached), usable)
        for depth, key in enumerate(request.keys):
            cached[key] = following[number][depth]
            heapq.heappush(order, (-cached[key], -depth, key))
        while len(cached) > capacity:
            next_use, _, key = heapq.heappop(order)
            if cached.get(key) == -next_use:
                del cached[key]
    return found


def _next_uses(requests: Sequence[TracedRequest]) -> list[list[int]]:
    """For each block of each request, the number of the request that asks for it next; a number too high for none."""
    never = len(requests)
    upcoming: dict[bytes, int] = {}
    following = []
    for number in reversed(range(never)):
        keys = requests[number].keys
        following.append([upcoming.get(key, never) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
    return following[::-1]
