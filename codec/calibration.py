"""Make the profile (tables and transforms for calibrated codecs) of a model, from its keys and values, or its latents.

Most tokens give means and covariances. The others are held back, to measure the sizes and errors of encoding.

A metric gives the cost of errors: a matrix G for keys and a matrix for values of a layer. An error e of a token costs e
G e^T. With G = L L^T (Cholesky), all directions of x @ L cost the same. The eigenvectors U of the covariance of x @ L
give the transform L U, with uncorrelated components. A common step is then best for all layers, keys and values (Goyal,
"Theoretical foundations of transform coding", 2001). docs/calibration.md tells of profiles without metrics.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from manthan.codec.base import ByteArray, Dtype, Numbers, Positions, Section, SectionKind
from manthan.codec.cpu.klt import EXACT, LEAST_J, SCALES, KltCodec, features, finest, front, places, shifts_of, written
from manthan.codec.cpu.numbers import Floats, bf16_bits
from manthan.codec.errors import ProfileError
from manthan.codec.profile import DIVERGENCES, Group, Profile, ProfileInfo, rank_heads
from manthan.codec.tables.frequencies import SHAPES
from manthan.codec.tables.levels import FINE, STEPS, WIDTHS, coarser

SINKS = 4  # first tokens of a text, left out because blocks keep them exact
HELD_BACK = 5  # of the tokens of a call of `add`, the last fifth is held back
SAMPLE = 2048  # `add` drops half of a group's held back tokens if there are more
BLOCK = 16  # tokens of the blocks whose size decides the step: the smallest usual block size
HEADER = 256  # bytes of the block's header and entries
EVEN = 0.001  # weight added to each direction of a metric, as a share of the average weight
EVEN_OF_KEYS = 0.3  # the same share, if the covariance of keys stands for the metric of keys
SHARES = (1.0, 2.0)  # steps of keys and of values without a metric, in deviations of their layer's components
TOGETHER = 2, 2048  # most layers of a group, and most numbers of a token in a group
RATIOS = 20.0, 12.0, 8.0, 5.0  # wanted ratio of bf16 to encoded bytes, by level; headers count as at most half of these
EXPONENT, RIDGE = 0.5, 30.0
"""A token's steps are proportional to its weight to the power of -EXPONENT. RIDGE shrinks regression coefficients."""
FINEST = 2.0 ** (np.arange(-90, 60) / 6)  # candidates for the step of the finest lossy level, ascending
EXACT_TOKENS = 64  # tokens of the block for measuring exact blocks
UNMULTIPLIED = 256  # about the most tokens of a group, besides those of the last text, whose products are not added
FEW = 8  # a step is searched, and sizes and errors are measured, with every eighth of the held back tokens

Doubles = npt.NDArray[np.float64]


def _evened(weights: Doubles, least: float) -> Doubles:
    """Return weights scaled to a diagonal of 1 on average, with `least` added to each direction."""
    mean = float(np.trace(weights)) / len(weights)
    return weights / (mean or 1.0) + least * np.eye(len(weights))


