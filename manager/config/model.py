"""The configuration's models: keys, types, defaults and bounds, and the one sentence for each mistake.

A field's description completes the sentence "KEY must be …".
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from manthan.manager.config.sentences import nearest
from manthan.manager.sessions.hints import QUALITY, Quality


class ConfigError(ValueError):
    """A configuration that cannot be used, in one sentence for the person who wrote it."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):  # Python takes True for 1, a user who writes `true` does not
        raise ValueError("a truth value is not a number")
    return value


Count = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
AnyBytes = Annotated[ByteSize, BeforeValidator(_no_bool), Field(ge=0)]
Bytes = Annotated[ByteSize, BeforeValidator(_no_bool), Field(gt=0)]

REDIS_SCHEMES = ("redis", "rediss", "unix")


def _redis_url(url: str) -> str:
    """Refuse what can be told without a connection, and a password, which would be seen in logs."""
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.path if parts.scheme == "unix" else parts.hostname)
        if parts.scheme not in REDIS_SCHEMES or parts.password or "password=" in parts.query or not is_whole:
            raise ValueError
        parts.port  # noqa: B018 which may be no number
    except ValueError:
        raise ValueError("not such a URL") from None
    return url


RedisUrl = Annotated[str, AfterValidator(_redis_url)]


def _from_json(value: object) -> object:
    """A mapping that comes out of the environment is JSON."""
    return json.loads(value) if isinstance(value, str) else value


TIERS = ("host", "disk", "redis")
"""What a cold store of several tiers is made of, the fastest first."""


def _names(value: object) -> object:
    """In the environment, names with commas between them."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def _in_order(tiers: tuple[str, ...]) -> tuple[str, ...]:
    if len(tiers) < 2 or tiers != tuple(tier for tier in TIERS if tier in tiers):
        raise ValueError("not in that order")
    return tiers


Tiers = Annotated[tuple[str, ...], BeforeValidator(_names), AfterValidator(_in_order)]

Share = Annotated[Number, Field(ge=0, le=1)]
Shares = Annotated[dict[str, Share], BeforeValidator(_from_json)]

SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "x-api-key")


def _no_secret(header: str) -> str:
    if header.lower() in SECRET_HEADERS:  # tenants are shown in logs and metrics
        raise ValueError("a header with a secret")
    return header


HeaderName = Annotated[str, AfterValidator(_no_secret), Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]*$")]

_SECONDS = "a plain number of seconds above 0, such as {}"
REDIS_PASSWORD = "MANTHAN_REDIS_PASSWORD"
"""The environment variable that holds the Redis password."""
_SHARE = "a share of the KV pool between 0 and 1"
_COLD_SHARE = "a share of the cold store between 0 and 1"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Group(_Model):
    shorthand: ClassVar[str | None] = None
    """The key that a bare string stands for: `policy: lru` is `policy: {name: lru}`."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, value: object) -> object:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value


class PolicyConfig(_Group):
    """Which eviction policy, and the options that this policy takes."""

    model_config = ConfigDict(extra="allow")
    shorthand = "name"

    name: str = Field(default="lru", description="the name of a policy, such as lru")

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside the name, as it was written."""
        return dict(self.model_extra or {})


class CodecConfig(_Group):
    """How KV is encoded, and which of a session's tokens are kept as they are instead."""

    shorthand = "name"

    name: str = Field(default="auto", description="the name of a codec, such as wht-5x")
    profile: str = Field(default="", description="the path of a model's profile; empty for the one that is found")
    sink_tokens: Count = Field(default=4, ge=0, description="a whole number of a session's first tokens, 0 for none")
    state: Literal["exact", "bf16", "int8"] = Field(default="exact", description="exact, bf16 or int8")
    guard: bool = Field(default=True, description="true or false")
    quality: Quality = Field(default="any", description=QUALITY)


class EncryptionConfig(_Group):
    """The keys that codes and books are sealed with on a disk and in Redis."""

    shorthand = "key_file"

    key_file: str = Field(default="", description="the path of a file of keys; empty to store codes as they are")


