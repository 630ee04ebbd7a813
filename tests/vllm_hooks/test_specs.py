"""Several KV cache groups: how many blocks of a pool requests take, and where they can be gone on from."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from documents import REPO
from loaded import load_config
from vllm.config import CacheConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from manthan.manager.config.resolve import ConfigError
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks.groups import (
    ALONE,
    NO_LATENTS,
    SPECS,
    Context,
    Groups,
    KvCacheGroup,
    Part,
    PointGroup,
    StoredAs,
    entry_of,
    groups_of,
    on_all_ranks,
)
from manthan.vllm_hooks.memory import Shards, block_shape, exact_counts, group_shape
from manthan.vllm_hooks.support import Latents, UnsupportedError

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **HEADS)
LATENT = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}


def at_points(index: int, spec: Any) -> PointGroup:
    """A group of four layers."""
    entry = entry_of(spec)
    assert entry is not None
    return PointGroup(KvCacheGroup(index, spec, 4), entry.reach(spec))


MAIN = KvCacheGroup(0, FULL, 4)
WINDOW = at_points(1, SlidingWindowSpec(block_size=16, sliding_window=128, **HEADS))
LARGE = at_points(2, SlidingWindowSpec(block_size=32, sliding_window=128, **HEADS))
STATE = at_points(3, MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,)))
CHUNKS = at_points(4, ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **HEADS))
DENSE = at_points(5, FULL)


@pytest.mark.parametrize(
    ("groups", "tokens", "held"),
    [
        (Groups(MAIN), 1000, 63),
        (Groups(MAIN, [WINDOW]), 1000, 63 + 24 + 1),
        (Groups(MAIN, [WINDOW, LARGE]), 1000, 63 + 24 + 1 + 12 + 1),
        (Groups(MAIN, [STATE, STATE]), 1000, 63 + 2 + 2),
        (Groups(WINDOW.group, [WINDOW]), 1000, 24 + 1),
        (Groups(MAIN, [WINDOW, LARGE, STATE]), 40, 3 + 3 + 2 + 2),
        (Groups(MAIN, [STATE]), 10, 1 + 1),
        (Groups(MAIN, [DENSE], unstored=[16]), 1000, 63 + 63 + 1),
        (Groups(MAIN, [CHUNKS]), 1000, 63 + 20 + 1),
    ],
)
def test_a_request_holds_what_its_groups_look_back_on(groups: Groups, tokens: int, held: int) -> None:
    """A short one holds all of its blocks in each group."""
    assert groups.held(tokens, in_flight=256) == held


def test_a_step_takes_blocks_of_each_group() -> None:
    """And for each request one more, in which it has begun before."""
    assert Groups(MAIN).taken(100, 3) == 7 + 3
    assert Groups(MAIN, [WINDOW, LARGE]).taken(100, 3) == 7 + 3 + 7 + 3 + 4 + 3
    assert Groups(WINDOW.group, [WINDOW]).taken(100, 3) == 7 + 3
    assert Groups(MAIN, unstored=[4]).taken(100, 3) == 7 + 3 + 25 + 3


def test_each_token_that_is_proposed_has_a_block_of_states() -> None:
    spec = MambaSpec(shapes=((2, 3),), dtypes=(torch.float32,), block_size=16, num_speculative_blocks=3)
    state = at_points(3, spec)
    assert Groups(MAIN, [state, state]).held(1000, in_flight=256) == 63 + 2 * (2 + 3)
    assert Groups(MAIN, [state]).taken(100, 3) == 7 + 3 + 7 + 3 + 3 * 3


def test_a_checkpoint_in_a_prefill_has_a_block_of_states() -> None:
    spec = MambaSpec(shapes=((2, 3),), dtypes=(torch.float32,), block_size=16, num_prefill_checkpoint_blocks=1)
    assert Groups(MAIN, [at_points(3, spec)]).held(1000, in_flight=256) == 63 + 2 + 1


def test_a_draft_has_the_last_block_found_computed_again() -> None:
    """What is needed besides it is needed a block before."""
    plain, drafted = Groups(MAIN, [WINDOW, STATE]), Groups(MAIN, [WINDOW, STATE], again=1)
    assert [plain.deepest(depth) for depth in range(4)] == [0, 1, 2, 3]
    assert [drafted.deepest(depth) for depth in range(4)] == [0, 0, 2, 3]
    for depth in range(1, 40):
        assert list(drafted.parts(depth)) == list(plain.parts(depth - 1))
    assert list(drafted.parts(0)) == []
    assert list(drafted.parts(13))[-1] == Part(3, 11, 176, 192)


def test_vllm_looks_at_a_whole_prompt_where_a_block_of_it_is_computed_again() -> None:
    """If it has several groups."""
    drafted = Groups(MAIN, [STATE], again=1)
    assert [groups.last_tokens for groups in (Groups(MAIN, [STATE]), drafted, Groups(MAIN, again=1))] == [1, 0, 1]
    assert Groups(WINDOW.group, [WINDOW], again=1).last_tokens == 1


def test_what_is_prefetched_is_found_unless_windows_need_another_block() -> None:
    assert Groups(MAIN, [WINDOW, STATE]).is_expected
    assert Groups(MAIN, [STATE], again=1).is_expected
    assert not Groups(MAIN, [WINDOW, STATE], again=1).is_expected
    assert not Groups(MAIN, [LARGE]).is_expected


def test_hashes_are_as_far_apart_as_vllm_is_told() -> None:
    """They are at the ends of all blocks in any case."""
    assert [Groups(MAIN, [LARGE], unit=unit).hash_tokens for unit in (None, 8, 16)] == [16, 8, 16]
    assert groups_of(KVCacheConfig(8, [], [KVCacheGroupSpec(["0"], FULL)]), CacheConfig(prefix_match_unit=4)).unit == 4
    assert Groups(MAIN, [LARGE], unit=8).deepest(5) == Groups(MAIN, [LARGE]).deepest(5)


# ---- context parallelism


def test_ranks_of_context_parallelism_share_a_block() -> None:
    """Two ranks hold four tokens each in turn; the first 20 tokens are 12 of the first rank and 8 of the other."""
    context = Context(2, 4)
    found = told(FULL, RING, context=context)
    assert (found.main.tokens, found.hash_tokens, found.deepest(3)) == (32, 32, 3)
    assert found.unstored == (8,)
    assert [context.first_tokens(count) for count in (0, 1, 4, 8, 20, 32, 64)] == [0, 4, 4, 4, 12, 16, 32]
    assert [ALONE.first_tokens(count) for count in (0, 1, 4, 64)] == [0, 1, 4, 64]
    job = Transfer(1, "store", 0, [b"a", b"b"], np.array([3, 4], np.int32), first_token=32, exact_tokens=52)
    of_rank = found.main.of_a_rank(job)
    assert list(zip(of_rank.first_tokens(16), of_rank.exacts(16), strict=True)) == [(16, 12), (32, 0)]
    codec = load_config(flags={"codec": {"name": "wht-5x", "sink_tokens": 4}}).codec
    assert exact_counts(codec, found.main) == {0: 0, 4: 4, 32: 16}
    shape = group_shape(codec, found.main, Shards(2))
    alone = group_shape(codec, told(FULL).main, Shards(2))
    assert (shape.tokens, alone.tokens) == (32, 16)
    assert list(shape.bounds.values()) == list(alone.bounds.values()), "each rank's block is as large"


# ---- vLLM's specs


LATENTS = Latents(512, 64)


def told(*specs: KVCacheSpec, latents: Latents = NO_LATENTS, context: Context = ALONE, **facts: Any) -> Groups:
    """Groups with a layer each."""
    groups = [KVCacheGroupSpec([str(n)], spec, **facts) for n, spec in enumerate(specs)]
    return groups_of(KVCacheConfig(8, [], groups), None, latents, context)


def test_every_spec_of_vllm_has_an_entry() -> None:
    """Only those that stand for others, or that no layer has, do without."""
    found = {
        name
        for name, each in vars(kv_cache_interface).items()
        if isinstance(each, type) and issubclass(each, KVCacheSpec)
    }
    assert found - set(SPECS) == {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}


def test_only_one_module_tells_specs_apart() -> None:
    """A new spec is an entry and a layout function there. The doctor's sentences name states."""
    folders = [REPO / name for name in ("codec", "manager", "policies", "vllm_hooks")]
    sources = [path for folder in folders for path in folder.rglob("*.py") if path.name != "groups.py"]
    names = re.compile("|".join(rf"\b{name}\b" for name in SPECS))
    found = {str(path.relative_to(REPO)): names.findall(path.read_text(encoding="utf-8")) for path in sources}
    assert {path: said for path, said in found.items() if said} == {"vllm_hooks/doctor/model.py": ["MambaSpec"]}


