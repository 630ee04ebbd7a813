"""Models with several KV cache groups, with latents, and caches of fp8 on a GPU: sessions go cold into its memory or
pinned RAM, and return."""

import math
from pathlib import Path
from typing import Any

import group_models
import pytest
from latent_model import make_latent_model
from scripts import run_alone

TINY_LLAMA = Path(__file__).parents[1] / "data" / "tiny-llama"
EXACT = {"name": "k3v3", "sink_tokens": 100_000, "guard": False}
"""All tokens of any session are kept as they are."""
DEFAULT = {"guard": False}
"""Not measured first: weights are random, and nothing of a session that ends before is kept to go on from."""
STORES: dict[str, dict[str, Any]] = {
    "host": {"kind": "host", "max_bytes": "128MiB"},
    "device": {"kind": "device", "max_bytes": "128MiB"},
}
GROUPS = {"gemma3": 6, "gpt-oss": 2, "qwen3-next": 4, "falcon-h1": 2, "latents": 1, "llama": 1}
STATES = ("qwen3-next", "falcon-h1")
NOISE = 0.0125
"""Of latents that come back, in energy, at most."""
DIVERGENCE = 0.25
"""KL, in nats, of the first token of the answer after the default codec from that with the hot cache."""
KINDS = ["gemma3", "gpt-oss", *STATES, "gemma3 fp8", "llama fp8", "latents"]
VLLM: dict[str, dict[str, Any]] = {
    "gemma3 fp8": {"kv_cache_dtype": "fp8"},
    "llama fp8": {"kv_cache_dtype": "fp8"},
    "latents": {"block_size": 64},
    "latents fp8": {"block_size": 64, "kv_cache_dtype": "fp8"},
    # vLLM's own choice on Hopper needs flashinfer
    "qwen3-next": {"gdn_prefill_backend": "triton", "mamba_ssm_cache_dtype": "float32"},
    "falcon-h1": {"mamba_ssm_cache_dtype": "float32"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the model of a kind is, made when it is asked for first."""
    made: dict[str, str] = {"llama": str(TINY_LLAMA)}

    def model(kind: str) -> str:
        family = kind.split()[0]
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = make_latent_model(folder) if family == "latents" else group_models.made(family, folder)
        return made[family]

    return model


def run(kind: str, model: str, what: str, **manthan: Any) -> dict[str, Any]:
    """What becomes of a session."""
    vllm = VLLM.get(kind, {})
    job = {"model": model, "what": what, "manthan": manthan, "vllm": vllm}
    report: dict[str, Any] = run_alone("path_sessions.py", job)
    assert report["engine"] == "CudaEngine"
    return report


def divergence(hot: dict[str, float], cold: dict[str, float]) -> float:
    """KL of the first token, in nats, of all that are not named for hot taken as one: at least so much. What cold does
    not name is at most as likely as its last."""
    least = min(cold.values())
    pairs = [(math.exp(p), math.exp(cold.get(token, least))) for token, p in hot.items()]
    rest = [max(1 - sum(each), 1e-9) for each in zip(*pairs, strict=True)]
    return sum(p * math.log(p / q) for p, q in [*pairs, rest])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", [*KINDS, "latents fp8"])
def test_exact_sections_give_what_the_hot_cache_gives(kind: str, store: str, models: Any) -> None:
    said = run(kind, models(kind), "come_back", tiers=STORES[store], codec=EXACT)
    full = said["prompt"] // said["block"] * said["block"]
    assert said["hot"]["cached"] == said["cold"]["cached"] == said["again"]["cached"] == full
    assert said["cold"] == said["again"] == said["hot"]
    assert said["zeros"]["first"] != said["hot"]["first"], "the answer is made of the cache"
    assert said["causes"] == []
    device = {"host": "cpu", "device": "cuda"}[store]
    assert len(said["stored"]) == GROUPS[kind.split()[0]]
    assert all(blocks > 0 and where == [device] for _, blocks, where in said["stored"].values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_codec_changes_little(kind: str, models: Any) -> None:
    """And that once: what returned is not encoded again."""
    said = run(kind, models(kind), "come_back", tiers=STORES["device"], codec=DEFAULT)
    assert said["hot"]["cached"] == said["cold"]["cached"] == said["again"]["cached"] > 500
    assert said["causes"] == []
    for turn in ("cold", "again"):
        assert all(map(math.isfinite, [*said[turn]["first"].values(), *said[turn]["logprobs"]]))
    assert said["cold"] == said["again"]
    if kind == "latents":  # whose random model has answers that hang on every bit
        assert 0 < max(said["noise"][: said["prompt"] // said["block"]]) < NOISE
    else:
        assert divergence(said["hot"]["first"], said["cold"]["first"]) < DIVERGENCE
    codecs = {name for name, *_ in said["stored"].values()}
    assert codecs == ({"wht-5x", "exact"} if kind in STATES else {"wht-5x"})


@pytest.mark.parametrize("kind", ["gpt-oss", "qwen3-next", "gemma3 fp8", "latents"])
def test_what_is_damaged_in_any_group_is_computed_anew(kind: str, models: Any) -> None:
    said = run(kind, models(kind), "be_damaged", tiers=STORES["host"], codec=DEFAULT)
    assert said["causes"] == ["checksum"] * len(said["damaged"])
    assert all(answer == said["computed"] for answer in said["damaged"].values())
    assert said["computed"]["cached"] == 0
