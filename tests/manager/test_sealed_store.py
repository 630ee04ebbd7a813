"""Sealed blocks and journals: what comes back, and what does not."""

import base64
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from key_files import write_keys

from manthan.manager.config.model import ConfigError, SealingConfig
from manthan.manager.tiers.arena_tier import RamTier
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.journal import Journal, JournalBlock, JournalSession, SavedBlocks
from manthan.manager.tiers.sealed import OVERHEAD, SealedTier, Sealer, keys_of
from manthan.manager.tiers.tier import Buffer, Tier

KEYS = [f"key-{number:028d}".encode() for number in range(20)]
PLACE = "tiny-0123456789ab"
BLOCKS = {key: np.random.default_rng(n).integers(0, 4, 5000, np.uint8) for n, key in enumerate(KEYS)}


@pytest.fixture
def inner() -> Tier:
    """The suite in test_tiers.py seals every tier."""
    return RamTier(16 << 20)


def sealer(path: Path, *names: str, place: str = PLACE) -> Sealer:
    return Sealer(keys_of(SealingConfig(key_file=str(write_keys(path / "keys", *names)))), place)


Seal = Callable[..., SealedTier]


@pytest.fixture
def seal(inner: Tier, tmp_path: Path) -> Seal:
    def make(*names: str, place: str = PLACE, rank: int = 0) -> SealedTier:
        return SealedTier(inner, sealer(tmp_path, *(names or ("k1",)), place=place), Shard(rank, 2))

    return make


def read(store: Tier, keys: Sequence[bytes] = KEYS, tenant: str = "") -> list[object]:
    """What comes back: `right` for what was put, or the cause."""
    found = zip(keys, store.read(0, keys, tenant), strict=True)
    return ["right" if isinstance(buf, np.ndarray) and np.array_equal(buf, BLOCKS[key]) else buf for key, buf in found]


def value_of(store: SealedTier, key: bytes) -> Buffer:
    [value] = store.inner.read(0, [key])
    assert isinstance(value, np.ndarray)
    return value.copy()


def test_blocks_come_back_to_who_has_the_key(seal: Seal) -> None:
    store = seal()
    assert store.put_all(0, BLOCKS) == {}
    assert read(store) == read(seal()) == ["right"] * 20
    assert not any(block[:8].tobytes() in value_of(store, key).tobytes() for key, block in BLOCKS.items())
    assert list(store.read(0, [b"x"])) == [None]
    assert store.room(5000) == store.inner.room(5000 + OVERHEAD)
    assert read(seal("another")) == ["seal"] * 20


def test_a_value_opens_only_where_it_belongs(seal: Seal) -> None:
    """Each is put where another one is looked for, as who can write to the store may do."""
    first, second = KEYS[:2]
    mine = seal()
    mine.put_all(0, {first: BLOCKS[first]}, "acme")
    value = value_of(mine, first)
    for reader, group, key in (
        (mine, 0, second),
        (mine, 1, first),
        (seal(rank=1), 0, first),
        (seal(place="tiny-ba9876543210"), 0, first),
    ):
        reader.inner.put_all(group, {key: value})
        assert list(reader.read(group, [key], "acme")) == ["seal"]
    mine.inner.put_all(0, {first: value})
    assert [read(mine, [first], tenant=tenant) for tenant in ("acme", "", "globex")] == [["right"], ["seal"], ["seal"]]


@pytest.mark.parametrize("place", ["", "tiny-another"])
def test_what_was_sealed_before_a_reset_does_not_open_behind_it(seal: Seal, place: str) -> None:
    """Its KV is perhaps of other weights."""
    before = seal()
    before.put_all(0, BLOCKS)
    value = value_of(before, KEYS[0])
    after = before.cleared(place)
    assert read(after) == [None] * 20
    after.inner.put_all(0, {KEYS[0]: value})
    assert read(after, KEYS[:1]) == ["seal"]


