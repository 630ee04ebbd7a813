"""The CUDA kernels of k3v3 against numpy: the same codes and numbers, nothing else touched."""

import numpy as np
import pytest
import torch

from manthan.codec.block import BlockFormat
from manthan.codec.gpu.k3v3_codec import K3v3PagedCodec
from manthan.codec.gpu.paged import GOOD, Batch, PagedCodec, PagedLayout, status_cause
from manthan.codec.model import ModelFacts
from manthan.codec.rope import Rope

LAYERS, HEADS, TOKENS, BLOCKS = 2, 3, 16, 24
PRINT = b"f" * 16
IDS, SLOTS = [3, 7, 1, 20], [2, 0, 5, 1]
KEYS = [bytes([i]) * 32 for i in range(4)]
FIRST_TOKENS = [100, 0, 16, 2**40]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Cache:
    """A paged cache of random vectors, heads beside each other, and a paged codec over it with a buffer full of 170.

    exact: how many first tokens of each block are kept as they are.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype, tokens: int = TOKENS, exact: int = 0) -> None:
        torch.manual_seed(head_dim)
        self.head_dim, self.exact = head_dim, exact
        shape = (BLOCKS, tokens, HEADS, 2 * head_dim)
        spread = torch.logspace(-2, 2, BLOCKS, device="cuda")[:, None, None, None]
        self.layers = tuple((torch.randn(shape, device="cuda") * spread).to(dtype) for _ in range(LAYERS))
        strides = (tokens * HEADS * 2 * head_dim, 2 * head_dim, HEADS * 2 * head_dim)
        layout = PagedLayout(self.layers, HEADS, tokens, head_dim, *strides, key_at=0, value_at=head_dim)
        rope = Rope(tuple(1e4 ** -np.arange(0, 1, 2 / head_dim)))
        self.format = BlockFormat("k3v3", layout.shape, PRINT, group=2, facts=ModelFacts(rope))
        self.paged: PagedCodec = K3v3PagedCodec(layout, self.format)
        self.form = self.paged.form(exact)
        self.places = [slot * (self.form.nbytes + 48) for slot in SLOTS]
        self.codes = torch.full((8 * (self.form.nbytes + 48),), 170, dtype=torch.uint8, device="cuda")

    def batch(self, ids: list[int]) -> Batch:
        return self.paged.batch(self.exact, KEYS, ids, FIRST_TOKENS, self.places)

    def encode(self, ids: list[int]) -> list[str | None]:
        self.encoded = self.batch(ids)
        self.paged.encode(self.encoded, self.codes)
        return [status_cause(status) for status in self.encoded.status.tolist()]

    def decode(self, ids: list[int], headers: torch.Tensor | None = None) -> list[str | None]:
        batch = self.batch(ids)
        batch = batch if headers is None else batch._replace(headers=headers)
        self.paged.verify(batch, self.codes)
        self.paged.decode(batch, self.codes)
        return [status_cause(status) for status in batch.status.tolist()]

    def block(self, i: int) -> torch.Tensor:
        """The i-th encoded block, as a view."""
        return self.codes[self.places[i] :][: self.form.nbytes]

    def numbers(self, block: int) -> list[np.ndarray]:
        """Keys and values of a paged block, [layers, heads, tokens, head_dim] as numpy has them."""
        both = torch.stack([layer[block].transpose(0, 1) for layer in self.layers]).cpu()
        both = both.view(torch.uint16) if both.dtype is torch.bfloat16 else both
        return [part.numpy() for part in both.split(self.head_dim, -1)]

    def by_numpy(self, i: int) -> np.ndarray:
        """The i-th block as numpy encodes it."""
        numbers = self.numbers(IDS[i])
        return self.format.encode(*numbers, key=KEYS[i], first_token=FIRST_TOKENS[i], exact=self.exact)


def as_floats(numbers: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(np.array(numbers))
    return (x.view(torch.bfloat16) if x.dtype is torch.uint16 else x).float()


def check(cache: Cache, dtype: torch.dtype) -> None:
    """Encode and decode, and compare all of it with numpy: exact tokens bit for bit, codes but for rare roundings."""
    assert cache.encode(IDS) == [None] * 4
    exact, start, differ, bits, wrong, count = cache.exact, cache.form.header.nbytes, 0, 0, 0, 0
    before = [layer.clone() for layer in cache.layers]
    targets = [10, 11, 12, 13]
    assert cache.decode(targets) == [None] * 4
    coded_from = cache.form.starts[-2] if exact < cache.layers[0].shape[1] else cache.form.nbytes
    for i, target in enumerate(targets):
        found, wanted = cache.block(i).cpu().numpy(), cache.by_numpy(i)
        assert np.array_equal(found[16:coded_from], wanted[16:coded_from])  # header and exact tokens
        differ += int(np.unpackbits(wanted[start:] ^ found[start:]).sum())
        bits += 8 * (len(wanted) - start)
        for x, y in zip(cache.format.decode(found, key=KEYS[i]), cache.numbers(target), strict=True):
            assert x[:, :, :exact].tobytes() == y[:, :, :exact].tobytes()
            wrong += int((x != y).sum())
            count += x.size
            # where they differ at all, it is by the last bit of the dtype, or of the float32 sum before a cancellation
            x, y = as_floats(x), as_floats(y)
            tiny = 2e-6 * x.pow(2).mean(-1, keepdim=True).sqrt()
            step = torch.finfo(dtype).eps * x.abs().clamp(min=torch.finfo(dtype).tiny)
            assert bool(((x - y).abs() <= torch.maximum(tiny, step)).all())
    assert differ <= 1e-4 * bits
    assert wrong <= 0.01 * count
    others = [block for block in range(BLOCKS) if block not in targets]
    assert all(torch.equal(now[others], then[others]) for now, then in zip(cache.layers, before, strict=True))
    outside = torch.ones(len(cache.codes), dtype=torch.bool)
    for place in cache.places:
        outside[place : place + cache.form.nbytes] = False
    assert bool((cache.codes.cpu()[outside] == 170).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512])
def test_codes_are_numpys_and_come_back_as_numpys_numbers(head_dim: int, dtype: torch.dtype) -> None:
    check(Cache(head_dim, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [1, 4, 8, 15, 16])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 112, 128, 256])
def test_so_are_those_of_blocks_with_exact_tokens(head_dim: int, exact: int, dtype: torch.dtype) -> None:
    check(Cache(head_dim, dtype, exact=exact), dtype)


@pytest.mark.parametrize("tokens", [16, 20, 24, 128])
@pytest.mark.parametrize("exact", [0, 4])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_blocks_of_any_number_of_tokens(head_dim: int, tokens: int, exact: int) -> None:
    check(Cache(head_dim, torch.bfloat16, tokens=tokens, exact=exact), torch.bfloat16)


@pytest.mark.parametrize("exact", [0, 3, 8, 16])
def test_the_kernels_read_what_numpy_wrote(exact: int) -> None:
    cache = Cache(128, torch.bfloat16, exact=exact)
    for i in range(4):
        cache.block(i)[:] = torch.from_numpy(cache.by_numpy(i))
    assert cache.decode([10, 11, 12, 13]) == [None] * 4
    for i, target in enumerate((10, 11, 12, 13)):
        wanted = cache.format.decode(cache.by_numpy(i), key=KEYS[i])
        for x, y in zip(wanted, cache.numbers(target), strict=True):
            assert x[:, :, :exact].tobytes() == y[:, :, :exact].tobytes()
            assert (x != y).mean() <= 0.01
            assert torch.allclose(as_floats(x), as_floats(y), rtol=0.01, atol=1e-4 * float(as_floats(x).abs().max()))


@pytest.mark.parametrize("exact", [2, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 3])
def test_exact_tokens_may_be_anything(dtype: torch.dtype, exact: int, offset: int) -> None:
    """Not finite, denormal, minus zero; and caches that do not begin at a multiple of 16 bytes."""
    cache = Cache(64, dtype, exact=exact)
    shape = cache.layers[0].shape
    moved = []
    for layer in cache.layers:
        noise = torch.randint(0, 256, (layer.nbytes,), dtype=torch.uint8, device="cuda").view(dtype).view(shape)
        room = torch.zeros(layer.numel() + offset, dtype=dtype, device="cuda")
        moved.append(room[offset:].view(shape))
        moved[-1].copy_(layer)
        moved[-1][:, :exact].view(torch.uint8).copy_(noise[:, :exact].view(torch.uint8))
    layout = cache.paged.layout
    layout = PagedLayout(tuple(moved), *(getattr(layout, name) for name in list(layout.__dataclass_fields__)[1:]))
    cache.layers, cache.paged = tuple(moved), K3v3PagedCodec(layout, cache.format)
    assert cache.encode(IDS) == [None] * 4
    assert cache.decode([10, 11, 12, 13]) == [None] * 4
    for block, target in zip(IDS, (10, 11, 12, 13), strict=True):
        for then, now in zip(cache.numbers(block), cache.numbers(target), strict=True):
            assert then[:, :, :exact].tobytes() == now[:, :, :exact].tobytes()


@pytest.mark.parametrize("exact", [0, 4, 16])
def test_damage_is_told_apart_and_not_written(exact: int) -> None:
    cache = Cache(128, torch.bfloat16, exact=exact)
    cache.encode(IDS)
    headers = cache.encoded.headers.clone()
    cache.block(0)[cache.form.nbytes - 5] ^= 1
    headers[1, 20] ^= 1
    headers[2, 70] ^= 1
    before = [layer.clone() for layer in cache.layers]
    assert cache.decode([14, 15, 16, 17], headers) == ["checksum", "fingerprint", "key", None]
    kept = [block for block in range(BLOCKS) if block != 17]
    assert all(torch.equal(now[kept], then[kept]) for now, then in zip(cache.layers, before, strict=True))
    cache.block(3)[8] ^= 1  # the checksum itself
    assert cache.decode([14, 15, 16, 17], headers)[3] == "checksum"
    headers = cache.encoded.headers.clone()
    headers[0, -1] ^= 1  # the last entry's end
    cache.encode(IDS)
    assert cache.decode([14, 15, 16, 17], headers) == ["size", None, None, None]


@pytest.mark.parametrize("head_dim", [80, 112, 128])
def test_extremes_are_encoded_as_numpy_does(head_dim: int) -> None:
    cache = Cache(head_dim, torch.bfloat16)
    block = cache.layers[0][3, :, 0, :head_dim]
    for t, factor in enumerate((0.0, 1e-39, 1e37, 1e-30, 3e38, 1e-20, 1e18)):
        block[t] *= factor
    block[8] = 0
    block[8, 5] = 3.3e38
    block[9] = 3.38e38
    block.nan_to_num_()
    assert cache.encode(IDS) == [None] * 4
    assert np.array_equal(cache.block(0).cpu().numpy(), cache.by_numpy(0))


@pytest.mark.parametrize("exact", [0, 5])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_reported(number: float, exact: int) -> None:
    cache = Cache(128, torch.float16, exact=exact)
    cache.layers[1][7, 9, 2, 128 + 3] = number
    assert cache.encode(IDS) == [None, "decode", None, None]
    coded = TOKENS - exact
    assert cache.encoded.status[1].item() == HEADS * coded + 2 * coded + 9 - exact


@pytest.mark.parametrize("exact", [0, 3])
def test_many_blocks_at_once(exact: int) -> None:
    """More than fit on the GPU side by side; each has the codes that it gets alone."""
    cache = Cache(64, torch.bfloat16, exact=exact)
    cache.encode(IDS)
    start, nbytes = cache.form.header.nbytes, cache.form.nbytes
    alone = cache.block(1)[start:].clone()
    n = 6000
    codes = torch.zeros(n * nbytes, dtype=torch.uint8, device="cuda")
    keys, places = (
        [i.to_bytes(32, "big") for i in range(n)],
        (nbytes * np.random.default_rng(1).permutation(n)).tolist(),
    )
    batch = cache.paged.batch(exact, keys, [7] * n, list(range(n)), places)
    cache.paged.encode(batch, codes)
    assert bool((batch.status == GOOD).all())
    assert bool((codes.view(n, nbytes)[:, start:] == alone).all())