class ColdStoreConfig(_Group):
    """Where the codes of cold sessions are kept, and how many bytes they may take.

    kind host is RAM, pinned beside a GPU; device is GPU memory, which spills to host_bytes of RAM when it is full; disk
    is a folder of a local file system; redis is a Redis server; tiered is `tiers`, each with all that is in the one
    before it: host_bytes of RAM, disk_bytes of disk, and max_bytes of the last one.
    """

    shorthand = "kind"

    kind: str = Field(default="host", description="the name of a cold store, such as host")
    max_bytes: Bytes = Field(
        default=ByteSize(4 << 30),
        description="a size above 0, such as 4GiB, 512MiB or a plain number of bytes",
    )
    host_bytes: AnyBytes = Field(default=ByteSize(0), description="a size, such as 64GiB; 0 for none")
    disk_bytes: AnyBytes = Field(default=ByteSize(0), description="a size, such as 500GiB; 0 for none")
    tiers: Tiers = Field(
        default=("host", "redis"), description=f"a list of two or three of {', '.join(TIERS)}, in this order"
    )
    encryption: EncryptionConfig = EncryptionConfig()

    @property
    def places(self) -> Sequence[str]:
        """Where the codes are, the fastest first; the last one has all of them."""
        return self.tiers if self.kind == "tiered" else (self.kind,)

    @property
    def tier_names(self) -> Sequence[str]:
        """The tiers that codes are in, the fastest first: RAM behind GPU memory is one, too."""
        return ("device", "host") if self.kind == "device" and self.host_bytes else self.places

    @property
    def is_shared(self) -> bool:
        """Whether other engines may read the codes."""
        return self.places[-1] == "redis"

    @property
    def is_lasting(self) -> bool:
        """Whether the codes outlive the engine."""
        return self.places[-1] in ("disk", "redis")

    @property
    def is_on_disk(self) -> bool:
        """Whether a disk has some or all of them."""
        return "disk" in self.places

    @property
    def front_bytes(self) -> int:
        """RAM in front of other tiers: a quarter of max_bytes where nothing else is said."""
        return self._front("host", self.host_bytes)

    @property
    def front_disk_bytes(self) -> int:
        """The same of disk."""
        return self._front("disk", self.disk_bytes)

    def _front(self, tier: str, nbytes: int) -> int:
        return (nbytes or self.max_bytes // 4) if tier in self.places[:-1] else 0

    @model_validator(mode="after")
    def _check_front_bytes(self) -> Self:
        if self.host_bytes and not (self.kind == "device" or self.front_bytes):
            raise ValueError(
                "cold_store.host_bytes is RAM behind cold_store.kind device or in front of the other tiers of kind "
                f"tiered, but {self._said}: use max_bytes"
            )
        if self.disk_bytes and not self.front_disk_bytes:
            raise ValueError(
                "cold_store.disk_bytes is disk in front of Redis, for cold_store.kind tiered with both as tiers, but "
                f"{self._said}: use max_bytes"
            )
        return self

    @model_validator(mode="after")
    def _check_encryption(self) -> Self:
        if self.encryption.key_file and not self.is_lasting:
            raise ValueError(
                "cold_store.encryption.key_file is for codes on a disk and in Redis, but "
                f"{self._said}: leave it out, or use disk, redis or tiered"
            )
        return self

    @property
    def _said(self) -> str:
        return f"tiers are {', '.join(self.tiers)}" if self.kind == "tiered" else f"kind is {self.kind}"


class DiskConfig(_Group):
    """The folder of `cold_store.kind` disk, and of tiered with a tier disk."""

    shorthand = "path"

    path: str = Field(default="", description="the path of a folder of a local file system")
    sync_s: Number = Field(default=5.0, ge=0, description="a plain number of seconds, 0 or more, such as 5")
    timeout_s: Number = Field(default=10.0, gt=0, description=_SECONDS.format(10))


class HotPoolConfig(_Group):
    """Shares of vLLM's KV pool that should hold nothing worth keeping.

    Below `low_watermark`, sessions are evicted until `high_watermark` is reached, idle or not.
    """

    low_watermark: Number = Field(default=0.1, ge=0, le=1, description=_SHARE)
    high_watermark: Number = Field(default=0.25, ge=0, le=1, description=_SHARE)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"hot_pool.low_watermark must not exceed hot_pool.high_watermark, "
                f"but {self.low_watermark} is above {self.high_watermark}"
            )
        return self


class RedisConfig(_Group):
    """The Redis (or Valkey) server of `cold_store.kind` redis and tiered. The password is never part of it."""

    shorthand = "url"

    url: RedisUrl = Field(
        default="redis://127.0.0.1:6379/0",
        description="redis://USER@HOST:PORT/DB, rediss:// for TLS or unix://USER@/PATH, with redis-py's options behind "
        f"a '?' and without a password (set {REDIS_PASSWORD} for it)",
    )
    prefix: str = Field(
        default="manthan:",
        pattern=r"^[A-Za-z0-9_.:/-]{1,64}$",
        description="what all keys begin with: up to 64 letters, digits and _ . : / -",
    )
    ttl_s: Number = Field(default=86400.0, ge=1, description="a plain number of seconds, 1 or more, such as 86400")
    timeout_s: Number = Field(default=2.0, gt=0, le=60, description=_SECONDS.format(2) + ", and 60 at most")


