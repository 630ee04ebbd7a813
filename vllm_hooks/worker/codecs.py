"""Codecs of a rank with a GPU: by KV cache group and name, by number, or by a compressed block's header."""

import threading
from collections.abc import Callable, Mapping, Sequence

from manthan.codec import wire
from manthan.codec.block import exact_of
from manthan.codec.errors import SizeError, WireError
from manthan.codec.gpu.paged import PagedCodec
from manthan.codec.registry import needs_profile
from manthan.manager.tiers.tier import Buffer


class Codecs:
    """Codecs of a rank.

    codecs: configured codec of each KV cache group, the main group first; all on one device. make: makes a group's
    codec by name, of `names`; None if jobs name no other codec.
    """

    def __init__(
        self, codecs: Mapping[int, PagedCodec], make: Callable[[int, str], PagedCodec] | None, names: Sequence[str]
    ) -> None:
        self.by_group, self.names, self._make = dict(codecs), names, make
        self._others: dict[tuple[int, str], PagedCodec] = {}
        self._numbered: list[str] = []
        self._lock = threading.Lock()

    def get(self, group: int, name: str = "") -> PagedCodec:
        """Return a group's codec `name`, or the configured codec if `name` is empty or blocks are raw bytes."""
        codec = self.by_group[group]
        if name in ("", codec.format.codec) or codec.format.shape.is_raw:
            return codec
        if (group, name) not in self._others:
            assert self._make is not None
            self._others[group, name] = self._make(group, name)
        return self._others[group, name]

    def number(self, codec: PagedCodec) -> int:
        """Return the number of a codec's name, which tiers keep with each block; counted from 0 in order of use."""
        name = codec.format.codec
        with self._lock:
            if name not in self._numbered:
                self._numbered.append(name)
            return self._numbered.index(name)

    def numbered(self, group: int, number: int) -> PagedCodec:
        return self.get(group, self._numbered[number])

    def look_into(self, group: int, buf: Buffer) -> tuple[int, int, int, int] | str:
        """Return exact tokens, first token, mark and codec number from a block's header; the cause if it is bad.

        Decoding later compares the whole header with these numbers.
        """
        try:
            front, ends = wire.peek(buf), wire.part_ends(buf)
        except WireError as error:
            return error.cause
        try:
            exact = exact_of(wire.peek_sections(buf, front))
        except SizeError:  # the block is damaged: the checks below find the cause
            exact = 0
        codecs = [self.get(group, name) for name in ("", *self.names)]
        codec = next((codec for codec in codecs if codec.format.fingerprint == front.fingerprint), codecs[0])
        fits = exact <= codec.layout.tokens and codec.form(exact).fits(ends[-1])
        if len(ends) > 1 and not needs_profile(codec.format.codec):
            return "trailing"
        if not fits or front.first_token > wire.PLACE_MAX:
            return "size"
        return exact, front.first_token, front.mark, self.number(codec)