def test_no_flipped_bit_nor_missing_byte_is_accepted(seal: Seal) -> None:
    store, key, rng = seal(), KEYS[0], random.Random(0)
    store.put_all(0, {key: BLOCKS[key]})
    right = value_of(store, key).tobytes()
    assert len(right) == BLOCKS[key].nbytes + OVERHEAD
    for bit in [*range(8 * 40), *(rng.randrange(8 * len(right)) for _ in range(300))]:
        flipped = bytearray(right)
        flipped[bit // 8] ^= 1 << bit % 8
        store.inner.put_all(0, {key: np.frombuffer(flipped, np.uint8)})
        assert read(store, [key]) == ["seal"], f"bit {bit}"
    for cut in (right[:-1], right[1:], right + b"x", right[:OVERHEAD], right[:20], b"", BLOCKS[key].tobytes()):
        store.inner.put_all(0, {key: np.frombuffer(cut, np.uint8)})
        assert read(store, [key]) == ["seal"]


def test_old_keys_open_until_they_are_removed(seal: Seal) -> None:
    seal("k1").put_all(0, BLOCKS, "acme")
    assert read(seal("k2", "k1"), tenant="acme") == ["right"] * 20
    seal("k2", "k1").put_all(0, {KEYS[0]: BLOCKS[KEYS[0]]}, "acme")
    assert read(seal("k1"), tenant="acme") == ["seal"] + ["right"] * 19
    assert read(seal("k2"), tenant="acme") == ["right"] + ["seal"] * 19


def test_engines_that_share_a_redis_change_a_key_in_two_restarts_that_lose_nothing(tmp_path: Path) -> None:
    """As docs/security.md says. All know the new key before it seals, and the last line, which makes names, stays."""
    files = [("old",), ("old", "new", "old"), ("new", "old", "old")]
    before, between, after = (sealer(tmp_path, *names) for names in files)
    assert (
        before.name("chat") == between.name("chat") == after.name("chat") != sealer(tmp_path, "old", "new").name("chat")
    )
    for writer, reader in ((before, between), (between, before), (between, after), (after, between)):
        assert reader.open(writer.seal(b"KV", "acme", "key"), "acme", "key") == b"KV"


def test_no_two_values_have_a_key_and_a_nonce_in_common(tmp_path: Path) -> None:
    sealers = [sealer(tmp_path, "k1") for _ in range(3)]
    values = [one.seal(b"the same", tenant, "key") for one in sealers for tenant in ("", "acme") for _ in range(25)]
    assert len({value[4:40] for value in values}) == len({value[28:40] for value in values}) == 150
    assert len({value[12:28] for value in values}) == 3  # salts


def test_a_journal_is_sealed(tmp_path: Path) -> None:
    saved = SavedBlocks(tuple(JournalBlock(key, 0, at, 0) for at, key in enumerate(KEYS)))
    folder = tmp_path / "journal"
    journal = Journal(folder, sealer(tmp_path, "k1"))
    journal.tell([JournalSession("alice-doe", {"tenant": "acme-corp"}, saved)])
    journal.close()
    kept = b"".join(file.read_bytes() for file in folder.iterdir())
    assert not any(word in kept for word in (b"alice-doe", b"acme-corp", KEYS[3]))
    again = Journal(folder, sealer(tmp_path, "k2", "k1"))
    assert list(again.sessions()) == [JournalSession("alice-doe", {"tenant": "acme-corp"}, saved)]
    again.close()
    without = Journal(folder, sealer(tmp_path, "k2"))
    assert list(without.sessions()) == []
    without.close()


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (None, 0o600, "cannot be read: No such file or directory."),
        ("", 0o600, "must have 32 random bytes in base64 in each line"),
        ("short", 0o600, "must have 32 random bytes in base64 in each line"),
        (base64.b64encode(bytes(31)).decode(), 0o600, "must have 32 random bytes in base64 in each line"),
        (base64.b64encode(bytes(32)).decode(), 0o644, "has mode 0644, which lets others read or change it"),
        (base64.b64encode(bytes(32)).decode(), 0o620, "has mode 0620, which lets others read or change it"),
    ],
)
def test_key_files_that_are_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=r"^sealing.key_file: ") as raised:
        keys_of(SealingConfig(key_file=str(path)))
    assert said in str(raised.value)
    assert text is None or not text or text not in str(raised.value)


def test_a_key_file_that_a_cluster_mounts(tmp_path: Path) -> None:
    """0440, as secrets of Kubernetes may have; without a file there are no keys."""
    path = write_keys(tmp_path / "keys", "k1")
    path.chmod(0o440)
    assert len(keys_of(SealingConfig(key_file=str(path)))) == 1
    assert keys_of(SealingConfig()) == ()
