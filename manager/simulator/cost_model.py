"""How long things take in a simulation, and what a token weighs."""

from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manthan.manager.config.model import ConfigError, Number
from manthan.manager.config.sentences import first_mistake, must_be

# One H200 and the shape of Qwen3-8B, a session of 32,000 tokens: time to first token in seconds (docs/benchmarks.md).
_TOKENS = 32_000
_HOT_S, _HOST_S, _RECOMPUTED_S = 0.0246, 0.0511, 1.2305
# Which part of a prefill grows with the square of its length follows from the shape: FLOPs of the projections, and of
# attention over half of all pairs. 36 layers, hidden size 4,096, 8 KV heads of 128, MLP of 12,288.
_LINEAR = 2 * 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) * _TOKENS
_SQUARE = 2 * 36 * 4096 * _TOKENS**2
_SQUARE_SHARE = _SQUARE / (_LINEAR + _SQUARE)
_RESTORE = (_HOST_S - _HOT_S) / _TOKENS

_SECONDS = "a number of seconds, 0 or more"
_BYTES = "a number of bytes above 0"


class CostModel(BaseModel):
    """Seconds and bytes. The defaults are an H200 with a model of Qwen3-8B's shape and codes in pinned RAM.

    first_token_s: what every request takes. prefill_s_per_token and prefill_s_per_token2: a token at position p takes
    the former and 2p of the latter. restore_s_per_token, spill_s_per_token: from codes and to codes; it is assumed that
    encoding keeps pace with decoding. decode_s_per_token: between two tokens of an answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_token_s: Number = Field(default=_HOT_S, ge=0, description=_SECONDS)
    prefill_s_per_token: Number = Field(
        default=(1 - _SQUARE_SHARE) * (_RECOMPUTED_S - _HOT_S) / _TOKENS, ge=0, description=_SECONDS
    )
    prefill_s_per_token2: Number = Field(
        default=_SQUARE_SHARE * (_RECOMPUTED_S - _HOT_S) / _TOKENS**2, ge=0, description=_SECONDS
    )
    restore_s_per_token: Number = Field(default=_RESTORE, ge=0, description=_SECONDS)
    spill_s_per_token: Number = Field(default=_RESTORE, ge=0, description=_SECONDS)
    decode_s_per_token: Number = Field(default=0.0071, ge=0, description=_SECONDS)
    kv_bytes_per_token: Number = Field(default=147_456, gt=0, description=_BYTES)
    code_bytes_per_token: Number = Field(default=28_800, gt=0, description=_BYTES)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """From a YAML file of some of the fields; raises ConfigError."""
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            return cls.model_validate(values)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError):
            raise ConfigError(f"{path}: is not valid YAML") from None
        except ValidationError as error:
            raise ConfigError(f"{path}: {_sentence(error)}") from None

    def prefill_s(self, first: int, last: int) -> float:
        """To compute the tokens from position `first` up to `last`, all before them being there."""
        return self.prefill_s_per_token * (last - first) + self.prefill_s_per_token2 * (last**2 - first**2)


def _sentence(error: ValidationError) -> str:
    first = first_mistake(error)
    field = CostModel.model_fields.get(first.key)
    if field is None:
        what = f"unknown key '{first.key}'" if first.key else "must be a mapping of keys to values"
        return f"{what} (valid: {', '.join(CostModel.model_fields)})"
    return must_be(first.key, field.description, first.value)