SPARSE = MLAAttentionSpec(block_size=16, **LATENT)
INDEXER = MLAAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
)
RATIO_4 = MLAAttentionSpec(block_size=256, tokens_per_state=4, alignment=576, **LATENT)
PLAIN_RATIO_4 = replace(RATIO_4, alignment=512, page_size_padded=None)
REPLAYED = SlidingWindowMLASpec(block_size=16, sliding_window=64, bounded_replay=True, **LATENT)
LOCAL = SlidingWindowMLASpec(block_size=64, sliding_window=128, **LATENT)
RING = CircularBufferSpec(block_size=4, **HEADS)


@pytest.mark.parametrize(
    ("spec", "is_coded"),
    [
        (FULL, True),
        (replace(FULL, sliding_window=64), True),
        (replace(FULL, head_size_v=32), False),
        (RSWASpec(block_size=16, rswa_window=64, **HEADS), True),
        (SinkFullAttentionSpec(block_size=16, sink_len=16, **HEADS), True),
        (SPARSE, True),
        (replace(SPARSE, page_size_padded=2**15), False),
        (INDEXER, False),
        (RATIO_4, False),
        (replace(SPARSE, head_size=640), False),
        (PLAIN_RATIO_4, False),
        (LOCAL, True),
        (replace(LOCAL, head_size=2048, dtype=torch.float32), False),
        (WINDOW.group.spec, True),
        (CHUNKS.group.spec, True),
    ],
)
def test_blocks_that_no_codec_knows_are_bytes(spec: KVCacheSpec, is_coded: bool) -> None:
    found = told(spec, latents=LATENTS).main
    assert found.is_packed is not is_coded
    assert found.page_nbytes == spec.page_size_bytes


