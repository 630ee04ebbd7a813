"""Redis: that it answers, is new enough, takes what engines send, and evicts when it is full."""

from collections.abc import Iterator
from contextlib import closing

from redis.exceptions import RedisError

from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.doctor.finding import Finding, Mark
from manthan.manager.stores.redis.client import check, connect, pipelined

REDIS, MEMORY = "Redis", "Redis memory"
COMMANDS: tuple[tuple[str, ...], ...] = (
    *(("DEL",), ("HSET", "f", "1"), ("HGET", "f"), ("PEXPIREAT", "1"), ("SET", "1", "PX", "1000")),
    *(("GET",), ("STRLEN",), ("EXISTS",), ("PEXPIRE", "1"), ("UNLINK",)),
)
"""What engines send to Redis, once each, without the key."""


def check_redis(config: ManthanConfig) -> Iterator[Finding]:
    store = config.cold_store
    if "redis" not in store.places:
        yield Finding(REDIS, Mark.SKIPPED, f"cold_store.kind is {store.kind}, which does not use Redis.")
        return
    try:
        with closing(connect(config.redis)) as client:
            said = check(client, config.redis)
            key = f"{config.redis.prefix}doctor"
            pipelined(client, [(command, key, *more) for command, *more in COMMANDS])
    except ConfigError as error:
        yield Finding(REDIS, Mark.WRONG, str(error))
        return
    except RedisError as error:
        yield Finding(REDIS, Mark.WRONG, f"Redis at {config.redis.url} refuses a command that engines send: {error}.")
        return
    yield Finding(REDIS, Mark.OK, f"{config.redis.url} answers, and takes keys that begin with {config.redis.prefix}.")
    yield Finding(MEMORY, Mark.WARNING if said else Mark.OK, said or "Redis evicts when it is full.")
