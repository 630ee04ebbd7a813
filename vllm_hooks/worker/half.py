"""The worker half of the connector: it chooses how this rank's blocks become codes, once it has seen the KV cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.errors import ProfileError
from manthan.codec.gpu.paged import DTYPES, PagedCodec, PagedLayout
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import PRESETS, Profile
from manthan.codec.registry import CENTRED, SPECS, finer_codecs, needs_profile, takes_facts
from manthan.codec.rope import Rope
from manthan.codec.wht import NAME as WHT
from manthan.manager.config.model import ConfigError
from manthan.manager.stores.cold_store import ColdStore, HostStore
from manthan.vllm_hooks.compat import attention_modules
from manthan.vllm_hooks.fingerprint import fingerprint
from manthan.vllm_hooks.memory import block_format, block_shape, codec_beside, exact_counts, rank_facts
from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.settled import settled_profile
from manthan.vllm_hooks.shared_store import make_store, namespace_of
from manthan.vllm_hooks.support import Group, UnsupportedError, groups_of, latent_of
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.blocks import (
    Blocks,
    CpuBlocks,
    DeviceMemory,
    HostMemory,
    LatentMemory,
    PackedMemory,
    PagedMemory,
)
from manthan.vllm_hooks.worker.calibration import Calibration, calibration_job
from manthan.vllm_hooks.worker.capacity import ENCODE_THREADS, TierBytes
from manthan.vllm_hooks.worker.guard import Guard
from manthan.vllm_hooks.worker.host_path import HostPath
from manthan.vllm_hooks.worker.layout import Layer, packed_layers, paged_layout, probe_layers, state_layers
from manthan.vllm_hooks.worker.paged_blocks import PagedBlocks
from manthan.vllm_hooks.worker.path import Resting, WorkerPath
from manthan.vllm_hooks.worker.rope import running_rope

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.manthan.worker")


class WorkerHalf:
    """Chooses the path that fits the device. Until then, as in a profiling run, there is nothing to do."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self._vllm_config = vllm_config
        self._config = from_vllm_config(vllm_config)
        self._groups = groups_of(kv_cache_config, vllm_config.cache_config, latent_of(vllm_config))
        self._group = self._groups.chain
        self._kv_cache_config = kv_cache_config
        self._num_blocks = kv_cache_config.num_blocks
        self._fails_whole = len(kv_cache_config.kv_cache_groups) > 1
        self.path: WorkerPath = Resting()
        self._guard: Guard | None = None

    def submit_spills(self, metadata: ManthanMetadata) -> None:
        """Begin what comes after what the model computes in this step."""
        self.path.submit_spills(metadata)
        if self._guard is not None:
            self._guard.submit(metadata.samples)

    def take_report(self) -> ManthanWorkerMetadata | None:
        """What ended since the last call."""
        report, verdicts = self.path.take_report(), self._guard.take() if self._guard is not None else []
        if not verdicts:
            return report
        report = report or ManthanWorkerMetadata()
        report.verdicts += verdicts
        return report

    def shutdown(self) -> None:
        if self._guard is not None:
            self._guard.shutdown()
        self.path.shutdown()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        config, parallel = self._config, self._vllm_config.parallel_config
        layers = self._layers(self._group, kv_caches)
        group = self._group
        if not group.is_packed:
            group = replace(group, layers=len(layers))  # those that share a cache are one
        tier_bytes = TierBytes.of_a_rank(config.cold_store, parallel.world_size)
        name, store = "", None
        if config.cold_store.is_shared:
            namespace = namespace_of(self._vllm_config, config, self._groups)
            name, store = namespace.name, make_store(config, namespace, parallel.rank, parallel.world_size)
        codecs = (config.codec.name, *finer_codecs(config.codec.name))
        rope = self._rope()
        forms = [self._format(codec, group, self._facts(codec, group, rope), name) for codec in codecs]
        beside = {each.group.index: self._beside(each.group, kv_caches, name) for each in self._groups.windows}
        self.path = self._path(layers, forms, group, tier_bytes, store, beside)
        if config.codec.guard:
            self._guard = self._make_guard(layers, forms, rope)

    def _layers(self, group: Group, kv_caches: Mapping[str, torch.Tensor]) -> list[Layer]:
        """Where the group's blocks lie. Raises UnsupportedError."""
        if type(group.spec).__name__ == "MambaSpec":
            return state_layers(kv_caches, self._kv_cache_config, group.names, group.spec.page_size_bytes)
        caches = {name: cache for name, cache in kv_caches.items() if name in group.names}
        if group.is_packed:
            return packed_layers(caches, self._num_blocks, group.layer_nbytes)
        modules: dict[str, Any] = attention_modules(self._vllm_config)
        return probe_layers(caches, modules, self._num_blocks, block_shape(group))

    def _beside(self, group: Group, kv_caches: Mapping[str, torch.Tensor], namespace: str) -> Blocks:
        """What reads and writes the blocks of another group. namespace: see `fingerprint`."""
        layers, codec = self._layers(group, kv_caches), codec_beside(self._config.codec.name, group)
        if not group.is_packed:
            group = replace(group, layers=len(layers))
        names = (codec, *finer_codecs(codec))
        forms = [self._format(name, group, NO_FACTS, namespace) for name in names]
        return CpuBlocks(_memory(layers, forms[0].shape), *forms)

    def _rope(self) -> Rope | None:
        """How keys are turned, if that is known; latents are not, and bytes are no keys."""
        group = self._group
        if group.latent or group.is_packed:
            return None
        return running_rope(self._vllm_config, group.spec.head_size, tell=takes_facts(self._config.codec.name))

    def _facts(self, codec: str, group: Group, rope: Rope | None) -> ModelFacts:
        """What the codec may know. Raises ConfigError for a profile that does not fit."""
        if not takes_facts(codec):
            return NO_FACTS
        if not needs_profile(codec):
            return ModelFacts(rope)
        parallel, profile = self._vllm_config.parallel_config, settled_profile(self._vllm_config)
        return ModelFacts(rope, rank_facts(profile, group, parallel.rank, parallel.world_size).profile)

    def _format(self, codec: str, group: Group, facts: ModelFacts, namespace: str) -> BlockFormat:
        """namespace: see `fingerprint`. Raises ConfigError."""
        try:
            return block_format(codec, group, fingerprint(self._vllm_config, group, codec, namespace, facts), facts)
        except ProfileError as error:
            raise ConfigError(str(error)) from None

    def _make_guard(self, layers: list[Layer], forms: Sequence[BlockFormat], rope: Rope | None) -> Guard:
        device, path, memory = layers[0].rows.device, self.path, _memory(layers, forms[0].shape)
        if not isinstance(memory, DeviceMemory):
            return Guard(memory, forms, rope, device, BlockFormat.warm_up)
        from manthan.vllm_hooks.worker.gpu_path import GpuPath

        def prepare(form: BlockFormat) -> None:
            if isinstance(path, GpuPath):
                path.prepare(form.codec)

        return Guard(memory, forms, rope, device, prepare)

    def _path(
        self,
        layers: list[Layer],
        forms: Sequence[BlockFormat],
        group: Group,
        tier_bytes: TierBytes,
        store: ColdStore | None,
        beside: Mapping[int, Blocks],
    ) -> WorkerPath:
        """Where the codec runs, and on what: the only place where that is chosen.

        On a GPU's cores, into tiers that it reaches or a store that only the CPU does; or on the CPU's cores, from a
        cache in its memory or a GPU's. forms: the configured one first. store: None for one of this engine alone.
        """
        form = forms[0]
        shape = form.shape
        device, threads = layers[0].rows.device, self._config.encode_threads
        by_kernels = shape.dtype in DTYPES.values() and not shape.latent
        on_gpu = by_kernels and codec_backend(self._config.backend, device) == "cuda"
        if on_gpu and beside:
            raise UnsupportedError(
                "the model has layers with sliding windows or states, whose codes are made on the CPU: set backend to "
                "numpy."
            )
        if on_gpu and store is None:
            exacts, layout = sorted(exact_counts(self._config.codec, shape.tokens)), paged_layout(layers, shape)
            calibration = self._calibration(DeviceMemory(layout), form, None, group)
            return _gpu_path(layout, forms, tier_bytes, self._fails_whole, exacts, calibration)
        if tier_bytes.device:
            raise UnsupportedError(
                f"cold_store.kind is device, but the codec runs on the CPU here (backend {self._config.backend}): use "
                "host."
            )
        memory = _memory(layers, shape)
        blocks: Blocks
        if on_gpu:
            layout = paged_layout(layers, shape)
            blocks = PagedBlocks(*(paged_codec(layout, each) for each in forms))
            threads = min(threads, ENCODE_THREADS)
        else:
            blocks = CpuBlocks(memory, *forms)
        calibration = self._calibration(memory, form, blocks, group)
        if store is None:
            store = HostStore(tier_bytes.host)
        return HostPath({form.group: blocks, **beside}, store, threads, device, self._fails_whole, calibration)

    def _calibration(
        self, memory: PagedMemory, form: BlockFormat, blocks: Blocks | None, group: Group
    ) -> Calibration | None:
        """Where the codec wants a profile that there is not yet. blocks: that may take it up at once."""
        job = calibration_job(self._vllm_config, form)
        if job is None:
            return None

        def made(profile: Profile) -> str:
            if job.ranks > 1 or self._config.cold_store.is_shared or not isinstance(blocks, CpuBlocks):
                return "it is used from the next start on"
            facts = ModelFacts(job.info.rope, profile)
            blocks.change_to(self._format(job.preset, group, facts, ""))
            return "blocks are encoded with it from now on"

        return Calibration(memory, job, made)


