"""Profile of a model's keys and values, or of the latents (MLA), for calibrated codecs: a safetensors file.

A group here is some layers, or some heads of a layer, encoded together. A token's keys (before RoPE) and values in a
group are a vector. For this vector a profile has the mean; a transform to uncorrelated components, largest first
(Karhunen and Loeve's), in a space where all errors weigh the same; each component's table of frequencies; and a
regression to how much later queries look at the token. With tensor parallelism every rank has separate groups, because
a transform over all heads cannot be cut. Latents are equal on all ranks, and encoded like keys without RoPE.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from manthan.codec.errors import ProfileError
from manthan.codec.rope import Floats, Rope
from manthan.codec.tables.levels import FALLING

FORMAT = "manthan profile 2"
LEVELS = {"klt-20x": 0, "klt-12x": 1, "klt-8x": 2, "klt-5x": 3, "klt-exact": 4}
"""Calibrated codecs, each with the level of its new blocks: their number of refinements."""
DIVERGENCES = 0.032, 0.0075, 0.00096, 0.00012, 0.0
"""Divergence of predictions at each level, in nats, to assume for a model without measurements of its own."""
KINDS = ("keys", "values")
POINT = 20  # bits of the largest deviation of a layer's keys, or values, as a whole number
GROUP = {
    **dict.fromkeys(("mean", "scale", "center", "deviations", "weigher"), np.float32),
    "transform": np.float16,
    "tables": np.uint8,
    "errors": np.int8,
}
"""Data type of each array of a `Group` in the file."""


@dataclass(frozen=True, eq=False)
class Group:
    """Layers, or heads of a layer, encoded together on a rank. C: size of a token's [layers, kinds, heads, head_dim].

    place: first layer, count of layers, first head within the rank, count of heads.
    head_dim: count of numbers in a head.
    mean, scale: float32 [C]; see `transform`.
    transform: float16 [C, C], columns of length 1. Components y decode to y @ (transform * scale) + mean.
    tables: uint8 [C], the index of each component's table; see `manthan.codec.tables.levels`.
    center, deviations: float32 [C]. Standardized numbers are (x - center) / deviations.
    weigher: float32 [C + C / head_dim + 1], of a regression from standardized numbers, log energies of heads, and 1 to
        a token's j. The token's steps are 2**(j / 3).
    errors: int8 [C], 3 * log2 of the deviation of errors at the finest lossy level and j = 0, in units of 2**-`points`.
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
        return self.transform.astype(np.float32) * self.scale

    def points(self, kinds: int) -> npt.NDArray[np.int64]:
        """Fraction bits of numbers in fixed point, [C]: equal for the group's keys of a layer, and for its values."""
        runs = self.deviations.reshape(self.place[1] * kinds, -1)
        return np.repeat(POINT - np.frexp(runs.max(1))[1].astype(np.int64), runs.shape[1])

    @cached_property
    def forward(self) -> Floats:
        """Transform to components, [C, C]. Raises ProfileError if `transform` cannot be inverted."""
        try:
            found = np.linalg.inv(self.transform.astype(np.float64))
        except np.linalg.LinAlgError:
            found = np.full(self.transform.shape, np.nan)
        if not np.isfinite(found).all():
            raise ProfileError("the profile holds a transform that cannot be undone: calibrate the model again.")
        return (found / self.scale[:, None]).astype(np.float32)


