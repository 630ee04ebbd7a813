"""Whether a model's weights are those that they were."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from manthan.vllm_hooks.compat import model_tensors

COLUMNS = 4096


def weights_digest(worker: Any) -> str:
    """Of the bits of all parameters and buffers of a vLLM worker's model; sums of them, made where they lie: each byte
    is read twice, and next to nothing is copied."""
    digest = hashlib.blake2b(digest_size=16)
    seen = set()
    for tensor in model_tensors(worker):
        memory = tensor.untyped_storage()
        place = memory.data_ptr(), memory.nbytes()
        if place not in seen:
            seen.add(place)
            octets = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
            for part in _sums(octets):
                digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def _sums(octets: torch.Tensor) -> Iterator[torch.Tensor]:
    """Sums modulo 2**64 over rows and over columns, so that a place counts too, and what does not make up a row as it
    is. octets: uint8 [bytes]."""
    whole = octets.numel() // (8 * COLUMNS) * (8 * COLUMNS)
    rows = octets[:whole].view(torch.int64).view(-1, COLUMNS)
    yield rows.sum(0)
    yield rows.sum(1)
    yield octets[whole:]
