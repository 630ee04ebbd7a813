"""One rank's blocks in a real Redis, of any size and group, and RAM in front of them."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from redis_server import RedisServer, running
from some_blocks import blocks_of, same

from manthan.manager.config.model import RedisConfig
from manthan.manager.tiers.redis import RedisTier
from manthan.manager.tiers.redis_client import Circuit, StoreDownError, connect
from manthan.manager.tiers.redis_schema import Namespace
from manthan.manager.tiers.tier import Buffer, Landing

HERE = Namespace("manthan:", "tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisTier]:
    server.client.flushall()
    made = RedisTier(connect(RedisConfig(url=server.url)), Circuit(), HERE, 1, 1000)
    yield made
    made.close()


# -- Redis --------------------------------------------------------------------------------------------


def test_blocks_of_any_size_come_back(store: RedisTier, server: RedisServer) -> None:
    blocks = blocks_of(1, 100_000, 37, 2_000_000)
    assert store.put_all(0, blocks) == {}
    keys = [*reversed(blocks), b"missing", *blocks]
    assert same(store.read(0, keys), blocks, keys)
    assert store.absent(0, keys) == [b"missing"]
    assert all(server.client.strlen(HERE.block(0, key, 1)) == buf.nbytes for key, buf in blocks.items())
    assert store.room(1001) == 1001
    assert list(store.read(0, [])) == []


class Shelf(Landing):
    """Gives room from one end of its memory on."""

    def __init__(self, nbytes: int) -> None:
        self.memory, self.at = np.zeros(nbytes, np.uint8), 0

    def room(self, nbytes: int, blocks: int = 1) -> Buffer:
        self.at += nbytes
        return self.memory[self.at - nbytes : self.at]

    def lend(self, memory: Buffer, give_back: Callable[[], object]) -> None:
        raise AssertionError("Redis has nothing to lend")

    def lose(self) -> None:
        raise AssertionError("nobody else writes there")


@pytest.mark.parametrize("sizes", [(300, 20), (2_000_000, 3_000_000, 1_000_000, 37) * 3], ids=["one", "several"])
def test_what_is_read_comes_to_lie_where_the_reader_wants_it(store: RedisTier, sizes: tuple[int, ...]) -> None:
    """In one pipeline, and in several."""
    blocks, shelf = blocks_of(*sizes), Shelf(sum(sizes))
    assert store.put_all(0, blocks) == {}
    found = list(store.read(0, [*blocks, b"missing"], "", shelf))
    assert found.pop() is None
    assert all(buf is not None and np.shares_memory(buf, shelf.memory) for buf in found)
    assert same(iter(found), blocks, list(blocks))


def test_groups_and_ranks_are_kept_apart(store: RedisTier) -> None:
    zero, three = blocks_of(100), {b"\0\0": np.full(50, 3, np.uint8)}
    store.put_all(0, zero)
    store.put_all(3, three)
    assert same(store.read(0, list(zero)), zero, list(zero))
    assert same(store.read(3, list(three)), three, list(three))
    assert store.absent(1, list(zero)) == list(zero)
    other = RedisTier(store._client, store._circuit, HERE, 0, 1000)
    assert other.absent(0, list(zero)) == list(zero)


def test_a_full_server_refuses_and_is_up(store: RedisTier, server: RedisServer) -> None:
    server.client.config_set("maxmemory", 1)
    try:
        assert store.put_all(0, blocks_of(10, 20)) == dict.fromkeys(blocks_of(10, 20), "store_full")
        assert store._circuit.is_up
    finally:
        server.client.config_set("maxmemory", 0)


def test_a_server_that_is_gone_refuses(store: RedisTier, server: RedisServer) -> None:
    server.kill()
    try:
        assert store.put_all(0, blocks_of(10)) == dict.fromkeys(blocks_of(10), "store_down")
        with pytest.raises(StoreDownError):
            next(store.read(0, list(blocks_of(10))))
    finally:
        server.start()
