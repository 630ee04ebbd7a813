"""Agreement of greedy answers with the answers when all was hot."""

import statistics
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Self


class Agreement(NamedTuple):
    """same: number of answers equal to the last token. share: of a hot answer, the equal part up to the first
    difference, on average.
    """

    same: int
    answers: int
    share: float

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> Self | None:
        """Compare each chat's answers as tokens, {"hot": [...], "later": [...]}; None without chats."""
        if not answers:
            return None
        pairs = [(chat["hot"], chat["later"]) for chat in answers]
        shares = [alike(hot, later) / len(hot) for hot, later in pairs]
        return cls(sum(hot == later for hot, later in pairs), len(pairs), statistics.fmean(shares))


def alike(hot: Sequence[int], later: Sequence[int]) -> int:
    """Return the number of equal tokens up to the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(hot, later, strict=False)))
