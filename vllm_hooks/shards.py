"""Shards of a block: the parts of a KV block that the ranks of an engine have.

A shard is some or all KV heads of the layers of the rank's pipeline stage; with context parallelism, some tokens of
these layers. Several ranks of a stage may have the same shard.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from manthan.codec.registry import needs_profile
from manthan.manager.tiers.joined import Shard
from manthan.vllm_hooks.support import has_draft
from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on_gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from manthan.vllm_hooks.groups import Groups


MOST_PARTS = 16
"""Most ranks in a stage of another engine whose blocks this engine looks for."""


class Sharding(NamedTuple):
    """Division of blocks among an engine's ranks: `ranks` in each of `stages` pipeline stages.

    parts: number of different shards in a stage; each is on `copies` consecutive ranks. heads: number of the model's KV
    heads; 1 if all ranks of a stage have the same shard; 0 if only engines with the same number of ranks can read the
    blocks.
    """

    stages: int = 1
    ranks: int = 1
    parts: int = 1
    heads: int = 0

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
        """Number of ranks that have the same shard."""
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
    """Number of KV heads of each layer, of the model and its draft; 0 if their configurations name several numbers."""
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

    False on a GPU, because kernels decode only whole blocks of a rank. False for a codec with a profile of the model,
    because a profile is cut for one number of ranks.
    """
    codec = from_vllm_config(vllm_config).codec
    return sharding.heads > 0 and not is_on_gpu(vllm_config) and not needs_profile(codec.name)
