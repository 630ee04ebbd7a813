"""A router that knows of KV events what is documented finds saved blocks by ours, as vLLM's publisher sends them."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from router_events import Index, WireError, event, read
from saved_requests import BLOCKS, TOKENS, Engine, asked
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVCacheEvent, KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from manthan.manager.session.hints import parse_hints

PATIENCE_MS = 10_000
ADAPTER = LoRARequest("adapter", 7, "/nowhere")


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


class Wire:
    """vLLM's publisher, and a socket that hears it."""

    def __init__(self, folder: Path) -> None:
        endpoint = f"ipc://{folder}/events"
        self.publisher = ZmqEventPublisher(0, endpoint, topic="kv@engine@model")
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(b"kv@")
        while not self.socket.poll(100):  # what is published before it has connected is lost
            self.publisher.publish(KVEventBatch(ts=0.0, events=[]))
        self.publisher._event_queue.join()
        while self.socket.poll(200):
            self.last, _ = read(self.socket.recv_multipart())

    def send(self, events: Sequence[KVCacheEvent]) -> list[tuple[str, dict[str, Any]]]:
        """Publish a batch and return what a router reads."""
        self.publisher.publish(KVEventBatch(ts=1.0, events=list(events)))
        assert self.socket.poll(PATIENCE_MS), "nothing comes"
        before = self.last
        self.last, found = read(self.socket.recv_multipart())
        assert self.last == before + 1
        return found

    def close(self) -> None:
        """End both."""
        self.socket.close(linger=0)
        self.publisher.shutdown()


@pytest.fixture
def wire() -> Iterator[Wire]:
    with tempfile.TemporaryDirectory(prefix="router-", dir="/tmp") as folder:
        one = Wire(Path(folder))
        yield one
        one.close()


@pytest.mark.parametrize("options", [{}, {"session_id": "alice", "cache_salt": "salt", "lora_request": ADAPTER}])
@pytest.mark.parametrize(("place", "medium"), [("host", "CPU"), ("redis", "STORAGE")])
def test_a_router_finds_what_is_saved_until_it_is_dropped(
    wire: Wire, options: dict[str, Any], place: str, medium: str
) -> None:
    engine, request, index = Engine(place), asked(**options), Index()
    tokens, whole = list(request.all_token_ids), BLOCKS * TOKENS
    index.take(wire.send([engine.theirs(request), *engine.ours(request)]))
    assert (index.prefix("GPU", tokens), index.prefix(medium, tokens)) == (whole, whole)
    assert index.prefix(medium, [*tokens[:TOKENS], 0, *tokens]) == TOKENS
    index.take(wire.send([AllBlocksCleared()]))
    assert (index.prefix("GPU", tokens), index.prefix(medium, tokens)) == (0, whole)
    index.take(wire.send(engine.forget()))
    assert index.blocks == {}


def test_a_router_learns_whom_a_sub_agent_works_for(wire: Wire) -> None:
    """vLLM's own classes, which lack the parent, read the same event."""
    engine, request = Engine(), asked(session_id="worker")
    ours = engine.ours(request, hints=parse_hints({"parent_session_id": "planner"}))
    [(tag, fields)] = wire.send(ours)
    assert (tag, fields["session_id"], fields["parent_session_id"]) == ("BlockStored", "worker", "planner")
    batch = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(ours), data_parallel_rank=0))
    [theirs] = msgspec.msgpack.decode(batch, type=KVEventBatch).events
    assert type(theirs) is BlockStored
    assert all(getattr(theirs, name) == getattr(ours[0], name) for name in theirs.__struct_fields__)
    index = Index()
    index.take([(tag, fields)])
    assert index.prefix("CPU", list(request.all_token_ids)) == BLOCKS * TOKENS


def test_blocks_of_a_window_come_under_their_group(wire: Wire) -> None:
    engine, request = Engine(windows=True), asked()
    stored = wire.send(engine.ours(request))
    assert [(tag, each["group_idx"], each["kv_cache_spec_kind"], each["block_size"]) for tag, each in stored] == [
        ("BlockStored", 0, "full_attention", TOKENS),
        ("BlockStored", 1, "sliding_window", 2 * TOKENS),
    ]
    removed = wire.send(engine.forget())
    assert {(tag, each["group_idx"]) for tag, each in removed} == {("BlockRemoved", 0), ("BlockRemoved", 1)}


def as_array(one: KVCacheEvent) -> list[Any]:
    """Return an event as a release of vLLM encodes it whose events are arrays."""
    said = [one.__struct_config__.tag, *(getattr(one, name) for name in one.__struct_fields__)]
    return list(msgspec.msgpack.decode(msgspec.msgpack.encode(said)))


@pytest.mark.parametrize("options", [{}, {"session_id": "alice", "lora_request": ADAPTER}])
def test_fields_are_in_the_order_of_the_array(options: dict[str, Any]) -> None:
    engine, request = Engine(), asked(**options)
    for one in (*engine.ours(request, hints=parse_hints({"parent_session_id": "bob"})), *engine.forget()):
        tag, by_name = event(msgspec.msgpack.decode(msgspec.msgpack.encode(one)))
        other_tag, by_place = event(as_array(one))
        assert tag == other_tag
        assert {name: value for name, value in by_place.items() if value is not None or name in by_name} == {
            name: value for name, value in by_name.items() if name in by_place
        }
        assert by_place["block_hashes"] == one.block_hashes
        assert by_place["group_idx"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_hashes", ["0a"]),
        ("parent_block_hash", 1.5),
        ("token_ids", [1, 2, 3]),
        ("block_size", None),
        ("medium", 7),
        ("lora_name", 7),
        ("extra_keys", [None]),
        ("kv_cache_spec_kind", "anything"),
    ],
)
def test_a_router_refuses_other_values(name: str, value: Any) -> None:
    engine = Engine()
    [stored] = engine.ours(asked())
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(stored))
    event(said)
    with pytest.raises(WireError):
        event(said | {name: value})
    swapped = as_array(stored)
    swapped[1], swapped[3] = swapped[3], swapped[1]
    with pytest.raises(WireError):
        event(swapped)
