"""Promises of every tier. A new tier gets a `World` here and passes all of it. `DictTier` is an example."""

import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from deployment import script
from documents import REPO
from examples import examples
from integrity import check_store
from key_files import write_keys
from kv import packed
from redis_server import RedisServer, running
from some_blocks import until

from manthan.codec import wire
from manthan.codec.base import Section, SectionKind
from manthan.codec.errors import WireError
from manthan.manager.config.model import RedisConfig, SealingConfig
from manthan.manager.events import BlocksDropped, DropCause
from manthan.manager.tiers.arena_tier import ArenaTier, RamTier
from manthan.manager.tiers.disk import DiskTier
from manthan.manager.tiers.joined import Shard, ShardedTier, StackedTier
from manthan.manager.tiers.redis import Circuit, Namespace, RedisTier, connect
from manthan.manager.tiers.redis_sessions import RedisSessions
from manthan.manager.tiers.sealed import SealedTier, Sealer, keys_of
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Found, Tier
from manthan.manager.transfer import STORE_DOWN

BUDGET = 2 << 20
KEYS = [bytes([n]) * 32 for n in range(100)]
HERE = Namespace("manthan:", "tiny")
EXAMPLE = REPO / "docs" / "examples" / "manthan_tier_dict.py"
DictTier = script(EXAMPLE).DictTier
SECTION = Section(SectionKind.KEYS, "wht-5x", 1, 16, 1, 8)


# -- where each tier lies -------------------------------------------------------------------------------


class World(ABC):
    """A tier, and what somebody else sees of its medium. shared: other engines use it as well."""

    tier: Tier
    shared = False

    @abstractmethod
    def raw(self) -> bytes:
        """All that can be read on the medium."""

    @property
    def media(self) -> list["World"]:
        """The tiers that have no others, those that are read first first."""
        return [self]

    def released(self, keys: Sequence[bytes]) -> None:  # noqa: B027 most tiers are told by `Tier.drop` alone
        """Tell others that this engine has released blocks of group 0."""

    @abstractmethod
    def damage(self) -> None:
        """Change some bytes of every block, while nobody looks."""

    @contextmanager
    def full(self) -> Iterator[None]:
        """The medium takes nothing in this context, but for what a budget is left of."""
        yield

    def dead(self) -> AbstractContextManager[None]:
        """The medium does not answer in this context."""
        pytest.skip("it has no medium that could fail")

    def check(self) -> None:  # noqa: B027 not all have books
        """The tier's books agree."""

    @property
    def used(self) -> int:
        """Bytes that blocks take of the budget."""
        return self.tier.used  # type: ignore[attr-defined]


class DictWorld(World):
    def __init__(self) -> None:
        self.tier = self.here = DictTier(BUDGET)

    def raw(self) -> bytes:
        return b"".join(buf.tobytes() for buf in self.here.blocks.values())

    def damage(self) -> None:
        for buf in self.here.blocks.values():
            buf[::50] ^= 1

    @property
    def used(self) -> int:
        return sum(buf.nbytes for buf in self.here.blocks.values())


class RamWorld(World):
    def __init__(self) -> None:
        self.tier = self.here = RamTier(BUDGET)
        self.here._chunks[0] = np.zeros(BUDGET, np.uint8)  # numpy's own may hold bytes of an earlier test

    def raw(self) -> bytes:
        return b"".join(chunk.tobytes() for chunk in self.here._chunks.values())

    def damage(self) -> None:
        for chunk in self.here._chunks.values():
            chunk[::50] ^= 1

    def check(self) -> None:
        check_store(self.here)


class DiskWorld(World):
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.tier = self.here = DiskTier(folder, BUDGET, timeout_s=0.3)

    def raw(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.here.folder.iterdir())

    def damage(self) -> None:
        path = self.here.folder / "blocks"
        data = bytearray(path.read_bytes())
        for placed in self.here._blocks.values():
            data[placed.extents[0].start + 600] ^= 1
        path.write_bytes(data)

    @contextmanager
    def dead(self) -> Iterator[None]:
        """Every call that has begun ends when the disk is back, as with a kernel."""
        back, real = threading.Event(), {name: getattr(os, name) for name in ("preadv", "pwritev")}
        with self._monkeypatch.context() as broken:
            for name, call in real.items():
                broken.setattr(os, name, lambda *args, call=call: (back.wait(60), call(*args))[1])
            yield
            back.set()

    def check(self) -> None:
        check_store(self.here)


