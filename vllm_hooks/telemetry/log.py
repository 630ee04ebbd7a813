"""What the log says: what is on, once at start, who goes cold and returns; and what a block will weigh."""

import time
from collections import Counter
from typing import TYPE_CHECKING

from pydantic import ByteSize
from vllm.logger import init_logger

from manthan.codec import wire
from manthan.codec.exact import exact_parts
from manthan.manager.config.model import CodecConfig
from manthan.manager.config.resolve import ConfigError, ManthanConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from manthan.manager.sessions.session import Eviction
    from manthan.manager.sessions.table import MemoryShape
    from manthan.vllm_hooks.messages import LoadResult

logger = init_logger("vllm.manthan")

QUIET_S = 60.0
"""How long nothing is said of a cause after it was."""


def human_bytes(nbytes: int) -> str:
    """A size for people: 1.6MiB."""
    return ByteSize(nbytes).human_readable()


def encoded_block_nbytes(codec: str, spec: "FullAttentionSpec", layers: int) -> int:
    """Bytes of one rank's encoded block, header included."""
    return wire.block_nbytes(_header(codec, spec, layers))


def parts_of_copy(codec: CodecConfig, spec: "FullAttentionSpec", layers: int) -> int:
    """How many encoded blocks' room an exact copy of one rank's block takes; 0 where none are kept."""
    return exact_parts(_header(codec.name, spec, layers), spec.dtype.itemsize) if codec.keeps_exact else 0


def _header(codec: str, spec: "FullAttentionSpec", layers: int) -> wire.BlockHeader:
    return wire.BlockHeader(
        codec, b"", bytes(wire.FINGERPRINT_LEN), layers, spec.num_kv_heads, spec.block_size, spec.head_size
    )


def check_capacity(config: ManthanConfig, shape: "MemoryShape", blocks: int) -> None:
    """Raise ConfigError if the cold store cannot hold a single block."""
    if blocks < 1:
        raise ConfigError(
            f"cold_store.max_bytes is {config.cold_store.max_bytes}, but one encoded block of this model "
            f"({shape.block_tokens} tokens) takes {shape.cold_nbytes} bytes: give it room for many."
        )


def announce(
    vllm_config: "VllmConfig", config: ManthanConfig, shape: "MemoryShape", blocks: int, place: str = ""
) -> None:
    """One line: policy, codec and its ratio for this model, cold budget and how many tokens that is.

    place: the namespace of a store in Redis.
    """
    store, codec = config.cold_store, config.codec
    host_bytes = store.front_bytes or store.host_bytes
    logger.info(
        "Manthan is on: policy %s, codec %s (%.2fx for %s, %d bytes a token)%s, cold store %s of %s%s%s for %d tokens, "
        "idle after %g s",
        config.policy.name,
        codec.name,
        shape.hot_nbytes / shape.cold_nbytes,
        vllm_config.model_config.model,
        shape.cold_nbytes // shape.block_tokens,
        f" with the first {codec.sink_tokens} and last {codec.window_tokens} tokens of each session kept exact"
        if codec.keeps_exact
        else "",
        store.kind,
        human_bytes(store.max_bytes),
        f" and host of {human_bytes(host_bytes)}" if host_bytes else "",
        f" at {config.redis.url} as {place}" if place else "",
        blocks * shape.block_tokens,
        config.idle_after_s,
    )


def tell_eviction(eviction: "Eviction", shape: "MemoryShape") -> None:
    hot, cold = eviction.blocks * shape.hot_nbytes, eviction.blocks * shape.cold_nbytes
    logger.info(
        "Manthan: session %s went cold after %.1f s idle: %d blocks (%d tokens), %s to %s (%.2fx), "
        "%d encoded in %.0f ms%s",
        eviction.session_id,
        eviction.idle_s,
        eviction.blocks,
        eviction.tokens,
        human_bytes(hot),
        human_bytes(cold),
        hot / cold,
        eviction.encoded,
        eviction.took_s * 1e3,
        f", {eviction.exact} kept exact" if eviction.exact else "",
    )


def tell_restore(
    session_id: str,
    blocks: int,
    good: int,
    block_tokens: int,
    answers: "Iterable[LoadResult]",
    failures: "Iterable[str]",
    verb: str = "restored",
) -> None:
    """`good` of the `blocks` are hot again; the causes of what failed are those of vLLM's recomputing the rest."""
    causes = ", ".join(sorted(set(failures)))
    logger.info(
        "Manthan: session %s %s %d of %d blocks (%d tokens) in %.0f ms%s",
        session_id,
        verb,
        good,
        blocks,
        good * block_tokens,
        max((answer.seconds for answer in answers), default=0.0) * 1e3,
        f"; the rest could not be read ({causes}) and is recomputed" if causes else "",
    )


class Complaints:
    """Says that blocks could not be stored, and why: the first at once, and then how many once a minute."""

    def __init__(self) -> None:
        self._unsaid: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def not_stored(self, causes: "Iterable[str]") -> None:
        now = time.monotonic()
        for cause in causes:
            self._unsaid[cause] += 1
            if now >= self._quiet_until.get(cause, 0.0):
                logger.warning("Manthan: blocks could not be stored (%s): %d", cause, self._unsaid.pop(cause))
                self._quiet_until[cause] = now + QUIET_S
