"""Digests of a model's weights: of the tensors that the loader reads, and of the tensors in memory."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import ref

import torch
import xxhash
from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger

from manthan.vllm_hooks.compat import model_tensors, parts_of, tensors_of, wrap

logger = init_logger("vllm.manthan.worker")

COLUMNS = 4096  # int64 columns of the matrix in `_sums`
PIECE_BYTES = 2**24  # bytes that a thread hashes at a time
THREADS = 4


class Loaded:
    """Weights read by loaders for the models of an engine in this process.

    Every rank reads all tensors of the files, unless --enable-ep-weight-filter is set. The digest is therefore the same
    for every number of ranks. If a loader bypasses `load_weights`, the digest is of the model's tensors. If a tensor
    cannot be read, no other engine has the same digest.
    """

    def __init__(self, unknown: str) -> None:
        """unknown: digest of an unreadable weight: the same on all ranks of an engine on a host, and no others."""
        self._unknown = unknown
        self.loads = 0  # number of calls of `load_weights`, the first included
        self._digests: dict[str, str] = {}
        self._digest = ""
        self._models: dict[str, ref[torch.nn.Module]] = {}

    def watch(self, model: torch.nn.Module, name: str) -> None:
        """Note the weights loaded into a model from now on. name: unique among the engine's models."""
        self._models[name] = ref(model)

        def load_noted(load: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            self.loads += 1
            return load(self._noted(name, weights), *args, **kwargs)

        wrap("vllm.model_executor.models.llama.LlamaForCausalLM.load_weights", model, load_noted)

    def _noted(self, model: str, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if not self._digest:
                self._digests[f"{model}/{name}"] = self._digest_of(name, tensor)
            yield name, tensor

    def _digest_of(self, name: str, tensor: torch.Tensor) -> str:
        try:
            return " ".join(tensor_digest(part) for _, part in parts_of(name, tensor))
        except Exception as error:  # a loader may yield tensors of a class that only the model can read
            logger.warning(
                "Manthan: weight %s cannot be read: no blocks are shared with other engines: %r", name, error
            )
            return self._unknown

    def digest(self) -> str:
        """Return 32 hex digits over the name, dtype, shape and bytes of every tensor loaded before the first call."""
        if self._digest:
            return self._digest
        found = dict(self._digests)
        for name, known in self._models.items():
            model = known()
            if model is not None and not any(each.startswith(f"{name}/") for each in found):
                found |= {f"{name}:{n}": self._digest_of(n, tensor) for n, tensor in tensors_of(model)}
        found = found or {"": self._unknown}
        self._digest = hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()[:32]
        return self._digest


_loaded: dict[int, Loaded] = {}
"""Loaded weights by Python's `id` of kv_transfer_config, an object that all models of an engine share."""


def watch_model(vllm_config: VllmConfig, model_config: ModelConfig, model: torch.nn.Module) -> None:
    """Watch the loads of an engine's model. Call before the first load."""
    is_main = model_config.runner_type != "draft"
    if is_main:
        _loaded.pop(id(vllm_config.kv_transfer_config), None)
    loaded_of(vllm_config).watch(model, "model" if is_main else f"draft {model_config.model}")


def loaded_of(vllm_config: VllmConfig) -> Loaded:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return _loaded.setdefault(id(transfer), Loaded(f"{transfer.engine_id} {vllm_config.instance_id}"))


def loaded_digest(worker: Any) -> str:
    return loaded_of(worker.vllm_config).digest()


def loads(worker: Any) -> int:
    return loaded_of(worker.vllm_config).loads


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and bytes. Equal tensors on CPU and GPU have different digests."""
    made = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    data = tensor.detach().contiguous().view(-1)
    if data.numel():
        octets = data.view(torch.uint8)
        is_cpu = octets.device.type == "cpu"
        for digest in _of_pieces(octets.numpy().data) if is_cpu else _sums(octets):
            made.update(digest)
    return made.hexdigest()


def _of_pieces(octets: memoryview) -> list[bytes]:
    """Return digests of a tensor's pieces, made on several cores, because a core hashes only a few GB a second."""
    pieces = [octets[at : at + PIECE_BYTES] for at in range(0, len(octets), PIECE_BYTES)]
    if len(pieces) == 1:
        return [xxhash.xxh3_128_digest(pieces[0])]
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(xxhash.xxh3_128_digest, pieces))


def weights_state(worker: Any) -> tuple[int, str]:
    """Return the number of loads of weights, and the digest of all parameters and persistent buffers in memory.

    The digest is of sums computed on the tensors' device, so that little more than sums is copied to the CPU.
    """
    digest = hashlib.blake2b(digest_size=16)
    seen = set()
    for tensor in model_tensors(worker):
        memory = tensor.untyped_storage()
        place = memory.data_ptr(), memory.nbytes()
        if place not in seen:
            seen.add(place)
            for part in _sums(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)):
                digest.update(part)
    return loads(worker), digest.hexdigest()


def _sums(octets: torch.Tensor) -> Iterator[bytes]:
    """Yield the sums modulo 2**64 of a matrix's columns and of its rows, and then the bytes behind the last full row.

    The matrix has the bytes as int64 [rows, COLUMNS]. Two unequal numbers that trade positions change some sum.

    octets: uint8 [bytes].
    """
    if octets.storage_offset() % 8:  # a view of a buffer of several tensors
        octets = octets.clone()
    whole = octets.numel() // (8 * COLUMNS) * (8 * COLUMNS)
    rows = octets[:whole].view(torch.int64).view(-1, COLUMNS)
    for part in (rows.sum(0), rows.sum(1), octets[whole:]):
        yield part.cpu().numpy().tobytes()
