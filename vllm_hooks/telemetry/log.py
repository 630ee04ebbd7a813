"""Log lines: settings at start, evictions, restores, and verdicts of the guard, which measures the loss of codecs."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from manthan.codec.cpu.exact import EXACT
from manthan.codec.fidelity import LOGIT_NOISE, VALUE_NOISE, WORST_LOGIT_NOISE
from manthan.codec.registry import needs_profile
from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.config.resolve import human_bytes
from manthan.manager.events import FIRST_BLOCKS
from manthan.manager.guard import MOST_DIVERGENCE, RECHECKS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from manthan.codec.fidelity import Fidelity
    from manthan.manager.events import Evicted, Judged, Restored
    from manthan.manager.session.blocks import MemoryShape

logger = init_logger("vllm.manthan")


def check_capacity(config: ManthanConfig, shape: "MemoryShape", capacity: int) -> None:
    """Raise ConfigError if the cold store, all tiers with `capacity` usable bytes, cannot hold the largest block."""
    largest = max(shape.sizes)
    if capacity < largest:
        raise ConfigError(
            f"tiers.max_bytes is {config.tiers.max_bytes}, but one encoded block of this model "
            f"({shape.block_tokens} tokens) takes {largest} bytes: give it room for many."
        )


def announce(
    vllm_config: "VllmConfig", config: ManthanConfig, shape: "MemoryShape", capacity: int, place: str = ""
) -> None:
    """Log the settings in use. capacity: usable bytes of all tiers. place: name of the namespace in a disk or Redis."""
    store, codec, nbytes = config.tiers, config.codec, shape.groups[shape.main].cold_nbytes
    host_bytes = store.front_bytes or store.host_bytes
    profile = f" with the profile {codec.profile}" if codec.profile else ""
    exact = f" with the first {codec.sink_tokens} tokens of each session kept exact" if codec.sink_tokens else ""
    host = f" and host of {human_bytes(host_bytes)}" if host_bytes else ""
    where = f" at {store.redis.url if store.is_shared else store.disk.path} as {place}" if place else ""
    logger.info(
        f"Manthan is on: policy {config.policy.name}, codec {codec.name}{profile} ({shape.ratio:.2f}x for "
        f"{vllm_config.model_config.model}, {nbytes // shape.block_tokens} bytes a token){exact}, cold store "
        f"{store.kind} of {human_bytes(store.max_bytes)}{host}{where} for {capacity // nbytes * shape.block_tokens} "
        f"tokens, idle after {config.idle.after_s:g} s"
    )
    if needs_profile(codec.name) and not codec.sink_tokens:
        logger.warning("Manthan: a session's first tokens are far from any profile: set codec.sink_tokens to 4")


def _of_points(blocks: int) -> str:
    return f" and {blocks} of windows or states" if blocks else ""


def printable(name: str) -> str:
    """Return the name with control characters escaped."""
    return name if name.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def tell_eviction(eviction: "Evicted") -> None:
    """Log a session that went cold: all its full blocks are saved."""
    before = eviction.blocks + eviction.at_points - eviction.stored
    ratio = eviction.pool_nbytes / max(1, eviction.cold_nbytes)
    said = f" in {eviction.took_s * 1e3:.0f} ms" if eviction.took_s >= 5e-4 else " ahead"
    said += f", {before} before" if before > 0 else ""
    said += f", {eviction.exact} with tokens kept exact" if eviction.exact else ""
    said += ", because memory was short" if eviction.is_pressed else ""
    logger.info(
        f"Manthan: session {printable(eviction.session_id)} went cold after {eviction.idle_s:.1f} s idle: "
        f"{eviction.blocks} blocks ({eviction.tokens} tokens){_of_points(eviction.at_points)}, "
        f"{human_bytes(eviction.pool_nbytes)} to {human_bytes(eviction.cold_nbytes)} ({ratio:.2f}x), "
        f"{eviction.stored} encoded{said}"
    )


def tell_restore(restored: "Restored", shape: "MemoryShape") -> None:
    """Log the restored or prefetched blocks of a session. vLLM recomputes blocks that could not be read."""
    causes = ", ".join(sorted(set(restored.causes)))
    what = "prefetched" if restored.request_id is None else "restored"
    rest = f"; the rest could not be read ({causes}) and is recomputed" if causes else ""
    logger.info(
        f"Manthan: session {printable(restored.session_id)} {what} {restored.good} of {restored.blocks} blocks "
        f"({restored.good * shape.block_tokens} tokens){_of_points(restored.at_points)} in "
        f"{restored.seconds * 1e3:.0f} ms{rest}"
    )


def tell_guard(configured: str, finest: str) -> None:
    """Log codec `finest`, in use until the guard's verdict on codec `configured`."""
    logger.info(
        f"Manthan: codec {finest} is used until the loss of {configured} on this model's KV is measured, on "
        f"{FIRST_BLOCKS} blocks"
    )


def tell_approved(codec: str) -> None:
    """Log that the codec is used before the guard's verdict, because the guard of an earlier server has chosen it."""
    logger.info(f"Manthan: codec {codec} is used at once: with these weights an earlier server has found it faithful")


def tell_left_out() -> None:
    """Log that a codec's profile is made without the prompts of tenants."""
    logger.info(
        "Manthan: prompts of tenants are left out of the profile that is made from traffic; if all requests have "
        "tenants, none is made: `manthan calibrate` makes one"
    )


def tell_verdict(found: "Judged") -> None:
    """Log the codec in use, and the loss on this model's KV of all measured codecs up to it, the coarsest first."""
    verdict = found.verdict
    said = ", then ".join(map(_fidelity, verdict.measured[: found.choice + 1]))
    if verdict.compute_s:
        said += f"; the model computes a token in {verdict.compute_s * 1e6:.3g} us"
    if not found.is_fallback:
        stays = f"codec {verdict.measured[0].codec} is not used, and " if found.choice else ""
        logger.info(f"Manthan: {stays}codec {found.codec} is faithful on this model: {said}")
        return
    why = "takes longer to decode than this model to compute" if found.is_slow else "is not faithful on this model"
    instead = "all tokens are kept exact" if found.codec == EXACT else f"{found.codec} is used instead"
    logger.warning(
        f"Manthan: codec {verdict.measured[found.configured].codec} {why}, and {instead}; choose another with "
        f"`codec: {{name: ...}}`, or keep this one with `codec: {{guard: false}}`. Measured: {said}"
    )


def tell_rechecks(mean: float) -> None:
    """Log that a finer codec is used from now on. mean: divergence in nats of the first token behind restored KV."""
    logger.warning(
        f"Manthan: behind the last {RECHECKS} rechecked restores the first token diverges by {mean:.2g} nats on "
        f"average ({MOST_DIVERGENCE:g} is allowed): a finer codec is used from now on"
    )


def _fidelity(found: "Fidelity") -> str:
    return (
        f"{found.codec} adds {found.logit_noise.mean():.2g} of noise to attention logits ({LOGIT_NOISE:g} is allowed), "
        f"{found.logit_noise.max():.2g} in layer {found.worst_layer} ({WORST_LOGIT_NOISE:g}), "
        f"{found.value_noise.max():.2g} to values ({VALUE_NOISE:g}), measured on {found.tokens} tokens; a token takes "
        f"{found.decode_s * 1e6:.3g} us to decode"
    )
