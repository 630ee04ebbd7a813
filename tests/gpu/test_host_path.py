"""The way by the CPU's memory beside a GPU, without an engine: what is pinned and read where it lies, and what is read
into pinned memory from a disk and from Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from integrity import check_store
from redis_server import RedisServer
from redis_server import running as redis_running
from store_world import GROUP, StoreWorld

from manthan.codec.block import BlockFormat
from manthan.codec.gpu.paged import PagedCodec, PagedLayout
from manthan.manager.config.model import RedisConfig
from manthan.manager.tiers.disk import DiskTier
from manthan.manager.tiers.ram import RamTier
from manthan.manager.tiers.redis import RedisTier
from manthan.manager.tiers.redis_client import Circuit, connect
from manthan.manager.tiers.redis_schema import Namespace
from manthan.manager.tiers.stack import StackedTier
from manthan.manager.tiers.tier import Tier
from manthan.manager.work import GroupKeys
from manthan.vllm_hooks import compat
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker import pinned
from manthan.vllm_hooks.worker.half import paged_codec
from manthan.vllm_hooks.worker.pinned import PinnedRam

LAYERS, HEADS, TOKENS, DIM = 8, 4, 16, 128
SOURCES, TARGETS = 64, 256
MIB = 1 << 20


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from redis_running(tmp_path_factory.mktemp("redis"))


def paged(codec: str) -> PagedCodec:
    torch.manual_seed(1)
    width = TOKENS * HEADS * 2 * DIM
    caches = tuple(torch.randn(SOURCES + TARGETS, width, device="cuda").bfloat16() for _ in range(LAYERS))
    layout = PagedLayout(caches, HEADS, TOKENS, DIM, width, 2 * DIM, HEADS * 2 * DIM, key_at=0, value_at=DIM)
    return paged_codec(layout, BlockFormat(codec, layout.shape, b"f" * 16, GROUP))


@pytest.mark.parametrize("codec", ["k3v3", "wht-5x"])
@pytest.mark.parametrize("kind", ["disk", "redis", "ram and disk", "little ram and disk", "ram and redis"])
def test_blocks_go_and_come_back(
    kind: str, codec: str, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PIECE", 2 * MIB)

    def make(device: torch.device) -> Tier:
        if kind.endswith("redis"):
            config = RedisConfig(url=redis_server.url)
            store: Tier = RedisTier(connect(config), Circuit(), Namespace("m:", codec), 0, 60.0)
        else:
            store = DiskTier(tmp_path, 256 * MIB)
        if not kind.startswith(("ram", "little")):
            return store
        ram = PinnedRam((4 if kind.startswith("little") else 64) * MIB, device)
        ram.start()
        ram.wait()
        assert ram.is_whole
        return StackedTier(RamTier(ram.nbytes, ram), store)

    world = StoreWorld(paged(codec), make, SOURCES, 4 * MIB, MIB)
    try:
        world.spill()
        for count in (SOURCES, 7, SOURCES):
            assert world.load(world.keys[:count]).failed == []
            assert world.load(world.keys[-count:], is_prefetch=True).failed == []
        if isinstance(world.store, StackedTier):
            assert world.store.front.used > 0
            check_store(world.store.front)
            world.path.submit_loads(ManthanMetadata(drops=[GroupKeys(GROUP, world.keys)]))
            assert world.store.front.used == 0, "all that was lent is given back"
    finally:
        world.path.shutdown()


def test_ram_is_pinned_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece; the GPU writes to what is there, and a graph is captured, while others are pinned."""
    monkeypatch.setattr(pinned, "PIECE", 2 * MIB)
    device = torch.device("cuda", 0)
    ram = PinnedRam(512 * MIB, device)
    assert len(ram.spans) == 1
    there = torch.randint(0, 256, (MIB // 32,), dtype=torch.uint8, device=device)
    graph, twice, stream = torch.cuda.CUDAGraph(), torch.zeros_like(there), torch.cuda.Stream(device)
    torch.cuda.synchronize()
    ram.start()
    captured = 0
    while not ram.is_whole:
        with torch.cuda.graph(graph, stream=stream):
            twice.copy_(there)
            twice.add_(there)
        captured += 1
        graph.reset()
        for span in ram.spans:
            ram.codes[span.start : span.start + len(there)].copy_(there, non_blocking=True)
    assert captured
    for span in ram.spans:
        ram.codes[span.start : span.start + len(there)].copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    for span in ram.spans:
        assert torch.equal(ram.codes[span.start : span.start + len(there)].to(device), there)
    errors: list[str] = []
    unpin = compat.unpin

    def unpinned(memory: torch.Tensor) -> None:
        try:
            unpin(memory)
        except RuntimeError as error:  # it was not pinned
            errors.append(str(error))

    monkeypatch.setattr(compat, "unpin", unpinned)
    ram.close()
    assert (list(ram.spans), errors) == ([], [])
