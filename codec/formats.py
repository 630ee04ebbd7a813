"""Several block formats side by side: a rank that has changed its codec still reads what it wrote before."""

import numpy as np

from manthan.codec import wire
from manthan.codec.base import Codes, Numbers
from manthan.codec.block import BlockFormat
from manthan.codec.errors import ShapeError, UnknownCodecError, WireError
from manthan.codec.wire import Buffer


class Formats:
    """The block formats that one rank reads, and the one that it writes in. Safe to use from several threads.

    All are of one shape and KV cache group; a block is told by the fingerprint in its header, so a codec may be there
    twice, with another profile. Raises ShapeError.
    """

    def __init__(self, current: BlockFormat, *others: BlockFormat) -> None:
        self.shape, self.group = current.shape, current.group
        self._current = current
        self._by_fingerprint: dict[bytes, BlockFormat] = {}
        for format in (*others, current):
            self.add(format)

    @property
    def current(self) -> BlockFormat:
        """What new blocks are in."""
        return self._current

    def add(self, format: BlockFormat) -> None:
        """Blocks of this format can be read from now on."""
        if (format.shape, format.group) != (self.shape, self.group):
            raise ShapeError(
                f"a format of {format.shape} in group {format.group} does not fit: the others are of {self.shape} in "
                f"group {self.group}."
            )
        others = {mark: other for mark, other in self._by_fingerprint.items() if mark != format.fingerprint}
        self._by_fingerprint = {**others, format.fingerprint: format}  # readers have the old ones or these

    def use(self, format: BlockFormat) -> None:
        """New blocks are in this format from now on; those of the others can still be read."""
        self.add(format)
        self._current = format

    def named(self, codec: str) -> BlockFormat:
        """The current format where that is its codec, or none is named; else the one of this codec that was added last.
        Raises UnknownCodecError."""
        current = self._current
        if codec in ("", current.codec):
            return current
        found = [format for format in self._by_fingerprint.values() if format.codec == codec]
        if not found:
            known = ", ".join(dict.fromkeys(format.codec for format in self._by_fingerprint.values()))
            raise UnknownCodecError(f"no blocks are in codec {codec!r} here: there are {known}.")
        return found[-1]

    def of(self, buf: Buffer) -> BlockFormat:
        """The format that a block says it has; the current one where it is of none, which then says what is wrong with
        it."""
        try:
            mark = wire.peek(np.frombuffer(buf, np.uint8)).fingerprint
        except WireError:
            return self._current
        return self._by_fingerprint.get(mark, self._current)

    def warm_up(self) -> None:
        """Do now what the first block would otherwise wait for."""
        for format in self._by_fingerprint.values():
            format.warm_up()

    def encode(
        self, keys: Numbers, values: Numbers, *, key: bytes, first_token: int, exact: int, codec: str = ""
    ) -> Codes:
        """The encoded block, in the codec of this name or in the current one; see `BlockFormat.encode`."""
        return self.named(codec).encode(keys, values, key=key, first_token=first_token, exact=exact)

    def decode(self, buf: Buffer, *, key: bytes) -> tuple[Numbers, Numbers]:
        """Keys and values of an encoded block of any of the formats; see `BlockFormat.decode`."""
        return self.of(buf).decode(buf, key=key)
