"""Ten thousand values in Redis that are not what was stored, given to the loader: none is accepted."""

import random
import time
from collections.abc import Callable, Iterator

import fake_cuda
import jobs
import pytest
import torch
import xxhash
from examples import examples
from fake_cuda import FormatCodec
from paged_cache import BLOCKS, block_format, cpu_blocks, gpu_like, paged, shape_of, write
from redis_server import RedisServer, running

from manthan.codec import wire
from manthan.manager.config.model import RedisConfig
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.redis import Circuit, Namespace, RedisTier, connect
from manthan.manager.transfer import TransferResult
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.engine import Engine
from manthan.vllm_hooks.worker.engine_cpu import CpuEngine
from manthan.vllm_hooks.worker.engine_cuda import CudaEngine
from manthan.vllm_hooks.worker.layout import paged_layout, probe_layers
from manthan.vllm_hooks.worker.slabs import Slab, Slabs

pytestmark = pytest.mark.usefixtures("engine_config")

CORRUPTIONS = 10_000
GROUP = 0
EXACT = [0, 4, 16, 0]
"""How many tokens of each block are kept exact."""
KEYS = [bytes([n]) * 32 for n in range(4)]
PAYLOADS = 128 + 3 * 64 + 10
"""Behind the header, in whatever form."""
TARGET = 7
"""The paged block that is loaded into."""


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


def on_the_cpu(store: RedisTier) -> tuple[Engine, dict]:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    blocks = cpu_blocks(caches, layers, spec)
    for block in range(len(KEYS)):
        write(caches, layers, block, spec, seed=block)
    return CpuEngine({GROUP: blocks}, store, 1, torch.device("cpu")), caches


def as_on_a_gpu(store: RedisTier) -> tuple[Engine, dict]:
    caches, layers, spec = gpu_like()
    layout = paged_layout(probe_layers(caches, layers, BLOCKS, shape_of(spec)), shape_of(spec))
    for cache in caches.values():
        cache[: len(KEYS)] = torch.randn(cache[: len(KEYS)].shape)
    codec, tiers = (
        FormatCodec(layout, block_format(caches, spec)),
        Slabs(None, Slab(torch.zeros(1 << 20, dtype=torch.uint8))),
    )
    return CudaEngine({GROUP: [codec]}, tiers, forms=EXACT, secondary=store), caches


class Loader:
    """The engine that serves, with four blocks of a cache in Redis."""

    def __init__(self, server: RedisServer, make: Callable[[RedisTier], tuple[Engine, dict]]) -> None:
        namespace = Namespace("manthan:", make.__name__)
        client = connect(RedisConfig(url=server.url))
        self.engine, self.caches = make(RedisTier(client, Circuit(), namespace, Shard(0, 1), 1000))
        self.raw = server.binary_client
        self.names = [namespace.block(GROUP, key, Shard(0, 1)) for key in KEYS]
        for n, key in enumerate(KEYS):
            job = jobs.store([key], [n], 32 * n, 32 * n + EXACT[n])
            self.engine.submit_stores(ManthanMetadata(stores=[job]))
            assert self.wait().failed == {}
        self.values = [self.raw.get(name) for name in self.names]

    def wait(self) -> TransferResult:
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline
            self.engine.take_ended()
            report = self.engine.take_report()
            if report is not None and report.results:
                return report.results[0]
            time.sleep(0.0002)

    def load(self, which: int) -> TransferResult:
        if isinstance(self.engine, CudaEngine):
            self.engine.tiers.clear()  # or it would not be read again
        job = jobs.load([KEYS[which]], [TARGET])
        self.engine.submit_loads(ManthanMetadata(loads=[job]))
        return self.wait()

    def target(self) -> torch.Tensor:
        return torch.stack([cache[TARGET] for cache in self.caches.values()]).clone()


def sealed(value: bytes) -> bytes:
    """With the checksum that it should have: nothing else gives it away."""
    return value[:8] + xxhash.xxh3_64(value[:8] + value[16:]).intdigest().to_bytes(8, "little") + value[16:]


def corrupted(values: list[bytes], which: int, rng: random.Random) -> bytes:
    """Something else than values[which]."""
    value = values[which]
    at, size = rng.randrange(len(value)), len(value)
    match rng.randrange(8):
        case 0:  # bits
            flipped = bytearray(value)
            for position in {rng.randrange(8 * size) for _ in range(rng.choice([1, 1, 1, 2, 5]))}:
                flipped[position // 8] ^= 1 << position % 8
            return bytes(flipped)
        case 1:  # its end is missing
            return value[:at]
        case 2:  # something follows
            return value + rng.randbytes(rng.choice([1, 16, 1000]))
        case 3:  # another block's, whole or in part
            other = values[(which + rng.randrange(1, len(values))) % len(values)]
            return rng.choice([other, value[:at] + other[at:], other[: max(PAYLOADS, at)] + value[max(PAYLOADS, at) :]])
        case 4:  # a piece is zero, noise or shifted
            end = min(size, at + rng.choice([1, 64, 4096]))
            piece = rng.choice([bytes(end - at), rng.randbytes(end - at)])
            return value[:at] + piece + value[end:] if rng.random() < 0.7 else value[:at] + value[end:] + piece
        case 5:  # nothing of it
            return rng.randbytes(rng.choice([0, 8, 127, 128, 129, size]))
        case 6:  # a header that says something else, in good order otherwise
            # but for its position in the session, for which the block hash stands
            offset = rng.choice([*range(8), *range(16, 40), *range(48, wire.parse(value).header.nbytes)])
            changed = bytearray(value)
            changed[offset] ^= rng.randrange(1, 256)
            return sealed(bytes(changed))
        case _:  # another block's bytes under this one's header
            other = values[(which + 1) % len(values)]
            return value[: wire.HEADER.size] + other[wire.HEADER.size :]


@pytest.mark.parametrize("make", [on_the_cpu, pytest.param(as_on_a_gpu, marks=pytest.mark.slow)])
def test_none_of_ten_thousand_corruptions_is_accepted(
    redis_server: RedisServer, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(monkeypatch)
    loader, rng = Loader(redis_server, make), random.Random(11)
    untouched = loader.target()
    causes = set()
    for _ in range(examples(CORRUPTIONS)):
        which = rng.randrange(len(KEYS))
        bad = corrupted(loader.values, which, rng)
        if bad == loader.values[which]:  # a piece that was zero anyway
            continue
        loader.raw.set(loader.names[which], bad)
        [(at, cause)] = loader.load(which).failed.items()
        assert at == 0
        causes.add(cause)
        loader.raw.set(loader.names[which], loader.values[which])
    assert torch.equal(loader.target(), untouched)
    assert causes >= {"checksum", "truncated", "trailing", "key", "magic", "fingerprint", "version", "size"}
    for which in range(len(KEYS)):
        assert loader.load(which).failed == {}  # what is right is accepted
        assert not torch.equal(loader.target(), untouched)
    loader.engine.shutdown()
