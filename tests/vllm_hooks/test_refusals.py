"""What Manthan does not serve stops the server at start with one sentence, tried on real model configurations."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from loaded import load_config
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from vllm import EngineArgs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
)

from manthan.manager.config.model import CodecConfig
from manthan.manager.config.resolve import ConfigError
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.vllm_hooks import kv_transfer_config, settled
from manthan.vllm_hooks.groups import KvCacheGroup
from manthan.vllm_hooks.lasting import check_disk
from manthan.vllm_hooks.memory import Shards, group_shape
from manthan.vllm_hooks.support import VLLM, check_supported, is_packed
from manthan.vllm_hooks.telemetry.log import check_capacity
from manthan.vllm_hooks.transfer_config import from_vllm_config

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 1024,
    "torch_dtype": "bfloat16",
}
MLA = SIZES | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "state_size": 16,
    "vocab_size": 1024,
    "torch_dtype": "bfloat16",
}


def refusal(model: str, **options: Any) -> str:
    """Sentence of `EngineArgs` on the way to an engine."""
    options = {"kv_transfer_config": kv_transfer_config(), "max_model_len": 1024} | options
    with pytest.raises(ConfigError) as refused:
        EngineArgs(model, skip_tokenizer_init=True, **options).create_engine_config()
    message = str(refused.value)
    assert message.startswith("Manthan cannot be used here: ")
    assert message.count("\n") == 0
    return message


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MAMBA, "{} has no attention layers, but states only; serve it without Manthan."),
        (
            MLA,
            "prefix caching is off: vLLM's CPU build may disable it for models with latents (MLA), such as "
            "{}; serve the model on a GPU, or without Manthan.",
        ),
    ],
    ids=["states only", "latents on the CPU"],
)
def test_models(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refusal(str(tmp_path)).endswith(why.format(tmp_path))


def test_a_disk_beside_ranks_on_other_hosts(tmp_path: Path) -> None:
    kv = kv_transfer_config(tiers={"kind": "disk", "disk": str(tmp_path)})
    config = EngineArgs(MODEL, max_model_len=1024, kv_transfer_config=kv).create_engine_config()
    check_disk(config)
    config.parallel_config.tensor_parallel_size, config.parallel_config.nnodes = 2, 2
    with pytest.raises(ConfigError, match=r"^tiers\.kind is disk, but --nnodes spreads one engine over 2 hosts"):
        check_disk(config)


@pytest.mark.parametrize(
    ("options", "manthan", "roles", "why"),
    [
        ({"enable_prefix_caching": False}, {}, {}, "prefix caching is off; use --enable-prefix-caching."),
        ({}, {"tiers": "device"}, {}, "tiers.kind is device, but vLLM runs on the CPU: use host."),
        ({}, {"codec": {"backend": "cuda"}}, {}, "codec.backend is cuda, but vLLM runs on cpu: use auto or numpy."),
        (
            {},
            {},
            {"kv_role": "kv_producer"},
            "kv_role of ManthanConnector is kv_producer, but Manthan saves and loads KV",
        ),
        (
            {},
            {},
            {"kv_load_failure_policy": "fail"},
            "kv_load_failure_policy of ManthanConnector is fail: set it to recompute",
        ),
    ],
    ids=["prefix caching", "device tier", "backend", "role", "failure policy"],
)
def test_settings(options: dict[str, Any], manthan: dict[str, Any], roles: dict[str, str], why: str) -> None:
    transfer = kv_transfer_config(**manthan)
    for name, value in roles.items():
        setattr(transfer, name, value)
    assert refusal(MODEL, kv_transfer_config=transfer, **options).startswith(f"Manthan cannot be used here: {why}")


def test_a_profile_is_of_all_layers() -> None:
    transfer = kv_transfer_config(codec="klt-8x")
    with pytest.raises(ConfigError) as refused:
        EngineArgs(MODEL, kv_transfer_config=transfer, pipeline_parallel_size=2).create_engine_config()
    assert str(refused.value) == (
        "codec.name is klt-8x, but --pipeline-parallel-size is 2, and a profile has all layers: use auto or wht-5x"
    )


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CodecConfig]:
    """The codec that an engine would run with on a GPU, which is not here."""

    def settle(config: VllmConfig, manthan: dict[str, Any]) -> CodecConfig:
        config.kv_transfer_config = kv_transfer_config(**manthan)
        monkeypatch.setattr(type(current_platform), "device_type", "cuda")
        monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
        monkeypatch.setattr(settled, "kernel_fault", lambda: "")
        check_supported(config)
        settled.settle_codec(config)
        return from_vllm_config(config).codec

    return settle


GPU_SETTINGS: list[dict[str, Any]] = [{}, {"tiers": "device"}, {"codec.backend": "cuda"}, {"codec.backend": "numpy"}]


@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("manthan", GPU_SETTINGS, ids=str)
def test_latents_on_a_gpu(manthan: dict[str, Any], dtype: str, tmp_path: Path, on_gpu: Callable[..., Any]) -> None:
    """Coded, but for vLLM's layout of 4-bit numbers, which stays as the bytes that it is."""
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    config = EngineArgs(str(tmp_path), skip_tokenizer_init=True, max_model_len=1024).create_engine_config()
    config.cache_config.enable_prefix_caching, config.cache_config.cache_dtype = True, dtype
    coded = dtype != "nvfp4_ds_mla"
    codec = on_gpu(config, manthan)
    assert (codec.name, codec.guard) == (("wht-5x", True) if coded else ("exact", False))
    assert is_packed(config.cache_config) != coded


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("manthan", GPU_SETTINGS, ids=str)
def test_fp8_on_a_gpu(manthan: dict[str, Any], dtype: str, on_gpu: Callable[..., Any]) -> None:
    """Coded as all KV is, but where vLLM keeps some layers in another dtype."""
    config = EngineArgs(MODEL, skip_tokenizer_init=True, kv_cache_dtype=dtype).create_engine_config()
    codec = on_gpu(config, manthan)
    assert (codec.name, codec.guard) == ("wht-5x", True)
    assert not is_packed(config.cache_config)
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    assert is_packed(config.cache_config)


