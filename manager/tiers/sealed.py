"""Encryption ("sealing") of compressed KV blocks, and of the disk's records of sessions; see docs/security.md.

The key file has a key on each line, 32 random bytes in base64. The first key seals (encrypts). The others are old keys,
with which values can still be opened (decrypted). From each key, a key for each tenant is derived for AES-256-GCM, and
a mark, by which `open` finds the file's key. A sealed value is, little-endian:

    magic "MNS" · version u8 · mark of the key, 8 bytes · salt, 16 bytes · nonce, 12 bytes · ciphertext, with tag

A value is bound to a namespace (a model's storage), a name in the namespace, and a tenant, and opens under these only.
"""

import base64
import binascii
import hmac
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from manthan.manager.config.model import ConfigError, SealingConfig
from manthan.manager.tiers.joined import JoinedTier, Shard
from manthan.manager.tiers.tier import Buffer, Found, Tier

MAGIC, VERSION, KEY_NBYTES = b"MNS", 1, 32
_HEADER = struct.Struct("<3sB8s16s12s")
OVERHEAD = _HEADER.size + 16  # bytes of a sealed value beyond the data


class SealError(Exception):
    """Error: a value was changed, or was sealed for another name or tenant, or with an unknown key."""

    cause = "seal"  # cause of a failure, a metric's label


@lru_cache(maxsize=1024)
def derived(key: bytes, purpose: str, tenant: str = "", salt: bytes | None = None, nbytes: int = KEY_NBYTES) -> bytes:
    """Return a key or a mark of `nbytes` bytes, derived from `key` for a purpose and a tenant (HKDF-SHA256)."""
    return HKDF(hashes.SHA256(), nbytes, salt, f"manthan {purpose}\0{tenant}".encode()).derive(key)


def keys_of(config: SealingConfig) -> tuple[bytes, ...]:
    """Return the keys of the key file, the sealing key first; empty if no file is configured. Raises ConfigError."""
    path, field = config.key_file, "sealing.key_file"
    if not path:
        return ()
    try:
        mode, lines = stat.S_IMODE(Path(path).stat().st_mode), Path(path).read_bytes().split()
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error.strerror}.") from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"{field}: {path} has mode {mode:04o}, which lets others read or change it: chmod 600 it.")
    try:
        keys = tuple(base64.b64decode(line, validate=True) for line in lines)
    except binascii.Error:
        keys = ()
    if not keys or {*map(len, keys)} != {KEY_NBYTES}:
        raise ConfigError(
            f"{field}: {path} must have {KEY_NBYTES} random bytes in base64 in each line, as `openssl rand -base64 32` "
            "prints them."
        )
    return keys


class Sealer:
    """Seals and opens the values of a namespace. place: name of the namespace. keys: see `keys_of`.

    With random nonces a key may seal at most 2^32 values. Each sealer derives keys of its own by a random salt, so that
    processes do not share this bound.
    """

    def __init__(self, keys: Sequence[bytes], place: str) -> None:
        self.keys, self.place, self._salt = keys, place, secrets.token_bytes(16)
        self._by_mark = {derived(key, "mark of a key", nbytes=8): key for key in keys}

    def name(self, text: str) -> str:
        """Return a keyed digest of a session's id. The digest changes only if the last key of the file does."""
        return hmac.digest(derived(self.keys[-1], "names"), text.encode("utf-8", "surrogatepass"), "sha256")[:16].hex()

    def seal(self, data: bytes | memoryview, tenant: str, *about: bytes | str | int) -> bytes:
        """Return data of a tenant, sealed. about: parts of the value's name; `open` needs the same parts."""
        mark, nonce = derived(self.keys[0], "mark of a key", nbytes=8), secrets.token_bytes(12)
        head = _HEADER.pack(MAGIC, VERSION, mark, self._salt, nonce)
        return head + self._cipher(mark, tenant, self._salt).encrypt(nonce, data, self._bound(head, about))

    def open(self, data: bytes | memoryview, tenant: str, *about: bytes | str | int) -> bytes:
        """Return the data of a sealed value. Raises SealError if the value is not what was sealed under this name."""
        if len(data) < OVERHEAD:
            raise SealError("it is too short.")
        head = bytes(data[: _HEADER.size])
        magic, version, mark, salt, nonce = _HEADER.unpack(head)
        if (magic, version) != (MAGIC, VERSION) or mark not in self._by_mark:
            raise SealError("it is not sealed with one of our keys.")
        try:
            return self._cipher(mark, tenant, salt).decrypt(nonce, data[_HEADER.size :], self._bound(head, about))
        except InvalidTag:
            raise SealError("it is not what was sealed there.") from None

    def _cipher(self, mark: bytes, tenant: str, salt: bytes) -> AESGCM:
        return AESGCM(derived(self._by_mark[mark], "sealed values", tenant, salt))

    def _bound(self, head: bytes, about: Iterable[bytes | str | int]) -> bytes:
        """Return the bytes that AES-GCM authenticates with the data. They differ for each list of parts."""
        parts = [str(part).encode() if isinstance(part, str | int) else part for part in (self.place, *about)]
        return head + b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class SealedTier(JoinedTier):
    """Tier that seals each block whole, so that `trim` cannot cut it. `read` yields "seal" if a block does not open.

    shard: Part of each block that the tier stores. The shard is in the name to which a block is bound.
    """

    def __init__(self, inner: Tier, sealer: Sealer, shard: Shard) -> None:
        super().__init__(inner)
        self.inner, self._sealer, self._shard = inner, sealer, shard

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        about = "block", str(self._shard), group
        sealed = {key: self._sealer.seal(buf.data, tenant, *about, key) for key, buf in blocks.items()}
        return self.inner.put_all(group, {key: np.frombuffer(buf, np.uint8) for key, buf in sealed.items()}, tenant)

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        for key, value in zip(keys, self.inner.read(group, keys, tenant), strict=True):
            if isinstance(value, np.ndarray):
                try:
                    opened = self._sealer.open(value.data, tenant, "block", str(self._shard), group, key)
                    value = np.frombuffer(opened, np.uint8)
                except SealError as error:
                    value = error.cause
            yield value

    def cleared(self, place: str) -> "SealedTier":
        """See Tier. Values sealed before do not open in the new tier."""
        place = place or f"{self._sealer.place}-{secrets.token_hex(8)}"
        return SealedTier(self.inner.cleared(place), Sealer(self._sealer.keys, place), self._shard)

    def room(self, nbytes: int) -> int:
        return self.inner.room(nbytes + OVERHEAD)
