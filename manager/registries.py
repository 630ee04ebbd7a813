"""Names in a configuration against what is registered."""

from manthan.codec import codec_names
from manthan.manager.cold_store import COLD_STORES
from manthan.manager.config import Resolved, check_names
from manthan.policies import policy_names


def check_registered(resolved: Resolved) -> None:
    """Raise ConfigError for a policy, a policy's option, a codec or a cold store that nobody registered."""
    check_names(
        resolved.config,
        policies=dict.fromkeys(policy_names(), ()),
        codecs=codec_names(),
        stores=COLD_STORES,
        sources=resolved.sources,
    )
