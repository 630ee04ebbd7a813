"""What a model's KV takes: against the shapes that models have, and against what a server reserves."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manthan.manager.cli import app
from manthan.manager.config.layers import States, Windows
from manthan.manager.config.model_shape import ModelError, ModelShape, cold_nbytes, shape_of
from manthan.manager.config.resolve import load_config

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "sliding_window": None,
}
DEEPSEEK_V3 = {
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
GATED = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}
QWEN3_5_35B = {
    **{"num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
    **{"layer_types": [*["linear_attention"] * 3, "full_attention"] * 10, "mamba_ssm_dtype": "float32", **GATED},
}
GPT_OSS_20B = {
    **{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    **{"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128},
}
GEMMA_3_27B = {
    **{"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16},
    **{"head_dim": 128, "sliding_window": 1024},
}
GEMMA_4 = {
    **{"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2, "sliding_window": 512},
    **{"global_head_dim": 512, "num_global_key_value_heads": 2},
}
MISTRAL_7B = {
    **{"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"hidden_size": 4096, "sliding_window": 4096},
}
FALCON_H1_7B = {
    **{"model_type": "falcon_h1", "num_hidden_layers": 44, "num_attention_heads": 12, "num_key_value_heads": 2},
    **{"head_dim": 128, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1},
    **{"mamba_d_conv": 4, "mamba_d_ssm": 3072},
}
NEMOTRON_H = {
    **{"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*M-M*", "num_hidden_layers": 8},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128},
    **{"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
}
GRANITE_4 = {
    **{"model_type": "granitemoehybrid", "num_hidden_layers": 4, "num_attention_heads": 12, "hidden_size": 1536},
    **{"num_key_value_heads": 4, "layer_types": ["mamba", "mamba", "mamba", "attention"], "mamba_n_heads": 48},
    **{"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4},
}
LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
QWEN2_5_7B = {
    **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584},
    **{"sliding_window": 131072, "use_sliding_window": False},
}
ROWS = {
    "KV of a token in bf16": "4096 bytes",
    "the same as codes of wht-5x": "840 bytes, headers included",
    "ratio": "4.88x",
    "the cold store holds": "79872 tokens",  # as tests/vllm_hooks/test_server.py has it from a server
    "sessions of 40 tokens": "none is kept: min_tokens is 64",
    "sessions of 64 tokens": "1248",
    "sessions of 2000 tokens": "40",
    "each": "7.8MiB in the cache; 1.6MiB as codes, 4.92x",
}


@pytest.mark.parametrize(
    ("config", "shape", "token_nbytes"),
    [
        (QWEN3_8B, ModelShape(36, 8, 128), 147456),
        (LLAMA_2_7B, ModelShape(32, 32, 128), 524288),
        (QWEN2_5_7B, ModelShape(28, 4, 128), 57344),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, ModelShape(12, 12, 64), 36864),
        (DEEPSEEK_V3, ModelShape(61, 1, 64, 512), 70272),
        ({"text_config": DEEPSEEK_V3}, ModelShape(61, 1, 64, 512), 70272),
        ({"text_config": QWEN3_8B, "hidden_size": 1}, ModelShape(36, 8, 128), 147456),
    ],
)
def test_shapes(config: dict[str, Any], shape: ModelShape, token_nbytes: int) -> None:
    found = shape_of(config, "a-model")
    assert (found, found.token_nbytes) == (shape, token_nbytes)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (GPT_OSS_20B, ModelShape(12, 8, 64, windows=Windows(12, 8, 64, 128))),
        (GEMMA_3_27B, ModelShape(10, 16, 128, windows=Windows(52, 16, 128, 1024))),
        ({"text_config": GEMMA_4}, ModelShape(2, 2, 512, windows=Windows(10, 4, 256, 512))),
        ({**GEMMA_4, "num_kv_shared_layers": 6}, ModelShape(1, 2, 512, windows=Windows(5, 4, 256, 512))),
        (MISTRAL_7B, ModelShape(0, 8, 128, windows=Windows(32, 8, 128, 4096))),
        (
            {**QWEN2_5_7B, "use_sliding_window": True, "max_window_layers": 20},
            ModelShape(20, 4, 128, windows=Windows(8, 4, 128, 131072)),
        ),
        (QWEN3_5_35B, ModelShape(10, 2, 256, states=States(30, 4 * 32 * 128 * 128, 2 * 3 * 8192, 128, 4))),
        (
            {**QWEN3_5_35B, "layer_types": None, "mamba_ssm_dtype": None},
            ModelShape(10, 2, 256, states=States(30, 2 * 32 * 128 * 128, 2 * 3 * 8192, 128)),
        ),
        (FALCON_H1_7B, ModelShape(44, 2, 128, states=States(44, 2 * 24 * 128 * 256, 2 * 3 * 3584, 256))),
        (NEMOTRON_H, ModelShape(2, 8, 128, states=States(4, 4 * 128 * 64 * 128, 2 * 3 * 10240, 128, 4))),
        (GRANITE_4, ModelShape(1, 4, 128, states=States(3, 2 * 48 * 64 * 128, 2 * 3 * 3328, 128))),
    ],
)
def test_windows_and_states(config: dict[str, Any], shape: ModelShape) -> None:
    assert shape_of(config, "a-model") == shape


@pytest.mark.parametrize(
    ("config", "full", "beside"),
    [
        (QWEN3_5_35B, 640, 61.4),
        (GPT_OSS_20B, 768, 3),
        ({**GPT_OSS_20B, "num_hidden_layers": 36, "layer_types": GPT_OSS_20B["layer_types"] * 2}, 1152, 4.5),
        (GEMMA_3_27B, 2560, 416),
        (DEEPSEEK_V3, 2196, 0),
        (MISTRAL_7B, 0, 512),
    ],
    ids=["Qwen3.5-35B-A3B", "gpt-oss-20b", "gpt-oss-120b", "Gemma 3 27B", "DeepSeek-V3", "Mistral 7B"],
)
def test_what_a_session_of_32768_tokens_takes(config: dict[str, Any], full: int, beside: float) -> None:
    """MiB of keys and values of all tokens, and of windows and states."""
    shape, tokens = shape_of(config, "a-model"), 32_768
    assert tokens * shape.token_nbytes == full << 20
    assert (shape.session_nbytes(tokens) - tokens * shape.token_nbytes) / (1 << 20) == pytest.approx(beside, abs=0.05)


@pytest.mark.parametrize(("state", "nbytes"), [("exact", 64_389_120), ("bf16", 32_931_840), ("int8", 17_694_720)])
def test_states_as_codes(state: str, nbytes: int) -> None:
    states = shape_of(QWEN3_5_35B, "a-model").states
    assert states is not None
    assert states.cold_nbytes(state) == nbytes


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (
            GEMMA_3_27B,
            {
                "layers, KV heads, head size": "10, 16, 128",
                "… with windows of 1024": "52, 16, 128",
                "KV of a token in bf16": "81920 bytes",
                "each": "2.9GiB in the cache, 416.0MiB of them beside; 596.6MiB as codes, 4.99x",
            },
        ),
        (
            MISTRAL_7B,
            {
                "layers with windows of 4096, …": "32, 8, 128",
                "each": "512.0MiB in the cache; 103.1MiB as codes, 4.97x",
            },
        ),
        (
            QWEN3_5_35B,
            {
                "layers with states": "30, of 2146304 bytes each",
                "each": "701.4MiB in the cache, 61.4MiB of them beside; 159.9MiB as codes, 4.39x",
            },
        ),
    ],
    ids=["windows", "windows alone", "states"],
)
def test_config_check_says_what_a_model_keeps(config: dict[str, Any], rows: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "x.yaml"
    path.write_text("{codec: {name: wht-5x, sink_tokens: 0, state: bf16}}")
    result = run(str(path), "--model", str(tmp_path), "--block-size", "32", "--session-tokens", "32768")
    assert (result.exit_code, result.stderr) == (0, "")
    said = dict(line.strip().split("  ", 1) for line in result.stdout.split("\n\n")[1].splitlines()[1:])
    assert {name: said.get(name, "").strip() for name in rows} == rows


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {**DEEPSEEK_V3, "index_topk": 2048},
            "it uses sparse attention, whose index is a cache of its own; Manthan does",
        ),
        ({**QWEN3_8B, "kv_lora_rank": 512}, "its config.json has no qk_rope_head_dim"),
        (
            {**QWEN3_8B, "layer_types": ["full_attention", "chunks"]},
            "it has layers of kind chunks; only a server knows",
        ),
        ({**QWEN3_8B, "layer_types": ["sliding_attention"]}, "its config.json has no sliding_window"),
        (
            {**QWEN3_8B, "layer_types": ["mamba", "attention"]},
            "layers with states of a kind whose size its config.json",
        ),
        ({**QWEN3_8B, "layer_types": ["mamba"], "mamba_n_heads": 8}, "its config.json has no mamba_d_head"),
        ({**QWEN3_8B, "layer_types": ["linear_attention"], **GATED}, "it has no attention layers, but states only"),
        (
            {"text_config": {**QWEN3_8B, "attention_chunk_size": 8192}},
            "it uses chunked attention (attention_chunk_size 8192); Manthan does",
        ),
        ({"model_type": "mamba2"}, "it has no attention layers, but states only (mamba2); Manthan does not serve it"),
        ({**QWEN3_8B, "is_encoder_decoder": True}, "it is an encoder-decoder model; Manthan does not serve it"),
        ({"num_attention_heads": 8, "head_dim": 64}, "its config.json has no num_hidden_layers"),
        ({"num_hidden_layers": 8, "hidden_size": 64}, "its config.json has no num_attention_heads"),
    ],
)
def test_what_cannot_be_told(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=r"^a-model: ") as error:
        shape_of(config, "a-model")
    assert why in str(error.value)


def test_sizes_are_those_in_redis() -> None:
    """A block of Qwen3-8B, rounded up to 256 bytes, and what ranks add, a header and two entries each."""
    shape = ModelShape(36, 8, 128)

    def nbytes(ranks: int) -> int:
        return shape.block_nbytes("k3v3", 16, ranks)

    assert nbytes(1) == 461056
    assert nbytes(2) * 2 == 461056 + 256
    assert shape.block_nbytes("k3v3", 16, 1, exact=16) == 36 * 8 * 16 * 128 * 4 + 256  # a header and one entry
    assert nbytes(16) == nbytes(8)  # heads are repeated
    with pytest.raises(ModelError, match="8 KV heads cannot be spread over 3 ranks"):
        nbytes(3)
    with pytest.raises(ModelError, match="head_dim 100 is not supported"):
        ModelShape(36, 8, 100).block_nbytes("k3v3", 16, 1)


def test_a_block_lies_in_one_of_two_tiers(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("cold_store: {kind: device, max_bytes: 1000, host_bytes: 500}")
    assert cold_nbytes(load_config(path, env={}), 400) == 1100
    assert cold_nbytes(load_config(path, env={}), 200, 2) == 550
    path.write_text("cold_store: {kind: tiered, max_bytes: 1000, host_bytes: 500}")
    assert cold_nbytes(load_config(path, env={}), 400) == 1000  # what is in front of Redis is a copy


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["config", "check", *args])


def test_config_check_says_what_a_file_means_for_a_model(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("{codec: {sink_tokens: 0}, min_tokens: 64, cold_store: {max_bytes: 64MiB}}")
    result = run(str(path), "--model", str(MODEL), "--block-size", "32", "--session-tokens", "40,64,2000")
    assert (result.exit_code, result.stderr) == (0, "")
    said = dict(line.strip().split("  ", 1) for line in result.stdout.split("\n\n")[1].splitlines()[1:])
    assert {name: value.strip() for name, value in said.items()} == {
        "layers, KV heads, head size": "4, 2, 128",
        "blocks of": "32 tokens, one rank",
        **ROWS,
    }


def test_a_cache_of_fp8_takes_half_and_its_codes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("{codec: {name: wht-5x, sink_tokens: 0}}")

    def said(*args: str) -> dict[str, str]:
        result = run(str(path), "--block-size", "32", *args)
        assert result.exit_code == 0, result.stderr
        return dict(line.strip().split("  ", 1) for line in result.stdout.split("\n\n")[1].splitlines()[1:])

    plain, fp8 = said("--model", str(MODEL)), said("--model", str(MODEL), "--kv-cache-dtype", "fp8")
    assert plain["KV of a token in bf16"].strip() == "4096 bytes"
    assert fp8["KV of a token in fp8"].strip() == "2048 bytes"
    assert fp8["the same as codes of wht-5x"] == plain["the same as codes of wht-5x"]
    assert fp8["ratio"].strip() == "2.44x"
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"kv_cache_scheme": {"a": 1}}}))
    assert said("--model", str(tmp_path))["KV of a token in fp8"].strip() == "2048 bytes"
    result = run(str(path), "--model", str(MODEL), "--kv-cache-dtype", "nvfp4")
    assert result.exit_code == 1
    assert "--kv-cache-dtype nvfp4: such KV is kept cold as it is, and only a server knows its bytes" in result.stderr


@pytest.mark.parametrize(("ranks", "kind"), [(1, "host"), (8, "host"), (8, "redis")])
def test_config_check_says_what_latents_take(ranks: int, kind: str, tmp_path: Path) -> None:
    """Every rank has all of them, in vLLM's cache and as codes."""
    path, model = tmp_path / "x.yaml", tmp_path / "config.json"
    path.write_text(f"{{codec: {{sink_tokens: 0}}, cold_store: {{kind: {kind}, max_bytes: 8GiB}}}}")
    model.write_text(json.dumps(DEEPSEEK_V3))
    result = run(str(path), "--model", str(model), "--tensor-parallel-size", str(ranks))
    assert (result.exit_code, result.stderr) == (0, "")
    said = dict(line.strip().split("  ", 1) for line in result.stdout.split("\n\n")[1].splitlines()[1:])
    said = {name: value.strip() for name, value in said.items()}
    one = ModelShape(61, 1, 64, 512).block_nbytes("wht-5x", 16, 1)
    assert said["layers, latent, RoPE's part"] == "61, 512, 64"
    assert said["KV of a token in bf16"] == ("70272 bytes" if ranks == 1 else "562176 bytes, 70272 on each rank")
    assert said["the same as codes of wht-5x"] == f"{ranks * one / 16:.0f} bytes, headers included"
    assert said["ratio"] == f"{ranks * 70272 * 16 / (ranks * one):.2f}x"
    assert said["the cold store holds"] == f"{(8 << 30) // ranks // one * 16} tokens"


