"""Exact copies in a real engine: which blocks come back bit for bit, what they take, and what goes first."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "exact_sessions.py"
CODE_NBYTES, PARTS = 25_760, 6
EXACT = {"sink_tokens": 4, "window_tokens": 40}  # one block of 32 tokens, and two


def run(*what: str, **manthan: Any) -> dict[str, Any]:
    """What an engine does with these jobs."""
    manthan = {"min_tokens": 64, "idle_after_s": 0.05, "sweep_interval_s": 0.05, "codec": EXACT} | manthan
    job = {"what": what, "blocks": 131, "manthan": manthan}
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT], input=json.dumps(job), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def roomy() -> dict[str, Any]:
    return run("grow", "prefetch", "damage", cold_store={"max_bytes": "64MiB"})


@pytest.fixture(scope="module")
def crowded() -> dict[str, Any]:
    """Room for five sessions and a half without their copies, and for not quite three with them."""
    return run("crowd", cold_store={"max_bytes": 100 * CODE_NBYTES})


def exact_of(blocks: int) -> list[int]:
    return [0, blocks - 2, blocks - 1]


def test_the_first_and_the_last_blocks_come_back_bit_for_bit(roomy: dict[str, Any]) -> None:
    first = roomy["rounds"][0]
    blocks = len(first["same"])
    assert first["restored"] == blocks > 16
    assert [depth for depth, same in enumerate(first["same"]) if same] == exact_of(blocks) == first["copies"]


def test_the_window_moves_as_the_session_grows(roomy: dict[str, Any]) -> None:
    """What has fallen out of it comes back as its codes say, and is the same from then on."""
    for last, now in zip(roomy["rounds"], roomy["rounds"][1:], strict=False):
        old, blocks = len(last["same"]), len(now["same"])
        assert now["restored"] == blocks >= old + 4
        assert now["copies"] == exact_of(blocks)
        decoded = [*range(old - 2, blocks - 2)]
        assert [depth for depth, same in enumerate(now["same"]) if not same] == decoded


def test_copies_are_part_of_what_is_stored(roomy: dict[str, Any]) -> None:
    for now in roomy["rounds"]:
        assert now["exact_blocks"] == 3
        assert now["cold_bytes"] == now["store"] == (len(now["same"]) + 3 * PARTS) * CODE_NBYTES


def test_what_is_damaged_or_lost_comes_back_as_its_codes_say(roomy: dict[str, Any]) -> None:
    assert roomy["failures"] == ["checksum", "missing"]
    blocks = len(roomy["same"])
    assert [depth for depth, same in enumerate(roomy["same"]) if same] == [blocks - 2] == roomy["copies"]
    assert roomy["parts"] == [PARTS * (depth == blocks - 2) for depth in range(blocks)]


def test_a_prefetched_session_is_exact_in_the_same_places(roomy: dict[str, Any]) -> None:
    blocks = len(roomy["prefetched"])
    assert blocks > 16
    assert [depth for depth, same in enumerate(roomy["prefetched"]) if same] == exact_of(blocks)


def test_every_answer_is_right(roomy: dict[str, Any], crowded: dict[str, Any]) -> None:
    assert len(roomy["right"]) == 7
    assert len(crowded["right"]) == 12
    assert all(roomy["right"] + crowded["right"])


def test_copies_go_before_any_codes_the_oldest_first(crowded: dict[str, Any]) -> None:
    kept = [[depths for depths in now["copies"].values() if depths] for now in crowded["rounds"]]
    assert kept == [
        [[0, 16, 17]],
        [[0, 16, 17], [0, 16, 17]],
        [[0], [0, 16, 17], [0, 16, 17]],  # its sink goes last
        [[0], [0, 16, 17]],
        [[0]],
        [],
        [],
        [],
    ]
    for number, now in enumerate(crowded["rounds"]):
        assert now["peak"] <= 100 * CODE_NBYTES
        lost = (number + 1) * 18 - sum(now["chains"].values())
        assert not (lost and now["exact_blocks"]), "codes were dropped while there were copies"
