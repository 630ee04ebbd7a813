"""`manthan.codec.k3v3` (3 bits a number) by CUDA kernels. Bytes and numbers equal those of the codec on the CPU."""

from functools import lru_cache
from typing import NamedTuple

import torch

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat
from manthan.codec.gpu.cuda_codec import Job, addresses, as_bits, constants, exact_jobs, is_aligned, sources
from manthan.codec.gpu.nvrtc import ALONE, Module
from manthan.codec.gpu.paged import GOOD, Batch, PagedCodec, PagedLayout
from manthan.codec.k3v3 import BITS, LEVELS, THRESHOLDS
from manthan.codec.wire import align16

SOURCES = ("common.cu", "k3v3.cu", "exact.cu", "seal.cu")


class K3v3Plan(NamedTuple):
    """Arguments of the kernels for blocks with the same number of exact tokens, which are stored bit for bit.

    exact: jobs (a kernel's arguments) for what is stored bit for bit. coded: job for all further tokens; None without
    any. seal: job to write or check header and checksum.
    """

    exact: list[Job]
    coded: Job | None
    seal: Job


class K3v3PagedCodec(PagedCodec):
    """`PagedCodec` of keys and values, or of latents, on a CUDA device. Raises CompileError."""

    layout: PagedLayout

    def __init__(self, layout: PagedLayout, format: BlockFormat) -> None:
        super().__init__(layout, format)
        self._addresses, self._plans = addresses(layout), dict[int, K3v3Plan]()
        self._kernels = _module(layout.coded.head_dim, layout.dtype, self.device, is_aligned(layout))

    def encode(self, batch: Batch, buffer: torch.Tensor) -> None:
        plan = self._plan(batch.exact)
        batch.status.fill_(GOOD)
        for job in plan.exact:
            self._launch("encode_exact", job, batch, buffer, job.kinds * job.layers * job.heads)
        if plan.coded is not None:
            self._launch_coded("encode", plan.coded, batch, buffer)
        self._launch("seal", plan.seal, batch, buffer, ALONE)

    def verify(self, batch: Batch, buffer: torch.Tensor) -> None:
        self._launch("verify", self._plan(batch.exact).seal, batch, buffer, ALONE)

    def decode(self, batch: Batch, buffer: torch.Tensor) -> None:
        plan = self._plan(batch.exact)
        for job in plan.exact:
            self._launch("decode_exact", job, batch, buffer, job.kinds * job.layers * job.heads)
        if plan.coded is not None:
            self._launch_coded("decode", plan.coded, batch, buffer)

    def _launch_coded(self, name: str, job: Job, batch: Batch, buffer: torch.Tensor) -> None:
        """Launch a kernel with a warp for each vector."""
        self._launch(name, job, batch, buffer, job.kinds * job.layers * job.heads * job.tokens)

    def _launch(self, name: str, job: Job, batch: Batch, buffer: torch.Tensor, warps: int) -> None:
        """Launch a kernel. warps: most warps that have work in one KV block."""
        of_batch = job.of(batch, buffer)
        self._kernels.launch(name, of_batch, of_batch.n * warps)

    def _plan(self, exact: int) -> K3v3Plan:
        if exact not in self._plans:
            layout, form, coded = self.layout.coded, self.form(exact), None
            kept = exact_jobs(self.layout, self._addresses, form, exact)
            if exact < layout.tokens:
                tokens, kinds = layout.tokens - exact, len(layout.ats)
                starts = form.starts[-kinds:]
                coded = Job.plan(layout, self._addresses, form, exact, tokens, (*starts, *starts)[:2])
                vectors = len(layout.caches) * layout.heads * tokens
                for at, start in enumerate(starts):
                    planes = start + align16(2 * vectors)
                    coded.ends[2 * at] = start + 2 * vectors
                    coded.ends[2 * at + 1] = planes + vectors * BITS * layout.head_dim // 8
            self._plans[exact] = K3v3Plan(kept, coded, coded or kept[-1])
        return self._plans[exact]


@lru_cache
def _module(head_dim: int, dtype: Dtype, device: torch.device, aligned: bool) -> Module:
    """Return the kernels for vectors of this size and dtype. Raises CompileError."""
    levels, cuts = LEVELS, THRESHOLDS
    words = {"LEVELS": as_bits(levels), "CUTS": as_bits(cuts)}
    return Module(f"{constants(head_dim, dtype, aligned, words=words)}\n{sources(SOURCES)}", device)
