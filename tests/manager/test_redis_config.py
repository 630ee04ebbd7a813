"""The keys under redis, and what they mean for the cold store."""

import pytest
from logged import warnings

from manthan.manager.config.model import FIELDS, REDIS_SCHEMES
from manthan.manager.config.resolve import ConfigError, ManthanConfig, load_config

SECRET = "s3cret"


def load(env: dict[str, str] | None = None, **flags: object) -> ManthanConfig:
    return load_config(env=env or {}, flags=flags)


def refusal(env: dict[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(ConfigError) as error:
        load(env, **flags)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://cache",
        "rediss://cache.example:6380/2",
        "redis://[::1]:6379",
        "unix:///run/redis/redis.sock",
        "redis+sentinel://one:26379,two:26379/mymaster/0",
        "rediss+sentinel://one/mymaster",
        "redis+cluster://one:6379,two:6379",
        "rediss+cluster://one",
    ],
)
def test_urls(url: str) -> None:
    assert load(**{"redis.url": url}).redis.url == url
    assert load(redis=url).redis.url == url
    assert load({"MANTHAN_REDIS__URL": url}).redis.url == url


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:6379", "http://cache", "redis://", "redis:///0", "unix://", "redis+tls://cache", 6379, "redis://["],
)
def test_what_is_no_such_url_is_refused(url: object) -> None:
    assert (
        refusal(**{"redis.url": url}) == f"argument: redis.url must be {FIELDS['redis.url'].description}, not {url!r}"
    )


def test_every_scheme_is_in_the_description() -> None:
    said = FIELDS["redis.url"].description or ""
    assert all(f"{scheme.replace('rediss+', 'redis+')}://" in said for scheme in REDIS_SCHEMES)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@cache:6379/0",
        f"redis://user:{SECRET}@cache",
        f"rediss+cluster://user:{SECRET}@one,two",
        f"redis://cache/0?password={SECRET}",
        f"unix:///run/redis.sock?password={SECRET}",
        f"http://user:{SECRET}@cache",
        f"redis://user:{SECRET}@[cache",
    ],
)
def test_a_url_with_a_password_is_refused_without_saying_it(url: str) -> None:
    for sentence in (refusal(redis=url), refusal({"MANTHAN_REDIS__URL": url}), refusal(**{"--manthan-redis-url": url})):
        assert SECRET not in sentence
        assert sentence.endswith("redis.password_env), not a URL with '@' or '?' in it")


def test_the_password_is_not_an_unknown_variable_and_not_kept() -> None:
    with warnings() as messages:
        config = load({"MANTHAN_REDIS_PASSWORD": SECRET})
        assert messages == []
        load({"MANTHAN_REDIS_PASSWORT": SECRET})
    assert "MANTHAN_REDIS_PASSWORT" in messages[0]
    assert SECRET not in messages[0]
    assert config == ManthanConfig()
    assert SECRET not in config.model_dump_json()


def test_what_kubernetes_says_of_a_service_called_manthan_redis_is_not_for_us() -> None:
    env = {
        "MANTHAN_REDIS_SERVICE_HOST": "10.0.0.1",
        "MANTHAN_REDIS_SERVICE_PORT": "6379",
        "MANTHAN_REDIS_SERVICE_PORT_REDIS": "6379",
        "MANTHAN_REDIS_PORT": "tcp://10.0.0.1:6379",
        "MANTHAN_REDIS_PORT_6379_TCP": "tcp://10.0.0.1:6379",
        "MANTHAN_REDIS_PORT_6379_TCP_PROTO": "tcp",
        "MANTHAN_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
    }
    assert load(env) == ManthanConfig()


@pytest.mark.parametrize("prefix", ["manthan:", "a", "team-7/prod_v1.2:", "x" * 64])
def test_prefixes(prefix: str) -> None:
    assert load(**{"redis.prefix": prefix}).redis.prefix == prefix


@pytest.mark.parametrize("prefix", ["", "x" * 65, "a b", "{a}", "a*", "a\n", "ä", 'a"'])
def test_prefixes_that_would_be_more_than_a_name_are_refused(prefix: str) -> None:
    said = FIELDS["redis.prefix"].description
    assert refusal(**{"redis.prefix": prefix}) == f"argument: redis.prefix must be {said}, not {prefix!r}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ttl_s", 0),
        ("ttl_s", float("inf")),
        ("ttl_s", True),
        ("timeout_s", 0),
        ("timeout_s", 61),
        ("connections", 1),
        ("connections", 2.5),
        ("required", "perhaps"),
        ("password_env", "NOT A NAME"),
        ("password_env", ""),
        ("username", 7),
    ],
)
def test_values_out_of_bounds_are_refused(key: str, value: object) -> None:
    said = FIELDS[f"redis.{key}"].description
    assert refusal(**{f"redis.{key}": value}) == f"argument: redis.{key} must be {said}, not {value!r}"


@pytest.mark.parametrize(("value", "seconds"), [("24h", "86400"), ("7d", "604800")])
def test_a_time_to_live_with_a_unit_is_answered_with_its_seconds(value: str, seconds: str) -> None:
    assert refusal(**{"redis.ttl_s": value}).endswith(f", not '{value}' (write {seconds})")


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    assert refusal(**{"redis.password": SECRET}) == (
        "argument: unknown key 'redis.password' (did you mean 'redis.password_env'?)"
    )


# -- the cold store -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "is_shared"), [("host", False), ("device", False), ("redis", True), ("tiered", True)])
def test_what_is_shared(kind: str, is_shared: bool) -> None:
    assert load(cold_store=kind).cold_store.is_shared is is_shared


def test_tiered_keeps_a_quarter_in_ram_unless_told_otherwise() -> None:
    size = {"cold_store.kind": "tiered", "cold_store.max_bytes": "8GiB"}
    assert load(**size).cold_store.front_bytes == 2 << 30
    assert load(cold_store="tiered").cold_store.front_bytes == 1 << 30
    assert load(**size, **{"cold_store.host_bytes": "3GiB"}).cold_store.front_bytes == 3 << 30


@pytest.mark.parametrize("kind", ["redis", "host", "device"])
def test_nothing_else_has_ram_in_front(kind: str) -> None:
    assert load(cold_store=kind).cold_store.front_bytes == 0


@pytest.mark.parametrize("kind", ["redis", "host"])
def test_host_bytes_are_refused_where_there_is_no_second_tier(kind: str) -> None:
    assert refusal(**{"cold_store.kind": kind, "cold_store.host_bytes": "1GiB"}) == (
        "argument: cold_store.host_bytes is RAM behind cold_store.kind device or in front of the other "
        f"tiers of kind tiered, but kind is {kind}: use max_bytes"
    )


@pytest.mark.parametrize("kind", ["host", "device", "redis", "tiered"])
@pytest.mark.parametrize("key", ["codec.sink_tokens", "codec.window_tokens"])
def test_every_store_takes_exact_tokens(kind: str, key: str) -> None:
    config = load(**{"cold_store.kind": kind, key: 4})
    assert config.codec.keeps_exact
    assert config.cold_store.kind == kind
