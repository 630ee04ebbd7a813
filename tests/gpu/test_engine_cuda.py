"""The engine on a GPU on its own, without vLLM: stores, loads, drops and demotions all at once."""

import random
import time
from collections.abc import Callable, Sequence

import jobs
import pytest
import torch
from integrity import check_erased

from manthan.codec.block import BlockFormat
from manthan.codec.gpu.paged import PagedLayout
from manthan.manager.events import BlocksDropped, DropCause
from manthan.manager.tiers.arena import GRANULE, room
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.engine_cuda import CudaEngine
from manthan.vllm_hooks.worker.half import paged_codec
from manthan.vllm_hooks.worker.slabs import Slab, Slabs

LAYERS, HEADS, TOKENS, DIM = 8, 4, 16, 128
SOURCES, TARGETS = 64, 512
GROUP, FORMS = 1, (0, 3, TOKENS)


class World:
    """Blocks 0 to SOURCES are random numbers and go out; the others are there to come back to.

    right: by source block and exact tokens, [layers, numbers] of what it becomes, by the codec alone.
    """

    def __init__(self, device_blocks: int, host_blocks: int, codec: str = "k3v3") -> None:
        torch.manual_seed(1)
        width = TOKENS * HEADS * 2 * DIM
        caches = tuple(torch.randn(SOURCES + TARGETS, width, device="cuda").bfloat16() for _ in range(LAYERS))
        strides = (width, 2 * DIM, HEADS * 2 * DIM)
        layout = PagedLayout(caches, HEADS, TOKENS, DIM, *strides, key_at=0, value_at=DIM)
        self.codec = paged_codec(layout, BlockFormat(codec, layout.shape, b"f" * 16, GROUP))
        whole = self.codec.form(TOKENS).nbytes
        self.tiers = Slabs(
            Slab.on_device(device_blocks * whole, self.codec.device) if device_blocks else None,
            Slab.pinned(host_blocks * whole, self.codec.device) if host_blocks else None,
        )
        self.engine = CudaEngine({GROUP: [self.codec]}, self.tiers, forms=FORMS)
        self.right = {(block, exact): self._restored(block, exact) for block in range(SOURCES) for exact in FORMS}

    def numbers(self, block: int) -> torch.Tensor:
        return torch.stack([cache[block] for cache in self.codec.layout.caches])

    def _restored(self, block: int, exact: int) -> torch.Tensor:
        buffer = torch.empty(self.codec.form(exact).nbytes, dtype=torch.uint8, device="cuda")
        batch = self.codec.batch(exact, [b"k" * 32], [block], [0], [0])
        self.codec.encode(batch, buffer)
        self.codec.decode(batch._replace(block_ids=batch.block_ids * 0 + SOURCES), buffer)
        return self.numbers(SOURCES).clone()

    def raw(self) -> bytes:
        """All that is in the tiers."""
        return b"".join(tier.buffer.cpu().numpy().tobytes() for tier in self.tiers.all)

    def check_erased(self) -> None:
        """Nothing but stored blocks is in the tiers."""
        self.engine.submit_loads(ManthanMetadata())  # what came free last is erased
        torch.cuda.synchronize()
        for tier in self.tiers.all:
            check_erased(tier, GRANULE)

    def is_answered(self) -> bool:
        """A job has its result. A report that a store's blocks were gathered may come before."""
        self.engine.take_ended()
        report = self.engine.take_report()
        return report is not None and bool(report.results)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline


@pytest.mark.parametrize("codec", ["k3v3", "wht-5x"])
@pytest.mark.parametrize("tiers", [(40, 0), (0, 40), (10, 40)], ids=["device", "host", "device and host"])
def test_what_goes_on_at_once_does_not_disturb_what_else_does(tiers: tuple[int, int], codec: str) -> None:
    """Hundreds of steps without waiting: room is taken over while it is still being read, written or moved."""
    world, rng = World(*tiers, codec), random.Random(3)
    engine = world.engine
    stored: dict[bytes, tuple[int, int]] = {}  # source block and exact tokens
    sizes: dict[bytes, int] = {}
    storing: dict[int, tuple[bytes, int, int]] = {}  # by job id
    loading: dict[str, tuple[list[bytes], list[int], list[tuple[int, int]]]] = {}
    free = list(range(SOURCES + 1, SOURCES + TARGETS))
    counts = dict.fromkeys(("good", "full", "loads", "blocks"), 0)

    def poll() -> None:
        ended = engine.take_ended()
        assert ended.bad_blocks == set()
        for request in ended.requests:
            keys, targets, rights = loading.pop(request)
            for target, right in zip(targets, rights, strict=True):
                assert torch.equal(world.numbers(target), world.right[right])
            free.extend(targets)
            counts["loads"] += 1
            counts["blocks"] += len(keys)
        report = engine.take_report()
        for result in report.results if report else []:
            if result.job_id not in storing:
                assert result.failed == {}
                continue
            key, *of = storing.pop(result.job_id)
            assert result.failed in ({}, {0: "store_full"})
            counts["full" if result.failed else "good"] += 1
            if not result.failed:
                form, [nbytes] = world.codec.form(of[1]), result.nbytes.tolist()
                assert nbytes == room(form.nbytes) or (form.varies and nbytes < form.nbytes)
                stored[key], sizes[key] = (of[0], of[1]), nbytes

    for step in range(400):
        drops = [key for key in stored if rng.random() < 0.03]
        for key in drops:
            del stored[key]
        loads = []
        if stored and len(free) > 40 and rng.random() < 0.7:
            keys = rng.sample(sorted(stored), min(len(stored), rng.randrange(1, 30)))
            targets = [free.pop(rng.randrange(len(free))) for _ in keys]
            loading[str(step)] = keys, targets, [stored[key] for key in keys]
            loads.append(jobs.load(keys, targets, str(step), group=GROUP))
        rests, dropped = rng.random() < 0.3, [BlocksDropped(GROUP, drops, DropCause.BUDGET)]
        engine.begin_step()
        engine.submit_loads(ManthanMetadata(drops=dropped, loads=loads, tokens=int(not rests)))
        stores = []
        for _ in range(rng.randrange(6)):
            key, source, exact = rng.randbytes(32), rng.randrange(SOURCES), rng.choice(FORMS)
            stores.append(jobs.store([key], [source], TOKENS * step, TOKENS * step + exact, group=GROUP))
            storing[stores[-1].job_id] = key, source, exact
        engine.submit_stores(ManthanMetadata(stores=stores))
        poll()
    world.wait(lambda: poll() or not (loading or storing))  # type: ignore[func-returns-value]
    assert counts["loads"] > 100
    assert counts["good"] > 300
    assert sum(tier.arena.used for tier in world.tiers.all) == sum(sizes[key] for key in stored)
    world.check_erased()
    engine.shutdown()


