"""Where a configuration comes from, and what is said about one that cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from loaded import load_config
from logged import warnings

from manthan.manager.config.model import FIELDS, TiersConfig
from manthan.manager.config.resolve import FLAG_KEYS, ConfigError, ManthanConfig, check_registered, resolve_config

CONFIGS = Path(__file__).parents[2] / "configs"

WriteYaml = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteYaml:
    def write(text: str) -> Path:
        path = tmp_path / "x.yaml"
        path.write_text(text)
        return path

    return write


def load(path: Path | None = None, env: dict[str, str] | None = None, **flags: object) -> ManthanConfig:
    return load_config(path, env=env or {}, flags=flags)


def refusal(path: Path | None = None, env: dict[str, str] | None = None, flags: dict[str, object] | None = None) -> str:
    """The sentence, without the file's folder."""
    with pytest.raises(ConfigError) as error:
        load_config(path, env=env or {}, flags=flags)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence.replace(f"{path.parent}/", "") if path else sentence


def test_all_keys_with_mistakes_are_named(write: WriteYaml) -> None:
    sentence = refusal(write("{idle: {after_s: soon, min_tokens: few}, tiers: {max_bytes: much}}"))
    assert sentence.startswith("x.yaml: idle.after_s must be ")
    assert sentence.endswith(", not 'soon' (wrong too: idle.min_tokens, tiers.max_bytes)")


def test_all_unknown_keys_are_named(write: WriteYaml) -> None:
    assert refusal(write("{polcy: lru, idel: {after_s: 2}, tiers: {maxbytes: 3}}")) == (
        "x.yaml: unknown key 'polcy' (did you mean 'policy'?); unknown key 'idel' (did you mean 'idle'?); "
        "unknown key 'tiers.maxbytes' (did you mean 'tiers.max_bytes'?)"
    )


def test_there_are_few_keys() -> None:
    assert len(FIELDS) <= 29


def test_each_source_goes_over_the_ones_below_it(write: WriteYaml) -> None:
    path = write("{idle: {after_s: 1, min_tokens: 1}, codec: one, tiers: {max_bytes: 1}}")
    env = {"MANTHAN_IDLE__MIN_TOKENS": "2", "MANTHAN_CODEC": "two", "MANTHAN_TIERS__MAX_BYTES": "2"}
    flags = {"--manthan-codec": "three", "--manthan-cold-bytes": "3", "--manthan-policy": None}

    config, sources = resolve_config(path, env=env, flags=flags)

    assert (config.tiers.redis.ttl_s, sources["tiers.redis.ttl_s"]) == (86400, "default")
    assert (config.policy.name, sources["policy.name"]) == ("lru", "default")
    assert (config.idle.after_s, sources["idle.after_s"]) == (1, str(path))
    assert (config.idle.min_tokens, sources["idle.min_tokens"]) == (2, "MANTHAN_IDLE__MIN_TOKENS")
    assert (config.codec.name, sources["codec.name"]) == ("three", "--manthan-codec")
    assert (config.tiers.max_bytes, sources["tiers.max_bytes"]) == (3, "--manthan-cold-bytes")
    sources = resolve_config(env={}, flags={"policy": {"name": "decay", "half_life_s": 60}}).sources
    assert set(sources) == {*FIELDS, "policy.half_life_s"}
    assert sources["policy.half_life_s"] == "argument"


def test_a_kubernetes_service_of_our_name_is_not_a_mistake() -> None:
    env = {
        "MANTHAN_SERVICE_HOST": "10.0.0.1",
        "MANTHAN_SERVICE_PORT": "80",
        "MANTHAN_SERVICE_PORT_HTTP": "80",
        "MANTHAN_PORT": "tcp://10.0.0.1:80",
        "MANTHAN_PORT_80_TCP_ADDR": "10.0.0.1",
        "MANTHAN_REDIS_SERVICE_HOST": "10.0.0.2",
        "MANTHAN_REDIS_PASSWORD": "hush",
        "MANTHAN_REDIS_PORT_6379_TCP": "tcp://10.0.0.2:6379",
    }
    with warnings() as messages:
        assert load_config(env=env) == ManthanConfig()
    assert messages == []


def test_the_environment_is_the_process_own_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTHAN_IDLE__MIN_TOKENS", "7")
    assert load_config().idle.min_tokens == 7
    assert load_config(env={}).idle.min_tokens == 256


@pytest.mark.parametrize("flag", FLAG_KEYS)
def test_flags_set_the_key_they_stand_for(flag: str) -> None:
    others = {"--manthan-redis-url": "redis://there", "--manthan-api": "off"}
    value = others.get(flag, "77")
    assert flag in resolve_config(env={}, flags={"tiers.kind": "redis", flag: value}).sources.values()


