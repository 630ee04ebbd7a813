"""Redis: that it answers, is new enough, lets us do what engines do, and has room for the budget."""

import re
import secrets
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from pydantic import ByteSize
from redis.exceptions import RedisError

from manthan.manager.config.model import ConfigError, ManthanConfig, RedisConfig
from manthan.manager.doctor.finding import Finding, Mark
from manthan.manager.stores.redis.client import Client, check, connect, in_a_sentence, pipelined

REDIS, RIGHTS, MEMORY = "Redis", "Redis ACL", "Redis memory"
KEYS = "keys"
OVERHEAD = 1.25
"""What Redis needs for a byte of codes at most; docs/redis.md has the measurements."""
KEYED: tuple[tuple[str, ...], ...] = (
    *(("SET", "{key}", "1", "EX", "60"), ("GET", "{key}"), ("EXISTS", "{key}"), ("STRLEN", "{key}"), ("TTL", "{key}")),
    *(("EXPIREAT", "{key}", "1"), ("UNLINK", "{key}"), ("DEL", "{key}")),
    *(
        ("HGET", "{key}", "f"),
        ("HMGET", "{key}", "f"),
        ("HGETALL", "{key}"),
        ("HEXISTS", "{key}", "f"),
        ("HLEN", "{key}"),
    ),
    *(
        ("HSET", "{key}", "f", "1"),
        ("HSETNX", "{key}", "f", "1"),
        ("HINCRBY", "{key}", "f", "1"),
        ("HDEL", "{key}", "f"),
    ),
    *(("DEL", "{key}"), ("RPUSH", "{key}", "1"), ("LLEN", "{key}"), ("LRANGE", "{key}", "0", "0")),
    *(("DEL", "{key}"), ("SADD", "{key}", "1"), ("SMEMBERS", "{key}"), ("SREM", "{key}", "1")),
    *(("DEL", "{key}"), ("ZADD", "{key}", "1", "m"), ("ZCARD", "{key}"), ("ZCOUNT", "{key}", "0", "1")),
    *(("ZMSCORE", "{key}", "m"), ("ZRANGE", "{key}", "0", "0"), ("ZRANGEBYSCORE", "{key}", "0", "1")),
    *(("ZSCORE", "{key}", "m"), ("ZREM", "{key}", "m"), ("DEL", "{key}"), ("EXPIREAT", "{key}", "1")),
    *(("EVAL", "return 1", "1", "{key}"), ("EVAL_RO", "return 1", "1", "{key}")),
    ("EVAL", "return redis.call('TIME')", "1", "{key}"),
)
"""What engines send to Redis, once each, about a key that is gone afterwards."""


def check_redis(config: ManthanConfig) -> Iterator[Finding]:
    store = config.cold_store
    if "redis" not in store.places:
        yield Finding(REDIS, Mark.SKIPPED, f"cold_store.kind is {store.kind}, which does not use Redis.")
        return
    try:
        with closing(connect(config.redis)) as client:
            check(client, config.redis)
            with in_a_sentence(config.redis):
                told = _nodes(client.info("server"))
                version = min(str(node["redis_version"]) for node in told)
            yield Finding(REDIS, Mark.OK, f"version {version} answers at {config.redis.url}.")
            with in_a_sentence(config.redis):
                yield _rights(client, config.redis)
                yield _memory(_nodes(client.info("memory")), config)
    except ConfigError as error:
        yield Finding(REDIS, Mark.WRONG, str(error))


def _rights(client: Client, config: RedisConfig) -> Finding:
    """Whether the user may send what engines send."""
    key = f"{config.prefix}{{doctor-{secrets.token_hex(8)}}}"
    commands = [tuple(word.format(key=key) if word == "{key}" else word for word in each) for each in KEYED]
    answers = pipelined(client, commands, raise_on_error=False)
    refused = [_refused(command, answer) for command, answer in zip(commands, answers, strict=True)]
    missing = list(dict.fromkeys(name for name in refused if name))
    who = f"user {config.username}" if config.username else "the default user"
    if not missing:
        return Finding(RIGHTS, Mark.OK, f"{who} may do all that engines do with keys that begin with {config.prefix}.")
    what = f"use keys that begin with {config.prefix}" if KEYS in missing else f"use {', '.join(missing)}"
    needed = f"~{config.prefix}*" if KEYS in missing else " ".join(f"+{name}" for name in missing)
    return Finding(
        RIGHTS,
        Mark.WRONG,
        f"{who} of {config.url} may not {what}: grant {needed}, as the ACL in docs/redis.md does.",
    )


def _refused(command: tuple[str, ...], answer: Any) -> str:
    """The command that is not granted, KEYS if it is the key, or empty."""
    said = str(answer) if isinstance(answer, RedisError) else ""
    if "can't run this command" in said:  # so Redis 7.0 says it of what a script calls
        return "time"
    if "permission" not in said:
        return ""
    if re.search(r"\bkeys?\b", said):
        return KEYS
    named = re.search(r"'([\w|]+)' command", said)
    return (named[1] if named else command[0]).lower()


def _memory(nodes: list[dict[str, Any]], config: ManthanConfig) -> Finding:
    """Whether the budget fits, by what all nodes together may take."""
    budget = config.cold_store.max_bytes
    needed = int(budget * OVERHEAD)
    limits = [int(node["maxmemory"]) for node in nodes]
    most = sum(limits) if all(limits) else 0
    policies = sorted({str(node["maxmemory_policy"]) for node in nodes})
    said = f"a quarter more than cold_store.max_bytes, {_size(budget)}"
    if most and most < needed:
        return Finding(
            MEMORY,
            Mark.WRONG,
            f"maxmemory is {_size(most)}, but {_size(needed)} are needed, {said}: raise it, or lower max_bytes.",
        )
    if policies != ["noeviction"]:
        return Finding(
            MEMORY,
            Mark.WARNING,
            f"maxmemory-policy is {', '.join(policies)}, with which sessions lose pieces when memory is short: set it "
            "to noeviction.",
        )
    if not most:
        return Finding(
            MEMORY,
            Mark.WARNING,
            f"maxmemory is not set, so that nothing keeps Redis from taking all RAM: set it to {_size(needed)} at "
            f"least, {said}.",
        )
    return Finding(MEMORY, Mark.OK, f"maxmemory is {_size(most)} with noeviction, for {_size(budget)} of codes.")


def _nodes(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """A cluster answers node by node."""
    values = list(answer.values())
    return values if values and all(isinstance(value, dict) for value in values) else [answer]


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable()
