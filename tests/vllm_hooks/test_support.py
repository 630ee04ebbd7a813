"""How many blocks of a pool requests take, where there are several KV cache groups."""

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from manthan.vllm_hooks.support import Group, Groups, Window


def group(index: int, tokens: int = 16) -> Group:
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return Group(index, spec, 4)


CHAIN, WINDOW, LARGE, STATE = group(0), Window(group(1), 128), Window(group(2, 32), 128), Window(group(3), None)


@pytest.mark.parametrize(
    ("groups", "held"),
    [
        (Groups(CHAIN), 63),
        (Groups(CHAIN, [WINDOW]), 63 + 24 + 1),
        (Groups(CHAIN, [WINDOW, LARGE]), 63 + 24 + 1 + 12 + 1),
        (Groups(CHAIN, [STATE, STATE]), 63 + 2 + 2),
        (Groups(WINDOW.group, [WINDOW]), 24 + 1),
    ],
)
def test_a_long_request_holds_what_its_groups_look_back_on(groups: Groups, held: int) -> None:
    assert groups.held(1000, in_flight=256) == held


def test_a_short_request_holds_all_of_its_blocks_in_each_group() -> None:
    assert Groups(CHAIN, [WINDOW, LARGE, STATE]).held(40, in_flight=256) == 3 + 3 + 2 + 2
    assert Groups(CHAIN, [STATE]).held(10, in_flight=256) == 1 + 1


def test_a_step_takes_blocks_of_each_group() -> None:
    """And for each request one more, in which it has begun before."""
    assert Groups(CHAIN).taken(100, 3) == 7 + 3
    assert Groups(CHAIN, [WINDOW, LARGE]).taken(100, 3) == 7 + 3 + 7 + 3 + 4 + 3
    assert Groups(WINDOW.group, [WINDOW]).taken(100, 3) == 7 + 3
