"""The keys that codes and books are sealed with at rest: a file of them, and the ring that follows it.

    names: BASE64           blocks and sessions get their names in the store by it; it stays as it is
    current: k2             the key that is written with
    keys:                   those that are read with
      k1: BASE64
      k2: BASE64
    tenants:                who has keys of their own
      acme: {current: k1, keys: {k1: BASE64}}
      globex: {keys: {}}    nothing of theirs is written or read

Each is 32 random bytes. `manthan keys` makes such files and changes them.
"""

import base64
import binascii
import hmac
import logging
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from manthan.manager.config.model import ConfigError, EncryptionConfig
from manthan.manager.config.sentences import nearest

logger = logging.getLogger("vllm.manthan.keys")

SECRET_NBYTES, MARK_NBYTES = 32, 8
FIELD = "cold_store.encryption.key_file"
PARTS = ("names", "current", "keys", "tenants")
OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""What a key file's mode may not grant: anything to everybody, and changes to its group."""


class KeyFileError(ConfigError):
    """What is wrong with a key file, in a sentence that begins with its path."""


def derived(secret: bytes, purpose: str, nbytes: int = SECRET_NBYTES, salt: bytes | None = None) -> bytes:
    """A key made of another one (HKDF-SHA256): of two purposes, or salts, neither tells anything about the other."""
    return HKDF(hashes.SHA256(), nbytes, salt, f"manthan {purpose}".encode()).derive(secret)


@dataclass(frozen=True)
class Key:
    """One key. tenant: whose it is; empty for everybody who has none. mark: stands in what is sealed, and tells the key
    from others without telling it."""

    tenant: str
    id: str
    secret: bytes = field(repr=False)
    mark: bytes = b""

    @classmethod
    def of(cls, tenant: str, id: str, secret: bytes) -> "Key":
        return cls(tenant, id, secret, derived(secret, "mark of a key", MARK_NBYTES))


class Names:
    """What blocks and sessions are called in a store, so that nobody learns anything of tokens from it who has not the
    key: the same always, so that every engine finds them. secret: None to call them what they are."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret
        self._blocks = AESSIV(derived(secret, "names of blocks", 64)) if secret else None
        self._sessions = derived(secret, "names of sessions") if secret else b""

    @property
    def mark(self) -> str:
        """What tells these names from those of another key; empty if they tell all."""
        return derived(self._secret, "mark of names", MARK_NBYTES).hex() if self._secret else ""

    def block(self, key: bytes) -> bytes:
        return self._blocks.encrypt(key, None) if self._blocks is not None else key

    def key(self, block: bytes) -> bytes | None:
        """The key of the block that is called so; None for what is no such name."""
        if self._blocks is None:
            return block
        try:
            return self._blocks.decrypt(block, None)
        except Exception:  # InvalidTag, or ValueError for what is too short
            return None

    def session(self, session_id: str) -> str:
        """Those of sessions without a name are still told from others."""
        if self._secret is None:
            return session_id
        digest = hmac.digest(self._sessions, session_id.encode("utf-8", "surrogatepass"), "sha256")
        return ("anonymous-" if session_id.startswith("anonymous-") else "") + digest[:16].hex()

    def key_for(self, purpose: str) -> bytes:
        """A key for names of another kind, which last as long as these do."""
        return derived(self._secret, purpose) if self._secret else b""


PLAIN_NAMES = Names()


@dataclass(frozen=True)
class Keys:
    """What a key file says. writing: by tenant, "" for everybody else, the current key; None where nothing is to be
    written. reading: by mark."""

    names: bytes = field(repr=False)
    writing: Mapping[str, Key | None]
    reading: Mapping[bytes, Key]

    def of(self, tenant: str) -> Key | None:
        """What to write with."""
        return self.writing[tenant if tenant in self.writing else ""]


def read_keys(path: Path) -> Keys:
    """Raises KeyFileError."""
    said = read_key_file(path)
    names = _secret(path, "names", said.get("names"))
    tenants = said.get("tenants") or {}
    if not isinstance(tenants, dict) or "" in tenants:
        raise KeyFileError(f"{path}: tenants must be a mapping of tenants' names to their current and keys.")
    writing, reading = {}, dict[bytes, Key]()
    for tenant, ring in {"": {name: said.get(name) for name in ("current", "keys")}, **tenants}.items():
        where = f"tenants.{tenant}." if tenant else ""
        keys = {key.id: key for key in _keys(path, tenant, where, ring)}
        writing[tenant] = _current(path, tenant, where, ring, keys)
        for key in keys.values():
            if other := reading.get(key.mark):
                raise KeyFileError(
                    f"{path}: {where}keys.{key.id} must be a key of its own, not that of {_place(other)}."
                )
            reading[key.mark] = key
    return Keys(names, writing, reading)


def read_key_file(path: Path) -> dict[str, Any]:
    """What the file says, all scalars as text. Raises KeyFileError."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            said = yaml.load(file, Loader=yaml.BaseLoader)  # ids are text, also those that look like dates
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}: `manthan keys new` makes one.") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise KeyFileError(f"{path} is not valid YAML.") from None
    if mode & OTHERS:
        raise KeyFileError(
            f"{path} has mode {mode:04o}, with which others than its owner may read or change it: chmod 600 it."
        )
    if not isinstance(said, dict):
        raise KeyFileError(f"{path} must be a mapping with {', '.join(PARTS)}.")
    for part in said:
        if part not in PARTS:
            raise KeyFileError(f"{path}: unknown key '{part}'{nearest(str(part), PARTS)}.")
    return said


