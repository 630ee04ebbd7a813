"""What a store that outlives the engine asks of the engine: the same keys in every process, and the same model."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from image_model import make_image_model
from logged import warnings
from redis_server import RedisServer, running
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from manthan.manager.config.model import CodecConfig, TenantsConfig, TiersConfig
from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks import fingerprint as fingerprint_module
from manthan.vllm_hooks import kv_transfer_config, settled
from manthan.vllm_hooks.fingerprint import fingerprint, namespace_of
from manthan.vllm_hooks.groups import Groups, KvCacheGroup, PointGroup, groups_of
from manthan.vllm_hooks.support import hash_refusal
from manthan.vllm_hooks.transfer_config import from_vllm_config, settings
from manthan.vllm_hooks.worker.weights import Loaded

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


def configured(redis_server: RedisServer, model: Path = MODEL, kind: str = "redis", **options: Any) -> Any:
    """vLLM's configuration, as far as it can be had without an engine."""
    redis = {"url": f"{redis_server.url}?socket_timeout=0.5"}
    manthan = kv_transfer_config(tiers={"kind": kind, "redis": redis, "disk": {"path": "codes"}})
    options = {"max_model_len": 1024} | options
    return EngineArgs(str(model), kv_transfer_config=manthan, **options).create_engine_config()