def test_a_class_of_somebody_else_is_stored_as_bytes_like_its_base() -> None:
    class Mine(SlidingWindowSpec):
        pass

    found = told(FULL, Mine(block_size=16, sliding_window=128, **HEADS))
    [window] = found.at_points
    assert window.group.is_packed
    assert window.reach == 128


def test_the_chain_is_coded_if_one_is_and_the_largest() -> None:
    small, wide = replace(FULL, num_kv_heads=1), replace(FULL, num_kv_heads=4)
    assert told(small, FULL, WINDOW.group.spec).main.index == 1
    assert told(INDEXER, FULL, RATIO_4).main.index == 1
    assert told(wide, FULL).main.index == 0
    assert [each.group.index for each in told(INDEXER, FULL, RATIO_4).at_points] == [0, 2]
    assert told(WINDOW.group.spec, LARGE.group.spec).main.index == 1
    assert not told(WINDOW.group.spec, LARGE.group.spec).is_whole


def test_a_resume_point_needs_what_vllm_would_allocate() -> None:
    found = told(RATIO_4, INDEXER, LOCAL, REPLAYED, RING, CHUNKS.group.spec, latents=LATENTS)
    assert found.main.index == 0, "the largest blocks"
    assert [each.group.index for each in found.at_points] == [1, 2, 5]
    assert found.unstored == (16, 4)
    assert found.deepest(3) == 3
    needed = [(part.group, part.at) for part in found.parts(2)]
    assert needed == [(1, at) for at in range(32)] + [(2, at) for at in (6, 7)]
    chunks = told(FULL, replace(CHUNKS.group.spec, attention_chunk_size=48))
    assert [[part.at for part in chunks.parts(depth)] for depth in range(1, 6)] == [[0], [0, 1], [], [3], [3, 4]]


