"""The engine on a GPU with a secondary tier, without vLLM: a disk or Redis, behind pinned RAM."""

import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from integrity import check_erased
from redis_server import RedisServer
from redis_server import running as redis_running

from manthan.codec.block import BlockFormat
from manthan.codec.gpu.paged import PagedCodec, PagedLayout
from manthan.manager.config.model import RedisConfig
from manthan.manager.events import BlocksDropped, DropCause
from manthan.manager.tiers.disk import DiskTier
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.peer import PeerServer, PeerTier
from manthan.manager.tiers.redis import Circuit, Namespace, RedisTier, connect
from manthan.manager.tiers.tier import Tier
from manthan.manager.transfer import TransferResult
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker import slabs
from manthan.vllm_hooks.worker.engine_cuda import CudaEngine
from manthan.vllm_hooks.worker.half import paged_codec
from manthan.vllm_hooks.worker.slabs import PinnedRam, Slab, Slabs

LAYERS, HEADS, TOKENS, DIM = 8, 4, 16, 128
SOURCES, TARGETS = 64, 256
GROUP = 1
EXACT = 3
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


class World:
    """An engine whose first `SOURCES` blocks, which are random numbers, are stored; the others are loaded into."""

    def __init__(self, codec: PagedCodec, ram_nbytes: int, secondary: Tier | None, keeps: bool = True) -> None:
        self.codec, self.device = codec, codec.device
        tiers = Slabs(None, Slab.pinned(ram_nbytes, codec.device))
        self.engine = CudaEngine({GROUP: [codec]}, tiers, forms=(0, EXACT, TOKENS), secondary=secondary, keeps=keeps)
        self.keys = [bytes([n]) * 32 for n in range(SOURCES)]
        self.tokens = 8 * TOKENS + EXACT
        """Exact ones, of the whole."""
        self.right = [self._restored(n) for n in range(SOURCES)]

    def numbers(self, block: int) -> torch.Tensor:
        return torch.stack([cache[block] for cache in self.codec.layout.caches])

    def _restored(self, block: int) -> torch.Tensor:
        """What becomes of a block, by the codec alone."""
        exact = min(max(self.tokens - block * TOKENS, 0), TOKENS)
        buffer = torch.empty(self.codec.form(exact).nbytes, dtype=torch.uint8, device=self.device)
        batch = self.codec.batch(exact, [b"k" * 32], [block], [block * TOKENS], [0])
        self.codec.encode(batch, buffer)
        self.codec.decode(batch._replace(block_ids=batch.block_ids * 0 + SOURCES), buffer)
        return self.numbers(SOURCES).clone()

    def poll(self) -> TransferResult:
        until = time.monotonic() + 20
        while True:
            assert time.monotonic() < until
            self.engine.take_ended()
            report = self.engine.take_report()
            if report is not None and report.results:
                [result] = report.results
                return result
            time.sleep(0.001)

    def store(self) -> None:
        job = jobs.store(self.keys, range(SOURCES), 0, self.tokens, group=GROUP)
        self.engine.submit_stores(ManthanMetadata(stores=[job]))
        result = self.poll()
        assert result.failed == {}
        assert (result.nbytes > 0).all()

    def load(self, places: range, request_id: str | None) -> None:
        targets = random.Random(len(places)).sample(range(SOURCES, SOURCES + TARGETS), len(places))
        for cache in self.codec.layout.caches:
            cache[targets] = 0
        torch.cuda.synchronize()
        job = jobs.load([self.keys[n] for n in places], targets, request_id, group=GROUP)
        self.engine.submit_loads(ManthanMetadata(loads=[job]))
        assert self.poll().failed == {}
        assert all(torch.equal(self.numbers(at), self.right[n]) for at, n in zip(targets, places, strict=True))


@pytest.mark.parametrize("codec", ["k3v3", "wht-5x"])
@pytest.mark.parametrize("ram", [3 * MIB, 64 * MIB], ids=["little RAM", "RAM for all"])
@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_blocks_go_and_come_back(
    kind: str, ram: int, codec: str, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "PIECE", 2 * MIB)
    if kind == "redis":
        config = RedisConfig(url=redis_server.url)
        store: Tier = RedisTier(connect(config), Circuit(), Namespace("m:", codec), Shard(0, 1), 60.0)
    else:
        store = DiskTier(tmp_path, 256 * MIB)
    world = World(paged(codec), ram, store)
    try:
        world.store()
        for count in (SOURCES, 7, SOURCES):
            world.load(range(count), "request")
            world.load(range(SOURCES - count, SOURCES), None)
        assert not world.engine._primary.pins
        world.engine.submit_loads(ManthanMetadata(drops=[BlocksDropped(GROUP, world.keys, DropCause.RELEASED)]))
        torch.cuda.synchronize()
        check_erased(world.engine.tiers.host)
    finally:
        world.engine.shutdown()


@pytest.mark.parametrize("ram", [3 * MIB, 64 * MIB], ids=["little RAM", "RAM for all"])
def test_an_engine_reads_what_another_keeps_in_pinned_ram(ram: int) -> None:
    name = f"manthan-test-{secrets.token_hex(8)}"
    keeper = World(paged("wht-5x"), 64 * MIB, None)
    reader = World(paged("wht-5x"), ram, PeerTier(name), keeps=False)
    server = PeerServer(name, keeper.engine.read)
    try:
        keeper.store()
        for count in (SOURCES, 7, SOURCES):
            reader.load(range(count), "request")
            reader.load(range(SOURCES - count, SOURCES), None)
        assert not reader.engine._primary.pins
        assert not reader.engine.tiers.host.blocks()
    finally:
        server.close()
        for world in (keeper, reader):
            world.engine.shutdown()


def test_ram_is_pinned_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece; the GPU writes to what is there, and a graph is captured, while others are pinned."""
    monkeypatch.setattr(slabs, "PIECE", 2 * MIB)
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
            ram.buffer[span.start : span.start + len(there)].copy_(there, non_blocking=True)
    assert captured
    for span in ram.spans:
        ram.buffer[span.start : span.start + len(there)].copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    for span in ram.spans:
        assert torch.equal(ram.buffer[span.start : span.start + len(there)].to(device), there)
    cudart, unpin, told = torch.cuda.cudart(), torch.cuda.cudart().cudaHostUnregister, list[Any]()
    monkeypatch.setattr(cudart, "cudaHostUnregister", lambda at: told.append(unpin(at)))
    pieces = len(ram.spans)
    ram.close()
    assert (list(ram.spans), told) == ([], [cudart.cudaError.success] * pieces)
