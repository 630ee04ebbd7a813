"""Codecs that take a profile, in a real engine: sessions return; and profiles that are made while it serves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from manthan.codec.profile import Profile

SCRIPT = Path(__file__).parents[1] / "helpers" / "exact_sessions.py"


def run(what: list[str], codec: dict[str, Any], cache: Path, **more: Any) -> dict[str, Any]:
    """What became of sessions of an engine with this codec; cache: where it looks for profiles, and puts them."""
    manthan = {
        "min_tokens": 64,
        "idle_after_s": 3600,
        "codec": {"sink_tokens": 4} | codec,
        "cold_store": {"max_bytes": "64MiB"},
    }
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    job = json.dumps({"what": what, "blocks": 131, "manthan": manthan} | more)
    done = subprocess.run([sys.executable, SCRIPT], input=job, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report | {"log": done.stderr}


def test_a_session_returns_by_way_of_a_profile(tiny_profile: Path, tmp_path: Path) -> None:
    """Three times; its codes are as small as they should be, and as the books say."""
    found = run(["profile", "grow"], {"name": "klt-8x", "profile": str(tiny_profile)}, tmp_path)
    assert found["profile"] == Profile.load(tiny_profile).digest
    assert found["right"] == [True] * 4
    assert found["failures"] == []
    assert all(now["restored"] > 16 for now in found["rounds"])
    bf16 = 2 * 2 * 4 * 2 * 128 * 32
    for now in found["rounds"]:
        sizes = now["sizes"][1:]  # the first has exact tokens
        assert bf16 / np.mean(sizes) > 6.5
        assert now["cold_bytes"] == now["used"]


def test_a_profile_is_made_of_traffic_and_used_at_once(tmp_path: Path) -> None:
    """Codes of before are read as they were written, codes of after by the profile; all answers are right."""
    found = run(["calibrate"], {"name": "auto"}, tmp_path, calibration_tokens=0)
    made = found["calibrated"]
    assert made["first"] != made["later"]
    assert made["marks"][-1] == [made["later"]]
    assert made["marks"][0] == [made["first"]]
    assert all(found["right"])
    assert found["failures"] == []
    assert min(made["restored"]) > 16
    profile = Profile.load(Path(made["path"]))
    assert list(profile.info.ratios) == ["klt-6x"]
    assert (profile.info.text, profile.info.metric) == ("traffic", "none")
    assert profile.info.tokens >= 8 * 256
    said = [line for line in found["log"].splitlines() if "made a profile of" in line]
    assert len(said) == 1
    assert "blocks are encoded with it from now on" in said[0]
