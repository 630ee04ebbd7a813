"""Worker half of the connector: makes a rank's engine, guard and calibrator once vLLM has allocated the KV cache."""

import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.klt import KltPreset
from manthan.codec.errors import ProfileError
from manthan.codec.gpu.paged import PagedCodec, PagedLayout, RawLayout
from manthan.codec.k3v3 import K3v3Preset
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import Profile
from manthan.codec.registry import PRESETS, finer_codecs, needs_profile, takes_facts
from manthan.codec.rope import Rope
from manthan.codec.wht import WhtPreset
from manthan.manager.config.model import ConfigError
from manthan.manager.config.profiles import CALIBRATED
from manthan.manager.config.resolve import human_bytes
from manthan.manager.tiers.arena_tier import RamTier
from manthan.manager.tiers.joined import StackedTier
from manthan.manager.tiers.peer import PeerServer, PeerTier
from manthan.manager.tiers.tier import Tier
from manthan.vllm_hooks import memory
from manthan.vllm_hooks.fingerprint import Sharding, fingerprint, namespace_of
from manthan.vllm_hooks.groups import Groups, KvCacheGroup, config_for, groups_for
from manthan.vllm_hooks.lasting import make_store
from manthan.vllm_hooks.messages import Candidate, ManthanMetadata
from manthan.vllm_hooks.settled import CALIBRATES, settled_profile
from manthan.vllm_hooks.support import UnsupportedError
from manthan.vllm_hooks.transfer_config import CONNECTOR, is_on_gpu, settings
from manthan.vllm_hooks.worker.calibrator import Calibrator
from manthan.vllm_hooks.worker.capacity import CPU_ENCODE_THREADS, PRIMARY_BYTES, TierBytes, room_in
from manthan.vllm_hooks.worker.engine import Engine, allowed_cpus
from manthan.vllm_hooks.worker.engine_cpu import CpuBlocks, CpuEngine, PagedMemory
from manthan.vllm_hooks.worker.guard import RankGuard
from manthan.vllm_hooks.worker.layout import Layer, paged_layout, placed_layers, probe_layers, rows_of
from manthan.vllm_hooks.worker.rope import running_rope
from manthan.vllm_hooks.worker.weights import loaded_of

logger = init_logger("vllm.manthan.worker")


@dataclass(frozen=True)
class GroupCache:
    """Cache of a KV cache group on this rank."""

    layers: list[Layer]  # memory of the layers that the codec encodes; of all layers if the group is stored as bytes
    forms: Sequence[BlockFormat]  # of the group's codec, then of the finer codecs that the guard may use
    exacts: Sequence[int]  # possible counts of exact (losslessly stored) tokens at the begin of a block
    opaque: Sequence[Layer] = ()  # stored as bytes in the same compressed blocks: further layers, or latents' scales
    rope: Rope | None = None  # of the keys; None if unknown, or if the codecs must not use RoPE, as for latents

    @property
    def shape(self) -> BlockShape:
        return self.forms[0].shape

    @property
    def memory(self) -> PagedMemory:
        """The cache as the CPU's codecs read and write it."""
        coded, raw = ((), self.layers) if self.shape.is_raw else (self.layers, self.opaque)
        return PagedMemory(self.shape, coded, raw)

    @property
    def measured(self) -> tuple[PagedMemory, list[BlockFormat]]:
        """Memory and formats for the guard. `opaque` is left out, unless it has latents' scales."""
        if self.shape.is_raw or (self.shape.scales and self.shape.scales.place):
            return self.memory, [*self.forms]
        forms = [form.without_bytes() for form in self.forms]
        return PagedMemory(forms[0].shape, self.layers), forms

    @property
    def layout(self) -> PagedLayout | RawLayout:
        """The cache as a GPU's codecs read and write it. Raises UnsupportedError."""
        if self.shape.is_raw:
            return RawLayout(tuple(layer.rows for layer in self.layers), self.shape)
        return paged_layout(self.layers, self.shape, self.opaque)


def running_half() -> "WorkerHalf":
    """Return this process's worker half, also if Manthan is one of several connectors in vLLM's MultiConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    connectors = getattr(connector, "sub_connectors", (connector,))
    half: WorkerHalf = next(each.worker for each in connectors if type(each).__name__ == CONNECTOR)
    return half


def get_ready(worker: Any) -> None:
    """Wait in a worker for the guard's kernels; see `RankGuard.wait`. Only then the server reports that it is ready."""
    if (guard := running_half().guard) is not None:
        guard.wait()


