"""Calibrated codecs: exact at the end, decoded from every prefix of parts, equal to a slow reference to the byte."""

import itertools
import random
from dataclasses import replace
from functools import cache

import klt_reference as slow
import numpy as np
import profiles
import pytest
import xxhash
from kv import rope

from manthan.codec import wire
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.block import BlockFormat, BlockShape, sections
from manthan.codec.calibration import ProfileBuilder
from manthan.codec.cpu import klt
from manthan.codec.cpu.klt import EXACT, PRESETS
from manthan.codec.cpu.numbers import FORMS, as_floats, as_numbers, table
from manthan.codec.cpu.rans import Coder, Rows
from manthan.codec.errors import CodecError, DamagedError, NonFiniteError, ProfileError, SizeError, WireError
from manthan.codec.model import ModelFacts
from manthan.codec.profile import LEVELS, ProfileInfo
from manthan.codec.registry import codec_names, get_codec, needs_profile
from manthan.codec.tables import levels

KEY = b"k" * 32


@cache
def profile(metric=True):
    return profiles.built(metric=metric)


def form(name="klt-exact", dtype=Dtype.BFLOAT16, tokens=16, metric=True):
    shape = BlockShape(profiles.LAYERS, profiles.HEADS, tokens, profiles.HEAD_DIM, dtype)
    return BlockFormat(name, shape, bytes(16), facts=ModelFacts(profiles.ROPE, profile(metric)))


def numbers(seed=5, dtype=Dtype.BFLOAT16, tokens=16, first=64, scale=1.0):
    keys, values, _ = profiles.kv(tokens, seed=seed, first=first)
    return [as_numbers((np.float32(scale) * x).astype(np.float32), dtype) for x in (keys, values)]


def encoded(format_, x, exact=4, first=64):
    return format_.encode(*x, key=KEY, first_token=first, exact=exact)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def filled(body):
    return body.ljust(wire.body_nbytes(len(body)), b"\0")


def noise(x, back):
    return max(
        float(np.square(as_floats(a) - as_floats(b)).mean() / as_floats(a).var()) for a, b in zip(x, back, strict=True)
    )


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize(("exact", "tokens"), [(0, 16), (4, 16), (0, 1), (5, 31)])
def test_every_prefix_of_parts_decodes_and_the_last_is_exact(dtype, exact, tokens):
    of, x = form(dtype=dtype, tokens=tokens), numbers(dtype=dtype, tokens=tokens)
    block = encoded(of, x, exact)
    ends = wire.part_ends(block)
    assert len(ends) == EXACT + 1
    found = [noise(x, of.decode(block[:end], key=KEY)) for end in ends]
    assert all(after < 0.55 * before for before, after in itertools.pairwise(found))
    assert same(x, of.decode(block, key=KEY))


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize(("exact", "tokens"), [(0, 16), (4, 16), (0, 64), (5, 31)])
def test_fp8_is_exact_and_smaller_than_it_was(dtype, exact, tokens):
    of, x = form(dtype=dtype, tokens=tokens), numbers(dtype=dtype, tokens=tokens)
    block = encoded(of, x, exact)
    ends = wire.part_ends(block)
    found = [
        np.square(table(dtype)[np.stack(x)] - table(dtype)[np.stack(of.decode(block[:end], key=KEY))]).mean()
        for end in ends
    ]
    assert all(after < before for before, after in itertools.pairwise(found))
    assert len(found) == EXACT + 1
    assert same(x, of.decode(block, key=KEY))
    assert block.size < of.shape.nbytes / (1.1 if dtype is Dtype.FLOAT8_E4M3 else 1.05)
    assert block.size <= of.max_nbytes(exact)


