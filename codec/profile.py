"""Profile of a model's keys and values, or of its latents (MLA), for calibrated codecs: a safetensors file.

It has, for the keys (before RoPE) and the values of each layer, all heads of a rank together: their mean; a transform
to components that do not correlate, largest first (Karhunen and Loeve's), in whose space all errors weigh the same; and
for each preset, the quantizer's step, and each component's table of frequencies. With tensor parallelism every rank
has its own, because a transform over all heads cannot be cut. Latents are the same on all ranks. They are coded as
keys without RoPE, so that their basis is that of the keys, and there is none of values.

For embedded codes it has the same of groups of layers, keys and values together, with one step and one table for each
component, and what tells from a token's numbers how much later queries look at it.
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
from manthan.codec.tables.levels import FALLING

FORMAT = "manthan profile 1"
PRESETS = {"klt-5x": 5.0, "klt-8x": 8.0, "klt-12x": 12.0}
"""Calibrated codecs, and the least factor by which they are smaller than bf16 on their calibration text."""
EMBEDDED = {"emb-20x": 0, "emb-12x": 1, "emb-8x": 2, "emb-5x": 3, "emb-exact": 4}
"""Embedded codecs, and the level at which a block of each starts."""
KINDS = ("keys", "values")
POINT = 20
"""Binary places of a group's largest deviation as a whole number."""
GROUP = {
    **dict.fromkeys(("mean", "scale", "center", "deviations", "weigher"), np.float32),
    "transform": np.float16,
    "tables": np.uint8,
    "errors": np.int8,
}
"""Arrays of a group."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Basis:
    """Transform of one layer's keys or values: row vectors x to components (x - mean) @ forward, and back.

    mean, scale: float32 [C].
    transform: float16 [C, C], its rows of length 1; forward is scale[:, None] * transform.
    steps, tables: by preset, the quantizer's step, and uint8 [C], the table of each component.
    """

    mean: Floats
    scale: Floats
    transform: npt.NDArray[np.float16]
    steps: dict[str, float] = field(default_factory=dict)
    tables: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)

    @cached_property
    def forward(self) -> Floats:
        """Transform to components, [C, C]."""
        made: Floats = self.scale[:, None] * self.transform.astype(np.float32)
        return made

    @cached_property
    def inverse(self) -> Floats:
        """Inverse of `forward`, [C, C]. Raises ProfileError if there is none."""
        return (_inverted(self.transform) / self.scale).astype(np.float32)


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """Bases of one layer, for one rank. values: None for latents, whose basis is `keys`."""

    keys: Basis
    values: Basis | None = None

    @property
    def bases(self) -> tuple[Basis, ...]:
        """All bases, in the order of `ProfileInfo.kinds`."""
        return (self.keys,) if self.values is None else (self.keys, self.values)


@dataclass(frozen=True, eq=False)
class Group:
    """Layers that an embedded code has together, for one rank. C: their numbers, [layers, kinds, heads, head_dim].

    place: first layer, layers, first head of the rank's, heads.
    head_dim: numbers of a head.
    mean, scale: float32 [C].
    transform: float16 [C, C], its columns of length 1; components come back as y @ (transform * scale) + mean.
    tables: uint8 [C], the table of each component.
    center, deviations: float32 [C], by which a token's numbers are made comparable.
    weigher: float32 [C + C / head_dim + 1], from these numbers, the log energies of heads, and 1 to a token's j.
    errors: int8 [C], deviations of errors at the finest lossy level, in thirds of octaves.
    """

    place: tuple[int, int, int, int]
    head_dim: int
    mean: Floats
    scale: Floats
    transform: npt.NDArray[np.float16]
    tables: npt.NDArray[np.uint8]
    center: Floats
    deviations: Floats
    weigher: Floats
    errors: npt.NDArray[np.int8]

    @property
    def inverse(self) -> Floats:
        """Transform from components, [C, C]."""
        made: Floats = self.transform.astype(np.float32) * self.scale
        return made

    def points(self, kinds: int) -> npt.NDArray[np.int64]:
        """Binary places of numbers as whole ones, [C]: the same in all of a layer's keys, and of its values."""
        runs = self.deviations.reshape(self.place[1] * kinds, -1)
        return np.repeat(POINT - np.frexp(runs.max(1))[1].astype(np.int64), runs.shape[1])

    @cached_property
    def forward(self) -> Floats:
        """Transform to components, [C, C]. Raises ProfileError if there is none."""
        return (_inverted(self.transform) / self.scale[:, None]).astype(np.float32)


