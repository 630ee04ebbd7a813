"""The tiers' budget in bytes: an upper bound is reserved, and what was not needed comes back."""

import pytest
from talks import Talks


def test_bytes_that_compressed_blocks_did_not_take_are_free_again() -> None:
    talks = Talks(capacity=6, holds=True)  # and 99 bytes
    talks.nbytes = 60
    talks.talk("a b c", "alice")
    talks.now += talks.manager.idle_after_s
    talks.step()
    assert (talks.manager.blocks.reserved_nbytes, talks.manager.free_nbytes) == (300, 699 - 300)
    talks.answer()
    assert (talks.manager.blocks.saved_nbytes, talks.manager.free_nbytes) == (180, 699 - 180)
    talks.holds = False
    talks.talk("v w x y z", "bob")
    talks.rest()
    assert talks.states() == {"alice": "cold", "bob": "cold"}  # by their bounds they would not fit


@pytest.mark.invariant(
    5, "manager/session/blocks.py", "return self.saved_nbytes + self.reserved_nbytes", "return self.saved_nbytes"
)
def test_a_bound_is_never_overdrawn_though_it_may_turn_out_too_much() -> None:
    talks = Talks(capacity=3, holds=True)
    talks.nbytes = 60
    talks.talk("a b c d", "alice")
    talks.now += talks.manager.idle_after_s
    assert [len(store) for store in talks.step().stores] == [3]
    assert talks.manager.free_nbytes == 99
    assert not talks.step().stores
    talks.answer()
    assert talks.saved() == {"a", "a b", "a b c"}
    assert talks.texts() == {"alice": "a b c d"}, "the last block is in the pool"