class QuotasConfig(_Group):
    """How much of the cold store pinned sessions, and those of one tenant, may take; and what tenants share."""

    pinned_share: Share = Field(default=0.25, description=_COLD_SHARE)
    default_share: Share = Field(default=1.0, description=_COLD_SHARE)
    tenants: Shares = Field(
        default={}, description='a mapping of tenants, as strings, to shares between 0 and 1, such as {"acme": 0.5}'
    )
    header: HeaderName = Field(
        default="", description="the name of an HTTP header that holds no secret, such as X-Tenant-ID; empty for none"
    )
    isolate: bool = Field(default=True, description="true or false")
    shared_heads_share: Share = Field(default=0.25, description=_COLD_SHARE)


class PrefetchConfig(_Group):
    """Sessions that are expected are restored before their request comes, when there is room."""

    enabled: bool = Field(default=True, description="true or false")
    lead_s: Number = Field(default=2.0, ge=0, description="a plain number of seconds, 0 or more, such as 2")


class ApiConfig(_Group):
    """What the server answers below /manthan."""

    shorthand = "enabled"

    enabled: bool = Field(default=True, description="true or false")
    page: bool = Field(default=True, description="true or false")
    hosts: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        default=(), description="a list of host names, such as [gpu7.example.org]"
    )


class ManthanConfig(_Model):
    """The whole configuration; `model_dump(mode="json")` gives what `model_validate` takes."""

    policy: PolicyConfig = PolicyConfig()
    idle_after_s: Number = Field(default=300.0, gt=0, description=_SECONDS.format(300))
    sweep_interval_s: Number = Field(default=10.0, gt=0, description=_SECONDS.format(10))
    min_tokens: Count = Field(default=256, ge=0, description="a whole number of tokens, 0 or more")
    codec: CodecConfig = CodecConfig()
    backend: Literal["auto", "numpy", "cuda"] = Field(default="auto", description="auto, numpy or cuda")
    encode_threads: Count = Field(default=1, ge=1, description="a whole number of threads, 1 or more")
    cold_store: ColdStoreConfig = ColdStoreConfig()
    disk: DiskConfig = DiskConfig()
    redis: RedisConfig = RedisConfig()
    hot_pool: HotPoolConfig = HotPoolConfig()
    quotas: QuotasConfig = QuotasConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    api: ApiConfig = ApiConfig()

    @model_validator(mode="after")
    def _check_disk(self) -> Self:
        if self.cold_store.is_on_disk and not self.disk.path:
            raise ValueError(
                f"cold_store.kind is {self.cold_store.kind}, but disk.path (--manthan-disk-path) is empty: name the "
                "folder that the codes are to be kept in"
            )
        return self


def _walk(model: type[_Model], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a model and of those in it, by dotted name, groups before what is in them."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if (group := _group(field)) is not None:
            yield from _walk(group, f"{prefix}{name}.")


def _group(field: FieldInfo) -> type[_Group] | None:
    found = field.annotation
    return found if isinstance(found, type) and issubclass(found, _Group) else None


GROUPS: dict[str, type[_Group]] = {
    key: group for key, field in _walk(ManthanConfig) if (group := _group(field)) is not None
}
"""The nested models by their key."""

FIELDS = {key: field for key, field in _walk(ManthanConfig) if key not in GROUPS}
"""Every key that holds a value, by its dotted name: `idle_after_s`, `cold_store.max_bytes`."""


def check_names(
    config: ManthanConfig,
    *,
    policies: Mapping[str, Collection[str]],
    codecs: Iterable[str],
    stores: Iterable[str],
    sources: Mapping[str, str] | None = None,
) -> None:
    """Refuse names that no registry has.

    `policies` maps each policy's name to the options that it takes; `sources` (from `resolve_config`) lets
    the error say where the name was written.
    """
    for key, what, name, valid in _named(config, policies, codecs, stores):
        if name not in valid:
            written = f"{sources[key]}: " if sources else ""
            raise ConfigError(f"{written}unknown {what} '{name}'{nearest(name, valid)}")


def _named(
    config: ManthanConfig,
    policies: Mapping[str, Collection[str]],
    codecs: Iterable[str],
    stores: Iterable[str],
) -> Iterator[tuple[str, str, str, Collection[str]]]:
    policy = config.policy
    yield "policy.name", "policy", policy.name, policies
    for option in policy.options:
        yield f"policy.{option}", f"{policy.name} option", option, policies[policy.name]
    yield "codec.name", "codec", config.codec.name, list(codecs)
    yield "cold_store.kind", "cold store", config.cold_store.kind, list(stores)