@dataclass(frozen=True)
class ProfileInfo:
    """Facts about a profile.

    model: name or folder of the model.
    heads: KV heads of all ranks; pieces of a latent.
    head_dim: numbers of a head, or of a piece.
    rope: RoPE by which keys were turned back, or None.
    metric: name of the metric.
    text: sha256 of the calibration text.
    tokens: number of tokens read.
    ratios: by preset, bytes of bf16 over bytes of sections, on tokens held out.
    latent: numbers of a token's latent (MLA); 0 for keys and values.
    bits: of a number, by level of the embedded code, on tokens held out; () without groups.
    """

    model: str
    layers: int
    heads: int
    head_dim: int
    rope: Rope | None
    metric: str
    text: str = ""
    tokens: int = 0
    ratios: Mapping[str, float] = field(default_factory=dict)
    latent: int = 0
    bits: tuple[float, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the bases of a layer."""
        return KINDS[:1] if self.latent else KINDS

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Self:
        """Undo `asdict` and JSON. Raises KeyError, TypeError."""
        rope = told["rope"]
        turned = Rope(**rope | {"frequencies": tuple(rope["frequencies"])}) if rope else None
        return cls(**{**told, "rope": turned, "bits": tuple(told.get("bits", ()))})


@dataclass(frozen=True, eq=False)
class Profile:
    """Profile of a model.

    frequencies: uint16 [tables, 256], see `codec.cpu.rans.Coder`.
    ranks: layers of each rank.
    digest: of the file's whole content, also in a cut.
    groups: of each rank, for embedded codes; () in a profile of an earlier version.
    """

    info: ProfileInfo
    frequencies: npt.NDArray[np.uint16]
    ranks: tuple[tuple[LayerProfile, ...], ...]
    digest: str
    groups: tuple[tuple[Group, ...], ...] = ()

    @classmethod
    def of(
        cls,
        info: ProfileInfo,
        frequencies: npt.NDArray[np.uint16],
        ranks: Sequence[Sequence[LayerProfile]],
        groups: Sequence[Sequence[Group]] = (),
    ) -> Self:
        made = cls(info, frequencies, tuple(map(tuple, ranks)), "", tuple(map(tuple, groups)))
        return replace(made, digest=_digest(_metadata(made), _tensors(made)))

    def for_rank(self, rank: int, ranks: int) -> "Profile":
        """Cut the profile for one rank. Raises ProfileError for another number of ranks; latents fit any."""
        if self.info.latent:
            return self
        if len(self.ranks) != ranks:
            raise ProfileError(
                f"the profile of {self.info.model} is for {len(self.ranks)} tensor-parallel ranks, and there are "
                f"{ranks}: run `manthan calibrate {self.info.model} --tensor-parallel-size {ranks}`."
            )
        return replace(self, ranks=(self.ranks[rank],), groups=self.groups[rank : rank + 1])

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Layers of the one rank of a cut. Raises ProfileError for a profile of several ranks."""
        if len(self.ranks) != 1:
            raise ProfileError(
                f"the profile is for {len(self.ranks)} tensor-parallel ranks: cut it with for_rank first."
            )
        return self.ranks[0]

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs that the profile is for."""
        return (*self.info.ratios, *(EMBEDDED if self.groups else ()))

    def check(self, name: str, head_dim: int, rope: Rope | None) -> None:
        """Raise ProfileError unless the profile is for the codec of this name, and for such heads."""
        info = self.info
        if name not in self.codecs:
            had = ", ".join(self.codecs) or "none"
            raise ProfileError(f"the profile of {info.model} has no {name}: it has {had}.")
        if head_dim != info.head_dim:
            raise ProfileError(f"the profile of {info.model} is for heads of {info.head_dim} numbers, not {head_dim}.")
        if not _same(info.rope, rope):
            raise ProfileError(
                f"the profile of {info.model} was made for another RoPE than the model has: calibrate it again."
            )

    def save(self, path: Path) -> None:
        """Write the file completely or not at all. Raises ProfileError without safetensors, OSError."""
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
        """Read a file. Raises ProfileError if it cannot be read, is damaged, or is of another version."""
        load = _safetensors().load
        try:
            content = path.read_bytes()
            metadata = json.loads(_header(content)["manthan"])
            tensors = load(content)
        except OSError as error:
            raise ProfileError(f"the profile {path} cannot be read: {error.strerror}.") from None
        except Exception as error:  # the package raises a class of its own, without a common base
            said = " ".join(str(error).split())
            raise ProfileError(f"{path} is no profile, or a damaged one: {type(error).__name__}: {said}.") from None
        if metadata.get("format") != FORMAT:
            raise ProfileError(f"{path} is {metadata.get('format')!r}: this version reads {FORMAT!r}.")
        digest = metadata.pop("digest", "")
        if digest != _digest(metadata, tensors.items()):
            raise ProfileError(f"the profile {path} is damaged: its content is not that of its digest.")
        try:
            info = ProfileInfo.of_json(metadata["info"])
            frequencies = _checked(tensors["frequencies"], (None, 256), np.uint16)
            sums, largest = frequencies.sum(1, dtype=np.int64), frequencies.max()
            if (sums != SCALE).any() or largest >= SCALE or (frequencies[:, -1] == 0).any():
                raise ValueError(f"frequencies have sums of {sums}, and {largest} as their largest")
            bases = [
                _basis(info, f"{rank}.{layer}.{kind}", tensors, len(frequencies))
                for rank in range(metadata["ranks"])
                for layer in range(info.layers)
                for kind in info.kinds
            ]
            layers = layers_of(bases, info)
            ranks = tuple(tuple(layers[at : at + info.layers]) for at in range(0, len(layers), info.layers))
            groups = _groups(info, tensors, metadata["ranks"]) if info.bits else ()
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"the profile {path} does not fit together: {error}.") from None
        return cls(info, frequencies, ranks, digest, groups)


def layers_of(bases: Sequence[Basis], info: ProfileInfo) -> list[LayerProfile]:
    """Layers of these bases, those of one layer side by side."""
    count = len(info.kinds)
    return [LayerProfile(*bases[at : at + count]) for at in range(0, len(bases), count)]


def rank_heads(heads: int, rank: int, ranks: int) -> range:
    """KV heads of a rank: its share, or, with more ranks than heads, one that it shares."""
    first = rank * heads // ranks
    return range(first, max(first + 1, (rank + 1) * heads // ranks))


def _inverted(transform: npt.NDArray[np.float16]) -> npt.NDArray[np.float64]:
    """Raises ProfileError if there is no inverse."""
    try:
        found = np.linalg.inv(transform.astype(np.float64))
    except np.linalg.LinAlgError:
        found = np.full(transform.shape, np.nan)
    if not np.isfinite(found).all():
        raise ProfileError("the profile holds a transform that cannot be undone: calibrate the model again.")
    return found


def _same(one: Rope | None, other: Rope | None) -> bool:
    """True if both turn alike, but for the rounding of frequencies."""
    if one is None or other is None:
        return one is other
    alike = (one.interleaved, len(one.frequencies)) == (other.interleaved, len(other.frequencies))
    return alike and bool(
        np.allclose((*one.frequencies, one.scale), (*other.frequencies, other.scale), rtol=1e-5, atol=0)
    )


def _groups(info: ProfileInfo, tensors: Mapping[str, Any], ranks: int) -> tuple[tuple[Group, ...], ...]:
    """Groups of each rank. Raises KeyError, ValueError."""
    made = []
    for rank in range(ranks):
        places = _checked(tensors[f"{rank}.places"], (None, 4), np.int64).tolist()
        groups, covered = [], 0
        for number, (first, layers, head, heads) in enumerate(places):
            size = layers * len(info.kinds) * heads * info.head_dim
            shapes = {"transform": (size, size), "weigher": (size + size // info.head_dim + 1,)}
            told = {
                what: _checked(tensors[f"{rank}.groups.{number}.{what}"], shapes.get(what, (size,)), dtype)
                for what, dtype in GROUP.items()
            }
            if not all((told[what] > 0).all() for what in ("scale", "deviations")) or told["tables"].max() >= FALLING:
                raise ValueError(f"group {number} has a deviation of 0, or a table of number {FALLING} or higher")
            groups.append(Group((first, layers, head, heads), info.head_dim, **told))
            covered += layers * heads
        heads_of_rank = max(head + heads for _, _, head, heads in places)
        ends = [(first + layers, head + heads) for first, layers, head, heads in places]
        if covered != info.layers * heads_of_rank or max(ends)[0] != info.layers or min(map(min, places)) < 0:
            raise ValueError(f"groups of {places} are not all of {info.layers} layers")
        made.append(tuple(groups))
    return tuple(made)


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
    """Return the array if it is finite and has this dtype and shape (None: any). Raises ValueError."""
    fits = len(tensor.shape) == len(shape) and all(w in (None, n) for n, w in zip(tensor.shape, shape, strict=True))
    if tensor.dtype != dtype or not fits or not np.isfinite(tensor).all():
        raise ValueError(f"{tensor.dtype} of shape {tensor.shape} is not finite {np.dtype(dtype)} of {shape}")
    return tensor


def _metadata(profile: Profile) -> dict[str, Any]:
    info = asdict(profile.info)
    if not info["bits"]:  # a profile of an earlier version keeps its digest
        del info["bits"]
    return {"format": FORMAT, "ranks": len(profile.ranks), "info": info}


def _tensors(profile: Profile) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    yield "frequencies", np.ascontiguousarray(profile.frequencies)
    for rank, layers in enumerate(profile.ranks):
        for number, layer in enumerate(layers):
            for kind, basis in zip(KINDS, layer.bases, strict=False):
                name = f"{rank}.{number}.{kind}"
                for what in ("mean", "scale", "transform"):
                    yield f"{name}.{what}", np.ascontiguousarray(getattr(basis, what))
                for preset, step in basis.steps.items():
                    yield f"{name}.{preset}.step", np.array([step], np.float32)
                    yield f"{name}.{preset}.tables", np.ascontiguousarray(basis.tables[preset])
    for rank, groups in enumerate(profile.groups):
        yield f"{rank}.places", np.array([group.place for group in groups], np.int64)
        for number, group in enumerate(groups):
            for what in GROUP:
                yield f"{rank}.groups.{number}.{what}", np.ascontiguousarray(getattr(group, what))


def _digest(metadata: Mapping[str, Any], tensors: Any) -> str:
    made = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors):
        made.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        made.update(tensor.tobytes())
    return made.hexdigest()


def _header(content: bytes) -> dict[str, str]:
    """Metadata of a safetensors file, which the package's own reader of bytes leaves out."""
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
