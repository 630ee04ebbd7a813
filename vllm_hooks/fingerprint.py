"""Identity of a compressed block: the shard of a rank, the fingerprint in the block's header, and the namespace.

A shard is the part of a KV block that a rank has: some or all KV heads of the layers of the rank's pipeline stage; with
context parallelism, some tokens of these layers. Several ranks of a stage may have the same shard. A block with another
fingerprint is not decoded. An engine searches disk and Redis only under its namespace.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from manthan.codec import wire
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.registry import needs_profile
from manthan.manager.config.model import ManthanConfig
from manthan.manager.config.profiles import model_folder
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.redis import Namespace
from manthan.manager.tiers.sealed import derived, keys_of
from manthan.vllm_hooks.support import has_draft
from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on_gpu

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from manthan.vllm_hooks.groups import Groups, KvCacheGroup


MOST_PARTS = 16  # most ranks in a stage of another engine whose blocks this engine looks for


class Sharding(NamedTuple):
    """Division of blocks among an engine's ranks."""

    stages: int = 1  # pipeline stages
    ranks: int = 1  # in each stage
    parts: int = 1  # number of different shards in a stage; each is on `copies` consecutive ranks
    heads: int = 0
    """Number of the model's KV heads; 1 if all ranks of a stage have the same shard; 0 if only engines with as many
    ranks can read the blocks."""

    @classmethod
    def of(cls, vllm_config: "VllmConfig", groups: "Groups") -> "Sharding":
        parallel, stored = vllm_config.parallel_config, groups.stored
        stages = parallel.pipeline_parallel_size
        ranks, tensor = parallel.world_size // stages, parallel.tensor_parallel_size
        is_spread = any(group.context.ranks > 1 for group in stored)
        has_latents = all(getattr(each.spec, "max_tp_shards", None) == 1 for each in stored)
        if not is_spread and (groups.replicas == tensor > 1 or has_latents):
            return cls(stages, ranks, 1, 1)
        if is_spread or ranks > tensor:
            return cls(stages, ranks, ranks)
        total = _kv_heads(vllm_config)
        parts = min(total, tensor) or tensor // groups.replicas
        whole = any(each.is_packed or each.latent or each.opaque for each in stored)
        is_cut = not whole and all(each.shape[1] * parts == total for each in stored)
        return cls(stages, ranks, parts if is_cut else tensor // groups.replicas, total if is_cut else 0)

    def kept(self, vllm_config: "VllmConfig") -> "Sharding":
        """Return the division by which ranks store compressed blocks in tiers.

        On one host, with tiers of kind host or disk, the first of the ranks with the same shard stores the shard for
        all of them. Else every rank stores its own shard: `parts` is then equal to `ranks`.
        """
        parallel, kind = vllm_config.parallel_config, from_vllm_config(vllm_config).tiers.kind
        is_one_host = parallel.distributed_executor_backend == "mp" and parallel.nnodes_within_dp == 1
        return self if is_one_host and kind in ("host", "disk") else self._replace(parts=self.ranks)

    @property
    def copies(self) -> int:
        return self.ranks // self.parts

    @property
    def shards(self) -> int:
        """Number of different shards in all stages together."""
        return self.stages * self.parts

    def shard(self, rank: int) -> Shard:
        """Return a rank's shard, numbered among the shards of all stages."""
        stage, within = divmod(rank, self.ranks)
        return Shard(stage * self.parts + within // self.copies, self.shards)

    def is_first(self, rank: int) -> bool:
        """True if no lower rank has the same shard."""
        return rank % self.ranks % self.copies == 0

    def first_head(self, rank: int) -> int:
        """Return the number, among the model's KV heads, of a rank's first head."""
        return rank % self.ranks // self.copies * (self.heads // self.parts)

    def with_ranks(self, ranks: int) -> "Sharding":
        """Return the division among `ranks` ranks in each stage."""
        return self._replace(ranks=ranks, parts=min(ranks, self.heads))

    def sources(self, rank: int, other: "Sharding") -> list[int]:
        """Return the ranks of an engine with division `other` that together have all heads of this engine's `rank`."""
        heads, width = self.heads // self.parts, self.heads // other.parts
        first, stage = self.first_head(rank), rank // self.ranks
        needed = range(first // width, (first + heads - 1) // width + 1)
        return [stage * other.ranks + part * other.copies for part in needed]

    def others(self) -> list["Sharding"]:
        """Return the other divisions whose blocks this engine can read, each with one rank for every shard."""
        some = range(1, min(self.heads, MOST_PARTS) + 1)
        return [self.with_ranks(count) for count in some if self.heads % count == 0 and count != self.parts]


ONE_RANK = Sharding()


def _kv_heads(vllm_config: "VllmConfig") -> int:
    """Number of KV heads of each layer, of model and draft; 0 unless their configurations name it and no other."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    models: list[Any] = [model, *([speculative.draft_model_config] if speculative and has_draft(vllm_config) else ())]
    total = int(model.get_total_num_kv_heads())
    said = {str(number) for each in models for number in _said(each.hf_text_config.to_dict())}
    return total if said == {str(total)} else 0


def _said(config: object) -> Iterator[object]:
    """Yield every number of KV heads in a model's configuration, at any depth."""
    for key, value in config.items() if isinstance(config, dict) else ():
        is_number = "head" in str(key) and ("kv" in str(key) or "key_value" in str(key))
        yield from [value] if is_number and value is not None else _said(value)
    for value in config if isinstance(config, list) else ():
        yield from _said(value)


def reads_others(vllm_config: "VllmConfig", sharding: Sharding) -> bool:
    """True if this engine reads blocks of engines with other numbers of ranks.

    Kernels of a GPU decode only whole blocks of a rank, and a profile of the model is cut for one number of ranks.
    """
    codec = from_vllm_config(vllm_config).codec
    return sharding.heads > 0 and not is_on_gpu(vllm_config) and not needs_profile(codec.name)


def fingerprint(
    vllm_config: "VllmConfig",
    group: "KvCacheGroup",
    codec: str,
    namespace: str = "",
    facts: ModelFacts = NO_FACTS,
    sharding: Sharding = ONE_RANK,
) -> bytes:
    """Return a digest, 16 bytes, of the facts that decide how a group's blocks of this rank are decoded.

    The rank's share of the heads is such a fact only if `sharding.heads` is 0. Otherwise engines with other numbers of
    tensor-parallel ranks can read the blocks.
    namespace: name of the namespace, which stands for the model, if the store outlives the engine; else empty.
    """
    model, rank = vllm_config.model_config, vllm_config.parallel_config.rank
    parts: dict[str, object] = {
        "wire": wire.VERSION,
        "codec": codec,
        "model": namespace or [model.model, model.revision, model.compute_hash()],
        "dtype": group.dtype_name,
        "group": group.index,
        "block_size": group.spec.block_size,
    }
    if group.is_packed:
        parts["layers"] = group.shape
    else:
        parts |= {"kv_heads": sharding.heads or group.shape[1], "head_size": group.shape[2]}
    if not sharding.heads:
        parts["shard"] = sharding.shard(rank)
    if group.context.ranks > 1:
        parts["context_parallel"] = group.context
    if sharding.stages > 1:
        parts["stage"] = [rank // sharding.ranks, sharding.stages]
    if group.latent:
        parts["latent"] = group.latent
    if group.opaque is not None:
        # This name is hashed too: with another one, no stored block of such models would be found.
        parts["beside"] = [group.opaque.dtype_name, group.opaque.shape]
    if facts.rope is not None:
        parts["rope"] = [facts.rope.frequencies, facts.rope.interleaved]
    if facts.state is not None:
        parts["state"] = [[part.nbytes, part.row, part.dtype.name] for part in facts.state.parts]
    if facts.profile is not None:
        parts["profile"] = facts.profile.digest
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()[:16]


def namespace_of(vllm_config: "VllmConfig", config: ManthanConfig, groups: "Groups", weights: str) -> Namespace:
    """Return the namespace of blocks that outlive the engine. Engines that can share blocks have the same namespace.

    weights: digest of all loaded weights. The codec of keys and values does not count: a block's header names it.
    """
    group = groups.main
    sharding = Sharding.of(vllm_config, groups)
    further: list[object] = [[*_group_identity(each.group, sharding), each.reach] for each in groups.at_points]
    if any(each.group.is_state for each in groups.at_points):
        further.append(config.codec.state)
    if groups.again and further:
        further.append(groups.again)  # which blocks a session needs to go on depends on `again`
    cache, keys = vllm_config.cache_config, keys_of(config.sealing)
    return Namespace.of(
        config.tiers.redis.prefix,
        vllm_config.model_config.model,
        {
            "wire": wire.VERSION,
            "model": model_identity(vllm_config, weights),
            "main": _group_identity(group, sharding),
            **({"context_parallel": group.context} if group.context.ranks > 1 else {}),
            **({} if sharding.heads else {"tensor_parallel": sharding.ranks}),
            **({"pipeline_parallel": sharding.stages} if sharding.stages > 1 else {}),
            "block_hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED", "")],
            **({"sealed": derived(keys[-1], "mark of a key", nbytes=8).hex()} if keys else {}),
            **({"beside": further} if further else {}),
        },
    )


def _group_identity(group: "KvCacheGroup", sharding: Sharding) -> list[object]:
    """Return a group's index, dtype, tokens in a block, and bytes by layer, or else KV heads, head size and latent."""
    shape = group.shape if group.is_packed else [sharding.heads or group.shape[1], *group.shape[2:]]
    return [group.index, group.dtype_name, group.tokens, shape]


def model_identity(vllm_config: "VllmConfig", weights: str) -> dict[str, object]:
    """Return the facts that decide the KV of a model and its draft model. weights: digest of both models' weights.

    The configuration has vLLM's overrides, but not the model's path or --max-model-len.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    identity = {
        **_identity(model),
        "weights": weights,
        "vllm": version("vllm"),
        "media": getattr(model.multimodal_config, "mm_processor_kwargs", None),
    }
    if speculative is not None and speculative.uses_draft_kv_cache():
        identity["draft"] = {"method": speculative.method, **_identity(speculative.draft_model_config)}
    return identity


def _identity(model: "ModelConfig") -> dict[str, object]:
    return {"config": _settings(model.hf_config.to_dict()), "quantization": model.quantization, "code": _code(model)}


def _settings(config: object) -> object:
    """Return a configuration without private keys, such as the path, and without the version of Transformers."""
    if not isinstance(config, dict):
        return config
    named = {key: value for key, value in config.items() if not str(key).startswith("_")}
    return {key: _settings(value) for key, value in named.items() if key != "transformers_version"}


def _code(model: "ModelConfig") -> str:
    """Return a digest of the Python files in the model's folder, for --trust-remote-code; empty if there are none."""
    if (folder := model_folder(model.model, model.revision)) is None:
        return ""
    files, digest = sorted(folder.rglob("*.py")), hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)}:{path.stat().st_size}:".encode() + path.read_bytes())
    return digest.hexdigest()[:32] if files else ""
