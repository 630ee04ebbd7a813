"""Notes: facts of KV blocks for KV events, by KV cache group and block hash. A note takes about 70 bytes of memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import BlockTable, Rows

TOKEN_NBYTES = 3  # of a token's id in memory


Source = tuple[int | None, str | None, str | None, str | None]
"""Id and name of a request's LoRA adapter, the request's session id, and the session's parent."""


class Note(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Facts of a block for an event. parent: hash of the previous block; None for the first block.

    tokens: ids of the block's tokens. extra_keys: as in vLLM's events. source: of the request that first had the block.
    """

    parent: bytes | None
    tokens: list[int]
    extra_keys: list[Any] | None
    source: Source


class _Rest(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Fields of `Note` that most blocks of a request have in common."""

    extra_keys: list[Any] | None
    source: Source


class Notes:
    """Notes by KV cache group and block hash.

    A note of a session's block is in columns, indexed by the block's row in the BlockTable, and ends with the row.
    Other groups' notes are whole, as msgpack. A group with blocks as large as the main group's has the same hashes, and
    uses the main group's notes.

    Args:
        sizes: number of a block's tokens in each KV cache group.
        main: KV cache group whose blocks make up sessions.
        session_group: value of the column `group` for these blocks; see `MemoryShape`.
    """

    def __init__(self, blocks: BlockTable, sizes: Sequence[int], main: int, session_group: int) -> None:
        self._blocks, self._sizes, self._main, self._session_group = blocks, sizes, main, session_group
        self._tokens = np.zeros((0, TOKEN_NBYTES * sizes[main]), np.uint8)
        self._parent = np.zeros(0, np.int32)  # row of the previous block; a first block's own row
        self._check = np.zeros(0, np.uint64)  # first bytes of the previous block's hash, to detect another in its row
        self._rest = np.zeros(0, np.int32)  # number of the `_Rest`, from 1 on; 0 for a row without a note
        self._numbers: dict[bytes, int] = {}  # numbers of rests, by the rest as msgpack
        self._rests: list[bytes] = [b""]  # rests as msgpack, by number
        self._users = [0]  # number of rows with each rest
        self._unused: list[int] = []  # numbers of rests without rows
        self._whole: dict[BlockName, bytes] = {}
        blocks.freed = self._forget

    def __len__(self) -> int:
        return sum(self._users) + len(self._whole)

    def find_rows(self, group: int, hashes: Sequence[bytes]) -> Rows:
        """Return each block's row in the session manager's BlockTable, -1 for a block without a row."""
        return self._blocks.find(self._session_group if group == self._main else group, hashes)

    def of(self, names: Sequence[BlockName]) -> list[Note | None]:
        """Return the note of each block; None for a block without a note."""
        found: list[Note | None] = [None] * len(names)
        places = []
        for place, (group, block_hash) in enumerate(names):
            if self._noted(group) == self._main:
                places.append(place)
            elif packed := self._whole.get((group, block_hash)):
                found[place] = msgspec.msgpack.decode(packed, type=Note)
        rows = self.find_rows(self._main, [names[place][1] for place in places])
        has_note = self._have(rows)
        if not has_note.any():
            return found
        rows = rows[has_note]
        before = self._blocks.hashes(self._parent[rows])
        is_first, is_valid = self._parent[rows] == rows, self._words(before) == self._check[rows]
        wide = np.zeros((len(rows), self._sizes[self._main], 4), np.uint8)
        wide[..., :TOKEN_NBYTES] = self._tokens[rows].reshape(len(rows), -1, TOKEN_NBYTES)
        tokens = wide.view("<u4").reshape(len(rows), -1).tolist()
        facts = zip(is_valid.tolist(), is_first.tolist(), before, tokens, self._rest[rows].tolist(), strict=True)
        for place, (valid, first, parent, ids, number) in zip(compress(places, has_note.tolist()), facts, strict=True):
            if valid:
                rest = msgspec.msgpack.decode(self._rests[number], type=_Rest)
                found[place] = Note(None if first else parent, ids, rest.extra_keys, rest.source)
        return found

    def are_known(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """Return for each block: True if it has a note."""
        group = self._noted(group)
        if group != self._main:
            return [(group, block_hash) in self._whole for block_hash in hashes]
        known: list[bool] = self._have(self.find_rows(group, hashes)).tolist()
        return known

    def add(self, group: int, hashes: Sequence[bytes], notes: Sequence[Note]) -> None:
        """Enter notes of blocks, each of which has a row."""
        size = self._sizes[group]
        if group != self._main:
            packed = map(msgspec.msgpack.encode, notes)
            self._whole.update(zip(((group, block_hash) for block_hash in hashes), packed, strict=True))
            return
        rows = self.find_rows(group, hashes)
        befores = [note.parent or block_hash for note, block_hash in zip(notes, hashes, strict=True)]
        parents = self.find_rows(group, befores)
        good = (rows >= 0) & (parents >= 0) & np.array([len(note.tokens) == size for note in notes], np.bool_)
        at = good.nonzero()[0].tolist()
        if not at:
            return
        rows, parents = rows[good], parents[good]
        self._grow()
        self._forget(rows)
        self._parent[rows], self._check[rows] = parents, self._words([befores[each] for each in at])
        tokens = np.array([notes[each].tokens for each in at], "<u4").view(np.uint8).reshape(len(rows), size, 4)
        self._tokens[rows] = tokens[..., :TOKEN_NBYTES].reshape(len(rows), -1)
        self._rest[rows] = [self._number(_Rest(notes[each].extra_keys, notes[each].source)) for each in at]

    def packed(self, names: Sequence[BlockName]) -> list[bytes]:
        """Return the note of each block as msgpack, for a disk's journal; empty for a block without a note."""
        return [b"" if note is None else msgspec.msgpack.encode(note) for note in self.of(names)]

    def update(self, packed: Iterable[tuple[BlockName, bytes]]) -> None:
        """Enter an earlier engine's notes, as `packed` returns them. Leave out damaged ones."""
        good: dict[BlockName, Note] = {}
        for name, each in packed:
            with suppress(msgspec.DecodeError):  # the journal was damaged
                good[name] = msgspec.msgpack.decode(each, type=Note)
        for group, hashes in by_group(good).items():
            self.add(group, hashes, [good[group, block_hash] for block_hash in hashes])

    def tidy(self) -> None:
        """Forget whole notes of blocks that have left the BlockTable, if there are many."""
        if len(self._whole) <= 2 * len(self._blocks):
            return
        for group, hashes in by_group(self._whole).items():
            for block_hash, row in zip(hashes, self.find_rows(group, hashes).tolist(), strict=True):
                if row < 0:
                    del self._whole[group, block_hash]

    def _noted(self, group: int) -> int:
        """Return the group that has the notes of a group's blocks."""
        return self._main if self._sizes[group] == self._sizes[self._main] else group

    def _have(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of `rows`: True if a row has a note. A row of -1 has none."""
        known = (rows >= 0) & (rows < len(self._rest))
        known[known] = self._rest[rows[known]] > 0
        return known

    def _words(self, hashes: Sequence[bytes]) -> NDArray[np.uint64]:
        return np.frombuffer(b"".join(each[:8] for each in hashes), np.uint64)

    def _number(self, rest: _Rest) -> int:
        """Return a rest's number, for one row more."""
        packed = msgspec.msgpack.encode(rest)
        if (number := self._numbers.get(packed)) is None:
            number = self._numbers[packed] = self._unused.pop() if self._unused else len(self._rests)
            if number == len(self._rests):
                self._rests.append(packed)
                self._users.append(0)
            self._rests[number] = packed
        self._users[number] += 1
        return number

    def _forget(self, rows: Rows) -> None:
        """Forget the notes of rows."""
        rows = rows[rows < len(self._rest)]
        for number, count in Counter(self._rest[rows].tolist()).items():
            if number:
                self._users[number] -= count
                if not self._users[number]:
                    del self._numbers[self._rests[number]]
                    self._unused.append(number)
        self._rest[rows] = 0

    def _grow(self) -> None:
        """Have a value in each column for each row of the BlockTable."""
        more = len(self._blocks.group) - len(self._rest)
        for name in ("_tokens", "_parent", "_check", "_rest") if more > 0 else ():
            column = getattr(self, name)
            grown = np.zeros((len(column) + more, *column.shape[1:]), column.dtype)
            grown[: len(column)] = column
            setattr(self, name, grown)


def by_group(names: Iterable[BlockName]) -> dict[int, list[bytes]]:
    """Return block hashes by KV cache group."""
    groups: dict[int, list[bytes]] = {}
    for group, block_hash in names:
        groups.setdefault(group, []).append(block_hash)
    return groups
