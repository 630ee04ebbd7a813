"""Paged blocks through vLLM's own cache-write operation, in every layout that this machine's kernels use."""

from typing import Any

import numpy as np
import pytest
import torch
from paged_cache import BLOCKS, HEADS, LAYERS, PRINT, block_codec, gpu_like, paged, shape_of, write

from manthan.codec import get_codec, wire
from manthan.codec.exact import exact_parts, part_keys
from manthan.manager.stores.cold_store import HostStore
from manthan.vllm_hooks.support import UnsupportedError
from manthan.vllm_hooks.worker.exact_blocks import ExactBlocks
from manthan.vllm_hooks.worker.layout import paged_layout, probe_layers

KEY = b"k" * 32
ISAS = ["vec", "vec16", *(["amx"] if torch.cpu._is_amx_tile_supported() else [])]


pytestmark = pytest.mark.usefixtures("engine_config")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "head_dim"), [(32, 128), (128, 64), (32, 96)])
def test_a_block_comes_back_as_the_codec_gives_it(isa: str, dtype: torch.dtype, tokens: int, head_dim: int) -> None:
    if isa == "amx" and dtype is not torch.bfloat16:
        pytest.skip("AMX kernels take bf16 only")
    caches, layers, spec = paged(isa, dtype, tokens, head_dim)
    blocks = block_codec(caches, layers, spec)
    keys, values = write(caches, layers, 3, spec, seed=1)
    buf = blocks.encode(KEY, 3)
    assert buf.nbytes == blocks.nbytes
    codec = get_codec("lloyd3", head_dim)
    parsed = wire.parse(buf, key=KEY, fingerprint=PRINT)
    assert np.array_equal(parsed.key_codes, codec.encode(keys, "key"))
    assert np.array_equal(parsed.value_codes, codec.encode(values, "value"))

    others = {name: cache.clone() for name, cache in caches.items()}
    assert blocks.decode(KEY, 5, buf) is None
    # A second cache, written by the backend with what the codec gives, must hold the very same bytes.
    n = len(keys)
    decoded = np.stack([codec.decode(parsed.key_codes, n, "key"), codec.decode(parsed.value_codes, n, "value")])
    data = torch.from_numpy(decoded).reshape(2, LAYERS, HEADS, tokens, head_dim).transpose(2, 3).to(dtype).contiguous()
    slots = 5 * tokens + torch.arange(tokens)
    for n_layer, (name, layer) in enumerate(layers.items()):
        layer.impl.do_kv_cache_update(layer, data[0, n_layer], data[1, n_layer], others[name], slots)
        assert torch.equal(caches[name], others[name])


def test_probing_leaves_nothing_behind() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    for layer in probe_layers(caches, layers, BLOCKS, shape_of(spec)):
        assert not caches[layer.name].any()
        assert sorted([*layer.keys, *layer.values]) == list(range(2 * HEADS * 32 * 128))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda buf: buf[:-1], "truncated"),
        (lambda buf: np.r_[buf, np.uint8(0)], "trailing"),
        (lambda buf: np.r_[np.uint8(0), buf[1:]], "magic"),
        (lambda buf: np.r_[buf[:-1], buf[-1:] ^ 1], "checksum"),
    ],
)
def test_what_is_damaged_is_not_written(damage: Any, cause: str) -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    blocks = block_codec(caches, layers, spec)
    write(caches, layers, 3, spec, seed=2)
    buf = blocks.encode(KEY, 3)
    before = {name: cache.clone() for name, cache in caches.items()}
    assert blocks.decode(KEY, 5, damage(buf)) == cause
    assert blocks.decode(b"another key", 5, buf) == "key"
    stranger = block_codec({n: c.clone() for n, c in caches.items()}, layers, spec, fingerprint=b"g" * 16)
    assert stranger.decode(KEY, 5, buf) == "fingerprint"
    assert all(torch.equal(caches[name], before[name]) for name in caches)


def test_kv_that_is_not_finite_is_not_encoded() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    blocks = block_codec(caches, layers, spec)
    write(caches, layers, 3, spec, seed=3)
    caches["layer-1"][3, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="holds a NaN or an infinity"):
        blocks.encode(KEY, 3)


