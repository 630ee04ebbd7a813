"""Fingerprint in each compressed block's header, and namespace of stores that outlive the engine (disk, Redis).

An engine searches these stores only under its namespace. A block with another fingerprint is not decoded.
"""

import hashlib
import json
import os
from importlib.metadata import version
from typing import TYPE_CHECKING

from manthan.codec import wire
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.manager.config.model import ManthanConfig
from manthan.manager.config.profiles import model_folder
from manthan.manager.tiers.redis import Namespace
from manthan.manager.tiers.sealed import derived, keys_of
from manthan.vllm_hooks.shards import ONE_RANK, Sharding

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from manthan.vllm_hooks.groups import Groups, KvCacheGroup


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

    It depends on the codec of recurrent states, but not on the codec of keys and values, which a block's header names.
    weights: digest of all loaded weights.
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
    """Return the facts that decide the KV of a model and of its draft model, such as configuration, code and weights.

    The configuration has vLLM's overrides, but not the model's path or --max-model-len. weights: digest of all weights,
    the draft's included.
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
