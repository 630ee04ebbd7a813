"""The file of keys that codes are sealed with: that it can be read, by its owner alone."""

from manthan.manager.config.model import ColdStoreConfig, ConfigError
from manthan.manager.doctor.finding import Finding, Mark
from manthan.manager.stores.sealed import keys_of

KEYS = "encryption"


def check_keys(store: ColdStoreConfig) -> Finding:
    """Whether the keys may be used."""
    path = store.encryption.key_file
    if not path:
        where = "are stored as they are: no key file is configured" if store.is_lasting else "do not outlive the server"
        return Finding(KEYS, Mark.SKIPPED, f"codes {where}.")
    try:
        keys = keys_of(store.encryption)
    except ConfigError as error:
        return Finding(KEYS, Mark.WRONG, str(error))
    return Finding(KEYS, Mark.OK, f"{path} is for its owner alone, and has {len(keys)} keys.")
