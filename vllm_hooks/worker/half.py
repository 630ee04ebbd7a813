"""The worker half of the connector: it chooses how this rank's blocks become codes, once it has seen the KV cache."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from manthan.codec import get_codec, wire
from manthan.codec.exact import exact_parts
from manthan.codec.gpu.paged import PagedCodec, PagedLayout
from manthan.codec.registry import SPECS
from manthan.manager.stores.cold_store import ColdStore, HostStore
from manthan.vllm_hooks.fingerprint import fingerprint
from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.shared_store import make_store, namespace_of
from manthan.vllm_hooks.support import UnsupportedError, full_attention_spec
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.block_codec import BlockCodec, Blocks, DeviceBlocks, HostBlocks
from manthan.vllm_hooks.worker.capacity import STAGINGS, TierBytes
from manthan.vllm_hooks.worker.exact_blocks import ExactBlocks
from manthan.vllm_hooks.worker.host_path import HostPath
from manthan.vllm_hooks.worker.layout import paged_layout, probe_layers
from manthan.vllm_hooks.worker.paged_blocks import PagedBlocks
from manthan.vllm_hooks.worker.path import WorkerPath

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.manthan.worker")


class WorkerHalf:
    """Hands a step's metadata to the path that fits the device, and what has ended back to vLLM."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self._vllm_config = vllm_config
        self._config = from_vllm_config(vllm_config)
        self._spec = full_attention_spec(kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self.path: WorkerPath | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        modules: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        spec = self._spec
        shape = (spec.num_kv_heads, spec.block_size, spec.head_size)
        layers = probe_layers(kv_caches, modules, self._num_blocks, shape)
        namespace = None
        if self._config.cold_store.is_shared:
            namespace = namespace_of(self._vllm_config, self._config, spec, len(layers))
        name = namespace.name if namespace else ""
        print_ = fingerprint(self._vllm_config, spec, self._config.codec.name, name)
        header = wire.BlockHeader(self._config.codec.name, b"", print_, len(layers), *shape)
        parts = exact_parts(header, layers[0].rows.itemsize) if self._config.codec.keeps_exact else 0
        device = layers[0].rows.device
        tier_bytes = TierBytes.of_a_rank(self._config.cold_store, self._vllm_config.parallel_config.world_size)
        on_gpu = codec_backend(self._config.backend, device) == "cuda"
        if on_gpu and namespace is None:
            codec = gpu_codec(self._config.codec.name, paged_layout(layers, shape), header)
            self.path = _gpu_path(codec, header, tier_bytes, parts)
            return
        if tier_bytes.device:
            raise UnsupportedError(
                f"cold_store.kind is device, but the codec runs on the CPU here (backend {self._config.backend}): use "
                "host."
            )
        threads = self._config.encode_threads
        blocks: Blocks
        if on_gpu:
            blocks = PagedBlocks(gpu_codec(self._config.codec.name, paged_layout(layers, shape), header), header)
            threads = min(threads, STAGINGS - 2)  # restores have one, and so have prefetches
        else:
            codec = get_codec(self._config.codec.name, spec.head_size, "numpy")
            on_cpu = device.type == "cpu"
            blocks = (
                HostBlocks(codec, header, layers)
                if on_cpu
                else DeviceBlocks(codec, header, paged_layout(layers, shape))
            )
        store: ColdStore = HostStore(tier_bytes.host)
        if namespace is not None:
            parallel = self._vllm_config.parallel_config
            store = make_store(self._config, namespace, parallel.rank, parallel.world_size, blocks.nbytes)
        copies = ExactBlocks(blocks, parts) if parts and isinstance(blocks, BlockCodec) else None
        self.path = HostPath(blocks, store, threads, device, copies)

    def submit(self, metadata: ManthanMetadata) -> None:
        if self.path is not None:  # None in a profiling run, which has nothing to do either
            self.path.submit(metadata)

    def take_finished_loads(self) -> set[str]:
        return self.path.take_finished_loads() if self.path else set()

    def take_failed_blocks(self) -> set[int]:
        return self.path.take_failed_blocks() if self.path else set()

    def take_report(self) -> ManthanWorkerMetadata | None:
        return self.path.take_report() if self.path else None

    def shutdown(self) -> None:
        if self.path is not None:
            self.path.shutdown()


def codec_backend(wanted: str, device: torch.device) -> str:
    """ "cuda" or "numpy": what is wanted, or what suits the device the KV cache is on.

    A GPU that shares the CPU's memory (GB10) gains nothing by codes that are made on it, and is better left to the
    model.
    Raises UnsupportedError if cuda is wanted without a GPU.
    """
    if device.type == "cpu":
        if wanted == "cuda":
            raise UnsupportedError("backend is cuda, but vLLM runs on the CPU here: use auto or numpy.")
        return "numpy"
    if wanted != "auto":
        return wanted
    return "numpy" if torch.cuda.get_device_properties(device).is_integrated else "cuda"


def gpu_codec(name: str, layout: PagedLayout, header: wire.BlockHeader) -> PagedCodec:
    """The paged codec of a GPU: the CUDA kernels, or plain PyTorch where they cannot be compiled."""
    from manthan.codec.gpu.cuda_codec import CudaPagedCodec
    from manthan.codec.gpu.nvrtc import CompileError
    from manthan.codec.gpu.torch_codec import TorchPagedCodec

    if name not in SPECS:
        raise UnsupportedError(f"codec {name} has no GPU version: use {', '.join(SPECS)}, or backend numpy.")
    try:
        return CudaPagedCodec(SPECS[name], layout, header)
    except CompileError as error:
        logger.warning("Manthan: the CUDA kernels are not used, PyTorch's own are, which is slower: %s", error)
        return TorchPagedCodec(SPECS[name], layout, header)


def _gpu_path(codec: PagedCodec, header: wire.BlockHeader, tier_bytes: TierBytes, parts: int) -> WorkerPath:
    """parts: of an exact copy; 0 if there are to be none."""
    from manthan.vllm_hooks.worker.exact_gpu_path import ExactGpuPath
    from manthan.vllm_hooks.worker.gpu_path import GpuPath
    from manthan.vllm_hooks.worker.tiers import Tier, Tiers

    device = codec.layout.caches[0].device
    on_device = Tier.on_device(tier_bytes.device, codec.nbytes, device) if tier_bytes.device else None
    on_host = Tier.pinned(tier_bytes.host, codec.nbytes) if tier_bytes.host else None
    tiers = Tiers(on_device, on_host)
    return ExactGpuPath(codec, header, tiers, parts) if parts else GpuPath(codec, header, tiers)
