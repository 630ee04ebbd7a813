"""A cache for Transformers that keeps old tokens in codes."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

from manthan.codec.errors import CodecError, UnknownCodecError
from manthan.codec.transformers import ManthanCache

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
PROMPT = [11 + n * n % 500 for n in range(400)]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()


def cache_of(model: Any, codec: str = "exact", **sizes: int) -> ManthanCache:
    return ManthanCache(model.config, codec, **{"window_tokens": 64, "block_tokens": 16} | sizes)


def continued(model: Any, cache: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    ids = torch.tensor(prompts)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=False,
        **options,
    )
    return found[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("sink", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_codes_that_lose_nothing_change_nothing(model: Any, sink: int) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    cache = cache_of(model, sink_tokens=sink)
    assert continued(model, cache, prompts) == continued(model, DynamicCache(), prompts)
    assert cache.get_seq_length() == len(PROMPT) + 23


def test_beams_are_exchanged_with_their_codes(model: Any) -> None:
    options = {"num_beams": 3}
    expected = continued(model, DynamicCache(), [PROMPT, PROMPT[::-1]], **options)
    assert continued(model, cache_of(model), [PROMPT, PROMPT[::-1]], **options) == expected


def test_values_are_looked_up_in_tokens_that_are_codes(model: Any) -> None:
    tokenizer, rng = AutoTokenizer.from_pretrained(MODEL), random.Random(1)
    for _ in range(3):
        values = {
            name: str(rng.randrange(1000, 10000)) for name in ("bac", "dof", "gul", "hem", "kip", "lat", "mon", "nus")
        }
        text = 8 * "".join(f"{name} = {value}\n" for name, value in values.items())
        *document, last = tokenizer(f"{text}assert gul == ").input_ids
        cache = cache_of(model, "k4v3", window_tokens=16)
        with torch.inference_mode():
            model(torch.tensor([document]), past_key_values=cache)
        found = continued(model, cache, [[*document, last]])
        assert tokenizer.decode(found[0]).startswith(values["gul"])


def test_old_tokens_take_five_times_less(model: Any) -> None:
    exact, coded = DynamicCache(), cache_of(model, "k3v3", window_tokens=0, block_tokens=32)
    for cache in (exact, coded):
        with torch.inference_mode():
            model(torch.tensor([PROMPT[:388]]), past_key_values=cache)
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)
    assert coded.nbytes * 388 == pytest.approx(whole * (4 + 384 / 5.12), rel=0.05)


def test_tokens_are_forgotten_from_the_end_and_all_at_once(model: Any) -> None:
    cache = cache_of(model)
    with torch.inference_mode():
        model(torch.tensor([PROMPT]), past_key_values=cache)
        for layer in cache.layers:
            layer.crop(-250)
        assert cache.get_seq_length() == 150
        again = model(torch.tensor([PROMPT[150:]]), past_key_values=cache).logits[0, -1]
        cache.reset()
        assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
        whole = model(torch.tensor([PROMPT]), past_key_values=cache).logits[0, -1]
    torch.testing.assert_close(again, whole, atol=0.1, rtol=0.05)


def test_what_cannot_be_kept_is_refused(model: Any) -> None:
    with pytest.raises(UnknownCodecError, match="k9v9"):
        cache_of(model, "k9v9")
    sliding = LlamaConfig(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2)
    with pytest.raises(CodecError, match="sliding_attention cannot be kept in codes"):
        ManthanCache(sliding)
