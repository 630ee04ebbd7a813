"""Damaged blocks: none is accepted with other numbers, raises anything but WireError or allocates wildly."""

import random
import tracemalloc

import numpy as np
import xxhash

from manthan.codec import get_codec, wire

MUTATIONS = 100_000
FORGERIES = 20_000


def blocks():
    """Valid blocks of several codecs and shapes, as bytes."""
    shapes = [
        ("lloyd3", 1, 1, 4, 32),
        ("lloyd3", 1, 1, 4, 32),
        ("lloyd3", 2, 2, 8, 64),
        ("k4v3", 1, 2, 3, 80),
    ]
    made = []
    for seed, (name, layers, heads, tokens, head_dim) in enumerate([*shapes, ("lloyd3-unrotated", 1, 1, 1, 128)]):
        key, fingerprint = bytes([seed]) * 32, bytes([seed % 3]) * 16
        header = wire.BlockHeader(name, key, fingerprint, layers, heads, tokens, head_dim)
        codec, rng = get_codec(name, head_dim), np.random.default_rng(seed)
        keys, values = rng.standard_normal((2, header.vectors, head_dim), np.float32)
        made.append(bytes(wire.pack(header, codec.encode(keys, "key"), codec.encode(values, "value"))))
    return made


def flip_bits(rng, data, _):
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def change_bytes(rng, data, _):
    for _ in range(rng.choice([1, 2, 4, 16])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return data


def truncate(rng, data, _):
    return data[: rng.randrange(len(data))]


def extend(rng, data, _):
    return data + rng.randbytes(rng.choice([1, 1, 16, 160, 999]))


def splice(rng, data, other):
    cut = rng.randrange(len(data) + 1)
    return data[:cut] + other[rng.choice([cut, rng.randrange(len(other) + 1)]) :]


def swap_halves(rng, data, _):
    cut = rng.choice([len(data) // 2, 160, rng.randrange(1, len(data))])
    return data[cut:] + data[:cut]


def overwrite_header(rng, data, other):
    at = rng.randrange(160)
    length = rng.choice([1, 2, 4, 8, 16])
    fill = rng.choice([b"\0" * 16, b"\xff" * 16, rng.randbytes(16), bytes(other[at : at + 16])])
    data[at : at + length] = fill[:length]
    return data


def repeat_a_piece(rng, data, _):
    at, length = rng.randrange(len(data)), rng.choice([1, 16, 50])
    return data[: at + length] + data[at:]


MUTATORS = [flip_bits, change_bytes, truncate, extend, splice, swap_halves, overwrite_header, repeat_a_piece]


def test_no_mutation_is_accepted():
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng, valid = random.Random(seed), blocks()
    accepted, causes = 0, set()
    tracemalloc.start()
    for i in range(MUTATIONS):
        mutate = rng.choice(MUTATORS)
        data = bytes(mutate(rng, bytearray(rng.choice(valid)), rng.choice(valid)))
        try:
            wire.parse(data)
        except wire.WireError as refusal:
            causes.add(refusal.cause)
        else:
            assert data in valid, f"seed {seed}, mutation {i} by {mutate.__name__} was accepted"
            accepted += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert accepted < MUTATIONS // 20, "most mutations must change something"
    assert causes >= {"truncated", "trailing", "magic", "version", "checksum"}
    assert peak < 2_000_000


def test_forged_headers_are_consistent_or_refused():
    """With the checksum made right again, only sizes that fit the payload get through."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng, valid = random.Random(seed), blocks()
    causes = set()
    tracemalloc.start()
    for i in range(FORGERIES):
        data = overwrite_header(rng, bytearray(rng.choice(valid)), rng.choice(valid))
        data[8:16] = xxhash.xxh3_64_intdigest(bytes(data[:8] + data[16:])).to_bytes(8, "little")
        try:
            found = wire.parse(data)
        except wire.WireError as refusal:
            causes.add(refusal.cause)
        else:
            header, where = found.header, f"seed {seed}, forgery {i}"
            codec = get_codec(header.codec, header.head_dim)
            assert found.key_codes.size == codec.encoded_nbytes(header.vectors, "key"), where
            assert found.value_codes.size == codec.encoded_nbytes(header.vectors, "value"), where
            assert wire.block_nbytes(header) == len(data), where
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert causes >= {"size", "codec", "version", "truncated"}
    assert peak < 2_000_000
