"""KV events, sent by vLLM's publisher: BlockStored for a block saved in a tier, BlockRemoved for a dropped block.

A tier stores compressed blocks, on a disk for example. The session manager knows the saved blocks' hashes, but not the
tokens. This module takes the tokens from requests.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.kv_offload.base import Locality
from vllm.v1.request import Request

from manthan.manager.events import BlocksDropped, BlocksSaved, Event
from manthan.manager.pool import BlockName
from manthan.manager.session.manager import SessionManager
from manthan.vllm_hooks.event_notes import Note, Notes, Source, by_group
from manthan.vllm_hooks.http.hints import tenant_of

if TYPE_CHECKING:
    from manthan.manager.session.blocks import Rows
    from manthan.vllm_hooks.groups import Groups, Part

PLACES = {
    "host": (MEDIUM_CPU, Locality.LOCAL),
    "device": (MEDIUM_CPU, Locality.LOCAL),  # not "GPU": events of vLLM's own pool have that medium
    "disk": (MEDIUM_STORAGE, Locality.LOCAL),
    "redis": (MEDIUM_STORAGE, Locality.REMOTE),
}
"""Medium and locality in all of an engine's events, by the name of the engine's slowest tier."""
OWNER = "manthan"
"""Value of `ownership` in events, because blocks of further connectors may have the same medium."""


class BlockStoredWithParent(BlockStored, tag="BlockStored"):
    """BlockStored with the parent of the session `session_id`, for which this session works as a sub-agent.

    A field and not an event type of its own, because routers ignore unknown fields but refuse unknown types.
    """

    parent_session_id: str | None = None


class KvEvents:
    """KV events of an engine's saved blocks. Subscribes to the manager's events. place: name of the slowest tier."""

    def __init__(self, manager: SessionManager, groups: "Groups", kv_cache_config: KVCacheConfig, place: str) -> None:
        self._blocks, self._table, self._groups = manager.blocks, manager.table, groups
        self._main = groups.main.index
        self._medium, locality = PLACES[place]
        self._locality = locality.value
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        sizes = [spec.block_size for spec in self._specs]
        self.notes = Notes(manager.blocks, sizes, self._main, manager.shape.session_group)
        """Facts of blocks for events. A disk's journal adds notes from an earlier engine."""
        self._changed: dict[BlockName, int | None] = {}
        """Each block saved or dropped since the last `take`: its position in a session if saved, None if dropped."""
        self._told = np.zeros(0, np.uint32)
        """By row, for blocks for which `take` has returned BlockStored: their number, from 1 on. 0 for others."""
        self._gone: dict[BlockName, int] = {}  # numbers of such blocks that were dropped since the last `take`
        self._count = 0  # number of blocks ever told
        self.repeats = False
        """True to have the next `take` report all stored blocks again, because vLLM has sent AllBlocksCleared."""
        manager.events.subscribe(self)

    @property
    def has_news(self) -> bool:
        return self.repeats or bool(self._changed)

    def __call__(self, event: Event) -> None:
        match event:
            case BlocksSaved(group, hashes, first):
                self._changed.update(((group, name), first + at) for at, name in enumerate(hashes))
            case BlocksDropped(group, hashes):  # their rows may be others' before the next `take`
                self._changed.update(((group, name), None) for name in hashes)
                rows = self.notes.find_rows(group, hashes)
                told = self._numbers(rows)
                self._gone.update(((group, hashes[at]), told[at]) for at in range(len(told)) if told[at])
                self._told[rows[rows >= 0]] = 0

    # -- requests -------------------------------------------------------------------------------------

    def remember(self, request: Request, blocks: int, parts: "Iterable[Part]" = ()) -> None:
        """Note facts for events about some of the request's blocks: those with a row in Manthan's BlockTable.

        blocks: number of first blocks of the main group. parts: blocks of other groups that the session needs to go on.
        """
        size = self._specs[self._main].block_size
        self._remember(request, self._main, [(at * size, (at + 1) * size) for at in range(blocks)])
        for part in parts:
            if self._specs[part.group].block_size != size:
                self._remember(request, part.group, [(part.first_token, part.end)])

    def _remember(self, request: Request, group: int, spans: Sequence[tuple[int, int]]) -> None:
        """Note facts of blocks of a group. spans: of each block, index of the first token, and of the next block's."""
        known = self.notes.are_known(group, [self._hash_at(request, end) for _, end in spans])
        spans = [span for span, is_known in zip(spans, known, strict=True) if not is_known]
        hashes = [self._hash_at(request, end) for _, end in spans]
        has_row = (self.notes.find_rows(group, hashes) >= 0).tolist()
        lora, name = request.lora_request, request.session_id
        parent = self._table.parent_of(name, tenant_of(request))
        source = (lora.adapter_id, lora.name, name, parent) if lora else (None, None, name, parent)
        notes = [self._note(request, *span, source) for span in compress(spans, has_row)]
        self.notes.add(group, list(compress(hashes, has_row)), notes)
        for other, spec in enumerate(self._specs):
            if spec.block_size == self._specs[group].block_size:  # some blocks were saved before this note
                rows = self._blocks.find(other, hashes)
                for at in ((rows >= 0) & self._blocks.is_saved(rows)).nonzero()[0].tolist():
                    self._changed[other, hashes[at]] = int(self._blocks.depth[rows[at]])

    def _note(self, request: Request, first: int, end: int, source: Source) -> Note:
        extra_keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
        told = to_event_extra_keys([extra_keys] if extra_keys else None)
        parent = self._hash_at(request, first) if first else None
        tokens = list(request.all_token_ids[first:end])
        return Note(parent, tokens, list(told[0] or ()) if told else None, source)

    def _hash_at(self, request: Request, end: int) -> "BlockHash":
        return request.block_hashes[end // self._groups.hash_tokens - 1]

    def _numbers(self, rows: "Rows") -> list[int]:
        """Return for each row its value in `_told`; 0 for a row of -1."""
        if len(self._told) <= len(self._blocks.group):  # the last value is always 0
            grown = np.zeros(len(self._blocks.group) + 1, np.uint32)
            grown[: len(self._told)] = self._told
            self._told = grown
        numbers: list[int] = self._told[rows].tolist()
        return numbers

    # -- events ---------------------------------------------------------------------------------------

    def take(self) -> list[KVCacheEvent]:
        """Return events for the blocks saved and dropped since the last call; with `repeats`, for all stored blocks."""
        changed, self._changed = self._changed, {}
        gone, self._gone = self._gone, {}
        removed = [name for name, position in changed.items() if position is None and name in gone]
        stored = dict[BlockName, tuple[int, int, Note]]()
        for group, hashes in by_group(name for name, position in changed.items() if position is not None).items():
            rows, names = self.notes.find_rows(group, hashes), [(group, block_hash) for block_hash in hashes]
            facts = zip(names, rows.tolist(), self._numbers(rows), self.notes.of(names), strict=True)
            for name, row, number, note in facts:
                if name in gone:  # dropped and saved again
                    self._told[row] = gone[name]
                elif row >= 0 and not number and note is not None:
                    stored[name] = changed[name] or 0, row, note
        in_order = sorted(stored, key=lambda name: (name[0], stored[name][0]))  # heads before tails
        notes: list[Note | None] = [stored[name][2] for name in in_order]
        told_rows = [stored[name][1] for name in in_order]
        if self.repeats:
            self.repeats = False
            again = self._all_told()
            removed += again
            in_order, notes = again + in_order, self.notes.of(again) + notes
        self._told[told_rows] = range(self._count + 1, self._count + 1 + len(told_rows))
        self._count += len(told_rows)
        told_gone = [
            BlockRemoved([_told_hash(name) for name in hashes], self._medium, group, self._locality, OWNER)
            for group, hashes in by_group(removed).items()
        ]
        self.notes.tidy()
        return [*told_gone, *self._stored(in_order, notes)]

    def _all_told(self) -> list[BlockName]:
        """Return all blocks told by BlockStored and not by BlockRemoved, in the order in which they were told."""
        rows = np.nonzero(self._told)[0].astype(np.int32)
        rows = rows[np.argsort(self._told[rows])]
        return list(zip(self._blocks.group[rows].tolist(), self._blocks.hashes(rows), strict=True))

    def event(self, name: BlockName, medium: str) -> BlockStored | None:
        """Return BlockStored for a block in this medium; None if the block has no note."""
        [note] = self.notes.of([name])
        return None if note is None else self._begun(name, note, medium)

    def _stored(self, names: Sequence[BlockName], notes: Sequence[Note | None]) -> list[BlockStored]:
        """Return an event for each run of consecutive blocks with equal `source`. Leave out blocks without a note."""
        events: list[BlockStored] = []
        ends: dict[tuple[object, ...], BlockStored] = {}  # by group, hash of the last block, and source
        for (group, block_hash), note in zip(names, notes, strict=True):
            if note is None:
                continue
            run = ends.pop((group, note.parent, note.source), None)
            one = self._begun((group, block_hash), note, self._medium)
            if run is None:
                one.locality, one.ownership = self._locality, OWNER
                events.append(run := one)
            else:
                run.block_hashes += one.block_hashes
                run.token_ids += one.token_ids
                run.extra_keys = [*(run.extra_keys or ()), *(one.extra_keys or ())]
            ends[group, block_hash, note.source] = run
        return events

    def _begun(self, name: BlockName, note: Note, medium: str) -> BlockStored:
        group, block_hash = name
        spec, extra_keys = self._specs[group], note.extra_keys
        lora_id, lora_name, session_id, parent = note.source
        if extra_keys is not None:  # msgpack has no tuples
            extra_keys = [tuple(key) if isinstance(key, list) else key for key in extra_keys]
        return BlockStoredWithParent(
            block_hashes=[_told_hash(block_hash)],
            parent_block_hash=None if note.parent is None else _told_hash(note.parent),
            token_ids=note.tokens,
            block_size=spec.block_size,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            extra_keys=[None if extra_keys is None else tuple(extra_keys)],
            group_idx=group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            session_id=session_id,
            parent_session_id=parent,
        )


def _told_hash(block_hash: bytes) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(block_hash))
