"""A queue of sessions that knows its bytes."""

from collections import OrderedDict
from collections.abc import Iterator


class ByteQueue:
    """Session ids, first come first, and how many bytes they take together. O(1) an operation.

    Whoever is in it takes a byte at least, so that nobody is in it for nothing.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def size(self, session_id: str) -> int:
        """Its bytes; 0 if it is not there."""
        return self._sizes.get(session_id, 0)

    def put(self, session_id: str, nbytes: int) -> None:
        """Its bytes are so many now. It keeps its place, or comes last if it was not there."""
        nbytes = max(1, nbytes)
        self.nbytes += nbytes - self.size(session_id)
        self._sizes[session_id] = nbytes

    def put_last(self, session_id: str, nbytes: int) -> None:
        """The same, and it comes last in any case."""
        self.put(session_id, nbytes)
        self._sizes.move_to_end(session_id)

    def pop(self, session_id: str) -> int:
        """Take it out; its bytes, 0 if it was not there."""
        nbytes = self._sizes.pop(session_id, 0)
        self.nbytes -= nbytes
        return nbytes
