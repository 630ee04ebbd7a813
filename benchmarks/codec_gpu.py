"""The CUDA kernels over a paged cache, beside the GPU's own copy; what `codec.py --backend cuda` runs.

A cache of Qwen3-8B's shape in pages of 16 tokens: 36 layers of 8 KV heads, bf16. So many blocks, in random order, are
encoded to as many places and decoded back. Each sample is ten launches between two events.

Codecs of whole sections have numbers that fit a profile which was made up, and is theirs where they need one; SmolLM2's
shape besides: 30 layers of 3 heads of 64. What calibrated ones take depends on how many numbers are multiplied by each:
heads * head_dim. `product` is that alone, by cuBLAS: 0 bytes are counted for it.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
from manthan.codec.profile import PRESETS
from manthan.codec.registry import SPECS, needs_profile
from manthan.codec.wht import PRESETS as STEPPED

LAYERS, HEADS, TOKENS = 36, 8, 16
SHAPES = ((36, 8, 128), (30, 3, 64))
"""Layers, heads and head sizes."""
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
MI = 1 << 20
LAUNCHES = 10


@dataclass(frozen=True)
class GpuResult:
    """One figure. median, slowest, fastest: G vectors/s. nbytes: read and written by a launch. of_copy: those a second,
    as a share of what a device-to-device copy does."""

    codec: str
    operation: str
    heads: int
    head_dim: int
    vectors: int
    nbytes: int
    median: float
    slowest: float
    fastest: float
    of_copy: float


class Work(NamedTuple):
    """What is measured. shape: layers, heads, head size."""

    codec: str
    shape: tuple[int, int, int]
    vectors: int

    @classmethod
    def of(cls, codec: str) -> "list[Work]":
        """Of one codec, 256 Ki to 4 Mi vectors of SHAPES; fixed rates at all head sizes."""
        sizes = (MI // 4, MI, 4 * MI)
        if codec in SPECS:
            three = [cls(codec, SHAPES[0], vectors) for vectors in sizes]
            return three + [cls(codec, (LAYERS, HEADS, dim), MI) for dim in HEAD_DIMS if dim != SHAPES[0][2]]
        return [cls(codec, shape, vectors) for shape in SHAPES for vectors in sizes]

    @classmethod
    def all(cls) -> "list[Work]":
        """Of every codec with kernels, a Mi of vectors."""
        rotated = [spec.name for spec in SPECS.values() if spec.rotated]
        alone = [cls(codec, (LAYERS, HEADS, dim), MI) for codec in rotated for dim in HEAD_DIMS]
        return alone + [cls(codec, shape, MI) for codec in (*STEPPED, *PRESETS) for shape in SHAPES]


class Meter:
    """Times launches. once: runs each once instead, on a stream of its own, for a profiler that is started there."""

    def __init__(self, repeats: int, *, once: bool = False) -> None:
        self.repeats, self._once = repeats, once
        self.copy = 1.0 if once else copy_bandwidth(repeats)

    def result(self, work: Work, operation: str, n: int, moved: int, call: Callable[[], object]) -> GpuResult:
        taken = [self._under_profiler(call)] if self._once else seconds(call, self.repeats)
        median = statistics.median(taken)
        rates = [n / each / 1e9 for each in (median, max(taken), min(taken))]
        _, heads, head_dim = work.shape
        return GpuResult(work.codec, operation, heads, head_dim, n, moved, *rates, moved / median / self.copy)

    def _under_profiler(self, call: Callable[[], object]) -> float:
        call()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        return 1.0


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


def measure(work: Work, meter: Meter) -> Iterator[GpuResult]:
    """Each of the codec's passes over so many vectors."""
    return _vectors(work, meter) if work.codec in SPECS else _sections(work, meter)


