"""The engine cores behind an API server: asked together, and their answers put together."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

from pydantic_core import from_json

from manthan.vllm_hooks.compat import ask_cores
from manthan.vllm_hooks.http.errors import ApiError
from manthan.vllm_hooks.inquiries import METHOD, ORDER, UNKNOWN, Answer

ANSWERED_S = 30.0
"""A core answers between two steps."""
DEAD = 503


class Cores:
    """client: vLLM's, of one engine or of several data-parallel ones, each of which has sessions of its own; None for a
    server without an engine."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def ask(self, what: str, asked: dict[str, Any]) -> list[Answer]:
        """What each says. Raises ApiError."""
        if self._client is None:
            raise ApiError(DEAD, "This server has no engine.")
        try:
            found = await asyncio.wait_for(ask_cores(self._client, METHOD, what, asked), ANSWERED_S)
        except TimeoutError:
            raise ApiError(DEAD, f"The engine has not answered within {ANSWERED_S:g} s.") from None
        if found is None:
            raise ApiError(DEAD, "The engine is dead.")
        return [from_json(answer) for answer in found]

    async def sessions(self, asked: dict[str, Any]) -> Answer:
        offset, limit = asked["offset"], asked["limit"]
        answers = await self.ask("sessions", asked)
        if len(answers) > 1:
            answers = await self.ask("sessions", asked | {"offset": 0, "limit": offset + limit})
            return together(answers, offset, limit, asked["descending"])
        return answers[0]

    async def session(self, what: str, asked: dict[str, Any]) -> Answer:
        """One session, looked at or steered. Engines may have one each of the same id: all of these are steered, and
        the one that was used last is shown. Raises ApiError."""
        answers = await self.ask(what, asked)
        known = [answer | {"engine": engine} for engine, answer in enumerate(answers) if "refused" not in answer]
        if known:
            return max(known, key=lambda answer: float(answer["last_used"]))
        refusals = sorted((answer["refused"] for answer in answers), key=lambda refused: refused[0] == UNKNOWN)
        status, why = refusals[0]
        raise ApiError(status, why)

    async def state(self, bound: str | None) -> Answer:
        return summed(await self.ask("state", {"bound": bound}))


def together(answers: Sequence[Answer], offset: int, limit: int, descending: bool) -> Answer:
    """Of several first pages, one page of all."""
    rows = [
        [(tuple(key), -engine, shown | {"engine": engine}) for key, shown in zip(*each, strict=True)]
        for engine, each in enumerate((answer["keys"], answer["sessions"]) for answer in answers)
    ]
    merged = heapq.merge(*rows, key=lambda row: row[0], reverse=descending)
    page = [shown for *_, shown in islice(merged, offset, offset + limit)]
    return {"total": sum(answer["total"] for answer in answers), "now": answers[0]["now"], "sessions": page}


def summed(answers: Sequence[Answer]) -> Answer:
    """What several engines have, together; of what is the same everywhere, the first one's."""
    first = answers[0]
    if len(answers) == 1:
        return first
    orders = zip_longest(*(answer["policy"]["order"] for answer in answers))
    order = [session for session in chain.from_iterable(orders) if session is not None]
    tiers = [_added(parts) for parts in zip(*(answer["store"]["tiers"] for answer in answers), strict=True)]
    return first | {
        "policy": first["policy"] | {"order": order[:ORDER]},
        "store": first["store"] | {"up": all(answer["store"]["up"] for answer in answers), "tiers": tiers},
        "pool": _added(answer["pool"] for answer in answers) | {"block_tokens": first["pool"]["block_tokens"]},
        "sessions": _added(answer["sessions"] for answer in answers),
        "totals": _added(answer["totals"] for answer in answers),
    }


def _added(parts: Iterable[Answer]) -> Answer:
    """Numbers by name, added up; of names, the first one's."""
    parts = list(parts)
    numbers: Counter[str] = Counter()
    for part in parts:
        numbers.update({name: value for name, value in part.items() if not isinstance(value, str)})
    return parts[0] | numbers
