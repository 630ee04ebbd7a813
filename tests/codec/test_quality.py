"""What the codec costs a model: loss on held-out code and recall of a table, over a compressed prefix.

The KV cache of a prefix is replaced by what the codec gives back, then the model goes on. Cosines cannot tell this.
"""

import copy
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

from manthan.codec import get_codec
from manthan.codec.base import Section, SectionKind
from manthan.codec.model import ModelFacts
from manthan.codec.rope import Rope

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
PREFIX, CONTINUATION, SEQUENCES = 1536, 512, 9
TABLES, ENTRIES = 4, 64
CODECS = ["k3v3", "wht-5x", "wht-4x"]
ROPE = Rope(tuple(10000.0 ** (-np.arange(0, 128, 2) / 128)))


def through_codec(codec, x, kind):
    """[1, heads, tokens, head_dim] bf16, encoded and decoded."""
    bits = x.contiguous().view(torch.int16).numpy().view(np.uint16)
    section, positions = Section(kind, codec.name, 1, x.shape[2], x.shape[1], x.shape[3]), np.arange(x.shape[2])
    codes = np.zeros(codec.max_nbytes(section), np.uint8)
    decoded = codec.decode(codes[: codec.encode(bits, section, positions, codes)], section, positions)
    return torch.from_numpy(decoded.view(np.int16)).view(torch.bfloat16).reshape(x.shape)


def compressed(cache, name):
    """A copy of the KV cache, through the codec of this name, or exact for None."""
    cache = copy.deepcopy(cache)
    for layer in cache.layers:
        if name is not None:
            codec = get_codec(name, layer.keys.shape[-1], ModelFacts(ROPE))
            layer.keys = through_codec(codec, layer.keys, SectionKind.KEYS)
            layer.values = through_codec(codec, layer.values, SectionKind.VALUES)
    return cache


class Reader:
    """The tiny model and its tokenizer."""

    def __init__(self):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
        self.held = np.fromfile(MODEL / "held_tokens.u16", np.uint16).astype(np.int64)

    @torch.inference_mode()
    def go_on(self, prefix, rest):
        """{codec: log-probabilities [len(rest), vocabulary] of rest's tokens} after the prefix through it."""
        prefix, rest = torch.tensor([prefix]), torch.from_numpy(rest)[None]
        cache = self.model(prefix[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        tokens = torch.cat([prefix[:, -1:], rest[:, :-1]], 1)
        return {
            name: self.model(tokens, past_key_values=compressed(cache, name)).logits[0].float().log_softmax(-1)
            for name in (None, *CODECS)
        }

    def held_out_loss(self):
        """{codec: nats per token} of CONTINUATION tokens after PREFIX, mean of SEQUENCES pieces of code."""
        losses = {name: [] for name in (None, *CODECS)}
        length = PREFIX + CONTINUATION - 1
        pieces = self.held[: len(self.held) // length * length].reshape(-1, length)
        for piece in pieces[:: len(pieces) // SEQUENCES][:SEQUENCES]:
            rest = piece[PREFIX - 1 :]
            prefix = [self.tokenizer.bos_token_id, *piece[: PREFIX - 1].tolist()]
            for name, scores in self.go_on(prefix, rest).items():
                losses[name].append(-scores[range(len(rest)), rest].mean().item())
        return {name: float(np.mean(values)) for name, values in losses.items()}

    def table_recall(self):
        """{codec: share of digits found} of TABLES * ENTRIES values, asked for as `assert NAME == 4821`.

        A digit counts if it is the likeliest after those before it, which is greedy decoding.
        """
        found = {name: [] for name in (None, *CODECS)}
        for seed in range(TABLES):
            prefix, rest, digits = self.table(random.Random(seed))
            for name, scores in self.go_on(prefix, rest).items():
                found[name] += (scores.argmax(-1).numpy() == rest)[digits].tolist()
        return {name: float(np.mean(values)) for name, values in found.items()}

    def table(self, rng):
        """A prefix of table and filler, the tokens of the lookups, and the positions of their digits."""
        names = [a + b + c for a in "bcdfghjklmnprstvz" for b in "aeiou" for c in "bcdfghjklmnprstvz"]
        table = {name: rng.randrange(1000, 10000) for name in rng.sample(names, ENTRIES)}
        lines = "".join(f"{name} = {value}\n" for name, value in table.items())
        prefix = self.tokenizer(lines).input_ids
        start = rng.randrange(len(self.held) - PREFIX)
        prefix += self.held[start : start + PREFIX - len(prefix)].tolist()
        asked = rng.sample(sorted(table), ENTRIES)
        text = "".join(f"assert {name} == {table[name]}\n" for name in asked)
        encoded = self.tokenizer("\n" + text, add_special_tokens=False, return_offsets_mapping=True)
        starts = {start: i for i, (start, _) in enumerate(encoded.offset_mapping)}
        digits = [[starts[at + k] for k in range(4)] for at in (m.start() for m in re.finditer(r"\d{4}", "\n" + text))]
        return prefix, np.array(encoded.input_ids), np.array(digits)


@pytest.fixture(scope="module")
def reader():
    torch.manual_seed(0)
    return Reader()


@pytest.fixture(scope="module")
def added_loss(reader):
    """{codec: nats per token more than with the exact cache}."""
    loss = reader.held_out_loss()
    print({str(name): round(value, 4) for name, value in loss.items()})
    assert loss[None] < 2.5, "the model must know code for its loss to mean anything"
    return {name: loss[name] - loss[None] for name in CODECS}


@pytest.fixture(scope="module")
def recall(reader):
    found = reader.table_recall()
    print(found)
    assert found[None] == 1.0
    return found


def test_three_bits_cost_little_loss(added_loss):
    assert added_loss["k3v3"] <= 0.012


@pytest.mark.parametrize("codec", ["wht-5x", "wht-4x"])
def test_an_entropy_coder_costs_less_than_half(codec, added_loss):
    """In as many bytes, or a few more."""
    assert added_loss[codec] <= 0.5 * added_loss["k3v3"]


@pytest.mark.parametrize("codec", CODECS)
def test_all_keep_recall(codec, recall):
    """1.00, to two decimals."""
    assert recall[codec] >= 0.995
