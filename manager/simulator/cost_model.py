"""Durations and sizes in a simulation."""

from dataclasses import dataclass

# One H200 and the shape of Qwen3-8B, a session of 32,000 tokens: time to first token in seconds (docs/benchmarks.md).
_TOKENS = 32_000
_RESIDENT_S, _HOST_S, _RECOMPUTED_S = 0.0246, 0.0511, 1.2305
# The share of a prefill that grows with the square of its length follows from the shape: FLOPs of the projections, and
# of attention over half of all pairs. 36 layers, hidden size 4,096, 8 KV heads of 128, MLP of 12,288.
_LINEAR = 2 * 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) * _TOKENS
_SQUARE = 2 * 36 * 4096 * _TOKENS**2
_SQUARE_SHARE = _SQUARE / (_LINEAR + _SQUARE)
_RESTORE = (_HOST_S - _RESIDENT_S) / _TOKENS


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes of an H200 with a model of Qwen3-8B's shape and compressed blocks in pinned RAM.

    Args:
        first_token_s: fixed part of every request.
        prefill_s_per_token, prefill_s_per_token2: a token at position p takes the first and 2p of the second.
        restore_s_per_token, store_s_per_token: decoding and encoding, which are assumed to be equally fast.
        decode_s_per_token: between two tokens of an answer.
    """

    first_token_s: float = _RESIDENT_S
    prefill_s_per_token: float = (1 - _SQUARE_SHARE) * (_RECOMPUTED_S - _RESIDENT_S) / _TOKENS
    prefill_s_per_token2: float = _SQUARE_SHARE * (_RECOMPUTED_S - _RESIDENT_S) / _TOKENS**2
    restore_s_per_token: float = _RESTORE
    store_s_per_token: float = _RESTORE
    decode_s_per_token: float = 0.0071
    kv_bytes_per_token: float = 147_456
    cold_bytes_per_token: float = 28_800

    def prefill_s(self, first: int, last: int) -> float:
        """Return the seconds to compute the tokens from position `first` up to `last`."""
        return self.prefill_s_per_token * (last - first) + self.prefill_s_per_token2 * (last**2 - first**2)
