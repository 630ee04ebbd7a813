"""Slots of equal size: which block lies in which, and where there is room."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


class SlotTable:
    """The slots of one tier by block key, least recently used first.

    A slot is free, taken (its block is being written), or holds a block.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._of: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, to be put or given back; None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """A slot that was taken and will not be put."""
        self._free.append(slot)

    def put(self, key: bytes, slot: int) -> None:
        """A block is in the slot that was taken for it. One that is there already under its key is replaced."""
        self.drop([key])
        self._of[key] = slot

    def get(self, keys: Sequence[bytes]) -> list[int]:
        """The slots of these blocks up to the first that is not here."""
        slots = map(self._of.get, keys)
        return [slot for slot in takewhile(lambda slot: slot is not None, slots) if slot is not None]

    def used(self, keys: Iterable[bytes]) -> None:
        """These blocks, which are here, are used now."""
        for key in keys:
            self._of.move_to_end(key)

    def go_first(self, keys: Sequence[bytes]) -> None:
        """These blocks, as far as they are here, are to be taken out before all others, in this order."""
        for key in reversed(keys):
            if key in self._of:
                self._of.move_to_end(key, last=False)

    def pop_oldest(self) -> tuple[bytes, int] | None:
        """Take out the block that was not used for longest; its slot counts as taken."""
        return self._of.popitem(last=False) if self._of else None

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove blocks; unknown keys are ignored."""
        for key in keys:
            slot = self._of.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def clear(self) -> None:
        """Remove all blocks; slots that are taken stay so."""
        self._free += reversed(self._of.values())
        self._of.clear()
