"""Tier for KV blocks of engines with different numbers of ranks. A shard is the part of a block that a rank has."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from manthan.manager.tiers.tier import Found, JoinedTier, Tier


class Shard(NamedTuple):
    """Shard with index `at`, from 0, of a block that is stored in `of` shards."""

    at: int
    of: int

    def __str__(self) -> str:
        return f"{self.at}-of-{self.of}"


class ShardedTier(JoinedTier):
    """Tier of a rank that also reads blocks stored by engines with a different number of ranks.

    For such a block, `read` joins all shards that have KV heads of this rank into one buffer, in order of heads.

    Args:
        own: Tier of this rank's shards. All writes go there.
        others: For each other number of ranks, the tiers of the shards with KV heads of this rank, in order of heads.
        copies: Further tiers, which are never read. `drop` and `cleared` drop blocks from these tiers, too.
    """

    def __init__(self, own: Tier, others: Iterable[Sequence[Tier]], copies: Sequence[Tier] = ()) -> None:
        self._sources: list[Sequence[Tier]] = [[own], *others]
        super().__init__(*chain.from_iterable(self._sources), *copies)
        self.own, self.can_trim = own, own.can_trim

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """See Tier. Look for a block first where the previous block was, because one engine mostly stored both."""
        at, source = 0, self._sources[0]
        while at < len(keys):
            start = at
            for each in [source, *(other for other in self._sources if other is not source)]:
                for found in _joined(each, group, keys[at:], tenant):
                    if found is None:
                        break
                    yield found
                    at += 1
                if at > start:
                    source = each
                    break
            else:
                yield None
                at += 1

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        missing = list(keys)
        for source in self._sources:
            if missing:
                gone = {key for tier in source for key in tier.absent(group, missing)}
                missing = [key for key in missing if key in gone]
        return missing

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:
        self.own.trim(group, keys, parts)

    def cleared(self, place: str) -> Tier:
        """See Tier. The new tier reads only `own`, because no other engine writes into the new namespace."""
        own, *others = [tier.cleared(place) for tier in self._tiers]
        return ShardedTier(own, [], others)


def _joined(tiers: Sequence[Tier], group: int, keys: Sequence[bytes], tenant: str) -> Iterator[Found]:
    """Yield each block's joined shards; None if any shard is absent; else a cause if any shard cannot be read."""
    for shards in zip(*(tier.read(group, keys, tenant) for tier in tiers), strict=True):
        bufs = [shard for shard in shards if isinstance(shard, np.ndarray)]
        if len(bufs) == len(shards):
            yield bufs[0] if len(bufs) == 1 else np.concatenate(bufs)
        else:
            yield None if any(shard is None for shard in shards) else next(s for s in shards if isinstance(s, str))
