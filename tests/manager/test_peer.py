"""A rank reads the blocks that another keeps, over a socket: without an engine."""

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from manthan.manager.config.model import ConfigError
from manthan.manager.tiers import peer
from manthan.manager.tiers.arena_tier import RamTier
from manthan.manager.tiers.peer import PeerServer, PeerTier
from manthan.manager.tiers.tier import Buffer, Found
from manthan.manager.transfer import STORE_DOWN

KEYS = [bytes([n]) * 32 for n in range(40)]
LARGE = 3 << 20
"""More bytes than a socket buffers."""


def buf(seed: int, nbytes: int = LARGE) -> Buffer:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def name() -> str:
    return f"manthan-test-{secrets.token_hex(8)}"


@pytest.fixture
def kept() -> Iterator[RamTier]:
    tier = RamTier(64 << 20)
    yield tier
    tier.close()


@pytest.fixture
def server(name: str, kept: RamTier) -> Iterator[PeerServer]:
    server = PeerServer(name, kept.read)
    yield server
    server.close()


def test_a_rank_reads_what_another_keeps(server: PeerServer, kept: RamTier, name: str) -> None:
    """Bytes, an absent block, and the cause of a failure, in order. It stores and drops nothing itself."""
    kept.put_all(1, {KEYS[0]: buf(0), KEYS[2]: buf(2, 1), KEYS[3]: buf(3)})
    tier = PeerTier(name)
    assert tier.put_all(1, {KEYS[1]: buf(1)}) == {}
    tier.drop(1, KEYS)
    first, absent, small, last = tier.cleared("").read(1, KEYS[:4])
    for found, seed, nbytes in ((first, 0, LARGE), (small, 2, 1), (last, 3, LARGE)):
        assert isinstance(found, np.ndarray)
        assert np.array_equal(found, buf(seed, nbytes))
    assert absent is None
    assert list(tier.read(0, KEYS[:1])) == [None], "of another group"
    assert tier.absent(1, KEYS) == [], "the keeper says so"
    kept.drop(1, KEYS)
    assert list(tier.read(1, KEYS[:4])) == [None] * 4


def test_the_asking_tenant_and_causes_are_passed_on(name: str) -> None:
    def read(group: int, keys: Sequence[bytes], tenant: str) -> Iterator[Found]:
        yield from ["disk" if tenant == "ann" else "sealed" for _ in keys]

    server = PeerServer(name, read)
    assert list(PeerTier(name).read(0, KEYS[:2], "ann")) == ["disk", "disk"]
    assert list(PeerTier(name).read(0, KEYS[:1], "bob")) == ["sealed"]
    server.close()


def test_several_reads_go_on_at_once(server: PeerServer, kept: RamTier, name: str) -> None:
    kept.put_all(0, {key: buf(at, 1 << 20) for at, key in enumerate(KEYS)})
    reads = [PeerTier(name).read(0, KEYS) for _ in range(8)]
    for at, found in enumerate(zip(*reads, strict=True)):
        assert all(np.array_equal(each, buf(at, 1 << 20)) for each in found)


def test_without_a_keeper_all_blocks_are_failures(name: str, kept: RamTier) -> None:
    tier = PeerTier(name)
    assert list(tier.read(0, KEYS)) == [STORE_DOWN] * len(KEYS)
    kept.put_all(0, {key: buf(0) for key in KEYS[:3]})
    server = PeerServer(name, kept.read)
    found = tier.read(0, KEYS[:3])
    assert isinstance(next(found), np.ndarray)
    server.close()
    assert list(tier.read(0, KEYS[:1])) == [STORE_DOWN]
    assert sum(isinstance(each, np.ndarray) for each in found) == 2, "what was begun goes on"


def test_a_keeper_that_breaks_off_costs_the_rest(name: str) -> None:
    def read(group: int, keys: Sequence[bytes], tenant: str) -> Iterator[Found]:
        yield buf(0)
        raise RuntimeError("the arena is on fire")

    server = PeerServer(name, read)
    first, *rest = PeerTier(name).read(0, KEYS[:3])
    assert isinstance(first, np.ndarray)
    assert rest == [STORE_DOWN] * 2
    server.close()


@pytest.mark.parametrize("said", [b"", b"100\nshort", b"not JSON\n"])
def test_a_keeper_that_stops_within_an_answer_is_waited_for_no_longer_than_the_timeout(name: str, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as thread:
        listening.bind(f"\0{name}")
        listening.listen()
        reading = thread.submit(list, PeerTier(name, timeout_s=0.2).read(0, KEYS[:2]))
        link, _ = listening.accept()
        link.sendall(said)
        assert reading.result(60) == [STORE_DOWN] * 2
        link.close()


def test_a_reader_that_gives_up_leaves_the_keeper_as_it_was(server: PeerServer, kept: RamTier, name: str) -> None:
    kept.put_all(0, {key: buf(0) for key in KEYS[:6]})
    for _ in range(20):
        found = PeerTier(name).read(0, KEYS[:6])
        next(found)
        found.close()  # type: ignore[attr-defined]
    assert len(list(PeerTier(name).read(0, KEYS[:6]))) == 6


def test_only_one_process_has_a_name(server: PeerServer, name: str, kept: RamTier) -> None:
    with pytest.raises(ConfigError, match=r"in use\): give each engine of this host an engine_id of its own"):
        PeerServer(name, kept.read)


def test_another_user_gets_nothing_and_is_not_believed(
    server: PeerServer, name: str, kept: RamTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.put_all(0, {KEYS[0]: buf(0)})
    monkeypatch.setattr(peer.os, "getuid", lambda: os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"\0{name}")
        assert link.recv(1) == b""
    assert list(PeerTier(name).read(0, KEYS[:1])) == [STORE_DOWN]
