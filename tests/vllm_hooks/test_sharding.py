"""What each rank has of a block, and ranks of other engines that read it: without an engine, on invented numbers."""

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from redis_server import RedisServer, running
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from manthan.codec.base import Numbers
from manthan.codec.block import BlockShape
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.peer import PeerServer, PeerTier
from manthan.manager.tiers.tier import Tier
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.fingerprint import Sharding, fingerprint, namespace_of, reads_others
from manthan.vllm_hooks.groups import Context, Groups, KvCacheGroup, groups_of
from manthan.vllm_hooks.lasting import make_store
from manthan.vllm_hooks.transfer_config import EXTRA_KEY, from_vllm_config, settings
from manthan.vllm_hooks.worker.engine_cpu import CpuBlocks, PagedMemory
from manthan.vllm_hooks.worker.half import WorkerHalf

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
HEADS, LAYERS, DIM, TOKENS = 4, 2, 64, 16
LATENT = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, "max_tp_shards": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


def configured(tiers: dict[str, Any] | None = None, codec: str = "wht-5x", **options: Any) -> Any:
    """vLLM's configuration of a model with four KV heads."""
    manthan = kv_transfer_config(tiers=tiers or {}, codec=codec)
    heads = {"num_key_value_heads": HEADS, "head_dim": DIM} | options
    return EngineArgs(
        str(MODEL), kv_transfer_config=manthan, hf_overrides=heads, max_model_len=1024
    ).create_engine_config()


def with_ranks(plain: Any, tensor: int, stages: int = 1, rank: int = 0, **options: int) -> Any:
    """The same, as a rank of that many has it."""
    config = deepcopy(plain)
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank = tensor, stages, rank
    parallel.world_size = tensor * stages * options.get("prefill_context_parallel_size", 1)
    for name, value in options.items():
        setattr(parallel, name, value)
    return config


def cache_of(tensor: int, heads: int = HEADS) -> KVCacheConfig:
    """vLLM's groups, as each rank of that many has them."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=max(1, heads // tensor), head_size=DIM, dtype=torch.bfloat16
    )
    return KVCacheConfig(8, [], [KVCacheGroupSpec([str(n) for n in range(LAYERS)], spec)])


def groups(tensor: int, heads: int = HEADS) -> Groups:
    return groups_of(cache_of(tensor, heads))


def latents(replicas: int, **options: Any) -> Groups:
    return Groups(
        KvCacheGroup(0, MLAAttentionSpec(block_size=TOKENS, **LATENT), 2, latent=512, **options), replicas=replicas
    )


def test_ranks_share_heads_and_some_have_the_same() -> None:
    plain = configured()
    found = [Sharding.of(with_ranks(plain, tensor), groups(tensor)) for tensor in (1, 2, 4, 8)]
    assert found == [(1, 1, 1, 4), (1, 2, 2, 4), (1, 4, 4, 4), (1, 8, 4, 4)]
    eight = found[-1]
    assert [eight.shard(rank).at for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3] == [*map(eight.first_head, range(8))]
    assert [eight.is_first(rank) for rank in range(8)] == [True, False] * 4
    assert [each.parts for each in eight.others()] == [1, 2]
    stages = Sharding.of(with_ranks(plain, 2, stages=2), groups(2))
    assert [stages.shard(rank) for rank in range(4)] == [Shard(at, 4) for at in range(4)]
    assert [stages.first_head(rank) for rank in range(4)] == [0, 2, 0, 2]
    assert [stages.sources(rank, stages.with_ranks(1)) for rank in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize("own", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("other", [1, 2, 4, 8, 16])
def test_sources_have_all_heads_of_a_rank_and_each_has_one(own: int, other: int) -> None:
    one, two = Sharding(1, 1, 1, 8).with_ranks(own), Sharding(1, 1, 1, 8).with_ranks(other)
    for rank in range(own):
        wanted = {one.first_head(rank) + n for n in range(8 // one.parts)}
        sources = [{two.first_head(at) + n for n in range(8 // two.parts)} for at in one.sources(rank, two)]
        assert wanted <= set().union(*sources)
        assert all(wanted & source for source in sources)
        assert sum(map(len, sources)) == len(set().union(*sources)), "none twice"


def test_who_cannot_be_read_by_others_keeps_to_its_own() -> None:
    """Blocks of bytes, ranks that share a block's tokens, and layers with different numbers of heads."""
    plain = configured()
    packed = Groups(KvCacheGroup(0, groups(2).main.spec, 2, cache_dtype="bytes", layer_nbytes=(64, 64)))
    spread = Groups(KvCacheGroup(0, groups(2).main.spec, 2, context=Context(2, 1)))
    assert Sharding.of(with_ranks(plain, 2), packed) == Sharding.of(with_ranks(plain, 2), spread) == (1, 2, 2, 0)
    for several in ({"swa_num_key_value_heads": 8}, {"layers": [{"kv_heads": 2}]}):
        assert Sharding.of(with_ranks(configured(**several), 8), groups(8)) == (1, 8, 8, 0)
    assert Sharding.of(with_ranks(plain, 2), groups(2, 8)).heads == 0, "vLLM has other heads than the model says"
    sharding = Sharding.of(with_ranks(plain, 2), groups(2))
    assert reads_others(plain, sharding)
    assert not reads_others(plain, sharding._replace(heads=0))