def test_a_front_end_that_hands_no_headers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    manthan = kv_transfer_config(tenants={"header": "X-Tenant-ID"})
    assert refusal(MODEL, kv_transfer_config=manthan).endswith(
        ": tenants.header is X-Tenant-ID, but VLLM_USE_RUST_FRONTEND is set, and that front end hands no headers on; "
        "unset one of the two."
    )
    monkeypatch.undo()
    EngineArgs(MODEL, skip_tokenizer_init=True, kv_transfer_config=manthan).create_engine_config()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0rc1"])
def test_a_vllm_on_which_nothing_ran(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert refusal(MODEL) == (
        f"Manthan cannot be used here: vLLM is {version}, but this version of Manthan was made for 0.32 and 0.33 and "
        "no other: install vllm>=0.32,<0.34."
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.32.3", "0.32.0+cpu", "0.33.0", "0.33.1.post1", "dev"])
def test_patch_releases_of_vllm_are_served(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    kv = kv_transfer_config()
    EngineArgs(MODEL, skip_tokenizer_init=True, kv_transfer_config=kv, max_model_len=1024).create_engine_config()


def test_what_is_installed_with_the_extra_is_served() -> None:
    [wanted] = [r for r in map(Requirement, requires("manthan-kv") or []) if r.name == "vllm"]
    assert wanted.specifier == SpecifierSet(VLLM)


@pytest.mark.parametrize("exact", [{"sink_tokens": 0}, {"sink_tokens": 4}])
def test_a_cold_store_too_small_for_a_block(exact: dict[str, int]) -> None:
    """All tokens of a block of a head that sessions share are kept exact."""
    nbytes = 131_328
    config = load_config(flags={"codec": {"name": "k3v3", **exact}, "tiers.max_bytes": nbytes - 1})
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    shape = MemoryShape({0: group_shape(config.codec, KvCacheGroup(0, spec, 4), Shards(1))})
    check_capacity(config, shape, capacity=nbytes)
    with pytest.raises(
        ConfigError, match=rf"tiers.max_bytes is {nbytes - 1}, but one encoded block .* takes {nbytes} bytes"
    ):
        check_capacity(config, shape, capacity=nbytes - 1)
    with pytest.raises(ConfigError, match=rf"takes {3 * nbytes} bytes"):  # a state may be larger than any block
        check_capacity(
            config,
            replace(shape, groups={**shape.groups, 1: GroupShape(32, nbytes, {0: 3 * nbytes})}),
            capacity=2 * nbytes,
        )


def from_flags(*flags: str) -> EngineArgs:
    """What `vllm serve` makes of its command line."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", MODEL, *flags]))


def test_flags_become_the_connector(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("idle: {after_s: 7, min_tokens: 9}\n")
    transfer = from_flags(
        "--manthan-config", str(file), "--manthan-idle-after", "5", "--manthan-cold-bytes", "8GiB"
    ).kv_transfer_config
    assert isinstance(transfer, KVTransferConfig)
    config = transfer.kv_connector_extra_config["manthan"]
    assert (transfer.kv_connector, transfer.kv_load_failure_policy) == ("ManthanConnector", "recompute")
    assert (config["idle"], config["tiers"]["max_bytes"]) == ({"after_s": 5, "min_tokens": 9}, 8 << 30)


def test_without_flags_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTHAN_IDLE__AFTER_S", "5")  # not a flag: does not turn it on
    assert from_flags().kv_transfer_config is None
    other = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
    assert from_flags("--kv-transfer-config", other).kv_transfer_config.kv_connector == "ExampleConnector"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--manthan-policy", "lry"], "--manthan-policy: unknown policy 'lry' (did you mean 'lru'?)"),
        (["--manthan-idle-after", "5m"], "--manthan-idle-after: idle.after_s must be a plain number of seconds"),
        (["--manthan-config", "no.yaml"], "no.yaml: "),
    ],
)
def test_flags_are_refused_in_one_sentence(flags: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as refused:
        from_flags(*flags)
    assert str(refused.value).startswith(f"vllm: error: {sentence}")
    assert "\n" not in str(refused.value)


def test_the_command_line_gets_no_traceback() -> None:
    args = from_flags("--manthan-policy", "lru", "--no-enable-prefix-caching")
    with pytest.raises(SystemExit, match=r"^vllm: error: Manthan cannot be used here: prefix caching is off"):
        args.create_engine_config()
