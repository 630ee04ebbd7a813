"""Exact copies beside the codes that a GPU makes: in the same tiers, on the same streams, behind the codes' work."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from vllm.logger import init_logger

from manthan.codec import exact, wire
from manthan.codec.gpu.paged import GOOD, PagedCodec, status_cause
from manthan.vllm_hooks.messages import Load, LoadResult, ManthanMetadata, SpillBlock, SpillResult
from manthan.vllm_hooks.worker.capacity import STAGING_BYTES
from manthan.vllm_hooks.worker.exact_blocks import parts_of
from manthan.vllm_hooks.worker.exact_rows import ExactRows
from manthan.vllm_hooks.worker.gpu_path import Batch, Chunk, GpuPath, Spill
from manthan.vllm_hooks.worker.tiers import Demotion, Taken, Tier, Tiers

logger = init_logger("vllm.manthan.worker")


@dataclass
class Restored:
    """What is known of a load's copies: those that could not be read, and chunks of those that are being checked."""

    unread: list[tuple[bytes, str]] = field(default_factory=list)
    chunks: list[tuple[Sequence[bytes], Chunk]] = field(default_factory=list)


class ExactGpuPath(GpuPath):
    """A block's answer waits for its copy as well. A restore decodes all blocks, and then those whose copies are good
    are written over: whatever is wrong with a copy, the codes are there."""

    def __init__(self, codec: PagedCodec, header: wire.BlockHeader, tiers: Tiers, parts: int) -> None:
        super().__init__(codec, header, tiers)
        self._parts = parts
        self._rows = ExactRows(codec, parts)
        self._at_once = max(1, STAGING_BYTES // 4 // (parts * codec.nbytes))
        self._made: dict[bytes, list[Taken]] = {}  # slots of copies that are being made
        self._copy_causes: dict[bytes, str] = {}
        self._restored: dict[str, Restored] = {}  # by id of a load

    def submit(self, metadata: ManthanMetadata) -> None:
        drops = metadata.drops + parts_of(metadata.drops + metadata.copy_drops, self._parts)
        moves = metadata.go_first + parts_of(metadata.go_first, self._parts)
        super().submit(replace(metadata, drops=drops, go_first=moves))

    # -- evict ----------------------------------------------------------------------------------------

    def _encode(
        self,
        tier: Tier,
        kept: list[SpillBlock],
        slots: list[int],
        demotions: list[Demotion],
        model: torch.cuda.Event,
    ) -> None:
        super()._encode(tier, kept, slots, demotions, model)
        to_copy = [spill for spill in kept if spill.exact]
        for start in range(0, len(to_copy), self._at_once):
            self._guard_copy(to_copy[start : start + self._at_once])
        self._spills[-1].chunk.done = self._spill_staging.stream.record_event()

    def _guard_copy(self, spills: Sequence[SpillBlock]) -> None:
        try:
            self._copy_blocks(spills)
        except Exception as error:  # whatever it is costs the copies, not the codes
            logger.warning("Manthan: blocks are kept without exact copies: %s: %s", type(error).__name__, error)
            for spill in spills:
                self._give_back(self._made.pop(spill.key, []))
                self._copy_causes.setdefault(spill.key, "internal")

    def _copy_blocks(self, spills: Sequence[SpillBlock]) -> None:
        """Find slots for copies of these blocks, and make those that got some."""
        for spill in spills:
            taken = [self.tiers.take() for _ in range(self._parts)]
            self._made[spill.key] = [one for one in taken if one is not None]
        made = [one for spill in spills for one in self._made[spill.key]]
        with torch.cuda.stream(self._spill_staging.stream):
            self._demote([one.demotion for one in made if one.demotion is not None])
            fit = [spill for spill in spills if self._is_complete(spill.key)]
            if fit:
                batch = self._batch_of([spill.key for spill in fit], [spill.block_id for spill in fit])
                rows = self._rows.make(batch.block_ids[:: self._parts], batch.slots, batch.headers)
                places = [(one.tier, one.slot) for spill in fit for one in self._made[spill.key]]
                self._move(places, rows, to_tiers=True)

    def _is_complete(self, key: bytes) -> bool:
        """Whether all parts of a copy got a slot; those of one that is not go back."""
        if len(self._made[key]) == self._parts:
            return True
        self._give_back(self._made.pop(key))
        self._copy_causes[key] = "store_full"
        return False

    def _end_spill(self, ended: Spill) -> None:
        for spill, status in zip(ended.spills, ended.chunk.status.tolist(), strict=True):
            made = self._made.pop(spill.key, [])
            if status == GOOD:
                for key, one in zip(exact.part_keys(spill.key, len(made)), made, strict=True):
                    one.tier.slots.put(key, one.slot)
            else:
                self._give_back(made)
        super()._end_spill(ended)

    def _spilled(self, results: list[SpillResult]) -> None:
        super()._spilled([r._replace(copy_cause=self._copy_causes.pop(r.key, None)) for r in results])

    def _give_back(self, taken: list[Taken]) -> None:
        for one in taken:
            one.tier.slots.give_back(one.slot)

    # -- restore --------------------------------------------------------------------------------------

    def _begin_load(self, load: Load, model: torch.cuda.Event) -> None:
        super()._begin_load(load, model)
        restore = (self._prefetches if load.is_prefetch else self._restores)[-1]
        if not (load.exact and restore.chunks):
            return
        stagings = [self._prefetch_staging] if load.is_prefetch else self._load_stagings
        stream, restored = stagings[0].stream, Restored()
        for staging in stagings:  # the blocks are decoded before they are written over
            stream.wait_stream(staging.stream)
        blocks = [pair for pair in zip(load.keys, load.block_ids, strict=True) if pair[0] in load.exact]
        for start in range(0, len(blocks), self._at_once):
            some = blocks[start : start + self._at_once]
            try:
                with torch.cuda.stream(stream):
                    self._restore_copies(some, restored)
            except Exception as error:  # the codes will do
                logger.warning("Manthan: exact copies are not restored: %s: %s", type(error).__name__, error)
                restored.unread += [(key, "internal") for key, _ in some]
        restore.chunks[-1].done = stream.record_event()
        self._restored[load.request_id] = restored

    def _restore_copies(self, blocks: Sequence[tuple[bytes, int]], restored: Restored) -> None:
        """Read the copies of these blocks and write back those that are good, on the current stream."""
        places = {key: self._places(key) for key, _ in blocks}
        restored.unread += [(key, "missing") for key, found in places.items() if len(found) < self._parts]
        blocks = [(key, block_id) for key, block_id in blocks if len(places[key]) == self._parts]
        if not blocks:
            return
        keys = [key for key, _ in blocks]
        batch = self._batch_of(keys, [block_id for _, block_id in blocks])
        rows = torch.empty(len(batch.slots), self.codec.nbytes, dtype=torch.uint8, device=self._device)
        self._move([place for key in keys for place in places[key]], rows, to_tiers=False)
        self._rows.write(batch.block_ids[:: self._parts], rows, *batch[1:])
        restored.chunks.append((keys, self._chunk(batch)))

    def _places(self, key: bytes) -> list[tuple[Tier, int]]:
        """Where the parts of a copy lie, up to the first that is not there."""
        keys, places = exact.part_keys(key, self._parts), []
        while len(places) < len(keys) and (found := self.tiers.find(keys[len(places) :])):
            tier, slots = found
            places += [(tier, slot) for slot in slots]
        return places

    def _loaded(self, result: LoadResult) -> None:
        restored = self._restored.pop(result.request_id, Restored())
        spoiled = list(restored.unread)
        for keys, chunk in restored.chunks:
            worst = chunk.status.view(-1, self._parts).amin(1).tolist()
            spoiled += [(key, status_cause(bad) or "") for key, bad in zip(keys, worst, strict=True) if bad < 0]
        super()._loaded(result._replace(spoiled=spoiled))

    # -- rows -----------------------------------------------------------------------------------------

    def _batch_of(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> Batch:
        """Arguments for all parts of these blocks' copies, which lie in rows in that order."""
        ids = [block_id for block_id in block_ids for _ in range(self._parts)]
        return self._batch(parts_of(keys, self._parts), ids, range(len(ids)))

    def _move(self, places: Sequence[tuple[Tier, int]], rows: torch.Tensor, *, to_tiers: bool) -> None:
        """Copy rows to their places in the tiers, or from there, on the current stream."""
        for tier in {id(tier): tier for tier, _ in places}.values():
            here = [(row, slot) for row, (other, slot) in enumerate(places) if other is tier]
            there = tier.addresses([slot for _, slot in here])
            ours = torch.tensor([row for row, _ in here]) * rows.stride(0) + rows.data_ptr()
            if to_tiers:
                self._copy(ours, there)
            else:
                self._copy(there, ours)