@pytest.mark.parametrize("dtype", FORMS)
def test_fp8_far_from_its_prediction_is_exact(dtype):
    """The largest numbers, the smallest, and both zeros."""
    of, finite = form(dtype=dtype), np.flatnonzero(np.isfinite(table(dtype))).astype(np.uint8)
    for at, far in enumerate(finite[np.r_[0:9, 60, 118:136, -9:0]]):
        x = numbers(dtype=dtype)
        x[at % 2][1, 1, 9, 7] = far
        assert same(x, of.decode(encoded(of, x), key=KEY))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_how_many_parts_are_written_and_all_read_each_other(name):
    x, whole = numbers(), encoded(form(), numbers())
    block = encoded(form(name), x)
    ends, level = wire.part_ends(block), LEVELS[name]
    assert len(ends) == level + 1
    head = 128 + 2 * 64  # names differ
    assert block[head : ends[0]].tobytes() == whole[head : ends[0]].tobytes()
    bodies = [part.refinements[: level or 0] for part in (wire.parse(block), wire.parse(whole))]
    assert [b.tobytes() for b in bodies[0]] == [b.tobytes() for b in bodies[1]]


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_the_bytes_are_those_of_the_slow_reference(scale):
    of, x = form(), numbers(scale=scale)
    block = wire.parse(encoded(of, x))
    codec, section = get_codec("klt-exact", profiles.HEAD_DIM, of.facts), block.header.sections[1]
    groups, positions = profile().groups, np.arange(68, 80)
    base = block.payloads[1]
    begin = 4 + len(groups) * 12 // 2
    shifts = np.array([int(byte) >> by & 15 for byte in base[4:begin] for by in (0, 4)]).reshape(-1, 12) - 8
    assert len(set(shifts[0].tolist())) > 2
    k = int(base[1])
    assert (k > 0) == (scale > 1)

    q = [np.zeros((g.mean.size, 12), np.int64) for g in groups]
    bodies = [base[begin:].tobytes(), *(body.tobytes() for body in block.refinements)]
    for level in range(EXACT):
        q = slow.read_level(bodies[level], groups, q, shifts, level)
        places = [slow.places(g, some, by, k, level) for g, some, by in zip(groups, q, shifts, strict=True)]
        fast = [
            klt.places(g, some.astype(np.int16), by, k, level).T for g, some, by in zip(groups, q, shifts, strict=True)
        ]
        assert same(places, fast)
        rows = [
            p.astype(np.float32) @ (g.inverse * np.float32(1 / 4096)) + g.mean
            for g, p in zip(groups, places, strict=True)
        ]
        back = codec.ungrouped(rows)
        back[:, 0] = profiles.ROPE.turn(back[:, 0], positions)
        found = codec.decode_parts(base, block.refinements[:level], section, positions)
        np.testing.assert_allclose(as_floats(found), back.swapaxes(0, 1), rtol=2**-8, atol=1e-5)
    again = [slow.write_level(groups, q, shifts, level) for level in range(EXACT)]
    assert [again[0], *map(filled, again[1:])] == bodies[:EXACT]

    near, points = map(np.concatenate, zip(*slow.near(groups, q, shifts, k, 2, profiles.ROPE, positions), strict=True))
    errors = np.concatenate(
        [
            g.errors.astype(int).reshape(g.place[1], 2 * profiles.HEADS, 1, -1) + by[:, None] + k
            for g, by in zip(groups, shifts, strict=True)
        ]
    )
    bits = np.stack(x)[:, :, :, 4:].swapaxes(0, 1).reshape(near.shape[0], -1, 12, profiles.HEAD_DIM)
    near, points = near.reshape(bits.shape), points.reshape(profiles.LAYERS, -1)
    coded = [slow.write_exact(*told) for told in zip(bits, near, points, errors, strict=True)]
    assert bodies[EXACT] == filled(b"\1\0\0\0" + xxhash.xxh3_64_digest(bits.tobytes())[::-1] + slow.joined(coded))


def test_numbers_that_are_not_the_encoder_s_are_refused(monkeypatch):
    """A machine that computes another way would find another number near, and does not pass it off as exact."""
    of, x = form(), numbers()
    block, near = encoded(of, x), klt.KltCodec._near
    monkeypatch.setattr(klt.KltCodec, "_near", lambda *told: near(*told) + 64)
    with pytest.raises(DamagedError, match=r"not those that were encoded|do not end where they should"):
        of.decode(block, key=KEY)
    assert noise(x, of.decode(block[: wire.part_ends(block)[-2]], key=KEY)) < 0.1