def test_latents_of_fp8_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    with pytest.raises(ModelError, match=r"its latents \(MLA\) would be kept in fp8; Manthan does not serve that$"):
        ModelShape.of(str(tmp_path), "fp8_e4m3")


def test_config_check_refuses_a_profile_for_latents(tmp_path: Path) -> None:
    path, model = tmp_path / "x.yaml", tmp_path / "config.json"
    path.write_text("codec: {name: klt-8x}")
    model.write_text(json.dumps(DEEPSEEK_V3))
    result = run(str(path), "--model", str(model))
    assert result.exit_code == 1
    assert result.stderr == (
        f"codec.name is klt-8x, but {model} uses multi-head latent attention (MLA), and its latents take no profile: "
        "use auto, wht-5x or wht-4x\n"
    )


def test_exact_tokens_take_room(tmp_path: Path) -> None:
    """Four of the first block's, and four whole blocks at the end."""
    path = tmp_path / "x.yaml"
    path.write_text("{codec: {name: k3v3, window_tokens: 128}, cold_store: {max_bytes: 64MiB}}")
    result = run(str(path), "--model", str(MODEL), "--block-size", "32", "--session-tokens", "2000")
    lines = result.stdout.splitlines()
    plain, first, whole = (ModelShape.of(str(MODEL)).block_nbytes("k3v3", 32, 1, exact) for exact in (0, 4, 32))
    budget, full = 64 << 20, 2000 // 32
    assert plain < first < whole
    assert int(lines[-2].split()[-1]) == budget // (first + (full - 5) * plain + 4 * whole)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--session-tokens", "8k", "--model", "x"], "--session-tokens must be numbers of tokens, such as 2048,8192,"),
        (["--model", "{folder}"], "{folder}/config.json: cannot be read: No such file or directory"),
        (["--model", "{folder}/bad.json"], "{folder}/bad.json: is not valid JSON"),
        (["--model", "{folder}/list.json"], "{folder}/list.json: must be an object, not a list"),
    ],
)
def test_mistakes_are_one_sentence(args: list[str], sentence: str, tmp_path: Path) -> None:
    for name, text in {"x.yaml": "", "bad.json": "{", "list.json": json.dumps([1])}.items():
        (tmp_path / name).write_text(text)
    result = run(str(tmp_path / "x.yaml"), *(arg.format(folder=tmp_path) for arg in args))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(sentence.format(folder=tmp_path))
    assert result.stderr.count("\n") == 1


def test_a_name_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"^manthan/none: there is no such folder, and .*: name a folder that has"):
        ModelShape.of("manthan/none")
