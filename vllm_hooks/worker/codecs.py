"""Codecs of a rank with a GPU: by KV cache group and name, by number, or by a compressed block's header."""

from collections.abc import Mapping, Sequence

from manthan.codec import wire
from manthan.codec.block import exact_of
from manthan.codec.errors import SizeError, WireError
from manthan.codec.gpu.paged import PagedCodec
from manthan.codec.registry import needs_profile
from manthan.manager.tiers.tier import Buffer


class Codecs:
    """Codecs of a rank, all on one device.

    by_group: codecs by KV cache group, the group's configured codec first. The first group is the main group, whose
    block hashes make up sessions.
    """

    def __init__(self, by_group: Mapping[int, Sequence[PagedCodec]]) -> None:
        self.by_group = {**by_group}
        names = (codec.format.codec for codecs in by_group.values() for codec in codecs)
        self._numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}

    def add(self, group: int, codec: PagedCodec) -> None:
        """Add a codec of a group. Other threads may call other methods meanwhile."""
        self._numbers.setdefault(codec.format.codec, len(self._numbers))
        self.by_group[group] = (*self.by_group[group], codec)

    def get(self, group: int, name: str = "") -> PagedCodec:
        """Return a group's codec `name`, or the configured codec if the group has no such codec."""
        codecs = self.by_group[group]
        return next((codec for codec in codecs if codec.format.codec == name), codecs[0])

    def number(self, codec: PagedCodec) -> int:
        """Return the number of a codec's name among all groups' names. Tiers keep this number with each block."""
        return self._numbers[codec.format.codec]

    def numbered(self, group: int, number: int) -> PagedCodec:
        return next(codec for codec in self.by_group[group] if self.number(codec) == number)

    def look_into(self, group: int, buf: Buffer) -> tuple[int, int, int, int] | str:
        """Return, from a block's header, number of exact tokens, first token's position, mark (`Mark`), codec number.

        Return the cause of a failure if the header is bad. Decoding later compares the whole header with these numbers.
        """
        try:
            front, ends = wire.peek(buf), wire.part_ends(buf)
        except WireError as error:
            return error.cause
        try:
            exact = exact_of(wire.peek_sections(buf, front))
        except SizeError:  # the block is damaged: the checks below find the cause
            exact = 0
        codecs = self.by_group[group]
        codec = next((codec for codec in codecs if codec.format.fingerprint == front.fingerprint), codecs[0])
        fits = exact <= codec.layout.tokens and codec.form(exact).fits(ends[-1])
        if len(ends) > 1 and not needs_profile(codec.format.codec):
            return "trailing"
        if not fits or front.first_token > wire.PLACE_MAX:
            return "size"
        return exact, front.first_token, front.mark, self.number(codec)