def test_a_base_and_refinements_take_little_more_than_one_rate():
    """The finest lossy level, against its whole numbers in one row a group with a table for each number."""
    of = form("klt-5x")
    groups, base = profile().groups, Coder(levels.base())
    wider = round(3 * np.log2(levels.STEPS[0] / levels.STEPS[-1]))
    one = parts = 0
    for seed in range(4):
        block = wire.parse(encoded(of, numbers(seed=seed), exact=0))
        code = block.payloads[0]
        begin = 4 + len(groups) * 16 // 2
        assert code[1] == 0
        j = np.stack([code[4:begin] & 15, code[4:begin] >> 4], 1).ravel().astype(np.int64).reshape(-1, 16) - 8
        q = [np.zeros((g.mean.size, 16), np.int64) for g in groups]
        for level, body in enumerate([code[begin:], *block.refinements]):
            q = [some.astype(np.int16) for some in slow.read_level(body.tobytes(), groups, q, j, level)]
            parts += body.size
        for g, some, by in zip(groups, q, j, strict=True):
            shape, width = np.divmod(g.tables.astype(np.int64)[:, None], len(levels.WIDTHS))
            tables = shape * len(levels.WIDTHS) + np.clip(width - by + wider, 0, len(levels.WIDTHS) - 1)
            rows = Rows(tables.reshape(1, -1).astype(np.uint8), 1, klt.streams_of(some.size))
            one += base.write(some.ravel(), lambda _, rows=rows: rows, np.empty(4 * some.size, np.uint8))[1]
    assert one < parts < 1.06 * one


def test_tokens_that_are_looked_at_have_finer_steps():
    """Calibration learns it from gradients: those of made-up tokens with large first numbers are large."""
    info = ProfileInfo("made-up", 1, 1, 32, None, "fisher")
    builder, rng = ProfileBuilder(info), np.random.default_rng(0)
    for _ in range(8):
        x = rng.standard_normal((2, 1, 300, 32)).astype(np.float32)
        builder.add(0, np.arange(300), *x)
        builder.weigh_tokens([np.exp(2.0 * x[0, 0, 4:200, 0])])
    builder.weigh(0, np.eye(32), np.eye(32))
    (group,) = builder.finish().groups
    x = np.zeros((3, 64), np.float32)
    x[:, 0] = -1.5, 0, 1.5
    j = klt.shifts_of(group, x)
    assert j[0] - j[1] == pytest.approx(1.5 * 2.0 * 0.5 * 3 / np.log(2), abs=1.5)
    assert j[0] > j[1] > j[2]


def test_numbers_of_any_size_are_exact_or_the_block_is_refused():
    of = form()
    for at, far in enumerate([0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x3F80, 0x4900, 0xC700, 0x7F7F]):
        x = numbers()
        x[at % 2][1, 1, 9, 7] = far
        try:
            block = encoded(of, x)
        except NonFiniteError as refused:
            assert far == 0x7F7F
            assert "too far from the profile" in str(refused)  # noqa: PT017
        else:
            assert same(x, of.decode(block, key=KEY))
            assert block.size <= of.max_nbytes(4)
    x[0][1, 1, 9, 7] = 0x7FC0
    with pytest.raises(NonFiniteError, match="holds a NaN"):
        encoded(of, x)


def test_numbers_far_from_the_profile_take_coarser_steps_until_they_fit():
    for name in PRESETS:
        of, x = form(name, metric=False), numbers(scale=30.0)
        block = encoded(of, x)
        assert block.size <= of.max_nbytes(4)
        assert wire.parse(block).payloads[1][1] > 0
        assert LEVELS[name] < 3 or noise(x, of.decode(block, key=KEY)) < 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_blocks_take_about_the_expected_bytes(name):
    of = form(name)
    sizes = [encoded(of, numbers(seed), 0).size for seed in range(8)]
    assert np.mean(sizes) == pytest.approx(of.expected_nbytes(0), rel=0.12)
    assert max(sizes) <= of.max_nbytes(0)


