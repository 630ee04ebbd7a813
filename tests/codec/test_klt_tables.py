"""What a GPU is given of a profile: the same tables and transforms that the CPU works with."""

import numpy as np
import profiles
import pytest

torch = pytest.importorskip("torch")

from manthan.codec.cpu.rans import Coder  # noqa: E402
from manthan.codec.gpu.klt_tables import BUCKET, ESCAPED, RowTables, Transforms  # noqa: E402
from manthan.codec.profile import PRESETS  # noqa: E402
from manthan.codec.tables.frequencies import ESCAPE, SCALE  # noqa: E402

PROFILE = profiles.built()
CPU = torch.device("cpu")


def bases():
    return [*(layer.keys for layer in PROFILE.layers), *(layer.values for layer in PROFILE.layers)]


def components():
    return [(row, component) for row in range(2 * profiles.LAYERS) for component in range(0, profiles.SIZE, 7)]


@pytest.mark.parametrize("preset", PRESETS)
def test_each_symbol_is_encoded_as_the_cpu_does(preset):
    tables, coder = RowTables.of(PROFILE, preset, CPU), Coder(PROFILE.frequencies)
    words = tables.encoding.numpy().view(np.uint32)
    assert np.array_equal(words[-SCALE + 1 :], np.minimum(2**32 // np.arange(1, SCALE), 2**32 - 1))
    for row, component in components():
        start = 4 * int(tables.of_components[0, row, component])
        found = words[start : start + 256]
        right = coder._encoding[bases()[row].tables[preset][component]].copy()
        escaped = right & 0xFFFF == 0
        escaped[ESCAPE] = True
        right = np.where(escaped, right[ESCAPE], right)
        assert np.array_equal(found & 4095, right & 0xFFFF)
        assert np.array_equal(found >> 12 & 4095, right >> 16)
        assert np.array_equal(found >= ESCAPED, escaped)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_slot_is_decoded_as_the_cpu_does(preset):
    tables, coder = RowTables.of(PROFILE, preset, CPU), Coder(PROFILE.frequencies)
    data, slots = tables.decoding.numpy(), np.arange(SCALE)
    for row, component in components():
        start = 16 * int(tables.of_components[1, row, component])
        buckets = data[start:].view(np.uint8)[:512].view(np.uint16)
        ranks = data[tables.pool + BUCKET * buckets[slots // BUCKET].astype(int) + slots % BUCKET]
        found = data[start + 512 : start + 512 + 4 * (int(ranks.max()) + 1)].view(np.uint32)[ranks]
        right = coder._decoding[bases()[row].tables[preset][component]]
        assert np.array_equal(found >> 24, right >> 24)
        assert np.array_equal(found & 4095, right >> 12 & 4095)
        assert np.array_equal(slots - (found >> 12 & 4095), right & 4095)


def test_what_kernels_read_lies_in_its_order():
    parts = [*RowTables.of(PROFILE, "klt-8x", CPU)[:3], *Transforms.of(PROFILE, "klt-8x", CPU)]
    assert all(part.is_contiguous() for part in parts)


def test_the_transforms_are_the_profile_s():
    """Integers of the same numbers, but for one in some hundreds, and numbers of the same integers to 11 bits."""
    made = Transforms.of(PROFILE, "klt-5x", CPU)
    x = torch.from_numpy(
        np.stack(
            [
                part.transpose(0, 2, 1, 3).reshape(profiles.LAYERS, -1, profiles.SIZE)
                for part in profiles.kv(256, rope=None)[:2]
            ]
        )
        .reshape(6, -1, profiles.SIZE)
        .copy()
    )
    q = (((x - made.mean[:, None]) * made.gain[:, None]).half().float() @ made.forward.float()).round()
    right = torch.stack(
        [
            torch.from_numpy(np.rint((rows.numpy() - basis.mean) @ (basis.forward / basis.steps["klt-5x"])))
            for rows, basis in zip(x, bases(), strict=True)
        ]
    )
    assert (q != right).float().mean() < 0.01
    assert (q - right).abs().max() <= 1
    back = q @ made.inverse.float() * made.gain_back[:, None] + made.mean[:, None]
    wanted = torch.stack(
        [
            torch.from_numpy(rows.numpy() @ (basis.inverse * np.float32(basis.steps["klt-5x"])) + basis.mean)
            for rows, basis in zip(q, bases(), strict=True)
        ]
    )
    assert (back - wanted).abs().max() < 2**-11 * (wanted - made.mean[:, None]).abs().max()
