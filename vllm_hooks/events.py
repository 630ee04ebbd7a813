"""KV events of the cold store, by vLLM's own publisher: a block is stored, a block is removed.

The manager knows which blocks are stored, and only requests know their tokens. So the tokens of every tracked block,
and what else its event says, are kept here, packed, while the manager knows the block. Only where events are on.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.kv_offload.base import Locality

from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.work import Name

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from manthan.vllm_hooks.support import Groups, Part

PLACES = {
    "host": (MEDIUM_CPU, Locality.LOCAL),
    "device": (MEDIUM_CPU, Locality.LOCAL),  # "GPU" is what vLLM's own pool says of its blocks, and takes back
    "disk": (MEDIUM_STORAGE, Locality.LOCAL),
    "redis": (MEDIUM_STORAGE, Locality.REMOTE),
}
"""Medium and locality by the tier that has all codes."""
OWNER = "manthan"
"""The ownership that events name, beside other connectors' of the same medium."""


class Note(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What is told of a block. parent: the hash before it. tokens: its own. extra_keys: what else its hash covers, as
    events tell it. source: LoRA adapter's number and name, and the session id of the request that it came with."""

    parent: bytes | None
    tokens: list[int]
    extra_keys: list[Any] | None
    source: tuple[int | None, str | None, str | None]


class Kind(NamedTuple):
    """Of a KV cache group: tokens of a block, and what vLLM's events call it."""

    tokens: int
    name: str
    window: int | None


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Note).decode


