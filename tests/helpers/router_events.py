"""A router's half of KV events, written from what routers document, without vLLM's classes.

Dynamo documents both forms of an event: a map with the tag under `type`, which vLLM publishes, and an array with the
tag first, which earlier releases publish. llm-d reads both. Both routers ignore unknown fields, and refuse a batch with
an unknown tag. See "ZMQ KV Event Wire Parsing" of the crate dynamo-kv-router
(https://docs.rs/crate/dynamo-kv-router/1.3.0/source/src/zmq_wire/README.md), and for llm-d the repository
llm-d/llm-d-router, pkg/kvevents/engineadapter/vllm_adapter.go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
"""Fields of BlockStored in their order, behind the tag. More may follow."""
REMOVED = ("block_hashes", "medium", "group_idx")
NEEDED = {"BlockStored": STORED[:7], "BlockRemoved": REMOVED[:2], "AllBlocksCleared": ()}
ORDERS = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}
KINDS = {
    *("full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention"),
    *("sink_full_attention", "encoder_only_attention", "cross_attention"),
}
"""Kinds of KV cache groups that routers know."""
BATCH = 3
"""Time, events, and rank. Dynamo refuses a batch without the rank."""


class WireError(ValueError):
    """A payload that a router refuses."""


def read(parts: Sequence[bytes]) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    """Return the sequence number of a message, and its events by tag. Raises WireError."""
    if len(parts) != len(("topic", "sequence", "payload")) or len(parts[1]) != len(bytes(8)):
        raise WireError("a message is a topic, eight bytes and a payload")
    batch = msgspec.msgpack.decode(parts[2])
    if not isinstance(batch, list) or len(batch) != BATCH:
        raise WireError(f"a batch is an array of {BATCH}, not {batch!r}")
    time, events, rank = batch
    if not isinstance(time, float) or not isinstance(events, list) or not isinstance(rank, int):
        raise WireError("a batch is a time, events and a rank")
    return int.from_bytes(parts[1], "big"), [event(each) for each in events]


def event(said: Any) -> tuple[str, dict[str, Any]]:
    """Return tag and fields of an event in either form. Raises WireError."""
    if isinstance(said, Mapping):
        tag, fields = said.get("type"), {name: value for name, value in said.items() if name != "type"}
    elif isinstance(said, list) and said:
        tag, fields = said[0], dict(zip(ORDERS.get(said[0], ()), said[1:], strict=False))
    else:
        raise WireError(f"an event is a map or an array, not {said!r}")
    if tag not in NEEDED or not set(NEEDED[tag]) <= fields.keys():
        raise WireError(f"{tag} has {sorted(fields)}")
    if tag in ("BlockStored", "BlockRemoved"):
        _check(fields)
    if tag == "BlockStored":
        _check_stored(fields)
    return tag, fields


def _check(fields: Mapping[str, Any]) -> None:
    hashes = fields["block_hashes"]
    if not isinstance(hashes, list) or not all(_is_hash(one) for one in hashes):
        raise WireError(f"block_hashes is {hashes!r}")
    if not isinstance(fields["medium"], str | None):
        raise WireError(f"medium is {fields['medium']!r}")
    if not isinstance(fields.get("group_idx"), int | None):
        raise WireError(f"group_idx is {fields['group_idx']!r}")


def _check_stored(fields: Mapping[str, Any]) -> None:
    hashes, parent, size, tokens = (fields[n] for n in ("block_hashes", "parent_block_hash", "block_size", "token_ids"))
    if parent is not None and not _is_hash(parent):
        raise WireError(f"parent_block_hash is {parent!r}")
    if len({*hashes, parent}) != len(hashes) + 1:
        raise WireError("a block is its own parent")
    if not isinstance(size, int) or not isinstance(tokens, list) or len(tokens) != size * len(hashes):
        raise WireError(f"{len(hashes)} blocks of {size!r} tokens have other tokens: {tokens!r}")
    if not all(isinstance(token, int) and 0 <= token < 1 << 32 for token in tokens):
        raise WireError("token_ids are numbers of 32 bits")
    if not isinstance(fields["lora_id"], int | None) or not isinstance(fields["lora_name"], str | None):
        raise WireError(f"the adapter is {fields['lora_id']!r}, {fields['lora_name']!r}")
    if len(fields.get("extra_keys") or hashes) != len(hashes):
        raise WireError("extra_keys has one entry a block")
    if (kind := fields.get("kv_cache_spec_kind")) is not None and kind not in KINDS:
        raise WireError(f"no router knows the kind {kind!r}")


def _is_hash(value: Any) -> bool:
    """True for a number of 64 bits, which Dynamo wants, or bytes, which llm-d takes too."""
    return isinstance(value, bytes) or (isinstance(value, int) and 0 <= value < 1 << 64)


@dataclass
class Index:
    """Blocks of one engine as a router keeps them: by medium and hash, the block before and the tokens."""

    blocks: dict[tuple[str, Any], tuple[Any, list[int]]] = field(default_factory=dict)

    def take(self, events: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Follow events. A cleared engine keeps what is not on its GPU, as with Dynamo."""
        for tag, fields in events:
            medium = fields.get("medium") or "GPU"
            if tag == "AllBlocksCleared":
                self.blocks = {name: block for name, block in self.blocks.items() if name[0] != "GPU"}
            elif tag == "BlockRemoved":
                for name in fields["block_hashes"]:
                    self.blocks.pop((medium, name), None)
            else:
                parent, size = fields["parent_block_hash"], fields["block_size"]
                for at, name in enumerate(fields["block_hashes"]):
                    self.blocks[medium, name] = parent, fields["token_ids"][at * size : (at + 1) * size]
                    parent = name

    def prefix(self, medium: str, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt a medium has from the first one on."""
        behind = {parent: (name, own) for (where, name), (parent, own) in self.blocks.items() if where == medium}
        found, parent = 0, None
        while parent in behind:
            parent, own = behind[parent]
            if list(tokens[found : found + len(own)]) != own:
                break
            found += len(own)
        return found