def test_sizes() -> None:
    right = {"8GiB": 8 << 30, "512MiB": 512 << 20, "1.5GB": 1_500_000_000, "4 kib": 4096, "12": 12, 12: 12}
    assert {size: load(**{"tiers.max_bytes": size}).tiers.max_bytes for size in right} == right


@pytest.mark.parametrize("size", ["8 apples", "-1", "0", 0, -5, "", "GiB", 1.5, True, None, "1e999GiB", [1]])
def test_bad_sizes_are_refused_in_one_sentence(write: WriteYaml, size: object) -> None:
    path = write(yaml.safe_dump({"tiers": {"max_bytes": size}}))
    shown = "empty" if size is None else repr(size)
    assert refusal(path) == (
        f"x.yaml: tiers.max_bytes must be a size above 0, such as 4GiB, 512MiB or a plain number of bytes, not {shown}"
    )


def test_a_refusal_names_the_source_of_the_value(write: WriteYaml) -> None:
    expected = "codec.name must be the name of a codec, such as wht-5x, not 3"
    assert refusal(write("codec: 3")) == f"x.yaml: {expected}"
    assert refusal(flags={"--manthan-codec": 3}) == f"--manthan-codec: {expected}"
    assert refusal(flags={"codec": 3}) == f"argument: {expected}"
    assert refusal(env={"MANTHAN_IDLE__MIN_TOKENS": "few"}) == (
        "MANTHAN_IDLE__MIN_TOKENS: idle.min_tokens must be a whole number of tokens, 0 or more, not 'few'"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("idle.after_s", 0),
        ("idle.after_s", "soon"),
        ("idle.after_s", float("nan")),
        ("idle.after_s", float("inf")),
        ("idle.after_s", True),
        ("idle.min_tokens", -1),
        ("idle.min_tokens", 2.5),
        ("codec.sink_tokens", -1),
        ("codec.sink_tokens", False),
        ("codec.backend", "rocm"),
        ("policy", 3),
        ("tiers", ["host"]),
        ("tiers.pinned_share", 1.01),
        ("tiers.drain_s", True),
        ("tiers.drain_s", float("nan")),
        ("tenants.shares", ["acme"]),
        ("tenants.shares", {"acme": 1.01}),
        ("tenants.shares", {"a.b": 0.5, "acme": "half"}),
        ("tenants.shares", {7: 0.5}),
        ("tenants.shares", "acme=0.5"),
        ("tenants.header", "X Tenant"),
        ("tenants.header", "X-Tenant-ID: acme"),
        ("tenants.header", "AUTHORIZATION"),
        ("api.enabled", "now"),
        ("api.hosts", ["gpu7.example.org:8000"]),
        ("api.hosts", ["gpu7.example.org."]),
    ],
)
def test_values_out_of_bounds_are_refused(key: str, value: object) -> None:
    leaf = {"policy": "policy.name", "tiers": "tiers.kind"}.get(key, key)
    assert refusal(flags={key: value}) == f"argument: {leaf} must be {FIELDS[leaf].description}, not {value!r}"


