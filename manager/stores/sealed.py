"""Codes and books sealed at rest with AES-256-GCM: who has not the key can neither read them nor have others accepted.

A sealed value is, little-endian:

    magic "MNE" · version u8 · mark of the key, 8 bytes · salt, 16 bytes · nonce, 12 bytes · ciphertext · tag, 16 bytes

It is bound to where it belongs: the namespace, its name there, the tenant whose key it is. Moved elsewhere it does not
open. Each writer draws a salt, and derives from the ring's key and the salt (HKDF-SHA256) the key that it seals with.
So the bound on random nonces (2^32 messages a key, NIST SP 800-38D) is on what one process writes until it draws again,
not on what a key of the ring has ever sealed.
"""

import base64
import binascii
import itertools
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from manthan.manager.stores.cold_store import Buffer, ColdStore, Found, Landing
from manthan.manager.stores.keyring import Key, KeyRing, Names, derived

MAGIC, VERSION = b"MNE", 1
SALT_NBYTES, NONCE_NBYTES, TAG_NBYTES = 16, 12, 16
_HEADER = struct.Struct(f"<3sB8s{SALT_NBYTES}s{NONCE_NBYTES}s")
OVERHEAD = _HEADER.size + TAG_NBYTES
"""Bytes that a sealed value takes beyond what is sealed."""
MOST_MESSAGES = 1 << 32
"""That one salt is used for."""

About = bytes | str | int
"""A part of what a sealed value is bound to."""


class SealError(Exception):
    """A value cannot be opened: it is not what was sealed, or not where it belongs. `cause` is a metric label."""

    cause: ClassVar[str] = "seal"


class NoKeyError(SealError):
    """The ring has no key for it."""

    cause: ClassVar[str] = "no_key"


class _Writer(NamedTuple):
    """What one process seals with a key of the ring."""

    aead: AESGCM
    salt: bytes
    before: Iterator[int]
    """How many messages there were before each."""

    @classmethod
    def of(cls, key: Key) -> "_Writer":
        salt = secrets.token_bytes(SALT_NBYTES)
        return cls(_aead(key.secret, salt), salt, itertools.count(1))


class Sealer:
    """Seals and opens what is in a namespace, with the keys that the ring has at that moment. Safe to use from several
    threads. place: the namespace's name, or what tells it from others otherwise."""

    def __init__(self, ring: KeyRing, place: str) -> None:
        self._ring, self.place = ring, place
        self._writers: dict[bytes, _Writer] = {}
        """By mark of the key."""

    @property
    def names(self) -> Names:
        return self._ring.names

    def at(self, place: str) -> "Sealer":
        """For another namespace."""
        other = copy(self)
        other.place = place
        return other

    def seal(self, data: Buffer | bytes, tenant: str, *about: About) -> bytes:
        """Bound to this namespace, and to what it is about. tenant: whose it is. Raises NoKeyError for one that has
        lost its keys."""
        key = self._ring.keys.of(tenant)
        if key is None:
            raise NoKeyError(f"tenant {tenant!r} has no key.")
        writer = self._writers.get(key.mark)
        if writer is None or next(writer.before) >= MOST_MESSAGES:
            writer = self._writers[key.mark] = _Writer.of(key)
        nonce = secrets.token_bytes(NONCE_NBYTES)
        head = _HEADER.pack(MAGIC, VERSION, key.mark, writer.salt, nonce)
        sealed = writer.aead.encrypt(nonce, _view(data), self._bound(head, key, about))
        return head + sealed

    def open(self, value: Buffer | bytes, tenant: str | None, *about: About) -> bytes:
        """What was sealed about this. tenant: who asks; what was sealed with a tenant's own key is for nobody else.
        None for who keeps the books of all. Raises SealError, and NoKeyError."""
        view = _view(value)
        if len(view) < OVERHEAD:
            raise SealError("it is too short.")
        head = bytes(view[: _HEADER.size])
        magic, version, mark, salt, nonce = _HEADER.unpack(head)
        if (magic, version) != (MAGIC, VERSION):
            raise SealError("it is no sealed value.")
        key = self._ring.keys.reading.get(mark)
        if key is None or (tenant is not None and key.tenant not in ("", tenant)):
            raise NoKeyError("the key file has not its key, or it is another tenant's.")
        try:
            return _aead(key.secret, salt).decrypt(nonce, view[_HEADER.size :], self._bound(head, key, about))
        except InvalidTag:
            raise SealError("it is not what was sealed there.") from None

    def _bound(self, head: bytes, key: Key, about: Sequence[About]) -> bytes:
        """What is authenticated besides: no two lists of parts give the same bytes."""
        return head + b"".join(map(_part, (self.place, key.tenant, *about)))


