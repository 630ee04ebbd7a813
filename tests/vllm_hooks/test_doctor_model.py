"""`manthan doctor MODEL` on models without weights: KV caches, refusals, and models that cannot be built."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import REPO
from latent_model import make_latent_model
from small_configs import SMALL, small_config
from torch.distributed import is_initialized
from typer.testing import CliRunner
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from manthan.manager.cli import app
from manthan.vllm_hooks.doctor import model as doctor
from manthan.vllm_hooks.doctor.families import families


def said(model: str, *words: str) -> dict[str, tuple[str, str]]:
    """Mark and sentence of each finding."""
    done = CliRunner().invoke(app, ["doctor", "--json", model, *words])
    return {one["check"]: (one["mark"], one["said"]) for one in json.loads(done.stdout)["findings"]}


@pytest.mark.slow
def test_a_server_s_block_size_is_taken_and_vllm_is_silent() -> None:
    model = str(REPO / "tests" / "data" / "tiny-llama")
    program = "import sys; from manthan.manager.cli import app; app()"
    command = [sys.executable, "-c", program, "doctor", model, "--block-size", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "bytes a token, in blocks of 16: codec wht-5x" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_windows_beside_full_attention(tmp_path: Path) -> None:
    found = said(small_config("GptOssForCausalLM", tmp_path))
    assert found["model"] == ("ok", "GptOssForCausalLM was built without weights.")
    bytes_a_token = 4 * 2 * 2 * 64 * torch.bfloat16.itemsize  # layers, keys and values, heads, head_dim
    mark, windows = found["KV cache 0"]
    assert windows.startswith(
        f"4 layers of SlidingWindowSpec, {bytes_a_token:,} bytes a token of the last 128, in blocks"
    )
    assert f"4 layers of FullAttentionSpec, {bytes_a_token:,} bytes a token, in blocks" in found["KV cache 1"][1]
    assert mark == "ok"
    assert windows.endswith("of 128: codec wht-5x, 5.0 times smaller.")
    assert found["resume points"][1] == "a session can be resumed every 128 tokens."
    assert "Manthan" not in found
    assert found["chat template"] == ("skipped", f"{tmp_path} has no tokenizer.")
    assert not is_initialized()


def test_states_are_kept_unless_they_are_to_be_coded(tmp_path: Path) -> None:
    model = small_config("Qwen3NextForCausalLM", tmp_path)
    assert said(model)["KV cache 0"][1].endswith(": kept as it is, 1.0 times smaller.")
    (tmp_path / "manthan.yaml").write_text("codec: {state: int8}\n")
    found = said(model, "--config", str(tmp_path / "manthan.yaml"))
    assert "2 layers of MambaSpec, a state of " in found["KV cache 0"][1]
    assert ": codec " in found["KV cache 0"][1]
    assert re.fullmatch(r"a session can be resumed every \d+ tokens\.", found["resume points"][1])


@pytest.mark.parametrize(
    ("longest", "mark", "rest"),
    [
        (
            8192,
            "warning",
            ": a shorter one is never found again, and a shorter turn is computed again in the next.",
        ),
        (1024, "wrong", ", but has at most 1,024: nothing of it is ever found again."),
    ],
)
def test_blocks_may_be_larger_than_turns(tmp_path: Path, longest: int, mark: str, rest: str) -> None:
    """A block of full attention has as many bytes as a state: few heads and large states make it long."""
    large = {"mamba_d_state": 256, "num_key_value_heads": 1, "max_position_embeddings": longest}
    found = said(small_config("FalconH1ForCausalLM", tmp_path, **large))
    [every] = re.findall(r"every ([\d,]+) tokens", found["resume points"][1])  # the CPU's instructions count, too
    assert found["resume points"] == (mark, f"a session can be resumed every {every} tokens{rest}")
    assert f"in blocks of {every}: " in found["KV cache 0"][1]


DS_MLA = {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}


@pytest.mark.parametrize(
    ("number", "nbytes", "ratio"), [({"dtype": torch.bfloat16}, "3,852", 2.5), (DS_MLA, "2,364", 1.5)]
)
def test_latents_beside_index_keys(
    number: dict[str, Any], nbytes: str, ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSeek V3.2 has them, which the CPU build cannot make: 132 bytes of a token and layer are the index's."""
    model = make_latent_model(tmp_path)

    def planned(*_: object) -> tuple[Any, KVCacheConfig]:
        config = EngineArgs(model, skip_tokenizer_init=True).create_engine_config()
        config.cache_config.enable_prefix_caching = True
        latents = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, **number)
        role = SparseCacheRole.INDEXER
        index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=role)
        specs = {name: spec for n in range(3) for name, spec in ((f"{n}.index", index), (f"{n}", latents))}
        whole = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
        return config, KVCacheConfig(8, [], [KVCacheGroupSpec(list(specs), whole)])

    monkeypatch.setattr(doctor, "planned", planned)
    mark, text = said(model)["KV cache 0"]
    assert mark == "ok"
    assert text == (
        f"6 layers of UniformTypeKVCacheSpecs, {nbytes} bytes a token, in blocks of 64: codec wht-5x, 3 of the layers "
        f"as bytes, {ratio} times smaller."
    )