def test_tenants_are_a_mapping_in_yaml_and_json_in_the_environment(write: WriteYaml) -> None:
    path = write('tenants: {shares: {acme: 0.5, "42": 0.1, a.b: 0}}')
    assert load(path).tenants.shares == {"acme": 0.5, "42": 0.1, "a.b": 0}
    env = {"MANTHAN_TENANTS__SHARES": '{"beta": 1}'}
    assert load(path, env).tenants.shares == {"beta": 1}  # a value as a whole goes over another


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("idle_after: 3", "unknown key 'idle_after' (did you mean 'idle.after_s'?)"),
        ("tenant: {header: X}", "unknown key 'tenant' (did you mean 'tenants'?)"),
        (
            "tiers: {max_byte: 1}",
            "unknown key 'tiers.max_byte' (did you mean 'tiers.max_bytes'?)",
        ),
        ("sealing: {keyfile: /k}", "unknown key 'sealing.keyfile' (did you mean 'sealing.key_file'?)"),
        ("max_bytes: 1", "unknown key 'max_bytes' (did you mean 'tiers.max_bytes'?)"),
        ("tenants: 0.5", "tenants must be a mapping with shares and header and isolate, not 0.5"),
        ("- policy", "must be a mapping of keys to values, not a list"),
        (
            "policy: lru\n codec: x",
            "is not valid YAML: mapping values are not allowed here in line 2, column 7",
        ),
        ("day: 2001-99-99", "is not valid YAML"),
        ("\x00", "is not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_bad_files_are_refused(write: WriteYaml, text: str, expected: str) -> None:
    assert refusal(write(text)).startswith(f"x.yaml: {expected}")


def test_a_key_near_nothing_is_answered_with_what_there_is() -> None:
    assert refusal(flags={"zzz": 1}).startswith(
        "argument: unknown key 'zzz' (valid: admission_s, api, api.enabled, api.hosts, codec, "
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        *(
            (
                {"tiers.kind": kind, "--manthan-encryption-key-file": "/etc/keys.yaml"},
                "argument, --manthan-encryption-key-file: sealing.key_file is for blocks on a disk and in Redis, "
                f"but tiers.kind is {kind}: leave it out, or use disk or redis",
            )
            for kind in ("host", "device")
        ),
        (
            {"--manthan-cold-store": "disk"},
            "--manthan-cold-store: tiers.kind is disk, but tiers.disk.path (--manthan-disk-path) is empty: name the "
            "folder that the blocks are to be kept in",
        ),
        (
            {"tiers": {"kind": "redis", "disk_bytes": 5}},
            "argument: tiers.disk_bytes is set, but tiers.disk.path (--manthan-disk-path) is empty: name the folder "
            "that the blocks are to be kept in",
        ),
        (
            {"tiers": {"kind": "disk", "disk_bytes": 5, "disk": "/x"}},
            "argument: tiers.disk_bytes is disk in front of tiers.kind redis, but kind is disk: use max_bytes",
        ),
        (
            {"tiers": {"kind": "device", "disk_bytes": 5}},
            "argument: tiers.disk_bytes is disk in front of tiers.kind redis, but kind is device: leave it out",
        ),
        (
            {"tiers": {"host_bytes": 5}},
            "argument: tiers.host_bytes is RAM for tiers.kind device, disk or redis, but kind is host: use max_bytes",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(flags: dict[str, object], sentence: str) -> None:
    assert refusal(flags=flags) == sentence


def test_tiers() -> None:
    def store(**given: object) -> TiersConfig:
        return load(tiers={"max_bytes": 100, "disk": "/x", **given}).tiers

    assert store(kind="disk").places == ("disk",)
    assert store(kind="redis", host_bytes=5).places == ("host", "redis")
    three = store(kind="redis", host_bytes=25, disk_bytes=50)
    assert (three.places, three.front_bytes, three.disk_bytes) == (("host", "disk", "redis"), 25, 50)
    two = store(kind="disk", host_bytes=10)
    assert (two.front_bytes, two.disk_bytes, two.is_shared, two.is_lasting) == (10, 0, False, True)
    assert store(kind="device", host_bytes=10).tier_names == ("device", "host")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml") == "none.yaml: cannot be read: No such file or directory"
    assert refusal(tmp_path / "..").endswith(": cannot be read: Is a directory")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\xd8")
    assert refusal(binary) == "binary.yaml: is not valid YAML"


def test_of_unknown_variables_there_is_one_warning_each() -> None:
    env = {"MANTHAN_IDLE_AFTER": "3", "MANTHAN_TIERS_MAX_BYTES": "1", "VLLM_MANTHAN_POLICY": "x", "MANTHANX": "x"}
    with warnings() as messages:
        assert load(env=env) == load()
        load(env=env)  # once a process
    assert messages == [
        "Manthan: the environment variable MANTHAN_IDLE_AFTER is unknown and ignored (did you mean "
        "'MANTHAN_IDLE__AFTER_S'?)",
        "Manthan: the environment variable MANTHAN_TIERS_MAX_BYTES is unknown and ignored (did you mean "
        "'MANTHAN_TIERS__MAX_BYTES'?)",
    ]


@pytest.mark.parametrize(("after_s", "is_long"), [(2, False), (30, False), (31, True)])
def test_a_time_that_leaves_sessions_unsaved_for_long_is_said(
    after_s: float, is_long: bool, write: WriteYaml, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(write(f"{{idle: {after_s}}}")).idle.after_s == after_s
    assert [f"idle.after_s is {after_s}:" in message for message in caplog.messages] == [True] * is_long


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("idle_after_s", 5, "idle.after_s"),
        ("min_tokens", 1, "idle.min_tokens"),
        ("backend", "cuda", "codec.backend"),
        ("cold_store", "disk", "tiers.kind"),
        ("cold_store", {"kind": "disk"}, "tiers.kind"),
        ("cold_store", {"max_bytes": 5}, "tiers.max_bytes"),
        ("cold_store", {"host_bytes": 5}, "tiers.host_bytes"),
        ("cold_store", {"disk_bytes": 5}, "tiers.disk_bytes"),
        ("cold_store", {"encryption": "/k"}, "sealing.key_file"),
        ("cold_store", {"encryption": {"key_file": "/k"}}, "sealing.key_file"),
        ("disk", "/y", "tiers.disk.path"),
        ("disk", {"path": "/y"}, "tiers.disk.path"),
        ("redis", "redis://x", "tiers.redis.url"),
        ("redis", {"url": "redis://x"}, "tiers.redis.url"),
        ("redis", {"prefix": "x"}, "tiers.redis.prefix"),
        ("redis", {"ttl_s": 5}, "tiers.redis.ttl_s"),
        ("quotas", {"pinned_share": 0.5}, "tiers.pinned_share"),
        ("quotas", {"tenants": {"acme": 1}}, "tenants.shares"),
        ("quotas", {"header": "X-Who"}, "tenants.header"),
        ("quotas", {"isolate": False}, "tenants.isolate"),
    ],
)
def test_a_value_under_an_old_name_counts_and_the_log_says_the_new_one(
    old: str, value: object, new: str, write: WriteYaml
) -> None:
    leaf, key = value, old
    while isinstance(leaf, dict) and "acme" not in leaf:
        ((name, leaf),) = leaf.items()
        key += f".{name}"
    said, variable = json.dumps(leaf) if isinstance(leaf, dict) else str(leaf), key.replace(".", "__").upper()
    flags: dict[str, object] = {"--manthan-cold-store": "redis", "--manthan-disk-path": "/x"}
    flags = {flag: given for flag, given in flags.items() if FLAG_KEYS[flag] != new}
    file, named = write(yaml.safe_dump({old: value})), f"MANTHAN_{variable}"
    ways = (file, {}, {}, file), (None, {named: said}, {}, named), (None, {}, {key: leaf}, "argument")
    for path, env, keywords, source in ways:
        with warnings() as messages:
            assert load(path, env, **flags, **keywords) == load(**flags, **{new: leaf}) != load(**flags)
        told = (new, new.rpartition(".")[0])  # the group, for a bare value
        assert messages in [[f"Manthan: {source}: {key} is {each} now"] for each in told]
    both = refusal(None, {}, {**flags, key: leaf, new: leaf})
    assert both.startswith("argument: ")
    assert both.endswith(f" is {new} now, and both are set: leave out {key}")


def test_an_empty_file_and_empty_groups_are_the_defaults(write: WriteYaml) -> None:
    assert load(write("")) == load(write("tiers:\npolicy:\n")) == load()


def test_shorthands(write: WriteYaml) -> None:
    config = load(write("{policy: mru, idle: 7, codec: zip, tiers: {kind: disk, disk: /x}, sealing: /k}"))
    assert (config.policy.name, config.idle.after_s, config.codec.name) == ("mru", 7, "zip")
    assert (config.tiers.disk.path, config.sealing.key_file) == ("/x", "/k")
    assert config == load(policy="mru", idle=7, codec="zip", tiers={"kind": "disk", "disk": "/x"}, sealing="/k")
    assert load(write("tiers: redis")) == load(env={"MANTHAN_TIERS": "redis"})
    assert load(write("tiers: {max_bytes: 5}"), {"MANTHAN_TIERS": "redis"}).tiers.max_bytes == 5


def test_another_policy_does_not_inherit_the_options_of_the_one_it_replaces(write: WriteYaml) -> None:
    path = write("policy: {name: decay, half_life_s: 60}")
    assert load(path).policy.options == {"half_life_s": 60}
    assert load(path, policy="decay").policy.options == {"half_life_s": 60}
    assert load(path, policy="lru").policy.options == {}
    assert load(path, env={"MANTHAN_POLICY__HALF_LIFE_S": "9"}).policy.options == {"half_life_s": "9"}


def test_json_round_trip() -> None:
    options = {"tiers.max_bytes": "1GiB", "tenants.shares": {"acme": 0.5}}
    config = load(policy={"name": "decay", "half_life_s": 60}, **options)
    assert ManthanConfig.model_validate(config.model_dump(mode="json")) == config
    assert ManthanConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--manthan-codec", "k3v", "--manthan-codec: unknown codec 'k3v' (did you mean 'k3v3'?)"),
        ("tiers", "hots", "argument: unknown cold store 'hots' (did you mean 'host'?)"),
        ("tiers", "xyz", "argument: unknown cold store 'xyz' (valid: device, disk, host, redis)"),
    ],
)
def test_names_that_no_registry_has_are_refused(flag: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_registered(resolve_config(env={}, flags={flag: value}))
    assert str(error.value) == expected


def test_the_default_file_has_every_key_with_its_default_and_a_comment() -> None:
    path = CONFIGS / "default.yaml"
    config, sources = resolve_config(path, env={})
    assert config == load()
    assert {key for key, source in sources.items() if source == str(path)} == set(FIELDS)
    lines = [line.strip() for line in path.read_text().splitlines()]
    for key in FIELDS:
        name = key.removesuffix(".name").rpartition(".")[2]
        at = next(at for at, line in enumerate(lines) if line.startswith(f"{name}:"))
        assert lines[at - 1].startswith("#"), f"{name} has no comment"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_files_users_start_from_load(path: Path) -> None:
    load(path)
