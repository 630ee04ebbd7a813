"""Metric of a model's keys and values from a server's q vectors, without a gradient; see docs/calibration.md.

The profile of a calibrated codec needs the metric, which says how much an error matters. With attention weights a,
attention outputs o and a head's part W of the output projection, an error e of a value v reaches the residual stream as
a W e. An error e of a key changes o by a (v - o) (q e), for a query q. Squared effects are summed over queries:

    values: sum of a^2, times W^T W;   keys: diagonal of the sum of a^2 |W (v - o)|^2 q q^T, averaged in RoPE's pairs
"""

import re
from pathlib import Path

import numpy as np

from manthan.codec.calibration import SINKS, Doubles, ProfileBuilder
from manthan.codec.profile import Profile, ProfileInfo
from manthan.codec.rope import Floats

ASKED, ASKING = 4, 64  # of a text's last 1 / ASKED, fewer than 2 * ASKING queries are used
KEYS = 1.6  # weight of keys against values, fitted to Fisher's information, because queries are not independent
GROWTH, FIRST = 30.0, 1 / 250
"""Squared lengths of the residual stream before the last layer and the first, divided by that before the second."""
OUTPUT = re.compile(r"(?:^|\bmodel\.)layers\.(\d+)\.\w+\.(?:o_proj|out_proj|dense)\.weight$")


class TrafficBuilder(ProfileBuilder):
    """Builder of a profile from queries, keys and values of the attention. outputs: see `output_energies`."""

    def __init__(self, info: ProfileInfo, outputs: list[Floats]) -> None:
        super().__init__(info)
        shape = info.layers, info.heads, info.head_dim
        self._outputs, self._weights = outputs, list[Doubles]()
        self._energy, self._seen = np.zeros(shape), np.zeros((*shape, info.head_dim))

    def ask(self, layer: int, queries: Floats, keys: Floats, values: Floats) -> None:
        """Add what errors in a text's earlier tokens do to its last queries. Call for all layers of a text in order.

        queries: [query heads, tokens, head_dim], after RoPE and scaling. keys, values: [KV heads, tokens, head_dim],
        keys after RoPE.
        """
        tokens = keys.shape[1]
        cut = tokens - tokens // ASKED
        asking = np.arange(cut, tokens, max(1, (tokens - cut) // ASKING))
        is_later = np.arange(cut, tokens) > asking[:, None]
        asked = queries[:, asking].reshape(len(keys), -1, len(asking), queries.shape[2])
        outputs = self._outputs[layer].reshape(*asked.shape[:2], *self._outputs[layer].shape[1:])
        of_tokens = np.zeros((2, len(keys), cut - SINKS))  # of keys, and of values
        for at, (q, weighed) in enumerate(zip(asked, outputs, strict=True)):  # [query heads of the KV head, ...] each
            shares = q @ keys[at].T
            shares[..., cut:][:, is_later] = -np.inf
            np.exp(np.subtract(shares, shares.max(2, keepdims=True), out=shares), out=shares)
            shares /= shares.sum(2, keepdims=True)
            out, v, squares = shares @ values[at], values[at, SINKS:cut], np.square(shares[..., SINKS:cut])
            turned, energies = out @ weighed, np.square(q)
            apart = -2 * turned @ v.T  # becomes |W (v - o)|^2, by query and token
            apart += ((v @ weighed) * v).sum(2)[:, None]
            apart += (out * turned).sum(2, keepdims=True)
            apart *= squares
            self._energy[layer, at] += (apart.sum(2)[..., None] * energies).sum((0, 1))
            self._seen[layer, at] += (squares.sum((1, 2))[:, None, None] * weighed).sum(0)
            of_tokens[:, at] = (energies.sum(2)[:, None] @ apart).sum((0, 1)), squares.sum((0, 1))
        self._weights = [*(self._weights if layer else []), (of_tokens / of_tokens.mean(2, keepdims=True)).sum((0, 1))]
        if layer == self._info.layers - 1:
            self.weigh_tokens(self._weights)

    def made(self) -> Profile:
        """Return the profile. Raises ProfileError; see `finish`."""
        layers, heads, dim = self._energy.shape
        for layer, length in enumerate([FIRST, *np.geomspace(1, GROWTH, layers - 1)]):
            if self._info.rope is not None:
                self._info.rope.average(self._energy[layer])
            values = np.zeros((heads, dim, heads, dim))
            values[range(heads), :, range(heads)] = self._seen[layer]
            keys = np.diag(KEYS / length * self._energy[layer].ravel())
            self.weigh(layer, keys, values.reshape(heads * dim, -1) / length)
        return self.finish()


def output_energies(folder: Path | None, layers: int, heads: int, head_dim: int) -> list[Floats]:
    """Return W^T W of query heads, [heads, head_dim, head_dim], by layer; all identities if one lacks a plain W."""
    from safetensors import safe_open

    found: dict[int, Floats] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder else ():
        with safe_open(path, "pt") as file:
            for told in filter(None, map(OUTPUT.search, file.keys())):
                weight = file.get_tensor(told.string)
                if weight.shape[1:] == (heads * head_dim,) and weight.element_size() > 1:
                    parts = weight.float().numpy().reshape(len(weight), heads, head_dim).transpose(1, 2, 0)
                    found[int(told[1])] = parts @ parts.transpose(0, 2, 1)
    same = np.tile(np.eye(head_dim, dtype=np.float32), (heads, 1, 1))
    has_all = found.keys() >= set(range(layers))  # a draft's layers may follow
    return [found[layer] if has_all else same for layer in range(layers)]
