"""A cache for Transformers' `generate` that keeps old tokens in codes, so that a long context takes less memory.

    cache = ManthanCache(model.config, codec="wht-5x")
    model.generate(**inputs, past_key_values=cache)

As in Transformers' own quantized cache (after KIVI; Liu et al., 2024), what a forward pass computes is exact in that
pass, and the newest tokens stay so. Each later pass decodes all the others again: this saves memory, not time.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from manthan.codec.base import Codes, Dtype, Section, SectionCodec, SectionKind
from manthan.codec.errors import CodecError
from manthan.codec.model import ModelFacts
from manthan.codec.profile import Profile
from manthan.codec.registry import DEFAULT, section_codec
from manthan.codec.rope import Rope

DTYPES = {torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16, torch.float32: Dtype.FLOAT32}
KINDS = (SectionKind.KEYS, SectionKind.VALUES)
FULL_ATTENTION = "full_attention"

Row = tuple[Codes, Codes]
"""Keys and values of one block of one sequence."""


class ManthanCache(Cache):
    """All layers of a model with full attention.

    config: the model's. codec: its name. sink_tokens, window_tokens: so many first and last tokens are kept as they
    are; up to block_tokens more at the end, for whole blocks are encoded. profile: for codecs that want one. Sequences
    of a batch begin at place 0 each, which left padding shifts: a calibrated codec should be given one at a time.

    Raises CodecError for a model with other layers, and what `section_codec` raises.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        codec: str = DEFAULT,
        *,
        sink_tokens: int = 4,
        window_tokens: int = 128,
        block_tokens: int = 32,
        profile: Profile | None = None,
    ) -> None:
        text = config.get_text_config(decoder=True)
        others = set(getattr(text, "layer_types", None) or ()) - {FULL_ATTENTION}
        if others:
            raise CodecError(f"layers of {', '.join(sorted(others))} cannot be kept in codes: only full attention can.")
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        made = section_codec(codec, head_dim, ModelFacts(Rope.of_config(text, head_dim), profile))
        sizes = (sink_tokens, window_tokens, block_tokens)
        self._coded = [CodedLayer(made, layer, *sizes) for layer in range(text.num_hidden_layers)]
        super().__init__(layers=list(self._coded))

    @property
    def nbytes(self) -> int:
        """What keys and values take now, codes and exact tokens together."""
        return sum(layer.nbytes for layer in self._coded)


class CodedLayer(DynamicLayer):
    """One layer: first tokens, then blocks of codes, then the last tokens in `keys` and `values`,
    [batch, heads, tokens, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(
        self, codec: SectionCodec, layer: int, sink_tokens: int, window_tokens: int, block_tokens: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._codec, self._layer = codec, layer
        self._sink, self._window, self._block = sink_tokens, window_tokens, block_tokens
        self._first: list[torch.Tensor] = []  # keys and values, once there are so many tokens
        self._blocks: list[list[Row]] = []  # of each block, those of each sequence

    @property
    def nbytes(self) -> int:
        """What keys and values take now."""
        if not self.is_initialized:
            return 0
        exact = (*self._first, self.keys, self.values)
        codes = (part for block in self._blocks for row in block for part in row)
        return sum(x.nbytes for x in exact) + sum(part.nbytes for part in codes)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, with these at the end; then what has become old is encoded."""
        super().update(key_states, value_states)
        keys, values = self._all()
        self._encode_old()
        return keys, values

    def get_seq_length(self) -> int:
        return super().get_seq_length() + (self._sink if self._first else 0) + len(self._blocks) * self._block

    def reset(self) -> None:
        self._first, self._blocks = [], []
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; see DynamicLayer for the sign."""
        if self._first:
            self.keys, self.values = self._all()
            self._first, self._blocks = [], []
        super().crop(tokens_to_remove)
        self._encode_old()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._blocks = [[row for row in block for _ in range(repeats)] for block in self._blocks]
        self._first = [x.repeat_interleave(repeats, dim=0) for x in self._first]
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(len(self.keys))[indices.cpu()].tolist()
        self._blocks = [[block[row] for row in rows] for block in self._blocks]
        self._first = [x[indices, ...] for x in self._first]
        super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            self.batch_select_indices(beam_idx.to(self.keys.device))

    # -- codes ----------------------------------------------------------------------------------------

    def _encode_old(self) -> None:
        if not self._first and self.keys.shape[-2] >= self._sink + self._window + self._block:
            self._first = [x[..., : self._sink, :].clone() for x in (self.keys, self.values)]
            self._drop_front(self._sink)
        while self._first and self.keys.shape[-2] >= self._window + self._block:
            old = (self.keys[..., : self._block, :], self.values[..., : self._block, :])
            self._blocks.append([self._encoded(*row) for row in zip(*old, strict=True)])
            self._drop_front(self._block)

    def _drop_front(self, tokens: int) -> None:
        """Clones, so that nothing of the old memory is held."""
        self.keys, self.values = self.keys[..., tokens:, :].clone(), self.values[..., tokens:, :].clone()

    def _encoded(self, keys: torch.Tensor, values: torch.Tensor) -> Row:
        places, made = self._places(len(self._blocks)), []
        for section, x in zip(self._sections(), (keys, values), strict=True):
            codes = np.empty(self._codec.max_nbytes(section), np.uint8)
            size = self._codec.encode(_numbers(x)[None], section, places, codes)
            made.append(codes[:size].copy())
        return made[0], made[1]

    def _all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every token's keys and values, decoded where they are in codes."""
        parts = [*([self._first] if self._first else []), *self._decoded(), (self.keys, self.values)]
        keys, values = (torch.cat(part, dim=-2) for part in zip(*parts, strict=True))
        return keys, values

    def _decoded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each block, [batch, heads, block, head_dim]."""
        for number, block in enumerate(self._blocks):
            places = self._places(number)
            keys, values = (
                self._tensor(np.stack([self._codec.decode(row[n], section, places)[0] for row in block]))
                for n, section in enumerate(self._sections())
            )
            yield keys, values

    def _sections(self) -> list[Section]:
        heads, head_dim = self.keys.shape[1], self.keys.shape[-1]
        shape = (1, self._block, heads, head_dim, DTYPES[self.keys.dtype], self._layer)
        return [Section(kind, self._codec.name, *shape) for kind in KINDS]

    def _places(self, block: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        first = self._sink + block * self._block
        return np.arange(first, first + self._block, dtype=np.int64)

    def _tensor(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        found = torch.from_numpy(x)
        return (found.view(torch.bfloat16) if self.keys.dtype is torch.bfloat16 else found).to(self.keys.device)


def _numbers(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """As numpy has them, bf16 as its bits."""
    x = x.detach().cpu().contiguous()
    found: np.ndarray[Any, Any] = (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()
    return found
