"""One rank's blocks in a real Redis, of any size and group, and RAM in front of them."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from redis_server import RedisServer, running

from manthan.manager.config.model import RedisConfig
from manthan.manager.stores.arena import GRANULE
from manthan.manager.stores.cold_store import Buffer, ColdStore, ColdStoreError
from manthan.manager.stores.redis import store as redis_store
from manthan.manager.stores.redis.client import Circuit, connect
from manthan.manager.stores.redis.schema import Namespace
from manthan.manager.stores.redis.store import RedisStore, TieredStore

HERE = Namespace("manthan:", "tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    server.client.flushall()
    made = RedisStore(connect(RedisConfig(url=server.url)), Circuit(), HERE, 1, 1000)
    yield made
    made.close()


def blocks_of(*sizes: int, seed: int = 0) -> dict[bytes, Buffer]:
    rng = np.random.default_rng(seed)
    return {bytes([seed, at]): rng.integers(0, 256, size, np.uint8) for at, size in enumerate(sizes)}


def same(found: Iterator[Buffer | None], blocks: Mapping[bytes, Buffer], keys: Sequence[bytes]) -> bool:
    pairs = zip(found, keys, strict=True)
    return all(
        (buf is None and key not in blocks) or (buf is not None and bytes(buf) == bytes(blocks[key]))
        for buf, key in pairs
    )


# -- Redis --------------------------------------------------------------------------------------------


def test_blocks_of_any_size_come_back(store: RedisStore, server: RedisServer) -> None:
    blocks = blocks_of(1, 100_000, 37, 2_000_000)
    assert store.put_all(0, blocks) == {}
    keys = [*reversed(blocks), b"missing", *blocks]
    assert same(store.read(0, keys), blocks, keys)
    assert store.absent(0, keys) == [b"missing"]
    assert all(server.client.strlen(HERE.block((0, key), 1)) == buf.nbytes for key, buf in blocks.items())
    assert store.room(1001) == 1001
    assert list(store.read(0, [])) == []


def test_groups_and_ranks_are_kept_apart(store: RedisStore) -> None:
    zero, three = blocks_of(100), {b"\0\0": np.full(50, 3, np.uint8)}
    store.put_all(0, zero)
    store.put_all(3, three)
    assert same(store.read(0, list(zero)), zero, list(zero))
    assert same(store.read(3, list(three)), three, list(three))
    assert store.absent(1, list(zero)) == list(zero)
    other = RedisStore(store._client, store._circuit, HERE, 0, 1000)
    assert other.absent(0, list(zero)) == list(zero)


def test_a_cleared_store_is_another_place(store: RedisStore) -> None:
    blocks = blocks_of(10, 20)
    store.put_all(0, blocks)
    other = store.cleared("elsewhere")
    assert other.absent(0, list(blocks)) == list(blocks)
    other.put_all(0, dict(list(blocks.items())[:1]))
    assert other.absent(0, list(blocks)) == list(blocks)[1:]
    assert store.absent(0, list(blocks)) == []


@pytest.mark.parametrize(("size", "count"), [(1000, 250), (40_000, 20), (200_000, 3)])
def test_a_pipeline_moves_about_so_many_bytes(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, size: int, count: int
) -> None:
    """When it has seen a block or two."""
    monkeypatch.setattr(redis_store, "BATCH_BYTES", 100_000)
    counts: list[int] = []
    pipelined = redis_store.pipelined

    def counted(client: object, commands: Sequence[tuple[object, ...]], **options: bool) -> list[object]:
        counts.append(len(commands))
        return pipelined(client, commands, **options)

    monkeypatch.setattr(redis_store, "pipelined", counted)
    blocks, full = blocks_of(*[size] * count), max(1, 100_000 // size)
    whole, rest = divmod(count, full)
    wanted = [full] * whole + [rest] * (rest > 0)
    assert store.put_all(0, blocks) == {}
    assert counts == wanted
    counts.clear()
    assert same(store.read(0, list(blocks)), blocks, list(blocks))
    assert counts == wanted
    fresh = store.cleared(HERE.name)
    fresh._nbytes.clear()
    counts.clear()
    assert same(fresh.read(0, list(blocks)), blocks, list(blocks))
    assert (counts[0], sum(counts)) == (1, count)  # of one that nothing is known of
    assert max(counts) <= full


# -- RAM in front -------------------------------------------------------------------------------------


class Behind(ColdStore):
    """A store that says what it was asked for."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], Buffer] = {}
        self.refuses: set[bytes] = set()
        self.asked: list[bytes] = []
        self.is_down = False

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer]) -> dict[bytes, str]:
        self.blocks |= {(group, key): buf for key, buf in blocks.items() if key not in self.refuses}
        return {key: "store_oom" for key in blocks if key in self.refuses}

    def read(self, group: int, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        for key in keys:
            if self.is_down:
                raise ColdStoreError
            self.asked.append(key)
            yield self.blocks.get((group, key))

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if (group, key) not in self.blocks]

    def drop(self, group: int, keys: object) -> None:
        pass

    def cleared(self, place: str) -> "Behind":
        return Behind()

    def close(self) -> None:
        pass

    def room(self, nbytes: int) -> int:
        return nbytes


