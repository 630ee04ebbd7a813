"""Tiers made of others: a fast tier in front of a slower one, and tiers of engines with other numbers of ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from manthan.manager.tiers.arena_tier import ArenaTier
from manthan.manager.tiers.tier import Buffer, Found, Tier


class Shard(NamedTuple):
    """Part of a block that a rank has: the shard with index `at`, from 0, of a block that is stored in `of` shards."""

    at: int
    of: int

    def __str__(self) -> str:
        return f"{self.at}-of-{self.of}"


class JoinedTier(Tier):
    """Base of a tier made of others. `put_all`, `absent` and `room` call the first; `drop` and `close` call all."""

    def __init__(self, *tiers: Tier) -> None:
        self._tiers = tiers

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        return self._tiers[0].put_all(group, blocks, tenant)

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return self._tiers[0].absent(group, keys)

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        for tier in self._tiers:
            tier.drop(group, keys)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def room(self, nbytes: int) -> int:
        return self._tiers[0].room(nbytes)


class StackedTier(JoinedTier):
    """Tier that stores all blocks in the tier behind. The front tier has copies of the blocks stored or read last.

    Args:
        front: RAM, or a disk, with a budget of its own. Its least recently used blocks make room for new blocks.
        behind: Tier with all blocks, such as another stack.
    """

    def __init__(self, front: ArenaTier, behind: Tier) -> None:
        super().__init__(behind, front)
        self.front, self.behind, self.can_trim = front, behind, behind.can_trim

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        refused = self.behind.put_all(group, blocks, tenant)
        self.front.drop(group, refused)
        self._keep(group, {key: buf for key, buf in blocks.items() if key not in refused}, tenant)
        return refused

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        absent = set(self.front.absent(group, keys))
        self.front.touch(group, keys)
        here = self.front.read(group, [key for key in keys if key not in absent], tenant)
        far = self.behind.read(group, [key for key in keys if key in absent], tenant)
        for key in keys:
            buf = next(far if key in absent else here)
            if key in absent and isinstance(buf, np.ndarray):
                self._keep(group, {key: buf}, tenant)
            elif key not in absent and not isinstance(buf, np.ndarray):  # just dropped, or cannot be read
                buf = next(self.behind.read(group, [key], tenant))
            yield buf
        self.front.touch(group, keys)

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return self.behind.absent(group, self.front.absent(group, keys))

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:
        keys = list(keys)
        if self.can_trim:
            self.front.trim(group, keys, parts)
            self.behind.trim(group, keys, parts)

    def cleared(self, place: str) -> "StackedTier":
        return StackedTier(self.front.cleared(place), self.behind.cleared(place))

    def _keep(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str) -> None:
        """Put blocks into the front tier, except those for which it cannot make room."""
        for key, buf in blocks.items():
            self.front.drop(group, [key])
            if self.front.make_room(self.front.room(buf.nbytes)):
                self.front.put_all(group, {key: buf}, tenant)


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

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        """See Tier. Older copies of other engines go: what is stored again may be exact where they are lossy."""
        failed = self.own.put_all(group, blocks, tenant)
        stored = [key for key in blocks if key not in failed]
        for tier in self._tiers[1:]:
            tier.drop(group, stored)
        return failed

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