def test_states_of_several_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek V4 has them: of four tokens in fp8, coded; of 128, and the index's, as bytes."""
    model = make_latent_model(tmp_path)

    def planned(*_: object) -> tuple[Any, KVCacheConfig]:
        config = EngineArgs(model, skip_tokenizer_init=True).create_engine_config()
        config.cache_config.enable_prefix_caching, config.cache_config.cache_dtype = True, "fp8_ds_mla"
        told: dict[str, Any] = {"block_size": 256, "num_kv_heads": 1, "dtype": torch.uint8, "alignment": 576}
        packed: dict[str, Any] = {"head_size": 512, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 584}
        four, many = (MLAAttentionSpec(**told, **packed, tokens_per_state=ratio) for ratio in (4, 128))
        index = MLAAttentionSpec(**told, head_size=132, tokens_per_state=4, cache_role=SparseCacheRole.INDEXER)
        names = {"four": four, "index": index, "many": many}
        specs = {f"{n}.{name}": spec for n in range(3) for name, spec in names.items()}
        whole = UniformTypeKVCacheSpecs(block_size=256, kv_cache_specs=specs)
        return config, KVCacheConfig(8, [], [KVCacheGroupSpec(list(specs), whole)])

    monkeypatch.setattr(doctor, "planned", planned)
    mark, text = said(model)["KV cache 0"]
    assert mark == "ok"
    assert text == (
        "9 layers of UniformTypeKVCacheSpecs, 560 bytes a token, in blocks of 256: codec wht-5x, 6 of the layers as "
        "bytes, 1.4 times smaller."
    )


def test_quantized_weights_do_not_matter(tmp_path: Path) -> None:
    weights = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    found = said(small_config("LlamaForCausalLM", tmp_path, quantization_config=weights))
    assert found["model"][0] == found["KV cache 0"][0] == "ok"


def test_a_refusal_comes_with_the_caches(tmp_path: Path) -> None:
    found = said(small_config("WhisperForConditionalGeneration", tmp_path))
    mark, why = found["Manthan"]
    assert mark == "wrong"
    assert found["KV cache 0"][1].endswith("not stored, because Manthan is refused for this model: see below.")
    assert "encoder-decoder" in why or "CrossAttentionSpec" in why
    assert any("CrossAttentionSpec" in sentence for _, sentence in found.values())


def test_a_model_whose_prefixes_vllm_does_not_keep(tmp_path: Path) -> None:
    found = said(small_config("Mamba2ForCausalLM", tmp_path))
    assert found["model"][0] == "ok"
    assert found["Manthan"][0] == "wrong"


def test_a_model_that_cannot_be_built_is_looked_up_by_its_class(tmp_path: Path) -> None:
    found = said(small_config("LlamaForCausalLM", tmp_path, architectures=["Glm5NextForCausalLM"]))
    mark, why = found["model"]
    assert mark == "warning"
    assert why.startswith("it cannot be built here (")
    assert found["KV cache"] == (
        "ok",
        "models of Glm5NextForCausalLM have MLAAttention (compressed), MLAAttention/indexer (as bytes), "
        "Mamba (compressed), CircularBuffer (not needed).",
    )


@pytest.mark.parametrize(
    ("name", "mark", "sentence"),
    [
        ("HrmTextForCausalLM", "wrong", "; a prompt's tokens attend to later ones."),
        ("BertModel", "wrong", "BertModel is no class that generates text in vLLM 0.32 or 0.33."),
    ],
)
def test_a_class_without_sessions(tmp_path: Path, name: str, mark: str, sentence: str) -> None:
    found = said(small_config("LlamaForCausalLM", tmp_path, architectures=[name], num_attention_heads=0))
    assert found["KV cache"][0] == mark
    assert found["KV cache"][1].endswith(sentence)


def test_no_model(tmp_path: Path) -> None:
    for model in (tmp_path, tmp_path / "nowhere"):
        mark, why = said(str(model))["model"]
        assert mark == "wrong"
        assert why.startswith(f"config.json of {model} cannot be read: ")


def test_families_are_printed() -> None:
    done = CliRunner().invoke(app, ["doctor", "--families"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) == len(families())
    assert {line.partition(":")[0] for line in lines} >= {*SMALL}
    assert "GptOssForCausalLM: FullAttention + SlidingWindow: compressed" in lines