def test_resume_points_are_where_blocks_of_all_groups_end() -> None:
    assert [told(FULL, RATIO_4).deepest(depth) for depth in (15, 16, 40)] == [0, 16, 32]
    assert [told(FULL, replace(RING, block_size=48)).deepest(depth) for depth in (2, 3, 7)] == [0, 3, 6]


def one_group(specs: dict[str, Any]) -> KVCacheConfig:
    """Layers that have one group, each in a tensor of its own."""
    tensors = [
        KVCacheTensor(1 << 20, [name], 8 * spec.page_size_bytes, spec.page_size_bytes) for name, spec in specs.items()
    ]
    whole = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    return KVCacheConfig(8, tensors, [KVCacheGroupSpec(list(specs), whole)])


@pytest.mark.parametrize(
    ("coded", "latent"),
    [(SPARSE, 512), (replace(SPARSE, is_index_group_leader=True), 512), (FULL, 0)],
    ids=["latents", "latents of several specs", "keys and values"],
)
def test_layers_that_no_codec_knows_are_opaque_bytes_with_those_that_are_coded(coded: Any, latent: int) -> None:
    """As a sparse model has them: latents, or keys and values, and the keys of its index."""
    other = SPARSE if latent else FULL
    config = one_group({"a": INDEXER, "b": coded, "c": INDEXER, "d": other})
    found = groups_of(config, latents=LATENTS).main
    assert (found.is_packed, found.names, found.layers, found.latent) == (False, ("b", "d"), 2, latent)
    assert found.opaque == KvCacheGroup(0, INDEXER, 2, ("a", "c"), layer_nbytes=(INDEXER.page_size_bytes,) * 2)
    assert found.page_nbytes == 2 * (coded.page_size_bytes + INDEXER.page_size_bytes)
    shape = block_shape(found)
    assert (shape.layers, shape.latent, shape.nbytes) == (2, latent, found.page_nbytes)
    assert shape.opaque is not None
    assert shape.opaque.nbytes == 2 * INDEXER.page_size_bytes


@pytest.mark.parametrize(
    "specs",
    [
        (FULL, replace(FULL, num_kv_heads=4)),
        (SPARSE, replace(INDEXER, head_size=129, block_size=16, page_size_padded=2065)),
        (INDEXER, replace(INDEXER, head_size=64)),
    ],
    ids=["of several shapes", "with odd sizes", "none"],
)
def test_layers_that_cannot_be_stored_together_are_bytes(specs: tuple[Any, ...]) -> None:
    config = one_group({str(n): spec for n, spec in enumerate(specs)})
    found = groups_of(config, latents=LATENTS).main
    assert (found.opaque, found.latent) == (None, 0)
    assert found.layer_nbytes == tuple(spec.page_size_bytes for spec in specs)


def test_bytes_of_layers_of_several_sizes_are_opaque_by_size() -> None:
    """So that kernels copy a run of layers at once."""
    small = replace(INDEXER, head_size=64)
    found = groups_of(one_group({"a": SPARSE, "b": INDEXER, "c": small, "d": INDEXER}), latents=LATENTS).main
    assert found.opaque is not None
    assert found.opaque.names == ("c", "b", "d")
    assert found.opaque.layer_nbytes == (1024, 2112, 2112)


STATES = MLAAttentionSpec(
    block_size=256,
    num_kv_heads=1,
    head_size=512,
    dtype=torch.uint8,
    tokens_per_state=4,
    alignment=576,
    cache_dtype_str="fp8_ds_mla",
    state_content_bytes=584,
)


