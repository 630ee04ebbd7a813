"""Parts of each request's wait for the first token, from the server's times and Manthan's log lines.

A session goes cold when all its full blocks are in Manthan's store. A restore loads them into vLLM's pool.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from manthan.benchmarks.load_talk import Asked, Talk
from manthan.benchmarks.restore import KEPT_SHARE

WENT_COLD = re.compile(
    r" (\d+\.\d{3}) \[.*\] Manthan: session (.+?) went cold after .* idle: \d+ blocks \((\d+) tokens\).* in (\d+) ms"
)
RESTORED = re.compile(
    r" (\d+\.\d{3}) \[.*\] Manthan: session (.+?) restored (\d+) of \d+ blocks \((\d+) tokens\).* in (\d+) ms"
)

FIRST, HOT, RESTORED_WHOLE, FETCHED = "first turn", "hot", "restored", "cached"
NOT_COLD, GOING_COLD, GONE = "overwritten before it was encoded", "going cold", "dropped from the store"
RECOMPUTED = "recomputed"


class Cold(NamedTuple):
    """Log line: a session went cold or was restored, with `tokens` tokens. at_s: seconds from the load test's start."""

    at_s: float
    took_ms: float
    tokens: int


@dataclass(frozen=True)
class Wait:
    """Parts of a request's time to the first token, in milliseconds, and the request's cache hits.

    queue: until the restore began, or without one until vLLM scheduled the request. restore: Manthan's fetching and
    decoding. after: from the restore's end until vLLM scheduled the request. compute: from the scheduling to the first
    token. rest: the API server, HTTP and the client. A part not measured is None.

    found: hit or miss, a constant above. restored_tokens: tokens restored for this request. missed_tokens: tokens of
    full blocks of earlier requests, computed again. ahead: computed tokens of all other prompts whose waits overlap
    this wait. evicted: how often a session went cold in the wait.
    """

    found: str
    ttft: float
    queue: float | None
    restore: float | None
    after: float | None
    compute: float | None
    rest: float | None
    restored_tokens: int
    missed_tokens: int
    ahead: int
    evicted: int


class Lines(NamedTuple):
    """Log lines by session, in the order of the log."""

    evictions: dict[str, list[Cold]]
    restores: dict[str, list[Cold]]


def read_log(log: Path | None, began: float) -> Lines:
    """Read a server's log; None has no lines. began: Unix time at which at_s is 0. Earlier lines have at_s < 0."""
    found = Lines({}, {})
    for line in log.read_text(errors="replace").splitlines() if log else ():
        if match := WENT_COLD.search(line):
            at, session, tokens, took = match.groups()
            found.evictions.setdefault(session, []).append(Cold(float(at) - began, float(took), int(tokens)))
        elif match := RESTORED.search(line):
            at, session, _, tokens, took = match.groups()
            found.restores.setdefault(session, []).append(Cold(float(at) - began, float(took), int(tokens)))
    return found


def explain(talk: Talk, lines: Lines, block_size: int, is_ours: bool) -> list[Wait]:
    """Return the wait of each answered request, in the order of talk.asked. is_ours: True if the server has Manthan."""
    answered = [one for one in talk.asked if not one.error]
    ends: dict[int, float] = {}
    waits = []
    for one in answered:
        waits.append(_wait(one, ends.get(one.chat, 0.0), lines, block_size, is_ours, _ahead(one, answered)))
        ends[one.chat] = one.sent_s + one.seconds
    return waits


def _wait(one: Asked, left_s: float, lines: Lines, block_size: int, is_ours: bool, ahead: int) -> Wait:
    """Return the wait of a request. left_s: time at which the user's previous answer ended; 0 for the first request."""
    restores = list(_between(lines.restores.get(one.session, ()), one.sent_s, one.sent_s + one.seconds))
    restored, restore = sum(cold.tokens for cold in restores), sum(cold.took_ms for cold in restores)
    full = min(one.known_tokens, one.prompt_tokens - 1) // block_size * block_size
    missed = max(0, full - one.cached_tokens)
    ttft = one.ttft_s * 1e3
    after = _after(one, restores)
    server = None if one.queue_ms is None or one.first_ms is None else one.queue_ms + one.first_ms
    return Wait(
        found=_found(one, left_s, lines, full, restored, is_ours),
        ttft=ttft,
        queue=None if one.queue_ms is None else max(0.0, one.queue_ms - restore - after),
        restore=restore if is_ours else None,
        after=after if is_ours and server is not None else None,
        compute=one.first_ms,
        rest=None if server is None else max(0.0, ttft - server),
        restored_tokens=restored,
        missed_tokens=missed,
        ahead=ahead,
        evicted=sum(
            1 for found in lines.evictions.values() for _ in _between(found, one.sent_s, one.sent_s + one.ttft_s)
        ),
    )


def _after(one: Asked, restores: Sequence[Cold]) -> float:
    """Return ms from the last restore's end until vLLM scheduled the request; 0 without a restore or timing."""
    if not restores or one.first_ms is None or one.queue_ms is None:
        return 0.0
    scheduled_s = one.sent_s + one.ttft_s - one.first_ms / 1e3
    left = one.queue_ms - sum(cold.took_ms for cold in restores)
    return min(max(0.0, (scheduled_s - restores[-1].at_s) * 1e3), max(0.0, left))


def _found(one: Asked, left_s: float, lines: Lines, full: int, restored: int, is_ours: bool) -> str:
    if not full:
        return FIRST
    if one.cached_tokens >= KEPT_SHARE * full:
        if restored:
            return RESTORED_WHOLE
        return HOT if is_ours else FETCHED
    if not is_ours:
        return RECOMPUTED
    evictions = lines.evictions.get(one.session, ())
    if before := list(_between(evictions, left_s, one.sent_s)):
        return GONE if before[-1].tokens >= KEPT_SHARE * full else NOT_COLD
    return GOING_COLD if any(_between(evictions, one.sent_s, one.sent_s + one.seconds)) else NOT_COLD


def _between(found: Sequence[Cold], begin: float, end: float) -> Iterator[Cold]:
    return (cold for cold in found if begin <= cold.at_s <= end)


def _ahead(one: Asked, others: Sequence[Asked]) -> int:
    """Return the number of computed tokens of all other prompts whose waits overlap this wait."""
    first = one.sent_s + one.ttft_s
    return sum(
        other.prompt_tokens - other.cached_tokens
        for other in others
        if other is not one and other.sent_s < first and other.sent_s + other.ttft_s > one.sent_s
    )
