"""Several KV cache groups: how many blocks of a pool requests take, and where they can be gone on from."""

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from manthan.vllm_hooks.support import Groups, KvCacheGroup, Part, Window


def group(index: int, tokens: int = 16) -> KvCacheGroup:
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return KvCacheGroup(index, spec, 4)


CHAIN, WINDOW, LARGE, STATE = group(0), Window(group(1), 128), Window(group(2, 32), 128), Window(group(3), None)


@pytest.mark.parametrize(
    ("groups", "tokens", "held"),
    [
        (Groups(CHAIN), 1000, 63),
        (Groups(CHAIN, [WINDOW]), 1000, 63 + 24 + 1),
        (Groups(CHAIN, [WINDOW, LARGE]), 1000, 63 + 24 + 1 + 12 + 1),
        (Groups(CHAIN, [STATE, STATE]), 1000, 63 + 2 + 2),
        (Groups(WINDOW.group, [WINDOW]), 1000, 24 + 1),
        (Groups(CHAIN, [WINDOW, LARGE, STATE]), 40, 3 + 3 + 2 + 2),
        (Groups(CHAIN, [STATE]), 10, 1 + 1),
    ],
)
def test_a_request_holds_what_its_groups_look_back_on(groups: Groups, tokens: int, held: int) -> None:
    """A short one holds all of its blocks in each group."""
    assert groups.held(tokens, in_flight=256) == held


def test_a_step_takes_blocks_of_each_group() -> None:
    """And for each request one more, in which it has begun before."""
    assert Groups(CHAIN).taken(100, 3) == 7 + 3
    assert Groups(CHAIN, [WINDOW, LARGE]).taken(100, 3) == 7 + 3 + 7 + 3 + 4 + 3
    assert Groups(WINDOW.group, [WINDOW]).taken(100, 3) == 7 + 3


def test_each_token_that_is_proposed_has_a_block_of_states() -> None:
    spec = MambaSpec(shapes=((2, 3),), dtypes=(torch.float32,), block_size=16, num_speculative_blocks=3)
    state = Window(KvCacheGroup(3, spec, 4), None)
    assert Groups(CHAIN, [state, state]).held(1000, in_flight=256) == 63 + 2 * (2 + 3)
    assert Groups(CHAIN, [state]).taken(100, 3) == 7 + 3 + 7 + 3 + 3 * 3


def test_a_draft_has_the_last_block_found_computed_again() -> None:
    """What is needed beside it is needed a block before."""
    plain, drafted = Groups(CHAIN, [WINDOW, STATE]), Groups(CHAIN, [WINDOW, STATE], again=1)
    assert [plain.deepest(depth) for depth in range(4)] == [0, 1, 2, 3]
    assert [drafted.deepest(depth) for depth in range(4)] == [0, 0, 2, 3]
    for depth in range(1, 40):
        assert list(drafted.beside(depth)) == list(plain.beside(depth - 1))
    assert list(drafted.beside(0)) == []
    assert list(drafted.beside(13))[-1] == Part(3, 11, 176, 192)


def test_vllm_looks_at_a_whole_prompt_where_a_block_of_it_is_computed_again() -> None:
    """If it has several groups."""
    drafted = Groups(CHAIN, [STATE], again=1)
    assert [groups.last_tokens for groups in (Groups(CHAIN, [STATE]), drafted, Groups(CHAIN, again=1))] == [1, 0, 1]
    assert Groups(WINDOW.group, [WINDOW], again=1).last_tokens == 1


def test_what_is_prefetched_is_found_unless_windows_need_another_block() -> None:
    assert Groups(CHAIN, [WINDOW, STATE]).is_expected
    assert Groups(CHAIN, [STATE], again=1).is_expected
    assert not Groups(CHAIN, [WINDOW, STATE], again=1).is_expected
    assert not Groups(CHAIN, [LARGE]).is_expected
