"""Tables of a calibrated codec's levels: nested intervals of numbers, and the likelihood of each part of an interval.

A compressed block's base has the coarsest level 0, and each refinement adds the next level. The whole number of a
component at the finest lossy level is q3. Numbers of coarser levels follow from q3, and keep the sign:

    |q2| = (|q3| + 1) // 3;  |q1| = |q2| // 2;  |q0| = |q1| // 2

The intervals nest (Equitz and Cover, "Successive refinement of information", 1991). At levels 0 and 1 the interval
around 0 is the widest. A table has a generalized Gaussian's shape of SHAPES and a width of WIDTHS. A refinement encodes
in which part of its interval a number is, with frequencies by the table and the magnitude at the level before. A number
decodes to the mean of its interval in the table's distribution. The last refinement makes a block exact: it encodes the
distance of a number's cell, an interval of 2**n units, from the expected cell. In a cell at 0 it also encodes a fall:
by how many octaves the number's exponent is below the cell's largest exponent.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from manthan.codec.tables.frequencies import LARGEST, SCALE, SHAPES, as_frequencies

SPLITS = 2, 2, 3
"""Number of parts into which each refinement splits an interval."""
STEPS = 12, 6, 3, 1
"""Width of each level's steps, in steps of the finest level."""
WIDTHS = 2.0 ** (np.arange(-24, 24) / 3)
"""Standard deviations of the tables' distributions, in steps of the base."""
MAGNITUDES = 4
"""Number of magnitudes with separate frequencies: 0, 1, 2, and all from 3 on."""
FINE = 16
"""Units in a step of the finest level, for positions inside an interval."""
FALLING = len(SHAPES) * len(WIDTHS)
"""Index of the table of falls, behind the tables of cells; see above."""

Whole = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


def coarser(magnitudes: Whole) -> list[Whole]:
    """Return the magnitudes of all levels, the base's first, from the finest magnitudes."""
    made = [magnitudes]
    for split in reversed(SPLITS):
        made.insert(0, (made[0] + split // 3) // split)
    return made


@cache
def _masses() -> tuple[Doubles, Doubles]:
    """Return probability and mean of each magnitude's interval at the finest level, [tables, magnitudes]."""
    most = (LARGEST + 1) * STEPS[0]
    edges = np.maximum(np.arange(most + 1) - 0.5, 0)
    masses, means = [], []
    for shape in SHAPES:
        x = np.concatenate([np.linspace(0, 8, 80_001), np.linspace(8, 120, 20_001)[1:]])
        points = (x[1:] + x[:-1]) / 2
        density = np.exp(-(points**shape)) * np.diff(x)
        root = np.sqrt((density * points**2).sum() / density.sum())
        mass, moment = (np.append(0, np.cumsum(d)) / density.sum() for d in (density, density * points / root))
        for width in WIDTHS * STEPS[0]:
            m, first = (np.diff(np.interp(edges / width, x / root, c)) for c in (mass, moment))
            masses.append(m)
            means.append(np.where(m > 1e-12, first * width / np.maximum(m, 1e-12), np.arange(most)))
    return np.array(masses), np.array(means)


def _summed(x: Doubles, parents: Whole, size: int) -> Doubles:
    made = np.zeros((len(x), size))
    np.add.at(made.T, np.minimum(parents, size - 1), x.T)
    return made


@cache
def centres() -> npt.NDArray[np.int32]:
    """Return means of intervals less magnitude * step, [levels, tables, magnitudes], in 1 / FINE of the finest step."""
    mass, mean = _masses()
    made = np.zeros((len(STEPS), len(mass), MAGNITUDES), np.int32)
    for level, parents in enumerate(coarser(np.arange(mass.shape[1]))):
        total = _summed(mass, parents, MAGNITUDES)
        inside = _summed(mass * (mean - parents * STEPS[level]), parents, MAGNITUDES)
        made[level] = np.rint(np.where(total > 1e-12, inside / np.maximum(total, 1e-12), 0) * FINE)
    made[:, :, 0] = 0
    return made


@cache
def base() -> npt.NDArray[np.uint16]:
    """Return frequencies of the base's numbers, [tables, 256]."""
    mass = _masses()[0]
    parents = coarser(np.arange(mass.shape[1]))[0]
    return _of_magnitudes(_summed(mass, parents, LARGEST + 1))


@cache
def cells() -> npt.NDArray[np.uint16]:
    """Return frequencies of distances from the expected cell, [tables, 256], and behind them those of falls."""
    mass = _masses()[0]
    made = _of_magnitudes(_summed(mass, (np.arange(mass.shape[1]) + 6) // 12, LARGEST + 1))
    falls = np.zeros(2 * LARGEST + 1)
    falls[LARGEST:] = 2.0 ** -np.arange(1, LARGEST + 2)
    return np.concatenate([made, as_frequencies(falls)[None].astype(np.uint16)])


def _of_magnitudes(masses: Doubles) -> npt.NDArray[np.uint16]:
    both = np.concatenate([masses[:, :0:-1] / 2, masses[:, :1], masses[:, 1:] / 2], 1)
    return np.array([as_frequencies(each) for each in both], np.uint16)


@cache
def parts() -> npt.NDArray[np.uint32]:
    """Return frequencies of a refinement's symbols, with sum SCALE: [refinements, tables, magnitudes, 3].

    Symbols -1, 0 and 1: the finer magnitude less the coarser magnitude times SPLITS; for magnitude 0 the finer number.
    """
    mass = _masses()[0]
    levels = coarser(np.arange(mass.shape[1]))
    made = np.zeros((len(SPLITS), len(mass), MAGNITUDES, 3), np.uint32)
    for n, split in enumerate(SPLITS):
        so_far, child = np.minimum(levels[n], MAGNITUDES - 1), levels[n + 1] - split * levels[n]
        for magnitude in range(MAGNITUDES):
            of = [(so_far == magnitude) & (child == part) for part in (-1, 0, 1)]
            likely = np.array([mass[:, each].sum(1) + 1e-9 * each.any() for each in of])
            if magnitude == 0:
                likely = np.array([likely[2] / 2, likely[1], likely[2] / 2])
            likely /= likely.sum(0)
            told = np.where(likely > 0, np.maximum(1, np.rint(likely * SCALE)), 0).astype(np.int64)
            told[likely.argmax(0), np.arange(len(mass))] += SCALE - told.sum(0)
            made[n, :, magnitude] = told.T
    return made


@cache
def edges() -> npt.NDArray[np.uint32]:
    """Return frequencies of symbol -1 in the low 16 bits, of -1 and 0 together in the high 16: [..., magnitudes]."""
    first, second = np.cumsum(parts(), -1, np.uint32)[..., :2].transpose(3, 0, 1, 2)
    return np.ascontiguousarray(first | second << np.uint32(16))
