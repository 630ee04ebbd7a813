"""Slow reference of the calibrated codec, number by number, from the description in manthan.codec.cpu.klt."""

import math
import struct

import numpy as np

from manthan.codec.tables import levels

LARGEST, ESCAPE = 127, 255


class Writer:
    """rANS streams side by side, as numbers come. bits: of the symbols, as frequencies say."""

    def __init__(self):
        self.told = []

    def put(self, stream, frequency, before, word=None):
        self.told.append((stream, frequency, before, word))

    def put_symbol(self, stream, value, frequencies):
        symbol = value + LARGEST if -LARGEST <= value <= LARGEST else ESCAPE
        symbol = symbol if frequencies[symbol] else ESCAPE
        word = value & 0xFFFF if symbol == ESCAPE else None
        self.put(stream, int(frequencies[symbol]), int(frequencies[:symbol].sum()), word)

    def coded(self, streams):
        states, words = [1 << 16] * streams, []
        for stream, frequency, before, word in reversed(self.told):
            x = states[stream]
            words += [] if word is None else [word]
            if x >= frequency << 20:
                words.append(x & 0xFFFF)
                x >>= 16
            states[stream] = (x // frequency << 12) + before + x % frequency
        return states, words[::-1]


class Reader:
    """Undoes `Writer`."""

    def __init__(self, states, words):
        self.states, self.words = list(states), list(words)

    def take(self, stream, frequencies):
        x = self.states[stream]
        ends = np.cumsum(frequencies)
        symbol = int(np.searchsorted(ends, x & 4095, "right"))
        x = int(frequencies[symbol]) * (x >> 12) + (x & 4095) - int(ends[symbol] - frequencies[symbol])
        self.states[stream] = x << 16 | self.words.pop(0) if x < 1 << 16 else x
        return symbol

    def take_symbol(self, stream, frequencies):
        symbol = self.take(stream, frequencies)
        if symbol < ESCAPE:
            return symbol - LARGEST
        return struct.unpack("<h", struct.pack("<H", self.words.pop(0)))[0]

    def has_ended(self):
        return not self.words and set(self.states) == {1 << 16}


def streams_of(numbers):
    """Least power of 2 above the number of times that 2,048 numbers come after the first ones."""
    streams = 1
    while streams <= numbers // 2048:
        streams *= 2
    return streams


def joined(coded):
    states = [x for some, _ in coded for x in some]
    words = [x for _, some in coded for x in some]
    counts = [len(some) for _, some in coded]
    return struct.pack(f"<{len(counts)}I{len(states)}I{len(words)}H", *counts, *states, *words)


def parted(body, streams):
    counts = struct.unpack_from(f"<{len(streams)}I", body)
    at, made = 4 * len(streams), []
    states = struct.unpack_from(f"<{sum(streams)}I", body, at)
    words = struct.unpack_from(f"<{sum(counts)}H", body, at + 4 * sum(streams))
    for count, some in zip(counts, streams, strict=True):
        made.append(Reader(states[:some], words[:count]))
        states, words = states[some:], words[count:]
    return made


def magnitudes(finest):
    second = (finest + 1) // 3
    return [second // 4, second // 2, second, finest]


def table_of(table, shift):
    shape, width = divmod(int(table), len(levels.WIDTHS))
    return shape * len(levels.WIDTHS) + min(max(width - int(shift), 0), len(levels.WIDTHS) - 1)


def write_level(groups, numbers, shifts, level):
    """Numbers: whole ones of each group, [C, tokens]."""
    coded = []
    for group, q, by in zip(groups, numbers, shifts, strict=True):
        writer, streams = Writer(), streams_of(q.size)
        for place, ((component, token), value) in enumerate(np.ndenumerate(q)):
            now, table = magnitudes(abs(int(value))), table_of(group.tables[component], by[token])
            if level == 0:
                writer.put_symbol(place % streams, int(np.sign(value)) * now[0], levels.base()[table])
                continue
            before = now[level - 1]
            told = now[level] - levels.SPLITS[level - 1] * before
            told = -told if before == 0 and value < 0 else told
            likely = levels.parts()[level - 1, table, min(before, 3)]
            writer.put(place % streams, int(likely[told + 1]), int(likely[: told + 1].sum()))
        coded.append(writer.coded(streams))
    return joined(coded)


def read_level(body, groups, numbers, shifts, level):
    """Return the numbers of this level, given those of the level before."""
    made, readers = [], parted(body, [streams_of(q.size) for q in numbers])
    for group, q, by, reader in zip(groups, numbers, shifts, readers, strict=True):
        found = np.zeros_like(q)
        streams = len(reader.states)
        for place, ((component, token), value) in enumerate(np.ndenumerate(q)):
            table = table_of(group.tables[component], by[token])
            if level == 0:
                found[component, token] = reader.take_symbol(place % streams, levels.base()[table])
                continue
            told = reader.take(place % streams, levels.parts()[level - 1, table, min(abs(int(value)), 3)]) - 1
            magnitude = levels.SPLITS[level - 1] * abs(int(value))
            found[component, token] = told if value == 0 else np.sign(value) * (magnitude + told)
        assert reader.has_ended()
        made.append(found)
    return made


def scale_of(shift):
    return round(2.0 ** (int(shift) / 3) * 256)


def places(group, q, by, k, level):
    """Whole numbers [tokens, C]: where numbers come back."""
    made = np.zeros(q.shape[::-1], np.int64)
    for (component, token), value in np.ndenumerate(q):
        magnitude, table = abs(int(value)), table_of(group.tables[component], by[token])
        inside = int(levels.centres()[level, table, min(magnitude, 3)])
        made[token, component] = (
            np.sign(value) * (magnitude * levels.STEPS[level] * 16 + inside) * scale_of(by[token] + k)
        )
    return made


def near(groups, numbers, shifts, k, kinds, rope, positions):
    """Whole numbers of what comes back at the finest lossy level, and their binary digits, by group."""
    made = []
    for group, q, by in zip(groups, numbers, shifts, strict=True):
        runs = group.deviations.reshape(group.place[1] * kinds, -1)
        points = np.repeat([20 - math.frexp(run.max())[1] for run in runs], runs.shape[1])
        matrix = np.rint(group.transform.astype(float) * (group.scale * (2.0 ** (points + 12.0) / 4096))).astype(
            np.int64
        )
        mean = np.rint(group.mean * 2.0 ** (points + 12.0)).astype(np.int64)
        x = (places(group, q, by, k, 3) @ matrix + mean) >> 12
        x = x.reshape(len(x), group.place[1], kinds, group.place[3], group.head_dim).transpose(1, 2, 3, 0, 4).copy()
        if rope:
            first, second = rope.pairs
            angles = positions[:, None] * np.array(rope.frequencies)
            cos, sin = (np.rint(f(angles) * rope.scale * 2**14).astype(np.int64) for f in (np.cos, np.sin))
            keys = x[:, 0].copy()
            x[:, 0][first] = (keys[first] * cos - keys[second] * sin) >> 14
            x[:, 0][second] = (keys[second] * cos + keys[first] * sin) >> 14
        made.append((x, points.reshape(group.place[1], kinds, group.place[3], group.head_dim)[..., 0]))
    return made


def cell_of(number, wide, point):
    """Logarithm of the cell, the expected cell and the table."""
    far = abs(int(number))
    lattice = far.bit_length() - 8
    size = max(int(wide) // 3 - 1, lattice, 0)
    cell = (far + (1 << size >> 1) if lattice >= size else far) >> size
    return size, -1 - cell if number < 0 else cell, min(max(int(wide) - 3 * size + 24, 0), len(levels.WIDTHS) - 1)


def write_exact(bits, near_, points, wide):
    """Of one layer: all [vectors, tokens, head_dim], points [vectors]."""
    writer, streams = Writer(), streams_of(bits.size)
    for place, ((vector, token, i), word) in enumerate(np.ndenumerate(bits)):
        point = int(points[vector])
        size, expected, table = cell_of(near_[vector, token, i], wide[vector, token, i], point)
        sign, exponent, mantissa = int(word) >> 15, int(word) >> 7 & 255, int(word) & 127
        whole = (128 | mantissa) * 2.0 ** (exponent - 134)
        cell = math.floor(whole * 2.0 ** (point - size)) if exponent else 0
        writer.put_symbol(place % streams, (-1 - cell if sign else cell) - expected, levels.cells()[table])
        raw = 7 if cell == 0 else max(8 - cell.bit_length(), 0)
        if cell == 0:
            writer.put_symbol(place % streams, size - point + 126 - exponent, levels.cells()[levels.FALLING])
        if raw:
            writer.put(place % streams, 4096 >> raw, (mantissa & (1 << raw) - 1) * (4096 >> raw))
    return writer.coded(streams)