def _vectors(work: Work, meter: Meter) -> Iterator[GpuResult]:
    """Encode, decode, and the two passes over the codes for header and checksum."""
    layers, heads, head_dim = work.shape
    blocks = max(1, work.vectors // (2 * layers * heads * TOKENS))
    shape = (blocks + 8, TOKENS, heads, 2 * head_dim)
    caches = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers))
    row = heads * 2 * head_dim
    layout = PagedLayout(caches, heads, TOKENS, head_dim, TOKENS * row, 2 * head_dim, row, key_at=0, value_at=head_dim)
    codec = CudaPagedCodec(layout, BlockFormat(work.codec, layout.shape, bytes(16)))
    nbytes = codec.form(0).nbytes
    codes = torch.empty(blocks * nbytes, dtype=torch.uint8, device="cuda")
    ids, places = (torch.randperm(blocks) + 1).tolist(), (torch.randperm(blocks) * nbytes).tolist()
    keys, first_tokens = [i.to_bytes(32, "big") for i in range(blocks)], range(0, TOKENS * blocks, TOKENS)
    batch = codec.batch(0, keys, ids, first_tokens, places)
    codec.encode(batch, codes)
    n = blocks * 2 * layers * heads * TOKENS
    both = n * 2 * head_dim + blocks * nbytes
    for operation, moved in (("encode", both), ("decode", both), ("seal", codes.nbytes), ("verify", codes.nbytes)):
        yield meter.result(work, operation, n, moved, lambda operation=operation: codec.launch(operation, batch, codes))


def _sections(work: Work, meter: Meter) -> Iterator[GpuResult]:
    """Encode, verify and decode whole blocks."""
    layers, heads, head_dim = work.shape
    blocks = max(1, work.vectors // (2 * layers * heads * TOKENS))
    profile = made_up.profile(*work.shape, made_up.rope_of(head_dim))
    keys, values = made_up.kv(profile, blocks * TOKENS, torch.device("cuda"))
    caches = tuple(
        torch.cat((k, v), 2).bfloat16().view(heads, blocks, TOKENS, 2 * head_dim).permute(1, 2, 0, 3).contiguous()
        for k, v in zip(keys, values, strict=True)
    )
    row = heads * 2 * head_dim
    layout = PagedLayout(caches, heads, TOKENS, head_dim, TOKENS * row, 2 * head_dim, row, key_at=0, value_at=head_dim)
    format = BlockFormat(work.codec, layout.shape, bytes(16), facts=ModelFacts(profile.info.rope, profile))
    codec = KltPagedCodec(layout, format) if needs_profile(work.codec) else WhtPagedCodec(layout, format)
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
        yield meter.result(
            work, operation, n, moved, lambda operation=operation: getattr(codec, operation)(batch, codes)
        )
    if needs_profile(work.codec):
        vectors = torch.randn((layers, blocks * TOKENS, heads * head_dim), device="cuda", dtype=torch.float16)
        matrices = torch.randn((layers, heads * head_dim, heads * head_dim), device="cuda", dtype=torch.float16)
        yield meter.result(work, "product", n // 2, 0, lambda: torch.bmm(vectors, matrices))


def table(results: list[GpuResult], title: str) -> Table:
    """A row for each operation and size."""
    caption = "G vectors/s: median (slowest-fastest); TB read and written a second, and of a copy's"
    made = Table(title=title, caption=caption, box=SIMPLE, padding=0)
    for column in ("codec", "heads", "D", "vectors", "", "G/s", "TB/s", "of copy"):
        made.add_column(column, justify="right", no_wrap=True)
    for r in results:
        rate = f"{r.median:.2f} ({r.slowest:.2f}-{r.fastest:.2f})"
        moved = f"{r.median * 1e9 * r.nbytes / r.vectors / 1e12:.2f}"
        shape = (r.codec, str(r.heads), str(r.head_dim), f"{r.vectors:,}")
        made.add_row(*shape, r.operation, rate, moved, f"{r.of_copy:.0%}")
    return made
