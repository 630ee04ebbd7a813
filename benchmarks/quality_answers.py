"""How many greedy answers are the same as when all was hot, and how far they agree."""

import statistics
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Self


class Agreement(NamedTuple):
    """same: of so many answers, those that are the same to the last token. share: of a hot answer, what is the same up
    to the first difference, on average."""

    same: int
    answers: int
    share: float

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> Self | None:
        """Of each chat's answers as tokens, {"hot": [...], "later": [...]}; None without chats."""
        if not answers:
            return None
        pairs = [(chat["hot"], chat["later"]) for chat in answers]
        shares = [alike(hot, later) / len(hot) for hot, later in pairs]
        return cls(sum(hot == later for hot, later in pairs), len(pairs), statistics.fmean(shares))


def alike(hot: Sequence[int], later: Sequence[int]) -> int:
    """How many tokens are the same up to the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(hot, later, strict=False)))