def groups_of_worker(worker: Any) -> Groups:
    """Return the KV cache groups. Those without a layout known here are stored as bytes: see `WorkerHalf._is_found`."""
    return running_half().groups


class WorkerHalf:
    """Worker half of the connector. Until `register_kv_caches`, `engine` does nothing."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._know_groups()
        self.engine = Engine()
        self.guard: RankGuard | None = None  # if `codec.guard` is on
        self.calibrator: Calibrator | None = None
        self._candidate: Candidate | None = None
        self._made: Path | None = None  # a profile made from traffic, until the guard's choice gives it another name
        self._server: PeerServer | None = None
        """Serves stored blocks to higher ranks with the same shard; None if there are none, or a lower rank serves."""

    def _know_groups(self, as_bytes: Container[int] = ()) -> None:
        """Take note of the KV cache groups. as_bytes: indices of groups to store as bytes."""
        self.groups = groups_for(self._vllm_config, self._kv_cache_config, as_bytes)
        self._config = config_for(self._vllm_config, self.groups)
        self._sharding = Sharding.of(self._vllm_config, self.groups)
        self._kept = self._sharding.kept(self._vllm_config)
        stored = {group.index: group for group in self.groups.stored}
        self._counted = stored if any(each.context.ranks * each.state_tokens > 1 for each in stored.values()) else {}

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        for part in (self.guard, self.engine, self.calibrator):
            if part is not None:
                part.shutdown()
        if self._made is not None:
            self._made.unlink(missing_ok=True)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if hidden := [group.index for group in self.groups.stored if not self._is_found(group, kv_caches)]:
            self._know_groups(hidden)
        config = self._config
        rank, kept = self._vllm_config.parallel_config.rank, self._kept
        assert self._vllm_config.kv_transfer_config is not None
        shared = f"manthan-{self._vllm_config.kv_transfer_config.engine_id}-{kept.shard(rank)}"
        name = ""
        store: Tier | None = None if kept.is_first(rank) else PeerTier(shared)
        if config.tiers.is_lasting:
            namespace = namespace_of(self._vllm_config, config, self.groups, loaded_of(self._vllm_config).digest())
            name, store = namespace.name, store or make_store(self._vllm_config, namespace, self._sharding)
        caches = {group.index: self._cache(group, kv_caches, name) for group in self.groups.stored}
        self.engine = self._engine(caches, store, kept.is_first(rank))
        if kept.copies > 1 and kept.is_first(rank):
            cpus = allowed_cpus() if next(iter(caches.values())).layers[0].rows.is_cpu else ()
            self._server = PeerServer(shared, self.engine.read, cpus)
        main = caches[self.groups.main.index]
        if config.codec.guard:
            measured, forms = main.measured
            device = main.layers[0].rows.device
            self.guard = RankGuard(measured, forms, main.rope, device, rank, self.engine.decode_s)
            self.guard.warm_up()
            layers = self._vllm_config.model_config.get_num_layers(self._vllm_config.parallel_config)
            has_all = len(main.layers) == len(self.groups.main.names) == layers
            if has_all and settings(self._vllm_config).get(CALIBRATES):
                offer = partial(self._offer, namespace=name, cache=main)
                self.calibrator = Calibrator(self._vllm_config, self.groups.main, main.rope, device, offer)

    def _offer(self, profile: Profile, namespace: str, cache: GroupCache) -> None:
        """Save a profile made from traffic, and have the guard measure its codec. Called on the calibrator's thread.

        cache: the main group's. namespace: see `fingerprint`. Raises UnsupportedError without enough GPU memory.
        """
        group, kept = self.groups.main, Path(settings(self._vllm_config)[CALIBRATES])
        self._made = path = kept.with_suffix(f".{os.getpid()}")
        for old in kept.parent.glob(f"{kept.stem}.*"):  # of servers that were killed before their guard had decided
            if old.suffix[1:].isdecimal() and not psutil.pid_exists(int(old.suffix[1:])):
                old.unlink(missing_ok=True)
        profile.save(path)
        form = self._format(CALIBRATED, group, ModelFacts(cache.rope, profile), namespace)
        codec = self._config.codec.model_copy(update={"name": CALIBRATED})
        shape = memory.memory_shapes(codec, self.groups, memory.Shards(1, room_in(self._config)), profile)[0]
        assert self.guard is not None
        if isinstance(self.engine, CpuEngine):
            self.engine.blocks[group.index].add(form)
        else:
            from manthan.codec.gpu.klt_codec import device_nbytes
            from manthan.vllm_hooks.worker.engine_cuda import CudaEngine

            assert isinstance(self.engine, CudaEngine)
            free, needed = torch.cuda.mem_get_info()[0], device_nbytes(profile)
            if free < needed:
                raise UnsupportedError(
                    f"a profile takes {human_bytes(needed)} of the GPU's memory, and {human_bytes(free)} are free: "
                    "lower --gpu-memory-utilization."
                )
            self.engine.add(group.index, paged_codec(cache.layout, form))
        self._candidate = Candidate(path, shape)
        self.guard.offer(form)

    def take_candidate(self) -> Candidate | None:
        """Return the profile made since the last call, or None."""
        taken, self._candidate = self._candidate, None
        return taken

    def of_this_rank(self, metadata: ManthanMetadata) -> ManthanMetadata:
        """Return the message. Positions and counts in its stores and loads are of this rank's states, not of tokens.

        A state is a layer's entry in the cache. With context parallelism a rank has only some tokens' states. In some
        layers a state is of several tokens.
        """
        if not self._counted:
            return metadata
        both = metadata.stores, metadata.loads
        stores, loads = ([self._counted[job.group].of_a_rank(job) for job in jobs] for jobs in both)
        return replace(metadata, stores=stores, loads=loads)

    def _layers(self, group: KvCacheGroup, kv_caches: Mapping[str, torch.Tensor]) -> list[Layer]:
        """Return the memory of the group's layers, without those in `group.opaque`. Raises UnsupportedError."""
        if group.is_packed:
            nbytes = dict(zip(group.names, group.layer_nbytes, strict=True))
            starts = dict(zip(group.names, group.starts, strict=False))
            return placed_layers(kv_caches, self._kv_cache_config, nbytes, starts)
        shape = memory.block_shape(group)
        if group.scales is not None:
            nbytes = dict.fromkeys(group.names, group.scales.row * shape.tokens)
            return rows_of(placed_layers(kv_caches, self._kv_cache_config, nbytes), shape)
        caches = {name: cache for name, cache in kv_caches.items() if name in group.names}
        modules = self._vllm_config.compilation_config.static_forward_context
        return probe_layers(caches, modules, self._kv_cache_config.num_blocks, shape)

    def _is_found(self, group: KvCacheGroup, kv_caches: Mapping[str, torch.Tensor]) -> bool:
        """Return False if a codec should encode the group, but this worker cannot find the group's layout in memory.

        Only groups with latents, or with `opaque` layers, are tried, because their attention may write in an
        unusual way. The scheduler half asks the workers which groups are therefore stored as bytes.
        """
        if group.opaque is None and not group.latent:
            return True
        try:
            layers = self._layers(group, kv_caches)
            if not layers[0].rows.is_cpu:
                opaque = self._layers(group.opaque, kv_caches) if group.opaque else ()
                paged_layout(layers, memory.block_shape(group), opaque).raw()  # raises if kernels cannot address it
        except Exception as error:  # a backend may raise any exception
            why = f"its layout cannot be found: {type(error).__name__}: {error}"
            logger.warning("Manthan: KV cache group %d is stored as bytes, because %s", group.index, why)
            return False
        return True

    def _cache(self, group: KvCacheGroup, kv_caches: Mapping[str, torch.Tensor], namespace: str) -> GroupCache:
        """Return a group's cache. namespace: of a disk or Redis, or empty; see `fingerprint`. Raises ConfigError."""
        config, layers = self._config.codec, self._layers(group, kv_caches)
        opaque = self._layers(group.opaque, kv_caches) if group.opaque else ()
        is_main = group.index == self.groups.main.index
        codec = config.name if is_main else memory.codec_of_other(config.name, group, config.state)
        if group.is_packed:
            return GroupCache(layers, [self._format(codec, group, NO_FACTS, namespace)], [0])
        group = replace(group, layers=len(layers))  # layers that share a cache count once
        rope, codecs = None, (codec, *finer_codecs(codec))
        if not group.latent and group.context.ranks == 1:  # else neighbours in a block are not the session's
            rope = running_rope(self._vllm_config, group.spec.head_size, takes_facts(config.name), group.names)
        forms = [self._format(each, group, self._facts(each, group, rope), namespace) for each in codecs]
        return GroupCache(layers, forms, sorted(memory.exact_counts(config, group).values()), opaque, rope)

    def _facts(self, codec: str, group: KvCacheGroup, rope: Rope | None) -> ModelFacts:
        """Return the model's facts that the codec needs, such as RoPE. Raises ConfigError for an unsuitable profile."""
        if not takes_facts(codec):
            return NO_FACTS
        if not needs_profile(codec):
            return ModelFacts(rope)
        parallel, profile = self._vllm_config.parallel_config, settled_profile(self._vllm_config)
        return ModelFacts(rope, memory.rank_facts(profile, group, parallel.rank, parallel.world_size).profile)

    def _format(self, codec: str, group: KvCacheGroup, facts: ModelFacts, namespace: str) -> BlockFormat:
        """Return the format of a group's blocks in a codec, with a fingerprint. Raises ConfigError."""
        facts = memory.with_states(codec, group, facts)
        try:
            mark = fingerprint(self._vllm_config, group, codec, namespace, facts, self._sharding)
            first_head = self._sharding.first_head(self._vllm_config.parallel_config.rank)
            return memory.block_format(codec, group, mark, facts, first_head)
        except ProfileError as error:
            raise ConfigError(str(error)) from None

    def _engine(self, groups: Mapping[int, GroupCache], store: Tier | None, keeps: bool) -> Engine:
        """Return an engine that encodes on the GPU, or on the CPU's cores unless `is_on_gpu`.

        groups: the main group first. store: tiers that outlive the engine, or that another rank has; None without
        either. keeps: see Engine.
        """
        tiers, codec, ranks = self._config.tiers, self._config.codec, self._kept.shards
        tier_bytes, fails_whole = TierBytes.of_a_rank(tiers, ranks), self.groups.fails_whole
        front = tiers.front_bytes // ranks if keeps else 0
        device = next(iter(groups.values())).layers[0].rows.device
        if is_on_gpu(self._vllm_config):
            from manthan.vllm_hooks.worker.engine_cuda import CudaEngine
            from manthan.vllm_hooks.worker.slabs import Slab, Slabs

            if store is not None:
                tier_bytes = TierBytes(0, max(front, PRIMARY_BYTES))
            last = None if codec.guard or store is not None else 1  # `store` may have finer blocks
            codecs = {n: [paged_codec(each.layout, form) for form in each.forms[:last]] for n, each in groups.items()}
            on_device = Slab.on_device(tier_bytes.device, device) if tier_bytes.device else None
            on_host = Slab.pinned(tier_bytes.host, device) if tier_bytes.host else None
            exacts = next(iter(groups.values())).exacts
            return CudaEngine(codecs, Slabs(on_device, on_host), fails_whole, exacts, store, keeps)
        if tier_bytes.device:
            raise UnsupportedError(
                f"tiers.kind is device, but the codec runs on the CPU here (codec.backend {codec.backend}): use host."
            )
        if store is None:
            store = RamTier(tier_bytes.host)
        elif front:
            store = StackedTier(RamTier(front), store)
        blocks = {index: CpuBlocks(each.memory, *each.forms, exacts=each.exacts) for index, each in groups.items()}
        threads = 1 if device.type == "cpu" else CPU_ENCODE_THREADS
        return CpuEngine(blocks, store, threads, device, fails_whole, keeps)


