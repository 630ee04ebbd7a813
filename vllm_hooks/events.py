"""KV events, sent by vLLM's publisher: BlockStored for a block saved in a tier, BlockRemoved for a dropped block.

A tier stores compressed blocks, on a disk for example. The session manager knows the saved blocks' hashes, but not the
tokens. This module takes the tokens from requests.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
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


Source = tuple[int | None, str | None, str | None, str | None]
"""Id and name of a request's LoRA adapter, the request's session id, and the session's parent."""


class Note(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Facts of a block for an event. parent: hash of the previous block; None for the first block.

    tokens: ids of the block's tokens. extra_keys: as in vLLM's events. source: of the request that first had the block.
    """

    parent: bytes | None
    tokens: list[int]
    extra_keys: list[Any] | None
    source: Source


class BlockStoredWithParent(BlockStored, tag="BlockStored"):
    """BlockStored with the parent of the session `session_id`, for which this session works as a sub-agent.

    A field and not an event type of its own, because routers ignore unknown fields but refuse unknown types.
    """

    parent_session_id: str | None = None


class KvEvents:
    """KV events of an engine's saved blocks. Subscribes to the manager's events. place: name of the slowest tier."""

    def __init__(self, manager: SessionManager, groups: "Groups", kv_cache_config: KVCacheConfig, place: str) -> None:
        self.notes: dict[BlockName, bytes] = {}
        """Notes as msgpack, by KV cache group and block hash. A disk's journal adds notes from an earlier engine.

        The main group is the group whose blocks make up sessions. A group with equally large blocks has the same
        hashes, and uses the notes under the main group.
        """
        self._blocks, self._table, self._groups = manager.blocks, manager.table, groups
        self._main, self._session_group = groups.main.index, manager.shape.session_group
        self._medium, locality = PLACES[place]
        self._locality = locality.value
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._changed: dict[BlockName, int | None] = {}
        """Each block saved or dropped since the last `take`: its position in a session if saved, None if dropped."""
        self._told: dict[BlockName, None] = {}
        """Blocks for which `take` has returned BlockStored and not yet BlockRemoved."""
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
            case BlocksDropped(group, hashes):
                self._changed.update(((group, name), None) for name in hashes)

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
        spans = [span for span in spans if (group, self._hash_at(request, span[1])) not in self.notes]
        hashes = [self._hash_at(request, end) for _, end in spans]
        lora, name = request.lora_request, request.session_id
        parent = self._table.parent_of(name, tenant_of(request))
        source = (lora.adapter_id, lora.name, name, parent) if lora else (None, None, name, parent)
        for row, block_hash, (first, end) in zip(self._find_rows(group, hashes).tolist(), hashes, spans, strict=True):
            if row >= 0:
                self.notes[group, block_hash] = self._note(request, first, end, source)
        for other, spec in enumerate(self._specs):
            if spec.block_size == self._specs[group].block_size:  # some blocks were saved before this note
                rows = self._blocks.find(other, hashes)
                for at in ((rows >= 0) & self._blocks.is_saved(rows)).nonzero()[0].tolist():
                    self._changed[other, hashes[at]] = int(self._blocks.depth[rows[at]])

    def _note(self, request: Request, first: int, end: int, source: Source) -> bytes:
        extra_keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
        told = to_event_extra_keys([extra_keys] if extra_keys else None)
        parent = self._hash_at(request, first) if first else None
        tokens = list(request.all_token_ids[first:end])
        return msgspec.msgpack.encode(Note(parent, tokens, list(told[0] or ()) if told else None, source))

    def _hash_at(self, request: Request, end: int) -> "BlockHash":
        return request.block_hashes[end // self._groups.hash_tokens - 1]

    def _find_rows(self, group: int, hashes: Sequence[bytes]) -> "Rows":
        """Return each block's row in the session manager's BlockTable, -1 for a block without a row."""
        return self._blocks.find(self._session_group if group == self._main else group, hashes)

    # -- events ---------------------------------------------------------------------------------------

    def take(self) -> list[KVCacheEvent]:
        """Return events for the blocks saved and dropped since the last call; with `repeats`, for all stored blocks."""
        changed, self._changed = self._changed, {}
        stored, removed = dict[BlockName, int](), list[BlockName]()
        for name, position in changed.items():
            if position is None and name in self._told:
                removed.append(name)
                del self._told[name]
            elif position is not None and name not in self._told and self._find(name) is not None:
                stored[name] = position
        in_order = sorted(stored, key=lambda name: (name[0], stored[name]))  # heads before tails
        if self.repeats:
            self.repeats = False
            removed += self._told
            in_order = [*self._told, *in_order]
        self._told |= dict.fromkeys(in_order)
        gone = [
            BlockRemoved([_told_hash(name) for name in hashes], self._medium, group, self._locality, OWNER)
            for group, hashes in _by_group(removed).items()
        ]
        events = [*gone, *self._stored(in_order)]
        if len(self.notes) > 2 * len(self._blocks):  # forget notes of blocks that have left the BlockTable
            for group, hashes in _by_group(self.notes).items():
                for block_hash, row in zip(hashes, self._find_rows(group, hashes).tolist(), strict=True):
                    if row < 0:
                        del self.notes[group, block_hash]
        return events

    def event(self, name: BlockName, medium: str) -> BlockStored | None:
        """Return BlockStored for a block in this medium; None if the block has no note."""
        note = self._find(name)
        return None if note is None else self._begun(name, note, medium)

    def _find(self, name: BlockName) -> Note | None:
        group, block_hash = name
        if self._specs[group].block_size == self._specs[self._main].block_size:
            group = self._main
        packed = self.notes.get((group, block_hash))
        try:
            return None if packed is None else msgspec.msgpack.decode(packed, type=Note)
        except msgspec.DecodeError:  # a journal was damaged
            return None

    def _stored(self, names: Iterable[BlockName]) -> list[BlockStored]:
        """Return an event for each run of consecutive blocks with equal `source`. Leave out blocks without a note."""
        events: list[BlockStored] = []
        ends: dict[tuple[object, ...], BlockStored] = {}  # by group, hash of the last block, and source
        for name in names:
            if (note := self._find(name)) is None:
                continue
            group, block_hash = name
            run = ends.pop((group, note.parent, note.source), None)
            one = self._begun(name, note, self._medium)
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


def _by_group(names: Iterable[BlockName]) -> dict[int, list[bytes]]:
    by_group: dict[int, list[bytes]] = {}
    for group, block_hash in names:
        by_group.setdefault(group, []).append(block_hash)
    return by_group


def _told_hash(block_hash: bytes) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(block_hash))
