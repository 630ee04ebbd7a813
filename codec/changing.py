"""A rank's blocks whose codec changes while it serves."""

from contextlib import suppress

from manthan.codec.base import Codes, Numbers
from manthan.codec.block import BlockFormat
from manthan.codec.errors import CodecError
from manthan.codec.wire import peek


class ChangingFormat:
    """Blocks are written in `first`, until there is a `later` format. A block is read in the format whose fingerprint
    it carries, so that codes and what they were made with never part.

    What is reserved for a block is the bound of `first`: a block that would take more in `later` is written in `first`.
    Safe to use from several threads.
    """

    def __init__(self, first: BlockFormat) -> None:
        self.first = first
        self.later: BlockFormat | None = None

    def encode(self, keys: Numbers, values: Numbers, *, key: bytes, first_token: int, exact: int) -> Codes:
        """See `BlockFormat.encode`."""
        later = self.later
        if later is not None:
            with suppress(CodecError):  # the first will say why
                made = later.encode(keys, values, key=key, first_token=first_token, exact=exact)
                if made.nbytes <= self.first.max_nbytes(exact):
                    return made
        return self.first.encode(keys, values, key=key, first_token=first_token, exact=exact)

    def decode(self, buf: Codes, *, key: bytes) -> tuple[Numbers, Numbers]:
        """See `BlockFormat.decode`."""
        later = self.later
        if later is not None and peek(buf).fingerprint == later.fingerprint:
            return later.decode(buf, key=key)
        return self.first.decode(buf, key=key)
