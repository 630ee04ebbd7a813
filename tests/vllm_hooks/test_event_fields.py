"""An event of a saved block says what vLLM's own said of the block when it was in the pool."""

from typing import Any

import pytest
from saved_requests import BLOCKS, TOKENS, Engine, asked
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

IMAGE = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(offset=20, length=30))


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


SAME = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "extra_keys")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"session_id": "alice"},
        {"cache_salt": "salt"},
        {"lora_request": LoRARequest("adapter", 7, "/nowhere")},
        {"mm_features": [IMAGE]},
        {"mm_features": [IMAGE], "lora_request": LoRARequest("adapter", 7, "/nowhere"), "cache_salt": "salt"},
    ],
    ids=["plain", "named", "salt", "adapter", "image", "all"],
)
def test_an_event_has_what_vllm_s_own_has(options: dict[str, Any]) -> None:
    engine, request = Engine(), asked(**options)
    theirs, [ours] = engine.theirs(request), engine.ours(request)
    assert isinstance(ours, BlockStored)
    for name in (*SAME, "group_idx", "session_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.kv_cache_spec_kind, ours.medium, ours.locality, ours.ownership) == (
        "full_attention",
        "CPU",
        "LOCAL",
        "manthan",
    )
    [gone] = engine.forget()
    assert gone == BlockRemoved(theirs.block_hashes, "CPU", 0, "LOCAL", "manthan")
    assert not any(engine.events.packed([(0, block_hash) for block_hash in request.block_hashes]))


@pytest.mark.parametrize(
    ("place", "where"),
    [("device", ("CPU", "LOCAL")), ("disk", ("STORAGE", "LOCAL")), ("redis", ("STORAGE", "REMOTE"))],
)
def test_where_blocks_are(place: str, where: tuple[str, str]) -> None:
    engine = Engine(place)
    for event in (*engine.ours(asked()), *engine.forget()):
        assert (event.medium, event.locality) == where


def test_blocks_of_a_window_that_are_larger_have_their_own_tokens() -> None:
    engine, request = Engine(windows=True), asked(session_id="alice")
    theirs = engine.theirs(request, 1)
    full, window = engine.ours(request)
    assert isinstance(window, BlockStored)
    assert len(full.block_hashes) == BLOCKS
    assert (window.group_idx, window.block_size, window.kv_cache_spec_sliding_window) == (1, 2 * TOKENS, TOKENS)
    assert window.block_hashes == theirs.block_hashes[-1:]
    assert window.parent_block_hash == theirs.block_hashes[-2]
    assert window.token_ids == theirs.token_ids[-2 * TOKENS :]
    assert {event.group_idx for event in engine.forget()} == {0, 1}
    assert not any(engine.events.packed([(0, block_hash) for block_hash in request.block_hashes]))


def test_a_block_that_is_saved_before_its_tokens_are_known_is_told_once_they_are() -> None:
    engine, request = Engine(), asked()
    assert engine.ours(request, is_known=False) == []
    engine.events.remember(request, BLOCKS)
    assert engine.events.has_news
    [told] = engine.events.take()
    assert len(told.block_hashes) == BLOCKS
    assert not engine.events.has_news
    assert len(engine.forget()) == 1


def test_a_damaged_note_says_nothing() -> None:
    engine, request = Engine(), asked()
    engine.ours(request, is_known=False)
    block_hash = request.block_hashes[0]
    engine.events.update([((0, block_hash), b"\x93\x00")])
    assert engine.events.event((0, block_hash), "GPU") is None
    engine.events.remember(request, 1)
    told = engine.events.event((0, block_hash), "GPU")
    assert told is not None
    assert (told.medium, told.locality, told.ownership, told.token_ids) == ("GPU", None, None, list(range(100, 116)))


def test_notes_of_an_earlier_engine_say_the_same_and_end_with_the_blocks() -> None:
    engine, later, request = Engine(), Engine(), asked(session_id="alice", cache_salt="salt")
    engine.ours(request)
    later.ours(request, is_known=False)
    names = [(0, block_hash) for block_hash in request.block_hashes]
    packed = engine.events.packed(names)
    later.events.update(zip(names, packed, strict=True))
    told = [later.events.event(name, "GPU") for name in names]
    assert None not in told
    assert told == [engine.events.event(name, "GPU") for name in names]
    assert later.events.packed(names) == packed
    later.forget()
    assert later.events.packed(names) == [b""] * len(names)
    assert later.events.event(names[0], "GPU") is None


def test_a_reset_of_vllm_s_cache_has_all_that_is_stored_told_again() -> None:
    engine = Engine()
    [stored] = engine.ours(asked())
    engine.events.repeats = True
    removed, again = engine.events.take()
    assert removed == BlockRemoved(stored.block_hashes, "CPU", 0, "LOCAL", "manthan")
    assert again == stored
    assert engine.events.take() == []
