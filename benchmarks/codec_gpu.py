"""The CUDA kernels over a paged cache, beside the GPU's own copy; what `codec.py --backend cuda` runs.

A cache of Qwen3-8B's shape in pages of 16 tokens: 36 layers of 8 KV heads, head size 128, bf16. So many blocks, in
random order, are encoded to as many places and decoded back. Each sample is ten launches between two events.

Codecs of whole sections have numbers that fit a profile which was made up, and is theirs where they need one; SmolLM2's
shape besides: 30 layers of 3 heads of 64. What calibrated ones take depends on how many numbers are multiplied by each:
heads * head_dim.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.box import SIMPLE
from rich.table import Table

from manthan.benchmarks import made_up
from manthan.codec.block import BlockFormat
from manthan.codec.gpu.cuda_codec import CudaPagedCodec
from manthan.codec.gpu.klt_codec import KltPagedCodec
from manthan.codec.gpu.paged import PagedLayout
from manthan.codec.gpu.wht_codec import WhtPagedCodec
from manthan.codec.model import ModelFacts
from manthan.codec.registry import needs_profile

LAYERS, HEADS, TOKENS = 36, 8, 16
SHAPES = ((36, 8, 128), (30, 3, 64))
"""Layers, heads and head sizes."""
LAUNCHES = 10


@dataclass(frozen=True)
class GpuResult:
    """One figure. median, slowest, fastest: G vectors/s. of_copy: bytes read and written a second, as a share of what
    a device-to-device copy does."""

    operation: str
    head_dim: int
    vectors: int
    median: float
    slowest: float
    fastest: float
    of_copy: float


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Of one launch, for each repeat."""
    for _ in range(LAUNCHES):
        call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        for _ in range(LAUNCHES):
            call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 / LAUNCHES for begin, end in pairs]


def copy_bandwidth(repeats: int) -> float:
    """Bytes read and written a second by a copy of a GiB on the device."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(seconds(lambda: target.copy_(source), repeats))


def measure(name: str, head_dim: int, vectors: int, copy: float, repeats: int) -> Iterator[GpuResult]:
    """Encode, decode, and the two passes over the codes for header and checksum."""
    blocks = max(1, vectors // (2 * LAYERS * HEADS * TOKENS))
    shape = (blocks + 8, TOKENS, HEADS, 2 * head_dim)
    caches = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS))
    row = HEADS * 2 * head_dim
    layout = PagedLayout(caches, HEADS, TOKENS, head_dim, TOKENS * row, 2 * head_dim, row, key_at=0, value_at=head_dim)
    codec = CudaPagedCodec(layout, BlockFormat(name, layout.shape, bytes(16)))
    nbytes = codec.form(0).nbytes
    codes = torch.empty(blocks * nbytes, dtype=torch.uint8, device="cuda")
    ids, places = (torch.randperm(blocks) + 1).tolist(), (torch.randperm(blocks) * nbytes).tolist()
    keys, first_tokens = [i.to_bytes(32, "big") for i in range(blocks)], range(0, TOKENS * blocks, TOKENS)
    batch = codec.batch(0, keys, ids, first_tokens, places)
    codec.encode(batch, codes)
    n = blocks * 2 * LAYERS * HEADS * TOKENS
    both = n * 2 * head_dim + blocks * nbytes
    for operation, moved in (("encode", both), ("decode", both), ("seal", codes.nbytes), ("verify", codes.nbytes)):
        taken = seconds(lambda operation=operation: codec.launch(operation, batch, codes), repeats)
        median = statistics.median(taken)
        rates = [n / each / 1e9 for each in (median, max(taken), min(taken))]
        yield GpuResult(operation, head_dim, n, *rates, moved / median / copy)


def measure_sections(
    name: str, shape: tuple[int, int, int], vectors: int, copy: float, repeats: int
) -> Iterator[GpuResult]:
    """Encode, verify and decode whole blocks of layers, heads, head size: `shape`."""
    layers, heads, head_dim = shape
    blocks = max(1, vectors // (2 * layers * heads * TOKENS))
    profile = made_up.profile(*shape, made_up.rope_of(head_dim))
    keys, values = made_up.kv(profile, blocks * TOKENS, torch.device("cuda"))
    caches = tuple(
        torch.cat((k, v), 2).bfloat16().view(heads, blocks, TOKENS, 2 * head_dim).permute(1, 2, 0, 3).contiguous()
        for k, v in zip(keys, values, strict=True)
    )
    row = heads * 2 * head_dim
    layout = PagedLayout(caches, heads, TOKENS, head_dim, TOKENS * row, 2 * head_dim, row, key_at=0, value_at=head_dim)
    format = BlockFormat(name, layout.shape, bytes(16), facts=ModelFacts(profile.info.rope, profile))
    codec = KltPagedCodec(layout, format) if needs_profile(name) else WhtPagedCodec(layout, format)
    room = codec.form(0).nbytes
    codes = torch.empty(blocks * room, dtype=torch.uint8, device="cuda")
    ids = torch.randperm(blocks).tolist()
    keys_of = [i.to_bytes(32, "big") for i in range(blocks)]
    places = (torch.randperm(blocks) * room).tolist()
    batch = codec.batch(0, keys_of, ids, [TOKENS * i for i in ids], places)
    codec.encode(batch, codes)
    n, encoded = blocks * 2 * layers * heads * TOKENS, int(batch.nbytes.sum())
    both = n * 2 * head_dim + encoded
    for operation, moved in (("encode", both), ("verify", encoded), ("decode", both)):
        taken = seconds(lambda operation=operation: getattr(codec, operation)(batch, codes), repeats)
        median = statistics.median(taken)
        rates = [n / each / 1e9 for each in (median, max(taken), min(taken))]
        yield GpuResult(operation, head_dim, n, *rates, moved / median / copy)


def table(results: list[GpuResult], title: str) -> Table:
    """A row for each operation and size."""
    made = Table(title=title, caption="G vectors/s: median (slowest-fastest)", box=SIMPLE, padding=0)
    for column in ("D", "vectors", "", "G/s", "of copy"):
        made.add_column(column, justify="right", no_wrap=True)
    for r in results:
        rate = f"{r.median:.2f} ({r.slowest:.2f}-{r.fastest:.2f})"
        made.add_row(str(r.head_dim), f"{r.vectors:,}", r.operation, rate, f"{r.of_copy:.0%}")
    return made
