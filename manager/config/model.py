"""Pydantic models of the configuration: keys, types, defaults, bounds, and descriptions for error messages.

A field's description completes the error message "KEY must be …".
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo


class ConfigError(ValueError):
    """Mistake in a configuration. The message is a sentence for the configuration's author."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):  # pydantic would read `true` as 1, which no user means
        raise ValueError("a truth value is not a number")
    return value


Count = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
AnyBytes = Annotated[ByteSize, BeforeValidator(_no_bool), Field(ge=0)]
Bytes = Annotated[ByteSize, BeforeValidator(_no_bool), Field(gt=0)]

Quality = Literal["exact", "high", "any"]
QUALITY = "exact, high or any"

REDIS_SCHEMES = ("redis", "rediss", "unix")


def _redis_url(url: str) -> str:
    """Return `url` if it is well-formed and without password, because logs show it. Raises ValueError otherwise."""
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.path if parts.scheme == "unix" else parts.hostname)
        options = parse_qs(parts.query)
        if parts.scheme not in REDIS_SCHEMES or parts.password or "password" in options or not is_whole:
            raise ValueError
        parts.port  # noqa: B018 raises ValueError for a port that is no number
        if not all(0 < float(seconds) <= 60 for seconds in options.get("socket_timeout", ())):
            raise ValueError
    except ValueError:
        raise ValueError("not such a URL") from None
    return url


RedisUrl = Annotated[str, AfterValidator(_redis_url)]
HostName = Annotated[str, Field(pattern=r"^[^\s:/]*[^\s:/.]$")]


def _from_json(value: object) -> object:
    """Return the value. A string, as from an environment variable, is read as JSON."""
    return json.loads(value) if isinstance(value, str) else value


