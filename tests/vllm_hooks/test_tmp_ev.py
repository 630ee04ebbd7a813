import sys,tempfile
sys.path.insert(0,'/tmp/wt/heart/tests/vllm_hooks')
import test_events as t
from pathlib import Path
import pytest
@pytest.mark.parametrize("seed",[1,2,3])
def test_it(seed,tmp_path):
    with tempfile.TemporaryDirectory(prefix="events-", dir="/tmp") as f:
        got = t.live(f, seed, t.on_disk(tmp_path))
        print(seed, got["came"], len(got["last"]))