class RedisWorld(World):
    shared = True

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        server.client.flushall()
        config = RedisConfig(url=f"{server.url}?socket_timeout=0.5")
        self.tier = RedisTier(connect(config, 12), Circuit(), HERE, Shard(0, 1), 1000)

    def raw(self) -> bytes:
        client = self._server.binary_client
        return b"".join(client.get(name) for name in client.keys("*"))

    def released(self, keys: Sequence[bytes]) -> None:
        client = connect(RedisConfig(url=self._server.url))
        sessions = RedisSessions(client, Circuit(), HERE, [1], 1000, {"engine": "one"}, lambda: None)
        sessions.start()
        sessions.tell([], [BlocksDropped(0, keys, DropCause.RELEASED)])
        sessions.close()

    def damage(self) -> None:
        client = self._server.binary_client
        for name in client.keys("*"):
            client.setrange(name, 100, bytes([client.getrange(name, 100, 100)[0] ^ 1]))

    @contextmanager
    def full(self) -> Iterator[None]:
        self._server.client.config_set("maxmemory", 1)
        yield
        self._server.client.config_set("maxmemory", 0)

    @contextmanager
    def dead(self) -> Iterator[None]:
        self._server.pause()
        yield
        self._server.resume()

    @property
    def used(self) -> int:
        return sum(self._server.client.strlen(name) for name in self._server.client.keys("*"))


class Around(World):
    """A tier that has others: their media are its media."""

    def __init__(self, tier: Tier, *worlds: World) -> None:
        self.tier, self._worlds, self._last = tier, worlds, worlds[-1]
        self.shared = self._last.shared

    def raw(self) -> bytes:
        return b"".join(world.raw() for world in self.media)

    @property
    def media(self) -> list[World]:
        return [medium for world in self._worlds for medium in world.media]

    def damage(self) -> None:
        for world in self._worlds:
            world.damage()

    @contextmanager
    def full(self) -> Iterator[None]:
        with self._last.full():
            yield

    @contextmanager
    def dead(self) -> Iterator[None]:
        with self._last.dead():
            yield

    def check(self) -> None:
        for world in self._worlds:
            world.check()

    @property
    def used(self) -> int:
        return self._last.used