@pytest.mark.parametrize(
    "change",
    [{"layers": 2}, {"first_layer": 1}, {"heads": 3}, {"kind": SectionKind.KEYS}, {"head_dim": 64, "heads": 1}],
)
def test_a_section_that_the_profile_is_not_of(change):
    codec = get_codec("klt-5x", profiles.HEAD_DIM, form().facts)
    section = Section(SectionKind.BOTH, "klt-5x", profiles.LAYERS, 16, profiles.HEADS, profiles.HEAD_DIM)
    with pytest.raises(SizeError, match="is not of the profile of made-up"):
        codec.decode(np.array([1, 0, 0, 0], np.uint8), replace(section, **change), np.arange(16))


def test_a_block_of_keys_and_values_apart_is_refused():
    """Earlier versions wrote such blocks by these names. The digest of a profile differs too: see test_profile.py."""
    of = form("klt-8x")
    apart = tuple(replace(section, codec="klt-8x") for section in sections("wht-5x", of.shape, 4))
    header = replace(of.header(KEY, 64, 4), sections=apart)
    sizes = [2 * 2 * apart[0].vectors * apart[0].head_dim, 160, 160]
    block = np.zeros(wire.block_nbytes(header, sizes), np.uint8)
    block[: header.nbytes] = wire.head(header, sizes)
    with pytest.raises(SizeError, match="are not a block of"):
        of.decode(wire.seal(block), key=KEY)


def test_names():
    assert [name for name in codec_names() if needs_profile(name)] == list(PRESETS) == list(LEVELS)
    with pytest.raises(ProfileError, match=r"klt-8x needs a profile of the model: run `manthan calibrate MODEL`\."):
        get_codec("klt-8x", profiles.HEAD_DIM)


@pytest.mark.parametrize(
    ("rope", "head_dim", "ranks", "sentence"),
    [
        (None, 32, 1, "was made for another RoPE"),
        (replace(profiles.ROPE, scale=1.5), 32, 1, "was made for another RoPE"),
        (replace(profiles.ROPE, interleaved=True), 32, 1, "was made for another RoPE"),
        (profiles.ROPE, 64, 1, "is for heads of 32 numbers, not 64"),
        (profiles.ROPE, 32, 2, "is for 2 tensor-parallel ranks"),
    ],
)
def test_a_profile_that_does_not_fit(rope, head_dim, ranks, sentence):
    made = profile() if ranks == 1 else profiles.built(ranks=ranks)
    with pytest.raises(ProfileError, match=sentence):
        get_codec("klt-5x", head_dim, ModelFacts(rope, made))


def test_latents_and_heads_that_are_too_many_for_one_group(monkeypatch):
    made = profiles.built_of_latents()
    assert [group.place for group in made.groups] == [(0, 2, 0, 4), (2, 1, 0, 4)]
    shape = BlockShape(profiles.LAYERS, 1, 16, 32, latent=profiles.LATENT)
    of = BlockFormat("klt-exact", shape, bytes(16), facts=ModelFacts(None, made))
    rng = np.random.default_rng(1)
    x = as_numbers(rng.standard_normal((profiles.LAYERS, 1, 16, 32)).astype(np.float32), Dtype.BFLOAT16)
    latents = as_numbers(profiles.latents(16, seed=3), Dtype.BFLOAT16)
    block = of.encode(x, latents, key=KEY, first_token=0, exact=4)
    assert same((x, latents), of.decode(block, key=KEY))
    assert noise((latents,), of.decode(block[: wire.part_ends(block)[0]], key=KEY)[1:]) < 0.2

    monkeypatch.setattr("manthan.codec.calibration.TOGETHER", (4, 64))
    made = profiles.built(ranks=1)
    assert [group.place for group in made.groups] == [(layer, 1, head, 1) for layer in range(3) for head in (0, 1)]
    split = BlockFormat("klt-exact", form().shape, bytes(16), facts=ModelFacts(profiles.ROPE, made))
    block = encoded(split, numbers())
    assert same(numbers(), split.decode(block, key=KEY))
    assert noise(numbers(), split.decode(block[: wire.part_ends(block)[0]], key=KEY)) < 0.2
    ranks = profiles.built(ranks=2)
    assert [len(groups) for groups in ranks.ranks] == [3, 3]
    assert ranks.for_rank(1, 2).groups == ranks.ranks[1]