def test_layers_that_share_a_cache_are_kept_once() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    nbytes = block_codec(caches, layers, spec).nbytes
    shared = caches | {"layer-9": caches["layer-0"]}
    assert block_codec(shared, layers | {"layer-9": layers["layer-0"]}, spec).nbytes == nbytes


def test_a_layout_that_cannot_be_read_back_is_refused() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    layers["layer-0"].impl.do_kv_cache_update = lambda layer, key, value, cache, slots: None
    with pytest.raises(UnsupportedError, match="lays KV blocks out in a way that cannot be read back"):
        block_codec(caches, layers, spec)
    with pytest.raises(UnsupportedError, match="9 blocks, each in one piece, are expected"):
        block_codec(*paged("vec", torch.bfloat16, 32, 128), num_blocks=9)


def test_a_layout_whose_vectors_are_scattered_is_not_for_gpu_kernels() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    with pytest.raises(UnsupportedError, match="does not lay each vector out in one piece"):
        paged_layout(probe_layers(caches, layers, BLOCKS, shape_of(spec)), shape_of(spec))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_strides_are_found_whatever_the_order_of_heads_and_tokens(order: tuple[int, ...]) -> None:
    caches, layers, spec = gpu_like(order)
    layout = paged_layout(probe_layers(caches, layers, BLOCKS, shape_of(spec)), shape_of(spec))
    cache = caches["layer-1"]
    assert (layout.block_stride, layout.head_stride, layout.token_stride) == cache.stride()[:3]
    assert (layout.key_at, layout.value_at) == (0, 64)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_exact_copy_comes_back_bit_for_bit(isa: str, dtype: torch.dtype) -> None:
    if isa == "amx" and dtype is not torch.bfloat16:
        pytest.skip("AMX kernels take bf16 only")
    caches, layers, spec = paged(isa, dtype, 32, 128)
    blocks = block_codec(caches, layers, spec)
    write(caches, layers, 3, spec, seed=3)
    store = HostStore(1 << 20)
    copies = ExactBlocks(blocks, exact_parts(blocks.header_of(KEY), dtype.itemsize))
    assert copies.keep(KEY, 3, store) is None
    assert store.used == copies.nbytes
    assert copies.restore(KEY, 5, store) is None
    assert all(torch.equal(cache[5], cache[3]) for cache in caches.values())
    assert not any(cache[[0, 1, 2, 4, 6, 7]].any() for cache in caches.values())


def test_a_copy_that_is_not_whole_is_not_written() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    blocks = block_codec(caches, layers, spec)
    write(caches, layers, 3, spec, seed=4)
    store = HostStore(1 << 20)
    copies = ExactBlocks(blocks, exact_parts(blocks.header_of(KEY), 2))
    copies.keep(KEY, 3, store)
    last = part_keys(KEY, copies.parts)[-1]
    (part,) = store.get([last])
    assert part is not None
    store._blocks[last] = np.r_[part[:-1], part[-1:] ^ 1]
    assert copies.restore(KEY, 5, store) == "checksum"
    store.drop([last])
    assert copies.restore(KEY, 5, store) == "missing"
    assert not any(cache[5].any() for cache in caches.values())


def test_a_copy_without_room_takes_none() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    blocks = block_codec(caches, layers, spec)
    store = HostStore(5 * blocks.nbytes)
    assert ExactBlocks(blocks, 6).keep(KEY, 3, store) == "store_full"
    store.reserve(store.max_bytes)  # nothing is left set aside


def test_a_store_that_breaks_costs_the_copy_and_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    blocks = block_codec(caches, layers, spec)
    store, copies = HostStore(6 * blocks.nbytes), ExactBlocks(blocks, 6)

    def broken(*_: Any) -> Any:
        raise OSError("the store is on fire")

    monkeypatch.setattr(store, "put_all", broken)
    with pytest.raises(OSError, match="fire"):
        copies.keep(KEY, 3, store)
    monkeypatch.setattr(store, "read", broken)
    assert copies.restore(KEY, 3, store) == "internal"
    store.reserve(store.max_bytes)