def _names(value: object) -> object:
    """Return a list of names. A string, as from an environment variable, has names separated by commas."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Share = Annotated[Number, Field(ge=0, le=1)]
Shares = Annotated[dict[str, Share], BeforeValidator(_from_json)]

SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "x-api-key")


def _no_secret(header: str) -> str:
    if header.lower() in SECRET_HEADERS:  # the header's value is a tenant's name, which logs and metrics show
        raise ValueError("a header with a secret")
    return header


HeaderName = Annotated[str, AfterValidator(_no_secret), Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]*$")]

REDIS_PASSWORD = "MANTHAN_REDIS_PASSWORD"  # environment variable with the Redis password


class _Model(BaseModel):
    """Group of keys. shorthand: key that a bare value sets. `policy: lru` means `policy: {name: lru}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shorthand: ClassVar[str | None] = None


class PolicyConfig(_Model):
    """Name of an eviction policy. All other keys are options of the policy."""

    model_config = ConfigDict(extra="allow")
    shorthand = "name"

    name: str = Field(default="lru", description="the name of a policy, such as lru")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class IdleConfig(_Model):
    """Conditions for saving a session's KV: seconds since its last request, and least number of tokens."""

    shorthand = "after_s"

    after_s: Number = Field(default=2.0, gt=0, description="a plain number of seconds above 0, such as 2")
    min_tokens: Count = Field(default=256, ge=0, description="a whole number of tokens, 0 or more")


class CodecConfig(_Model):
    """Codec of compressed blocks, the processor that it runs on, and the tokens kept exact."""

    shorthand = "name"

    name: str = Field(default="auto", description="the name of a codec, such as wht-5x")
    profile: str = Field(default="", description="the path of a file by `manthan calibrate`; empty for the usual path")
    sink_tokens: Count = Field(default=4, ge=0, description="a whole number of a session's first tokens, 0 for none")
    state: Literal["exact", "bf16", "int8"] = Field(default="exact", description="exact, bf16 or int8")
    guard: bool = Field(default=True, description="true or false")
    quality: Quality = Field(default="any", description=QUALITY)
    backend: Literal["auto", "numpy", "cuda"] = Field(default="auto", description="auto, numpy or cuda")


class DiskConfig(_Model):
    """Folder of a disk tier: with `tiers.kind` disk, or with `tiers.disk_bytes` in front of Redis."""

    shorthand = "path"

    path: str = Field(default="", description="the path of a folder of a local file system")


class RedisConfig(_Model):
    """Redis (or Valkey) server for `tiers.kind` redis. The URL has no password. ttl_s: time to live of blocks."""

    shorthand = "url"

    url: RedisUrl = Field(
        default="redis://127.0.0.1:6379/0",
        description="redis://USER@HOST:PORT/DB, rediss:// for TLS or unix://USER@/PATH, with redis-py's options behind "
        f"a '?' (socket_timeout at most 60) and without a password (set {REDIS_PASSWORD} for it)",
    )
    prefix: str = Field(
        default="manthan:",
        pattern=r"^[A-Za-z0-9_.:/-]{1,64}$",
        description="the prefix of all keys: 1 to 64 letters, digits and _ . : / -",
    )
    ttl_s: Number = Field(default=86400.0, ge=1, description="a plain number of seconds, 1 or more, such as 86400")


class TiersConfig(_Model):
    """Tiers of the cold store of idle sessions' KV, and the bytes of each tier; see docs/configuration.md.

    host_bytes: RAM of one more tier. Behind device, this RAM has the blocks that no longer fit into GPU memory. In
    front of disk or redis, it has copies of recently stored or read blocks. disk_bytes: disk in front of redis, for
    further copies. drain_s: most seconds after SIGTERM to save idle sessions.
    """

    shorthand = "kind"

    kind: str = Field(default="host", description="the name of a tier, such as host")
    max_bytes: Bytes = Field(
        default=ByteSize(4 << 30), description="a size above 0, such as 4GiB, 512MiB or a plain number of bytes"
    )
    host_bytes: AnyBytes = Field(default=ByteSize(0), description="a size, such as 64GiB; 0 for none")
    disk_bytes: AnyBytes = Field(default=ByteSize(0), description="a size, such as 500GiB; 0 for none")
    disk: DiskConfig = DiskConfig()
    redis: RedisConfig = RedisConfig()
    pinned_share: Share = Field(default=0.25, description="a share of the cold store between 0 and 1")
    drain_s: Number = Field(default=10.0, ge=0, le=3600, description="a number of seconds from 0 to 3600")

    @property
    def places(self) -> Sequence[str]:
        """Names of the tier of `kind` and of the tiers in front, the fastest first. RAM behind device is left out."""
        front = {"host": self.front_bytes, "disk": self.disk_bytes}
        return (*(tier for tier, nbytes in front.items() if nbytes), self.kind)

    @cached_property
    def tier_names(self) -> Sequence[str]:
        """Names of all tiers, the fastest first. RAM behind device is included."""
        return ("device", "host") if self.kind == "device" and self.host_bytes else self.places

    @property
    def is_shared(self) -> bool:
        """True if several engines may read the blocks."""
        return self.kind == "redis"

    @property
    def is_lasting(self) -> bool:
        """True if the blocks outlive the engine."""
        return self.kind in ("disk", "redis")

    @property
    def is_on_disk(self) -> bool:
        """True if a disk has some or all of the blocks."""
        return "disk" in self.places

    @property
    def front_bytes(self) -> int:
        """Bytes of RAM in front of a disk or Redis; 0 for none."""
        return self.host_bytes if self.is_lasting else 0

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if self.host_bytes and self.kind == "host":
            raise ValueError(
                "tiers.host_bytes is RAM for tiers.kind device, disk or redis, but kind is host: use max_bytes"
            )
        if self.disk_bytes and not self.is_shared:
            raise ValueError(
                f"tiers.disk_bytes is disk in front of tiers.kind redis, but kind is {self.kind}: "
                f"{'use max_bytes' if self.kind == 'disk' else 'leave it out'}"
            )
        if self.is_on_disk and not self.disk.path:
            raise ValueError(
                f"{'tiers.disk_bytes is set' if self.is_shared else 'tiers.kind is disk'}, but tiers.disk.path "
                "(--manthan-disk-path) is empty: name the folder that the blocks are to be kept in"
            )
        return self


class ApiConfig(_Model):
    """HTTP API with paths below /manthan. hosts: further names allowed in header Host if no API key is set."""

    shorthand = "enabled"

    enabled: bool = Field(default=True, description="true or false")
    hosts: Annotated[tuple[HostName, ...], BeforeValidator(_names)] = Field(
        default=(), description="a list of host names without ports, such as [gpu7.example.org]"
    )


class TenantsConfig(_Model):
    """Tenants: limits in the cold store, and HTTP header with a request's tenant. isolate: True to share no blocks."""

    shares: Shares = Field(
        default={},
        description='a mapping of tenants, as strings, to shares between 0 and 1, such as {"acme": 0.5, "*": 0.1}',
    )
    header: HeaderName = Field(
        default="", description="the name of an HTTP header that holds no secret, such as X-Tenant-ID; empty for none"
    )
    isolate: bool = Field(default=True, description="true or false")


class SealingConfig(_Model):
    """File of keys that seal (encrypt) stored blocks, and a disk's list of sessions."""

    shorthand = "key_file"

    key_file: str = Field(default="", description="the path of a file of keys; empty to seal nothing")


class ManthanConfig(_Model):
    """Whole configuration. `model_dump(mode="json")` returns valid input of `model_validate`.

    ordering: order of waiting requests. admission_s: most seconds that a request with much to compute is put back.
    memory_bytes: memory of vLLM and Manthan together, if CPU and GPU share one memory.
    """

    policy: PolicyConfig = PolicyConfig()
    idle: IdleConfig = IdleConfig()
    codec: CodecConfig = CodecConfig()
    tiers: TiersConfig = TiersConfig()
    api: ApiConfig = ApiConfig()
    tenants: TenantsConfig = TenantsConfig()
    sealing: SealingConfig = SealingConfig()
    ordering: Literal["returns", "arrival"] = Field(default="returns", description="returns or arrival")
    admission_s: Annotated[Number, Field(ge=0, le=3600)] = Field(
        default=60.0, description="a number of seconds from 0 to 3600, 0 for the order of arrival"
    )
    memory_bytes: AnyBytes = Field(default=ByteSize(0), description="a size, such as 110GiB; 0 for no such budget")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.sealing.key_file and not self.tiers.is_lasting:
            raise ValueError(
                f"sealing.key_file is for blocks on a disk and in Redis, but tiers.kind is {self.tiers.kind}: leave it "
                "out, or use disk or redis"
            )
        return self


GROUPS: dict[str, type[_Model]] = {}
"""Models of groups of keys, by dotted name, such as `tiers` and `tiers.disk`."""
FIELDS: dict[str, FieldInfo] = {}
"""Fields that are no groups, by dotted name, such as `idle.after_s` and `tiers.max_bytes`."""


def _enter(model: type[_Model], prefix: str = "") -> None:
    for name, field in model.model_fields.items():
        if isinstance(group := field.annotation, type) and issubclass(group, _Model):
            GROUPS[prefix + name] = group
            _enter(group, f"{prefix}{name}.")
        else:
            FIELDS[prefix + name] = field


_enter(ManthanConfig)

FLAGS = {
    "policy.name": ("--manthan-policy", "NAME"),
    "idle.after_s": ("--manthan-idle-after", "SECONDS"),
    "codec.name": ("--manthan-codec", "NAME"),
    "codec.profile": ("--manthan-codec-profile", "FILE"),
    "tiers.kind": ("--manthan-cold-store", "KIND"),
    "tiers.max_bytes": ("--manthan-cold-bytes", "SIZE"),
    "tiers.disk.path": ("--manthan-disk-path", "FOLDER"),
    "tiers.redis.url": ("--manthan-redis-url", "URL"),
    "api.enabled": ("--manthan-api", "on|off"),
    "sealing.key_file": ("--manthan-encryption-key-file", "FILE"),
}
"""Option of `vllm serve`, and name of its value in --help, by the dotted name of the field that the option sets."""
