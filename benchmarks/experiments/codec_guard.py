"""What the guard measures of codecs, beside what the model's own queries make of them.

Reads a piece of text with a model, takes its keys, values and queries, and prints for each codec the noise that
`manthan.codec.fidelity` finds, and Kullback and Leibler's divergence, in nats, of attention over what comes back from
attention over what was, for the queries of the last quarter of the tokens.

    python benchmarks/experiments/codec_guard.py MODEL --text FILE [--tokens 256] [--codec k3v3,k4v2c]
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from manthan.codec import BlockFormat, BlockShape, codec_names
from manthan.codec.cpu.numbers import as_floats
from manthan.codec.fidelity import Fidelity, Sample, measure
from manthan.codec.model import ModelFacts
from manthan.codec.rope import Rope

NAME = "manthan_guard"


class Seen(NamedTuple):
    """Keys and values [layers, heads, tokens, head_dim], bf16 as its bits; queries [layers, heads, group, tokens,
    head_dim], float32."""

    keys: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    queries: Tensor


def read(folder: str, text: str, tokens: int, skip: int) -> tuple[Seen, Rope | None]:
    """What the model's attention sees of so many tokens of a text."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found: list[tuple[Tensor, ...]] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        found.append((query[0], key[0], value[0]))
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids[skip : skip + tokens]
    with torch.no_grad():
        model(torch.tensor([ids]))
    queries, keys, values = (torch.stack(parts) for parts in zip(*found, strict=True))
    bits = [x.contiguous().view(torch.uint16).numpy() for x in (keys, values)]
    grouped = queries.float().unflatten(1, (keys.shape[1], -1))
    return Seen(bits[0], bits[1], grouped), Rope.of_config(model.config, keys.shape[3])


def through(format: BlockFormat, seen: Seen) -> np.ndarray[Any, Any]:
    """The keys as they come back."""
    back = []
    for first in range(0, seen.keys.shape[2], format.shape.tokens):
        some = np.s_[:, :, first : first + format.shape.tokens]
        codes = format.encode(seen.keys[some], seen.values[some], key=b"", first_token=first, exact=0)
        back.append(format.decode(codes, key=b"")[0])
    return np.concatenate(back, axis=2)


def divergence(seen: Seen, back: np.ndarray[Any, Any]) -> float:
    """Of attention, in nats, on the average of layers, heads and queries."""
    queries = seen.queries[:, :, :, -(seen.keys.shape[2] // 4) :] / seen.keys.shape[3] ** 0.5
    was, now = (
        torch.einsum("lhgqd,lhtd->lhgqt", queries, torch.from_numpy(as_floats(keys))).log_softmax(-1)
        for keys in (seen.keys, back)
    )
    return float((was.exp() * (was - now)).sum(-1).mean())


def row(found: Fidelity, nats: float) -> tuple[str, ...]:
    noise = (found.logit_noise.mean(), found.logit_noise.max(), found.value_noise.max())
    cosine = found.key_cosine.min()
    return (found.codec, *(f"{each:.4f}" for each in noise), f"{cosine:.4f}", f"{nats:.4f}", str(found.is_faithful))


def main(
    model: Annotated[str, typer.Argument(help="A folder or name that Transformers loads.")],
    text: Annotated[Path, typer.Option(help="What the model reads, UTF-8.")],
    tokens: Annotated[int, typer.Option(help="So many of its tokens.")] = 256,
    skip: Annotated[int, typer.Option(help="Behind so many.")] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    codec: Annotated[str, typer.Option(help="Codecs, by comma; all if not given.")] = "",
) -> None:
    """Print noise and divergence for each codec."""
    seen, rope = read(model, text.read_text(encoding="utf-8"), tokens, skip)
    layers, heads, count, head_dim = seen.keys.shape
    if count % block_size:
        raise typer.BadParameter(f"{count} tokens are not blocks of {block_size}.")
    table = Table("codec", "noise of logits", "worst layer", "of values", "least cosine", "divergence", "faithful")
    starts = range(0, count, block_size)
    samples = [
        Sample(seen.keys[:, :, at : at + block_size], seen.values[:, :, at : at + block_size], at) for at in starts
    ]
    for name in codec.split(",") if codec else codec_names():
        shape = BlockShape(layers, heads, block_size, head_dim)
        format = BlockFormat(name, shape, bytes(16), facts=ModelFacts(rope))
        table.add_row(*row(measure(format, samples, rope), divergence(seen, through(format, seen))))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