def _view(data: Buffer | bytes) -> memoryview:
    return memoryview(data) if isinstance(data, bytes) else data.data


@lru_cache(maxsize=1024)
def _aead(secret: bytes, salt: bytes) -> AESGCM:
    return AESGCM(derived(secret, "sealed values", salt=salt))


def _part(part: About) -> bytes:
    data = part.to_bytes(8, "little") if isinstance(part, int) else part.encode() if isinstance(part, str) else part
    return len(data).to_bytes(4, "little") + data


def sealed_text(sealer: Sealer, text: str, tenant: str, *about: About) -> str:
    """Text as text; empty for a tenant that has lost its keys."""
    try:
        return base64.b64encode(sealer.seal(text.encode("utf-8", "surrogatepass"), tenant, *about)).decode()
    except NoKeyError:
        return ""


def opened_text(sealer: Sealer, text: str | bytes, *about: About) -> str | None:
    """What `sealed_text` was given, whosever it is; None if it cannot be opened."""
    try:
        return sealer.open(base64.b64decode(text, validate=True), None, *about).decode("utf-8", "surrogatepass")
    except (SealError, binascii.Error):
        return None


class SealedStore(ColdStore):
    """A store in which blocks are sealed, and have names that tell nothing of tokens.

    What cannot be opened is there all the same: `read` gives the cause.
    """

    def __init__(self, inner: ColdStore, sealer: Sealer, rank: int) -> None:
        self.inner, self._sealer, self._rank = inner, sealer, rank

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        try:
            sealed = {key: self._sealer.seal(buf, tenant, *self._about(group, key)) for key, buf in blocks.items()}
        except NoKeyError as error:
            return dict.fromkeys(blocks, error.cause)
        names = {self._name(key): key for key in blocks}
        bufs = {name: np.frombuffer(sealed.pop(key), np.uint8) for name, key in names.items()}
        return {names[name]: cause for name, cause in self.inner.put_all(group, bufs, tenant).items()}

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "", into: Landing | None = None) -> Iterator[Found]:
        """What is opened lies elsewhere than what was read."""
        values = self.inner.read(group, self._names(keys), tenant)
        return (self._open(group, key, value, tenant) for key, value in zip(keys, values, strict=True))

    def _open(self, group: int, key: bytes, value: Found, tenant: str) -> Found:
        if value is None or isinstance(value, str):
            return value
        try:
            return np.frombuffer(self._sealer.open(value, tenant, *self._about(group, key)), np.uint8)
        except SealError as error:
            return error.cause

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        names = dict(zip(self._names(keys), keys, strict=True))
        return [names[name] for name in self.inner.absent(group, list(names))]

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        self.inner.drop(group, self._names(keys))

    def go_first(self, group: int, keys: Sequence[bytes], tier: int = 0) -> None:
        self.inner.go_first(group, self._names(keys), tier)

    def cleared(self, place: str) -> "SealedStore":
        """What was sealed before does not open in it, wherever somebody puts it."""
        place = place or f"{self._sealer.place}-{secrets.token_hex(8)}"
        return SealedStore(self.inner.cleared(place), self._sealer.at(place), self._rank)

    def close(self) -> None:
        self.inner.close()

    def room(self, nbytes: int) -> int:
        return self.inner.room(nbytes + OVERHEAD)

    def _about(self, group: int, key: bytes) -> tuple[About, ...]:
        return "block", self._rank, group, key

    def _name(self, key: bytes) -> bytes:
        return self._sealer.names.block(key)

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return list(map(self._name, keys))