@pytest.fixture
def behind() -> Behind:
    return Behind()


@pytest.fixture
def tiered(behind: Behind) -> TieredStore:
    """RAM for ten granules, and some bytes that are left free."""
    return TieredStore(behind, 11 * GRANULE)


def in_ram(tiered: TieredStore, blocks: Mapping[bytes, Buffer], group: int = 0) -> list[int]:
    """The places of those that are in RAM."""
    gone = tiered.ram.absent(group, list(blocks))
    assert {key for key in blocks if key not in gone} == {key for of, key in tiered._order if of == group}
    return [at for at, key in enumerate(blocks) if key not in gone]


def test_what_was_used_last_is_in_ram_as_far_as_bytes_go(tiered: TieredStore, behind: Behind) -> None:
    blocks = blocks_of(*[granules * GRANULE for granules in (4, 1, 3, 2)])
    keys = list(blocks)
    assert tiered.put_all(0, blocks) == {}
    assert in_ram(tiered, blocks) == [0, 1, 2, 3]
    assert same(tiered.read(0, keys[:1]), blocks, keys[:1])
    more = blocks_of(4 * GRANULE, seed=1)
    tiered.put_all(0, more)  # makes the two go that were not used for longest
    assert in_ram(tiered, blocks | more) == [0, 3, 4]
    assert (tiered.ram.used, tiered.ram.peak) == (10 * GRANULE, 10 * GRANULE)
    assert behind.asked == []
    assert same(tiered.read(0, keys), blocks, keys)
    assert behind.asked == keys[1:3]
    tiered.ram.check()


def test_blocks_leave_ram_in_the_order_that_was_said(tiered: TieredStore) -> None:
    blocks = blocks_of(*[2 * GRANULE] * 5)
    keys = list(blocks)
    tiered.put_all(0, blocks)
    tiered.go_first(0, [keys[3], b"unknown", keys[1]])
    tiered.put_all(0, blocks_of(2 * GRANULE, seed=1))
    assert keys[3] in tiered.ram.absent(0, keys)
    tiered.put_all(0, blocks_of(4 * GRANULE, seed=2))
    assert tiered.ram.absent(0, keys) == [keys[0], keys[1], keys[3]]


def test_what_is_refused_behind_is_not_in_ram_either(tiered: TieredStore, behind: Behind) -> None:
    blocks = blocks_of(100, 100)
    first, _ = blocks
    behind.refuses = {first}
    assert tiered.put_all(0, blocks) == {first: "store_oom"}
    assert in_ram(tiered, blocks) == [1]
    assert tiered.absent(0, list(blocks)) == [first]


def test_a_block_larger_than_ram_is_only_behind(tiered: TieredStore) -> None:
    blocks = blocks_of(100, 11 * GRANULE)
    tiered.put_all(0, blocks)
    assert in_ram(tiered, blocks) == [0]
    assert same(tiered.read(0, list(blocks)), blocks, list(blocks))


def test_groups_share_the_ram_but_not_the_blocks(tiered: TieredStore) -> None:
    zero, three = blocks_of(6 * GRANULE), blocks_of(5 * GRANULE)
    tiered.put_all(0, zero)
    tiered.put_all(3, three)
    assert (in_ram(tiered, zero, 0), in_ram(tiered, three, 3)) == ([], [0])
    assert same(tiered.read(0, list(zero)), zero, list(zero))
    assert (in_ram(tiered, zero, 0), in_ram(tiered, three, 3)) == ([0], [])


def test_while_it_is_down_behind_what_is_in_ram_is_read(tiered: TieredStore, behind: Behind) -> None:
    blocks = blocks_of(GRANULE, GRANULE)
    tiered.put_all(0, blocks)
    behind.is_down = True
    assert same(tiered.read(0, list(blocks)), blocks, list(blocks))
    found = tiered.read(0, [*blocks, b"far"])
    assert [next(found) is not None for _ in blocks] == [True, True]
    with pytest.raises(ColdStoreError):
        next(found)


def test_what_has_to_leave_ram_while_it_is_read_comes_from_behind(tiered: TieredStore, behind: Behind) -> None:
    blocks = blocks_of(*[2 * GRANULE] * 4)
    keys = list(blocks)
    tiered.put_all(0, blocks)
    found = tiered.read(0, keys)
    first = next(found)
    tiered.put_all(0, blocks_of(10 * GRANULE, seed=1))
    assert tiered.ram.absent(0, keys) == keys
    assert first is not None
    assert bytes(first) == bytes(blocks[keys[0]])
    assert same(found, blocks, keys[1:])
    assert behind.asked == keys[1:]


def test_dropped_blocks_and_a_cleared_store(tiered: TieredStore) -> None:
    blocks = blocks_of(100, 200)
    tiered.put_all(0, blocks)
    tiered.drop(0, [*list(blocks)[:1], b"unknown"])
    assert in_ram(tiered, blocks) == [1]
    other = tiered.cleared("elsewhere")
    assert other.absent(0, list(blocks)) == list(blocks)
    assert other.ram.used == 0
    assert other.ram.max_bytes == tiered.ram.max_bytes