def test_all_ranks_have_the_same_latents_also_those_of_context_parallelism() -> None:
    """vLLM gathers what ranks of prefilling have computed on all of them, and its blocks are no larger."""
    plain = configured()
    assert Sharding.of(plain, latents(1)) == (1, 1, 1, 1)
    found = Sharding.of(with_ranks(plain, 2, prefill_context_parallel_size=2), latents(2))
    assert found == (1, 4, 1, 1)
    assert [found.is_first(rank) for rank in range(4)] == [True, False, False, False]
    assert found.others() == []


def test_only_what_is_not_about_ranks_decides_where_blocks_are_and_what_they_mean() -> None:
    plain = configured()
    names, marks = set(), set()
    for tensor in (1, 2, 4, 8):
        for rank in range(tensor):
            config, of_rank = with_ranks(plain, tensor, rank=rank), groups(tensor)
            names.add(namespace_of(config, from_vllm_config(config), of_rank, "weights").name)
            marks.add(fingerprint(config, of_rank.main, "wht-5x", "", sharding=Sharding.of(config, of_rank)))
    assert len(names) == len(marks) == 1
    config, main = with_ranks(plain, 2, stages=2), groups(2).main
    sharding = Sharding.of(config, groups(2))
    stages = [with_ranks(plain, 2, stages=2, rank=rank) for rank in range(4)]
    assert len({fingerprint(each, main, "wht-5x", "", sharding=sharding) for each in stages} | marks) == 3
    uncut = sharding._replace(stages=1, heads=0)
    others = [with_ranks(plain, 2, rank=rank) for rank in range(2)]
    assert len({fingerprint(each, main, "wht-5x", "", sharding=uncut) for each in others} | marks) == 3


# -- stores of four, two and one


class Memory(PagedMemory):
    """Paged cache in a dict."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Numbers, Numbers]] = {}

    def gather(self, block_id: int) -> tuple[Numbers, Numbers]:
        return self.blocks[block_id]

    def scatter(self, block_id: int, keys: Numbers, values: Numbers) -> None:
        self.blocks[block_id] = keys, values


class Rank:
    """A worker's part, but for its cache and its threads."""

    def __init__(self, plain: Any, tensor: int, rank: int) -> None:
        config = with_ranks(plain, tensor, rank=rank)
        half = WorkerHalf(config, cache_of(tensor))
        group, self.memory = half.groups.main, Memory()
        namespace = namespace_of(config, from_vllm_config(config), half.groups, "weights")
        form = half._format("wht-5x", group, half._facts("wht-5x", group, None), namespace.name)
        self.blocks = CpuBlocks(self.memory, form)
        sharding, self.server = Sharding.of(config, half.groups), None
        kept = sharding.kept(config)
        self.keeps, name = kept.is_first(rank), f"manthan-test-{os.getpid()}-{kept.shard(rank)}"
        self.store: Tier = make_store(config, namespace, sharding) if self.keeps else PeerTier(name)
        if kept.copies > 1 and self.keeps:
            self.server = PeerServer(name, self.store.read)

    def put(self, job: Transfer, numbers: tuple[Numbers, Numbers]) -> None:
        first, heads = self.blocks.format.first_head, self.blocks.format.shape.heads
        self.memory.blocks[1] = tuple(each[:, first : first + heads] for each in numbers)  # type: ignore[assignment]
        [buf] = self.blocks.encode(job, self.blocks.gather(job))
        assert not isinstance(buf, str)
        assert self.store.put_all(0, {job.block_hashes[0]: buf}) == {}

    def read(self, key: bytes) -> tuple[Numbers, Numbers] | None:
        [found] = self.store.read(0, [key])
        assert self.blocks.decode(key, 2, found) in (None, "missing")
        return self.memory.blocks.pop(2, None)


