"""Paged blocks through vLLM's own cache-write operation, in every layout that this machine's kernels use."""

import jobs
import numpy as np
import pytest
import torch
from paged_cache import (
    BLOCKS,
    HEADS,
    LAYERS,
    block_format,
    cpu_blocks,
    encode,
    gpu_like,
    paged,
    shape_of,
    write,
)

from manthan.codec import wire
from manthan.vllm_hooks.support import UnsupportedError
from manthan.vllm_hooks.worker.layout import paged_layout, probe_layers

KEY = b"k" * 32
KINDS = [(isa, dtype) for isa in ("vec", "vec16") for dtype in (torch.bfloat16, torch.float16, torch.float32)]
KINDS += [("amx", torch.bfloat16)] if torch.cpu._is_amx_tile_supported() else []
BITS = {torch.bfloat16: torch.uint16}


pytestmark = pytest.mark.usefixtures("engine_config")


@pytest.mark.parametrize(("isa", "dtype"), KINDS)
@pytest.mark.parametrize(("tokens", "head_dim"), [(32, 128), (128, 64), (32, 96)])
def test_a_block_comes_back_as_the_codec_gives_it(isa: str, dtype: torch.dtype, tokens: int, head_dim: int) -> None:
    caches, layers, spec = paged(isa, dtype, tokens, head_dim)
    blocks, form = cpu_blocks(caches, layers, spec), block_format(caches, spec)
    both = torch.from_numpy(np.stack(write(caches, layers, 3, spec, seed=1))).to(dtype)
    numbers = both.view(2, LAYERS, HEADS, tokens, head_dim).view(BITS.get(dtype, dtype)).numpy()
    buf = encode(blocks, KEY, 3)
    assert np.array_equal(buf, form.encode(*numbers, key=KEY, first_token=96, exact=0))
    others = {name: cache.clone() for name, cache in caches.items()}
    assert blocks.decode(KEY, 5, buf) is None
    # A second cache, written by the backend with what the codec gives, must hold the very same bytes.
    decoded = torch.from_numpy(np.stack(form.decode(buf, key=KEY))).view(dtype)
    data = decoded.transpose(2, 3).contiguous()
    slots = 5 * tokens + torch.arange(tokens)
    for n_layer, (name, layer) in enumerate(layers.items()):
        layer.impl.do_kv_cache_update(layer, data[0, n_layer], data[1, n_layer], others[name], slots)
        assert torch.equal(caches[name], others[name])


def test_a_block_is_good_up_to_any_part_and_bad_with_a_damaged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as fine as its parts say: what is left of it may be too coarse for who asks."""
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    write(caches, layers, 3, spec, seed=1)
    blocks = cpu_blocks(caches, layers, spec)
    monkeypatch.setattr(type(blocks.format._codecs[blocks.format.codec]), "levels", 3)
    whole = wire.refined(encode(blocks, KEY, 3), [np.full(nbytes, 7, np.uint8) for nbytes in (100, 200)])
    base, first, end = wire.part_ends(whole)
    for size in (base, first, end):
        assert blocks.decode(KEY, 5, whole[:size]) is None
    for at in (base + 1, base + 20, first + 20):
        damaged = whole.copy()
        damaged[at] ^= 1
        assert blocks.decode(KEY, 5, damaged) == "checksum"
    assert blocks.decode(KEY, 5, whole[: end - 16]) == "checksum"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("exact", [0, 4, 16])
def test_a_devices_memory_is_read_and_written_as_the_hosts(order: tuple[int, ...], exact: int) -> None:
    caches, layers, spec = gpu_like(order)
    for cache in caches.values():
        cache[3] = torch.randn(cache[3].shape)
    on_device, on_host = (cpu_blocks(caches, layers, spec, is_host=is_host) for is_host in (False, True))
    buf = encode(on_device, KEY, 3, exact)
    assert np.array_equal(buf, encode(on_host, KEY, 3, exact))
    assert on_device.decode(KEY, 5, buf) is None
    assert on_host.decode(KEY, 6, buf) is None
    for cache in caches.values():
        was, now = cache[3].float(), cache[5].float()
        assert (was - now).square().mean() < 0.05 * was.square().mean()
        assert torch.equal(cache[5], cache[6])
    assert not any(cache[[0, 1, 2, 4, 7]].any() for cache in caches.values())


def test_kv_that_is_not_finite_is_not_encoded() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    blocks = cpu_blocks(caches, layers, spec)
    write(caches, layers, 3, spec, seed=3)
    caches["layer-1"][3, 0, 0, 0] = float("nan")
    job = jobs.store([b"\2", b"\3", b"\4"], [2, 3, 4])
    first, bad, last = blocks.encode(job, blocks.gather(job))
    assert bad == "encode"
    assert wire.parse(first, key=b"\2")
    assert wire.parse(last, key=b"\4")


def test_layers_that_share_a_cache_are_kept_once() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    shared = caches | {"layer-9": caches["layer-0"]}
    probed = probe_layers(shared, layers | {"layer-9": layers["layer-0"]}, BLOCKS, shape_of(spec))
    assert [layer.name for layer in probed] == list(caches)


def test_a_layout_that_cannot_be_read_back_is_refused() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    layers["layer-0"].impl.do_kv_cache_update = lambda layer, key, value, cache, slots: None
    with pytest.raises(UnsupportedError, match="lays KV blocks out in a way that cannot be read back"):
        cpu_blocks(caches, layers, spec)
    with pytest.raises(UnsupportedError, match="9 blocks, each in one piece, are expected"):
        cpu_blocks(*paged("vec", torch.bfloat16, 32, 128), num_blocks=9)


def test_a_layout_whose_vectors_are_scattered_is_not_for_gpu_kernels() -> None:
    caches, layers, spec = paged("vec", torch.bfloat16, 32, 128)
    with pytest.raises(UnsupportedError, match="the attention backend splits vectors"):
        paged_layout(probe_layers(caches, layers, BLOCKS, shape_of(spec)), shape_of(spec))
