"""Which of several policies finds most of late, and whether that is more than chance."""

from collections.abc import Sequence
from itertools import combinations

HALF_LIFE = 512
"""Requests after which what was found counts half as much."""
SURE = 2.0
"""Standard deviations by which another must have found more than the leader.

Less changes too often where few sessions fit."""
GROWTH = 2 ** (1 / HALF_LIFE)
LIMIT = 2.0**200


class Contest:
    """One leads until another has surely found more, request by request of the same requests.

    What two of them found differs at few requests, and by whole sessions. So each difference counts as one draw, and
    their sum is compared with the root of the sum of their squares: its standard deviation, if it were chance. Where
    little is found that takes longer, by itself. O(contestants²) a request at which something was found, else O(1).
    """

    def __init__(self, names: Sequence[str], leader: str) -> None:
        self.names, self.leader = tuple(names), leader
        self.found = [0.0] * len(self.names)
        """Bytes that each has found, all in one growing unit: a request counts GROWTH times as much as the last one."""
        self._squares = dict.fromkeys(combinations(range(len(self.names)), 2), 0.0)
        """Of two contestants: what one found and the other did not at a request, squared, in the unit's square."""
        self._unit = 1.0

    def add(self, found: Sequence[float]) -> None:
        """What each found at one request, in the order of their names."""
        self._unit *= GROWTH
        if self._unit > LIMIT:
            self._shrink()
        if not any(found):
            return
        for number, nbytes in enumerate(found):
            self.found[number] += self._unit * nbytes
        for one, other in self._squares:
            if found[one] != found[other]:
                self._squares[one, other] += self._unit**2 * (found[one] - found[other]) ** 2

    def look(self) -> None:
        """Whoever has surely found more than the leader leads."""
        best, leader = max(range(len(self.names)), key=self.found.__getitem__), self.names.index(self.leader)
        if best == leader:
            return
        squares = self._squares[min(best, leader), max(best, leader)]
        if self.found[best] - self.found[leader] > SURE * squares**0.5:
            self.leader = self.names[best]

    def _shrink(self) -> None:
        """Numbers would become too large: begin again with a unit of 1."""
        self.found = [nbytes / self._unit for nbytes in self.found]
        self._squares = {pair: square / self._unit**2 for pair, square in self._squares.items()}
        self._unit = 1.0