def test_neighbours_as_pairs_and_a_scale_of_rope_are_exact():
    turned = rope(profiles.HEAD_DIM, interleaved=True)
    turned = type(turned)(turned.frequencies, 1.2, True)
    of = BlockFormat("klt-exact", form().shape, bytes(16), facts=ModelFacts(turned, profiles.built(rope=turned)))
    keys, values, _ = profiles.kv(16, seed=5, first=64, rope=turned)
    x = [as_numbers(each, Dtype.BFLOAT16) for each in (keys, values)]
    block = encoded(of, x)
    assert same(x, of.decode(block, key=KEY))
    assert wire.parse(block).refinements[-1].size < 0.8 * 2 * 2 * keys.size * 12 / 16


def fuzz(mutations, dtype=Dtype.BFLOAT16):
    """Nothing damaged is accepted: a refinement goes with those behind it, a base is refused.

    mutations: number for each part, the base and each refinement.
    """
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng, of = random.Random(seed), form(dtype=dtype)
    valid = [encoded(of, numbers(seed, dtype), exact).tobytes() for seed, exact in ((1, 4), (2, 0))]
    ends = [wire.part_ends(block) for block in valid]
    levels = [[of.decode(block[:end], key=KEY) for end in each] for block, each in zip(valid, ends, strict=True)]
    kept = set()
    for part in list(range(EXACT + 1)) * mutations:
        which = rng.randrange(2)
        block, parts = valid[which], [0, *ends[which]]
        data = bytearray(block)
        at, end = rng.randrange(parts[part], parts[part + 1]), parts[part + 1]
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:end] = rng.randbytes(end - at)
        elif kind == 3:
            other = rng.choice(valid)
            data[at:end] = other[at:end]
        else:
            data[at:at] = rng.randbytes(rng.choice([1, 16, 64]))
        data = bytes(data)
        good = sum(data[:e] == block[:e] for e in ends[which])
        try:
            back = of.decode(data, key=KEY)
        except WireError:
            assert good == 0
        else:
            if data[: ends[1 - which][0]] == valid[1 - which][: ends[1 - which][0]]:
                which, good = 1 - which, sum(data[:e] == valid[1 - which][:e] for e in ends[1 - which])
            assert same(back, levels[which][good - 1])
        kept.add(good)
    assert kept == set(range(EXACT + 2))


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT8_E4M3])
def test_no_mutation_is_accepted(dtype):
    fuzz(80, dtype)


@pytest.mark.slow
def test_none_of_many_mutations_is_accepted():
    fuzz(20_000)


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT8_E4M3])
def test_damaged_codes_behind_a_good_checksum_are_refused_or_numbers_of_the_shape(dtype):
    of, rng = form(dtype=dtype), random.Random(3)
    block = wire.parse(encoded(of, numbers(dtype=dtype)))
    codec, section = get_codec("klt-exact", profiles.HEAD_DIM, of.facts), block.header.sections[1]
    for _ in range(300):
        parts = [bytearray(block.payloads[1].tobytes()), *(bytearray(body.tobytes()) for body in block.refinements)]
        which = rng.randrange(len(parts))
        for _ in range(rng.choice([1, 3])):
            parts[which][rng.randrange(len(parts[which]))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            del parts[which][rng.randrange(len(parts[which])) :]
        base, *others = (np.frombuffer(bytes(part), np.uint8) for part in parts)
        try:
            back = codec.decode_parts(base, others, section, np.arange(68, 80))
        except CodecError as refused:
            assert str(refused).endswith(".")  # noqa: PT017 either is right
        else:
            assert (back.shape, back.dtype) == (section.shape, dtype.numpy)
    with pytest.raises(SizeError, match="is not of the profile"):
        codec.decode(base, replace(section, layers=2), np.arange(68, 80))
