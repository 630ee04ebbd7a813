"""An engine on the CPU whose worker does as on a GPU: tiers, streams and codecs of the path beside one. torch and numpy
play CUDA's part."""

from typing import Any

import fake_cuda
import pytest
import torch

from manthan.codec.block import BlockFormat
from manthan.codec.gpu.paged import PagedCodec, RawLayout
from manthan.codec.gpu.raw import RawPagedCodec
from manthan.codec.gpu.torch_codec import TorchPagedCodec
from manthan.codec.registry import CENTRED, SPECS
from manthan.vllm_hooks import scheduler_half, settled
from manthan.vllm_hooks.worker import half
from manthan.vllm_hooks.worker.tiers import Tier


def paged_codec(layout: Any, form: BlockFormat) -> PagedCodec:
    if isinstance(layout, RawLayout):
        return RawPagedCodec(layout, form)
    return (TorchPagedCodec if form.codec in SPECS | CENTRED else fake_cuda.FormatCodec)(layout, form)


def play(as_bytes: bool) -> None:
    """For this process, which makes an engine and then ends. as_bytes: no codec can read keys and values."""
    patch, gpu_path = pytest.MonkeyPatch(), half._gpu_path

    def played(*args: Any) -> Any:
        fake_cuda.install(patch)  # no sooner: models have CUDA's types in annotations
        return gpu_path(*args)

    patch.setattr(half, "_gpu_path", played)
    patch.setattr(half, "codec_backend", lambda *_: "cuda")
    patch.setattr(half, "paged_codec", paged_codec)
    patch.setattr(scheduler_half, "is_on_gpu", lambda _: True)
    patch.setattr(Tier, "pinned", classmethod(lambda cls, nbytes: cls(torch.zeros(nbytes, dtype=torch.uint8))))
    for module in (half, scheduler_half, settled) if as_bytes else ():
        patch.setattr(module, "keeps_bytes", lambda _: True)
