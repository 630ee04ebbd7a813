"""What a connection of some configuration reaches, and what is said when it does not."""

import threading
from typing import Any

import pytest
import redis
from redis_server import RedisServer

from manthan.manager.config.model import RedisConfig
from manthan.manager.config.resolve import ConfigError
from manthan.manager.stores.redis.client import check, connect

PASSWORD = "not-for-the-log"


def refusal(config: RedisConfig) -> str:
    """The sentence, which never has a password in it."""
    with pytest.raises(ConfigError) as error:
        check(connect(config), config)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert PASSWORD not in sentence
    return sentence


def reaches(config: RedisConfig, server: RedisServer, **options: Any) -> bool:
    """Whether what is written over a connection of this configuration is on that server."""
    client = connect(config)
    check(client, config)
    client.set("manthan:mark", "x")
    with redis.Redis(port=server.port, decode_responses=True, **options) as other:
        return bool(other.get("manthan:mark") == "x")


def assert_threads_get_through(client: Any, count: int = 6) -> None:
    """None is refused a connection, though each holds one for a while."""
    errors: list[Exception] = []

    def block() -> None:
        try:
            client.execute_command("BLPOP", "manthan:nothing", 0.2)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=block) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
