"""`manthan.codec.k3v3` (3 bits a number) by CUDA kernels. Bytes and numbers equal those of the codec on the CPU."""

import torch

from manthan.codec.block import BlockFormat
from manthan.codec.gpu.cuda_codec import CudaCodec, Job, as_bits
from manthan.codec.gpu.paged import Batch, Form, PagedLayout
from manthan.codec.k3v3 import BITS, LEVELS, THRESHOLDS
from manthan.codec.wire import align16

SOURCES = ("common.cu", "k3v3.cu", "exact.cu", "seal.cu")


class K3v3PagedCodec(CudaCodec[Job]):
    """`PagedCodec` of keys and values, or of latents, on a CUDA device. Raises CompileError."""

    def __init__(self, layout: PagedLayout, format: BlockFormat) -> None:
        words = {"LEVELS": as_bits(LEVELS), "CUTS": as_bits(THRESHOLDS)}
        super().__init__(layout, format, None, SOURCES, words=words)

    def _lossy(self, form: Form, exact: int) -> Job:
        layout = self._coded
        kinds, tokens = len(layout.ats), range(exact, layout.tokens)
        starts = form.starts[-kinds:]
        job = Job.fixed(layout, self._addresses, form, tokens, (*starts, *starts)[:2])
        vectors = len(layout.caches) * layout.heads * len(tokens)
        for at, start in enumerate(starts):
            planes = start + align16(2 * vectors)
            job.ends[2 * at] = start + 2 * vectors
            job.ends[2 * at + 1] = planes + vectors * BITS * layout.head_dim // 8
        return job

    def _encode_lossy(self, lossy: Job, batch: Batch, buffer: torch.Tensor) -> None:
        self._launch_coded("encode", lossy, batch, buffer)
        self._launch_alone("seal", lossy, batch, buffer)

    def _verify_lossy(self, lossy: Job, batch: Batch, buffer: torch.Tensor) -> None:
        self._launch_alone("verify", lossy, batch, buffer)

    def _decode_lossy(self, lossy: Job, batch: Batch, buffer: torch.Tensor) -> None:
        self._launch_coded("decode", lossy, batch, buffer)

    def _launch_coded(self, name: str, lossy: Job, batch: Batch, buffer: torch.Tensor) -> None:
        """Launch a kernel with a warp for each vector."""
        job = lossy.of(batch, buffer)
        self._kernels.launch(name, job, job.n * job.kinds * job.layers * job.heads * job.tokens)
