"""The CPU's kernels are compiled by one process and found by the next."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = """
import sys
from manthan.codec import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.model import ModelFacts
from profiles import HEADS, HEAD_DIM, LAYERS, ROPE, built
BlockFormat("wht-5x", BlockShape(2, 8, 16, 128, Dtype.BFLOAT16), bytes(16)).warm_up()
shape = BlockShape(LAYERS, HEADS, 16, HEAD_DIM, Dtype.BFLOAT16)
BlockFormat("klt-8x", shape, bytes(16), facts=ModelFacts(ROPE, built())).warm_up()
from manthan.codec.cpu import numba_kernels
found = [f for f in vars(numba_kernels).values() if hasattr(f, "stats") and f.signatures]
print(sum(sum(f.stats.cache_misses.values()) for f in found), len(found))
"""


@pytest.mark.slow
def test_what_one_process_compiles_the_next_one_loads(tmp_path: Path) -> None:
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "manthan.codec.cpu.precompile", "BFLOAT16", "wht-5x", "wht-4x", "klt-8x"]
    subprocess.run(command, env=env, check=True)
    said = subprocess.run([sys.executable, "-c", COMPILED], env=env, check=True, capture_output=True, text=True).stdout
    misses, kernels = map(int, said.split())
    assert misses == 0
    assert kernels > 1