def _memory(layers: list[Layer], shape: BlockShape) -> PagedMemory:
    """The paged cache as the CPU reads and writes it."""
    if shape.is_raw:
        return PackedMemory(layers, shape)
    if layers[0].rows.is_cpu:
        return HostMemory(layers, shape)
    return LatentMemory(layers, shape) if shape.latent else DeviceMemory(paged_layout(layers, shape))


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


def paged_codec(layout: PagedLayout, form: BlockFormat) -> PagedCodec:
    """The codec of a GPU: the CUDA kernels, or plain PyTorch where they cannot be compiled or do not know the codec."""
    from manthan.codec.gpu.cuda_codec import CudaPagedCodec
    from manthan.codec.gpu.klt_codec import KltPagedCodec
    from manthan.codec.gpu.nvrtc import CompileError
    from manthan.codec.gpu.torch_codec import TorchPagedCodec
    from manthan.codec.gpu.wht_codec import WhtPagedCodec

    if needs_profile(form.codec) or form.codec == WHT:
        try:
            return KltPagedCodec(layout, form) if needs_profile(form.codec) else WhtPagedCodec(layout, form)
        except CompileError as error:
            raise UnsupportedError(
                f"codec {form.codec} needs CUDA kernels on a GPU, and they cannot be used: {error}; use backend numpy."
            ) from None
    if form.codec in CENTRED:
        logger.info("Manthan: there are no CUDA kernels for codec %s: PyTorch's own are used, slower.", form.codec)
        return TorchPagedCodec(layout, form)
    if form.codec not in SPECS:
        known = ", ".join([*SPECS, *CENTRED, WHT, *PRESETS])
        raise UnsupportedError(f"codec {form.codec} has no GPU version: use {known}, or backend numpy.")
    try:
        return CudaPagedCodec(layout, form)
    except CompileError as error:
        logger.warning("Manthan: the CUDA kernels are not used, PyTorch's own are, which is slower: %s", error)
        return TorchPagedCodec(layout, form)


def _gpu_path(
    layout: PagedLayout,
    forms: Sequence[BlockFormat],
    tier_bytes: TierBytes,
    fails_whole: bool,
    exacts: Sequence[int],
    calibration: Calibration | None,
) -> WorkerPath:
    """forms: the configured one first."""
    from manthan.vllm_hooks.worker.gpu_path import GpuPath
    from manthan.vllm_hooks.worker.tiers import Tier, Tiers

    device, by_name = layout.caches[0].device, {form.codec: form for form in forms}
    on_device = Tier.on_device(tier_bytes.device, device) if tier_bytes.device else None
    on_host = Tier.pinned(tier_bytes.host) if tier_bytes.host else None
    tiers = Tiers(on_device, on_host)
    return GpuPath(
        paged_codec(layout, forms[0]),
        tiers,
        fails_whole,
        exacts,
        lambda name: paged_codec(layout, by_name[name]),
        calibration,
    )