@pytest.mark.parametrize("kind", ["disk", "redis"])
@pytest.mark.parametrize("seed", [None, "7"])
def test_hashes_that_collide_are_refused(
    redis_server: RedisServer, kind: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are the same in each process."""
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    with pytest.raises(ConfigError) as refused:
        configured(redis_server, kind=kind, prefix_caching_hash_algo="xxhash")
    assert str(refused.value) == (
        f"Manthan cannot be used here: tiers.kind is {kind}, but --prefix-caching-hash-algo xxhash does not "
        "resist collisions, and whoever finds one is served another's blocks: use sha256."
    )
    assert configured(redis_server, kind="host", prefix_caching_hash_algo="xxhash")


def test_hashes_that_collide_are_refused_where_tenants_are_kept_apart() -> None:
    assert hash_refusal(TiersConfig(), "xxhash", TenantsConfig(header="X-Tenant-ID")).startswith("tenants.isolate is")
    assert not hash_refusal(TiersConfig(), "xxhash", TenantsConfig(header="X-Tenant-ID", isolate=False))
    assert not hash_refusal(TiersConfig(), "sha256", TenantsConfig(header="X-Tenant-ID"))
    transfer = kv_transfer_config(tenants={"shares": {"alice": 0.5}})
    with pytest.raises(
        ConfigError, match=r"^Manthan cannot be used here: tenants.isolate is true, but .*: use sha256.$"
    ):
        EngineArgs(
            str(MODEL), kv_transfer_config=transfer, max_model_len=1024, prefix_caching_hash_algo="xxhash"
        ).create_engine_config()


def test_a_server_that_does_not_answer_is_said_and_served_without() -> None:
    with warnings() as messages:
        transfer = kv_transfer_config(tiers={"kind": "redis", "redis": "redis://127.0.0.1:1"})
        assert EngineArgs(str(MODEL), kv_transfer_config=transfer, max_model_len=1024).create_engine_config()
    assert [message for message in messages if "redis://127.0.0.1:1 does not answer" in message]


def namespace(
    vllm_config: Any, weights: str = "some", tokens: int = 32, windows: Sequence[PointGroup] = (), **options: Any
) -> str:
    config = from_vllm_config(vllm_config).model_copy(update={"codec": CodecConfig(**options)})
    model = vllm_config.model_config
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=128, dtype=model.dtype)
    return namespace_of(vllm_config, config, Groups(KvCacheGroup(0, spec, 4), windows), weights).name


def test_what_codes_mean_decides_where_they_are(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights, another dtype, another block size, other code: another namespace."""
    for name in ("one", "two"):
        shutil.copytree(MODEL, tmp_path / name / "tiny-llama")
    model = tmp_path / "one" / "tiny-llama"
    plain = namespace(configured(redis_server, model))
    assert plain.startswith("tiny-llama-")
    assert namespace(configured(redis_server, model, served_model_name="other", enforce_eager=True)) == plain
    assert namespace(configured(redis_server, tmp_path / "two" / "tiny-llama")) == plain
    assert namespace(configured(redis_server, model, max_model_len=512, max_logprobs=5)) == plain
    vllm_config = configured(redis_server, model)
    others = [namespace(vllm_config, weights="others"), namespace(vllm_config, tokens=64)]
    others.append(namespace(configured(redis_server, model, dtype="float32")))
    others.append(namespace(configured(redis_server, model, hf_overrides={"rope_theta": 77.0})))
    others.append(namespace(configured(redis_server, model, prefix_caching_hash_algo="sha256_cbor")))
    for code in ("modeling.py", "parts/attention.py"):
        (model / code).parent.mkdir(exist_ok=True)
        (model / code).write_text("pass")
        others.append(namespace(vllm_config))
    (model / code).write_text("psas")
    others.append(namespace(vllm_config))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    others.append(namespace(vllm_config))
    monkeypatch.setattr(fingerprint_module, "version", lambda name: "0.32.1")
    others.append(namespace(vllm_config))
    assert len({plain, *others}) == 1 + len(others) == 11
    assert namespace(vllm_config, name="k3v3") == others[-1]  # each block names its codec
    settings(vllm_config)[settled.DIGEST] = "another profile"
    assert namespace(vllm_config) == others[-1]


@pytest.mark.invariant(15, "vllm_hooks/fingerprint.py", '"weights": weights,', '"weights": "",')
@pytest.mark.invariant(15, "vllm_hooks/worker/weights.py", "made.update(digest)", "made.update(digest[:0])")
def test_what_lasts_is_found_by_the_same_weights_only_all_their_bytes(redis_server: RedisServer) -> None:
    vllm_config, names = configured(redis_server), []
    for changed in (None, *range(24), None):
        weights = torch.arange(24, dtype=torch.uint8)
        if changed is not None:
            weights[changed] ^= 1
        model, loaded = torch.nn.Module(), Loaded("an engine")
        model.load_weights = dict  # type: ignore[assignment]
        loaded.watch(model, "model")
        model.load_weights([("first", weights[:8].view(torch.float32)), ("second", weights[8:])])  # type: ignore[operator]
        names.append(namespace(vllm_config, loaded.digest()))
    assert names[0] == names[-1]
    assert len(set(names)) == 1 + 24


def test_how_media_are_prepared_decides_too(redis_server: RedisServer, tmp_path: Path) -> None:
    model = Path(make_image_model(tmp_path / "model"))
    kwargs: list[Any] = [None, {"do_rescale": True}, {"do_rescale": False}]
    names = [namespace(configured(redis_server, model, mm_processor_kwargs=each)) for each in kwargs]
    assert len(set(names)) == 3
    assert namespace(configured(redis_server, model, mm_processor_kwargs=kwargs[1])) == names[1]


def test_windows_and_states_decide_too(redis_server: RedisServer) -> None:
    """Also states that differ behind the same padding."""
    vllm_config = configured(redis_server)

    def window(tokens: int, heads: int = 2) -> PointGroup:
        sizes = {"block_size": 32, "num_kv_heads": heads, "head_size": 128, "dtype": torch.bfloat16}
        spec = SlidingWindowSpec(sliding_window=tokens, **sizes)
        return PointGroup(KvCacheGroup(1, spec, 4), tokens)

    def state(*shape: int, dtype: torch.dtype = torch.float32) -> PointGroup:
        spec = MambaSpec(block_size=32, shapes=(shape,), dtypes=(dtype,), page_size_padded=65536)
        full = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], spec)]
        [found] = groups_of(KVCacheConfig(8, [], groups)).at_points
        return found

    kinds = [window(128), window(64), window(128, heads=4), state(4, 64), state(8, 32), state(4, 64, dtype=torch.int32)]
    names = [namespace(vllm_config, windows=[kind]) for kind in kinds]
    both = namespace(vllm_config, windows=[window(128), state(4, 64)])
    coded = namespace(vllm_config, windows=[window(128), state(4, 64)], state="bf16")
    assert len({namespace(vllm_config), both, coded, *names}) == len(kinds) + 3
    assert namespace(vllm_config, windows=[window(64)], state="bf16") in names, "it has no states"
    assert len({fingerprint(vllm_config, kind.group, "exact", "name") for kind in kinds[3:]}) == 3


def test_no_password_is_carried_to_other_processes(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", "do-not-carry-me")
    transfer = kv_transfer_config(tiers={"kind": "redis", "redis": redis_server.url})
    assert "do-not-carry-me" not in repr(transfer)