def paged_codec(layout: PagedLayout | RawLayout, form: BlockFormat) -> PagedCodec:
    """Return a GPU's codec for a format. Raises UnsupportedError for a codec without usable kernels."""
    from manthan.codec.gpu.k3v3_codec import K3v3PagedCodec
    from manthan.codec.gpu.klt_codec import KltPagedCodec
    from manthan.codec.gpu.nvrtc import CompileError
    from manthan.codec.gpu.raw import RawPagedCodec
    from manthan.codec.gpu.wht_codec import WhtPagedCodec

    made: dict[type, Callable[..., PagedCodec]] = {
        WhtPreset: WhtPagedCodec,
        KltPreset: KltPagedCodec,
        K3v3Preset: K3v3PagedCodec,
    }
    known = [name for name, preset in PRESETS.items() if type(preset) in made and name != "klt-exact"]
    if isinstance(layout, PagedLayout) and form.codec not in known:
        raise UnsupportedError(
            f"codec {form.codec} has no GPU version: use {', '.join(known)}, or codec.backend numpy."
        )
    try:
        if isinstance(layout, RawLayout):
            return RawPagedCodec(layout, form)
        return made[type(PRESETS[form.codec])](layout, form)
    except CompileError as error:
        raise UnsupportedError(
            f"codec {form.codec} needs CUDA kernels on a GPU, and they cannot be used: {error}; use "
            "codec.backend numpy."
        ) from None
