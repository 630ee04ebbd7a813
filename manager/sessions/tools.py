"""How long tools take, learned from the sessions that waited for them."""

from collections import OrderedDict, deque
from statistics import median

LAST = 32
"""So many pauses of a tool count, the last ones."""
ENOUGH = 3
"""Nothing is said of a tool before so many."""
MOST_TOOLS = 4096
"""Tools of all tenants that are remembered; those that nobody waited for longest are forgotten."""


class ToolTimes:
    """The pauses of sessions whose client said what tool they waited for: from a request's end to the next one's begin.
    No tenant learns of another's."""

    def __init__(self) -> None:
        self._pauses: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()  # by tenant and tool

    def __len__(self) -> int:
        return len(self._pauses)

    def took(self, tenant: str, tool: str, seconds: float) -> None:
        """A session of the tenant came back from it after so long."""
        pauses = self._pauses.setdefault((tenant, tool), deque(maxlen=LAST))
        self._pauses.move_to_end((tenant, tool))
        pauses.append(seconds)
        if len(self._pauses) > MOST_TOOLS:
            self._pauses.popitem(last=False)

    def expected(self, tenant: str, tool: str) -> float | None:
        """The median of its pauses, in seconds; None while there are too few."""
        pauses = self._pauses.get((tenant, tool), ())
        return median(pauses) if len(pauses) >= ENOUGH else None