class KvEvents:
    """place: the tier that has all codes. notes: by group and key of a block, a packed Note; those of blocks that an
    earlier engine left are to be put there."""

    def __init__(
        self, manager: SessionMemoryManager, groups: "Groups", kv_cache_config: "KVCacheConfig", place: str
    ) -> None:
        self.notes: dict[Name, bytes] = {}
        self._blocks, self._coded_group, self._groups = manager.blocks, manager.shape.group, groups
        self._medium, locality = PLACES[place]
        self._locality = locality.value
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._kinds = [
            Kind(spec.block_size, get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for spec in specs
        ]
        self._told: dict[Name, None] = {}
        """Blocks that are stored, and that subscribers know to be stored."""
        self._repeats = False
        self._blocks.changed = {(block.group, block.key): None for block in self._blocks}

    def repeat(self) -> None:
        """Have `take` tell again of all stored blocks, because vLLM says that all blocks are cleared."""
        self._repeats = True

    @property
    def has_news(self) -> bool:
        """True if there may be something to tell."""
        return self._repeats or bool(self._blocks.changed)

    # -- requests -------------------------------------------------------------------------------------

    def remember(self, request: "Request", blocks: int, parts: "Iterable[Part]" = ()) -> None:
        """Note the tokens of the request's first blocks, and of these of other groups, as far as the manager knows
        them."""
        known, size = self._blocks.get, self._groups.chain.spec.block_size
        chain = self._groups.chain.index
        for at in range(blocks):
            key = self._key(request, (at + 1) * size)
            if (chain, key) not in self.notes and known(key) is not None:
                self._note((chain, key), request, at * size, (at + 1) * size)
        for part in parts:
            name = part.group, self._key(request, part.end)
            if self._kinds[part.group].tokens != size and name not in self.notes and known(name[1], part.group):
                self._note(name, request, part.first_token, part.end)

    def _note(self, name: Name, request: "Request", first: int, end: int) -> None:
        extra_keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
        told = to_event_extra_keys([extra_keys] if extra_keys else None)
        lora = request.lora_request
        source = (lora.adapter_id, lora.name, request.session_id) if lora else (None, None, request.session_id)
        parent = self._key(request, first) if first else None
        tokens = list(request.all_token_ids[first:end])
        self.notes[name] = _pack(Note(parent, tokens, list(told[0] or ()) if told else None, source))
        for other, kind in enumerate(self._kinds):  # blocks of all groups with the same tokens have the same hash
            if kind.tokens == self._kinds[name[0]].tokens:
                self._blocks.touch(name[1], None if other == self._coded_group else other)

    def _key(self, request: "Request", end: int) -> "BlockHash":
        return request.block_hashes[end // self._groups.hash_tokens - 1]

    # -- events ---------------------------------------------------------------------------------------

    def take(self) -> list[KVCacheEvent]:
        """Return what has changed since the last call."""
        changed, self._blocks.changed = self._blocks.changed or {}, {}
        stored, removed = dict[Name, int](), list[Name]()
        for group, key in changed:
            block = self._blocks.get(key, group)
            name = (self._groups.chain.index if group is None else group), key
            if group is not None or self._coded_group is not None:  # else the chain's blocks have no codes
                is_stored = block is not None and block.has_codes
                if is_stored and block is not None and name not in self._told and self._find(name) is not None:
                    stored[name] = block.depth
                elif not is_stored and name in self._told:
                    removed.append(name)
                    del self._told[name]
            if block is None:
                self.notes.pop(name, None)
        in_order = sorted(stored, key=lambda name: (name[0], stored[name]))  # heads before tails
        if self._repeats:
            self._repeats = False
            removed += self._told
            in_order = [*self._told, *in_order]
        self._told |= dict.fromkeys(in_order)
        return [*self._removed(removed), *self._stored(in_order)]

    def event(self, name: Name, medium: str) -> BlockStored | None:
        """That a block is stored, wherever; None if nobody knows its tokens."""
        note = self._find(name)
        return None if note is None else self._begun(name, note, medium)

    def _find(self, name: Name) -> Note | None:
        """Of the block itself, or of the chain's of the same tokens."""
        group, key = name
        chain = self._groups.chain.index
        packed = self.notes.get(name)
        if packed is None and self._kinds[group].tokens == self._kinds[chain].tokens:
            packed = self.notes.get((chain, key))
        try:
            return None if packed is None else _unpack(packed)
        except msgspec.DecodeError:  # a journal was damaged
            return None

    def _stored(self, names: Iterable[Name]) -> list[BlockStored]:
        """One event for each run of blocks that came with the same request's session and adapter."""
        events: list[BlockStored] = []
        ends: dict[tuple[object, ...], BlockStored] = {}  # runs, by group, last key and source
        for name in names:
            if (note := self._find(name)) is None:
                continue
            group, key = name
            run = ends.pop((group, note.parent, note.source), None)
            one = self._begun(name, note, self._medium)
            if run is None:
                one.locality, one.ownership = self._locality, OWNER
                events.append(run := one)
            else:
                run.block_hashes += one.block_hashes
                run.token_ids += one.token_ids
                run.extra_keys = [*(run.extra_keys or ()), *(one.extra_keys or ())]
            ends[group, key, note.source] = run
        return events

    def _begun(self, name: Name, note: Note, medium: str) -> BlockStored:
        group, key = name
        kind = self._kinds[group]
        lora_id, lora_name, session_id = note.source
        return BlockStored(
            block_hashes=[_hash(key)],
            parent_block_hash=None if note.parent is None else _hash(note.parent),
            token_ids=note.tokens,
            block_size=kind.tokens,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            extra_keys=[None if note.extra_keys is None else tuple(map(_as_told, note.extra_keys))],
            group_idx=group,
            kv_cache_spec_kind=kind.name,
            kv_cache_spec_sliding_window=kind.window,
            session_id=session_id,
        )

    def _removed(self, names: Sequence[Name]) -> Iterator[BlockRemoved]:
        by_group: dict[int, list[ExternalBlockHash]] = {}
        for group, key in names:
            by_group.setdefault(group, []).append(_hash(key))
        for group, hashes in by_group.items():
            yield BlockRemoved(hashes, self._medium, group, self._locality, OWNER)


def _as_told(extra_key: Any) -> Any:
    return tuple(extra_key) if isinstance(extra_key, list) else extra_key


def _hash(key: bytes) -> "ExternalBlockHash":
    return maybe_convert_block_hash(BlockHash(key))
