"""Blocks of a GPU's cache that go to stores the CPU reaches, and come back, without an engine."""

import random
import time
from collections.abc import Callable

import torch

from manthan.codec.gpu.paged import PagedCodec
from manthan.manager.tiers.tier import Tier
from manthan.manager.work import GroupBlocks, Load, LoadResult, SpillBlock, SpillResult
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.host_path import HostPath
from manthan.vllm_hooks.worker.intake import Intake
from manthan.vllm_hooks.worker.paged_blocks import PagedBlocks

GROUP = 1


class StoreWorld:
    """The first `sources` blocks of the codec's cache, which are random numbers, go out; the others are there to come
    back to. staging: of a lane; slot: of what is read into."""

    def __init__(
        self,
        codec: PagedCodec,
        make: Callable[[torch.device], Tier],
        sources: int,
        staging: int,
        slot: int,
    ) -> None:
        self.codec, device, tokens = codec, codec.device, codec.layout.tokens
        self.sources, self.blocks = sources, len(codec.layout.caches[0])
        self.store = make(device)
        self.intakes = Intake(staging, 2, slot, 4, device), Intake(staging, 1, slot, 4, device)
        self.path = HostPath({GROUP: PagedBlocks(codec)}, self.store, 2, device, intakes=self.intakes)
        self.keys = [bytes([n]) * 32 for n in range(sources)]
        self.exact = {key: random.Random(n).choice((0, 0, 0, 3, tokens)) for n, key in enumerate(self.keys)}
        self.right = {key: self._restored(n, self.exact[key]) for n, key in enumerate(self.keys)}

    def numbers(self, block: int) -> torch.Tensor:
        return torch.stack([cache[block] for cache in self.codec.layout.caches])

    def _restored(self, block: int, exact: int) -> torch.Tensor:
        """What becomes of it, by the codec alone."""
        codes = torch.empty(self.codec.form(exact).nbytes, dtype=torch.uint8, device=self.codec.device)
        batch = self.codec.batch(exact, [b"k" * 32], [block], [0], [0])
        self.codec.encode(batch, codes)
        self.codec.decode(batch._replace(block_ids=batch.block_ids * 0 + self.sources), codes)
        return self.numbers(self.sources).clone()

    def spill(self) -> list[SpillResult]:
        spills = [SpillBlock(key, GROUP, n, 0, self.exact[key]) for n, key in enumerate(self.keys)]
        self.path.submit_spills(ManthanMetadata(spills=spills))
        done: list[SpillResult] = []
        while len(done) < len(spills):
            report = self.path.take_report()
            done += report.spills if report else []
            time.sleep(0.001)
        assert {result.cause for result in done} == {None}
        return done

    def load(self, keys: list[bytes], is_prefetch: bool = False) -> LoadResult:
        """What is restored, up to the first failure, is right."""
        targets = random.Random(len(keys)).sample(range(self.sources, self.blocks), len(keys))
        for cache in self.codec.layout.caches:
            cache[targets] = 0
        part = GroupBlocks(GROUP, keys, targets)
        self.path.submit_loads(ManthanMetadata(loads=[Load("request", (part,), is_prefetch)]))
        while (report := self.path.take_report()) is None:
            time.sleep(0.001)
        [result] = report.loads
        good = len(keys) if not result.failed else keys.index(result.failed[0].key)
        for key, target in list(zip(keys, targets, strict=True))[:good]:
            assert torch.equal(self.numbers(target), self.right[key])
        if not is_prefetch:
            while not (finished := self.path.take_finished_loads()):
                time.sleep(0.001)
            assert finished == {"request"}
            assert self.path.take_failed_blocks() == set(targets[good:])
        return result
