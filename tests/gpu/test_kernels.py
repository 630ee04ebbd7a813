"""The CUDA kernels, and the PyTorch path on a GPU, against numpy: the same codes and numbers, nothing else touched."""

from typing import Any

import numpy as np
import pytest
import torch

from manthan.codec import NonFiniteError, get_codec, wire
from manthan.codec.cpu.numpy_codec import NumpyCodec
from manthan.codec.gpu.paged import GOOD, PagedCodec, PagedLayout, status_cause
from manthan.codec.registry import SPECS

LAYERS, HEADS, TOKENS, BLOCKS = 2, 3, 16, 24
PRINT = b"f" * 16
IDS, SLOTS = [3, 7, 1, 20], [2, 0, 5, 1]
KEYS = [bytes([i]) * 32 for i in range(4)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Cache:
    """A paged cache of random vectors, heads beside each other, and the arguments of a paged codec over it."""

    def __init__(self, head_dim: int, dtype: torch.dtype, codec: str, paged: Any, tokens: int = TOKENS) -> None:
        torch.manual_seed(head_dim)
        self.head_dim, self.codec = head_dim, codec
        shape = (BLOCKS, tokens, HEADS, 2 * head_dim)
        spread = torch.logspace(-2, 2, BLOCKS, device="cuda")[:, None, None, None]
        self.layers = tuple((torch.randn(shape, device="cuda") * spread).to(dtype) for _ in range(LAYERS))
        strides = (tokens * HEADS * 2 * head_dim, 2 * head_dim, HEADS * 2 * head_dim)
        layout = PagedLayout(self.layers, HEADS, tokens, head_dim, *strides, key_at=0, value_at=head_dim)
        self.header = wire.BlockHeader(codec, b"", PRINT, LAYERS, HEADS, tokens, head_dim)
        self.paged: PagedCodec = paged(SPECS[codec], layout, self.header)
        self.codes = torch.zeros(8, self.paged.nbytes, dtype=torch.uint8, device="cuda")
        self.slots = torch.tensor(SLOTS, device="cuda")
        self.headers = torch.from_numpy(wire.header_rows(self.header, KEYS)).cuda()
        self.status = torch.zeros(len(IDS), dtype=torch.int32, device="cuda")

    def encode(self, ids: list[int]) -> list[str | None]:
        self.paged.encode(torch.tensor(ids, device="cuda"), self.codes, self.slots, self.headers, self.status)
        return [status_cause(status) for status in self.status.tolist()]

    def decode(self, ids: list[int], headers: torch.Tensor | None = None) -> list[str | None]:
        headers = self.headers if headers is None else headers
        self.paged.verify(self.codes, self.slots, headers, self.status)
        self.paged.decode(torch.tensor(ids, device="cuda"), self.codes, self.slots, self.status)
        return [status_cause(status) for status in self.status.tolist()]

    def vectors(self, block: int, kind: int) -> torch.Tensor:
        part = slice(0, self.head_dim) if kind == 0 else slice(self.head_dim, None)
        return torch.cat([layer[block][..., part].transpose(0, 1).reshape(-1, self.head_dim) for layer in self.layers])

    def parsed(self, i: int) -> wire.EncodedBlock:
        return wire.parse(self.codes[SLOTS[i]].cpu().numpy(), key=KEYS[i], fingerprint=PRINT)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return x.cpu().view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.float().cpu().numpy()


@pytest.fixture(params=["kernels", "torch"])
def paged(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        from manthan.codec.gpu.torch_codec import TorchPagedCodec

        return TorchPagedCodec
    from manthan.codec.gpu.cuda_codec import CudaPagedCodec

    return CudaPagedCodec


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", SPECS)
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128, 192, 256, 512])
def test_codes_are_numpys_and_come_back_as_numpys_numbers(
    paged: Any, head_dim: int, codec: str, dtype: torch.dtype
) -> None:
    cache = Cache(head_dim, dtype, codec, paged)
    assert cache.encode(IDS) == [None] * 4
    numpy_codec, differ, bits, wrong, count = NumpyCodec(SPECS[codec], head_dim), 0, 0, 0, 0
    before = [layer.clone() for layer in cache.layers]
    assert cache.decode([10, 11, 12, 13]) == [None] * 4
    for i, block in enumerate(IDS):
        found = cache.parsed(i)
        for kind, (name, codes) in enumerate((("key", found.key_codes), ("value", found.value_codes))):
            wanted = numpy_codec.encode(as_numpy(cache.vectors(block, kind)), name)
            differ += int(np.unpackbits(wanted ^ codes).sum())
            bits += 8 * len(codes)
            x = torch.from_numpy(numpy_codec.decode(np.ascontiguousarray(codes), found.header.vectors, name)).to(dtype)
            y = cache.vectors(10 + i, kind).cpu()
            wrong += int((x != y).sum())
            count += x.numel()
            # where they differ at all, it is by the last bit of the dtype, or of the float32 sum before a cancellation
            tiny = 2e-6 * x.float().pow(2).mean(1, keepdim=True).sqrt()
            step = torch.finfo(dtype).eps * x.float().abs().clamp(min=torch.finfo(dtype).tiny)
            assert bool(((x.float() - y.float()).abs() <= torch.maximum(tiny, step)).all())
    assert differ <= 1e-4 * bits
    assert wrong <= 0.01 * count
    others = [block for block in range(BLOCKS) if block not in (10, 11, 12, 13)]
    assert all(torch.equal(now[others], then[others]) for now, then in zip(cache.layers, before, strict=True))


