"""An engine on the CPU whose worker does as on a GPU: tiers, streams and codecs of the path beside one. torch plays
CUDA's part."""

from typing import Any

import fake_cuda
import pytest

from manthan.vllm_hooks import compat, scheduler_half, settled
from manthan.vllm_hooks.worker import half


def play(as_bytes: bool = True) -> None:
    """For this process, which makes an engine and then ends. as_bytes: blocks are kept as the bytes that they are; else
    in numpy's codecs."""
    patch, gpu_path = pytest.MonkeyPatch(), half._gpu_path

    def played(*args: Any) -> Any:
        fake_cuda.install(patch)  # no sooner: models have CUDA's types in annotations
        from manthan.vllm_hooks.worker import gpu_path as path

        for name in ("STAGING_BYTES", "RESTORE_STAGING_BYTES"):  # the path encodes so much when it starts
            patch.setattr(path, name, 1 << 20)
        return gpu_path(*args)

    patch.setattr(half, "_gpu_path", played)
    patch.setattr(half, "codec_backend", lambda *_: "cuda")
    patch.setattr(half, "paged_codec", fake_cuda.raw_codec if as_bytes else fake_cuda.FormatCodec)
    patch.setattr(scheduler_half, "is_on_gpu", lambda _: True)
    for name in ("pin", "unpin"):
        patch.setattr(compat, name, lambda memory: None)
    for module in (half, scheduler_half, settled) if as_bytes else ():
        patch.setattr(module, "keeps_bytes", lambda _: True)
