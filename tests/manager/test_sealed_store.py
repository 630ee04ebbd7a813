"""Blocks sealed on a disk and in a real Redis: what comes back, and what does not."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from key_files import manthan_keys, write_keys
from redis_server import RedisServer, running

from manthan.manager.config.model import RedisConfig
from manthan.manager.stores import sealed
from manthan.manager.stores.cold_store import Buffer, ColdStore, HostStore
from manthan.manager.stores.disk.store import DiskStore
from manthan.manager.stores.keyring import KeyRing
from manthan.manager.stores.redis.client import Circuit, connect
from manthan.manager.stores.redis.schema import Namespace
from manthan.manager.stores.redis.store import RedisStore
from manthan.manager.stores.sealed import OVERHEAD, SealedStore, Sealer
from manthan.manager.stores.tiered import TieredStore

KEYS = [f"key-{number:028d}".encode() for number in range(20)]
PLACE = "tiny-0123456789ab"


def numbers(seed: int, nbytes: int = 5000) -> Buffer:
    """Of few different bytes, which are found where they are not sealed."""
    return np.random.default_rng(seed).integers(0, 4, nbytes, np.uint8)


BLOCKS = {key: numbers(n) for n, key in enumerate(KEYS)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture(params=["disk", "redis"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ColdStore]:
    if request.param == "disk":
        store: ColdStore = DiskStore(tmp_path / "store", 16 << 20)
    else:
        server: RedisServer = request.getfixturevalue("server")
        server.client.flushall()
        client = connect(RedisConfig(url=server.url))
        store = RedisStore(client, Circuit(), Namespace("manthan:", PLACE), 0, 100)
    yield store
    store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.yaml", "k1", tenants={"acme": ["a1"], "globex": ["g1"]})


@pytest.fixture
def seal(inner: ColdStore, path: Path) -> Callable[..., SealedStore]:
    def make(place: str = PLACE, rank: int = 0, path: Path = path) -> SealedStore:
        return SealedStore(inner, Sealer(KeyRing(path), place), rank)

    return make


def read(store: ColdStore, keys: Sequence[bytes] = KEYS, group: int = 0, tenant: str = "") -> list[object]:
    """What comes back: `right` for what was put, or the cause."""
    found = zip(keys, store.read(group, keys, tenant), strict=True)
    return ["right" if same(buf, BLOCKS[key]) else buf for key, buf in found]


def same(found: object, right: Buffer) -> bool:
    return isinstance(found, np.ndarray) and np.array_equal(found, right)


def all_bytes(tmp_path: Path, server: RedisServer) -> bytes:
    """Names and values of all that is stored, on the disk and in Redis."""
    raw = server.binary_client
    kept = [name + (raw.get(name) or b"") for name in raw.scan_iter() if raw.type(name) == b"string"]
    return b"".join([*(file.read_bytes() for file in tmp_path.glob("store/*.seg")), *kept])


def test_blocks_come_back_and_nobody_else_sees_them(
    seal: Callable[..., SealedStore], tmp_path: Path, server: RedisServer
) -> None:
    store = seal()
    assert store.put_all(0, BLOCKS) == {}
    assert read(store) == read(seal()) == ["right"] * 20
    kept = all_bytes(tmp_path, server)
    assert len(kept) > 20 * 5000
    assert not any(key in kept or key.hex().encode() in kept for key in KEYS)
    assert not any(block[:8].tobytes() in kept for block in BLOCKS.values())
    assert store.absent(0, [*KEYS, b"x"]) == [b"x"]
    assert list(store.read(0, [b"x"])) == [None]
    assert store.room(5000) == store.inner.room(5000 + OVERHEAD)


def test_what_is_dropped_is_gone_on_a_disk(tmp_path: Path, path: Path) -> None:
    disk = DiskStore(tmp_path / "store", 16 << 20)
    store = SealedStore(disk, Sealer(KeyRing(path), PLACE), 0)
    store.put_all(0, BLOCKS)
    assert disk.used == sum(store.room(block.nbytes) for block in BLOCKS.values())
    store.drop(0, KEYS[1:])
    assert read(store) == ["right"] + [None] * 19
    disk.check()
    store.close()


def test_without_the_key_nothing_comes_back(seal: Callable[..., SealedStore], tmp_path: Path) -> None:
    seal().put_all(0, BLOCKS)
    other = seal(path=write_keys(tmp_path / "other.yaml", "k1", of="other"))
    assert read(other) == ["no_key"] * 20
    assert seal().inner.absent(0, [seal()._name(key) for key in KEYS]) == []


# -- moved elsewhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_value_belongs_to_its_key_group_rank_and_model(seal: Callable[..., SealedStore], tenant: str) -> None:
    """Each is put where another one is looked for, as who can write to the store may do."""
    first, second = KEYS[:2]
    mine = seal()
    mine.put_all(0, {first: BLOCKS[first]}, tenant)
    [value] = mine.inner.read(0, [mine._name(first)])
    assert isinstance(value, np.ndarray)
    value = value.copy()
    for reader, group, key in (
        (mine, 0, second),
        (mine, 1, first),
        (seal(rank=1), 0, first),
        (seal(place="tiny-ba9876543210"), 0, first),
    ):
        reader.inner.put_all(group, {reader._name(key): value})
        assert list(reader.read(group, [key], tenant)) == ["seal"]
    mine.inner.put_all(0, {mine._name(first): value})
    assert read(mine, [first], tenant=tenant) == ["right"]


def test_what_a_tenant_has_sealed_is_for_nobody_else(seal: Callable[..., SealedStore]) -> None:
    store = seal()
    store.put_all(0, BLOCKS, "acme")
    assert read(store, tenant="acme") == ["right"] * 20
    for tenant in ("", "globex", "initech"):
        assert read(store, tenant=tenant) == ["no_key"] * 20
    store.put_all(0, BLOCKS, "initech")  # has no key of its own, and so shares what it has
    for tenant in ("", "acme", "globex", "initech"):
        assert read(store, tenant=tenant) == ["right"] * 20


def test_a_value_does_not_open_as_another_tenant_s(seal: Callable[..., SealedStore], path: Path) -> None:
    """Whose key it is stands in front of it, for everybody to change."""
    store, tenants = seal(), ("", "acme", "globex")
    marks = [np.frombuffer(mark, np.uint8) for mark in KeyRing(path).keys.reading]
    name = store._name(KEYS[0])
    for at, tenant in enumerate(tenants):
        store.put_all(0, {KEYS[0]: BLOCKS[KEYS[0]]}, tenant)
        [value] = store.inner.read(0, [name])
        assert isinstance(value, np.ndarray)
        assert np.array_equal(value[4:12], marks[at])
        for other in marks[:at] + marks[at + 1 :]:
            store.inner.put_all(0, {name: np.concatenate((value[:4], other, value[12:]))})
            causes = {cause for each in tenants for cause in read(store, KEYS[:1], tenant=each)}
            assert "seal" in causes <= {"seal", "no_key"}


def test_what_was_sealed_before_a_reset_does_not_open_behind_it(tmp_path: Path, path: Path) -> None:
    """Its KV is perhaps of other weights."""
    disk = DiskStore(tmp_path / "store", 16 << 20)
    before = SealedStore(disk, Sealer(KeyRing(path), PLACE), 0)
    before.put_all(0, BLOCKS)
    [value] = disk.read(0, [before._name(KEYS[0])])
    after = before.cleared("")
    assert read(after) == [None] * 20
    after.inner.put_all(0, {before._name(KEYS[0]): value})  # type: ignore[dict-item]
    assert read(after, KEYS[:1]) == ["seal"]
    after.put_all(0, BLOCKS)
    assert read(after) == ["right"] * 20
    after.close()


def test_no_flipped_bit_nor_missing_byte_is_accepted(seal: Callable[..., SealedStore]) -> None:
    store, key, rng = seal(), KEYS[0], random.Random(0)
    store.put_all(0, {key: BLOCKS[key]}, "acme")
    name = store._name(key)
    [value] = store.inner.read(0, [name])
    right = bytes(value)  # type: ignore[arg-type]
    assert len(right) == BLOCKS[key].nbytes + OVERHEAD
    for bit in [*range(8 * 40), *(rng.randrange(8 * len(right)) for _ in range(300))]:
        flipped = bytearray(right)
        flipped[bit // 8] ^= 1 << bit % 8
        store.inner.put_all(0, {name: np.frombuffer(flipped, np.uint8)})
        assert read(store, [key], tenant="acme")[0] in ("seal", "no_key"), f"bit {bit}"
    for cut in (right[:-1], right[1:], right + b"x", right[:OVERHEAD], right[:20], b""):
        store.inner.put_all(0, {name: np.frombuffer(cut, np.uint8)})
        assert read(store, [key], tenant="acme") == ["seal"]
    store.inner.put_all(0, {name: BLOCKS[key]})  # never sealed
    assert read(store, [key], tenant="acme") == ["seal"]


# -- keys that change ---------------------------------------------------------------------------------


def test_keys_are_rotated_under_traffic(seal: Callable[..., SealedStore], path: Path) -> None:
    """While one thread writes and two read, as two engines do."""
    one, two = seal(), seal()
    one.put_all(0, BLOCKS)
    found: list[object] = []
    done = threading.Event()

    def write() -> None:
        rng = random.Random(0)
        while not done.is_set():
            key = rng.choice(KEYS[10:])
            found.append(one.put_all(0, {key: BLOCKS[key]}) or read(one, [key])[0])

    def look(store: SealedStore) -> None:
        while not done.is_set():
            found.extend(read(store, KEYS[:10]))

    threads = [threading.Thread(target=write), *(threading.Thread(target=look, args=(store,)) for store in (one, two))]
    for thread in threads:
        thread.start()
    for _ in range(20):
        manthan_keys("rotate", path)
    done.set()
    for thread in threads:
        thread.join()
    assert len(found) > 100
    assert {*found} == {"right"}
    one.put_all(0, {KEYS[0]: BLOCKS[KEYS[0]]})
    for number in range(1, 21):
        manthan_keys("remove", path, f"k{number}")
    assert read(two)[0] == "right"
    one.put_all(0, dict.fromkeys(KEYS[1:2], BLOCKS[KEYS[1]]))
    assert read(two)[1] == "right"


def test_a_key_that_is_removed_makes_its_codes_misses(seal: Callable[..., SealedStore], path: Path) -> None:
    store = seal()
    store.put_all(0, BLOCKS)
    manthan_keys("rotate", path)
    store.put_all(0, {KEYS[0]: BLOCKS[KEYS[0]]})
    assert read(store) == ["right"] * 20
    manthan_keys("remove", path, "k1")
    assert read(store) == ["right"] + ["no_key"] * 19


def test_a_tenant_that_is_forgotten_has_nothing_left(seal: Callable[..., SealedStore], path: Path) -> None:
    store = seal()
    store.put_all(0, dict(list(BLOCKS.items())[:10]), "acme")
    store.put_all(0, dict(list(BLOCKS.items())[10:]), "globex")
    manthan_keys("forget", path, "acme")
    assert read(store, KEYS[:10], tenant="acme") == ["no_key"] * 10
    assert store.put_all(0, BLOCKS, "acme") == dict.fromkeys(KEYS, "no_key")
    assert read(store, KEYS[10:], tenant="globex") == ["right"] * 10
    manthan_keys("add", path, "--tenant", "acme")
    assert store.put_all(0, dict(list(BLOCKS.items())[:10]), "acme") == {}
    assert read(store, KEYS[:10], tenant="acme") == ["right"] * 10


def test_no_two_values_have_a_key_and_a_nonce_in_common(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "MOST_MESSAGES", 10)
    sealers = [Sealer(KeyRing(path), PLACE) for _ in range(3)]
    values = [
        sealer.seal(b"the same", tenant, "key") for sealer in sealers for tenant in ("", "acme") for _ in range(25)
    ]
    heads = [value[4:40] for value in values]  # mark of the key, salt and nonce
    assert len({*heads}) == len({*(head[24:] for head in heads)}) == 150
    of_salt = [sum(head[:24] == one for head in heads) for one in {head[:24] for head in heads}]
    assert max(of_salt) == 10
    assert {sealers[0].open(value, None, "key") for value in values} == {b"the same"}


# -- tiers --------------------------------------------------------------------------------------------


def test_tiers_on_a_disk_and_in_redis_have_what_is_sealed(tmp_path: Path, path: Path, server: RedisServer) -> None:
    server.client.flushall()
    client = connect(RedisConfig(url=server.url))
    redis = RedisStore(client, Circuit(), Namespace("manthan:", PLACE), 0, 100)
    disk = DiskStore(tmp_path / "store", 1 << 20)
    sealed_store = SealedStore(TieredStore(disk, redis), Sealer(KeyRing(path), PLACE), 0)
    store = TieredStore(HostStore(12 * 5120), sealed_store)
    assert store.put_all(0, BLOCKS, "acme") == {}
    assert read(store, tenant="acme") == ["right"] * 20
    assert read(sealed_store, tenant="acme") == ["right"] * 20
    assert len(disk.names()) == len(server.client.keys("*:block:*")) == 20
    kept = all_bytes(tmp_path, server)
    assert not any(block[:8].tobytes() in kept for block in BLOCKS.values())
    manthan_keys("forget", path, "acme")
    assert read(sealed_store, tenant="acme") == ["no_key"] * 20
    causes = read(store, tenant="acme")
    assert {*causes} <= {"right", "no_key"}  # in RAM nothing is sealed
    assert causes.count("no_key") >= 8
    store.close()