def _keys(path: Path, tenant: str, where: str, ring: object) -> Iterator[Key]:
    """Those of one tenant, or of everybody else."""
    if not isinstance(ring, dict) or {*ring} - {"current", "keys"}:
        raise KeyFileError(f"{path}: {where.rstrip('.')} must be a mapping with current and keys.")
    keys = ring.get("keys")
    if (not isinstance(keys, dict) and not (tenant and not keys)) or not (keys or tenant):
        raise KeyFileError(f"{path}: {where}keys must be a mapping of at least one id to 32 bytes in base64.")
    for id, text in (keys or {}).items():
        yield Key.of(tenant, id, _secret(path, f"{where}keys.{id}", text))


def _current(path: Path, tenant: str, where: str, ring: Any, keys: Mapping[str, Key]) -> Key | None:
    current = ring.get("current")
    if not keys and not current:
        return None
    if current not in keys:
        hint = nearest(str(current), keys)
        raise KeyFileError(f"{path}: {where}current must be the id of a key, not {current!r}{hint}.")
    return keys[current]


def _secret(path: Path, where: str, text: object) -> bytes:
    """Never shows what is there."""
    try:
        secret = base64.b64decode(text if isinstance(text, str) else "", validate=True)
    except binascii.Error:
        secret = b""
    if len(secret) != SECRET_NBYTES:
        raise KeyFileError(
            f"{path}: {where} must be {SECRET_NBYTES} random bytes in base64, as `openssl rand -base64 32` prints them."
        )
    return secret


def _place(key: Key) -> str:
    return f"tenants.{key.tenant}.keys.{key.id}" if key.tenant else f"keys.{key.id}"


class KeyRing:
    """The keys of a file, as it is now: it is read again when it has changed. What is wrong with it then is logged, and
    the keys stay what they were. Raises ConfigError for what is wrong with it at first."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._seen = self._look()
        try:
            self._keys = read_keys(self._path)
        except KeyFileError as error:
            raise ConfigError(f"{FIELD}: {error}") from None
        self.names = Names(self._keys.names)

    @property
    def keys(self) -> Keys:
        if self._look() != self._seen:
            with self._lock:
                seen = self._look()
                if seen != self._seen:
                    self._read_again()
                    self._seen = seen
        return self._keys

    def _look(self) -> tuple[int, ...]:
        """What changes with the file."""
        try:
            found = self._path.stat()
        except OSError as error:
            return (error.errno or 0,)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _read_again(self) -> None:
        try:
            found = read_keys(self._path)
        except KeyFileError as error:
            logger.warning("Manthan: the keys stay what they were: %s", error)
            return
        if found.names != self._keys.names:
            logger.warning("Manthan: the keys stay what they were: %s: names is another; start again.", self._path)
            return
        self._keys = found
        logger.info("Manthan: keys are read again from %s: %d, %s", self._path, len(found.reading), _current_ids(found))


def ring_of(config: EncryptionConfig) -> KeyRing | None:
    """Raises ConfigError."""
    return KeyRing(config.key_file) if config.key_file else None


def _current_ids(keys: Keys) -> str:
    """Which are written with, for people."""
    told = {f"tenant {tenant!r}" if tenant else "current": key for tenant, key in keys.writing.items()}
    return ", ".join(f"{whose} {key.id if key else 'none'}" for whose, key in told.items())
