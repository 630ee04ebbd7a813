"""KV events, sent by vLLM's publisher: BlockStored for a block saved in a tier, BlockRemoved for a dropped block.

A tier stores compressed blocks, on a disk for example. The session manager knows the saved blocks' hashes, but not the
tokens. This module takes the tokens from requests.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

import msgspec
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
from manthan.manager.session.blocks import Rows
from manthan.manager.session.manager import SessionManager
from manthan.vllm_hooks.groups import Groups, Part
from manthan.vllm_hooks.http.hints import tenant_of

PLACES = {
    "host": (MEDIUM_CPU, Locality.LOCAL),
    "device": (MEDIUM_CPU, Locality.LOCAL),  # not "GPU": events of vLLM's own pool have that medium
    "disk": (MEDIUM_STORAGE, Locality.LOCAL),
    "redis": (MEDIUM_STORAGE, Locality.REMOTE),
}
"""Medium and locality in all of an engine's events, by the name of the engine's slowest tier."""
OWNER = "manthan"  # value of `ownership` in events, because blocks of further connectors may have the same medium
Source = tuple[int | None, str | None, str | None, str | None]
"""Id and name of a request's LoRA adapter, the request's session id, and the session's parent."""


class Note(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Facts of a block for an event."""

    parent: bytes | None  # hash of the previous block; None for the first block
    tokens: list[int]  # ids
    extra_keys: list[Any] | None  # as in vLLM's events
    source: Source  # of the request that first had the block


class BlockStoredWithParent(BlockStored, tag="BlockStored"):
    """BlockStored with the parent of the session `session_id`, for which this session works as a sub-agent.

    A field and not an event type of its own, because routers ignore unknown fields but refuse unknown types.
    """

    parent_session_id: str | None = None


class KvEvents:
    """KV events of an engine's saved blocks, and the notes for these events. Subscribes to the manager's events.

    A note belongs to a block's row in the manager's BlockTable, and ends with the row. KV cache groups with blocks as
    large as the main group's have the same hashes, and use the main group's notes. place: name of the slowest tier.
    """

    def __init__(self, manager: SessionManager, groups: Groups, kv_cache_config: KVCacheConfig, place: str) -> None:
        self._blocks, self._table, self._groups = manager.blocks, manager.table, groups
        self._main, self._session_group = groups.main.index, manager.shape.session_group
        self._medium, locality = PLACES[place]
        self._locality = locality.value
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._notes = np.full(1, b"", object)
        """By row, a `Note` as msgpack; empty for a row without a note, and in the last element, for a row of -1."""
        self._told = np.zeros(1, np.bool_)
        """By row, True for a block for which `take` has returned BlockStored. The last element is False."""
        self._changed: dict[BlockName, int | None] = {}
        """Each block saved or dropped since the last `take`: its position in a session if saved, None if dropped."""
        self._gone = set[BlockName]()  # blocks of `_told` that were dropped since the last `take`
        self.repeats = False  # True to have the next `take` tell all stored blocks again, after AllBlocksCleared
        manager.blocks.freed = self._freed
        manager.events.subscribe(self)

    @property
    def has_news(self) -> bool:
        return self.repeats or bool(self._changed)

    def __call__(self, event: Event) -> None:
        match event:
            case BlocksSaved(group, hashes, first):
                self._changed.update(((group, name), first + at) for at, name in enumerate(hashes))
            case BlocksDropped(group, hashes):  # their rows may be others' before the next `take`
                names = [(group, name) for name in hashes]
                self._changed.update(dict.fromkeys(names))
                rows = self._rows(names)
                self._gone.update(compress(names, self._told[rows].tolist()))
                self._told[rows] = False

    def _rows(self, names: Sequence[BlockName]) -> Rows:
        """Return each block's row, -1 for a block without a row. `_notes` and `_told` grow to have all rows."""
        if (more := len(self._blocks.group) + 1 - len(self._told)) > 0:
            self._told = np.append(self._told, np.zeros(more, np.bool_))
            self._notes = np.append(self._notes, np.full(more, b"", object))
        groups = [self._session_group if group == self._main else group for group, _ in names]
        return self._blocks.find(groups, [block_hash for _, block_hash in names])

    # -- notes ----------------------------------------------------------------------------------------

    def packed(self, names: Sequence[BlockName]) -> list[bytes]:
        """Return the note of each block as msgpack, for a disk's journal; empty for a block without a note."""
        rows = self._rows([self._noted(name) for name in names])
        found: list[bytes] = self._notes[rows].tolist()
        return found

    def update(self, packed: Iterable[tuple[BlockName, bytes]]) -> None:
        """Enter notes of an earlier engine, as `packed` returns them, of blocks with rows. Leave out damaged ones."""
        entered = list(packed)
        rows = self._rows([self._noted(name) for name, _ in entered])
        for row, (_, note) in zip(rows.tolist(), entered, strict=True):
            with suppress(msgspec.DecodeError):  # the journal was damaged
                msgspec.msgpack.decode(note, type=Note)
                if row >= 0:
                    self._notes[row] = note

    def _noted(self, name: BlockName) -> BlockName:
        """Return the block that has the note of block `name`: the main group's, if blocks are as large."""
        is_as_large = self._specs[name[0]].block_size == self._specs[self._main].block_size
        return (self._main, name[1]) if is_as_large else name

    def _notes_of(self, names: Sequence[BlockName]) -> list[Note | None]:
        return [msgspec.msgpack.decode(note, type=Note) if note else None for note in self.packed(names)]

    def _freed(self, rows: Rows) -> None:
        self._notes[rows[rows < len(self._notes)]] = b""

    def remember(self, request: Request, blocks: int, parts: Iterable[Part] = ()) -> None:
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
        rows = self._rows([(group, self._hash_at(request, end)) for _, end in spans])
        is_new = (rows >= 0) & (self._notes[rows] == b"")
        spans, rows = list(compress(spans, is_new.tolist())), rows[is_new]
        lora, name = request.lora_request, request.session_id
        parent = self._table.parent_of(name, tenant_of(request))
        source = (lora.adapter_id, lora.name, name, parent) if lora else (None, None, name, parent)
        for row, span in zip(rows.tolist(), spans, strict=True):
            self._notes[row] = msgspec.msgpack.encode(self._note(request, *span, source))
        hashes = [self._hash_at(request, end) for _, end in spans]
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

    def _hash_at(self, request: Request, end: int) -> BlockHash:
        return request.block_hashes[end // self._groups.hash_tokens - 1]

    # -- events ---------------------------------------------------------------------------------------

    def take(self) -> list[KVCacheEvent]:
        """Return events for the blocks saved and dropped since the last call; with `repeats`, for all stored blocks."""
        changed, self._changed = self._changed, {}
        gone, self._gone = self._gone, set()
        removed = [name for name, position in changed.items() if position is None and name in gone]
        saved = [(name[0], position, name) for name, position in changed.items() if position is not None]
        names = [name for _, _, name in sorted(saved)]  # heads before tails
        rows, stored = self._rows(names), list[tuple[BlockName, int, Note]]()
        for name, row, note in zip(names, rows.tolist(), self._notes_of(names), strict=True):
            if row >= 0 and name in gone:  # dropped and saved again
                self._told[row] = True
            elif row >= 0 and note is not None and not self._told[row]:
                stored.append((name, row, note))
        told = [(name, note) for name, _, note in stored]
        if self.repeats:
            self.repeats = False
            again = self._all_told()
            removed += again
            notes = zip(again, self._notes_of(again), strict=True)
            told = [(name, note) for name, note in notes if note is not None] + told
        self._told[[row for _, row, _ in stored]] = True
        groups: dict[int, list[ExternalBlockHash]] = {}
        for group, block_hash in removed:
            groups.setdefault(group, []).append(_told_hash(block_hash))
        dropped = groups.items()
        gone_events = [BlockRemoved(hashes, self._medium, group, self._locality, OWNER) for group, hashes in dropped]
        return [*gone_events, *self._stored(told)]

    def _all_told(self) -> list[BlockName]:
        """Return all blocks told by BlockStored and not by BlockRemoved, heads before tails."""
        rows = np.nonzero(self._told)[0].astype(np.int32)
        rows = rows[np.argsort(self._blocks.depth[rows], kind="stable")]
        groups = self._blocks.group[rows]
        groups[groups == self._session_group] = self._main
        return list(zip(groups.tolist(), self._blocks.hashes(rows), strict=True))

    def event(self, name: BlockName, medium: str) -> BlockStored | None:
        """Return BlockStored for a block in this medium; None if the block has no note."""
        [note] = self._notes_of([name])
        return None if note is None else self._begun(name, note, medium)

    def _stored(self, told: Iterable[tuple[BlockName, Note]]) -> list[BlockStored]:
        """Return an event for each run of consecutive blocks with equal `source`."""
        events: list[BlockStored] = []
        ends: dict[tuple[object, ...], BlockStored] = {}  # by group, hash of the last block, and source
        for (group, block_hash), note in told:
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
