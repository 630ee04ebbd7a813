"""Exact copies on a GPU, in every tier: the first and the last blocks come back bit for bit, or as their codes say."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_ways import BLOCK, WAYS
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import Engine, Table, running

from manthan.codec import exact, wire
from manthan.codec.gpu.paged import GOOD, PagedLayout
from manthan.codec.registry import SPECS
from manthan.vllm_hooks.worker.exact_rows import ExactRows

PARTS = 6  # of the copy of a block


@pytest.fixture(scope="module", params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    codec = {"sink_tokens": 4, "window_tokens": 40}  # one block of 32 tokens, and two
    options = {"blocks": 131, "idle_after_s": 2.0, "sweep_interval_s": 0.1, "codec": codec}
    for engine in running(**options | WAYS[request.param]):
        yield request.param, engine


@pytest.fixture
def engine(way: tuple[str, Engine]) -> Engine:
    way[1].start_afresh()
    return way[1]


# -- what is done on the worker -----------------------------------------------------------------------


def digests(worker: Any) -> list[str]:
    """Of each block of the pool, in all layers."""
    path = get_kv_transfer_group().worker.path
    layout = path.codec.layout if hasattr(path, "tiers") else path.blocks._layout
    torch.cuda.synchronize()
    rows = torch.cat([cache.view(torch.uint8).cpu() for cache in layout.caches], 1).numpy()
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]


def wipe(worker: Any) -> None:
    """Nothing is left in the pool."""
    path = get_kv_transfer_group().worker.path
    layout = path.codec.layout if hasattr(path, "tiers") else path.blocks._layout
    with torch.inference_mode():
        for cache in layout.caches:
            cache.zero_()
    torch.cuda.synchronize()


def damage(worker: Any) -> None:
    """One byte of one part of the first block's copy changes."""
    path = get_kv_transfer_group().worker.path
    if hasattr(path, "tiers"):
        of = {key: (tier, slot) for tier in path.tiers._all for key, slot in tier.slots._of.items()}
        key = [key for key in of if key.endswith(b"/exact001")][-1]  # tails are stored first
        tier, slot = of[key]
        tier.codes[slot, 5000] ^= 1
    else:
        key = [key for key in path.store._blocks if key.endswith(b"/exact001")][-1]
        path.store._blocks[key] = path.store._blocks[key].copy()
        path.store._blocks[key][5000] ^= 1


def stored(worker: Any) -> int:
    """Bytes in the rank's tiers."""
    path = get_kv_transfer_group().worker.path
    return path.tiers.used if hasattr(path, "tiers") else path.store.used


def in_flight(worker: Any) -> int:
    """What is remembered of copies under way; slots that are neither free nor hold a block."""
    path = get_kv_transfer_group().worker.path
    if not hasattr(path, "tiers"):
        return 0
    taken = sum(len(tier.codes) - tier.slots.free - len(tier.slots) for tier in path.tiers._all)
    return taken + len(path._made) + len(path._restored) + len(path._copy_causes)


# -- sessions -----------------------------------------------------------------------------------------


def total(engine: Engine, name: str, **labels: str) -> float:
    return engine.metric(f"manthan_{name}_total", **labels)


def go_and_return(engine: Engine, table: Table, then: Any = None) -> tuple[int, int]:
    """A session goes cold and is asked again; how many of its blocks are the same, and how many should be."""
    prompt, right = table.question(2)
    encoded, restored = total(engine, "encoded_blocks"), total(engine, "restored_blocks")
    assert engine.ask(prompt, "user").text == right
    before = set(engine.on_worker(digests))
    assert engine.sessions("cold") == 0
    engine.wait_until_cold(1)
    encoded = total(engine, "encoded_blocks") - encoded
    assert engine.metric("manthan_exact_blocks") == 3
    assert engine.metric("manthan_cold_bytes") == engine.on_worker(stored) == (encoded + 3 * PARTS) * BLOCK
    engine.on_worker(wipe)
    empty = set(engine.on_worker(digests))
    if then is not None:
        engine.on_worker(then)
    assert engine.ask(prompt, "user").text == right
    engine.wait(lambda: total(engine, "restored_blocks") > restored, "a restore")
    restored = total(engine, "restored_blocks") - restored
    assert restored >= encoded - 1 > 15
    same = len((set(engine.on_worker(digests)) & before) - empty)
    return same, int(3 - (encoded - restored))