BASES = ("dict", "ram", "disk", "redis")
AROUND = (f"{kind} {base}" for kind in ("sealed", "shards") for base in BASES)
KINDS = (*BASES, *AROUND, "ram+disk", "ram+redis", "disk+sealed redis", "ram+disk+redis")
FAST = (*BASES, "sealed disk", "shards redis", "disk+sealed redis", "ram+disk+redis")
"""`make test` tries these: each of them, each way around one, and several in front of each other."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture(params=[kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    def make(kind: str) -> World:
        first, _, rest = kind.partition("+")
        if rest:
            front, behind = make(first), make(rest)
            return Around(StackedTier(front.tier, behind.tier), front, behind)  # type: ignore[arg-type]
        if kind.startswith("sealed "):
            inner = make(kind.removeprefix("sealed "))
            keys = keys_of(SealingConfig(key_file=str(write_keys(tmp_path / "keys", "k1"))))
            return Around(SealedTier(inner.tier, Sealer(keys, "tiny"), Shard(0, 1)), inner)
        if kind.startswith("shards "):
            inner = make(kind.removeprefix("shards "))
            return Around(ShardedTier(inner.tier, [[RamTier(1 << 20), RamTier(1 << 20)]]), inner)
        if kind == "disk":
            return DiskWorld(tmp_path / "rank-0-of-1", monkeypatch)
        if kind == "redis":
            return RedisWorld(request.getfixturevalue("server"))
        return {"dict": DictWorld, "ram": RamWorld}[kind]()

    made = make(request.param)
    yield made
    made.tier.close()


def block(key: bytes, nbytes: int, seed: int = 0) -> Buffer:
    """A compressed block of random numbers, of about this size."""
    body = np.random.default_rng([seed, *key[:4]]).integers(0, 256, nbytes, np.uint8)
    return packed(wire.BlockHeader(key, b"f" * 16, 16, (SECTION,)), [body])


def refined(key: bytes, *sizes: int) -> Buffer:
    """A compressed block of a base and refinements of about these sizes."""
    base, *bodies = (np.random.default_rng([n, *key[:4]]).integers(0, 256, s, np.uint8) for n, s in enumerate(sizes))
    return wire.refined(packed(wire.BlockHeader(key, b"f" * 16, 16, (SECTION,)), [base]), bodies)


def blocks_of(count: int, nbytes: int = 20_000, seed: int = 0, first: int = 0) -> dict[bytes, Buffer]:
    return {key: block(key, nbytes, seed) for key in KEYS[first : first + count]}


def is_whole(found: Found, key: bytes) -> bool:
    """True if a decoder takes it for the block of this hash."""
    if not isinstance(found, np.ndarray):
        return False
    try:
        wire.parse(found, key=key, fingerprint=b"f" * 16)
    except WireError:
        return False
    return True


def are_right(tier: Tier, blocks: Mapping[bytes, Buffer], group: int = 0) -> bool:
    found = tier.read(group, list(blocks))
    return all(
        isinstance(buf, np.ndarray) and np.array_equal(buf, right)
        for buf, right in zip(found, blocks.values(), strict=True)
    )


# -- what holds -----------------------------------------------------------------------------------------


def test_the_document_names_the_example() -> None:
    text = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"({EXAMPLE.relative_to(REPO / 'docs').as_posix()})" in text


def test_what_is_put_comes_back_in_the_order_asked_and_what_is_not_is_a_miss(world: World) -> None:
    sizes = [0, 37, 4096, 100_000, 700_000]
    blocks = {key: block(key, size) for key, size in zip(KEYS, sizes, strict=False)}
    other = block(KEYS[0], 500, seed=1)
    assert world.tier.put_all(0, blocks) == {}
    assert world.tier.put_all(3, {KEYS[0]: other}) == {}
    keys = [*reversed(blocks), KEYS[50], *blocks]
    found = list(world.tier.read(0, keys))
    assert [buf is None for buf in found] == [key not in blocks for key in keys]
    assert all(np.array_equal(buf, blocks[key]) for buf, key in zip(found, keys, strict=True) if key in blocks)
    assert are_right(world.tier, {KEYS[0]: other}, 3)
    assert list(world.tier.read(0, [])) == []
    assert world.tier.absent(0, keys) == [KEYS[50]]
    assert world.tier.absent(3, KEYS[:2]) == [KEYS[1]]
    world.check()


def test_a_block_that_is_put_again_replaces_the_one_before(world: World) -> None:
    world.tier.put_all(0, blocks_of(3))
    again = blocks_of(3, nbytes=9000, seed=1)
    assert world.tier.put_all(0, again) == {}
    assert are_right(world.tier, again)
    world.check()


def test_a_damaged_block_is_a_miss(world: World) -> None:
    blocks = blocks_of(20)
    world.tier.put_all(0, blocks)
    world.damage()
    assert not any(is_whole(buf, key) for key, buf in zip(blocks, world.tier.read(0, list(blocks)), strict=True))
    assert world.tier.put_all(0, blocks) == {}
    assert are_right(world.tier, blocks)


def test_what_does_not_fit_is_refused_and_nothing_is_lost(world: World) -> None:
    there, more = blocks_of(5), blocks_of(90, first=5, nbytes=60_000)
    assert world.tier.put_all(0, there) == {}
    with world.full():
        refused = world.tier.put_all(0, more)
        assert set(refused.values()) == {STORE_FULL}
        assert are_right(world.tier, there)
        kept = {key: buf for key, buf in more.items() if key not in refused}
        assert are_right(world.tier, kept)
        assert set(world.tier.absent(0, list(more))) == set(refused)
    world.tier.drop(0, kept)
    assert world.tier.put_all(0, {key: more[key] for key in list(more)[-3:]}) == {}
    assert are_right(world.tier, there)
    world.check()


def test_bytes_are_counted_exactly(world: World) -> None:
    rng = random.Random(0)
    for _ in range(5):
        blocks = {key: block(key, rng.randrange(50_000)) for key in KEYS[:20]}
        assert world.tier.put_all(0, blocks) == {}
        assert world.used == sum(world.tier.room(buf.nbytes) for buf in blocks.values())
    if not world.shared:
        world.tier.drop(0, KEYS[:10])
        assert world.used == sum(world.tier.room(blocks[key].nbytes) for key in KEYS[10:20])
    world.check()


def test_what_is_dropped_is_a_miss_but_for_other_engines(world: World) -> None:
    blocks = blocks_of(6)
    world.tier.put_all(0, blocks)
    world.tier.drop(0, [*KEYS[:3], KEYS[50]])
    if world.shared:
        assert are_right(world.tier, blocks)
        return
    assert list(world.tier.read(0, KEYS[:3])) == [None] * 3
    assert world.tier.absent(0, KEYS[:6]) == KEYS[:3]
    assert are_right(world.tier, {key: blocks[key] for key in KEYS[3:6]})


def test_blocks_are_cut_behind_any_of_their_parts_or_stay_whole(world: World) -> None:
    blocks = {key: refined(key, 9000, 300, 20_000, 40, 30_000) for key in KEYS[:6]} | blocks_of(2, first=6)
    assert world.tier.put_all(0, blocks) == {}
    rooms = world.tier.rooms(blocks[KEYS[0]])
    ends = wire.part_ends(blocks[KEYS[0]])
    assert rooms == [world.tier.room(end) for end in (ends if world.tier.can_trim else ends[-1:])]
    for parts, keys in ((4, KEYS[:5]), (3, KEYS[:4]), (2, KEYS[:3]), (1, KEYS[:2]), (3, KEYS[:2])):
        world.tier.trim(0, [*keys, KEYS[50], *KEYS[6:8]], parts)
    world.tier.trim(1, KEYS[:6], 1)  # another group's
    left = {key: blocks[key][: ends[at]] for key, at in zip(KEYS, (0, 0, 1, 2, 3), strict=False)}
    left = blocks | left if world.tier.can_trim else blocks
    assert are_right(world.tier, left)
    assert world.used == sum(world.tier.room(buf.nbytes) for buf in left.values())
    world.check()
    if world.tier.can_trim:
        more = blocks_of(1, nbytes=BUDGET - world.used - 150_000, first=20)
        assert world.tier.put_all(0, more) == {}
        world.tier.drop(0, KEYS[:3])
        assert are_right(world.tier, {key: left[key] for key in KEYS[3:8]} | more)
        world.check()


def test_bytes_that_are_cut_off_cannot_be_read_from_the_medium(world: World) -> None:
    blocks = {key: refined(key, 9000, 20_000, 30_000) for key in KEYS[:4]}
    world.tier.put_all(0, blocks)
    if not world.tier.can_trim:
        pytest.skip("it keeps blocks whole")
    _, middle, _ = wire.part_ends(blocks[KEYS[0]])
    marks = [buf[at : at + 24].tobytes() for buf in blocks.values() for at in range(middle + 4096, buf.nbytes, 4000)]
    assert all(mark in b"".join(medium.raw() for medium in world.media) for mark in marks)
    world.tier.trim(0, blocks, 2)
    until(lambda: not any(mark in raw for raw in [b"".join(medium.raw() for medium in world.media)] for mark in marks))
    assert are_right(world.tier, {key: buf[:middle] for key, buf in blocks.items()})
    world.tier.trim(0, KEYS[:1], 1)
    world.tier.put_all(0, {KEYS[0]: blocks[KEYS[0]]})  # before its end is erased, perhaps
    assert are_right(world.tier, {KEYS[0]: blocks[KEYS[0]]})


@pytest.mark.parametrize("how", ["released", "replaced", "cleared"])
def test_bytes_of_what_is_gone_cannot_be_read_from_the_medium(world: World, how: str) -> None:
    gone, kept = blocks_of(8), blocks_of(8, first=8)
    world.tier.put_all(0, gone | kept)
    media = [medium for medium in world.media if not (medium.shared and how == "cleared")]  # others use the old name
    marks = [
        buf[at : at + 24].tobytes()
        for medium in media
        for buf in medium.tier.read(0, list(gone))  # as it lies there, sealed or not
        if isinstance(buf, np.ndarray)
        for at in range(200, buf.nbytes - 24, 4000)
    ]
    raw = b"".join(medium.raw() for medium in media)
    assert all(mark in raw for mark in marks)
    if how == "cleared":
        world.tier = world.tier.cleared("another")
    elif how == "replaced":
        world.tier.put_all(0, blocks_of(8, nbytes=1000, seed=1))
    else:
        world.tier.drop(0, gone)
        for medium in media:
            medium.released(list(gone))
    until(lambda: not any(mark in raw for raw in [b"".join(medium.raw() for medium in media)] for mark in marks))
    if how != "cleared":
        assert are_right(world.tier, kept)
    world.check()


def test_a_cleared_tier_is_empty_and_of_use(world: World) -> None:
    world.tier.put_all(0, blocks_of(20))
    after = world.tier.cleared("another")
    assert list(after.read(0, KEYS[:20])) == [None] * 20
    again = blocks_of(20, seed=1)
    assert after.put_all(0, again) == {}
    assert are_right(after, again)
    world.check()


def test_threads_that_put_get_and_drop_mix_nothing_up(world: World) -> None:
    versions = {(key, seed): block(key, 50_000 * (seed + 1), seed) for key in KEYS[:12] for seed in range(3)}
    start = threading.Barrier(threads := 6)

    def hammer(number: int) -> int:
        rng, refused = random.Random(number), 0
        start.wait()
        for _ in range(examples(200)):
            key, group = rng.choice(KEYS[:12]), rng.randrange(2)
            refused += bool(world.tier.put_all(group, {key: versions[key, rng.randrange(3)]}))
            keys = rng.sample(KEYS[:12], 3)
            for one, buf in zip(keys, world.tier.read(group, keys), strict=True):
                if isinstance(buf, np.ndarray):
                    assert any(np.array_equal(buf, versions[one, seed]) for seed in range(3))
            if rng.random() < 0.2:
                world.tier.drop(group, [rng.choice(KEYS[:12])])
        return refused

    with ThreadPoolExecutor(threads) as pool:
        refused = sum(pool.map(hammer, range(threads)))
    if not world.shared:
        assert refused  # the budget was reached
    world.check()


def test_a_dead_medium_is_a_cause_and_neither_an_error_nor_a_hang(world: World) -> None:
    blocks = blocks_of(6)
    world.tier.put_all(0, blocks)
    with world.dead():
        more = blocks_of(40, first=10)
        assert world.tier.put_all(0, more) == dict.fromkeys(more, STORE_DOWN)
        found = list(world.tier.read(0, [*blocks, KEYS[99]]))
        assert set(map(str, found)) == {STORE_DOWN} or are_right_or(STORE_DOWN, found, blocks)
        assert not set(world.tier.absent(0, list(blocks))) & set(blocks)
        world.tier.drop(0, [KEYS[99]])
    until(lambda: not world.tier.put_all(0, blocks))
    assert are_right(world.tier, blocks)
    world.tier.close()
    world.tier.close()


def are_right_or(cause: str, found: Sequence[Found], blocks: Mapping[bytes, Buffer]) -> bool:
    """True if each is the right block, from a tier in front, or the cause."""
    return all(
        buf == cause if isinstance(buf, str) else np.array_equal(buf, right)
        for buf, right in zip(found, [*blocks.values(), None], strict=True)
    )


def test_what_is_dropped_while_it_is_put_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in RAM nor on disk, whether it is dropped or all is cleared."""
    for tier in (RamTier(BUDGET), DiskTier(tmp_path, BUDGET)):
        assert isinstance(tier, ArenaTier)
        write = tier._write
        for gone in (lambda tier=tier: tier.drop(0, KEYS[:1]), lambda tier=tier: tier.cleared("")):
            with monkeypatch.context() as late:
                late.setattr(tier, "_write", lambda *args, write=write, gone=gone: (write(*args), gone())[0])
                assert tier.put_all(0, blocks_of(1)) == {KEYS[0]: "reset"}
            assert tier.absent(0, KEYS[:1]) == KEYS[:1]
            until(lambda tier=tier: not tier._arena.used)
        tier.close()
