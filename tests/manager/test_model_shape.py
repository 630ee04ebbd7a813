"""What a model's KV takes: against the shapes that models have, and against what a server reserves."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manthan.manager.cli import app
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
    ("config", "why"),
    [
        (
            {**DEEPSEEK_V3, "index_topk": 2048},
            "it uses sparse attention, whose index is a cache of its own; Manthan does",
        ),
        ({**QWEN3_8B, "kv_lora_rank": 512}, "its config.json has no qk_rope_head_dim"),
        ({**QWEN3_8B, "sliding_window": 4096}, "it uses sliding window attention (window 4096); only a server knows"),
        ({**QWEN3_8B, "layer_types": ["full_attention", "sliding_attention"]}, "there are sliding_attention"),
        (
            {"text_config": {**QWEN3_8B, "attention_chunk_size": 8192}},
            "it uses chunked attention (attention_chunk_size 8192); Manthan does",
        ),
        ({**QWEN3_8B, "linear_num_key_heads": 16}, "it has Mamba or linear attention layers (linear_num_key_heads)"),
        ({"model_type": "mamba2"}, "it has Mamba or linear attention layers (mamba2)"),
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


@pytest.mark.parametrize("ranks", [1, 8])
def test_config_check_says_what_latents_take_on_each_rank(ranks: int, tmp_path: Path) -> None:
    """Every rank has all of them, in vLLM's cache and as codes."""
    path, model = tmp_path / "x.yaml", tmp_path / "config.json"
    path.write_text("{codec: {sink_tokens: 0}, cold_store: {max_bytes: 8GiB}}")
    model.write_text(json.dumps(DEEPSEEK_V3))
    result = run(str(path), "--model", str(model), "--tensor-parallel-size", str(ranks))
    assert (result.exit_code, result.stderr) == (0, "")
    said = dict(line.strip().split("  ", 1) for line in result.stdout.split("\n\n")[1].splitlines()[1:])
    said = {name: value.strip() for name, value in said.items()}
    one = ModelShape(61, 1, 64, 512).block_nbytes("wht-5x", 16, 1)
    assert said["layers, latent, RoPE's part"] == "61, 512, 64"
    assert said["KV of a token in bf16"] == ("70272 bytes" if ranks == 1 else "562176 bytes, 70272 on each rank")
    assert said["the same as codes of wht-5x"] == f"{ranks * one / 16:.0f} bytes, headers included"
    assert said["ratio"] == f"{70272 * 16 / one:.2f}x"
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
        "use auto, wht-5x or k4v4c\n"
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
    assert int(lines[-1].split()[-1]) == budget // (first + (full - 5) * plain + 4 * whole)


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
