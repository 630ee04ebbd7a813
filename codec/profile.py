"""What was measured of a model's keys and values, for codecs that are calibrated: a safetensors file.

Of keys (before RoPE) and of values of each layer, all heads of a rank together: their mean; a transform to components
that do not correlate, largest first (Karhunen and Loeve's), in whose space all errors weigh the same; and, for each
preset, the quantizer's step, and which table of frequencies each component has. With tensor parallelism every rank has
its own, for a transform over all heads cannot be cut.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from manthan.codec.errors import ProfileError
from manthan.codec.rope import Rope
from manthan.codec.tables.frequencies import SCALE

FORMAT = "manthan profile 1"
PRESETS = {"klt-5x": 5.0, "klt-8x": 8.0, "klt-12x": 12.0}
"""Calibrated codecs, and how many times smaller than bf16 they make what they were calibrated on, at least."""
KINDS = ("keys", "values")
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Basis:
    """Of keys or of values of one layer: row vectors x to components (x - mean) @ forward, and back.

    mean, scale: float32 [C]. transform: float16 [C, C], its rows of length 1; forward is scale[:, None] * transform.
    steps, tables: by preset, the quantizer's step, and uint8 [C], the table of each component.
    """

    mean: Floats
    scale: Floats
    transform: npt.NDArray[np.float16]
    steps: dict[str, float] = field(default_factory=dict)
    tables: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)

    @cached_property
    def forward(self) -> Floats:
        """[C, C]."""
        made: Floats = self.scale[:, None] * self.transform.astype(np.float32)
        return made

    @cached_property
    def inverse(self) -> Floats:
        """[C, C], of forward as it is stored. Raises ProfileError where there is none."""
        try:
            found = np.linalg.inv(self.transform.astype(np.float64)) / self.scale
        except np.linalg.LinAlgError:
            found = np.full(self.transform.shape, np.nan)
        if not np.isfinite(found).all():
            raise ProfileError("the profile holds a transform that cannot be undone: calibrate the model again.")
        return found.astype(np.float32)


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """Of one layer, for one rank."""

    keys: Basis
    values: Basis


@dataclass(frozen=True)
class ProfileInfo:
    """What a profile is of. model: its name or folder. heads: KV heads, of all ranks. rope: how keys were turned back;
    None if they were not. metric: what errors are weighed by. text: sha256 of what was read; "traffic" for that of a
    server. tokens: how many. ratios: by preset, bytes of bf16 over those of sections, on tokens that were held out."""

    model: str
    layers: int
    heads: int
    head_dim: int
    rope: Rope | None
    metric: str
    text: str = "traffic"
    tokens: int = 0
    ratios: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Self:
        """What `asdict` makes of one, through JSON. Raises KeyError, TypeError."""
        rope = told["rope"]
        turned = Rope(**rope | {"frequencies": tuple(rope["frequencies"])}) if rope else None
        return cls(**{**told, "rope": turned})


@dataclass(frozen=True, eq=False)
class Profile:
    """frequencies: uint16 [tables, 256], see `codec.cpu.rans.Coder`. ranks: the layers of each. digest: of all that the
    file holds; a cut keeps that of the whole."""

    info: ProfileInfo
    frequencies: npt.NDArray[np.uint16]
    ranks: tuple[tuple[LayerProfile, ...], ...]
    digest: str

    @classmethod
    def of(
        cls, info: ProfileInfo, frequencies: npt.NDArray[np.uint16], ranks: Sequence[Sequence[LayerProfile]]
    ) -> Self:
        made = cls(info, frequencies, tuple(map(tuple, ranks)), "")
        return replace(made, digest=_digest(_metadata(made), _tensors(made)))

    def for_rank(self, rank: int, ranks: int) -> "Profile":
        """What one rank of a tensor-parallel model needs. Raises ProfileError for another number of ranks."""
        if len(self.ranks) != ranks:
            raise ProfileError(
                f"the profile of {self.info.model} is for {len(self.ranks)} tensor-parallel ranks, and there are "
                f"{ranks}: run `manthan calibrate {self.info.model} --tensor-parallel-size {ranks}`."
            )
        return replace(self, ranks=(self.ranks[rank],))

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Of the one rank that a cut is for. Raises ProfileError for a profile of several."""
        if len(self.ranks) != 1:
            raise ProfileError(
                f"the profile is for {len(self.ranks)} tensor-parallel ranks: cut it with for_rank first."
            )
        return self.ranks[0]

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises ProfileError without safetensors, OSError."""
        metadata = {"manthan": json.dumps(_metadata(self) | {"digest": self.digest})}
        made = _safetensors().save(dict(_tensors(self)), metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            written.write_bytes(made)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ProfileError for a file that cannot be read, is damaged, or was written by another version."""
        load = _safetensors().load
        try:
            content = path.read_bytes()
            metadata = json.loads(_header(content)["manthan"])
            tensors = load(content)
        except OSError as error:
            raise ProfileError(f"the profile {path} cannot be read: {error.strerror}.") from None
        except Exception as error:  # the package raises its own class, which has no common base with others
            said = " ".join(str(error).split())
            raise ProfileError(f"{path} is no profile, or a damaged one: {type(error).__name__}: {said}.") from None
        if metadata.get("format") != FORMAT:
            raise ProfileError(f"{path} is {metadata.get('format')!r}: this version reads {FORMAT!r}.")
        digest = metadata.pop("digest", "")
        if digest != _digest(metadata, tensors.items()):
            raise ProfileError(f"the profile {path} is damaged: its content is not that of its digest.")
        return cls._parse(path, metadata, tensors, digest)

    @classmethod
    def _parse(cls, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any], digest: str) -> Self:
        try:
            info = ProfileInfo.of_json(metadata["info"])
            frequencies = _checked(tensors["frequencies"], (None, 256), np.uint16)
            ranks = tuple(
                tuple(_layer(info, f"{rank}.{layer}", tensors, len(frequencies)) for layer in range(info.layers))
                for rank in range(metadata["ranks"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"the profile {path} does not fit together: {error}.") from None
        if (frequencies.sum(1, dtype=np.int64) != SCALE).any() or (frequencies[:, -1] == 0).any():
            raise ProfileError(f"the profile {path} does not fit together: its frequencies are none.")
        if frequencies.max() >= SCALE:
            raise ProfileError(f"the profile {path} does not fit together: a number is certain.")
        return cls(info, frequencies, ranks, digest)


def rank_heads(heads: int, rank: int, ranks: int) -> range:
    """Which KV heads a rank has: its share, or, where there are more ranks than heads, one that it shares."""
    if ranks <= heads:
        return range(rank * heads // ranks, (rank + 1) * heads // ranks)
    return range(rank * heads // ranks, rank * heads // ranks + 1)


def _layer(info: ProfileInfo, name: str, tensors: Mapping[str, Any], tables: int) -> LayerProfile:
    return LayerProfile(*(_basis(info, f"{name}.{kind}", tensors, tables) for kind in KINDS))


def _basis(info: ProfileInfo, name: str, tensors: Mapping[str, Any], tables: int) -> Basis:
    mean, scale = (_checked(tensors[f"{name}.{what}"], (None,), np.float32) for what in ("mean", "scale"))
    size = len(mean)
    transform = _checked(tensors[f"{name}.transform"], (size, size), np.float16)
    steps, chosen = {}, {}
    for preset in info.ratios:
        step = _checked(tensors[f"{name}.{preset}.step"], (1,), np.float32)
        steps[preset] = float(step[0])
        chosen[preset] = _checked(tensors[f"{name}.{preset}.tables"], (size,), np.uint8)
        if not steps[preset] > 0 or chosen[preset].max(initial=0) >= tables:
            raise ValueError(f"{name}.{preset} has a step of {steps[preset]}, or a table of number {tables} or higher")
    if size % info.head_dim or len(scale) != size or not (scale > 0).all():
        raise ValueError(f"{name} has {size} components, {len(scale)} scales and heads of {info.head_dim}")
    return Basis(mean, scale, transform, steps, chosen)


def _checked(tensor: Any, shape: tuple[int | None, ...], dtype: Any) -> Any:
    """The array, if it has this dtype, this shape (None: whatever), and is finite."""
    fits = len(tensor.shape) == len(shape) and all(w in (None, n) for n, w in zip(tensor.shape, shape, strict=True))
    if tensor.dtype != dtype or not fits or not np.isfinite(tensor).all():
        raise ValueError(f"{tensor.dtype} of shape {tensor.shape} is not finite {np.dtype(dtype)} of {shape}")
    return tensor


def _metadata(profile: Profile) -> dict[str, Any]:
    return {"format": FORMAT, "ranks": len(profile.ranks), "info": asdict(profile.info)}


def _tensors(profile: Profile) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    yield "frequencies", np.ascontiguousarray(profile.frequencies)
    for rank, layers in enumerate(profile.ranks):
        for number, layer in enumerate(layers):
            for kind in KINDS:
                basis: Basis = getattr(layer, kind)
                name = f"{rank}.{number}.{kind}"
                for what in ("mean", "scale", "transform"):
                    yield f"{name}.{what}", np.ascontiguousarray(getattr(basis, what))
                for preset, step in basis.steps.items():
                    yield f"{name}.{preset}.step", np.array([step], np.float32)
                    yield f"{name}.{preset}.tables", np.ascontiguousarray(basis.tables[preset])


def _digest(metadata: Mapping[str, Any], tensors: Any) -> str:
    made = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors):
        made.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        made.update(tensor.tobytes())
    return made.hexdigest()


def _header(content: bytes) -> dict[str, str]:
    """The strings beside the tensors, which the package's own reader of bytes leaves out."""
    size = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return found


def _safetensors() -> Any:
    try:
        from safetensors import numpy
    except ImportError:
        raise ProfileError(
            "profiles take the package safetensors, which is not installed: pip install safetensors"
        ) from None
    return numpy
