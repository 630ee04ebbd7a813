"""Two GPUs: each rank keeps its own heads, layers or tokens, and a session goes cold and returns on both."""

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_model import LAYERS, VOCAB, make_latent_model
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import Completion, Engine, Table, running

pytestmark = pytest.mark.gpus(2)
MANTHAN: dict[str, Any] = {"blocks": 131, "idle": 0.3}
LATENTS, BLOCKS, BLOCK = {"sink_tokens": 100_000, "guard": False}, 8, 64
TIERS = pytest.mark.parametrize("kind", ["host", "device"])


def tier(worker: Any) -> tuple[str, int, int, int]:
    path = get_kv_transfer_group().worker.engine
    layout = next(iter(path.codecs.values()))[0].layout
    return str(path._device), layout.heads, len(layout.caches), sum(tier.arena.used for tier in path.tiers.all)


@TIERS
@pytest.mark.parametrize(("parallel", "heads", "layers"), [("tensor", 1, 4), ("pipeline", 2, 2)])
def test_a_session_goes_cold_and_returns_on_both(kind: str, parallel: str, heads: int, layers: int) -> None:
    tiers = {"kind": kind, "max_bytes": "64MiB"}
    flags = {f"{parallel}_parallel_size": 2}
    for engine in running(**MANTHAN, flags=flags, tiers=tiers):
        tables = [Table(seed) for seed in range(4)]
        for n, table in enumerate(tables):
            prompt, right = table.question(0)
            assert engine.ask(prompt, f"duo {n}").text == right
        engine.wait_until_cold(4)
        ranks = engine.on_workers(tier)
        assert [device for device, *_ in ranks] == ["cuda:0", "cuda:1"]
        assert [each[1] for each in ranks] == [heads, heads]
        assert {each[2] for each in ranks} <= {layers, 2 * layers}, "one tensor a layer, or keys and values apart"
        assert all(each[3] > 0 for each in ranks)
        for n, table in enumerate(tables):
            prompt, right = table.question(2)
            answer = engine.ask(prompt, f"duo {n}")
            assert answer.text == right
            assert answer.cached_tokens >= 0.95 * (answer.full_blocks - 1) * 32
        assert engine.failures() == 0


def holds_any(worker: Any) -> bool:
    return any(tier.blocks() for tier in get_kv_transfer_group().worker.engine.tiers.all)


def forget(worker: Any) -> None:
    """Fill the pool with zeros."""
    with torch.inference_mode():
        for codec, *_ in get_kv_transfer_group().worker.engine.codecs.values():
            for cache in codec.layout.caches:
                cache.zero_()
    torch.cuda.synchronize()


def full_blocks(worker: Any) -> list[str]:
    """Cache, and digest, of each block of which every token has numbers."""
    found = set()
    torch.cuda.synchronize()
    for codec, *_ in get_kv_transfer_group().worker.engine.codecs.values():
        for number, cache in enumerate(codec.layout.caches):
            for block in cache.reshape(len(cache), BLOCK, -1).contiguous().view(torch.uint8).cpu().numpy():
                if block.any(axis=1).all():
                    found.add(f"{number} {hashlib.sha256(block.tobytes()).hexdigest()}")
    return sorted(found)


@TIERS
@pytest.mark.parametrize("contexts", [1, 2])
def test_latents_return_whether_ranks_have_all_tokens_or_half(kind: str, contexts: int, tmp_path: Path) -> None:
    """Bit for bit. With contexts divided, vLLM's own answers differ from one hot request to the next."""
    chance = random.Random(1)
    tokens = [chance.randrange(10, VOCAB) for _ in range(BLOCKS * BLOCK * contexts + 9)]
    flags = {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": contexts,
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
    }
    tiers = {"kind": kind, "max_bytes": "64MiB"}
    model = make_latent_model(tmp_path)
    for engine in running(**MANTHAN, model=model, flags=flags, tiers=tiers, codec=LATENTS):

        def ask(engine: Engine = engine) -> Completion:
            return engine.run(engine.complete(tokens, "duo", 4))

        _, hot = ask(), ask()
        engine.wait_until_cold(1)
        before = engine.on_workers(full_blocks)
        assert [len(of_rank) for of_rank in before] == [LAYERS * BLOCKS] * 2
        has_copies = kind == "device" or contexts > 1
        assert engine.on_workers(holds_any) == [True, has_copies], "RAM has once what ranks have alike"
        engine.on_workers(forget)
        cold = ask()
        assert engine.on_workers(full_blocks) == before
        assert engine.on_workers(holds_any) == [True, has_copies]
        assert hot.cached_tokens == cold.cached_tokens == BLOCKS * BLOCK * contexts
        assert contexts > 1 or (cold.tokens, cold.logprobs) == (hot.tokens, hot.logprobs)
        assert engine.failures() == 0
