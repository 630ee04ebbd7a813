"""A router's half of vLLM's KV events: a ZMQ subscriber that knows what an engine has from what it publishes alone."""

from collections.abc import Iterator, Sequence

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, hash_block_tokens, maybe_convert_block_hash

Name = tuple[int, ExternalBlockHash]
"""KV cache group and hash of a block, as events have it."""
END = (-1).to_bytes(8, "big", signed=True)
_decode = msgspec.msgpack.Decoder(KVEventBatch).decode


def block_hashes_of(
    tokens: Sequence[int], size: int, salt: str | None = None, parent: BlockHash | None = None
) -> list[BlockHash]:
    """Of the whole blocks of so many tokens each, as vLLM's default hash has them."""
    found: list[BlockHash] = []
    for at in range(0, len(tokens) // size * size, size):
        extra = (("cache_salt", salt),) if salt and parent is None else None
        parent = hash_block_tokens(sha256, parent, tokens[at : at + size], extra)
        found.append(parent)
    return found


class Subscriber:
    """endpoint, replay: those of the engine's publisher. What was published before, or is lost on the way, is asked for
    again.

    cold: what Manthan's events say that is stored, with the event that said so. pool: the same of vLLM's own.
    hash_tokens: how many tokens lie between two hashes.
    """

    def __init__(self, endpoint: str, replay: str, hash_tokens: int) -> None:
        self._endpoint, self._replay, self._hash_tokens = endpoint, replay, hash_tokens
        self._next = 0
        self.cold: dict[Name, BlockStored] = {}
        self.pool: dict[Name, BlockStored] = {}
        self.after_clearing: set[Name] = set()
        """`cold` for who takes AllBlocksCleared for an end of everything."""
        self.seen = {"stored": 0, "removed": 0, "cleared": 0, "replayed": 0, "hashed": 0}
        self._whole: dict[ExternalBlockHash, BlockHash] = {}
        self.connect()

    def connect(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(self._endpoint)
        self._socket.subscribe(b"")

    def lose(self) -> None:
        """What is published until `connect` is not received."""
        self._socket.close(linger=0)

    @property
    def is_deaf(self) -> bool:
        return bool(self._socket.closed)

    def hear(self) -> int:
        """All that has come, and what was published before that. Returns how many batches that were."""
        for seq, payload in self._received():
            if seq > self._next:
                self.catch_up()
            if seq == self._next:
                self._take(payload)
        return self._next

    def _received(self) -> Iterator[tuple[int, bytes]]:
        while not self._socket.closed and self._socket.poll(0):
            _, seq, payload = self._socket.recv_multipart()
            yield int.from_bytes(seq, "big"), payload

    def catch_up(self) -> None:
        """What was published and did not come."""
        for seq, payload in self._asked():
            if seq == self._next:
                self._take(payload)
                self.seen["replayed"] += 1

    def _asked(self) -> list[tuple[int, bytes]]:
        """What the publisher still has, from the next batch on."""
        found = []
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.connect(self._replay)
            socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            while True:
                assert socket.poll(10_000), "the publisher does not answer"
                _, _, seq, payload = socket.recv_multipart()
                if seq == END:
                    return found
                found.append((int.from_bytes(seq, "big"), payload))

    def _take(self, payload: bytes) -> None:
        self._next += 1
        for event in _decode(payload).events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            elif isinstance(event, AllBlocksCleared):
                self.seen["cleared"] += 1
                self.pool.clear()
                self.after_clearing.clear()

    def _stored(self, event: BlockStored) -> None:
        names = [(event.group_idx, key) for key in event.block_hashes]
        if event.ownership != "manthan":
            assert event.medium == "GPU"
            if len(event.token_ids) == len(names) * event.block_size:  # vLLM leaves out some of windows and states
                self._check(event)
            self.pool.update(dict.fromkeys(names, event))
            return
        self._check(event)
        self.seen["stored"] += len(names)
        assert self.cold.keys().isdisjoint(names), "a block is told of twice"
        self.cold.update(dict.fromkeys(names, event))
        self.after_clearing.update(names)

    def _check(self, event: BlockStored) -> None:
        """A block's hash is that of its tokens behind those of the block before, as far as that one is known."""
        size, keys = event.block_size, event.block_hashes
        assert len(event.token_ids) == len(keys) * size
        assert len(event.extra_keys or ()) == len(keys)
        assert event.kv_cache_spec_kind
        parent = None if event.parent_block_hash is None else self._whole.get(event.parent_block_hash)
        if event.parent_block_hash is not None and parent is None:
            return
        for at, (key, extra) in enumerate(zip(keys, event.extra_keys or (), strict=True)):
            tokens = event.token_ids[at * size : (at + 1) * size]
            parent = block_hashes_of(tokens, self._hash_tokens, extra[0] if extra else None, parent)[-1]
            assert maybe_convert_block_hash(parent) == key, "the hash is not of these tokens"
            self._whole[key] = parent
        self.seen["hashed"] += len(keys)

    def _removed(self, event: BlockRemoved) -> None:
        names = [(event.group_idx, key) for key in event.block_hashes]
        if event.ownership != "manthan":
            for name in names:
                self.pool.pop(name, None)
            return
        self.seen["removed"] += len(names)
        for name in names:
            del self.cold[name]
        self.after_clearing.difference_update(names)