@pytest.mark.parametrize("tiers", [(40, 0), (0, 40)], ids=["device", "host"])
def test_a_load_does_not_wait_for_the_step_in_which_it_begins(tiers: tuple[int, int]) -> None:
    """It waits for what the model was given before; the model's later work waits for it."""
    world = World(*tiers)
    engine, key, model = world.engine, b"k" * 32, torch.cuda.current_stream()
    engine.submit_stores(ManthanMetadata(stores=[jobs.store([key], [0], 0, 0, group=GROUP)]))
    world.wait(world.is_answered)
    target, seconds = SOURCES + 1, 2_000_000_000
    for is_earlier in (False, True):
        world.numbers(target)
        for cache in world.codec.layout.caches:
            cache[target] = 0
        torch.cuda.synchronize()
        if is_earlier:
            torch.cuda._sleep(seconds)
        engine.begin_step()
        if not is_earlier:
            torch.cuda._sleep(seconds)  # the step's forward pass
        engine.submit_loads(ManthanMetadata(loads=[jobs.load([key], [target], "request", group=GROUP)]))
        [loading] = engine._loadings
        world.wait(lambda: engine.take_loaded() == {"request"})
        assert not model.query()
        if not is_earlier:
            world.wait(loading.chunks[-1].done.query)
            assert not model.query()
        else:
            assert not loading.chunks[-1].done.query()
        read = world.numbers(target)
        assert torch.equal(read, world.right[0, 0])
        world.wait(world.is_answered)
    engine.shutdown()


@pytest.mark.parametrize("tiers", [(40, 0), (0, 40), (10, 40)], ids=["device", "host", "device and host"])
def test_what_is_released_is_erased_before_its_room_is_used_again(tiers: tuple[int, int]) -> None:
    """The model computes meanwhile, and no call waits for it."""
    world = World(*tiers)
    engine, keys = world.engine, [bytes([n]) * 32 for n in range(SOURCES)]
    gone, kept, new = range(0, 36, 2), range(1, 36, 2), range(36, 36 + 18)

    def store(blocks: range) -> list[Transfer]:
        """Each is a job of its own, exact in all its tokens."""
        return [jobs.store([keys[n]], [n], TOKENS * n, TOKENS * (n + 1), group=GROUP) for n in blocks]

    def load(blocks: range, first: int) -> Transfer:
        return jobs.load([keys[n] for n in blocks], range(first, first + len(blocks)), str(first), group=GROUP)

    def finish(jobs_: Sequence[Transfer]) -> None:
        left = {job.job_id for job in jobs_}

        def poll() -> bool:
            engine.take_ended()
            report = engine.take_report()
            for result in report.results if report else []:
                assert result.failed == {}
                left.discard(result.job_id)
            return not left

        world.wait(poll)

    first = store(range(36))
    engine.submit_stores(ManthanMetadata(stores=first))
    finish(first)
    raw = world.raw()
    marks = [world.numbers(n)[0, :32].view(torch.uint8).cpu().numpy().tobytes() for n in range(36)]
    assert all(mark in raw for mark in marks), "what is exact lies there as it is"
    torch.cuda._sleep(2_000_000_000)  # about a second
    dropped = [BlocksDropped(GROUP, [keys[n] for n in gone], DropCause.RELEASED)]
    begun = [load(kept, SOURCES + 1), *store(new)]
    engine.submit_loads(ManthanMetadata(drops=dropped, loads=begun[:1]))
    engine.submit_stores(ManthanMetadata(stores=begun[1:]))
    assert not torch.cuda.current_stream().query()
    finish(begun)
    again = load(new, SOURCES + 100)
    engine.submit_loads(ManthanMetadata(loads=[again]))
    finish([again])
    for blocks, at in ((kept, SOURCES + 1), (new, SOURCES + 100)):
        for n, target in zip(blocks, range(at, at + len(blocks)), strict=True):
            assert torch.equal(world.numbers(target), world.numbers(n))
    world.check_erased()
    raw = world.raw()
    assert not any(marks[n] in raw for n in gone)
    assert all(marks[n] in raw for n in kept)
    engine.shutdown()
