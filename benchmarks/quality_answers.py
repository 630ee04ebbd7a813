"""Agreement of two greedy answers of a chat: hot (the whole prompt was computed), and later (its KV was reused)."""

import statistics
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Self


class Agreement(NamedTuple):
    """Agreement over chats.

    same: number of chats whose answers are equal, all tokens. answers: number of chats. share: share of the hot
    answer's tokens before the first difference, mean over chats.
    """

    same: int
    answers: int
    share: float

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> Self | None:
        """Return the agreement of chats, each {"hot": token ids, "later": token ids}; None without chats."""
        if not answers:
            return None
        pairs = [(chat["hot"], chat["later"]) for chat in answers]
        shares = [alike(hot, later) / len(hot) for hot, later in pairs]
        return cls(sum(hot == later for hot, later in pairs), len(pairs), statistics.fmean(shares))


def alike(hot: Sequence[int], later: Sequence[int]) -> int:
    """Return the number of equal tokens up to the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(hot, later, strict=False)))