def test_the_kernels_read_what_numpy_wrote(paged: Any) -> None:
    cache = Cache(128, torch.bfloat16, "k4v3", paged)
    codec = get_codec("k4v3", 128, "numpy")
    for i, block in enumerate(IDS):
        opened = wire.open_block(wire.BlockHeader("k4v3", KEYS[i], PRINT, LAYERS, HEADS, TOKENS, 128))
        codec.encode(as_numpy(cache.vectors(block, 0)), "key", out=opened.key_codes)
        codec.encode(as_numpy(cache.vectors(block, 1)), "value", out=opened.value_codes)
        cache.codes[SLOTS[i]] = torch.from_numpy(opened.seal()).cuda()
    assert cache.decode([10, 11, 12, 13]) == [None] * 4
    assert torch.allclose(cache.vectors(10, 0), cache.vectors(3, 0), atol=float(cache.vectors(3, 0).abs().max()) / 3)


@pytest.mark.parametrize("tokens", [16, 20, 24, 128])
def test_blocks_of_any_number_of_tokens(paged: Any, tokens: int) -> None:
    cache = Cache(128, torch.bfloat16, "lloyd3", paged, tokens=tokens)
    assert cache.encode(IDS) == [None] * 4
    wanted = get_codec("lloyd3", 128, "numpy").encode(as_numpy(cache.vectors(7, 1)), "value")
    assert np.array_equal(cache.parsed(1).value_codes, wanted)


def test_damage_is_told_apart_and_not_written(paged: Any) -> None:
    cache = Cache(128, torch.bfloat16, "lloyd3", paged)
    cache.encode(IDS)
    headers = cache.headers.clone()
    cache.codes[SLOTS[0], 300] ^= 1
    headers[1, 50] ^= 1
    headers[2, 100] ^= 1
    before = [layer.clone() for layer in cache.layers]
    assert cache.decode([14, 15, 16, 17], headers) == ["checksum", "fingerprint", "key", None]
    kept = [block for block in range(BLOCKS) if block != 17]
    assert all(torch.equal(now[kept], then[kept]) for now, then in zip(cache.layers, before, strict=True))
    cache.codes[SLOTS[3], 8] ^= 1  # the checksum itself
    assert cache.decode([14, 15, 16, 17], headers)[3] == "checksum"


def test_extremes_are_encoded_as_numpy_does(paged: Any) -> None:
    cache = Cache(128, torch.bfloat16, "lloyd3", paged)
    block = cache.layers[0][3, :, 0, :128]
    for t, factor in enumerate((0.0, 1e-39, 1e37, 1e-30, 3e38, 1e-20, 1e18)):
        block[t] *= factor
    block[8] = 0
    block[8, 5] = 3.3e38
    block[9] = 3.38e38
    block.nan_to_num_()
    assert cache.encode(IDS) == [None] * 4
    wanted = get_codec("lloyd3", 128, "numpy").encode(as_numpy(cache.vectors(3, 0)), "key")
    assert np.array_equal(cache.parsed(0).key_codes, wanted)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_reported(paged: Any, number: float) -> None:
    cache = Cache(128, torch.float16, "lloyd3", paged)
    cache.layers[1][7, 9, 2, 128 + 3] = number
    assert cache.encode(IDS) == [None, "decode", None, None]
    assert cache.status[1].item() == HEADS * TOKENS + 2 * TOKENS + 9


def test_many_blocks_at_once(paged: Any) -> None:
    """More than fit on the GPU side by side; each has the codes that it gets alone."""
    cache = Cache(64, torch.bfloat16, "lloyd3", paged)
    cache.encode(IDS)
    alone = cache.codes[SLOTS[1], wire.HEADER.size :].clone()
    n = 6000
    codes = torch.zeros(n, cache.paged.nbytes, dtype=torch.uint8, device="cuda")
    headers = torch.from_numpy(wire.header_rows(cache.header, [i.to_bytes(32, "big") for i in range(n)])).cuda()
    status = torch.zeros(n, dtype=torch.int32, device="cuda")
    slots = torch.randperm(n, device="cuda")
    cache.paged.encode(torch.full((n,), 7, device="cuda"), codes, slots, headers, status)
    assert bool((status == GOOD).all())
    assert bool((codes[:, wire.HEADER.size :] == alone).all())


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_backend_for_arrays(head_dim: int, dtype: Any) -> None:
    codec, numpy_codec = get_codec("lloyd3", head_dim, "cuda"), get_codec("lloyd3", head_dim, "numpy")
    assert codec.compiled  # type: ignore[attr-defined]
    x = np.random.default_rng(1).standard_normal((1003, head_dim), np.float32)
    x = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype is np.uint16 else x
    codes = codec.encode(x)
    assert np.unpackbits(codes ^ numpy_codec.encode(x)).mean() <= 1e-4
    back, wanted = codec.decode(codes, 1003), numpy_codec.decode(codes, 1003)
    assert np.array_equal(back, wanted)
    assert codec.encode(x[:0]).size == 0
    x[500, 3] = 0x7F80 if dtype is np.uint16 else np.inf
    with pytest.raises(NonFiniteError, match="vector 500"):
        codec.encode(x)
    codes[2 * 77 : 2 * 77 + 2] = 0xFF
    with pytest.raises(NonFiniteError, match="vector 77"):
        codec.decode(codes, 1003)