def test_the_first_and_the_last_blocks_come_back_bit_for_bit(engine: Engine) -> None:
    same, expected = go_and_return(engine, Table(1))
    assert same == expected >= 2
    assert engine.failures() == 0


def test_a_damaged_copy_comes_back_as_its_codes_say(engine: Engine) -> None:
    before = total(engine, "failures", cause="exact_checksum")
    same, expected = go_and_return(engine, Table(2), damage)
    assert same == expected - 1
    assert total(engine, "failures", cause="exact_checksum") == before + 1


def test_sessions_that_come_and_go_are_right_and_leave_nothing_behind(engine: Engine) -> None:
    failures = engine.failures()
    tables = [Table(10 + seed) for seed in range(5)]
    for _ in range(3):
        for n, table in enumerate(tables):
            for index in (2, 14):
                prompt, right = table.question(index)
                assert engine.ask(prompt, f"user {n}").text == right
        engine.wait(lambda: not any(map(engine.sessions, ("hot", "idle", "evicting"))), "only cold sessions")
        assert engine.metric("manthan_exact_blocks") >= 5 * 2
    assert engine.failures() == failures
    engine.wait(lambda: engine.on_worker(in_flight) == 0, "an end of all copies under way")
    engine.wait(lambda: engine.metric("manthan_cold_bytes") == engine.on_worker(stored), "agreement on what is stored")
    engine.start_afresh()
    assert engine.on_worker(stored) == 0


# -- rows ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["kernels", "torch"])
def paged(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        from manthan.codec.gpu.torch_codec import TorchPagedCodec

        return TorchPagedCodec
    from manthan.codec.gpu.cuda_codec import CudaPagedCodec

    return CudaPagedCodec


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_are_sealed_and_verified_on_the_device(paged: Any, dtype: torch.dtype) -> None:
    layers, heads, tokens, dim, blocks = 3, 2, 16, 128, 8
    torch.manual_seed(1)
    caches = tuple(torch.randn(blocks, tokens * heads * 2 * dim, device="cuda").to(dtype) for _ in range(layers))
    strides = (tokens * heads * 2 * dim, 2 * dim, heads * 2 * dim)
    layout = PagedLayout(caches, heads, tokens, dim, *strides, key_at=0, value_at=dim)
    header = wire.BlockHeader("lloyd3", b"", b"f" * 16, layers, heads, tokens, dim)
    parts = exact.exact_parts(header, dtype.itemsize)
    keys = [part for key in (b"a" * 32, b"b" * 32) for part in exact.part_keys(key, parts)]
    headers = torch.from_numpy(wire.header_rows(header, keys)).cuda()
    slots = torch.arange(len(keys), device="cuda")
    status = torch.zeros(len(keys), dtype=torch.int32, device="cuda")
    copies = ExactRows(paged(SPECS["lloyd3"], layout, header), parts)
    rows = copies.make(torch.tensor([3, 5], device="cuda"), slots, headers).clone()
    for key, row in zip(keys, rows.cpu().numpy(), strict=True):
        wire.parse(row, key=key, fingerprint=b"f" * 16)
    rows[1, 700] ^= 1
    before = [cache.clone() for cache in caches]
    copies.write(torch.tensor([6, 7], device="cuda"), rows, slots, headers, status)
    assert [s < 0 for s in status.tolist()] == [n == 1 for n in range(len(keys))]
    assert GOOD in status.tolist()
    for now, then in zip(caches, before, strict=True):
        assert torch.equal(now[7], then[5])
        assert torch.equal(now[:7], then[:7])