class ProfileBuilder:
    """Builds the profile of a model. `finish` fills in `tokens`, `bits` and `divergences` of `info`.

    ranks: number of tensor-parallel ranks. Latents are the same on all ranks.
    """

    def __init__(self, info: ProfileInfo, ranks: int = 1) -> None:
        self._info, count = info, 1 if info.latent else ranks
        self._joints = [_joints(info, rank_heads(info.heads, rank, count)) for rank in range(count)]
        self._flat = list(itertools.chain(*self._joints))
        self._metrics: dict[int, tuple[Doubles, ...]] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens added to the layer with the fewest, without held back tokens."""
        return min(joint.tokens for joint in self._flat)

    def add(self, layer: int, positions: Positions, *parts: Floats) -> None:
        """Add keys and values of a layer, or latents. A text's first SINKS tokens and non-finite tokens are left out.

        Args:
            layer: index of the layer. The layers of a text are added in ascending order.
            positions: [tokens], positions in a single text of more than SINKS tokens.
            parts: keys and values, or latents, [heads, tokens, head_dim], keys after RoPE as in the cache.
        """
        first, *others = parts
        turned_back = first if self._info.rope is None else self._info.rope.turn_back(first, positions)
        told = [x.transpose(1, 0, 2)[positions >= SINKS] for x in (turned_back, *others)]
        for joint in self._flat:
            if layer in joint.layers:
                joint.take(layer, told)

    def weigh(self, layer: int, *metrics: Doubles) -> None:
        """Set a layer's metrics, [heads * head_dim, heads * head_dim]: for keys before RoPE and values, or for latents.

        The costs that the metrics of all layers give must have the same unit.
        """
        self._metrics[layer] = metrics

    def weigh_tokens(self, energies: Sequence[Doubles]) -> None:
        """Add weights of the tokens of the text that was added last: how much later queries attend to each token.

        energies: for each layer, [tokens], weights, not negative, of the text's tokens from token SINKS on.
        """
        for joint in self._flat:
            joint.weigh(np.sum([energies[layer] for layer in joint.layers], 0))

    def finish(self) -> Profile:
        """Return the profile. Raises ProfileError for too few tokens, or if none are held back."""
        size = self._info.heads * self._info.head_dim
        if self.tokens < size:
            raise ProfileError(f"{self.tokens} tokens do not calibrate {size} numbers: at least as many tokens do.")
        if not all(len(joint.held) for joint in self._flat):
            raise ProfileError(f"no text has {HELD_BACK} tokens, of which the last could be held back: longer ones do.")
        for joint in self._flat:
            joint.code(self._metrics)
        groups, bits, divergences = _stepped(self._info, self._joints)
        return Profile.of(replace(self._info, tokens=self.tokens, bits=bits, divergences=divergences), groups)


class _Joint:
    """Sums over a group's rows, for covariances and for the regression from a row to the token's weight.

    A group is some layers, or some heads of a layer, encoded together. A row is a token's numbers, [C] as in `Group`.

    place: as in `Group`. heads: indices of the rank's heads among the model's heads.
    tokens: number of rows that are not held back. held: rows held back.
    group, y, j: set by `code`. The group is without a step. y: components of the rows held back. j: by row; a low j
        means a great weight, and makes steps finer.
    """

    group: Group
    y: Floats
    j: npt.NDArray[np.int64]

    def __init__(self, info: ProfileInfo, place: tuple[int, int, int, int], heads: range) -> None:
        self.place, self.head_dim, self.tokens, self._every = place, info.head_dim, 0, 1
        self.layers, self._kinds = range(place[0], place[0] + place[1]), len(info.kinds)
        self._heads = slice(heads[place[2]], heads[place[2]] + place[3])
        self._parts: list[Floats] = []
        self._rows: Floats | None = None
        size = place[1] * self._kinds * place[3] * self.head_dim
        self.held = np.zeros((0, size), np.float32)
        self._totals, self._sums = np.zeros(size), np.zeros(size)
        self._products, self._weighed = np.zeros((size, size)), np.zeros((size, size))
        self._told: tuple[Doubles, Doubles] | None = None  # of the features of weighed rows
        self._kept = np.zeros((0, size), np.float32)  # rows whose products are not added yet, those taken last first

    def take(self, layer: int, kinds: Sequence[Floats]) -> None:
        """Add keys and values, or latents, [tokens, heads, head_dim] of a layer. Layers of a text come in order."""
        if layer == self.layers[0]:
            self._parts = []
        self._parts += [x[:, self._heads].reshape(len(x), -1) for x in kinds]
        if layer < self.layers[-1]:
            return
        rows = np.concatenate(self._parts, 1)
        good = np.isfinite(rows).all(1)  # a token with a bad number in one layer is left out of its whole group
        self._parts, self._rows = [], rows if good.all() else None
        rows = rows[good]
        if not self.tokens:
            if not len(rows):
                return
            self.center, self.deviations = rows.mean(0), np.maximum(rows.std(0), 1e-6)
        count = len(rows) - len(rows) // HELD_BACK
        self.held = np.concatenate([self.held, rows[count :: self._every]])
        if len(self.held) > SAMPLE:
            self.held, self._every = self.held[::2], 2 * self._every
        if len(self._kept) >= UNMULTIPLIED:
            self._multiply()
        kept = rows[:count] - self.center
        self._kept = np.concatenate([kept, self._kept])
        self.tokens += count
        self._totals += rows[:count].sum(0, np.float64)
        self._sums += kept.sum(0)

    def _multiply(self) -> None:
        """Add products of rows that no text's weights will need. Rows with weights are multiplied by `weigh`."""
        self._products += self._kept.T @ self._kept
        self._kept = np.zeros_like(self._kept, shape=(0, len(self._sums)))

    def weigh(self, energies: Doubles) -> None:
        """Add weights of the tokens taken last, less the trend along the text; nothing if a token was not finite."""
        if self._rows is None:
            return
        told = np.log(energies + 1e-9 * energies.mean() + 1e-300)
        trend = np.polynomial.polynomial.polyvander(np.linspace(-1, 1, len(told)), 3)
        told -= trend @ np.linalg.lstsq(trend, told, rcond=None)[0]
        weighed, self._kept = self._kept[: len(told)], self._kept[len(told) :].copy()
        self._weighed += weighed.T @ weighed
        f = features(self._rows[: len(told)], self, self.head_dim)
        products, sums = self._told or (0.0, 0.0)
        self._told = products + (f[:, len(self.center) :].T @ f).astype(np.float64), sums + told @ f

    def _weigher(self) -> Floats:
        """Return coefficients of a ridge regression from a token's features to its j; zeros without weights."""
        size = len(self.center)
        if self._told is None:
            return np.zeros(size + size // self.head_dim + 1, np.float32)
        products, sums = self._told
        of_numbers = self._weighed / np.outer(self.deviations, self.deviations)
        products = np.block([[of_numbers, products[:, :size].T], [products]])
        ridge = np.diag(np.append(np.full(len(sums) - 1, RIDGE), 1e-6))
        made: Floats = (-3 * EXPONENT / np.log(2) * np.linalg.solve(products + ridge, sums)).astype(np.float32)
        return made

    def _roots(self, metrics: Mapping[int, Sequence[Doubles]], covariance: Doubles) -> list[tuple[slice, Doubles]]:
        """Return each layer and kind's columns of a row, and a matrix for the numbers in them.

        Errors of numbers @ matrix cost the same in all directions, layers, keys and values.
        """
        made, at = [], slice(self._heads.start * self.head_dim, self._heads.stop * self.head_dim)
        for n, (layer, kind) in enumerate(itertools.product(self.layers, range(self._kinds))):
            here = slice(n * (at.stop - at.start), (n + 1) * (at.stop - at.start))
            if layer in metrics:
                weights = metrics[layer][kind][at, at]
                mean = float(np.trace(weights)) / len(weights)
                root, step = np.linalg.cholesky(_evened(weights, EVEN)), mean and mean**-0.5
            else:
                weights = covariance[here, here]
                are_keys = self._kinds == 2 and kind == 0  # which attention multiplies by queries
                root = np.linalg.cholesky(_evened(weights, EVEN_OF_KEYS)) if are_keys else np.eye(len(weights))
                y = (self.held - self._totals / self.tokens)[:, here] @ root
                step = SHARES[kind] * float(np.sqrt(np.square(y).mean()))
            made.append((here, root / (step or 1.0)))
        return made

    def code(self, metrics: Mapping[int, Sequence[Doubles]]) -> None:
        """Make the group without a step. metrics: by layer, see `ProfileBuilder.weigh`."""
        self._multiply()
        mean = self._sums / self.tokens
        covariance = (self._products + self._weighed) / self.tokens - np.outer(mean, mean)
        roots = self._roots(metrics, covariance)
        for here, root in roots:
            covariance[here] = root.T @ covariance[here]
        for here, root in roots:
            covariance[:, here] = covariance[:, here] @ root
        directions = np.linalg.eigh(covariance.astype(np.float32))[1][:, ::-1].T.astype(np.float64)
        inverse = np.concatenate([directions[:, here] @ np.linalg.inv(root) for here, root in roots], 1)
        scale = np.maximum(np.linalg.norm(inverse, axis=0), 1e-30)
        mean = (self.center + mean).astype(np.float32)
        rows = self.held - mean
        rows = np.concatenate([rows[:, here] @ root.astype(np.float32) for here, root in roots], 1)
        self.y = rows @ directions.T.astype(np.float32)
        self.group = Group(
            *(self.place, self.head_dim, mean, scale.astype(np.float32), (inverse / scale).astype(np.float16)),
            *(np.zeros(len(mean), np.uint8), self.center, self.deviations, self._weigher()),
            np.zeros(len(mean), np.int8),
        )
        self.j = shifts_of(self.group, self.held)

    def stepped(self, step: float) -> Group:
        """Return the group with `step` as the step of the finest lossy level."""
        deviations = np.sqrt(np.square(self.y).mean(0)) + 1e-9
        sharp = np.abs(self.y).mean(0) / deviations
        near = [math.gamma(2 / s) / math.sqrt(math.gamma(1 / s) * math.gamma(3 / s)) for s in SHAPES]
        shapes = np.abs(sharp[:, None] - near).argmin(1)
        widths = np.rint(3 * np.log2(deviations / (STEPS[0] * WIDTHS[0])) - 3 * np.log2(step))
        table = len(WIDTHS) * shapes + np.clip(widths, 0, len(WIDTHS) - 1)
        return replace(self.group, scale=self.group.scale * np.float32(step), tables=table.astype(np.uint8))


def _joints(info: ProfileInfo, heads: range) -> list[_Joint]:
    """Return a rank's groups. Each has several layers, a single layer, or some heads of a layer."""
    layers, most = TOGETHER
    numbers = len(info.kinds) * info.head_dim
    some = next(n for n in range(len(heads), 0, -1) if len(heads) % n == 0 and (n * numbers <= most or n == 1))
    count = max(1, min(layers, most // (numbers * len(heads))))
    return [
        _Joint(info, (first, min(count, info.layers - first), head, some), heads)
        for first in range(0, info.layers, count)
        for head in range(0, len(heads), some)
    ]


def _stepped(
    info: ProfileInfo, ranks: Sequence[Sequence[_Joint]]
) -> tuple[list[list[Group]], tuple[float, ...], tuple[float, ...]]:
    """Return the groups with the least of FINEST that meets RATIOS, else the largest; bits and divergences by level."""
    every = [each for of_rank in ranks for each in of_rank]
    size = sum(each.y.shape[1] for each in every)
    groups = [each.group for each in every]
    fronts = 8 * front(groups, BLOCK) / (BLOCK * size)
    wanted = [
        max(16 / ratio - (level + 1) * fronts - 8 * HEADER / (BLOCK * size), 8 / ratio)
        for level, ratio in enumerate(RATIOS)
    ]

    def bits(step: float) -> Doubles:
        made = np.zeros(len(STEPS))
        made[0] = 4 * len(every) / size
        for each in every:
            y, j = each.y[::FEW], each.j[::FEW].copy()
            q = finest(y / np.float32(step), j)
            if q is None:
                return np.full(len(STEPS), 1e9)
            group, numbers = each.stepped(step), size * len(y)
            made += [8 * len(written([group], [q], [j], level)) / numbers for level in range(len(STEPS))]
        return np.cumsum(made)

    at = bisect_left(FINEST[:-1], True, key=lambda step: bool((bits(step) <= wanted).all()))
    step = float(FINEST[at])
    measured = [[_measured(each, step, info) for each in of_rank] for of_rank in ranks]
    made = [[group for group, _ in of_rank] for of_rank in measured]
    costs = np.sum([cost for of_rank in measured for _, cost in of_rank], 0)
    divergences = DIVERGENCES[2] / (costs[2] or 1.0) * costs
    return made, _bits_exact(info, ranks[0], made[0], bits(step)), tuple(map(float, divergences))


def _measured(each: _Joint, step: float, info: ProfileInfo) -> tuple[Group, Doubles]:
    """Return the group with the step, and with `errors` measured at the finest lossy level.

    Also return the mean cost of a token's errors at each lossy level, in the metric and with the token's weight.
    """
    group, x, j = each.stepped(step), each.held[::FEW], each.j[::FEW].copy()
    y, weights = each.y[::FEW] / np.float32(step), (256 / SCALES[j - LEAST_J])[:, None]
    q = finest(y, j)
    numbers = enumerate(np.sign(q) * of for of in coarser(np.abs(q)))
    found = [places(group, of, j, 0, level).astype(np.float32).T / (FINE * 256) for level, of in numbers]
    costs = np.array([np.square((of - y) * weights).sum(1).mean() for of in found])
    errors = np.square((found[-1] @ group.inverse + group.mean - x) * weights).mean(0)
    by_kind = errors.reshape(group.place[1], len(info.kinds), -1, group.head_dim)
    if info.rope is not None:
        info.rope.average(by_kind[:, 0])
    thirds = np.rint(1.5 * np.log2(by_kind.ravel() + 1e-30) + 3 * group.points(len(info.kinds)))
    return replace(group, errors=np.clip(thirds, -128, 127).astype(np.int8)), costs


def _bits_exact(info: ProfileInfo, held: Sequence[_Joint], groups: Sequence[Group], bits: Doubles) -> tuple[float, ...]:
    """Return `bits` with the bits of exact blocks appended, measured on a rank's held back tokens."""
    told = (*map(float, bits), 16.0)
    profile = Profile.of(replace(info, bits=told), [groups])
    codec = KltCodec("klt-exact", EXACT, info.head_dim, profile, info.rope)
    tokens = min(EXACT_TOKENS, *(len(each.held) for each in held))
    rows = codec.ungrouped([each.held[:: len(each.held) // tokens][:tokens] for each in held])
    positions = np.arange(SINKS, SINKS + tokens)
    if info.rope is not None:
        rows[:, 0] = info.rope.turn(rows[:, 0], positions)
    x = bf16_bits(rows.swapaxes(0, 1))
    *_, refinements = _encoded(codec, info, x, positions)
    return (*told[:-1], told[-2] + 8 * refinements[-1].size / x.size)


def decoded(profile: Profile, x: Numbers, positions: Positions) -> list[Numbers]:
    """Return KV as each lossy level decodes it, level 0 first. Raises NonFiniteError.

    Args:
        x: bits of bf16, [kinds, layers, heads, tokens, head_dim], kinds as in `ProfileInfo.kinds`, keys after RoPE.
        positions: [tokens].
    """
    info, ranks, made = profile.info, len(profile.ranks), [np.empty_like(x) for _ in STEPS]
    for rank in range(ranks):
        codec = KltCodec("klt-5x", EXACT - 1, info.head_dim, profile.for_rank(rank, ranks), info.rope)
        heads = rank_heads(info.heads, rank, ranks)
        part = x[:, :, heads.start : heads.stop]
        section, base, refinements = _encoded(codec, info, part, positions)
        for level, of in enumerate(made):
            back = codec.decode_parts(base, refinements[:level], section, positions)
            of[:, :, heads.start : heads.stop] = back.reshape(part.shape)
    return made


def _encoded(
    codec: KltCodec, info: ProfileInfo, x: Numbers, positions: Positions
) -> tuple[Section, ByteArray, list[ByteArray]]:
    """Return KV as a section, its base and its refinements. Arguments: see `decoded`."""
    kind = SectionKind.LATENT if info.latent else SectionKind.BOTH
    section = Section(kind, codec.name, x.shape[1], x.shape[3], x.shape[2], x.shape[4], Dtype.BFLOAT16)
    out = np.empty(codec.max_nbytes(section), np.uint8)
    size, refinements = codec.encode_parts(x.reshape(section.shape), section, positions, out)
    return section, out[:size], refinements
