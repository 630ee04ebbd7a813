"""What coding states of Kimi Delta Attention (KDA), or the KV of windows, does to a model's predictions.

Run as a script, it prints a table of the codecs. A prefix's states, or the keys and values in its windows, are replaced
by what comes back of their blocks, and the rest of the cache stays. Weights are random. vLLM's CPU build has no model
with KDA, so that Transformers computes both.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from latent_figures import apart
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, KimiLinearConfig, KimiLinearForCausalLM
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import MambaSpec

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.cpu.state import STATE_CODECS
from manthan.codec.model import NO_FACTS
from manthan.vllm_hooks.groups import KvCacheGroup
from manthan.vllm_hooks.memory import block_format, with_states

BLOCK, WINDOW, PREFIX, ASKED, VOCAB = 32, 128, 512, 64, 1024
HEADS, DIM, STD = 4, 64, 0.06
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
LATENT = {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
KDA = {"linear_head_dim": DIM, "linear_num_heads": HEADS, "mlp_layer_types": ["dense"] * 4}
KV = ("keys", "values")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Figure(NamedTuple):
    """Ratio of the blocks, KL of the next token in nats, and share of tokens with the same likeliest one."""

    name: str
    ratio: float
    kl: float
    same: float


def random_weights(model: Any) -> Any:
    """Return the model in float32 with weights so large that answers differ."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(0, STD)
    return model.float().eval()


def with_kda() -> Any:
    layers = ["linear_attention"] * 3 + ["full_attention"]
    return random_weights(
        KimiLinearForCausalLM(
            KimiLinearConfig(**COMMON, **LATENT, **EXPERTS, **KDA, **SPECIAL, num_hidden_layers=4, layer_types=layers)
        )
    )


def with_windows() -> Any:
    kv = {"num_key_value_heads": 2, "head_dim": DIM, "sliding_window": WINDOW}
    return random_weights(Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, **kv, num_hidden_layers=12)))


def coded_states(codec: str, cache: DynamicCache) -> float:
    """Replace the matrices of all layers with KDA; returns the ratio of their block."""
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    shapes = MambaStateShapeCalculator.kda_state_shape(1, HEADS, DIM)
    spec = MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=(torch.bfloat16, torch.float32))
    page = spec.page_size_bytes
    group = KvCacheGroup(0, spec, len(layers), layer_nbytes=(page,) * len(layers))
    form = block_format(codec, group, facts=with_states(codec, group, NO_FACTS))
    first = 2 * int(np.prod(shapes[0]))
    pages = np.zeros((len(layers), page), np.uint8)
    for row, layer in zip(pages, layers, strict=True):
        row[first:] = layer.recurrent_states[0].numpy().reshape(-1).view(np.uint8)
    buf = form.encode(pages.reshape(form.shape.numbers), nothing(form), key=b"", first_token=0, exact=0)
    back = form.decode(buf, key=b"")[0].reshape(pages.shape)
    for row, layer in zip(back, layers, strict=True):
        state = torch.from_numpy(row[first:].copy().view(np.float32))
        layer.recurrent_states[0].copy_(state.view_as(layer.recurrent_states[0]))
    return pages.size / len(buf)


def nothing(form: BlockFormat) -> np.ndarray:
    return np.empty(form.shape.value_numbers, np.uint8)


def coded_windows(codec: str, cache: DynamicCache) -> float:
    """Replace keys and values of all layers with windows, block by block; returns the ratio of the blocks."""
    layers = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    shape = BlockShape(len(layers), 2, BLOCK, DIM, Dtype.BFLOAT16)
    form, sizes = BlockFormat(codec, shape, bytes(16)), []
    both = [as_numbers(torch.cat([whole(getattr(layer, x)) for layer in layers]).numpy(), shape.dtype) for x in KV]
    back = []
    for at in range(0, WINDOW, BLOCK):
        some = [np.ascontiguousarray(x[:, :, at : at + BLOCK]) for x in both]
        buf = form.encode(*some, key=b"", first_token=PREFIX - WINDOW + at, exact=0)
        sizes.append(len(buf))
        back.append([as_floats(x, shape.dtype) for x in form.decode(buf, key=b"")])
    for n, x in enumerate(KV):
        decoded = torch.from_numpy(np.concatenate([pair[n] for pair in back], axis=2))
        for layer, found in zip(layers, decoded, strict=True):
            kept = getattr(layer, x)
            setattr(layer, x, found[None, :, -kept.shape[2] :].clone())
    return shape.nbytes / float(np.mean(sizes))


def whole(kept: torch.Tensor) -> torch.Tensor:
    """Return a window's keys or values with its first token, which the next one does not look at, made up."""
    return torch.cat([kept[:, :, :1].expand(-1, -1, WINDOW - kept.shape[2], -1), kept], dim=2)


def figures(
    model: Any, codecs: Sequence[str], replace: Callable[[str, DynamicCache], float], pieces: int = 4
) -> Iterator[Figure]:
    """Measure codecs on random texts. replace: puts what a codec makes of it into a cache, and returns a ratio."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(10, VOCAB, PREFIX + ASKED).tolist() for _ in range(pieces)]
    found: dict[str, list[tuple[float, float, float]]] = {codec: [] for codec in codecs}
    for text in texts:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            model(torch.tensor([text[:PREFIX]]), past_key_values=cache, logits_to_keep=1)
            wanted = going_on(model, text[PREFIX:], deepcopy(cache))
            for codec in codecs:
                changed = deepcopy(cache)
                ratio = replace(codec, changed)
                found[codec].append((ratio, *apart(wanted, going_on(model, text[PREFIX:], changed))))
    for codec, each in found.items():
        yield Figure(codec, *np.mean(each, axis=0).tolist())


def going_on(model: Any, rest: list[int], cache: DynamicCache) -> torch.Tensor:
    """Log-probabilities of the tokens behind a prefix with this cache."""
    told: torch.Tensor = model(torch.tensor([rest]), past_key_values=cache).logits[0].log_softmax(-1)
    return told


KINDS: list[tuple[str, Callable[[], Any], tuple[str, ...], Callable[[str, DynamicCache], float]]] = [
    ("states of KDA", with_kda, tuple(STATE_CODECS.values()), coded_states),
    ("windows", with_windows, ("wht-5x", "wht-4x", "k3v3"), coded_windows),
]


def main() -> None:
    print("| of | codec | ratio | KL | same top 1 |\n|---|---|---|---|---|")
    for kind, made, codecs, replace in KINDS:
        for each in figures(made(), codecs, replace):
            print(f"| {kind} | `{each.name}` | {each.ratio:.2f} | {each.kl:.6f} | {each.same:.1%} |")


if __name__ == "__main__":
    main()