def test_states_of_four_tokens_are_counted_as_states() -> None:
    """DeepSeek V4's: 64 in a block of 256 tokens, of which 512 bytes of scales lie behind the others."""
    found = groups_of(one_group({"a": STATES, "b": INDEXER, "c": STATES})).main
    assert (found.tokens, found.states, found.layers, found.latent) == (256, 64, 2, 448)
    opaque = found.opaque
    assert opaque is not None
    assert opaque.names == ("a", "c", "b")
    assert (opaque.layer_nbytes, opaque.starts) == ((512, 512, 2112), (36864, 36864, 0))
    shape = block_shape(found)
    assert (shape.tokens, shape.head_dim, shape.value_numbers) == (64, 128, (2, 7, 64, 64))
    assert shape.nbytes == found.page_nbytes == 2 * 64 * 584 + 2112
    job = Transfer(1, "store", 0, [b"a", b"b"], np.array([3, 4], np.int32), first_token=256, exact_tokens=261)
    of_states = found.of_a_rank(job)
    assert (of_states.first_token, of_states.exacts(64), of_states.first_tokens(64)) == (64, [2, 0], [64, 128])
    codec = load_config(flags={"codec": {"name": "wht-5x", "sink_tokens": 5}}).codec
    assert exact_counts(codec, found) == {0: 0, 5: 2, 256: 64}
    sizes = group_shape(codec, found, Shards(1))
    assert (sizes.tokens, sizes.pool_nbytes) == (256, found.page_nbytes)
    assert sizes.bounds[256] > sizes.pool_nbytes > 1.6 * sizes.cold_nbytes
    plain = replace(STATES, tokens_per_state=128), replace(STATES, state_content_bytes=528)
    assert all(told(spec).main.is_packed for spec in plain)


def test_a_group_is_as_on_the_rank_with_most_of_it() -> None:
    told = groups_of(one_group({"a": INDEXER, "b": SPARSE}), latents=LATENTS)
    assert on_all_ranks([told]) == told
    more = told._replace(main=replace(told.main, layers=3, names=("b", "c", "d")))
    assert on_all_ranks([told, more, told]).main == more.main
    with pytest.raises(UnsupportedError, match="rank 1 of the pipeline has no layer of KV cache group 0"):
        on_all_ranks([told, told._replace(main=replace(told.main, layers=0, names=()))])


@pytest.mark.parametrize(
    ("specs", "facts", "why"),
    [
        ((), {}, "the model's KV cache groups are none; one with attention is needed"),
        ((STATE.group.spec,), {}, "the model's KV cache groups are MambaSpec; one with attention is needed"),
        ((RING,), {}, "the model's KV cache groups are CircularBufferSpec; one with attention is needed"),
        (
            (FULL, CrossAttentionSpec(block_size=16, **HEADS)),
            {},
            "the model has a CrossAttentionSpec, whose blocks can be neither stored nor left out; serve it without "
            "Manthan",
        ),
        (
            (FULL,),
            {"host_resident": True},
            "the model has a FullAttentionSpec in the host's memory, whose blocks can be neither stored nor left out; "
            "serve it without Manthan",
        ),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(
    specs: tuple[KVCacheSpec, ...], facts: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        told(*specs, **facts)
    assert str(refused.value) == f"Manthan cannot be used here: {why}."


def test_what_refuses_has_a_manager_in_vllm_that_looks_nothing_up() -> None:
    """So it cannot be found, whoever stores it."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    assert [name for name, entry in SPECS.items() if entry.stored is StoredAs.REFUSED] == ["CrossAttentionSpec"]
    manager: Any = KVCacheSpecRegistry.get_manager_class(CrossAttentionSpec(block_size=16, **HEADS))
    with pytest.raises(NotImplementedError):
        manager.find_longest_cache_hit([], 0, [0], None, CrossAttentionSpec(block_size=16, **HEADS), False, 16)