def ranks_of(plain: Any, count: int) -> list[Rank]:
    return [Rank(plain, count, rank) for rank in range(count)]


def joined(found: list[Any]) -> Numbers:
    """Keys and values of all heads, without those of ranks that have the same as another."""
    step = max(1, len(found) // HEADS)
    assert all(np.array_equal(found[at][0], found[at - at % step][0]) for at in range(len(found)))
    return np.array([np.concatenate([part[n] for part in found[::step]], axis=1) for n in (0, 1)])


def close(ranks: list[Rank]) -> None:
    for rank in ranks:
        if rank.server is not None:
            rank.server.close()
        rank.store.close()


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        *[(written, "redis") for written in (1, 2, 4, 8)],
        *[pytest.param(written, "disk", marks=pytest.mark.slow) for written in (1, 4, 8)],
        (2, "disk"),
    ],
)
def test_what_any_number_of_ranks_wrote_any_other_reads(
    kind: str, written: int, server: RedisServer, tmp_path: Path
) -> None:
    """Bit for bit as the writers themselves. What all have dropped is gone, and ranks with the same write it once."""
    server.client.flushall()
    tiers = {"redis": {"kind": "redis", "redis": server.url}}.get(kind, {"kind": kind, "disk": {"path": str(tmp_path)}})
    plain, key, shape = configured(tiers), b"k" * 32, BlockShape(LAYERS, HEADS, TOKENS, DIM)
    rng = np.random.default_rng(written)
    numbers = [(rng.standard_normal(shape.numbers).astype("<f4").view("<u4") >> 16).astype("<u2") for _ in range(2)]
    job = Transfer(1, "store", 0, [key], np.array([1], np.int32), first_token=32)
    writers = ranks_of(plain, written)
    for rank in writers:
        rank.put(job, (numbers[0], numbers[1]))
    right = joined([rank.read(key) for rank in writers])
    close(writers)
    if kind == "redis":
        assert len(list(server.client.scan_iter("*:block:*"))) == min(written, HEADS)
    else:
        assert len(list(tmp_path.glob("*/rank-*/blocks"))) == min(written, HEADS)
    for read in (1, 2, 4, 8):
        readers = ranks_of(plain, read)
        assert np.array_equal(joined([rank.read(key) for rank in readers]), right)
        assert all(rank.store.absent(0, [key, b"x" * 32]) == [b"x" * 32] for rank in readers if rank.keeps)
        close(readers)
    readers = ranks_of(plain, 2)
    for rank in readers:
        rank.store.drop(0, [key])
    close(readers)
    for read in (1, 2, 4, 8) if kind == "disk" else ():
        readers = ranks_of(plain, read)
        assert [rank.read(key) for rank in readers] == [None] * read
        close(readers)


def test_ranks_keep_the_same_shard_once_where_one_can_read_what_the_other_keeps() -> None:
    def kept(kind: str, **options: Any) -> list[Shard]:
        config = with_ranks(configured(), 8, stages=2, **{"distributed_executor_backend": "mp"} | options)
        settings(config)[EXTRA_KEY]["tiers"] |= {"kind": kind, "disk": {"path": "/tmp"}}
        sharding = Sharding.of(config, groups(8)).kept(config)
        return [sharding.shard(rank) for rank in range(16) if sharding.is_first(rank)]

    once, each = [Shard(at, 8) for at in range(8)], [Shard(at, 16) for at in range(16)]
    assert kept("host") == kept("disk") == once
    assert kept("device") == kept("redis") == each
    assert kept("host", distributed_executor_backend="ray") == kept("disk", nnodes=2) == each


def test_workers_know_of_blocks_that_a_draft_has_computed_again() -> None:
    """As the scheduler does: the namespace of what lasts depends on it, where there are windows or states."""
    config = configured()
    config.speculative_config = SimpleNamespace(use_eagle_block_drop=lambda: True, uses_draft_kv_cache=lambda: False)
    assert WorkerHalf(config, cache_of(1)).groups.again == 1
