"""The cuda backend for arrays in the CPU's memory: copied to the GPU, worked on by the paged kernels, copied back.

What is already on the GPU is better left there: see `manthan.codec.paged`.
"""

from functools import lru_cache

import numpy as np
import torch

from manthan.codec import torch_backend
from manthan.codec.base import Codec, CodecSpec, Codes, Vectors, align16
from manthan.codec.errors import UnknownBackendError
from manthan.codec.nvrtc import CompileError, Module
from manthan.codec.paged import GOOD
from manthan.codec.paged_cuda import Job, module
from manthan.codec.tables import tables

AT_ONCE = 1 << 20
"""Vectors: offsets within what the kernels take for one block must fit 32 bits."""


class CudaCodec(Codec):
    """Runs on the current CUDA device, with the CUDA kernels or, where they cannot be compiled, in plain PyTorch.

    Raises UnknownBackendError where there is no such device.
    """

    backend = "cuda"

    def __init__(self, spec: CodecSpec, head_dim: int) -> None:
        super().__init__(spec, head_dim)
        if not torch.cuda.is_available():
            raise UnknownBackendError(
                'backend "cuda" cannot run here, PyTorch finds no CUDA GPU: use "numpy" or "auto".'
            )
        self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def compiled(self) -> bool:
        """Whether calls run the CUDA kernels."""
        return self._module(self.spec.key_bits, torch.bfloat16) is not None

    def warm_up(self) -> None:
        """Compile the kernels: a second or two."""
        for bits in {self.spec.key_bits, self.spec.value_bits}:
            self._module(bits, torch.bfloat16)

    def _module(self, bits: int, dtype: torch.dtype) -> Module | None:
        return _module(self.head_dim, bits, self.spec.rotated, self.spec.unbiased, dtype, self._device)

    def _encode(self, x: Vectors, bits: int, scales: Codes, planes: Codes) -> int:
        width = bits * self.head_dim // 8
        for a in range(0, len(x), AT_ONCE):
            b = min(len(x), a + AT_ONCE)
            there = self._upload(x[a:b])
            found_scales, found_planes, bad = self._encode_there(there, bits)
            if bad >= 0:
                return a + bad
            scales[2 * a : 2 * b] = found_scales.cpu().numpy()
            planes[a * width : b * width] = found_planes.cpu().numpy()
        return -1

    def _encode_there(self, x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        n, kernels = len(x), self._module(bits, x.dtype)
        if kernels is None:
            made = tables(self.head_dim, bits, self.spec.rotated, self.spec.unbiased)
            scales, planes, finite = torch_backend.encode_vectors(x.float(), made, bits)
            bad = int((~finite).to(torch.uint8).argmax()) if not bool(finite.all()) else -1
            return scales.flatten(), planes.flatten(), bad
        codes = torch.empty(align16(2 * n) + n * bits * self.head_dim // 8, dtype=torch.uint8, device=x.device)
        bad = self._run(kernels, "encode", x, codes)
        return codes[: 2 * n], codes[align16(2 * n) :], bad

    def _decode(self, scales: Codes, planes: Codes, bits: int, out: Vectors) -> int:
        width = bits * self.head_dim // 8
        for a in range(0, len(out), AT_ONCE):
            b = min(len(out), a + AT_ONCE)
            padded = np.zeros(align16(2 * (b - a)), np.uint8)
            padded[: 2 * (b - a)] = scales[2 * a : 2 * b]
            codes = torch.from_numpy(np.concatenate([padded, planes[a * width : b * width]])).to(self._device)
            there = torch.empty(b - a, self.head_dim, dtype=_dtype(out), device=self._device)
            bad = self._decode_there(codes, bits, there)
            if bad >= 0:
                return a + bad
            out[a:b] = (there.view(torch.uint16) if out.dtype == np.uint16 else there).cpu().numpy()
        return -1

    def _decode_there(self, codes: torch.Tensor, bits: int, out: torch.Tensor) -> int:
        n, kernels = len(out), self._module(bits, out.dtype)
        if kernels is not None:
            return self._run(kernels, "decode", out, codes)
        made = tables(self.head_dim, bits, self.spec.rotated, self.spec.unbiased)
        scales, planes = codes[: 2 * n].view(n, 2), codes[align16(2 * n) :].view(n, -1)
        x, finite = torch_backend.decode_vectors(scales, planes, made, bits)
        out.copy_(torch_backend.cast(x, out.dtype))
        return int((~finite).to(torch.uint8).argmax()) if not bool(finite.all()) else -1

    def _run(self, kernels: Module, name: str, x: torch.Tensor, codes: torch.Tensor) -> int:
        """The vectors as one block of one layer with one head; the first that is not finite, or -1."""
        zero = torch.zeros(1, dtype=torch.int64, device=x.device)
        address = torch.tensor([x.data_ptr()], device=x.device)
        status = torch.full((1,), GOOD, dtype=torch.int32, device=x.device)
        job = Job(
            caches=address.data_ptr(),
            block_ids=zero.data_ptr(),
            slots=zero.data_ptr(),
            codes=codes.data_ptr(),
            status=status.data_ptr(),
            token_stride=self.head_dim,
            n=1,
            layers=1,
            heads=1,
            tokens=len(x),
            kinds=1,
        )
        kernels.launch(name, job, job.warps)
        found = int(status)
        return -1 if found == GOOD else found

    def _upload(self, x: Vectors) -> torch.Tensor:
        there = torch.from_numpy(np.require(x, requirements=["C", "A", "W"])).to(self._device)
        return there.view(torch.bfloat16) if x.dtype == np.uint16 else there


def _dtype(x: Vectors) -> torch.dtype:
    return torch.bfloat16 if x.dtype == np.uint16 else torch.float32


@lru_cache
def _module(
    head_dim: int, bits: int, rotated: bool, unbiased: bool, dtype: torch.dtype, device: torch.device
) -> Module | None:
    spec = CodecSpec(f"{bits} bits", bits, bits, rotated, unbiased)
    try:
        return module(spec, head_dim, dtype, device, aligned=True, whole=False)
    except CompileError:
        return None
