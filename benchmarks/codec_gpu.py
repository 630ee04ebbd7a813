"""Speed of the codecs' CUDA kernels on paged KV, compared with a device copy; run by `codec.py --backend cuda`.

The bf16 caches have the shapes of Qwen3-8B (36 layers, 8 KV heads of 128) and SmolLM2-135M (30 layers, 3 heads of 64),
in KV blocks of 16 tokens. KV blocks in random order are encoded to separate offsets, verified by checksum, and decoded.
Each sample is LAUNCHES calls between two CUDA events.

Calibrated codecs need a profile (statistics of a model's KV). They get a made-up one, which the cached KV fits. They
multiply by matrices, so a vector's time depends on heads too.
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
from manthan.codec.cpu.klt import EXACT, KltPreset
from manthan.codec.gpu.k3v3_codec import K3v3PagedCodec
from manthan.codec.gpu.klt_codec import KltPagedCodec
from manthan.codec.gpu.paged import PagedLayout
from manthan.codec.gpu.wht_codec import WhtPagedCodec
from manthan.codec.k3v3 import K3v3Preset
from manthan.codec.model import ModelFacts
from manthan.codec.registry import PRESETS, codec_names
from manthan.codec.wht import WhtPreset

TOKENS = 16
SHAPES = ((36, 8, 128), (30, 3, 64))
"""Layers, KV heads and head_dim of the two models."""
MI = 1 << 20
LAUNCHES = 10


@dataclass(frozen=True)
class GpuResult:
    """Speed of an operation. vectors: number of keys and values in a call. nbytes: bytes of a call's input and output.

    median, slowest, fastest: G vectors/s. of_copy: the operation's bytes a second, as a share of a device copy's.
    """

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
    """Codec and cache to measure. shape: layers, KV heads, head_dim. vectors: approximate number of vectors."""

    codec: str
    shape: tuple[int, int, int]
    vectors: int

    @classmethod
    def of(cls, codec: str) -> "list[Work]":
        """Return a codec's work: 256 Ki, 1 Mi and 4 Mi vectors of each of SHAPES."""
        return [cls(codec, shape, vectors) for shape in SHAPES for vectors in (MI // 4, MI, 4 * MI)]

    @classmethod
    def all(cls) -> "list[Work]":
        """Return the work of all codecs with kernels: 1 Mi vectors of each of SHAPES."""
        return [cls(codec, shape, MI) for codec in codec_names() if _has_kernels(codec) for shape in SHAPES]


def _has_kernels(codec: str) -> bool:
    preset = PRESETS.get(codec)
    return preset is not None and not (isinstance(preset, KltPreset) and preset.level == EXACT)


class Meter:
    """Times calls of kernels. copy: bytes a second that a device copy reads and writes.

    once: True to time nothing. After a warm-up, each call then runs once on a separate CUDA stream, under a profiler.
    """

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
    """Return the mean seconds of a call, for each repeat of LAUNCHES calls. The first LAUNCHES calls do not count."""
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
    """Return the bytes that a device copy of 1 GiB reads and writes in a second."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(seconds(lambda: target.copy_(source), repeats))


def measure(work: Work, meter: Meter) -> Iterator[GpuResult]:
    """Yield the speeds of encoding, of verifying and of decoding whole KV blocks."""
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
    paged = {K3v3Preset: K3v3PagedCodec, KltPreset: KltPagedCodec, WhtPreset: WhtPagedCodec}
    codec = paged[type(PRESETS[work.codec])](layout, format)
    room = codec.form(0).nbytes
    buffer = torch.empty(blocks * room, dtype=torch.uint8, device="cuda")
    ids = torch.randperm(blocks).tolist()
    keys_of = [i.to_bytes(32, "big") for i in range(blocks)]
    places = (torch.randperm(blocks) * room).tolist()
    batch = codec.batch(0, keys_of, ids, [TOKENS * i for i in ids], places)
    codec.encode(batch, buffer)
    n, encoded = blocks * 2 * layers * heads * TOKENS, int(batch.nbytes.sum())
    both = n * 2 * head_dim + encoded
    for operation, moved in (("encode", both), ("verify", encoded), ("decode", both)):
        yield meter.result(
            work, operation, n, moved, lambda operation=operation: getattr(codec, operation)(batch, buffer)
        )


def table(results: list[GpuResult], title: str) -> Table:
    """Return a table with a row for each result."""
    caption = "G vectors/s: median (slowest-fastest); TB/s in and out, and as a share of a copy's"
    made = Table(title=title, caption=caption, box=SIMPLE, padding=0)
    for column in ("codec", "heads", "D", "vectors", "", "G/s", "TB/s", "of copy"):
        made.add_column(column, justify="right", no_wrap=True)
    for r in results:
        rate = f"{r.median:.2f} ({r.slowest:.2f}-{r.fastest:.2f})"
        moved = f"{r.median * 1e9 * r.nbytes / r.vectors / 1e12:.2f}"
        shape = (r.codec, str(r.heads), str(r.head_dim), f"{r.vectors:,}")
        made.add_row(*shape, r.operation, rate, moved, f"{r.of_copy:.0%}")
    return made