@dataclass(frozen=True)
class ProfileInfo:
    """Facts about a profile.

    model: name or folder of the model.
    heads, head_dim: KV heads of all ranks and numbers of a head, or pieces of a latent and numbers of a piece.
    rope: RoPE by which keys were turned back, or None.
    metric: name of the metric of errors. text: sha256 of the calibration text.
    tokens: number of tokens that the profile was made from, in the layer with the fewest; without those held back.
    latent: count of numbers in a token's latent (MLA); 0 for keys and values.
    bits: mean bits per number at each level, on tokens held out of the calibration.
    divergences: by lossy level, mean Kullback-Leibler divergence of the model's predictions after decoded KV, in nats.
        `manthan calibrate` measures it on a piece of the text held out of the calibration. If this fails, and in
        profiles from traffic, it is the error in the metric, scaled to `DIVERGENCES` at level 2. Older ones have none.
    """

    model: str
    layers: int
    heads: int
    head_dim: int
    rope: Rope | None
    metric: str
    text: str = ""
    tokens: int = 0
    latent: int = 0
    bits: tuple[float, ...] = ()
    divergences: tuple[float, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of a layer's kinds of numbers."""
        return KINDS[:1] if self.latent else KINDS


@dataclass(frozen=True, eq=False)
class Profile:
    """Profile of a model."""

    info: ProfileInfo
    ranks: tuple[tuple[Group, ...], ...]  # groups of each tensor-parallel rank
    digest: str  # sha256 of the whole profile, also after `for_rank` has cut the profile

    @classmethod
    def of(cls, info: ProfileInfo, ranks: Sequence[Sequence[Group]]) -> Self:
        made = cls(info, tuple(map(tuple, ranks)), "")
        return replace(made, digest=_digest(_metadata(made), _tensors(made)))

    def for_rank(self, rank: int, ranks: int) -> "Profile":
        """Cut the profile for a rank. Raises ProfileError for a different number of ranks; latents fit any."""
        if self.info.latent:
            return self
        if len(self.ranks) != ranks:
            raise ProfileError(
                f"the profile of {self.info.model} is for {len(self.ranks)} tensor-parallel ranks, and there are "
                f"{ranks}: run `manthan calibrate {self.info.model} --tensor-parallel-size {ranks}`."
            )
        return replace(self, ranks=(self.ranks[rank],))

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of the only rank. Raises ProfileError for a profile of several ranks; see `for_rank`."""
        if len(self.ranks) != 1:
            raise ProfileError(
                f"the profile is for {len(self.ranks)} tensor-parallel ranks: cut it with for_rank first."
            )
        return self.ranks[0]

    def check(self, head_dim: int, rope: Rope | None) -> None:
        """Raise ProfileError unless the profile is for heads of `head_dim` numbers, and for this RoPE."""
        info = self.info
        if head_dim != info.head_dim:
            raise ProfileError(f"the profile of {info.model} is for heads of {info.head_dim} numbers, not {head_dim}.")
        if not _same(info.rope, rope):
            raise ProfileError(
                f"the profile of {info.model} was made for another RoPE than the model has: calibrate it again."
            )

    def save(self, path: Path) -> None:
        """Write the file completely or not at all. Raises OSError; ProfileError without safetensors."""
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
        """Read a file. Raises ProfileError for an unreadable or damaged file, or a wrong version."""
        load = _safetensors().load
        try:
            content = path.read_bytes()
            size = int.from_bytes(content[:8], "little")
            told = json.loads(content[8 : 8 + size])["__metadata__"]["manthan"]  # `load` leaves it out
            metadata = dict(json.loads(told))
            tensors = load(content)
        except OSError as error:
            raise ProfileError(f"the profile {path} cannot be read: {error.strerror}.") from None
        except Exception as error:  # safetensors raises a class of its own, derived from Exception only
            said = " ".join(str(error).split())
            raise ProfileError(f"{path} is no profile, or a damaged one: {type(error).__name__}: {said}.") from None
        if metadata.get("format") != FORMAT:
            raise ProfileError(f"the profile {path} was made by an older `manthan calibrate`: run it again.")
        digest = metadata.pop("digest", "")
        if digest != _digest(metadata, tensors.items()):
            raise ProfileError(f"the profile {path} is damaged: its content is not that of its digest.")
        try:
            info = msgspec.convert(metadata["info"], ProfileInfo)
            ranks = _ranks(info, tensors, metadata["ranks"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"the profile {path} does not fit together: {error}.") from None
        return cls(info, ranks, digest)


def rank_heads(heads: int, rank: int, ranks: int) -> range:
    """KV heads of a rank: an equal share, or, with more ranks than heads, a single shared head."""
    first = rank * heads // ranks
    return range(first, max(first + 1, (rank + 1) * heads // ranks))


def _same(one: Rope | None, other: Rope | None) -> bool:
    """True if both turn alike, but for the rounding of frequencies."""
    if one is None or other is None:
        return one is other
    alike = (one.interleaved, len(one.frequencies)) == (other.interleaved, len(other.frequencies))
    return alike and bool(
        np.allclose((*one.frequencies, one.scale), (*other.frequencies, other.scale), rtol=1e-5, atol=0)
    )


def _ranks(info: ProfileInfo, tensors: Mapping[str, Any], ranks: int) -> tuple[tuple[Group, ...], ...]:
    """Return the groups of each rank. Raises KeyError, ValueError."""
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


def _checked(tensor: Any, shape: tuple[int | None, ...], dtype: Any) -> Any:
    """Return a finite array of this dtype and shape (None: any). Raises ValueError."""
    fits = len(tensor.shape) == len(shape) and all(w in (None, n) for n, w in zip(tensor.shape, shape, strict=True))
    if tensor.dtype != dtype or not fits or not np.isfinite(tensor).all():
        raise ValueError(f"{tensor.dtype} of shape {tensor.shape} is not finite {np.dtype(dtype)} of {shape}")
    return tensor


def _metadata(profile: Profile) -> dict[str, Any]:
    info = asdict(profile.info)
    if not profile.info.divergences:  # older profiles keep their digest
        del info["divergences"]
    return {"format": FORMAT, "ranks": len(profile.ranks), "info": info}


def _tensors(profile: Profile) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for rank, groups in enumerate(profile.ranks):
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


def _safetensors() -> Any:
    try:
        from safetensors import numpy
    except ImportError:
        raise ProfileError(
            "profiles take the package safetensors, which is not installed: pip install safetensors"
        ) from None
    return numpy
