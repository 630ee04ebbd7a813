"""A profile of blocks as they go cold: the process that makes it, and ranks that each make a part."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import profiles
import pytest

from manthan.codec.base import Dtype
from manthan.codec.calibration import MARGIN, ProfileBuilder
from manthan.codec.cpu.numbers import as_numbers
from manthan.codec.model import ModelFacts
from manthan.codec.profile import Profile, ProfileInfo
from manthan.codec.registry import get_codec
from manthan.manager.calibration.traffic import ALLOWANCE, ENOUGH, MORE, Job, gathered, made

TOKENS = 16
INFO = ProfileInfo("made-up", profiles.LAYERS, profiles.HEADS, profiles.HEAD_DIM, profiles.ROPE, "none")


def job(path: Path, **changes) -> Job:
    whole = Job(INFO, TOKENS, Dtype.BFLOAT16, "klt-8x", str(path), profiles.HEADS, tokens=600)
    return replace(whole, **changes)


def block(number: int, heads: slice = slice(None)) -> bytes:
    keys, values, positions = profiles.kv(TOKENS, seed=number, first=16 * number)
    both = np.stack([keys, values])[:, :, heads]
    return int(positions[0]).to_bytes(8, "little") + as_numbers(both, Dtype.BFLOAT16).tobytes()


def test_a_job_goes_through_a_line_of_json(tmp_path):
    one = job(tmp_path / "p", rank=1, ranks=2, run="x")
    line = one.to_json()
    assert line.count(b"\n") == 1
    assert Job.of_json(line) == one
    plain = replace(one, info=replace(INFO, rope=None))
    assert Job.of_json(plain.to_json()) == plain
    assert one.enough == 600
    assert replace(one, tokens=1).enough == 8 * profiles.SIZE


def test_blocks_are_read_until_there_are_enough(tmp_path):
    """The same as a builder makes of the same numbers."""
    answers = io.BytesIO()
    builder = gathered(job(tmp_path / "p"), io.BytesIO(b"".join(map(block, range(60)))), answers)
    assert builder is not None
    assert builder.tokens >= 600
    said = answers.getvalue()
    assert said == MORE * (len(said) - 1) + ENOUGH
    again = ProfileBuilder(INFO)
    for number in range(len(said)):
        keys, values, positions = profiles.kv(TOKENS, seed=number, first=16 * number)
        for layer in range(profiles.LAYERS):
            numbers = (as_numbers(x[layer].copy(), Dtype.BFLOAT16) for x in (keys, values))
            again.add(layer, *numbers, positions)
    path = made(job(tmp_path / "p"), builder)
    assert path == tmp_path / "p"
    assert Profile.load(path).digest == again.finish(presets={"klt-8x": 6.12}).digest


def test_an_engine_that_ends_first_leaves_nothing(tmp_path):
    assert gathered(job(tmp_path / "p"), io.BytesIO(block(0) + block(1)[:-1]), io.BytesIO()) is None


def test_ranks_make_one_profile_of_their_parts(tmp_path):
    """Whoever is last joins them; each rank's part is what the rank would have alone."""
    parts = []
    for rank in range(2):
        mine = job(tmp_path / "p", info=replace(INFO, heads=1), rank=rank, ranks=2, run="r")
        heads = slice(rank, rank + 1)
        builder = gathered(mine, io.BytesIO(b"".join(block(n, heads) for n in range(60))), io.BytesIO())
        parts.append(made(mine, builder))
    assert parts == [None, tmp_path / "p"]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    profile = Profile.load(tmp_path / "p")
    assert (profile.info.heads, len(profile.ranks), profile.info.text) == (2, 2, "traffic")
    assert profile.info.ratios["klt-8x"] == pytest.approx(6 * MARGIN * ALLOWANCE, abs=0.06)
    for rank in range(2):
        cut = profile.for_rank(rank, 2)
        codec = get_codec("klt-8x", profiles.HEAD_DIM, ModelFacts(profiles.ROPE, cut))
        assert codec.name == "klt-8x"
        assert cut.layers[0].keys.mean.shape == (profiles.HEAD_DIM,)
    whole = profiles.built().layers[0].keys.mean
    joined = np.concatenate([profile.ranks[rank][0].keys.mean for rank in range(2)])
    assert np.abs(joined - whole).max() < 3


def test_the_process_says_where_the_profile_is(tmp_path):
    sent = job(tmp_path / "p").to_json() + b"".join(map(block, range(60)))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "manthan.manager.calibration.traffic"],
        input=sent,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    answers, line = done.stdout.split(ENOUGH)
    assert set(answers) == set(MORE)
    assert json.loads(line) == {"path": str(tmp_path / "p")}
    assert Profile.load(tmp_path / "p").info.tokens >= 600


def test_the_process_says_why_there_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    sent = job(tmp_path / "file" / "p").to_json() + b"".join(map(block, range(60)))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "manthan.manager.calibration.traffic"],
        input=sent,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert "error" in json.loads(done.stdout.split(ENOUGH)[1])
